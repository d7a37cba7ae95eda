"""KAI Scheduler's fractions: annotation `gpu-fraction` or `gpu-memory`, placed through reservation pods. Nothing enforces them.

The pod's group labels (`runai-gpu-group`, or one `runai-gpu-group/<group>` for each of several devices) name reservation pods, and those
carry the GPU's UUID in an annotation whose name says index. No annotation of the pod itself carries the UUID or the granted bytes: the
amounts are what the scheduler computes, from the node label nvidia.com/gpu.memory in MiB, floored to a multiple of 100.

https://github.com/kai-scheduler/KAI-Scheduler (docs/gpu-sharing)
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from exporter.claims.claim import MIB, NOT_MINE, Answer, Claim, Derivation, Node, Phrase, Resolver, Scope, System
from exporter.claims.quantity import MAX_BYTES, parse_fraction, parse_keyed, parse_unsigned, shown
from exporter.snapshot import Container, ContainerKind, Pod

FRACTION = "gpu-fraction"
MEMORY = "gpu-memory"
CONTAINER_NAME = "gpu-fraction-container-name"
GROUP_LABEL = "runai-gpu-group"
MEMORY_LABEL = "nvidia.com/gpu.memory"
NVFRACTIONS_PREFIX = "nvidia.com/container."

_NVFRACTIONS = re.compile(re.escape(NVFRACTIONS_PREFIX) + r"(.+)\.gpu-memory\.(?:request|limit)")
_UUID_ANNOTATION = "run.ai/reserve_for_gpu_index"
_QUEUE_LABELS = ("kai.scheduler/queue", "runai/queue")
_COUNT_RESOURCE = "nvidia.com/gpu"
_FIRST_VALUE_IN_BYTES = 1 << 20
_FLOORED = f"in MiB; the node label {MEMORY_LABEL} is {{}}, floored to a multiple of 100, and the product is taken in float64"


@dataclass(frozen=True, slots=True, order=True)
class GpuGroup:
    """One reservation pod that tells its GPU."""

    group: str
    gpu_uuid: str
    reservation_namespace: str
    reservation_pod: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where KAI put a pod: GPU uuids, none where that cannot be told yet, and an error for a group that two GPUs claim."""

    gpu_uuids: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a fraction pod asks of each of its devices: one of the two is given."""

    fraction: float | None
    memory_mib: int | None


class Groups:
    """The GPU groups of one node."""

    def __init__(self, node: Node) -> None:
        uuids: dict[str, set[str]] = defaultdict(set)
        for group in gpu_groups(node):
            uuids[group.group].add(group.gpu_uuid)
        self._uuids: Mapping[str, set[str]] = uuids

    def placement(self, pod: Pod) -> Placement:
        """Answer the GPUs of the pod's groups; none where one of them has no reservation pod with a UUID yet.

        A group with reservation pods of different GPUs is an error and places nothing; the pod's other groups stay.
        """
        uuids = {group: self._uuids.get(group, set()) for group in groups_of(pod)}
        ambiguous = sorted(group for group, of_group in uuids.items() if len(of_group) > 1)
        error = f"group {shown(ambiguous[0])} has reservation pods of different GPUs" if ambiguous else None
        if not all(uuids.values()):
            return Placement(error=error)
        return Placement(tuple(sorted(uuid for group, of_group in uuids.items() if group not in ambiguous for uuid in of_group)), error)


def groups_of(pod: Pod) -> frozenset[str]:
    """Answer the GPU groups that the pod's labels name."""
    prefix = f"{GROUP_LABEL}/"
    return frozenset(value for key, value in pod.labels.items() if (key == GROUP_LABEL or key.startswith(prefix)) and value)


def _is_reservation(pod: Pod, node: Node) -> bool:
    return pod.namespace in node.kai_reservation_namespaces and GROUP_LABEL in pod.labels


def gpu_groups(node: Node) -> tuple[GpuGroup, ...]:
    """Answer the reservation pods of this node that tell their GPU, sorted; those that have finished do not count."""
    return tuple(
        sorted(
            GpuGroup(pod.labels[GROUP_LABEL], uuid, pod.namespace, pod.name)
            for pod in node.pods
            if _is_reservation(pod, node) and not pod.ended and (uuid := pod.annotations.get(_UUID_ANNOTATION, ""))
        )
    )


