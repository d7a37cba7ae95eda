"""What a workload's GPU share would have to be: from what its pods used over a range, beside what they ask. Pure.

- A pod's **peak** on a GPU is the 99th percentile, over the steps of the range in which its use was known, of the highest use in each step.
- A workload's peak on a kind of GPU is the largest of its pods' peaks there: a share has to suffice for each of them.
- It **needs** that peak and the headroom on top, rounded up to whole MiB; as a share, rounded up to a hundredth of the GPU.
- **Freed** is what its pods that run now ask, less what they would be given instead. It is below zero where they need more than they ask.

A workload that was not watched for long enough, or that used its GPU for less than a hundredth of the time, gets no advice.
"""

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from exporter.duration import show_duration

MIB = 1 << 20

PodKey = tuple[str, str, str]
"""Cluster (empty where Prometheus attaches none), namespace, name."""

# What pods of these systems hold is set for the node and not by the pod: replicas, or MIG profiles.
_SET_BY_NODE = frozenset({"gke", "mig", "mps", "time_slicing"})
# Pods of these ask for an amount of memory. Of KAI both forms end as hundredths of a GPU: its scheduler rounds an amount up to them.
_ASKED_BY_MEMORY = frozenset({"aliyun", "container_env", "dra", "hami", "kai_nvfractions", "koordinator", "volcano"})

# A hash of a pod template is a 32-bit number in decimal, each digit written as one of these (rand.SafeEncodeString of
# k8s.io/apimachinery v0.30). Fewer than five digits come once in a hundred thousand hashes.
_TEMPLATE_HASH = re.compile(r"(.+)-[bcdfghjklmnpqrstvwxz2456789]{5,10}")
# A CronJob names its Jobs by the minute of their schedule, in minutes since the epoch (Kubernetes 1.21 and later). 24 to 50 million are
# the years 2015 to 2065, and no date like 20261201.
_SCHEDULED_MINUTE = re.compile(r"(.+)-(2[4-9]|3\d|4\d)\d{6}")

_UNKNOWN_USE_WORTH_A_WORD = 0.05


@dataclass(frozen=True, slots=True, order=True)
class Workload:
    """What makes pods of one template: a Deployment, a StatefulSet, a Job; of a pod that nobody owns, the pod."""

    cluster: str
    namespace: str
    owner_kind: str
    owner_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or a MIG device."""

    model: str = ""
    mig_profile: str = ""
    """Empty for a whole device."""
    is_mig: bool = False
    memory_total_bytes: int | None = None


UNKNOWN_DEVICE = Device()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodUse:
    """One pod on one GPU over the range."""

    pod: PodKey
    gpu_uuid: str
    known_steps: int
    """Steps of the range in which its use was known at least once."""
    first_seconds: float
    """When the first of these ended."""
    last_seconds: float
    memory_used_p99_bytes: float
    memory_used_max_bytes: float
    is_running: bool
    """Whether it is there at the end of the range."""
    memory_limit_bytes: int | None
    """At the end of the range; of a pod that is gone, its last one; None without one."""
    systems: frozenset[str] = frozenset()
    """The sharing systems that limit its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """One pod, wherever its GPUs are."""

    owner_kind: str = ""
    owner_name: str = ""
    is_system: bool = False
    """It is plumbing of a sharing system, and nobody's to right-size."""
    seen_steps: int = 0
    """Steps of the range in which the exporter said anything of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What was asked for."""

    headroom_ratio: Fraction
    """Room above the peak, as a part of the peak."""
    min_history_seconds: float
    step_seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One workload on one kind of GPU. Amounts are for each pod and GPU; what is freed is for all pods that run."""

    workload: Workload
    device: Device
    systems: tuple[str, ...]
    pods: int
    """That run at the end of the range."""
    history_seconds: float
    """For how long the use of at least one of its pods was known."""
    memory_used_p99_bytes: int
    memory_used_max_bytes: int
    memory_limit_bytes: int | None
    memory_limit_ratio: float | None
    """The limit as a share of the GPU."""
    advised_memory_bytes: int | None
    """None: no advice."""
    advised_memory_ratio: float | None
    """A share of the GPU in whole hundredths; None also where the memory of the GPU is not known."""
    memory_freed_bytes: int | None
    """None where that cannot be known."""
    notes: tuple[str, ...]


def workload_of(pod: PodKey, owner_kind: str, owner_name: str) -> Workload:
    """Answer what a pod belongs to.

    A pod's direct owner is known, and that owner's owner is not:

    - A ReplicaSet whose name ends in a pod template's hash is its Deployment's (or that of another controller that makes such
      ReplicaSets, like an Argo Rollout), which is shown by the name without the hash.
    - A Job whose name ends in a minute since the epoch is its CronJob's.
    - Any other owner stands by its own name, and a pod without one by the pod's.
    """
    cluster, namespace, name = pod
    if not owner_kind or not owner_name:
        return Workload(cluster, namespace, "Pod", name)
    if owner_kind == "ReplicaSet" and (match := _TEMPLATE_HASH.fullmatch(owner_name)):
        return Workload(cluster, namespace, "Deployment", match[1])
    if owner_kind == "Job" and (match := _SCHEDULED_MINUTE.fullmatch(owner_name)):
        return Workload(cluster, namespace, "CronJob", match[1])
    return Workload(cluster, namespace, owner_kind, owner_name)


def build_advice(
    uses: Iterable[PodUse], pods: Mapping[PodKey, PodFacts], devices: Mapping[str, Device], terms: Terms
) -> tuple[Advice, ...]:
    """Answer the advice for each workload on each kind of GPU, what frees most first; what frees nothing that is known comes last."""
    rows: dict[tuple[Workload, Device], list[PodUse]] = defaultdict(list)
    for use in uses:
        facts = pods.get(use.pod, PodFacts())
        if not facts.is_system:
            workload = workload_of(use.pod, facts.owner_kind, facts.owner_name)
            rows[workload, devices.get(use.gpu_uuid, UNKNOWN_DEVICE)].append(use)
    kinds: dict[Workload, int] = defaultdict(int)
    for workload, device in rows:
        kinds[workload] += not device.is_mig
    advice = (
        _advise(workload, device, of_row, pods, terms, is_mixed=kinds[workload] > 1 and not device.is_mig)
        for (workload, device), of_row in rows.items()
    )
    return tuple(sorted(advice, key=_order))


def _order(row: Advice) -> tuple[object, ...]:
    freed = row.memory_freed_bytes
    device = row.device
    return freed is None, row.advised_memory_bytes is None, -(freed or 0), row.workload, device.model, device.mig_profile, _total(device)


def _total(device: Device) -> int:
    return device.memory_total_bytes or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What is known of one workload on one kind of GPU."""

    device: Device
    systems: frozenset[str]
    running: tuple[PodUse, ...]
    limits: frozenset[int]
    """Of the pods that run, else of those that are gone."""
    peak: Fraction
    highest: int

    @property
    def is_set_by_node(self) -> bool:
        return self.device.is_mig or bool(self.systems & _SET_BY_NODE)

    @property
    def is_asked_by_memory(self) -> bool:
        return bool(self.systems & _ASKED_BY_MEMORY) and "kai" not in self.systems


