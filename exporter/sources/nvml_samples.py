"""How long did each process keep a GPU busy: the driver's utilization samples turned into seconds. Pure: memory in, memory out.

The driver keeps some seconds of samples and answers those newer than a time stamp. What surprises about them
(https://github.com/Syllo/nvtop/issues/110, https://github.com/NVIDIA/go-nvml/issues/51):

- The stamps are microseconds of a clock that no document names. They are only compared with each other.
- Each process has its own sample times, which may be seconds older than another's. So a sample stands for the time since the same
  process's previous sample, not since any sample.
- Asked from the start, the driver answers old samples of processes that have long been idle: the first answer can only be remembered.
- Some samples cannot be true: PID 0, stamps of 0 or of next year, utilizations above 100 %.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul, sub
from typing import NamedTuple

from exporter.snapshot import ProcessBusy

_MICROSECONDS = 1_000_000
# The driver's shortest sampling period (nvml.h, nvmlUtilization_t).
_SHORTEST_PERIOD_MICROSECONDS = _MICROSECONDS / 6
# Its longest one: where a process has several samples, a longer gap between two of them is time that it slept.
_LONGEST_PERIOD_MICROSECONDS = _MICROSECONDS
# About how much time the driver's samples cover.
_RING_SECONDS = 10.0
# How far a stamp may be ahead of where the driver's clock must be by now. Two clocks that both count seconds do not drift that far.
_FUTURE_MICROSECONDS = 120 * _MICROSECONDS
# After so long without anything newer than what was seen last, it is worth a question whether that stamp can be right.
_DOUBT_AFTER_SECONDS = 60.0
# By how much the wall clock must differ from the monotonic one, over a reading, to have been set and not slewed.
_SET_SECONDS = 1.0
_MAX_PERCENT = 100
_PERCENT_MICROSECONDS = _MAX_PERCENT * _MICROSECONDS


class Sample(NamedTuple):
    """What the driver says of one process and one moment, unchecked. A tuple, because there are hundreds in each answer."""

    pid: int
    time_stamp: int
    """Microseconds."""
    sm_percent: int
    memory_bandwidth_percent: int
    encoder_percent: int
    decoder_percent: int


@dataclass(frozen=True, slots=True)
class Moment:
    """When a reading began."""

    number: int
    """Of the reading: one more than that of the reading before, whether that came to anything or not."""
    monotonic_seconds: float
    time_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMemory:
    """What is remembered of a GPU's samples from one reading to the next."""

    read_at: Moment
    last_seen: int = 0
    """The largest credible stamp; the next question is for newer ones. 0: there never was one."""
    last_seen_at_seconds: float = 0.0
    """When that stamp came."""
    considered_at_seconds: float = 0.0
    """When it was last certain that the stamp can be right."""
    newest_of_pid: Mapping[int, int] = field(default_factory=dict)
    """PID -> the stamp of its newest sample."""
    rejected: int | None = None
    """The newest stamp that the previous reading did not believe."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an answer of the driver comes to."""

    busy: tuple[ProcessBusy, ...] | None
    """None: this answer could only be remembered."""
    memory: SampleMemory
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> samples."""


def prime(samples: Sequence[Sample], moment: Moment, pid_max: int) -> Step:
    """Answer what a first answer comes to: where to go on from. Nothing is known of the time that it covers, unless it is empty."""
    dropped = Counter(reason for sample in samples if (reason := _reason_for_garbage(sample, pid_max)))
    good = [sample for sample in samples if _reason_for_garbage(sample, pid_max) is None]
    credible = _credible_at_first({sample.time_stamp for sample in good}, moment)
    dropped["bad_timestamp"] += sum(sample.time_stamp not in credible for sample in good)
    memory = SampleMemory(
        read_at=moment,
        last_seen=max(credible, default=0),
        last_seen_at_seconds=moment.monotonic_seconds,
        considered_at_seconds=moment.monotonic_seconds,
        newest_of_pid=_newest({}, [sample for sample in good if sample.time_stamp in credible]),
    )
    return Step(None if samples else (), memory, +dropped)


def step(memory: SampleMemory, samples: Iterable[Sample], moment: Moment, *, listed_pids: Collection[int] | None, pid_max: int) -> Step:
    """Answer what the samples since the last reading come to.

    `listed_pids` are the processes that NVML's lists name now or named at the previous reading; None: the lists are not known.
    """
    new = [sample for sample in samples if not 0 < sample.time_stamp <= memory.last_seen]
    stamps = {sample.time_stamp for sample in new} - {0}
    credible = _credible(stamps, memory, moment)
    good, dropped = _sift(new, credible, listed_pids, pid_max)
    of_pid = _group_by_pid(good)
    elapsed_microseconds = (moment.monotonic_seconds - memory.read_at.monotonic_seconds) * _MICROSECONDS
    busy = tuple(_busy(pid, own, memory.newest_of_pid.get(pid), elapsed_microseconds) for pid, own in of_pid.items())
    last_seen = max(credible, default=memory.last_seen)
    newest = _newest(memory.newest_of_pid, [own[-1] for own in of_pid.values()])
    after = SampleMemory(
        read_at=moment,
        last_seen=last_seen,
        last_seen_at_seconds=moment.monotonic_seconds if credible else memory.last_seen_at_seconds,
        considered_at_seconds=moment.monotonic_seconds if credible else memory.considered_at_seconds,
        newest_of_pid={pid: stamp for pid, stamp in newest.items() if _is_kept(pid, stamp, last_seen, listed_pids)},
        rejected=max(stamps - credible, default=None),
    )
    return Step(busy, after, dropped)


def is_outdated(memory: SampleMemory, moment: Moment) -> bool:
    """Answer whether what is remembered says nothing of the samples that the driver answers now.

    So it is where readings failed for longer than the driver remembers: its answer covers only a part of that time. And where the wall
    clock was set: stamps that follow it are no longer comparable, and a clock set back would make a busy GPU look idle.
    """
    seconds = moment.monotonic_seconds - memory.read_at.monotonic_seconds
    was_missed = memory.read_at.number < moment.number - 1
    was_set = abs(moment.time_seconds - memory.read_at.time_seconds - seconds) > _SET_SECONDS
    return was_set or (was_missed and seconds > _RING_SECONDS)


def is_doubtful(memory: SampleMemory, moment: Moment) -> bool:
    """Answer whether the last seen stamp has had no successor for so long that all samples should be asked for, and `reconsider`ed."""
    return memory.last_seen > 0 and moment.monotonic_seconds - memory.considered_at_seconds >= _DOUBT_AFTER_SECONDS


def reconsider(memory: SampleMemory, samples: Sequence[Sample], moment: Moment, pid_max: int) -> SampleMemory:
    """Answer the memory after a look at all samples that the driver has.

    On an idle GPU the newest of them is the one seen last. If all are older, then that stamp was wrong, or the driver's clock was set
    back: the driver would call the GPU idle until its clock gets there. From now on newer ones than these are asked for.
    """
    fresh = prime(samples, moment, pid_max).memory
    if 0 < fresh.last_seen < memory.last_seen:
        return fresh
    return replace(memory, considered_at_seconds=moment.monotonic_seconds)


def _sift(
    samples: Sequence[Sample], credible: Collection[int], listed_pids: Collection[int] | None, pid_max: int
) -> tuple[Sequence[Sample], Counter[str]]:
    """Answer the samples that can be true, and how many others there are, by reason."""
    dropped: Counter[str] = Counter()
    if _are_all_good(samples, credible, listed_pids, pid_max):
        return samples, dropped
    good = []
    for sample in samples:
        reason = _reason_for_garbage(sample, pid_max)
        if reason is None and sample.time_stamp not in credible:
            reason = "bad_timestamp"
        if reason is None and listed_pids is not None and sample.pid not in listed_pids:
            reason = "unknown_pid"
        if reason is None:
            good.append(sample)
        else:
            dropped[reason] += 1
    return good, dropped


def _are_all_good(samples: Sequence[Sample], credible: Collection[int], listed_pids: Collection[int] | None, pid_max: int) -> bool:
    """Answer whether no sample is garbage, as hardly ever one is: asked column by column that takes a tenth of the time."""
    if not samples:
        return True
    pids, stamps, *percents = zip(*samples, strict=True)
    return (
        0 < min(pids) <= max(pids) <= pid_max
        and all(max(column) <= _MAX_PERCENT for column in percents)
        and set(stamps).issubset(credible)
        and (listed_pids is None or set(pids).issubset(listed_pids))
    )


def _reason_for_garbage(sample: Sample, pid_max: int) -> str | None:
    if not 0 < sample.pid <= pid_max:
        return "bad_pid"
    if sample.time_stamp <= 0:
        return "bad_timestamp"
    percents = (sample.sm_percent, sample.memory_bandwidth_percent, sample.encoder_percent, sample.decoder_percent)
    if max(percents) > _MAX_PERCENT:
        return "bad_utilization"
    return None


def _credible(stamps: set[int], memory: SampleMemory, moment: Moment) -> set[int]:
    """Which of these stamps, all newer than the last seen, may be true: one absurd stamp would silence the GPU until then."""
    if memory.last_seen == 0:
        return _credible_at_first(stamps, moment)
    elapsed = (moment.monotonic_seconds - memory.last_seen_at_seconds) * _MICROSECONDS
    latest = memory.last_seen + elapsed + _FUTURE_MICROSECONDS
    if max(stamps, default=0) <= latest:
        return stamps
    # The last seen sample may have been hours old when it came. A stamp that agrees with the wall clock needs no other witness.
    now = moment.time_seconds * _MICROSECONDS
    vouched = {stamp for stamp in stamps if stamp <= latest or abs(stamp - now) <= _FUTURE_MICROSECONDS}
    # Where all of them are ahead, the driver's clock was set forward, if two stamps agree on it.
    return vouched or _in_company(stamps, memory.rejected)


def _credible_at_first(stamps: set[int], moment: Moment) -> set[int]:
    """Which stamps may be true when there is nothing yet to compare them with: the oldest may be days old."""
    # A clock that counts from the epoch is the wall clock; one that counts from the boot is far behind it.
    now = moment.time_seconds * _MICROSECONDS
    past = {stamp for stamp in stamps if stamp <= now + _FUTURE_MICROSECONDS}
    return past or _in_company(stamps) or ({min(stamps)} if stamps else set())


def _in_company(stamps: set[int], earlier: int | None = None) -> set[int]:
    """The stamps that have another one close to them; of several such groups the largest."""
    groups: list[list[int]] = []
    for stamp in sorted(stamps | ({earlier} if earlier is not None else set())):
        if groups and stamp - groups[-1][-1] <= _FUTURE_MICROSECONDS:
            groups[-1].append(stamp)
        else:
            groups.append([stamp])
    largest = max(groups, key=len, default=[])
    return stamps.intersection(largest) if len(largest) > 1 else set()


def _group_by_pid(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """Answer each process's samples in the order of time, sorted by PID. Of several of one moment the busiest counts."""
    of_pid: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        of_pid[sample.pid].append(sample)
    return {pid: list({sample.time_stamp: sample for sample in sorted(own)}.values()) for pid, own in sorted(of_pid.items())}


