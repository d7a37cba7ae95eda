"""A loop that sleeps until something happens: signals and other threads wake it by a byte in a pipe.

The kernel may hand a signal to any thread, and Python runs its handler in the main one, once that one runs. A handler may also be
interrupted by the next signal's, so that a lock or a log that it held would meet itself: here a handler does nothing at all, and the number
that the interpreter writes into the pipe is what tells of the signal (https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd).
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from types import FrameType


class Waker:
    """Wakes whoever waits for `reader`, by one of the signals or from another thread. Belongs to the main thread, `wake` to any."""

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.reader, self._writer = os.pipe()
        for end in (self.reader, self._writer):
            os.set_blocking(end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # Python writes a signal's number into the pipe only where it has a handler.
        self._handlers_before = {number: signal.signal(number, _nothing) for number in signals}

    def close(self) -> None:
        """Leave signals as they were found."""
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        writer, self._writer = self._writer, -1
        os.close(writer)
        os.close(self.reader)

    def wake(self) -> None:
        """Wake the loop, from any thread."""
        with contextlib.suppress(OSError):  # so many bytes wait there that one more says nothing new, or no one waits any more
            if self._writer >= 0:
                os.write(self._writer, b"\0")

    def read(self) -> frozenset[int]:
        """Answer the signals since it was last read."""
        return frozenset(os.read(self.reader, 4096)) - {0}


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Python's own handler of SIGINT would raise wherever the program is."""