@dataclass(frozen=True, slots=True)
class _Verdict:
    notes: tuple[str, ...]
    memory: int | None = None
    ratio: float | None = None
    freed: int | None = None


def _advise(
    workload: Workload, device: Device, uses: Sequence[PodUse], pods: Mapping[PodKey, PodFacts], terms: Terms, *, is_mixed: bool
) -> Advice:
    running = tuple(use for use in uses if use.is_running)
    row = _Row(
        device=device,
        systems=frozenset[str]().union(*(use.systems for use in uses)),
        running=running,
        limits=frozenset(use.memory_limit_bytes for use in running or uses if use.memory_limit_bytes is not None),
        peak=max(Fraction(use.memory_used_p99_bytes) for use in uses),
        highest=math.ceil(max(use.memory_used_max_bytes for use in uses)),
    )
    history = history_seconds(uses, terms.step_seconds)
    verdict = _judge(row, history, terms)
    notes = list(verdict.notes)
    if is_mixed and verdict.memory is not None:
        notes.append("runs on several kinds of GPU: the largest of its shares suffices on all")
    if len(row.limits) > 1:
        notes.append(f"its pods ask differently, from {_mib(min(row.limits))} to {_mib(max(row.limits))} MiB")
    if (unknown := _unknown_share(uses, pods)) > _UNKNOWN_USE_WORTH_A_WORD:
        notes.append(f"its use was not known for {unknown:.0%} of the time it ran")
    limit = max(row.limits, default=None)
    return Advice(
        workload=workload,
        device=device,
        systems=tuple(sorted(row.systems)),
        pods=len({use.pod for use in running}),
        history_seconds=history,
        memory_used_p99_bytes=math.ceil(row.peak),
        memory_used_max_bytes=row.highest,
        memory_limit_bytes=limit,
        memory_limit_ratio=None if limit is None else _share_of(limit, device),
        advised_memory_bytes=verdict.memory,
        advised_memory_ratio=verdict.ratio,
        memory_freed_bytes=verdict.freed,
        notes=tuple(notes),
    )


def _judge(row: _Row, history: float, terms: Terms) -> _Verdict:
    if history < terms.min_history_seconds:
        return _Verdict((f"history too short: {show_duration(history)} of {show_duration(terms.min_history_seconds)}",))
    if row.peak == 0 and row.highest > 0:
        return _Verdict((f"used in less than 1% of the time, {_mib(row.highest)} MiB at its highest: no advice",))
    need = math.ceil(row.peak * (1 + terms.headroom_ratio) / MIB) * MIB
    memory, ratio = _advised(need, row.device, by_share=not row.is_set_by_node and not row.is_asked_by_memory)
    freed, why = _freed(row, memory)
    total = row.device.memory_total_bytes
    notes = {
        "used no GPU memory at all": row.peak == 0,
        "its peak with the headroom is more than this GPU has": total is not None and need > total,
        f"would not have fit at its highest, {_mib(row.highest)} MiB": row.highest > memory,
        why: why is not None,
    }
    return _Verdict(tuple(note for note, holds in notes.items() if note and holds), memory, ratio, freed)


