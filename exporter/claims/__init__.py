"""Who was given what, by which sharing system. A file per system, named as its label value; SYSTEMS is the registry.

`Granter` asks every system about a pod and answers one `Grant`. Systems do not know of each other's answers, with two exceptions: a
limit in a container's own environment (`container_env`) and one in HAMi-core's own region hold on each GPU that the container has, whoever
gave it that GPU.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from exporter.claims.aliyun import SYSTEM as ALIYUN
from exporter.claims.claim import Allocation, Answer, Claim, Node, Resolver, System
from exporter.claims.container_env import NAME as CONTAINER_ENV
from exporter.claims.container_env import resolve as resolve_container_env
from exporter.claims.dra import SYSTEM as DRA
from exporter.claims.gke import SYSTEM as GKE
from exporter.claims.hami import SYSTEM as HAMI
from exporter.claims.hami_core import SYSTEM as HAMI_CORE
from exporter.claims.hami_core import with_region_limits
from exporter.claims.kai import SYSTEM as KAI
from exporter.claims.kai_nvfractions import SYSTEM as KAI_NVFRACTIONS
from exporter.claims.koordinator import SYSTEM as KOORDINATOR
from exporter.claims.mig import SYSTEM as MIG
from exporter.claims.mps import SYSTEM as MPS
from exporter.claims.pins import Pin, Pins, resolve_pinned
from exporter.claims.time_slicing import SYSTEM as TIME_SLICING
from exporter.claims.volcano import SYSTEM as VOLCANO
from exporter.claims.whole_gpu import SYSTEM as WHOLE_GPU
from exporter.snapshot import Pod, PodAllocation

SYSTEMS: tuple[System, ...] = (
    KAI,
    KAI_NVFRACTIONS,
    HAMI_CORE,
    HAMI,
    VOLCANO,
    KOORDINATOR,
    ALIYUN,
    GKE,
    DRA,
    MIG,
    TIME_SLICING,
    MPS,
    WHOLE_GPU,
)

# A GPU that the driver does not list may be lost, or listed later; no node has more GPUs than this. Each costs memory and time for each pod
# that names it, and a pod's author can invent as many as fit into an annotation.
_MOST_UNLISTED_GPUS = 16

_NO_LIMITS: Mapping[tuple[str, str], int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What all systems together say of one pod."""

    claims: tuple[Claim, ...] = ()
    allocations: frozenset[Allocation] = frozenset()
    """Every (container, GPU) that the pod was given, with or without an amount. A container's own environment gives no GPU."""
    errors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """System -> what of its contract is unreadable."""
    not_placed: bool = False
    """A sound contract waits for its GPU."""
    unreadable: bool = False
    """A contract cannot be read and never could: what an edit made of a readable one is an error and leaves nothing unknown."""
    plumbing: bool = False
    """A part of a sharing system: it holds nothing and is never flagged."""


