"""`fgpu-exporter explain TARGET`: why a running exporter says what it says of a pod or a GPU, in sentences or as JSON."""

import argparse
import io
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from exporter.commands.client import ClientError, add_arguments, client_of, printable

_MOST_COLUMNS = 120
"""Longer lines are hard to read; so wide too where there is no terminal."""
_LEAST_COLUMNS = 40
_MAX_SENTENCE_CHARACTERS = 10_000
_EXIT_USAGE = 2


def main(arguments: Sequence[str]) -> int:
    """Explain one pod or GPU on standard output; answer the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        client = client_of(parsed)
    except ClientError as error:
        return _fail(error, _EXIT_USAGE)
    try:
        explanation = client.explain(**{"gpu" if parsed.target.startswith(("GPU-", "MIG-")) else "pod": parsed.target})
    except ClientError as error:
        return _fail(error, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name may hold what the terminal's encoding has no letter for
    columns = max(_LEAST_COLUMNS, min(shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns, _MOST_COLUMNS))
    sys.stdout.write(json.dumps(explanation, indent=2) + "\n" if parsed.json else render(explanation, columns))
    return 0


def _fail(error: ClientError, status: int) -> int:
    sys.stderr.write(f"fgpu-exporter explain: {error}\n")
    return status


def render(explanation: dict[str, Any], columns: int = _MOST_COLUMNS) -> str:
    """Answer the sentences as they are read on a terminal: the one that names the cause, then the evidence."""
    lines = _wrapped(explanation["summary"], columns, "", "")
    for section in explanation["sections"]:
        lines += ["", printable(section["title"])]
        for sentence in section["sentences"]:
            lines += _wrapped(sentence, columns, "  ", "    ")
    return "\n".join(lines) + "\n"


def _wrapped(sentence: str, columns: int, first: str, others: str) -> list[str]:
    # A uuid is one word: it is never broken.
    return textwrap.wrap(
        printable(sentence, _MAX_SENTENCE_CHARACTERS),
        columns,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fgpu-exporter explain",
        description="Say why the exporter of a node says what it says of a pod or a GPU: processes, claims with their arithmetic, limits, "
        "and what is not known.",
        epilog="Exit status: 0; 2 for an argument that cannot be used; 1 for anything else that prevents an answer.",
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="NAMESPACE/POD | GPU-UUID", help="a pod (its name alone where it is the only one), or a GPU")
    parser.add_argument("--json", action="store_true", help="print the JSON of /api/v1/explain")
    add_arguments(parser)
    return parser
