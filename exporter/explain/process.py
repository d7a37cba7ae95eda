"""The processes of a GPU, each with its owner: what a report's use was added up from."""

from dataclasses import dataclass
from enum import StrEnum

from exporter.report import Evidence
from exporter.snapshot import CgroupRef, GpuReading
from exporter.usage import Owner, Unattributed, owner_now


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEvidence:
    """One process on one GPU."""

    pid: int
    comm: str | None
    """None: it is gone."""
    lists: tuple[str, ...]
    """Which of NVML's lists name it."""
    memory_used_bytes: int | None
    """None: the driver hides it."""
    cgroup: tuple[CgroupRef, ...]
    owner: Owner | Unattributed
    counted_as: Unattributed | None
    """The reason under which its memory is counted; None where it is its container's."""


class UnknownUse(StrEnum):
    """Why it is not known who uses a GPU, or how much."""

    DRIVER_DOWN = "driver_down"
    PROCFS_DOWN = "procfs_down"
    GPU_NOT_LISTED = "gpu_not_listed"
    GPU_DOWN = "gpu_down"
    PROCESSES_UNREADABLE = "processes_unreadable"
    MEMORY_HIDDEN = "memory_hidden"


def reading_of(evidence: Evidence, gpu_uuid: str) -> GpuReading | None:
    """Answer what the driver said of a GPU."""
    nvml = evidence.snapshot.nvml
    return next((reading for reading in nvml.gpus if reading.gpu.gpu_uuid == gpu_uuid), None) if nvml else None


def unknown_use(evidence: Evidence, gpu_uuid: str) -> UnknownUse | None:
    """Answer why it is not known who uses a GPU; None where it is."""
    if gpu_uuid in evidence.usage:
        return None
    if evidence.snapshot.nvml is None:
        return UnknownUse.DRIVER_DOWN
    reading = reading_of(evidence, gpu_uuid)
    if reading is None:
        return UnknownUse.GPU_NOT_LISTED
    if not reading.up:
        return UnknownUse.GPU_DOWN
    return UnknownUse.PROCESSES_UNREADABLE if evidence.snapshot.procfs is not None else UnknownUse.PROCFS_DOWN


def processes_on(evidence: Evidence, gpu_uuid: str) -> tuple[ProcessEvidence, ...]:
    """Answer the processes that the driver lists on a GPU, by PID; none where that or their owners are unknown."""
    reading, procfs = reading_of(evidence, gpu_uuid), evidence.snapshot.procfs
    if gpu_uuid not in evidence.usage or reading is None or procfs is None:
        return ()
    processes = []
    for process in sorted(reading.processes or (), key=lambda process: process.pid):
        facts = procfs.processes.get(process.pid)
        owner = owner_now(process.pid, procfs, evidence.identities)
        processes.append(
            ProcessEvidence(
                pid=process.pid,
                comm=facts.comm if facts else None,
                lists=tuple(sorted(process.kinds)),
                memory_used_bytes=process.memory_used_bytes,
                cgroup=facts.cgroup if facts else (),
                owner=owner,
                counted_as=_counted_as(owner, evidence, gpu_uuid),
            )
        )
    return tuple(processes)


def _counted_as(owner: Owner | Unattributed, evidence: Evidence, gpu_uuid: str) -> Unattributed | None:
    if isinstance(owner, Unattributed):
        return owner
    use = evidence.usage[gpu_uuid].by_owner[owner]
    return Unattributed.PARTLY_HIDDEN if use.memory_used_bytes is None else None


def known_bytes(processes: tuple[ProcessEvidence, ...]) -> int:
    """Answer what these processes hold together, as far as the driver tells it."""
    return sum(process.memory_used_bytes or 0 for process in processes)
