"""What a person runs beside the daemon: each command is a file of its own, with a `main(arguments)` that answers the exit status.

None of them reads a GPU. They ask a running exporter, or a Prometheus that scrapes exporters, over HTTP.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module

COMMANDS: Mapping[str, str] = {
    "advise": "exporter.commands.advise",
    "explain": "exporter.commands.explain",
    "top": "exporter.commands.top",
}
"""Command -> the module that is its `main`. Modules are loaded when they are asked for: the daemon pays for none of them."""


def run(command: str, arguments: Sequence[str]) -> int:
    """Run a command of COMMANDS; answer its exit status."""
    status: int = import_module(COMMANDS[command]).main(arguments)
    return status