def queue(pod: Pod) -> str | None:
    """Answer the pod's queue."""
    return next((pod.labels[label] for label in _QUEUE_LABELS if label in pod.labels), None)


def wants_fraction(pod: Pod) -> bool:
    """Answer whether the pod asks for a fraction: either key is there, whatever its value."""
    return FRACTION in pod.annotations or MEMORY in pod.annotations


def requesting_containers(pod: Pod) -> tuple[str, ...]:
    """Answer the containers for which NvFractions annotations ask, which take the place of the older ones; sorted by name."""
    return tuple(sorted({match[1] for key in pod.annotations if (match := _NVFRACTIONS.fullmatch(key))}))


def has_nvfractions(pod: Pod) -> bool:
    """Answer whether any container of the pod asks by NvFractions annotations."""
    return bool(requesting_containers(pod))


def fraction_container(pod: Pod) -> Container:
    """Answer the one container that the fraction is for. Raises ValueError where the pod has no container of the given name."""
    name = pod.annotations.get(CONTAINER_NAME)
    candidates = [each for each in pod.containers if each.kind is not ContainerKind.EPHEMERAL]
    if name is None:
        candidates = [each for each in candidates if each.kind is ContainerKind.REGULAR]
    for container in candidates:
        if name is None or container.name == name:
            return container
    raise ValueError(f"{CONTAINER_NAME}: the pod has no container {shown(name or '')}")


def parse_request(pod: Pod) -> Request:
    """Answer what the annotations ask for. Raises ValueError for what KAI's own admission refuses."""
    fraction, memory = pod.annotations.get(FRACTION), pod.annotations.get(MEMORY)
    if fraction is not None and memory is not None:
        raise ValueError(f"{FRACTION} and {MEMORY} exclude each other")
    if any(container.resource_limits.get(_COUNT_RESOURCE, "0") != "0" for container in pod.containers):
        raise ValueError(f"{FRACTION if memory is None else MEMORY} and a limit of {_COUNT_RESOURCE} exclude each other")
    if fraction is not None:
        return Request(parse_keyed(FRACTION, fraction, parse_fraction), None)
    memory_mib = parse_keyed(MEMORY, memory or "", parse_unsigned)
    if not 0 < memory_mib <= MAX_BYTES // MIB:
        raise ValueError(f"{MEMORY}: {shown(memory or '')} is no amount of memory in MiB")
    return Request(None, memory_mib)


