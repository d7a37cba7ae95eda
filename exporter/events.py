"""What a pod's owner is told by `kubectl describe pod`: breaches that begin and end, as Kubernetes Events, and how many of them. Pure.

Events of the core API, as client-go's recorder makes them: https://pkg.go.dev/k8s.io/client-go/tools/record. One object tells each thing
that can happen to a pod on a GPU, however often it does: its name follows from what it is about, so that a repeat, a lost answer or a
restart of the exporter finds the earlier one. The message holds numbers, names that the API server has checked, and nothing that a pod's
author wrote freely.
"""

import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from exporter.breach import Verdict
from exporter.journal import BreachChange
from exporter.judge import Resource

COMPONENT = "fgpu-exporter"

# As client-go's spam filter: 25 events about one object at once, one more each five minutes.
BURST = 25
REFILL_SECONDS = 300.0
# A breach that is told is told to its end: the first event pays for both.
_TOKENS_OF_A_BREACH = 2

MOST_REMEMBERED = 1024
"""Pods, breaches and events about which something is known; the one that was not asked about for longest is forgotten."""

_MAX_NAME = 253
_GIB = 1 << 30

Key = TypeVar("Key")
Value = TypeVar("Value")


class Dropped(StrEnum):
    """Why an event was not written."""

    RATE_LIMITED = "rate_limited"
    """Too many about this pod."""
    QUEUE_FULL = "queue_full"
    """Too many on this node while the API server took none."""
    FORBIDDEN = "forbidden"
    """The service account may not."""
    GONE = "gone"
    """The namespace is gone, or going."""
    REFUSED = "refused"
    """The API server does not take this one."""
    UNREACHABLE = "unreachable"
    """The API server did not take it in all the attempts."""
    BEGIN_UNTOLD = "begin_untold"
    """The end of a breach of which the begin was not written."""


_REASONS = {
    (Resource.MEMORY, True): "GPUMemoryLimitExceeded",
    (Resource.MEMORY, False): "GPUMemoryWithinLimit",
    (Resource.COMPUTE, True): "GPUComputeLimitExceeded",
    (Resource.COMPUTE, False): "GPUComputeWithinLimit",
    (Resource.UNALLOCATED, True): "GPUNotAllocated",
    (Resource.UNALLOCATED, False): "GPUUnallocatedUseEnded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEvent:
    """One thing to tell a pod's owner."""

    name: str
    """Of the Event object: the same whenever the same happens to the same pod on the same GPU."""
    namespace: str
    pod: str
    pod_uid: str
    reason: str
    message: str
    time_seconds: float
    """Wall clock."""
    monotonic_seconds: float
    begun: bool
    breach: tuple[str, str, Resource]
    """(pod UID, GPU, resource)"""
    since_seconds: float
    """Wall clock of the breach's first look above; tells one breach of a limit from the next."""

    @property
    def type(self) -> str:
        """Kubernetes' word for how bad it is."""
        return "Warning" if self.begun else "Normal"


def build_event(change: BreachChange) -> PodEvent:
    """Answer what is told of a change."""
    row, reason = change.pod, _REASONS[change.resource, change.begun]
    return PodEvent(
        name=_event_name(row.pod, row.pod_uid, row.gpu_uuid, reason),
        namespace=row.namespace,
        pod=row.pod,
        pod_uid=row.pod_uid,
        reason=reason,
        message=_message(change),
        time_seconds=change.time_seconds,
        monotonic_seconds=change.monotonic_seconds,
        begun=change.begun,
        breach=(row.pod_uid, row.gpu_uuid, change.resource),
        since_seconds=change.since_seconds,
    )


def encode_event(event: PodEvent, node_name: str) -> dict[str, Any]:
    """Answer the Event object for what happened for the first time: https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/."""
    now = _timestamp(event.time_seconds)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event.name, "namespace": event.namespace},
        # kubectl asks for the events of a pod by its UID, too.
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": event.namespace, "name": event.pod, "uid": event.pod_uid},
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "source": {"component": COMPONENT, "host": node_name},
        "reportingComponent": COMPONENT,
        "reportingInstance": node_name,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def encode_repeat(event: PodEvent, count: int | None) -> dict[str, Any]:
    """Answer the merge patch for what happened before; without a count that stays as it is."""
    patch = {"message": event.message, "lastTimestamp": _timestamp(event.time_seconds)}
    return patch if count is None else {**patch, "count": count}


# --- how many ---


