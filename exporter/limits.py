"""What claims add up to: the limit of a container and of a pod on each GPU, per dimension. Pure.

Several systems may speak about one container; the tightest claim is its limit and every claim stays visible. A container's limit is its
tightest container-scoped claim, failing that its tightest process-scoped one. A pod's limit is its tightest pod-scoped claim, else the sum
of its containers' container-scoped limits; a container without a claim adds nothing, one that is explicitly unlimited takes the pod's limit
away.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exporter.claims.claim import Allocation, Claim, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLimits:
    """The limits of one container on one GPU."""

    memory_bytes: int | None = None
    compute_ratio: float | None = None
    container_memory_bytes: int | None = None
    """The tightest container-scoped memory claim."""
    process_memory_bytes: int | None = None
    """The tightest process-scoped memory claim: what each process is judged by."""
    container_compute_ratio: float | None = None
    """The tightest container-scoped compute claim. Process-scoped ones limit space and not time: they are never judged."""
    compute_unlimited: bool = False
    governing: Claim | None = None
    """The claim that the memory limit is made of, else the compute limit; None without a claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLimits:
    """The limits of one pod on one GPU."""

    memory_bytes: int | None = None
    compute_ratio: float | None = None


NO_CONTAINER_LIMITS = ContainerLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """What a pod was given of one GPU."""

    holders: frozenset[str] = frozenset()
    """Containers that were given the GPU, with or without an amount."""
    container_limits: Mapping[str, ContainerLimits] = field(default_factory=dict)
    """By container; one without a claim has none."""
    pod_claims: tuple[Claim, ...] = ()
    """Those of the pod as a whole."""


NO_SHARE = GpuShare()


def build_container_limits(claims: Iterable[Claim]) -> ContainerLimits:
    """Answer the limits that follow from the claims of one container on one GPU."""
    claims = tuple(claims)
    superseded = frozenset(name for claim in claims if claim.memory_bytes is not None for name in claim.supersedes)
    memory = [claim for claim in claims if claim.memory_bytes is not None and claim.system not in superseded]
    compute = [claim for claim in claims if claim.compute_ratio is not None]
    container_memory = _tightest_memory(memory, Scope.CONTAINER)
    process_memory = _tightest_memory(memory, Scope.PROCESS)
    container_compute = _tightest_compute(compute, Scope.CONTAINER)
    process_compute = _tightest_compute(compute, Scope.PROCESS)
    memory_claim, compute_claim = container_memory or process_memory, container_compute or process_compute
    return ContainerLimits(
        memory_bytes=memory_claim.memory_bytes if memory_claim else None,
        compute_ratio=compute_claim.compute_ratio if compute_claim else None,
        container_memory_bytes=container_memory.memory_bytes if container_memory else None,
        process_memory_bytes=process_memory.memory_bytes if process_memory else None,
        container_compute_ratio=container_compute.compute_ratio if container_compute else None,
        compute_unlimited=any(claim.compute_unlimited for claim in claims) and container_compute is None,
        governing=memory_claim or compute_claim or min(claims, key=lambda claim: claim.system, default=None),
    )


def _tightest_memory(claims: list[Claim], scope: Scope) -> Claim | None:
    return min((claim for claim in claims if claim.scope is scope), key=lambda claim: (claim.memory_bytes, claim.system), default=None)


def _tightest_compute(claims: list[Claim], scope: Scope) -> Claim | None:
    return min((claim for claim in claims if claim.scope is scope), key=lambda claim: (claim.compute_ratio, claim.system), default=None)


def build_pod_limits(pod_claims: Iterable[Claim], containers: Iterable[ContainerLimits]) -> PodLimits:
    """Answer the limits of a pod on one GPU from its pod-scoped claims and its containers' limits there."""
    pod_claims, containers = tuple(pod_claims), tuple(containers)
    memory = [claim.memory_bytes for claim in pod_claims if claim.memory_bytes is not None]
    compute = [claim.compute_ratio for claim in pod_claims if claim.compute_ratio is not None]
    memory_of_containers = [limits.container_memory_bytes for limits in containers if limits.container_memory_bytes is not None]
    compute_of_containers = [limits.container_compute_ratio for limits in containers if limits.container_compute_ratio is not None]
    unlimited = any(limits.compute_unlimited for limits in containers)
    return PodLimits(
        memory_bytes=min(memory, default=sum(memory_of_containers) if memory_of_containers else None),
        compute_ratio=min(compute, default=sum(compute_of_containers) if compute_of_containers and not unlimited else None),
    )


def build_gpu_shares(claims: Iterable[Claim], allocations: Iterable[Allocation]) -> dict[str, GpuShare]:
    """Answer by GPU what a pod was given, from all its claims and allocations."""
    grouped = group_by_gpu_and_container(claims)
    holders: dict[str, set[str]] = defaultdict(set)
    limits: dict[str, dict[str, ContainerLimits]] = defaultdict(dict)
    for gpu_uuid, container in [*grouped, *((allocation.gpu_uuid, allocation.container) for allocation in allocations)]:
        holders[gpu_uuid].update({container} - {""})
    for (gpu_uuid, container), theirs in grouped.items():
        if container:
            limits[gpu_uuid][container] = build_container_limits(theirs)
    return {
        gpu_uuid: GpuShare(
            holders=frozenset(containers),
            container_limits=limits[gpu_uuid],
            pod_claims=tuple(grouped.get((gpu_uuid, ""), ())),
        )
        for gpu_uuid, containers in holders.items()
    }


def group_by_gpu_and_container(claims: Iterable[Claim]) -> dict[tuple[str, str], list[Claim]]:
    """Answer the claims by (GPU, container); pod-scoped ones stand under the empty container."""
    grouped: dict[tuple[str, str], list[Claim]] = defaultdict(list)
    for claim in claims:
        grouped[claim.gpu_uuid, claim.container].append(claim)
    return grouped
