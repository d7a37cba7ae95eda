"""The encoding that HAMi and Volcano share: `UUID,Type,MemMiB,CorePercent` ends with `:`, a container's devices end with `;`.

Which container a segment belongs to differs between the two and is theirs to say. Unreadable, as a whole: a device of fewer than four
fields, an empty UUID, a memory or percent field that is no non-negative decimal integer.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from exporter.claims.claim import MIB, Claim, Derivation, Phrase, Scope
from exporter.claims.hami_core import is_switched_off
from exporter.claims.quantity import MAX_BYTES, parse_keyed, parse_quantity, parse_unsigned, shown
from exporter.snapshot import Container

UNBOUND_PHASES = ("allocating", "failed")
"""Values of the bind-phase annotation with which there is no claim yet, or never."""

_FIELDS = 4
_WHOLE_PERCENT = 100
_MOST_DEVICES = 256
"""No node has that many; a tenant's annotation could name thousands, and each would be a series."""


@dataclass(frozen=True, slots=True)
class DeviceTuple:
    """One device of one container."""

    gpu_uuid: str
    memory_mib: int
    core_percent: int


Segment = tuple[DeviceTuple, ...]
"""The devices of one container."""


def parse_segments(text: str) -> tuple[Segment, ...]:
    """Answer the devices of each segment, empty segments included, the empty piece after a last `;` not. Raises ValueError."""
    pieces = text.split(";")
    if not pieces[-1].strip():
        pieces.pop()
    segments = tuple(tuple(_parse_device(device) for device in piece.split(":") if device.strip()) for piece in pieces)
    if sum(map(len, segments)) > _MOST_DEVICES:
        raise ValueError(f"{shown(text)} names more than {_MOST_DEVICES} devices")
    return segments


def _parse_device(text: str) -> DeviceTuple:
    fields = text.split(",")
    if len(fields) < _FIELDS:
        raise ValueError(f"{shown(text)} has fewer than four fields")
    # Old dynamic MIG writes GPU-a[template-position]: the parent and no id of NVML's.
    gpu_uuid = fields[0].partition("[")[0].strip()
    if not gpu_uuid:
        raise ValueError(f"{shown(text)} names no GPU")
    memory_mib = parse_keyed("memory", fields[2], lambda field: parse_unsigned(field, maximum=MAX_BYTES // MIB))
    return DeviceTuple(gpu_uuid, memory_mib, parse_keyed("cores", fields[3], parse_unsigned))


def device_claims(system: str, key: str, container: Container, devices: Iterable[DeviceTuple]) -> tuple[Claim, ...]:
    """Answer the claims that its tuples make for a container, one for each GPU: several slices of one GPU add up.

    `key` is the annotation in which they stand.
    To HAMi-core, which enforces them, 0 MiB is no limit of memory, and 0 percent or the whole GPU is none of compute.
    """
    by_gpu: dict[str, list[DeviceTuple]] = defaultdict(list)
    for device in devices:
        by_gpu[device.gpu_uuid].append(device)
    return tuple(_claim(system, key, container, gpu_uuid, of_gpu) for gpu_uuid, of_gpu in by_gpu.items())


def _claim(system: str, key: str, container: Container, gpu_uuid: str, devices: list[DeviceTuple]) -> Claim:
    unlimited = not all(0 < device.core_percent < _WHOLE_PERCENT for device in devices)
    memory_is_limited = all(device.memory_mib > 0 for device in devices)
    return Claim(
        system=system,
        gpu_uuid=gpu_uuid,
        container=container.name,
        scope=Scope.CONTAINER,
        memory_bytes=sum(device.memory_mib for device in devices) * MIB if memory_is_limited else None,
        compute_ratio=None if unlimited else sum(device.core_percent for device in devices) / 100,
        enforced=not is_switched_off(container),
        shares=len(devices),
        compute_unlimited=unlimited,
        derivation=_explain(key, container, gpu_uuid, devices, memory_is_limited=memory_is_limited, unlimited=unlimited),
    )


def _explain(
    key: str, container: Container, gpu_uuid: str, devices: list[DeviceTuple], *, memory_is_limited: bool, unlimited: bool
) -> Derivation:
    memory = " + ".join(["{} MiB"] * len(devices))
    percent = " + ".join(["{}"] * len(devices))
    if len(devices) > 1:
        percent = f"({percent})"
    return Derivation(
        contract=Phrase(f"annotation {key}, entry of container {{}} for GPU {{}}", (container.name, gpu_uuid)),
        memory=Phrase(f"{memory} (the third field)", tuple(device.memory_mib for device in devices))
        if memory_is_limited
        else Phrase("0 MiB is no limit"),
        compute=Phrase("0 or 100 percent is no limit")
        if unlimited
        else Phrase(f"{percent} / 100 (the fourth field, percent)", tuple(device.core_percent for device in devices)),
    )


def asks_for(container: Container, resource: str) -> bool:
    """Answer whether the container's limits hold the resource above zero. The API server writes 4000 as `4k`."""
    try:
        return resource in container.resource_limits and parse_quantity(container.resource_limits[resource]) > 0
    except ValueError:
        return False