def _freed(row: _Row, memory: int) -> tuple[int | None, str | None]:
    """Answer what is freed where that can be known, and what there is to say of it."""
    if row.is_set_by_node:
        return None, _set_by_node(memory, row.device)
    if not row.limits:
        return None, "its limit is not known, or it has none: so is what it would free"
    freed = sum(use.memory_limit_bytes - memory for use in row.running if use.memory_limit_bytes is not None)
    if row.running:
        return freed, None
    less = max(row.limits) - memory
    return freed, f"none runs now; {_mib(abs(less))} MiB {'less' if less >= 0 else 'more'} while one does"


def _set_by_node(memory: int, device: Device) -> str:
    what = "a MIG profile" if device.is_mig else "the node's number of replicas"
    return f"its size comes from {what}: {_mib(memory)} MiB would suffice, and what that frees is not known"


def _mib(amount_bytes: int) -> int:
    return math.ceil(amount_bytes / MIB)


def _unknown_share(uses: Iterable[PodUse], pods: Mapping[PodKey, PodFacts]) -> float:
    """Answer for which part of their pods' time the use is missing. Without a limit a GPU is shown from its first use on."""
    limited = [use for use in uses if use.memory_limit_bytes is not None and use.pod in pods]
    seen = sum(pods[use.pod].seen_steps for use in limited)
    known = sum(min(use.known_steps, pods[use.pod].seen_steps) for use in limited)
    return 1 - known / seen if seen else 0.0


# --- shares ---


def _advised(need_bytes: int, device: Device, *, by_share: bool) -> tuple[int, float | None]:
    """Answer what to give for a need in whole MiB: bytes, and the share. Where a share is asked, the bytes are what that share gives."""
    total = device.memory_total_bytes
    if total is None:
        return need_bytes, None
    hundredths = share_hundredths(need_bytes, total)
    return granted_bytes(hundredths, total) if by_share else min(need_bytes, total), hundredths / 100


def share_hundredths(need_bytes: int, total_bytes: int) -> int:
    """Answer how many hundredths of the GPU are at least that much memory; 100 where none are. 0 suffices for nothing only."""
    return next((hundredths for hundredths in range(100) if granted_bytes(hundredths, total_bytes) >= need_bytes), 100)


def granted_bytes(hundredths: int, total_bytes: int) -> int:
    """Answer the memory of a share as KAI's scheduler counts it, which is a little less than the share of the whole.

    The GPU's MiB are floored to a multiple of 100, the product is taken in float64 and cut off (exporter.claims.kai). All of the GPU is
    all of it.
    """
    if hundredths == 100:  # noqa: PLR2004 - hundredths
        return total_bytes
    return int(hundredths / 100 * _counted_mib(total_bytes)) * MIB


def _counted_mib(total_bytes: int) -> int:
    mib = total_bytes // MIB
    return mib - mib % 100 or mib


def _share_of(amount_bytes: int, device: Device) -> float | None:
    """Answer which share of the GPU an amount is to KAI; above 1 of the GPU as it is (HAMi may sell more than there is)."""
    total = device.memory_total_bytes
    if not total:
        return None
    if amount_bytes >= total:
        return amount_bytes / total
    counted = _counted_mib(total) * MIB
    return min(amount_bytes / counted, 1.0) if counted else None


# --- history ---


def history_seconds(uses: Iterable[PodUse], step_seconds: int) -> float:
    """Answer for how long the use of at least one of these was known. Gaps in the scrapes do not count.

    Of each only its first and last known step and the number of known steps between are told, so that where several overlap, the one that
    is known for the largest part of its time counts there.
    """
    begins = sorted((use.first_seconds - step_seconds, use.last_seconds, _density(use, step_seconds)) for use in uses)
    cuts = sorted({moment for begin, end, _ in begins for moment in (begin, end)})
    total, following = 0.0, 0
    alive: list[tuple[float, float]] = []
    for moment, until in pairwise(cuts):
        while following < len(begins) and begins[following][0] <= moment:
            _, end, density = begins[following]
            heapq.heappush(alive, (-density, end))
            following += 1
        while alive and alive[0][1] <= moment:
            heapq.heappop(alive)
        if alive:
            total += (until - moment) * -alive[0][0]
    return round(total, 3)


def _density(use: PodUse, step_seconds: int) -> float:
    return min(1.0, use.known_steps * step_seconds / (use.last_seconds - use.first_seconds + step_seconds))
