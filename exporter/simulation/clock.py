"""A clock that stands still until it is moved: minutes of a simulated node pass in a moment, and always in the same way."""

import threading
from datetime import UTC, datetime

START_SECONDS = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""The wall clock when a scenario starts: 2026-01-01T00:00:00Z."""

# An event that another thread sets does not wake a waiter here: it is looked at so often.
_LOOK_SECONDS = 0.02


class SimulatedClock:
    """Time that one thread moves and others wait for. The thread that moves it must not wait for it."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._seconds = 0.0
        self._deadlines: dict[threading.Thread, float] = {}

    def time(self) -> float:
        """Answer the simulated wall clock, in seconds since the epoch."""
        return START_SECONDS + self._seconds

    def monotonic(self) -> float:
        """Answer the simulated seconds since the start."""
        return self._seconds

    def wait(self, event: threading.Event, timeout_seconds: float) -> bool:
        """Wait until the event is set or simulated time has passed; answer whether the event is set."""
        thread = threading.current_thread()
        with self._moved:
            deadline = self._seconds + max(timeout_seconds, 0.0)
            self._deadlines[thread] = deadline
            try:
                while not event.is_set() and self._seconds < deadline:
                    self._moved.wait(_LOOK_SECONDS)
            finally:
                del self._deadlines[thread]
        return event.is_set()

    def advance_to(self, seconds: float) -> None:
        """Move the clock to so many seconds after the start, and wake those whose time has come. It never goes back."""
        with self._moved:
            self._seconds = max(self._seconds, seconds)
            self._moved.notify_all()

    def is_waiting(self, thread: threading.Thread) -> bool:
        """Answer whether a thread sleeps until a later time."""
        with self._moved:
            return self._deadlines.get(thread, float("-inf")) > self._seconds

    def next_deadline(self) -> float | None:
        """Answer the earliest later time for which a thread waits, in seconds after the start."""
        with self._moved:
            return min((deadline for deadline in self._deadlines.values() if deadline > self._seconds), default=None)
