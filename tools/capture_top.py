"""Writes docs/captures: what fgpu-top shows of the demo at 2:20 of its story, in a terminal of 80 and of 200 columns, once, and in a pipe.

The exporter is the real one behind its own HTTP server, on a simulated clock that stands still; so is what fgpu-top takes for the time.
"""

import contextlib
import fcntl
import io
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pyte
from rich.console import Console

from exporter import simulated
from exporter.commands.top_rows import Choice, choose, parse_node
from exporter.commands.top_table import Style, draw
from exporter.config import parse_config
from exporter.daemon import about
from exporter.endpoints import build_routes
from exporter.node_json import Json, build_node
from exporter.server import Server
from exporter.simulation import DEMO, SimulatedClock, SimulatedNode, load_scenario

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "captures"
AT_SECONDS = 140
AGE_SECONDS = 2

# fgpu-top at one moment for ever.
_STILL = """
import sys
from exporter.clock import SystemClock
from exporter.commands.top import main

class StillClock(SystemClock):
    def time(self):
        return float(sys.argv[1])

sys.exit(main(sys.argv[2:], StillClock()))
"""
# The child of a terminal has that terminal for its own, so that Ctrl-C reaches it.
_ON_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


@contextlib.contextmanager
def exporter_at(seconds: int, scenario: Path = DEMO) -> Iterator[tuple[str, float, Json]]:
    """Run an exporter whose scenario stands still at a moment; answer its URL, the time of its sample, and the JSON of its node."""
    config = parse_config(["--demo"], {})
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(scenario), clock))
        sampler = simulated.wire(config, node, clock, stack)
        for second in range(0, seconds + 1, 5):
            simulated.sample_at(node, sampler, second)
        said = about(config, node.name)
        server = Server(address="127.0.0.1", port=0, routes=build_routes(sampler, said))
        server.start()
        stack.callback(server.close)
        yield f"http://127.0.0.1:{server.port}", clock.time(), build_node(said, sampler.exposition.health, sampler.exposition.report)


def command(sample_seconds: float, *arguments: str) -> list[str]:
    """Answer the command that runs fgpu-top some seconds after the sample, and for ever so."""
    return [sys.executable, "-c", _STILL, str(sample_seconds + AGE_SECONDS), *arguments]


def environment(**more: str) -> Mapping[str, str]:
    """Answer an environment that says nothing of a terminal but what is given."""
    silent = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"}
    return {name: value for name, value in os.environ.items() if name not in silent} | {"TERM": "xterm-256color", "PYTHONUTF8": "1", **more}


class Terminal:
    """A program in a terminal of its own, and what stands on its screen."""

    def __init__(self, arguments: Sequence[str], width: int, height: int, **more: str) -> None:
        """Start it."""
        self._ours, self._theirs = os.openpty()
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self.sent = b""
        """All that the program wrote."""
        self._set_size(width, height)
        self.settings_before = termios.tcgetattr(self._theirs)
        self.process = subprocess.Popen(  # noqa: S603 - the caller's own program
            [sys.executable, "-c", _ON_TERMINAL, *arguments],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
            env=environment(**more),
        )

    @property
    def settings(self) -> list[object]:
        """How the terminal is set now."""
        return termios.tcgetattr(self._theirs)

    @property
    def text(self) -> str:
        """The screen, without blanks at the ends of lines."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def _set_size(self, width: int, height: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def resize(self, width: int, height: int) -> None:
        """Give it another size, of which the program is told by a signal."""
        self.screen.resize(height, width)
        self._set_size(width, height)

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def read(self, seconds: float) -> bool:
        """Take what the program writes next within a time; answer whether it wrote."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        written = os.read(self._ours, 65536)
        self.sent += written
        self._stream.feed(written)
        return True

    def wait_for(self, *texts: str, seconds: float = 30) -> str:
        """Wait until all of this stands on the screen; answer the screen. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while not all(text in self.text for text in texts):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{texts} does not stand on the screen:\n{self.text}")
            self.read(0.05)
        while self.read(0.1):  # what was found may be a part of a picture that is still being drawn
            pass
        return self.text

    def wait_for_end(self, seconds: float = 30) -> int:
        """Wait until the program has ended and all that it wrote is read; answer its exit status. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running:\n{self.text}")
            self.read(0.05)
        while self.read(0.05):
            pass
        return self.process.returncode

    def hang_up(self) -> None:
        """Take the terminal away from the program."""
        self._ours, ours = -1, self._ours
        os.close(ours)

    def close(self) -> None:
        """End the program, if it has not ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        if self._ours >= 0:
            self.hang_up()
        os.close(self._theirs)


def capture_live(arguments: Sequence[str], width: int, height: int) -> str:
    """Answer the first screen of the live view."""
    with contextlib.closing(Terminal(arguments, width, height)) as terminal:
        text = terminal.wait_for("sampled", "q quit")
        terminal.press("q")
        terminal.wait_for_end()
    return text + "\n"


def capture_once(arguments: Sequence[str], width: int) -> str:
    """Answer what is printed on a terminal, which is high enough for all of it."""
    with contextlib.closing(Terminal(arguments, width, 60)) as terminal:
        terminal.wait_for_end()
        return terminal.text.rstrip("\n") + "\n"


def capture_pipe(arguments: Sequence[str]) -> str:
    """Answer what is written into a pipe."""
    return subprocess.run(arguments, env=environment(), capture_output=True, text=True, check=True).stdout  # noqa: S603 - likewise


def capture_texts(url: str, sample_seconds: float) -> dict[str, str]:
    """Answer the text of each file by its name."""
    run = command(sample_seconds, "--url", url)
    return {
        "top-80.txt": capture_live(run, 80, 24),
        "top-200.txt": capture_live(run, 200, 30),
        "top-once.txt": capture_once([*run, "--once", "--by", "namespace"], 100),
        "top-pipe.txt": capture_pipe(run),
    }


def render_picture(answer: Json, sample_seconds: float) -> str:
    """Answer the table as an SVG picture."""
    view = parse_node(answer)
    console = Console(record=True, file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor", highlight=False)
    console.print(draw(view, choose(view, Choice()), Style(width=100), now_seconds=sample_seconds + AGE_SECONDS))
    # Rich would have every reader's browser fetch a font from elsewhere.
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="fgpu-top", unique_id="fgpu-top"), flags=re.DOTALL)


def main() -> int:
    """Write the files; answer the exit status."""
    FOLDER.mkdir(exist_ok=True)
    with exporter_at(AT_SECONDS) as (url, sample_seconds, answer):
        for name, text in capture_texts(url, sample_seconds).items():
            (FOLDER / name).write_text(text)
        (FOLDER / "top.svg").write_text(render_picture(answer, sample_seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
