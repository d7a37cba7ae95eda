"""The chain of evidence of one pod: its processes, its claims, its limits, its breaches, and what of them is not known."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from exporter.breach import Breach, State, Verdict
from exporter.claims import Grant
from exporter.claims.claim import Allocation, Claim, Scope
from exporter.claims.kai import GpuGroup, groups_of
from exporter.explain.process import ProcessEvidence, UnknownUse, processes_on, reading_of, unknown_use
from exporter.judge import Resource, look
from exporter.report import ContainerReport, Evidence, Missing, PodReport, Report, missing_limits
from exporter.snapshot import Container, Pod
from exporter.usage import Owner


class Standing(StrEnum):
    """How a pod stands to one limit. The order is that of urgency."""

    EXCEEDED = "exceeded"
    FROZEN = "frozen"
    """A breach goes on, and nothing can be said of it now."""
    RISING = "rising"
    """Above, for less than the hold."""
    UNKNOWN = "unknown"
    WITHIN = "within"
    NO_LIMIT = "no_limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A limit that is exceeded at this moment."""

    resource: Resource
    scope: Scope
    container: str
    """Empty: the limit is the pod's."""
    pid: int | None
    """The process, of a limit on each process."""
    used: float
    """Bytes of memory, or a share of compute."""
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitEvidence:
    """One resource of the pod on one GPU."""

    resource: Resource
    standing: Standing
    breach: Breach
    causes: tuple[Cause, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimEvidence:
    """A claim, and which limit it makes."""

    claim: Claim
    is_memory_limit: bool
    """Whether it is the tightest of its kind, and so the limit of its container or pod."""
    is_compute_limit: bool
    superseded_by: str | None
    """The system whose claim of memory takes this one's place in the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEvidence:
    """One container on one GPU."""

    name: str
    container_id: str | None
    report: ContainerReport | None
    """None: it uses nothing there, and was given nothing."""
    processes: tuple[ProcessEvidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOnGpu:
    """The pod on one GPU."""

    gpu_uuid: str
    report: PodReport | None
    """None: the pod is left out of the report, because there would be too many series."""
    containers: tuple[ContainerEvidence, ...]
    claims: tuple[ClaimEvidence, ...]
    allocations: tuple[Allocation, ...]
    """Those with which no amount goes."""
    gpu_groups: tuple[GpuGroup, ...]
    """KAI's reservation pods that place it there."""
    limits: tuple[LimitEvidence, ...]
    unknown_use: UnknownUse | None
    busy_is_known: bool
    is_mig: bool
    given_with_gpu_uuid: str | None
    """The GPU that was given to the pod and that this MIG device is a part of."""
    window_known_seconds: float
    """How much of the compute window is known."""

    @property
    def processes(self) -> tuple[ProcessEvidence, ...]:
        """Answer the pod's processes there."""
        return tuple(process for container in self.containers for process in container.processes)

    @property
    def is_given(self) -> bool:
        """Whether anyone gave the pod this GPU."""
        return bool(self.claims or self.allocations or self.given_with_gpu_uuid)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEvidence:
    """All that is known of one pod."""

    time_seconds: float
    pod: Pod
    role: str
    on_gpus: tuple[PodOnGpu, ...]
    claim_errors: Mapping[str, tuple[str, ...]]
    missing: tuple[Missing, ...]
    is_left_out: bool
    """Whether its series are left out, because there would be too many."""
    is_plumbing: bool
    breach_hold_seconds: float
    compute_window_seconds: float

    @property
    def name(self) -> str:
        """Answer the pod's name as people write it."""
        return f"{self.pod.namespace}/{self.pod.name}"


def gather_pod(report: Report, evidence: Evidence, pod: Pod) -> PodEvidence:
    """Answer the chain of evidence of one pod."""
    grant = evidence.grants.get(pod.uid, Grant())
    rows = {row.gpu_uuid: row for row in report.pods if row.pod_uid == pod.uid}
    uuids = {*rows, *(claim.gpu_uuid for claim in grant.claims), *(each.gpu_uuid for each in grant.allocations)}
    uuids |= {uuid for uuid, usage in evidence.usage.items() for owner in usage.by_owner if owner.pod_uid == pod.uid}
    info = next((info for info in report.pod_infos if info.pod_uid == pod.uid), None)
    is_system = grant.plumbing or pod.namespace in evidence.rules.system_namespaces | evidence.rules.kai_reservation_namespaces
    return PodEvidence(
        time_seconds=report.time_seconds,
        pod=pod,
        role=info.role if info else "system" if is_system else "workload",
        on_gpus=tuple(_on_gpu(report, evidence, pod, grant, rows.get(uuid), uuid) for uuid in sorted(uuids)),
        claim_errors=grant.errors,
        missing=missing_limits(grant, evidence.snapshot),
        is_left_out=bool(uuids) and info is None and report.pods_over_limit > 0,
        is_plumbing=grant.plumbing,
        breach_hold_seconds=evidence.rules.breach_hold_seconds,
        compute_window_seconds=evidence.rules.compute_window_seconds,
    )


def _on_gpu(report: Report, evidence: Evidence, pod: Pod, grant: Grant, row: PodReport | None, uuid: str) -> PodOnGpu:
    processes: dict[str, list[ProcessEvidence]] = {}
    for process in processes_on(evidence, uuid):
        if isinstance(process.owner, Owner) and process.owner.pod_uid == pod.uid:
            processes.setdefault(process.owner.container, []).append(process)
    reports = {each.container: each for each in report.containers if each.pod_uid == pod.uid and each.gpu_uuid == uuid}
    containers = tuple(
        _container(container, reports.get(container.name), processes.get(container.name, ()))
        for container in pod.containers
        if container.name in reports or container.name in processes
    )
    claims = tuple(claim for claim in grant.claims if claim.gpu_uuid == uuid)
    claimed = {claim.container for claim in claims}
    usage, activity, rules = evidence.usage.get(uuid), evidence.pod_activity.get((pod.uid, uuid)), evidence.rules
    reading = reading_of(evidence, uuid)
    parent = reading.gpu.parent_gpu_uuid if reading else None
    unknown = unknown_use(evidence, uuid)
    if unknown is None and any(process.memory_used_bytes is None for of_container in processes.values() for process in of_container):
        unknown = UnknownUse.MEMORY_HIDDEN
    return PodOnGpu(
        gpu_uuid=uuid,
        report=row,
        containers=containers,
        claims=_claims(claims, row, reports),
        allocations=tuple(
            sorted(
                (each for each in grant.allocations if each.gpu_uuid == uuid and not claimed & {"", each.container}),
                key=lambda each: each.container,
            )
        ),
        gpu_groups=tuple(group for group in report.gpu_groups if group.gpu_uuid == uuid and group.group in groups_of(pod)),
        limits=_limits(row, containers, missing=bool(missing_limits(grant, evidence.snapshot))),
        unknown_use=unknown,
        busy_is_known=usage is not None and usage.busy_by_owner is not None,
        is_mig=parent is not None,
        given_with_gpu_uuid=parent if any(each.gpu_uuid == parent for each in grant.allocations) else None,
        window_known_seconds=activity.known_seconds(report.monotonic_seconds, rules.compute_window_seconds) if activity else 0.0,
    )


def _container(container: Container, report: ContainerReport | None, processes: list[ProcessEvidence] | tuple[()]) -> ContainerEvidence:
    return ContainerEvidence(name=container.name, container_id=container.container_id, report=report, processes=tuple(processes))


def _claims(claims: tuple[Claim, ...], row: PodReport | None, containers: Mapping[str, ContainerReport]) -> tuple[ClaimEvidence, ...]:
    superseded = {(claim.container, name): claim.system for claim in claims if claim.memory_bytes is not None for name in claim.supersedes}
    gathered = []
    for claim in sorted(claims, key=lambda claim: (claim.container, claim.scope, claim.system)):
        memory_limit, compute_limit = _limits_of(claim, row, containers.get(claim.container))
        by = superseded.get((claim.container, claim.system)) if claim.memory_bytes is not None else None
        gathered.append(
            ClaimEvidence(
                claim=claim,
                is_memory_limit=claim.memory_bytes is not None and claim.memory_bytes == memory_limit and by is None,
                is_compute_limit=claim.compute_ratio is not None and claim.compute_ratio == compute_limit,
                superseded_by=by,
            )
        )
    return tuple(gathered)


def _limits_of(claim: Claim, row: PodReport | None, container: ContainerReport | None) -> tuple[int | None, float | None]:
    """Answer the limits that a claim of this scope may be."""
    if claim.scope is Scope.POD:
        return (row.limits.memory_bytes, row.limits.compute_ratio) if row else (None, None)
    if container is None:
        return None, None
    if claim.scope is Scope.CONTAINER:
        return container.limits.container_memory_bytes, container.limits.container_compute_ratio
    of_each_process = container.limits.container_compute_ratio is None
    return container.limits.process_memory_bytes, container.limits.compute_ratio if of_each_process else None


# --- limits and breaches ---


def _limits(row: PodReport | None, containers: tuple[ContainerEvidence, ...], *, missing: bool) -> tuple[LimitEvidence, ...]:
    if row is None:
        return ()
    return tuple(
        LimitEvidence(
            resource=resource,
            standing=_standing(breach),
            breach=breach,
            causes=_causes(resource, row, containers, limits_may_be_missing=missing),
        )
        for resource, breach in row.breaches.items()
    )


def _standing(breach: Breach) -> Standing:
    if breach.exceeded:
        return Standing.EXCEEDED
    if breach.is_on:
        return Standing.FROZEN
    if breach.state is State.RISING and breach.verdict is Verdict.ABOVE:
        return Standing.RISING
    return {Verdict.BELOW: Standing.WITHIN, Verdict.NO_LIMIT: Standing.NO_LIMIT}.get(breach.verdict, Standing.UNKNOWN)


def _causes(
    resource: Resource, row: PodReport, containers: tuple[ContainerEvidence, ...], *, limits_may_be_missing: bool
) -> tuple[Cause, ...]:
    """Answer the limits that are exceeded at this moment, the pod's own first, by the look that the judge takes."""
    looks: list[tuple[Scope, str, int | None, float | None, float | None]] = []
    if resource is Resource.MEMORY:
        looks.append((Scope.POD, "", None, row.memory_used_bytes, row.limits.memory_bytes))
    elif resource is Resource.COMPUTE:
        looks.append((Scope.POD, "", None, row.sm_utilization_mean_ratio, row.limits.compute_ratio))
    for container in containers:
        report = container.report
        if report is None:
            continue
        if resource is Resource.MEMORY:
            looks.append((Scope.CONTAINER, container.name, None, report.memory_used_bytes, report.limits.container_memory_bytes))
            looks += (
                (Scope.PROCESS, container.name, process.pid, process.memory_used_bytes, report.limits.process_memory_bytes)
                for process in container.processes
                if process.counted_as is None
            )
        elif resource is Resource.COMPUTE:
            looks.append((Scope.CONTAINER, container.name, None, report.sm_utilization_mean_ratio, report.limits.container_compute_ratio))
    return tuple(
        Cause(resource=resource, scope=scope, container=container, pid=pid, used=used, limit=limit)
        for scope, container, pid, used, limit in looks
        if used is not None and limit is not None and look(limit, used, limits_may_be_missing=limits_may_be_missing) is Verdict.ABOVE
    )
