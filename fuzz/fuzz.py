# ruff: noqa: INP001 - a script
"""Fuzz one target, guided by coverage.

    python fuzz/fuzz.py TARGET [libFuzzer's options, such as -max_total_time=60]

Starts from fuzz/corpus/TARGET and adds to build/fuzz/TARGET what reaches new code. An input that breaks the program is written to
build/fuzz/TARGET-crash-*: once mended, it belongs into the corpus, which the test suite replays. `make fuzz` runs each target for a while.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["exporter"]):
    from targets import TARGETS

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "fuzz"


def main() -> int:
    """Fuzz until told to stop; the process ends with libFuzzer's exit status."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in TARGETS:
        print(f"fuzz.py: name one of {', '.join(TARGETS)}", file=sys.stderr)  # noqa: T201
        return 2
    name, options = arguments[0], arguments[1:]
    found = BUILD / name
    found.mkdir(parents=True, exist_ok=True)
    command = [sys.argv[0], f"-artifact_prefix={BUILD / name}-", *options, str(found), str(HERE / "corpus" / name)]
    atheris.Setup(command, TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