def label_mib(node: Node) -> int | None:
    """Answer the node label nvidia.com/gpu.memory in MiB; None where it is missing or is no positive number."""
    try:
        value = parse_unsigned(node.labels.get(MEMORY_LABEL, ""), maximum=MAX_BYTES)
    except ValueError:
        return None
    return (value // MIB if value >= _FIRST_VALUE_IN_BYTES else value) or None


def scheduler_mib(node: Node) -> int | None:
    """Answer the scheduler's idea of a device's memory: the label floored to a multiple of 100."""
    value = label_mib(node)
    return (value - value % 100) or None if value is not None else None


def compute_share(request: Request, scheduler_memory_mib: int | None) -> float | None:
    """Answer the share of compute per device; of a request by memory it is unknown without the node's label."""
    if request.fraction is not None:
        return request.fraction
    if request.memory_mib is None or scheduler_memory_mib is None:
        return None
    # In float64 like the scheduler, whose 5705 of 81500 is 0.08.
    return math.ceil(request.memory_mib / scheduler_memory_mib * 100) / 100


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod was given by KAI."""
    groups = Groups(node)

    def resolve(pod: Pod) -> Answer:
        if _is_reservation(pod, node):
            return Answer(plumbing=True)
        if not wants_fraction(pod) or has_nvfractions(pod):
            return NOT_MINE
        try:
            container = fraction_container(pod)
            if not container.holds_claims:
                return NOT_MINE
            request = parse_request(pod)
        except ValueError as error:
            return Answer(errors=(str(error),))
        placement = groups.placement(pod)
        devices = Counter(placement.gpu_uuids)
        return Answer(
            claims=tuple(_claim(node, pod, container, request, uuid, count) for uuid, count in devices.items()),
            errors=(placement.error,) if placement.error else (),
            not_placed=not devices and not placement.error,
        )

    return resolve


def _claim(node: Node, pod: Pod, container: Container, request: Request, gpu_uuid: str, devices: int) -> Claim:
    """Answer the claim on one GPU; two groups of one pod may stand for the same GPU, and each is a device to KAI."""
    scheduler_memory_mib = scheduler_mib(node)
    compute_ratio = compute_share(request, scheduler_memory_mib)
    memory_bytes, of_memory = _memory_bytes(node, request, scheduler_memory_mib, gpu_uuid)
    of_compute = _explain_compute(node, request, scheduler_memory_mib)
    return Claim(
        system="kai",
        gpu_uuid=gpu_uuid,
        container=container.name,
        scope=Scope.CONTAINER,
        memory_bytes=None if memory_bytes is None else memory_bytes * devices,
        compute_ratio=None if compute_ratio is None else compute_ratio * devices,
        enforced=False,
        shares=devices,
        derivation=Derivation(
            contract=request_phrase(pod),
            memory=_on_devices(of_memory, memory_bytes, devices),
            compute=_on_devices(of_compute, compute_ratio, devices),
        ),
    )


def request_phrase(pod: Pod) -> Phrase:
    """Answer what the pod asks for, and by which labels it was placed."""
    key = FRACTION if FRACTION in pod.annotations else MEMORY
    groups = ", ".join(sorted(groups_of(pod)))
    return Phrase(f"annotation {key}: {{}}, on the GPU that the reservation pod of group {{}} tells", (pod.annotations[key], groups))


def _on_devices(phrase: Phrase, amount: float | None, devices: int) -> Phrase:
    if amount is None or devices == 1:
        return phrase
    arithmetic, remark, rest = phrase.template.partition(" (")
    return Phrase(f"{arithmetic} x {devices}{remark}{rest}", phrase.operands)


def _explain_compute(node: Node, request: Request, scheduler_memory_mib: int | None) -> Phrase:
    if request.fraction is not None:
        return Phrase("{} (of each device)", (request.fraction,))
    if request.memory_mib is None or scheduler_memory_mib is None:
        return Phrase(f"not known, because it follows from the node label {MEMORY_LABEL}, which tells no amount")
    return Phrase(f"ceil({{}} / {{}} x 100) / 100 ({_FLOORED})", (request.memory_mib, scheduler_memory_mib, node.labels[MEMORY_LABEL]))


def _memory_bytes(node: Node, request: Request, scheduler_memory_mib: int | None, gpu_uuid: str) -> tuple[int | None, Phrase]:
    if request.memory_mib is not None:
        return request.memory_mib * MIB, Phrase("{} MiB (of each device)", (request.memory_mib,))
    if request.fraction is None or node.facts is None:
        # Only a Node object without the label says that the scheduler had none; one never read says nothing.
        return None, Phrase(f"not known, because it follows from the node label {MEMORY_LABEL}, and the Node object was never read")
    if scheduler_memory_mib is not None:
        # The product is taken in float64 and cut off, as the scheduler does: 0.57 of 81500 is 46454 and not 46455.
        memory_bytes = int(request.fraction * scheduler_memory_mib) * MIB
        return memory_bytes, Phrase(
            f"floor({{}} x {{}}) MiB ({_FLOORED})", (request.fraction, scheduler_memory_mib, node.labels[MEMORY_LABEL])
        )
    total = node.gpus[gpu_uuid].memory_total_bytes if gpu_uuid in node.gpus else None
    if total is None:
        return None, Phrase("not known, because the driver does not tell the GPU's memory, and the node has no label for it")
    rule = Phrase(
        "floor({} x {}) MiB (of the GPU's memory as the driver tells it: the node has no label for it)", (request.fraction, total / MIB)
    )
    return int(request.fraction * total) // MIB * MIB, rule


SYSTEM = System(name="kai", resolver=resolver, author_writable=True)
