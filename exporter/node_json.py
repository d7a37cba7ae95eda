"""The report as JSON, for people's tools: what `/api/v1/node` answers. Pure.

The words are those of the metrics: a key is a metric's name without the entity in front. Unknown is null; 0 was measured. A key is never
left out, never changes its meaning and never goes within a version; new ones may come. The schema is docs/node.v1.schema.json.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exporter import __version__
from exporter.breach import Breach
from exporter.claims.claim import Claim
from exporter.health import Health, SourceHealth
from exporter.judge import Resource
from exporter.report import ClaimErrorReport, ClaimReport, ContainerReport, GpuReport, PodInfo, PodReport, Report

API_VERSION = "v1"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What does not change while the exporter runs."""

    node: str
    """Kubernetes name of the node."""
    simulated: bool
    """Whether the node is one from a scenario file."""
    sample_interval_seconds: float
    utilization_window_seconds: float
    compute_window_seconds: float


def render_json(value: Json) -> bytes:
    """Answer the JSON text. Whatever stands in a name is escaped, so the bytes are ASCII."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def build_node(about: About, health: Health, report: Report | None, *, age_seconds: float | None = None) -> Json:
    """Answer the node at one moment; without a report (none yet, or too old to be believed) all that is measured is null.

    `age_seconds` is how long ago the last sample was taken.
    """
    return {
        "api_version": API_VERSION,
        "version": __version__,
        "node": about.node,
        "simulated": about.simulated,
        "sample_interval_seconds": about.sample_interval_seconds,
        "utilization_window_seconds": about.utilization_window_seconds,
        "compute_window_seconds": about.compute_window_seconds,
        "last_sample_timestamp_seconds": health.last_sample_timestamp_seconds,
        "last_sample_age_seconds": age_seconds,
        "sources": [_source(source) for source in health.sources],
        "driver_version": report.driver_version if report else None,
        "gpus_unidentified": report.gpus_unidentified if report else None,
        "pods_dropped": report.pods_over_limit if report else None,
        "dropped_samples_total": dict(report.dropped_samples_total) if report else None,
        "gpus": [_gpu(gpu) for gpu in report.gpus] if report else None,
        "pods": _pods(report) if report else None,
        "claim_errors": [_claim_error(error) for error in report.claim_errors] if report else None,
    }


def _source(source: SourceHealth) -> Json:
    return {
        "source": source.source,
        "up": source.up,
        "reason": source.reason,
        "read_duration_seconds": source.read_duration_seconds,
        "errors_total": source.errors_total,
        "last_success_timestamp_seconds": source.last_success_timestamp_seconds,
    }


def _gpu(row: GpuReport) -> Json:
    gpu, reading = row.gpu, row.reading
    return {
        "gpu_uuid": gpu.gpu_uuid,
        "gpu": gpu.index,
        "minor": gpu.minor,
        "model": gpu.model,
        "pci_bus_id": gpu.pci_bus_id,
        "parent_gpu_uuid": gpu.parent_gpu_uuid,
        "mig_profile": gpu.mig_profile,
        "up": reading.up if reading else None,
        "memory_total_bytes": gpu.memory_total_bytes if reading else None,
        "memory_used_bytes": reading.memory_used_bytes if reading else None,
        "memory_reserved_bytes": reading.memory_reserved_bytes if reading else None,
        "utilization_ratio": reading.utilization_ratio if reading else None,
        "sm_utilization_ratio": reading.sm_utilization_ratio if reading else None,
        "memory_allocated_bytes": row.memory_allocated_bytes,
        "compute_allocated_ratio": row.compute_allocated_ratio,
        "pods": row.pods,
        "unattributed_memory_bytes": (
            None if row.unattributed_bytes is None else {reason.value: amount for reason, amount in row.unattributed_bytes.items()}
        ),
        "processes_memory_hidden": row.processes_memory_hidden,
    }


def _pods(report: Report) -> list[Json]:
    containers: dict[tuple[str, str], list[ContainerReport]] = defaultdict(list)
    for container in report.containers:
        containers[container.pod_uid, container.gpu_uuid].append(container)
    claims: dict[tuple[str, str], list[ClaimReport]] = defaultdict(list)
    for claim in report.claims:
        claims[claim.pod_uid, claim.claim.gpu_uuid].append(claim)
    on_gpus: dict[str, list[Json]] = defaultdict(list)
    for row in report.pods:
        key = row.pod_uid, row.gpu_uuid
        on_gpus[row.pod_uid].append(_pod_on_gpu(row, containers[key], claims[key]))
    return [_pod(info, on_gpus[info.pod_uid]) for info in report.pod_infos]


def _pod(info: PodInfo, on_gpus: list[Json]) -> Json:
    return {
        "namespace": info.namespace,
        "pod": info.pod,
        "pod_uid": info.pod_uid,
        "queue": info.queue,
        "owner_kind": info.owner_kind,
        "owner_name": info.owner_name,
        "scheduler": info.scheduler,
        "role": info.role,
        "gpus": on_gpus,
    }


def _pod_on_gpu(row: PodReport, containers: Iterable[ContainerReport], claims: Iterable[ClaimReport]) -> Json:
    return {
        "gpu_uuid": row.gpu_uuid,
        "memory_used_bytes": row.memory_used_bytes,
        "memory_limit_bytes": row.limits.memory_bytes,
        "compute_limit_ratio": row.limits.compute_ratio,
        "sm_utilization_ratio": row.sm_utilization_ratio,
        "sm_utilization_mean_ratio": row.sm_utilization_mean_ratio,
        "sm_busy_seconds_total": row.sm_busy_seconds_total,
        "limit_exceeded": _exceeded(row.breaches),
        "limit_exceeded_since_timestamp_seconds": {
            resource.value: breach.since_seconds if breach.exceeded else None for resource, breach in row.breaches.items()
        },
        "limit_exceeded_seconds_total": {resource.value: breach.exceeded_seconds_total for resource, breach in row.breaches.items()},
        "limit_breaches_total": {resource.value: breach.breaches_total for resource, breach in row.breaches.items()},
        "containers": [_container(container) for container in containers],
        "claims": [build_claim(row.claim) for row in claims],
    }


def _container(row: ContainerReport) -> Json:
    busy, governing = row.busy_total, row.limits.governing
    return {
        "container": row.container,
        "container_id": row.container_id,
        "processes": row.processes,
        "memory_used_bytes": row.memory_used_bytes,
        "memory_used_peak_bytes": row.memory_used_peak_bytes,
        "memory_limit_bytes": row.limits.memory_bytes,
        "compute_limit_ratio": row.limits.compute_ratio,
        "sm_utilization_ratio": row.sm_utilization_ratio,
        "sm_utilization_mean_ratio": row.sm_utilization_mean_ratio,
        "sm_busy_seconds_total": busy.sm if busy else None,
        "memory_bandwidth_busy_seconds_total": busy.memory_bandwidth if busy else None,
        "encoder_busy_seconds_total": busy.encoder if busy else None,
        "decoder_busy_seconds_total": busy.decoder if busy else None,
        "hami_core_memory_used_bytes": row.hami_core.memory_used_bytes,
        "hami_core_memory_limit_bytes": row.hami_core.memory_limit_bytes,
        "system": governing.system if governing else None,
        "enforced": governing.enforced if governing else None,
        "shares": governing.shares if governing else None,
        "limit_exceeded": _exceeded(row.breaches),
    }


def build_claim(claim: Claim) -> Json:
    """Answer what one sharing system says."""
    return {
        "container": claim.container,
        "system": claim.system,
        "scope": claim.scope.value,
        "memory_bytes": claim.memory_bytes,
        "compute_ratio": claim.compute_ratio,
        "enforced": claim.enforced,
        "shares": claim.shares,
    }


def _claim_error(row: ClaimErrorReport) -> Json:
    return {"namespace": row.namespace, "pod": row.pod, "system": row.system, "errors": list(row.errors)}


def _exceeded(breaches: Mapping[Resource, Breach]) -> Json:
    """Answer true, false or (unknown) null for each limit that there is."""
    return {resource.value: None if (exceeded := breach.exceeded) is None else bool(exceeded) for resource, breach in breaches.items()}
