"""The live view: one thread asks the exporter, another draws and obeys keys and signals. The terminal is left as it was found.

Signals and answers wake the loop by a byte in a pipe, so that nothing happens inside of a signal's handler.
"""

import contextlib
import errno
import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType, ScreenContext
from rich.text import Text

from exporter.clock import Clock
from exporter.commands.client import printable
from exporter.commands.top_keys import Keyboard, State, press
from exporter.commands.top_rows import View, choose
from exporter.commands.top_table import Picture, Style, draw_screen, why_no_rows
from exporter.commands.top_text import Glyphs
from exporter.waker import Waker

_TICK_SECONDS = 1.0
"""The age of the sample is drawn anew so often."""
_RETRY_SECONDS = 5.0
"""Where no answer has ever said how often the node is sampled."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the exporter last said, or why it said nothing: one of them."""

    view: View | None = None
    problem: str = ""


class Poller:
    """Asks again and again, on a thread of its own: a connection that hangs holds up no key."""

    def __init__(self, ask: Callable[[], Answer], clock: Clock, interval_seconds: float | None, wake: Callable[[], None]) -> None:
        """`interval_seconds` None: as often as the node is sampled."""
        self.answer: Answer | None = None
        """None: the first is not there yet."""
        self.pause_seconds = interval_seconds or _RETRY_SECONDS
        self._ask = ask
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._wake = wake
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)

    def start(self) -> None:
        """Ask for the first time."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more. A request that is under way is not waited for."""
        self._stop.set()

    def _run(self) -> None:
        while True:
            answer = self._ask()
            if self._stop.is_set():
                return
            if answer.view and not self._interval_seconds:
                self.pause_seconds = answer.view.sample_interval_seconds or _RETRY_SECONDS
            self.answer = answer
            self._wake()
            if self._clock.wait(self._stop, self.pause_seconds):
                return


class Screen:
    """Draws what the state asks for, as large as the terminal is now."""

    def __init__(self, console: Console, clock: Clock, glyphs: Glyphs, url: str) -> None:
        self._console = console
        self._clock = clock
        self._glyphs = glyphs
        self._url = url

    def draw(self, answer: Answer | None, state: State, pause_seconds: float) -> Picture:
        """Answer the whole screen."""
        width, height = self._console.size
        style = Style(width=width, glyphs=self._glyphs, containers=state.containers)
        height = max(2, height - 1)  # the line of keys
        if answer is None:
            return self._message(f"asking {printable(self._url)} ...", state, height)
        if answer.view is None:
            return self._message(f"{answer.problem}\n\nasking again every {pause_seconds:g} s", state, height)
        rows = choose(answer.view, state.choice)
        if answer.view.rows and not rows:
            return self._message(why_no_rows(answer.view, state.choice), state, height)
        picture = draw_screen(answer.view, rows, style, now_seconds=self._clock.time(), height=height, first=state.first)
        return Picture(content=Group(picture.content, self._keys(state, picture)), rows=picture.rows, room=picture.room)

    def _message(self, message: str, state: State, height: int) -> Picture:
        width = self._console.size.width
        lines = Text(message).wrap(self._console, width)[:height]
        filling: list[RenderableType] = [Text("")] * (height - len(lines))
        none = Picture(content=Text(""), rows=0, room=0)
        return Picture(content=Group(*lines, *filling, self._keys(state, none)), rows=0, room=0)

    def _keys(self, state: State, picture: Picture) -> Text:
        choice = state.choice
        if state.typing:
            return Text(f"filter: {choice.filter}_  (enter keeps it, esc clears it)", "bold", no_wrap=True, overflow="ellipsis")
        parts = ["q quit", f"s sort:{choice.sort}", f"g by:{choice.by}", f"/ filter:{choice.filter}" if choice.filter else "/ filter"]
        if picture.rows > picture.room:
            first = min(state.first, picture.rows - picture.room)
            parts.insert(0, f"{first + 1}-{first + picture.room} of {picture.rows}")
        parts.append("c containers")
        return Text("  ".join(parts), "reverse", no_wrap=True, overflow="ellipsis")


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH, signal.SIGTSTP)


def _suspend() -> None:
    """Stop this process, as Ctrl-Z asks for; it comes back when the shell lets it go on."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


@contextlib.contextmanager
def _keys_one_by_one(terminal: int | None) -> Iterator[None]:
    """Let the terminal hand over each key as it is pressed, without showing it."""
    if terminal is None:
        yield
        return
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


class LiveView:
    """The loop."""

    def __init__(self, screen: Screen, poller: Poller, waker: Waker, state: State, terminal: int | None) -> None:
        """`terminal` is where keys come from; None: from nowhere."""
        self._screen = screen
        self._poller = poller
        self._waker = waker
        self._state = state
        self._terminal = terminal
        self._keyboard = Keyboard()

    def run(self, console: Console) -> None:
        """Show the node until the person or a signal ends it."""
        while not self._state.leaving:
            with _keys_one_by_one(self._terminal), console.screen(hide_cursor=True) as alternate:
                signals = self._until_terminal_is_given_back(alternate)
            if signal.SIGTSTP in signals:
                _suspend()

    def _until_terminal_is_given_back(self, alternate: ScreenContext) -> frozenset[int]:
        waited_for = [self._waker.reader] + ([] if self._terminal is None else [self._terminal])
        while True:
            picture = self._screen.draw(self._poller.answer, self._state, self._poller.pause_seconds)
            alternate.update(picture.content)
            ready, _, _ = select.select(waited_for, [], [], _TICK_SECONDS)
            if self._terminal in ready:
                self._obey(picture)
            signals = self._waker.read() if self._waker.reader in ready else frozenset[int]()
            if signals & {signal.SIGINT, signal.SIGTERM}:
                self._state = replace(self._state, leaving=True)
            if self._state.leaving or signal.SIGTSTP in signals:
                return signals

    def _obey(self, picture: Picture) -> None:
        try:
            sent = os.read(self._terminal or 0, 1024)
        except OSError:  # the terminal is gone, and no one is left to show anything to
            sent = b""
        if not sent:
            self._state = replace(self._state, leaving=True)
        for key in self._keyboard.keys(sent):
            self._state = press(self._state, key, rows=picture.rows, room=picture.room)
            if self._state.leaving:
                return


def run_live(
    ask: Callable[[], Answer], console: Console, screen: Screen, clock: Clock, state: State, interval_seconds: float | None
) -> int:
    """Show the node until the person or a signal ends it; answer the exit status."""
    terminal = 0 if os.isatty(0) else None
    with contextlib.closing(Waker(_SIGNALS)) as waker:
        poller = Poller(ask, clock, interval_seconds, waker.wake)
        poller.start()
        try:
            LiveView(screen, poller, waker, state, terminal).run(console)
        except (OSError, termios.error) as error:
            if error.args[0] != errno.EIO:
                raise
            # The terminal is gone. The signal that says so may come after a write has failed, and ends the program.
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            poller.stop()
    return 0
