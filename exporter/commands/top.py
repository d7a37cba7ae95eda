"""`fgpu-top`: a table of the pods on a node's GPUs, kept up to date in a terminal.

Into a pipe or file, on a terminal that is `dumb`, and with --once it prints the table once, as lines.

Exit status: 0; 2 for a flag that cannot be used; 1 where the exporter cannot be asked or has no answer, or nothing matches.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Sequence

from rich.console import Console

from exporter import __version__
from exporter.clock import Clock, SystemClock
from exporter.commands.client import ClientError, ExporterClient, add_arguments, client_of, printable
from exporter.commands.top_keys import State
from exporter.commands.top_live import Answer, Screen, run_live
from exporter.commands.top_rows import AnswerError, By, Choice, Sort, build_json, choose, parse_node
from exporter.commands.top_table import Style, draw, why_no_rows
from exporter.commands.top_text import ASCII, UNICODE, Glyphs

_WIDER_THAN_ANY_TABLE = 10_000


def main(arguments: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Run the command; answer its exit status."""
    parsed = make_parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    clock = clock or SystemClock()
    try:
        client = client_of(parsed)
    except ClientError as error:
        return _fail(str(error), status=2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name may hold what the terminal's encoding has no letter for
    console = _console(parsed, width=None)
    # Rich takes a pipe for a terminal where the environment says so, for the sake of colours; keys and a screen it has not.
    can_be_kept_up_to_date = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
    if parsed.once or parsed.json or not can_be_kept_up_to_date:
        return _print_once(client, parsed, clock)
    state = State(choice=_choice(parsed), containers=parsed.containers)
    screen = Screen(console, clock, _glyphs(), client.url)
    return run_live(lambda: ask(client), console, screen, clock, state, parsed.interval_seconds)


def make_parser() -> argparse.ArgumentParser:
    """Answer the parser of the flags."""
    parser = argparse.ArgumentParser(
        prog="fgpu-top",
        description="Shows which pods use a node's GPUs, how much each was given and whether it takes more, and keeps it up to date.",
        epilog="In the live view: q quits, s sorts by the next thing, g adds up by the next thing, / filters, c shows or hides containers, "
        "arrows and page keys scroll.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fgpu-top {__version__}")
    add_arguments(parser)
    parser.add_argument(
        "--interval-seconds",
        type=_interval,
        metavar="SECONDS",
        help="how often to ask, 0.5 to 3600 (default: as often as the node is sampled)",
    )
    parser.add_argument("--sort", choices=[each.value for each in Sort], default=Sort.OVER.value, help="what stands first (default: over)")
    parser.add_argument(
        "--by", choices=[each.value for each in By], default=By.NONE.value, help="add the rows up by GPU, namespace or pod (default: none)"
    )
    parser.add_argument(
        "--filter",
        default="",
        metavar="TEXT",
        help="only rows with this in namespace/pod/container or the GPU's uuid, or of the GPU of this index",
    )
    parser.add_argument("--namespace", help="only pods of this namespace")
    parser.add_argument(
        "--containers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show containers: in their pod's row, several of a pod in rows of their own (default: yes)",
    )
    parser.add_argument("--once", action="store_true", help="print the table once and exit; so it does into a pipe and on a dumb terminal")
    parser.add_argument("--json", action="store_true", help="print the rows once as JSON, in the words of the metrics")
    parser.add_argument("--no-color", action="store_true", help="no colours; NO_COLOR in the environment does the same")
    return parser


def _interval(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and 0.5 <= seconds <= 3600):  # noqa: PLR2004 - the help says it
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0.5 to 3600")
    return seconds


def ask(client: ExporterClient) -> Answer:
    """Answer the node as the exporter says it is, or a sentence that says why there is none."""
    try:
        return Answer(view=parse_node(client.node()))
    except ClientError as error:
        return Answer(problem=str(error))
    except AnswerError as error:
        return Answer(
            problem=f"the exporter at {client.url} answers in a form that fgpu-top {__version__} cannot read ({printable(str(error))}): "
            "use the fgpu-top of the exporter's own version"
        )


def _print_once(client: ExporterClient, parsed: argparse.Namespace, clock: Clock) -> int:
    answer, choice = ask(client), _choice(parsed)
    if answer.view is None:
        return _fail(answer.problem)
    view = answer.view
    rows = choose(view, choice)
    if view.rows and not rows:
        return _fail(why_no_rows(view, choice))
    if parsed.json:
        return _write(json.dumps(build_json(view, rows, containers=parsed.containers), indent=2) + "\n")
    width = None
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        width = shutil.get_terminal_size().columns
    console = _console(parsed, width or _WIDER_THAN_ANY_TABLE)
    style = Style(width=width, glyphs=_glyphs(), containers=parsed.containers)
    with console.capture() as captured:
        console.print(draw(view, rows, style, now_seconds=clock.time()))
    return _write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))


def _choice(parsed: argparse.Namespace) -> Choice:
    return Choice(sort=Sort(parsed.sort), by=By(parsed.by), filter=parsed.filter, namespace=parsed.namespace)


def _console(parsed: argparse.Namespace, width: int | None) -> Console:
    # None leaves it to NO_COLOR.
    return Console(width=width, no_color=True if parsed.no_color else None, markup=False, emoji=False, highlight=False)


def _glyphs() -> Glyphs:
    return UNICODE if "utf" in (sys.stdout.encoding or "").lower() else ASCII


def _write(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads it has seen enough, like `head`; nothing more is to be written at the end either
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _fail(message: str, status: int = 1) -> int:
    sys.stderr.write(f"fgpu-top: {message}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
