"""Writes the table of docs/reliability.md from what tests/test_faults.py measured.

    python tools/write_reliability.py RESULTS.xml

RESULTS.xml is what `pytest --junitxml` writes; each test's properties are one row.
"""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

DOCUMENT = Path(__file__).parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
HEAD = "| fault | what is still served | noticed after | whole again after | test |\n|---|---|---|---|---|\n"


def render_rows(results: Path) -> str:
    """Answer the table's rows. Raises SystemExit where a test did not pass or measured nothing."""
    rows = []
    for case in ET.parse(results).getroot().iter("testcase"):  # noqa: S314 - our own test run wrote it
        said = {found.get("name"): found.get("value") or "" for found in case.iter("property")}
        if any(case.find(outcome) is not None for outcome in ("failure", "error", "skipped")) or "fault" not in said:
            raise SystemExit(f"{case.get('name')} did not pass, or did not say which fault it is: the document is left as it was")
        noticed, whole = (f"{said[key]} s" if key in said else "" for key in ("noticed_seconds", "whole_seconds"))
        test = re.sub(r"\[.*\]", "", case.get("name") or "")
        rows.append(f"| {said['fault']} | {said['still']} | {noticed} | {whole} | `{test}` |\n")
    return "".join(rows)


def main() -> None:
    """Write the table."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + BEGIN + HEAD + render_rows(Path(sys.argv[1])) + END + after)


if __name__ == "__main__":
    main()
