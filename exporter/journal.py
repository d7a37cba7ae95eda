"""What changed from one report to the next that a person wants to read in the log: breaches that begin and end. Pure."""

from collections.abc import Iterator

from exporter.report import PodReport, Report

_GIB = 1 << 30


def breach_changes(before: Report | None, after: Report) -> Iterator[str]:
    """Answer a line for each breach of a pod that began or ended, with the numbers in it."""
    ongoing = {
        (row.pod_uid, row.gpu_uuid, resource)
        for row in (before.pods if before else ())
        for resource, breach in row.breaches.items()
        if breach.is_on
    }
    for row in after.pods:
        for resource, breach in row.breaches.items():
            was_on = (row.pod_uid, row.gpu_uuid, resource) in ongoing
            if breach.is_on != was_on:
                state = "begun" if breach.is_on else "over"
                yield f"breach={state} namespace={row.namespace} pod={row.pod} gpu_uuid={row.gpu_uuid} resource={resource} {_numbers(row)}"


def _numbers(row: PodReport) -> str:
    used = "unknown" if row.memory_used_bytes is None else f"{row.memory_used_bytes / _GIB:.2f}GiB"
    limit = "none" if row.limits.memory_bytes is None else f"{row.limits.memory_bytes / _GIB:.2f}GiB"
    share = "unknown" if row.sm_utilization_ratio is None else f"{row.sm_utilization_ratio:.2f}"
    limit_ratio = "none" if row.limits.compute_ratio is None else f"{row.limits.compute_ratio:.2f}"
    return f"memory_used={used} memory_limit={limit} sm_utilization={share} compute_limit={limit_ratio}"
