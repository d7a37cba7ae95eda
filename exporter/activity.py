"""What a container or pod did on one GPU over time: counters, peaks and means over a window. Pure: state in, state out."""

from dataclasses import dataclass, replace
from itertools import dropwhile

from exporter.usage import IDLE, BusySeconds


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds of SM time between two readings, on the monotonic clock."""

    start_seconds: float
    end_seconds: float
    sm_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What is remembered of one container (or pod) on one GPU."""

    memory_used_peak_bytes: int | None = None
    busy_total: BusySeconds | None = None
    """None: the driver never told."""
    intervals: tuple[Interval, ...] = ()
    """The oldest first; no longer than the longest window."""

    def mean_sm_ratio(self, now_seconds: float, window_seconds: float) -> float | None:
        """Answer the mean share of time over the last window, or over what is known of it; None where nothing is known."""
        covered, busy = self._over(now_seconds, window_seconds)
        return busy / covered if covered > 0 else None

    def full_window_sm_ratio(self, now_seconds: float, window_seconds: float) -> float | None:
        """Answer the mean share of time over the last window; None unless all of it is known."""
        covered, busy = self._over(now_seconds, window_seconds)
        tolerance_seconds = 1e-6
        return busy / covered if covered >= window_seconds - tolerance_seconds else None

    def known_seconds(self, now_seconds: float, window_seconds: float) -> float:
        """Answer how much of the last window is known."""
        return self._over(now_seconds, window_seconds)[0]

    def _over(self, now_seconds: float, window_seconds: float) -> tuple[float, float]:
        covered = busy = 0.0
        start_seconds = now_seconds - window_seconds
        for interval in reversed(self.intervals):
            overlap = interval.end_seconds - max(interval.start_seconds, start_seconds)
            if overlap <= 0:
                break
            covered += overlap
            busy += interval.sm_seconds * (overlap / (interval.end_seconds - interval.start_seconds))
        return covered, busy


NO_ACTIVITY = Activity()


def add_memory(activity: Activity, memory_used_bytes: int | None) -> Activity:
    """Answer the activity with its peak raised to this use, in bytes; unknown use raises nothing."""
    if memory_used_bytes is None:
        return activity
    if activity.memory_used_peak_bytes is not None and memory_used_bytes <= activity.memory_used_peak_bytes:
        return activity
    return replace(activity, memory_used_peak_bytes=memory_used_bytes)


def add_busy(activity: Activity, busy: BusySeconds, *, start_seconds: float | None, end_seconds: float, keep_seconds: float) -> Activity:
    """Answer the activity after an interval; without a start (the first reading) only the counters can know of it."""
    kept = tuple(dropwhile(lambda interval: interval.end_seconds <= end_seconds - keep_seconds, activity.intervals))
    if start_seconds is not None and start_seconds < end_seconds:
        kept = (*kept, Interval(start_seconds, end_seconds, busy.sm))
    return Activity(
        memory_used_peak_bytes=activity.memory_used_peak_bytes,
        busy_total=(activity.busy_total or IDLE) + busy,
        intervals=kept,
    )
