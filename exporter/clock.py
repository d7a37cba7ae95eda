"""Time as a value that is handed in, so that a simulated node can play minutes in a moment.

Nothing else in the program reads a clock or sleeps.
"""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What the sampler and the sources ask of time."""

    def time(self) -> float:
        """Answer the wall clock, in seconds since the epoch; it may jump."""
        ...

    def monotonic(self) -> float:
        """Answer seconds since some fixed moment; it never goes back."""
        ...

    def wait(self, event: threading.Event, timeout_seconds: float) -> bool:
        """Wait until the event is set or the time is over; answer whether the event is set."""
        ...


class SystemClock:
    """The machine's own time."""

    def time(self) -> float:
        """Answer the wall clock, in seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Answer the monotonic clock, in seconds."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_seconds: float) -> bool:
        """Wait until the event is set or the time is over; answer whether the event is set."""
        return event.wait(timeout_seconds)
