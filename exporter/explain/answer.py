"""An explanation as JSON: what `/api/v1/explain` answers.

The words are those of `/api/v1/node`. The schema is docs/explain.v1.schema.json.
"""

from collections.abc import Iterable

from exporter import __version__
from exporter.claims.claim import Allocation
from exporter.explain.gpu import GpuEvidence, gather_gpu
from exporter.explain.gpu_text import summarize_gpu, tell_gpu
from exporter.explain.pod import ClaimEvidence, ContainerEvidence, LimitEvidence, PodEvidence, PodOnGpu, gather_pod
from exporter.explain.pod_summary import summarize_pod
from exporter.explain.pod_text import tell_pod
from exporter.explain.process import ProcessEvidence, known_bytes
from exporter.explain.section import Section
from exporter.explain.target import find_gpu, find_pod
from exporter.health import Health
from exporter.node_json import API_VERSION, About, Json, build_claim
from exporter.report import Evidence, Report
from exporter.usage import Owner


class NoReportError(Exception):
    """There is no report that can be believed. The text is one sentence that says why, as far as that is known."""


def explain_pod(about: About, health: Health, report: Report | None, name: str) -> Json:
    """Answer the explanation of a pod, `NAMESPACE/POD` or its name. Raises NoReportError and `target.NotFoundError`."""
    report, given = _evidence(health, report)
    evidence = gather_pod(report, given, find_pod(report, given, name, about.node))
    return _answer(about, report, summarize_pod(evidence, health), tell_pod(evidence, health), pod=_pod(evidence))


def explain_gpu(about: About, health: Health, report: Report | None, uuid: str) -> Json:
    """Answer the explanation of a GPU. Raises NoReportError and `target.NotFoundError`."""
    report, given = _evidence(health, report)
    evidence = gather_gpu(report, given, find_gpu(report, uuid, about.node))
    return _answer(about, report, summarize_gpu(evidence, health), tell_gpu(evidence, health), gpu=_gpu(evidence))


def _evidence(health: Health, report: Report | None) -> tuple[Report, Evidence]:
    if report is None or report.evidence is None:
        down = [f"{source.source}: {source.reason}" for source in health.sources if not source.up]
        why = "; ".join(down) or "samples stopped coming"
        raise NoReportError(f"there is no report that can be believed now ({why}): ask again in a moment, or read the exporter's log")
    return report, report.evidence


def _answer(
    about: About, report: Report, summary: str, sections: Iterable[Section], *, pod: Json | None = None, gpu: Json | None = None
) -> Json:
    return {
        "api_version": API_VERSION,
        "version": __version__,
        "node": about.node,
        "simulated": about.simulated,
        "sample_timestamp_seconds": report.time_seconds,
        "summary": summary,
        "sections": [{"title": section.title, "sentences": list(section.sentences)} for section in sections],
        "pod": pod,
        "gpu": gpu,
    }


def _pod(evidence: PodEvidence) -> Json:
    return {
        "namespace": evidence.pod.namespace,
        "pod": evidence.pod.name,
        "pod_uid": evidence.pod.uid,
        "phase": evidence.pod.phase.value,
        "role": evidence.role,
        "left_out": evidence.is_left_out,
        "limits_unknown": [reason.value for reason in evidence.missing],
        "claim_errors": [{"system": system, "errors": list(errors)} for system, errors in sorted(evidence.claim_errors.items())],
        "gpus": [_on_gpu(on_gpu) for on_gpu in evidence.on_gpus],
    }


def _on_gpu(on_gpu: PodOnGpu) -> Json:
    row = on_gpu.report
    return {
        "gpu_uuid": on_gpu.gpu_uuid,
        "memory_used_bytes": row.memory_used_bytes if row else None,
        "memory_limit_bytes": row.limits.memory_bytes if row else None,
        "compute_limit_ratio": row.limits.compute_ratio if row else None,
        "sm_utilization_mean_ratio": row.sm_utilization_mean_ratio if row else None,
        "use_unknown": on_gpu.unknown_use.value if on_gpu.unknown_use else None,
        "limits": [_limit(limit) for limit in on_gpu.limits],
        "containers": [_container(container) for container in on_gpu.containers],
        "claims": [_claim(claim) for claim in on_gpu.claims],
        "allocations": [_allocation(allocation) for allocation in on_gpu.allocations],
        "gpu_groups": [
            {"group": each.group, "reservation_namespace": each.reservation_namespace, "reservation_pod": each.reservation_pod}
            for each in on_gpu.gpu_groups
        ],
    }