class Granter:
    """Answers what each pod of one node was given. Made anew for each snapshot."""

    def __init__(self, node: Node, believed: frozenset[str] = frozenset(), systems: tuple[System, ...] = SYSTEMS) -> None:
        """Take the node, and the UIDs of pods whose device ids of the kubelet were believed before."""
        self._gpus = node.gpus
        # A device id of a pod that its system places by annotation is no placement. Systems annotate before they bind, so an annotation
        # that comes later is the author's, and must not make the pod's GPUs unknown.
        placed_otherwise = {
            pod.uid for pod in node.pods if pod.uid not in believed and any(system.places_by_annotation(pod) for system in systems)
        }
        names = {(pod.namespace, pod.name) for pod in node.pods if pod.uid in placed_otherwise}
        kubelet_placed = {key: value for key, value in node.allocations.items() if key not in names}
        self.believed = frozenset(
            pod.uid
            for pod in node.pods
            if pod.uid in believed or (pod.uid not in placed_otherwise and _has_devices(node.allocations.get((pod.namespace, pod.name))))
        )
        """UIDs of the pods whose device ids of the kubelet are believed from now on."""
        others_view = replace(node, allocations=kubelet_placed)
        self._resolvers = [
            (system, self._bounded(system.resolver(others_view)) if system.author_writable else system.resolver(others_view))
            for system in systems
        ]

    def _bounded(self, resolver: Resolver) -> Resolver:
        """Answer the resolver without answers that name more GPUs than a node has, none of which the driver knows."""

        def resolve(pod: Pod) -> Answer:
            answer = resolver(pod)
            unlisted = {allocation.gpu_uuid for allocation in _allocations([answer])} - self._gpus.keys()
            if len(unlisted) <= _MOST_UNLISTED_GPUS:
                return answer
            return Answer(errors=(f"names {len(unlisted)} GPUs that the driver does not list; up to {_MOST_UNLISTED_GPUS} are believed",))

        return resolve

    def grant(
        self,
        pod: Pod,
        pins: Pins,
        gpus_used_by_container: Mapping[str, frozenset[str]],
        region_limits: Mapping[tuple[str, str], int] = _NO_LIMITS,
    ) -> tuple[Grant, Pins]:
        """Answer what the pod was given, and what of its own words is to be held against it from now on.

        `gpus_used_by_container` names, for each container, the GPUs on which it has processes now, and
        `region_limits` the bytes that HAMi-core's regions limit (container, GPU) to.
        """
        if pod.ended:
            return Grant(), {}
        answers: dict[str, Answer] = {}
        kept: dict[str, Pin] = {}
        for system, resolver in self._resolvers:
            if not system.author_writable:
                answers[system.name] = resolver(pod)
                continue
            answers[system.name], pin = resolve_pinned(resolver, pod, pins.get(system.name), self._gpus)
            if pin is not None:
                kept[system.name] = pin
        if any(answer.plumbing for answer in answers.values()):
            return Grant(plumbing=True), {}

        allocations = _allocations(answers.values())
        gpus_by_container = _gpus_by_container(allocations, gpus_used_by_container)
        not_by_author = _allocations(answers[system.name] for system, _ in self._resolvers if not system.author_writable)
        pin = pins.get(CONTAINER_ENV)
        numbered = _numbered(pin, gpus_by_container, _gpus_by_container(not_by_author, {}))
        answers[CONTAINER_ENV], pin = resolve_pinned(
            lambda pod: resolve_container_env(pod, gpus_by_container, numbered), pod, pin, self._gpus
        )
        if pin is not None:
            kept[CONTAINER_ENV] = replace(pin, gpus_by_container=numbered)
        claims = tuple(claim for answer in answers.values() for claim in answer.claims)
        return (
            Grant(
                claims=with_region_limits(pod, claims, region_limits, gpus_by_container),
                allocations=frozenset(allocations),
                errors={name: answer.errors for name, answer in answers.items() if answer.errors},
                not_placed=any(answer.not_placed for answer in answers.values()),
                unreadable=any(answer.errors and not answer.holds_despite_errors for answer in answers.values()),
            ),
            kept,
        )


def _has_devices(allocation: PodAllocation | None) -> bool:
    return allocation is not None and any(container.devices or container.dynamic_devices for container in allocation.containers)


def _allocations(answers: Iterable[Answer]) -> set[Allocation]:
    """Answer every GPU that these answers give; a claim is an allocation too."""
    answers = tuple(answers)
    allocations = {allocation for answer in answers for allocation in answer.allocations}
    return allocations | {Allocation(claim.container, claim.gpu_uuid) for answer in answers for claim in answer.claims}


def _numbered(
    pin: Pin | None, gpus_by_container: Mapping[str, frozenset[str]], not_by_author: Mapping[str, frozenset[str]]
) -> dict[str, frozenset[str]]:
    """Answer the GPUs among which limits by a device's number count: the first ones, and those that came by no word of the author."""
    first = {**gpus_by_container, **(pin.gpus_by_container if pin else {})}
    return {container: uuids | not_by_author.get(container, frozenset()) for container, uuids in first.items()}


def _gpus_by_container(allocations: set[Allocation], used: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    gpus: dict[str, set[str]] = defaultdict(set)
    for allocation in allocations:
        gpus[allocation.container].add(allocation.gpu_uuid)
    for container, uuids in used.items():
        gpus[container] |= uuids
    return {container: frozenset(uuids) for container, uuids in gpus.items() if container}
