"""The loop: reads the sources, builds a report, publishes it. The only writer; readers take one reference to immutable values.

Here, and nowhere else, stands the broad `except`: around one stage of one sample. Whatever a stage raises costs what it would have
given, is counted and shown, and is logged when the state changes. A source that failed is tried again with a growing delay, capped at 30 s.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from exporter.clock import Clock
from exporter.exposition import Exposition
from exporter.health import EventsHealth, Health, Histogram, SourceHealth
from exporter.history import begin_history
from exporter.journal import BreachChange, breach_changes, log_line
from exporter.report import NOTHING_REMEMBERED, Memory, Report, Rules, build
from exporter.series_limit import cut_to_size
from exporter.snapshot import HostfilesReading, KubeletReading, KubernetesReading, NvmlReading, ProcfsReading, Snapshot
from exporter.sources import FatalSourceError, SourceError

_log = logging.getLogger(__name__)

MAX_BACKOFF_SECONDS = 30.0
STALE_AFTER_INTERVALS = 3
KEEP_RENDERING_SECONDS = 130.0
"""For so long after a scrape the next one is prepared for: few scrape less often than once a minute."""
START_SECONDS = 5.0
START_INTERVAL_SECONDS = 0.25
"""How often is sampled at the start, for so long, until every source has answered: the first scrape is to find a whole report."""

# The label with which NVIDIA's MIG manager says how far it is, and its word for the time in which nobody may hold the driver:
# https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-operator-mig.html
_MIG_STATE_LABEL = "nvidia.com/mig.config.state"
_MIG_PENDING = "pending"

Value = TypeVar("Value")


class NvmlReader(Protocol):
    """Reads the driver."""

    def read(self) -> NvmlReading:
        """Answer what the driver says now."""
        ...

    def release(self) -> bool:
        """Let go of the driver until it is read again; answer whether that worked."""
        ...


class ProcfsReader(Protocol):
    """Reads processes."""

    def read(self, pids: Iterable[int]) -> ProcfsReading:
        """Answer the facts of these processes."""
        ...


class KubeletReader(Protocol):
    """Reads allocations."""

    def read(self) -> KubeletReading:
        """Answer what the kubelet handed out."""
        ...


class KubernetesReader(Protocol):
    """Reads pods and the Node object."""

    def read(self) -> KubernetesReading:
        """Answer what the watch last left."""
        ...

    def last_reading(self) -> KubernetesReading | None:
        """Answer what the watches left before one of them failed."""
        ...

    def pods_are_current(self) -> bool:
        """Answer whether the pods are up to date, though something else of the API may not be."""
        ...


class HostfilesReader(Protocol):
    """Reads host files."""

    def read(self, containers: Iterable[tuple[str, str]], pids: Iterable[int]) -> HostfilesReading:
        """Answer what the host's files say of these containers, (pod UID, name), and of these processes."""
        ...


class BreachTeller(Protocol):
    """Tells others of breaches. It waits for no one."""

    def tell(self, changes: Iterable[BreachChange]) -> None:
        """Take the breaches that began and ended with a report."""
        ...

    def health(self) -> EventsHealth:
        """Answer how much was told."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What is read, handed in by the caller."""

    nvml: NvmlReader
    procfs: ProcfsReader
    kubelet: KubeletReader
    kubernetes: KubernetesReader
    hostfiles: HostfilesReader | None = None
    """None: they are not to be read, and nothing is said of them."""


class _Attempts:
    """The history of one stage: when it may be tried again, and how it is doing."""

    def __init__(self, name: str, clock: Clock, interval_seconds: float, *, backs_off: bool = True) -> None:
        self.health = SourceHealth(source=name, up=False, reason="not read yet")
        self.last_success_monotonic_seconds: float | None = None
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._backs_off = backs_off
        self._failures = 0
        self._next_attempt_seconds = float("-inf")

    def attempt(self, read: Callable[[], Value]) -> Value | None:
        """Answer what the stage gives, or None where it fails or is not to be tried yet. FatalSourceError passes."""
        started = self._clock.monotonic()
        # Ticks come a little early or late: half an interval of tolerance keeps "every second tick" just that.
        if started < self._next_attempt_seconds - self._interval_seconds / 2:
            return None
        try:
            value = read()
        except FatalSourceError:
            raise
        except Exception as error:  # noqa: BLE001 - the one error boundary: whatever a stage raises costs that stage only
            self._fail(error, started)
            return None
        if not self.health.up:
            _log.info("source=%s state=up", self.health.source)
        self._failures = 0
        self._next_attempt_seconds = float("-inf")
        self.last_success_monotonic_seconds = self._clock.monotonic()
        self.health = SourceHealth(
            source=self.health.source,
            up=True,
            read_duration_seconds=self.last_success_monotonic_seconds - started,
            errors_total=self.health.errors_total,
            last_success_timestamp_seconds=self._clock.time(),
        )
        return value

    def pause(self, release: Callable[[], bool], why: str) -> None:
        """Let go of the source, for a reason that is no failure of it: nothing is counted, and the next attempt may be at once."""
        try:
            is_released = release()
        except Exception as error:  # noqa: BLE001 - as in attempt
            self._fail(error, self._clock.monotonic())
            return
        reason = f"left alone while {why}" if is_released else f"to be left alone while {why}, but a call does not return"
        if self.health.reason != reason:
            _log.info("source=%s state=paused reason=%r", self.health.source, reason)
        self._failures = 0
        self._next_attempt_seconds = float("-inf")
        self.health = SourceHealth(
            source=self.health.source,
            up=False,
            reason=reason,
            errors_total=self.health.errors_total,
            last_success_timestamp_seconds=self.health.last_success_timestamp_seconds,
        )

    def _fail(self, error: Exception, started: float) -> None:
        reason = str(error) if isinstance(error, SourceError) else f"unexpected {type(error).__name__}: {error}"
        if self.health.reason != reason:
            _log.warning("source=%s state=down reason=%r", self.health.source, reason, exc_info=not isinstance(error, SourceError))
        self._failures += 1
        if self._backs_off:
            delay = min(self._interval_seconds * 2 ** min(self._failures - 1, 16), MAX_BACKOFF_SECONDS)
            self._next_attempt_seconds = started + delay
        self.health = SourceHealth(
            source=self.health.source,
            up=False,
            reason=reason,
            read_duration_seconds=self._clock.monotonic() - started,
            errors_total=self.health.errors_total + 1,
            last_success_timestamp_seconds=self.health.last_success_timestamp_seconds,
        )