class Recent(Generic[Key, Value]):
    """A mapping of bounded size: beyond it, what was not used for longest is forgotten."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Answer what is known of a key; None: nothing."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Remember something of a key."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def pop(self, key: Key) -> Value | None:
        """Forget a key; answer what was known of it."""
        return self._values.pop(key, None)


class SpamFilter:
    """Decides which events are told: each breach once, and no more about one pod than its bucket of tokens allows."""

    def __init__(self) -> None:
        self._tokens: Recent[str, tuple[float, float]] = Recent()
        """Pod UID -> tokens, and when there were so many."""
        self._ongoing: Recent[tuple[str, str, Resource], float] = Recent()
        """Breach that is told -> since when it lasts."""

    def admit(self, event: PodEvent) -> Dropped | None:
        """Answer why an event is not to be told; None: it is."""
        if not event.begun:
            return None if self._ongoing.pop(event.breach) == event.since_seconds else Dropped.BEGIN_UNTOLD
        tokens, at = self._tokens.get(event.pod_uid) or (float(BURST), event.monotonic_seconds)
        tokens = min(BURST, tokens + (event.monotonic_seconds - at) / REFILL_SECONDS)
        if tokens < _TOKENS_OF_A_BREACH:
            return Dropped.RATE_LIMITED
        self._tokens.put(event.pod_uid, (tokens - _TOKENS_OF_A_BREACH, event.monotonic_seconds))
        self._ongoing.put(event.breach, event.since_seconds)
        return None

    def is_told(self, event: PodEvent) -> bool:
        """Answer whether this begin was told: a pod that was left out of some reports, as too large, comes back with its old breach."""
        return event.begun and self._ongoing.get(event.breach) == event.since_seconds


# --- words ---


def _message(change: BreachChange) -> str:
    gpu, since = f"GPU {_safe(change.pod.gpu_uuid)}", _timestamp(change.since_seconds)
    if not change.begun:
        return _end(change, gpu, since)
    match change.resource:
        case Resource.MEMORY:
            return f"{_memory_above(change, gpu)} since {since}"
        case Resource.COMPUTE:
            return f"{_compute_above(change, gpu)} since {since}"
        case Resource.UNALLOCATED:
            used = change.pod.memory_used_bytes
            return f"Uses {f'{_gib(used, 0)} GiB of ' if used else ''}{gpu}, which it was not given, since {since}"


def _memory_above(change: BreachChange, gpu: str) -> str:
    used, limit = change.pod.memory_used_bytes, change.pod.limits.memory_bytes
    if used is not None and limit is not None and used > limit:
        return f"Uses {_gib(used, limit)} GiB of a {_gib(limit, used)} GiB share of {gpu}"
    for each in change.containers:
        if Resource.MEMORY not in each.breaches or each.breaches[Resource.MEMORY].verdict is not Verdict.ABOVE:
            continue
        used, limit = each.memory_used_bytes, each.limits.container_memory_bytes
        if used is not None and limit is not None and used > limit:
            return f"Container {_safe(each.container)} uses {_gib(used, limit)} GiB of a {_gib(limit, used)} GiB share of {gpu}"
        if (limit := each.limits.process_memory_bytes) is not None:
            return f"A process of container {_safe(each.container)} uses more than its {_gib(limit, 0)} GiB of {gpu}"
    return f"Uses more than its share of the memory of {gpu}"


def _compute_above(change: BreachChange, gpu: str) -> str:
    mean, limit = change.pod.sm_utilization_mean_ratio, change.pod.limits.compute_ratio
    if mean is not None and limit is not None and mean > limit:
        return f"Keeps {gpu} busy {_percent(mean, limit)} of the time, of a {_percent(limit, mean)} share,"
    for each in change.containers:
        mean, limit = each.sm_utilization_mean_ratio, each.limits.container_compute_ratio
        if mean is not None and limit is not None and mean > limit:
            return (
                f"Container {_safe(each.container)} keeps {gpu} busy {_percent(mean, limit)} of the time, "
                f"of a {_percent(limit, mean)} share,"
            )
    return f"Uses more than its share of the time of {gpu}"


def _end(change: BreachChange, gpu: str, since: str) -> str:
    if change.resource is Resource.UNALLOCATED:
        return f"No longer uses {gpu} without having been given it, as it had since {since}"
    is_memory = change.resource is Resource.MEMORY
    what = f"the {'memory' if is_memory else 'time'} of {gpu}"
    if change.breach.verdict is Verdict.NO_LIMIT:
        return f"No longer has a share of {what} to keep to; it had exceeded one since {since}"
    numbers = ""
    if is_memory:
        used, limit = change.pod.memory_used_bytes, change.pod.limits.memory_bytes
        if used is not None and limit is not None:
            numbers = f" ({_gib(used, limit)} of {_gib(limit, used)} GiB)"
    else:
        mean, ratio = change.pod.sm_utilization_mean_ratio, change.pod.limits.compute_ratio
        if mean is not None and ratio is not None:
            numbers = f" ({_percent(mean, ratio)} of {_percent(ratio, mean)})"
    return f"Is within its share of {what} again{numbers}, which it had exceeded since {since}"


def _gib(value: int, other: int) -> str:
    """Answer GiB with as many digits as it takes to tell two amounts apart."""
    digits = next((digits for digits in (1, 2, 3, 6) if f"{value / _GIB:.{digits}f}" != f"{other / _GIB:.{digits}f}"), 1)
    return f"{value / _GIB:.{digits}f}"


def _percent(value: float, other: float) -> str:
    digits = next((digits for digits in (0, 1, 2, 4) if f"{value:.{digits}%}" != f"{other:.{digits}%}"), 0)
    return f"{value:.{digits}%}"


def _safe(name: str) -> str:
    """Answer a name as the API server or the driver lets it be; of any other one only what such a name may hold."""
    return re.sub(r"[^A-Za-z0-9._/-]", "?", name)[:_MAX_NAME]


def _event_name(pod: str, pod_uid: str, gpu_uuid: str, reason: str) -> str:
    suffix = hashlib.sha256(f"{pod_uid} {gpu_uuid} {reason}".encode("utf-8", "replace")).hexdigest()[:16]
    return f"{pod[: _MAX_NAME - 1 - len(suffix)].rstrip('.-')}.{suffix}"


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
