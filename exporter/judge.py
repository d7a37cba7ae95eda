"""Who takes more than it was given: the looks of one report at every limit, and the breaches that follow. Pure.

A claim that cannot be told (unreadable, not placed yet, the kubelet or API never read) might be tighter than those that can. So use above a
known limit is a breach whatever else is unknown, and use below it is unknown rather than fine.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from exporter.breach import Breach, Verdict, step
from exporter.limits import ContainerLimits, PodLimits
from exporter.usage import Use


class Resource(StrEnum):
    """What a limit is about."""

    MEMORY = "memory"
    COMPUTE = "compute"
    UNALLOCATED = "unallocated"

    __hash__ = str.__hash__  # Enum's own is a function of Python


@dataclass(frozen=True, slots=True)
class ContainerKey:
    """A container by its id; one that has none yet by its name. A restarted container is another one."""

    pod_uid: str
    container: str
    container_id: str | None


ContainerBreaches = Mapping[tuple[ContainerKey, str, Resource], Breach]
"""(container, GPU, resource) -> its breach."""

PodBreaches = Mapping[tuple[str, str, Resource], Breach]
"""(pod UID, GPU, resource) -> its breach."""


class Judge:
    """Judges each container and pod on each GPU once, at one moment."""

    def __init__(
        self,
        *,
        time_seconds: float,
        monotonic_seconds: float,
        hold_seconds: float,
        container_breaches: ContainerBreaches,
        pod_breaches: PodBreaches,
    ) -> None:
        """Take the moment, the hold for everything but compute, and the breaches as the last report left them."""
        self._time_seconds = time_seconds
        self._monotonic_seconds = monotonic_seconds
        self._hold_seconds = hold_seconds
        self._container_breaches_before = container_breaches
        self._pod_breaches_before = pod_breaches
        self.container_breaches: dict[tuple[ContainerKey, str, Resource], Breach] = {}
        """As they are now; whoever was not judged is gone."""
        self.pod_breaches: dict[tuple[str, str, Resource], Breach] = {}

    def judge_container(
        self,
        key: ContainerKey,
        gpu_uuid: str,
        limits: ContainerLimits,
        *,
        use: Use | None,
        compute_mean_ratio: float | None,
        limits_may_be_missing: bool,
    ) -> dict[Resource, Breach]:
        """Answer the breaches of a container's own limits, of each process's limit among them; only of limits that it has."""
        used = use.memory_used_bytes if use else None
        largest = use.largest_process_bytes if use else None
        looks = {
            Resource.MEMORY: _together(
                look(limits.container_memory_bytes, used, limits_may_be_missing=limits_may_be_missing),
                look(limits.process_memory_bytes, largest, limits_may_be_missing=limits_may_be_missing),
            ),
            Resource.COMPUTE: look(limits.container_compute_ratio, compute_mean_ratio, limits_may_be_missing=limits_may_be_missing),
        }
        limited = {Resource.MEMORY: limits.memory_bytes, Resource.COMPUTE: limits.container_compute_ratio}
        breaches = {}
        for resource, verdict in looks.items():
            before = self._container_breaches_before.get((key, gpu_uuid, resource))
            if before is not None or limited[resource] is not None:
                breaches[resource] = self._step(before, verdict, resource)
                self.container_breaches[key, gpu_uuid, resource] = breaches[resource]
        return breaches

    def judge_pod(
        self,
        pod_uid: str,
        gpu_uuid: str,
        limits: PodLimits,
        *,
        memory_used_bytes: int | None,
        compute_mean_ratio: float | None,
        of_containers: Iterable[Mapping[Resource, Breach]],
        unallocated: Verdict | None,
        limits_may_be_missing: bool,
    ) -> dict[Resource, Breach]:
        """Answer the breaches of a pod: of its own limits, or of any of its containers'. `unallocated` of None is not judged."""
        of_containers = tuple(of_containers)
        own = {
            Resource.MEMORY: (limits.memory_bytes, memory_used_bytes),
            Resource.COMPUTE: (limits.compute_ratio, compute_mean_ratio),
        }
        breaches = {}
        for resource, (limit, used) in own.items():
            theirs = [breach[resource].verdict for breach in of_containers if resource in breach]
            before = self._pod_breaches_before.get((pod_uid, gpu_uuid, resource))
            if before is not None or limit is not None or theirs:
                verdict = _together(look(limit, used, limits_may_be_missing=limits_may_be_missing), *theirs)
                breaches[resource] = self._step(before, verdict, resource)
        if unallocated is not None:
            before = self._pod_breaches_before.get((pod_uid, gpu_uuid, Resource.UNALLOCATED))
            breaches[Resource.UNALLOCATED] = self._step(before, unallocated, Resource.UNALLOCATED)
        for resource, breach in breaches.items():
            self.pod_breaches[pod_uid, gpu_uuid, resource] = breach
        return breaches

    def _step(self, before: Breach | None, verdict: Verdict, resource: Resource) -> Breach:
        return step(
            before or Breach(),
            verdict,
            time_seconds=self._time_seconds,
            monotonic_seconds=self._monotonic_seconds,
            # A mean over a window has its hold in it.
            hold_seconds=0.0 if resource is Resource.COMPUTE else self._hold_seconds,
        )


def look(limit: float | None, used: float | None, *, limits_may_be_missing: bool) -> Verdict:
    """Answer one look at one limit."""
    if limit is None:
        return Verdict.UNKNOWN if limits_may_be_missing else Verdict.NO_LIMIT
    if used is None:
        return Verdict.UNKNOWN
    if used > limit:
        return Verdict.ABOVE
    return Verdict.UNKNOWN if limits_may_be_missing else Verdict.BELOW


def _together(*verdicts: Verdict) -> Verdict:
    """Answer what several looks at one resource say together: above if any is, unknown if any other might be."""
    return next((verdict for verdict in (Verdict.ABOVE, Verdict.UNKNOWN, Verdict.BELOW) if verdict in verdicts), Verdict.NO_LIMIT)