def _busy(pid: int, samples: Sequence[Sample], previous_stamp: int | None, elapsed_microseconds: float) -> ProcessBusy:
    """Answer what a process's samples, in the order of time, come to."""
    _, stamps, *percents_of_engine = zip(*samples, strict=True)
    spacings = list(map(sub, stamps[1:], stamps))
    first = _SHORTEST_PERIOD_MICROSECONDS if previous_stamp is None else stamps[0] - previous_stamp
    # A process that slept since its previous sample was not busy all that time.
    longest = min(max(spacings), _LONGEST_PERIOD_MICROSECONDS) if spacings else elapsed_microseconds
    weights = [max(first, 0), *spacings]
    if max(weights) > longest:
        weights = [min(longest, weight) for weight in weights]
    sm, memory_bandwidth, encoder, decoder = (
        sum(map(mul, percents, weights)) / _PERCENT_MICROSECONDS if any(percents) else 0.0 for percents in percents_of_engine
    )
    return ProcessBusy(pid=pid, sm_seconds=sm, memory_bandwidth_seconds=memory_bandwidth, encoder_seconds=encoder, decoder_seconds=decoder)


def _newest(known: Mapping[int, int], samples: Iterable[Sample]) -> dict[int, int]:
    newest = dict(known)
    for sample in samples:
        newest[sample.pid] = max(sample.time_stamp, newest.get(sample.pid, 0))
    return newest


def _is_kept(pid: int, stamp: int, last_seen: int, listed_pids: Collection[int] | None) -> bool:
    if listed_pids is not None:
        return pid in listed_pids
    return last_seen - stamp <= _RING_SECONDS * _MICROSECONDS
