"""How the exporter itself is doing: immutable values that the sampler publishes beside each report."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SAMPLE_DURATION_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHealth:
    """How one source is doing."""

    source: str
    up: bool
    """Whether the last attempt to read it succeeded."""
    reason: str | None = None
    """Why it is down, for a person."""
    read_duration_seconds: float | None = None
    errors_total: int = 0
    last_success_timestamp_seconds: float | None = None
    """Wall clock, seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observations in cumulative-ready buckets: one count for each bound of SAMPLE_DURATION_BUCKETS_SECONDS and one above."""

    counts: tuple[int, ...] = (0,) * (len(SAMPLE_DURATION_BUCKETS_SECONDS) + 1)
    sum_seconds: float = 0.0

    def observe(self, seconds: float) -> "Histogram":
        """Answer the histogram with one more observation."""
        index = sum(seconds > bound for bound in SAMPLE_DURATION_BUCKETS_SECONDS)
        counts = tuple(count + (position == index) for position, count in enumerate(self.counts))
        return Histogram(counts=counts, sum_seconds=self.sum_seconds + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsHealth:
    """How many Kubernetes Events were written, and how many were not."""

    written_total: int = 0
    dropped_total: Mapping[str, int] = field(default_factory=dict)
    """By every reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How the exporter is doing."""

    sources: tuple[SourceHealth, ...] = ()
    samples_total: int = 0
    last_sample_timestamp_seconds: float | None = None
    sample_duration: Histogram = Histogram()
    events: EventsHealth | None = None
    """None: none are to be written."""
