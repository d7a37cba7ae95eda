"""Who uses what: the processes that NVML lists, joined with the containers that the node knows. Pure.

Conservation: on every GPU whose processes are known, the memory of all containers and the unattributed memory add up to the memory
of all processes. Nothing is counted twice and nothing vanishes. Where attribution is impossible (no /proc of the host, a GPU that does
not answer) there is no answer, rather than a partial one.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from exporter.snapshot import GpuProcess, GpuReading, Pod, ProcessBusy, ProcessFacts, ProcfsReading

# /proc's comm is cut to 15 characters: this is nvidia-cuda-mps-server, and nvidia-cuda-mps-control, which uses no GPU.
_MPS_SERVER_COMM = "nvidia-cuda-mps"


class Unattributed(StrEnum):
    """Why a process's memory has no container."""

    HOST_PROCESS = "host_process"
    PROCESS_GONE = "process_gone"
    UNKNOWN_CONTAINER = "unknown_container"
    MPS_SERVER = "mps_server"
    EXPORTER = "exporter"
    PARTLY_HIDDEN = "partly_hidden"


@dataclass(frozen=True, slots=True)
class Owner:
    """The container that a process belongs to."""

    pod_uid: str
    container: str
    container_id: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose a PID is at one moment. The start time tells a PID that was given to another process."""

    start_time_ticks: int
    owner: Owner | Unattributed


@dataclass(frozen=True, slots=True, kw_only=True)
class BusySeconds:
    """Engine time: utilization x time, in seconds."""

    sm: float = 0.0
    memory_bandwidth: float = 0.0
    encoder: float = 0.0
    decoder: float = 0.0

    def __add__(self, other: "BusySeconds") -> "BusySeconds":
        return BusySeconds(
            sm=self.sm + other.sm,
            memory_bandwidth=self.memory_bandwidth + other.memory_bandwidth,
            encoder=self.encoder + other.encoder,
            decoder=self.decoder + other.decoder,
        )


IDLE = BusySeconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What one container uses of one GPU now."""

    memory_used_bytes: int | None = 0
    """Sum over its processes; None when the driver hides one of them."""
    processes: int = 0
    largest_process_bytes: int | None = 0
    """The largest of its processes, which a limit on each process is judged by; None when one is hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """Who uses one GPU. It exists only while its processes and their owners can be known."""

    by_owner: Mapping[Owner, Use] = field(default_factory=dict)
    unattributed_bytes: Mapping[Unattributed, int] = field(default_factory=dict)
    busy_by_owner: Mapping[Owner, BusySeconds] | None = None
    """Since the previous reading; None where the driver does not tell. An owner that is absent was idle."""


class Owners:
    """Answers whose a process is, among the pods that this node knows now."""

    def __init__(self, pods: Iterable[Pod], system_namespaces: frozenset[str]) -> None:
        self._pods: dict[str, Pod] = {}
        self._by_container_id: dict[str, Owner] = {}
        self._system_namespaces = system_namespaces
        for pod in pods:
            self._pods[pod.uid] = pod
            for container in pod.containers:
                if container.container_id:
                    self._by_container_id[container.container_id] = Owner(pod.uid, container.name, container.container_id)

    def owner_of(self, facts: ProcessFacts | None, own_pid: int) -> Owner | Unattributed:
        """Answer the process's container, or why it has none."""
        if facts is None:
            return Unattributed.PROCESS_GONE
        if facts.pid == own_pid:
            return Unattributed.EXPORTER
        owner = self._container_of(facts)
        if facts.comm == _MPS_SERVER_COMM and (
            owner is Unattributed.HOST_PROCESS
            or (isinstance(owner, Owner) and self._pods[owner.pod_uid].namespace in self._system_namespaces)
        ):
            return Unattributed.MPS_SERVER
        return owner

    def _container_of(self, facts: ProcessFacts) -> Owner | Unattributed:
        if not facts.cgroup:
            return Unattributed.HOST_PROCESS
        for ref in facts.cgroup:
            # A tenant can make deeper components that name other pods: the outermost one that this node knows decides.
            owner = self._by_container_id.get(ref.container_id or "")
            if owner is not None and ref.pod_uid in (None, owner.pod_uid, self._pods[owner.pod_uid].static_hash):
                return owner
            if ref.pod_uid is None or ref.pod_uid in self._pods:
                return Unattributed.UNKNOWN_CONTAINER
        return Unattributed.UNKNOWN_CONTAINER


def build_identities(pids: Iterable[int], procfs: ProcfsReading, owners: Owners, previous: Mapping[int, Identity]) -> dict[int, Identity]:
    """Answer whose each PID is now; a PID that is gone keeps the identity it had, for what it did before it ended."""
    identities = {}
    for pid in pids:
        facts = procfs.processes.get(pid)
        if facts is not None:
            identities[pid] = Identity(facts.start_time_ticks, owners.owner_of(facts, procfs.own_pid))
        elif pid in previous:
            identities[pid] = previous[pid]
    return identities


def owner_now(pid: int, procfs: ProcfsReading, identities: Mapping[int, Identity]) -> Owner | Unattributed:
    """Answer whose a process is that the driver lists: one that is gone is no one's, whoever's it was."""
    return identities[pid].owner if pid in procfs.processes else Unattributed.PROCESS_GONE


def build_gpu_usage(
    reading: GpuReading, procfs: ProcfsReading, identities: Mapping[int, Identity], previous: Mapping[int, Identity]
) -> GpuUsage | None:
    """Answer who uses this GPU, or None while its processes are unknown."""
    if reading.processes is None:
        return None
    processes: dict[Owner | Unattributed, list[GpuProcess]] = defaultdict(list)
    for process in reading.processes:
        processes[owner_now(process.pid, procfs, identities)].append(process)

    by_owner: dict[Owner, Use] = {}
    unattributed: dict[Unattributed, int] = defaultdict(int)
    for owner, theirs in processes.items():
        known_bytes = sum(process.memory_used_bytes or 0 for process in theirs)
        if isinstance(owner, Unattributed):
            unattributed[owner] += known_bytes
            continue
        hidden = any(process.memory_used_bytes is None for process in theirs)
        if hidden:
            unattributed[Unattributed.PARTLY_HIDDEN] += known_bytes
        by_owner[owner] = Use(
            memory_used_bytes=None if hidden else known_bytes,
            processes=len(theirs),
            largest_process_bytes=None if hidden else max(process.memory_used_bytes or 0 for process in theirs),
        )
    busy = None if reading.busy is None else _build_busy(reading.busy, identities, previous)
    return GpuUsage(by_owner=by_owner, unattributed_bytes=dict(unattributed), busy_by_owner=busy)


def _build_busy(
    busy: Iterable[ProcessBusy], identities: Mapping[int, Identity], previous: Mapping[int, Identity]
) -> dict[Owner, BusySeconds]:
    by_owner: dict[Owner, BusySeconds] = {}
    for entry in sorted(busy, key=lambda entry: entry.pid):  # so that sums of floats do not hang on the driver's order
        identity = identities.get(entry.pid)
        if identity is None or not isinstance(identity.owner, Owner):
            continue
        before = previous.get(entry.pid)
        if before is not None and before.start_time_ticks != identity.start_time_ticks:
            continue  # The PID changed hands since the previous reading: no one can tell which of the two ran when.
        by_owner[identity.owner] = by_owner.get(identity.owner, IDLE) + BusySeconds(
            sm=entry.sm_seconds,
            memory_bandwidth=entry.memory_bandwidth_seconds,
            encoder=entry.encoder_seconds,
            decoder=entry.decoder_seconds,
        )
    return by_owner
