"""The facts read from one GPU node at one moment.

Only these values pass from the sources to the core. All are immutable; quantities are bytes, seconds and ratios (0 to 1) and say so
in their names. `None` is "unknown"; 0 is "measured". Nothing here interprets: what a fact means is decided in the core.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

# --- NVML ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What does not change about a GPU. A MIG device is a GPU of its own that has a parent."""

    gpu_uuid: str
    """`GPU-...`, or `MIG-...` for a MIG device."""
    index: int | None = None
    """NVML index of the device; of a MIG device its index among the parent's."""
    minor: int | None = None
    """N of /dev/nvidiaN; a MIG device has its parent's."""
    model: str | None = None
    pci_bus_id: str | None = None
    parent_gpu_uuid: str | None = None
    mig_profile: str | None = None
    """`1g.10gb`, of a MIG device."""
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    memory_total_bytes: int | None = None
    """None where the driver does not tell it (unified memory)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process on one GPU, merged over NVML's lists: one entry per (GPU, PID)."""

    pid: int
    memory_used_bytes: int | None
    """None: the driver hides it."""
    kinds: frozenset[str] = frozenset({"compute"})
    """Which of NVML's lists name it: `compute`, `graphics`, `mps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessBusy:
    """Seconds in which a process kept each engine of one GPU busy since the previous reading (utilization x time, summed)."""

    pid: int
    sm_seconds: float
    memory_bandwidth_seconds: float
    encoder_seconds: float
    decoder_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """What the driver says of one GPU now."""

    gpu: Gpu
    up: bool
    """False: the driver answers with an error for this GPU, or not at all. All below is None then."""
    memory_used_bytes: int | None = None
    """Used as the driver counts it, without what it reserves."""
    memory_reserved_bytes: int | None = None
    utilization_ratio: float | None = None
    sm_utilization_ratio: float | None = None
    """Of a MIG device: how busy the multiprocessors of its GPU instance were since the previous reading. None: not measured."""
    processes: tuple[GpuProcess, ...] | None = None
    """None: the lists cannot be read or cannot be believed. Of a MIG parent: only what belongs to none of its MIG devices."""
    busy: tuple[ProcessBusy, ...] | None = None
    """None: the driver does not tell (MIG, not supported, an error), or this is the first reading. A process that is absent was
    idle. It may name a process that has just ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReading:
    """What the driver says of the node."""

    driver_version: str | None
    gpus: tuple[GpuReading, ...]
    """Devices and MIG devices, those that are down included as long as their uuid is known."""
    gpus_unidentified: int = 0
    """Devices that the driver counts and that do not even give a uuid."""
    dropped_samples: Mapping[str, int] = field(default_factory=dict)
    """Reason -> how many things this reading said that cannot be true: bad_pid, bad_timestamp, bad_utilization, unknown_pid,
    scrambled_list."""

    @property
    def pids(self) -> frozenset[int]:
        """Every process that it names: those listed on a GPU, and those that were busy and may have ended."""
        listed = {process.pid for gpu in self.gpus for process in gpu.processes or ()}
        return frozenset(listed.union(entry.pid for gpu in self.gpus for entry in gpu.busy or ()))


# --- /proc ---


@dataclass(frozen=True, slots=True)
class CgroupRef:
    """A place in a cgroup path that may be a container: the pod's UID, the container's id, or both."""

    pod_uid: str | None
    """8-4-4-4-12 with dashes, or 32 hex digits (a static pod's config hash)."""
    container_id: str | None
    """64 hex digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What /proc says of a process."""

    pid: int
    start_time_ticks: int
    """Field 22 of /proc/PID/stat: with the PID it is the process's identity."""
    comm: str
    """At most 15 characters."""
    cgroup: tuple[CgroupRef, ...]
    """Pod components of its cgroup path, the outermost first; empty: a process of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcfsReading:
    """The processes asked for; one that is gone is absent. It exists only inside the host's PID namespace."""

    own_pid: int
    processes: Mapping[int, ProcessFacts]


# --- kubelet ---