def _limit(limit: LimitEvidence) -> Json:
    breach = limit.breach
    return {
        "resource": limit.resource.value,
        "standing": limit.standing.value,
        "limit_exceeded": breach.exceeded,
        "limit_exceeded_since_timestamp_seconds": breach.since_seconds if breach.exceeded else None,
        "limit_exceeded_seconds_total": breach.exceeded_seconds_total,
        "limit_breaches_total": breach.breaches_total,
        "above": [
            {"scope": cause.scope.value, "container": cause.container, "pid": cause.pid, "used": cause.used, "limit": cause.limit}
            for cause in limit.causes
        ],
    }


def _container(container: ContainerEvidence) -> Json:
    row = container.report
    return {
        "container": container.name,
        "container_id": container.container_id,
        "memory_used_bytes": row.memory_used_bytes if row else None,
        "memory_limit_bytes": row.limits.memory_bytes if row else None,
        "compute_limit_ratio": row.limits.compute_ratio if row else None,
        "processes": [_process(process) for process in container.processes],
    }


def _process(process: ProcessEvidence) -> Json:
    return {
        "pid": process.pid,
        "comm": process.comm,
        "memory_used_bytes": process.memory_used_bytes,
        "lists": list(process.lists),
        "cgroup": [{"pod_uid": ref.pod_uid, "container_id": ref.container_id} for ref in process.cgroup],
        "pod_uid": process.owner.pod_uid if isinstance(process.owner, Owner) else None,
        "container": process.owner.container if isinstance(process.owner, Owner) else None,
        "reason": process.counted_as.value if process.counted_as else None,
    }


def _claim(evidence: ClaimEvidence) -> Json:
    derivation = evidence.claim.derivation
    return {
        **build_claim(evidence.claim),
        "contract": str(derivation.contract) if derivation else None,
        "memory_rule": str(derivation.memory) if derivation and derivation.memory else None,
        "compute_rule": str(derivation.compute) if derivation and derivation.compute else None,
        "is_memory_limit": evidence.is_memory_limit,
        "is_compute_limit": evidence.is_compute_limit,
    }


def _allocation(allocation: Allocation) -> Json:
    derivation = allocation.derivation
    return {
        "container": allocation.container,
        "contract": str(derivation.contract) if derivation else None,
        "no_amount_because": str(derivation.memory) if derivation and derivation.memory else None,
    }


def _gpu(evidence: GpuEvidence) -> Json:
    report, reading = evidence.report, evidence.report.reading
    return {
        "gpu_uuid": report.gpu.gpu_uuid,
        "up": reading.up if reading else None,
        "memory_total_bytes": report.gpu.memory_total_bytes if reading else None,
        "memory_used_bytes": reading.memory_used_bytes if reading else None,
        "memory_reserved_bytes": reading.memory_reserved_bytes if reading else None,
        "memory_allocated_bytes": report.memory_allocated_bytes,
        "processes_memory_bytes": None if evidence.unknown_use else known_bytes(evidence.processes),
        "processes_memory_hidden": report.processes_memory_hidden,
        "use_unknown": evidence.unknown_use.value if evidence.unknown_use else None,
        "containers": [
            {
                "namespace": share.namespace,
                "pod": share.pod,
                "container": share.container,
                "memory_used_bytes": share.memory_used_bytes,
                "processes": [_process(process) for process in share.processes],
            }
            for share in evidence.containers
        ],
        "unattributed": [
            {
                "reason": reason.value,
                "memory_bytes": known_bytes(processes),
                "processes": [_process(process) for process in processes],
            }
            for reason, processes in evidence.unattributed.items()
        ],
    }