class Sampler:
    """Samples one node. `sample()` and `run()` belong to one thread; `exposition` may be read by any."""

    def __init__(
        self,
        *,
        sources: Sources,
        clock: Clock,
        rules: Rules,
        sample_interval_seconds: float,
        identity_ttl_seconds: float,
        config_facts: dict[str, str],
        teller: BreachTeller | None = None,
    ) -> None:
        self._sources = sources
        self._teller = teller
        self._clock = clock
        self._rules = rules
        self._interval_seconds = sample_interval_seconds
        self._identity_ttl_seconds = identity_ttl_seconds
        self._config_facts = config_facts
        self._created_seconds = clock.monotonic()
        self._memory: Memory = NOTHING_REMEMBERED
        self._kubelet_reading: KubeletReading | None = None
        self._samples_total = 0
        self._durations = Histogram()
        self._nvml = _Attempts("nvml", clock, sample_interval_seconds)
        self._procfs = _Attempts("procfs", clock, sample_interval_seconds)
        self._kubelet = _Attempts("kubelet", clock, sample_interval_seconds)
        # Its own threads back off; asking how they are costs nothing.
        self._kubernetes = _Attempts("kubernetes", clock, sample_interval_seconds, backs_off=False)
        self._hostfiles = _Attempts("hostfiles", clock, sample_interval_seconds)
        self._build = _Attempts("report", clock, sample_interval_seconds, backs_off=False)
        self._events = _Attempts("events", clock, sample_interval_seconds, backs_off=False)
        self._rendering = _Attempts("exposition", clock, sample_interval_seconds, backs_off=False)
        self.exposition = Exposition(None, self._health(), config_facts)
        """The newest report and its health. Replaced whole, never changed."""
        self.history = begin_history(sample_interval_seconds)
        """The last minutes up to the newest report. Replaced whole, never changed."""
        self.was_whole = False
        """Whether there ever was a report for which every source was up."""

    def run(self, stop: threading.Event) -> None:
        """Sample at every interval until told to stop. Raises FatalSourceError where only a new process can help."""
        next_sample = started = self._clock.monotonic()
        while not stop.is_set():
            self.sample()
            now = self._clock.monotonic()
            is_starting = not self.was_whole and now - started < START_SECONDS
            interval_seconds = min(START_INTERVAL_SECONDS, self._interval_seconds) if is_starting else self._interval_seconds
            # A late sample shifts the beat; samples are not made up for.
            next_sample = max(next_sample + interval_seconds, now)
            self._clock.wait(stop, next_sample - now)

    def sample(self) -> Exposition:
        """Read everything once and publish a new exposition; answer it."""
        started = self._clock.monotonic()
        snapshot = self._read()
        built = self._build.attempt(lambda: self._build_report(snapshot))
        self._samples_total += 1
        self._durations = self._durations.observe(self._clock.monotonic() - started)
        # Without a new report the old one stands until it is stale, and how the sources are doing is told all the same.
        report = self.exposition.report
        if built is not None:
            before, (report, self._memory) = report, built
            self._tell(before, report)
            self._log_pods_over_limit(report)
            self.history = self.history.add(report)
        health = self._health(report)
        self.was_whole = self.was_whole or (built is not None and all(source.up for source in health.sources))
        exposition = Exposition(report, health, self._config_facts)
        before_this = self.exposition
        self._rendering.attempt(lambda: exposition.prepare(before_this, keep_seconds=KEEP_RENDERING_SECONDS))
        self.exposition = exposition
        return exposition

    def _build_report(self, snapshot: Snapshot) -> tuple[Report, Memory]:
        report, memory = build(snapshot, self._memory, self._rules)
        return cut_to_size(report, self._rules.max_series), memory

    def _tell(self, before: Report | None, after: Report) -> None:
        changes = tuple(breach_changes(before, after))
        for change in changes:
            _log.info("%s", log_line(change))
        if changes and (teller := self._teller) is not None:
            self._events.attempt(lambda: teller.tell(changes))

    def _log_pods_over_limit(self, report: Report) -> None:
        before = self.exposition.report
        if bool(report.pods_over_limit) == bool(before and before.pods_over_limit):
            return
        if report.pods_over_limit:
            _log.warning(
                "series=over_limit max_series=%d pods_left_out=%d series_left_out=%d hint=%r",
                self._rules.max_series,
                report.pods_over_limit,
                report.series_over_limit,
                "raise --max-series, or look for a pod with very many containers or GPUs",
            )
        else:
            _log.info("series=within_limit max_series=%d", self._rules.max_series)

    def age_seconds(self, report: Report) -> float:
        """Answer how long ago the readings of this report began."""
        return self._clock.monotonic() - report.monotonic_seconds

    def is_stale(self) -> bool:
        """Answer whether the newest report is too old to be believed, or there is none."""
        report = self.exposition.report
        return report is None or self.age_seconds(report) > STALE_AFTER_INTERVALS * self._interval_seconds

    def is_late(self) -> bool:
        """Answer whether a report has been due for long: the sampler hangs, dies or cannot build one."""
        report = self.exposition.report
        since = report.monotonic_seconds if report else self._created_seconds
        return self._clock.monotonic() - since > STALE_AFTER_INTERVALS * self._interval_seconds

    def _read(self) -> Snapshot:
        time_seconds, monotonic_seconds = self._clock.time(), self._clock.monotonic()
        nvml = self._read_nvml(monotonic_seconds)
        # Processes after the driver, and allocations after both: a container's allocation is older than its processes.
        procfs = self._procfs.attempt(lambda: self._sources.procfs.read(nvml.pids if nvml else ()))
        kubelet = self._kubelet.attempt(self._sources.kubelet.read)
        kubernetes = self._kubernetes.attempt(self._sources.kubernetes.read)
        kubelet_is_current = kubelet is not None
        kubernetes_is_current = kubernetes is not None or self._sources.kubernetes.pods_are_current()
        if kubelet is not None:
            self._kubelet_reading = kubelet
        elif self._is_remembered(self._kubelet, monotonic_seconds):
            kubelet = self._kubelet_reading
        if kubernetes is None and (kubernetes_is_current or self._is_remembered(self._kubernetes, monotonic_seconds)):
            kubernetes = self._sources.kubernetes.last_reading()
        hostfiles = None
        if (reader := self._sources.hostfiles) is not None:
            # A PID means something only where /proc is the host's.
            pids = procfs.processes.keys() if procfs else ()
            hostfiles = self._hostfiles.attempt(lambda: reader.read(_containers(kubernetes), pids))
        return Snapshot(
            time_seconds=time_seconds,
            monotonic_seconds=monotonic_seconds,
            nvml=nvml,
            procfs=procfs,
            kubelet=kubelet,
            kubelet_is_current=kubelet_is_current,
            kubernetes=kubernetes,
            kubernetes_is_current=kubernetes_is_current,
            hostfiles=hostfiles,
        )

    def _read_nvml(self, now_seconds: float) -> NvmlReading | None:
        if self._is_mig_pending(now_seconds):
            self._nvml.pause(self._sources.nvml.release, f"the node's label {_MIG_STATE_LABEL} says {_MIG_PENDING}")
            return None
        return self._nvml.attempt(self._sources.nvml.read)

    def _is_mig_pending(self, now_seconds: float) -> bool:
        """Whether the GPUs are about to be divided anew, which fails while any process holds the driver."""
        reading = self._sources.kubernetes.last_reading()
        if reading is None or reading.node is None or reading.node.labels.get(_MIG_STATE_LABEL) != _MIG_PENDING:
            return False
        # A label that nobody has confirmed for so long must not blind the exporter for ever.
        return self._kubernetes.last_success_monotonic_seconds is None or self._is_remembered(self._kubernetes, now_seconds)

    def _is_remembered(self, attempts: _Attempts, now_seconds: float) -> bool:
        last = attempts.last_success_monotonic_seconds
        return last is not None and now_seconds - last <= self._identity_ttl_seconds

    def _health(self, report: Report | None = None) -> Health:
        attempts = [self._nvml, self._procfs, self._kubelet, self._kubernetes]
        if self._sources.hostfiles is not None:
            attempts.append(self._hostfiles)
        return Health(
            sources=tuple(each.health for each in attempts),
            samples_total=self._samples_total,
            last_sample_timestamp_seconds=report.time_seconds if report else None,
            sample_duration=self._durations,
            events=self._teller.health() if self._teller else None,
        )


def _containers(kubernetes: KubernetesReading | None) -> list[tuple[str, str]]:
    pods = kubernetes.pods.values() if kubernetes else ()
    return [(pod.uid, container.name) for pod in pods if not pod.ended for container in pod.containers]
