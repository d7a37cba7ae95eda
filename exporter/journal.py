"""What changed from one report to the next that people are told: breaches of pods that begin and end, and their line in the log. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from exporter.breach import Breach
from exporter.judge import Resource
from exporter.report import ContainerReport, PodReport, Report

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BreachChange:
    """A breach that began or ended. What is gone, a pod or its use of a GPU, ends none."""

    time_seconds: float
    """Wall clock of the report that shows it."""
    monotonic_seconds: float
    pod: PodReport
    """As it is now."""
    containers: tuple[ContainerReport, ...]
    """Those of the pod on this GPU: the breach may be one of theirs."""
    resource: Resource
    begun: bool
    """Else it ended."""
    since_seconds: float
    """Wall clock of the first look above the limit."""

    @property
    def breach(self) -> Breach:
        """How the limit stands now."""
        return self.pod.breaches[self.resource]


def breach_changes(before: Report | None, after: Report) -> Iterator[BreachChange]:
    """Answer each breach of a pod that began or ended."""
    ongoing = {
        (row.pod_uid, row.gpu_uuid, resource): breach.since_seconds
        for row in (before.pods if before else ())
        for resource, breach in row.breaches.items()
        if breach.is_on
    }
    for row in after.pods:
        for resource, breach in row.breaches.items():
            was_on = (row.pod_uid, row.gpu_uuid, resource) in ongoing
            if breach.is_on == was_on:
                continue
            since_seconds = breach.since_seconds if breach.is_on else ongoing[row.pod_uid, row.gpu_uuid, resource]
            yield BreachChange(
                time_seconds=after.time_seconds,
                monotonic_seconds=after.monotonic_seconds,
                pod=row,
                containers=tuple(each for each in after.containers if (each.pod_uid, each.gpu_uuid) == (row.pod_uid, row.gpu_uuid)),
                resource=resource,
                begun=breach.is_on,
                since_seconds=after.time_seconds if since_seconds is None else since_seconds,
            )


def log_line(change: BreachChange) -> str:
    """Answer the line of the log for a change, with the numbers in it."""
    row = change.pod
    used = "unknown" if row.memory_used_bytes is None else f"{row.memory_used_bytes / _GIB:.2f}GiB"
    limit = "none" if row.limits.memory_bytes is None else f"{row.limits.memory_bytes / _GIB:.2f}GiB"
    share = "unknown" if row.sm_utilization_ratio is None else f"{row.sm_utilization_ratio:.2f}"
    limit_ratio = "none" if row.limits.compute_ratio is None else f"{row.limits.compute_ratio:.2f}"
    return (
        f"breach={'begun' if change.begun else 'over'} namespace={row.namespace} pod={row.pod} gpu_uuid={row.gpu_uuid} "
        f"resource={change.resource} memory_used={used} memory_limit={limit} sm_utilization={share} compute_limit={limit_ratio}"
    )
