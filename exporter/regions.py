"""What HAMi-core itself counts: the regions of its containers, joined with the processes that NVML lists. Pure.

A folder's name is no proof: Volcano's device plugin may write another container's name on it, and where all containers share the folders
any of them can write anything. A PID alone is none either. So a region is a container's where both say so: its place names the container,
and a process that it counts for is one of that very container. What no living process of the container stands for is counted for no one.

The library does not know of processes that were killed, and may take another process's PID for its own. A slot whose process NVML does
not list holds nothing any more; one whose process belongs to someone else, or that has no PID, leaves the sum unknown unless it is 0.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from exporter.snapshot import FoundRegion, Region, RegionSlot
from exporter.usage import Owner, Unattributed

Alive = Mapping[int, Owner | Unattributed]
"""Whose each PID is that NVML lists and that is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreCount:
    """What HAMi-core counts for one container on one GPU."""

    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    """None: no limit, or it cannot be told which of several stands for this GPU."""


NOT_COUNTED = CoreCount()


def build_core_counts(found: Iterable[FoundRegion], alive: Alive) -> dict[tuple[Owner, str], CoreCount]:
    """Answer what the library counts, by container and GPU. A container with more than one living region has no answer."""
    regions: dict[Owner, list[tuple[Region, frozenset[Owner]]]] = defaultdict(list)
    for each in found:
        named = _owners_named(each, alive)
        for owner in named & _owners_inside(each.region, alive):
            regions[owner].append((each.region, named))
    counts = {}
    for owner, theirs in regions.items():
        if len(theirs) > 1:
            continue
        region, named = theirs[0]
        limit = _limit_on_each(region)
        for index, gpu_uuid in enumerate(region.gpu_uuids):
            if gpu_uuid is not None:
                used = _used(region.slots, index, owner, named, alive)
                counts[owner, gpu_uuid] = CoreCount(memory_used_bytes=used, memory_limit_bytes=limit)
    return counts


def _owners_named(found: FoundRegion, alive: Alive) -> frozenset[Owner]:
    in_folders = {owner for owner in alive.values() if isinstance(owner, Owner) and (owner.pod_uid, owner.container) in found.containers}
    return frozenset(in_folders.union(owner for pid in found.pids if isinstance(owner := alive.get(pid), Owner)))


def _owners_inside(region: Region, alive: Alive) -> frozenset[Owner]:
    return frozenset(owner for pid in _host_pids(region.slots) if isinstance(owner := alive.get(pid), Owner))


def _host_pids(slots: Iterable[RegionSlot]) -> Iterator[int]:
    return (slot.host_pid for slot in slots if slot.host_pid is not None)


def _limit_on_each(region: Region) -> int | None:
    """Answer the limit that all GPUs have: limits and GPUs stand in two orders that need not agree."""
    limits = set(region.memory_limit_bytes)
    return limits.pop() if len(limits) == 1 else None


def _used(slots: Iterable[RegionSlot], index: int, owner: Owner, named: frozenset[Owner], alive: Alive) -> int | None:
    used = 0
    counted: set[int] = set()
    for slot in slots:
        if slot.host_pid is not None and slot.host_pid not in alive:
            continue
        if slot.host_pid is not None and (whose := alive[slot.host_pid]) != owner and whose in named:
            continue  # One of two containers that share the region.
        if slot.memory_used_bytes is None:
            return None
        if slot.memory_used_bytes[index] == 0:
            continue
        if slot.host_pid is None or alive[slot.host_pid] != owner or slot.host_pid in counted:
            return None
        counted.add(slot.host_pid)
        used += slot.memory_used_bytes[index]
    return used