@dataclass(frozen=True, slots=True)
class Devices:
    """Device ids of one resource, as a device plugin named them."""

    resource_name: str
    device_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicDevice:
    """One device of a ResourceClaim, as the kubelet lists it for a container."""

    claim_namespace: str
    claim_name: str
    driver_name: str
    pool_name: str
    device_name: str
    share_id: str | None = None


@dataclass(frozen=True, slots=True)
class ContainerAllocation:
    """What the kubelet says it handed out to a container."""

    container: str
    devices: tuple[Devices, ...] = ()
    dynamic_devices: tuple[DynamicDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class PodAllocation:
    """What the kubelet says of a pod; it knows no UID."""

    namespace: str
    name: str
    containers: tuple[ContainerAllocation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletReading:
    """The kubelet's pod-resources answers."""

    pods: tuple[PodAllocation, ...]
    allocatable: tuple[Devices, ...] | None
    """GetAllocatableResources; None: this kubelet did not answer it."""


# --- Kubernetes API ---


class ContainerKind(StrEnum):
    """Which list of the pod's spec names the container."""

    INIT = "init"
    REGULAR = "regular"
    EPHEMERAL = "ephemeral"


class ContainerState(StrEnum):
    """The kubelet's word on a container; a container without a status has none."""

    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """One entry of a container's env in the pod's spec. A literal has a value; a reference names its source instead."""

    name: str
    value: str | None = None
    field_path: str | None = None
    """`metadata.annotations['key']`, of a fieldRef."""
    config_map_key: str | None = None
    """The key, of a configMapKeyRef."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container of a pod: its spec and its present status."""

    name: str
    kind: ContainerKind = ContainerKind.REGULAR
    restartable: bool = False
    """An init container with restartPolicy Always: a sidecar."""
    container_id: str | None = None
    """Bare, without the runtime's `containerd://`."""
    state: ContainerState | None = None
    will_restart: bool = False
    """Terminated, and the pod's restart policy brings it back."""
    env: tuple[EnvVar, ...] = ()
    """Only the variables by which a sharing system may be told a limit: GPU_MEMORY_LIMIT and CUDA_*."""
    resource_limits: Mapping[str, str] = field(default_factory=dict)
    volume_mounts: tuple[str, ...] = ()
    """Mount paths."""
    claim_requests: tuple[tuple[str, str | None], ...] = ()
    """resources.claims: (name of the pod's claim, request or None)."""
    allocated_resources: tuple[tuple[str, str], ...] = ()
    """status.allocatedResourcesStatus, claims only: (`claim:<name>[/<request>]`, resourceID), one per resource."""

    @property
    def holds_claims(self) -> bool:
        """Whether what the container was given is still its own: ended containers hold nothing, restarting ones do."""
        return self.state is not ContainerState.TERMINATED or self.will_restart


class PodPhase(StrEnum):
    """status.phase."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendedResourceRequest:
    """status.extendedResourceClaimStatus.requestMappings: which request of the claim serves which container."""

    container: str
    resource_name: str
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod of this node: what an exporter needs of it and no more."""

    uid: str
    namespace: str
    name: str
    phase: PodPhase = PodPhase.UNKNOWN
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    owner_kind: str | None = None
    owner_name: str | None = None
    scheduler_name: str | None = None
    containers: tuple[Container, ...] = ()
    """Init containers first, then regular, then ephemeral ones, each in the order of the spec."""
    resource_claims: Mapping[str, str] = field(default_factory=dict)
    """Name of the pod's claim -> name of its ResourceClaim (spec.resourceClaims joined with status.resourceClaimStatuses)."""
    extended_resource_claim: str | None = None
    """status.extendedResourceClaimStatus.resourceClaimName."""
    extended_resource_requests: tuple[ExtendedResourceRequest, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the pod is over, whatever the kubelet still lists."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def static_hash(self) -> str | None:
        """The manifest hash that stands in a static pod's cgroup in place of the uid. Any author can write it: alone it proves nothing."""
        return self.annotations.get("kubernetes.io/config.hash")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The Node object of this node."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDevice:
    """A device of a ResourceSlice of this node."""

    driver_name: str
    pool_name: str
    device_name: str
    gpu_uuid: str | None
    """Attribute `uuid`."""
    device_type: str | None = None
    """Attribute `type`: `gpu`, `mig`, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult:
    """One device that a ResourceClaim was allocated (status.allocation.devices.results)."""

    request: str
    driver_name: str
    pool_name: str
    device_name: str
    admin_access: bool = False
    share_id: str | None = None
    consumed_capacity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimConfig:
    """Opaque parameters that apply to a ResourceClaim's requests (status.allocation.devices.config), later ones win."""

    driver_name: str
    requests: tuple[str, ...]
    """Empty: all requests."""
    parameters: Mapping[str, object]
    """The decoded JSON, unchecked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceClaim:
    """An allocated ResourceClaim."""

    uid: str
    namespace: str
    name: str
    results: tuple[ClaimResult, ...] = ()
    configs: tuple[ClaimConfig, ...] = ()
    reserved_for_pod_uids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesReading:
    """The pods of this node and its Node object, as the watch last left them."""

    pods: Mapping[str, Pod]
    """By UID."""
    node: NodeFacts | None
    """None: not read (yet)."""
    slice_devices: tuple[SliceDevice, ...] | None = None
    """None: ResourceSlices are not read."""
    resource_claims: tuple[ResourceClaim, ...] | None = None
    """None: ResourceClaims are not read."""


# --- host files ---


class UnreadableFile(StrEnum):
    """Why a file that is there gives nothing."""

    UNKNOWN_LAYOUT = "unknown_layout"
    """Its size is that of no known layout."""
    WRONG_MAGIC = "wrong_magic"
    IMPOSSIBLE_VALUE = "impossible_value"
    NOT_A_FILE = "not_a_file"
    """A link, a pipe, a device or a folder where a file should be, or no folder where one should be."""
    TOO_MANY_FILES = "too_many_files"
    NOT_PERMITTED = "not_permitted"
    IO_ERROR = "io_error"


@dataclass(frozen=True, slots=True)
class RegionSlot:
    """A process that HAMi-core counts for; it may have been killed without the library's knowing."""

    host_pid: int | None
    """Its PID on the host; None: the library did not find it out."""
    memory_used_bytes: tuple[int, ...] | None
    """What it allocated through the library, for each of the region's GPUs; None: it was just being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """HAMi-core's shared region: what the library counts and enforces in one container."""

    gpu_uuids: tuple[str | None, ...]
    """In the container's order; None: not written yet."""
    memory_limit_bytes: tuple[int | None, ...]
    """As many as GPUs, in the order of the container's environment, which need not be that of `gpu_uuids`. None: no limit."""
    slots: tuple[RegionSlot, ...] = ()
    """Those that have not exited."""


@dataclass(frozen=True, slots=True)
class FoundRegion:
    """A region and where it was found."""

    region: Region
    containers: frozenset[tuple[str, str]] = frozenset()
    """(Pod UID, container) after whom the folders are named; whoever made them may have been wrong."""
    pids: frozenset[int] = frozenset()
    """Processes in whose own file system it lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostfilesReading:
    """Files of the host."""

    regions: tuple[FoundRegion, ...] = ()
    unreadable: Mapping[UnreadableFile, int] = field(default_factory=dict)
    """Reason -> how many files are there and give nothing."""


# --- all of it ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One moment of the node. A source that failed is None, unless what it last said may be remembered."""

    time_seconds: float
    """Wall clock, seconds since the epoch."""
    monotonic_seconds: float
    nvml: NvmlReading | None = None
    procfs: ProcfsReading | None = None
    kubelet: KubeletReading | None = None
    """May be remembered through an outage: allocations are identity."""
    kubelet_is_current: bool = False
    """Whether `kubelet` was read for this snapshot."""
    kubernetes: KubernetesReading | None = None
    """May be remembered through an outage: pods are identity."""
    kubernetes_is_current: bool = False
    hostfiles: HostfilesReading | None = None
    """None: host files are not read, or cannot be."""
