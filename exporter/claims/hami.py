"""HAMi: what its scheduler granted, annotation `hami.io/vgpu-devices-allocated`; in its early form `4pd.io/vgpu-ids-new`.

Memory in MiB and compute in percent, for each GPU of each container, enforced by HAMi-core in the container. Cores of 0 and 100 mean that
compute is not limited. Limits in the pod's spec are requests and are not read. With memory oversold, claims may be larger than the card.

A container whose spec sets CUDA_DISABLE_CONTROL=true has its claim on paper only. https://github.com/Project-HAMi/HAMi
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exporter.claims.claim import NOT_MINE, Answer, Node, Resolver, System
from exporter.claims.device_tuples import UNBOUND_PHASES, Segment, asks_for, device_claims, parse_segments
from exporter.claims.quantity import shown
from exporter.snapshot import Container, ContainerKind, Pod

ALLOCATED = "hami.io/vgpu-devices-allocated"
EARLY_ALLOCATED = "4pd.io/vgpu-ids-new"
MIG_ALLOCATIONS = "hami.io/vgpu-mig-allocations"

COUNT_RESOURCE = "nvidia.com/gpu"

_BIND_PHASES = {ALLOCATED: "hami.io/bind-phase", EARLY_ALLOCATED: "4pd.io/bind-phase"}


def is_placed(pod: Pod) -> bool:
    """Answer whether HAMi placed the pod, so that the kubelet's device ids are none."""
    return bool(pod.annotations.get(_allocated_key(pod), "").strip())


def _allocated_key(pod: Pod) -> str:
    return ALLOCATED if ALLOCATED in pod.annotations else EARLY_ALLOCATED


def resolver(_node: Node) -> Resolver:
    """Answer the function that says what a pod was given by HAMi."""
    return resolve


def resolve(pod: Pod) -> Answer:
    """Answer what HAMi granted to the pod."""
    if not is_placed(pod):
        return NOT_MINE
    key = _allocated_key(pod)
    phase = pod.annotations.get(_BIND_PHASES[key])
    if phase in UNBOUND_PHASES:
        return Answer(not_placed=phase == "allocating")
    try:
        segments = parse_segments(pod.annotations[key])
        owners = _owners(pod, segments)
    except ValueError as error:
        return Answer(errors=(f"{key}: {error}",))
    try:
        mig_uuids = _parse_mig_allocations(pod.annotations.get(MIG_ALLOCATIONS, ""))
    except ValueError as error:
        return Answer(errors=(f"{MIG_ALLOCATIONS}: {error}",))
    return Answer(
        claims=tuple(
            claim
            for number, container in owners.items()
            if container.holds_claims
            for claim in device_claims("hami", key, container, _on_mig_devices(number, segments[number], mig_uuids))
        )
    )


def _on_mig_devices(number: int, segment: Segment, mig_uuids: Mapping[tuple[int, int], str]) -> Segment:
    return tuple(replace(device, gpu_uuid=mig_uuids.get((number, position), device.gpu_uuid)) for position, device in enumerate(segment))


def _owners(pod: Pod, segments: tuple[Segment, ...]) -> dict[int, Container]:
    """Answer which container each non-empty segment belongs to.

    HAMi v2.9.0 and later count init containers first, earlier ones do not count them, and v2.10.0 leaves out the slot of an init
    container without a GPU. The containers that ask for GPUs tell these apart; position decides where they do not.
    """
    init = [container for container in pod.containers if container.kind is ContainerKind.INIT]
    regular = [container for container in pod.containers if container.kind is ContainerKind.REGULAR]
    filled = [number for number, segment in enumerate(segments) if segment]
    candidates = [container for container in (*init, *regular) if asks_for(container, COUNT_RESOURCE)]
    if len(filled) == len(candidates):
        return dict(zip(filled, candidates, strict=True))
    for containers in ([*init, *regular], regular):
        if len(segments) == len(containers):
            return {number: containers[number] for number in filled}
    raise ValueError(
        f"{len(segments)} segments fit neither the pod's {len(init)} init and {len(regular)} other containers nor those that ask"
    )


def _parse_mig_allocations(text: str) -> Mapping[tuple[int, int], str]:
    """Answer (segment, device in it) -> MIG device, as far as they were made. Raises ValueError."""
    if not text.strip():
        return {}
    try:
        entries: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown(text)} is no JSON") from error
    if not isinstance(entries, list):
        raise ValueError(f"{shown(text)} is no list")
    uuids: dict[tuple[int, int], str] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError(f"{shown(text)} has an entry that is no object")
        segment, device, uuid = entry.get("containerIndex"), entry.get("deviceIndex"), entry.get("migUUID")
        if uuid in (None, ""):
            continue
        if not isinstance(uuid, str) or not isinstance(segment, int) or not isinstance(device, int):
            raise ValueError(f"{shown(text)} has an entry without containerIndex, deviceIndex and migUUID")
        uuids[segment, device] = uuid
    return uuids


SYSTEM = System(name="hami", resolver=resolver, places_by_annotation=is_placed, author_writable=True)
