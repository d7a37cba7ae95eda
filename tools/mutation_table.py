"""Writes what came of `make mutation` as a table: for each file how many changes there were, and how many the tests did not notice.

    python tools/mutation_table.py build/mutation/mutants

What survived is shown by `mutmut results` and `mutmut show NAME`, in build/mutation.
"""

import json
import sys
from collections import Counter
from pathlib import Path

_OUTCOMES = {0: "survived", 5: "not tested", 33: "not tested", None: "not run"}
_COLUMNS = ("killed", "survived", "not tested", "not run")


def count(meta: Path) -> Counter[str]:
    """Answer the outcomes of one file's mutants, from what mutmut keeps: a test that failed, and a time-out, notice the change."""
    codes = json.loads(meta.read_text())["exit_code_by_key"].values()
    return Counter(_OUTCOMES.get(code, "killed") for code in codes)


def main() -> None:
    """Print the table."""
    mutants = Path(sys.argv[1])
    rows = {meta.relative_to(mutants).with_suffix(""): count(meta) for meta in sorted(mutants.rglob("*.py.meta"))}
    print(f"| file | mutants | {' | '.join(_COLUMNS)} |")  # noqa: T201 - the result
    print(f"|---|---|{'---|' * len(_COLUMNS)}")  # noqa: T201 - likewise
    for name, outcomes in rows.items():
        if outcomes:
            print(f"| `{name}` | {outcomes.total()} | {' | '.join(str(outcomes[column]) for column in _COLUMNS)} |")  # noqa: T201 - likewise


if __name__ == "__main__":
    main()
