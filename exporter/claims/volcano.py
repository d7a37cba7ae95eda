"""Volcano: vGPUs, annotation `volcano.sh/vgpu-ids-new`, and its older gpushare, annotation `volcano.sh/gpu-index`.

The encoding of vGPUs is HAMi's, but a container that asks for no vGPU has no segment: the k-th segment belongs to the k-th container whose
limits hold `volcano.sh/vgpu-number`. Enforced by HAMi-core. Of gpushare the annotation names the pod's GPUs by N of /dev/nvidiaN, and a
container's limit `volcano.sh/gpu-memory` is its share of the one GPU, which nothing enforces; GPUs by `volcano.sh/gpu-number` are an
allocation.

Memory is in units of the device plugin's gpu memory factor, which does not stand on the pod: 1 MiB, the default, is taken.
https://github.com/volcano-sh/volcano (docs, GPU virtualization) and https://github.com/volcano-sh/devices
"""

from collections.abc import Mapping

from exporter.claims.claim import MIB, NOT_MINE, Allocation, Answer, Claim, Derivation, Node, Phrase, Resolver, Scope, System
from exporter.claims.device_tuples import UNBOUND_PHASES, Segment, asks_for, device_claims, parse_segments
from exporter.claims.quantity import MAX_BYTES, parse_keyed, parse_quantity, parse_unsigned, shown
from exporter.snapshot import Container, ContainerKind, Gpu, Pod

ALLOCATED = "volcano.sh/vgpu-ids-new"
BIND_PHASE = "volcano.sh/bind-phase"
COUNT_RESOURCE = "volcano.sh/vgpu-number"

GPUSHARE_INDEX = "volcano.sh/gpu-index"
GPUSHARE_ASSIGNED = "volcano.sh/gpu-assigned"
GPUSHARE_MEMORY = "volcano.sh/gpu-memory"
GPUSHARE_NUMBER = "volcano.sh/gpu-number"


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod was given by Volcano."""
    by_minor = node.gpus_by_minor

    def resolve(pod: Pod) -> Answer:
        if pod.annotations.get(ALLOCATED, "").strip():
            return _resolve_vgpu(pod)
        return _resolve_gpushare(pod, by_minor)

    return resolve


def is_placed(pod: Pod) -> bool:
    """Answer whether Volcano placed the pod's vGPUs, so that the kubelet's device ids are none.

    An annotation can be edited, what a pod asks for cannot: nobody hides the kubelet's word by writing one.
    """
    return ALLOCATED in pod.annotations and any(asks_for(container, COUNT_RESOURCE) for container in pod.containers)


def _resolve_vgpu(pod: Pod) -> Answer:
    phase = pod.annotations.get(BIND_PHASE)
    if phase in UNBOUND_PHASES:
        return Answer(not_placed=phase == "allocating")
    try:
        owned = _owned(pod, parse_segments(pod.annotations[ALLOCATED]))
    except ValueError as error:
        return Answer(errors=(f"{ALLOCATED}: {error}",))
    return Answer(
        claims=tuple(
            claim
            for container, segment in owned
            if container.holds_claims
            for claim in device_claims("volcano", ALLOCATED, container, segment)
        )
    )


def _owned(pod: Pod, segments: tuple[Segment, ...]) -> list[tuple[Container, Segment]]:
    filled = [segment for segment in segments if segment]
    containers = [each for each in pod.containers if each.kind is ContainerKind.REGULAR and asks_for(each, COUNT_RESOURCE)]
    if len(filled) != len(containers):
        raise ValueError(f"{len(filled)} segments for {len(containers)} containers that ask for {COUNT_RESOURCE}")
    return list(zip(containers, filled, strict=True))


def _resolve_gpushare(pod: Pod, by_minor: Mapping[int, Gpu]) -> Answer:
    sharers = [container for container in pod.containers if asks_for(container, GPUSHARE_MEMORY)]
    whole = any(asks_for(container, GPUSHARE_NUMBER) for container in pod.containers)
    if not (sharers or whole) or GPUSHARE_INDEX not in pod.annotations:
        return NOT_MINE
    if pod.annotations.get(GPUSHARE_ASSIGNED) == "false":
        return Answer(not_placed=True)
    try:
        gpus = _gpushare_gpus(pod.annotations[GPUSHARE_INDEX], by_minor)
        if not sharers:
            derivation = Derivation(contract=Phrase(f"annotation {GPUSHARE_INDEX}: {{}}", (pod.annotations[GPUSHARE_INDEX],)))
            return Answer(allocations=tuple(Allocation("", gpu.gpu_uuid, derivation) for gpu in gpus))
        if len(gpus) > 1:
            raise ValueError(f"{GPUSHARE_INDEX}: several GPUs for one {GPUSHARE_MEMORY}")  # noqa: TRY301 - one error for all
        return Answer(claims=tuple(_gpushare_claim(each, gpus[0]) for each in sharers if each.holds_claims))
    except ValueError as error:
        return Answer(errors=(str(error),))


def _gpushare_gpus(text: str, by_minor: Mapping[int, Gpu]) -> list[Gpu]:
    minors = dict.fromkeys(parse_keyed(GPUSHARE_INDEX, piece, parse_unsigned) for piece in text.split(","))
    if unknown := [minor for minor in minors if minor not in by_minor]:
        raise ValueError(f"{GPUSHARE_INDEX}: no GPU here has minor number {unknown[0]}")
    return [by_minor[minor] for minor in minors]


def _gpushare_claim(container: Container, gpu: Gpu) -> Claim:
    memory_mib = parse_keyed(GPUSHARE_MEMORY, container.resource_limits[GPUSHARE_MEMORY], parse_quantity)
    memory_bytes = memory_mib * MIB
    if memory_bytes > MAX_BYTES:
        raise ValueError(f"{GPUSHARE_MEMORY}: {shown(container.resource_limits[GPUSHARE_MEMORY])} is no amount of memory")
    return Claim(
        system="volcano",
        gpu_uuid=gpu.gpu_uuid,
        container=container.name,
        scope=Scope.CONTAINER,
        memory_bytes=memory_bytes,
        enforced=False,
        derivation=Derivation(
            contract=Phrase(
                f"limit {GPUSHARE_MEMORY} of the container: {{}}, on the GPU of minor number {{}} by annotation {GPUSHARE_INDEX}",
                (container.resource_limits[GPUSHARE_MEMORY], str(gpu.minor)),
            ),
            memory=Phrase("{} MiB (a unit is 1 MiB, the device plugin's default)", (memory_mib,)),
        ),
    )


SYSTEM = System(name="volcano", resolver=resolver, places_by_annotation=is_placed, author_writable=True)
