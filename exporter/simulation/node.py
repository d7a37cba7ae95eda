"""The simulated node as a value: what it is at one moment, and what a step makes of it. Pure.

The first step describes the node as it starts, each later one changes it: mappings merge key by key, lists that have a key merge by it,
other lists are replaced whole, and what a step removes goes first.
"""

import hashlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, TypeVar

from exporter.simulation.cgroup import HOST_PROCESS, container_cgroup
from exporter.simulation.document import Json

GIB = 1 << 30

Key = TypeVar("Key", str, int)
Value = TypeVar("Value")


class Withheld(Enum):
    """What the driver says in place of a number."""

    UNSUPPORTED = "unsupported"
    """The call is not supported."""
    HIDDEN = "hidden"
    """NVML's "not available" value."""


# --- what a node consists of; the defaults are the scenario file's ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The Node object, and how the node is set up."""

    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)
    cgroup_driver: str = "systemd"
    runtime: str = "containerd"
    host_pid: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MigDevice:
    """A MIG device."""

    uuid: str
    profile: str = "1g.10gb"
    gpu_instance_id: int = 0
    compute_instance_id: int = 0
    memory_total_bytes: int | Withheld = 9728 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as its driver describes it. None: it follows from the rest of the node."""

    uuid: str
    index: int | None = None
    """None: its position in the list."""
    minor: int | None = None
    """None: its index."""
    model: str = "NVIDIA A100-SXM4-80GB"
    memory_total_bytes: int | Withheld = 81559 << 20
    memory_reserved_bytes: int = 0
    memory_used_bytes: int | None = None
    """None: the sum over its processes, those of its MIG devices too."""
    utilization_percent: int | None = None
    """None: the sum over its processes, at most 100."""
    fault: str = "none"
    mig: Mapping[str, MigDevice] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What a process does on one GPU or MIG device."""

    gpu: str
    kinds: tuple[str, ...] = ("compute",)
    memory_bytes: int | Withheld = 0
    sm_percent: int = 0
    memory_bandwidth_percent: int = 0
    encoder_percent: int = 0
    decoder_percent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of the node."""

    pid: int
    cgroup: str = HOST_PROCESS
    """The text of /proc/PID/cgroup."""
    start_time_ticks: int = 100
    state: str = "S"
    """Field 3 of /proc/PID/stat, or `gone`: there is no /proc/PID."""
    command: str = "python"
    gpus: Mapping[str, GpuUse] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIds:
    """A ContainerDevices message."""

    resource_name: str = ""
    device_ids: tuple[str, ...] = ()
    numa_nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimDevice:
    """A ClaimResource message."""

    driver_name: str = ""
    pool_name: str = ""
    device_name: str = ""
    share_id: str | None = None
    cdi_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimDevices:
    """A DynamicResource message."""

    claim_name: str = ""
    claim_namespace: str = ""
    claim_resources: tuple[ClaimDevice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerResources:
    """A ContainerResources message."""

    name: str
    devices: tuple[DeviceIds, ...] = ()
    cpu_ids: tuple[int, ...] = ()
    dynamic_resources: tuple[ClaimDevices, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResources:
    """A PodResources message."""

    namespace: str
    name: str
    containers: tuple[ContainerResources, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """How the four things that an exporter asks are doing. A counter that rises is something momentary that happened now."""

    nvml: str = "up"
    kubelet: str = "up"
    kubernetes: str = "up"
    kubelet_restarts: int = 0
    kubernetes_expirations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The node at one moment. What a step leaves alone stays the same object."""

    machine: Machine = field(default_factory=Machine)
    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    """By uuid, in the order of the file."""
    pods: Mapping[str, Json] = field(default_factory=dict)
    """By namespace/name; each has a name, a namespace and a uid."""
    resource_slices: tuple[Json, ...] = ()
    resource_claims: tuple[Json, ...] = ()
    pod_resources: Mapping[str, PodResources] = field(default_factory=dict)
    """By namespace/name."""
    allocatable: tuple[DeviceIds, ...] = ()
    processes: Mapping[int, Process] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    sources: Sources = field(default_factory=Sources)


# --- what changes it ---


@dataclass(frozen=True, slots=True)
class Entry(Generic[Key, Value]):
    """What a step says about one thing of a list that has a key."""

    key: Key
    said: Value
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What a step removes: keys, and the lines on which they stand."""

    gpus: tuple[tuple[str, int], ...] = ()
    pods: tuple[tuple[str, int], ...] = ()
    pod_resources: tuple[tuple[str, int], ...] = ()
    processes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A partial node. Mappings hold what was said; None is a list that was not said."""

    at_seconds: float = 0.0
    line: int = 1
    machine: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[Entry[str, Mapping[str, Any]], ...] = ()
    pods: tuple[Entry[str, Json], ...] = ()
    resource_slices: tuple[Json, ...] | None = None
    resource_claims: tuple[Json, ...] | None = None
    pod_resources: tuple[Entry[str, Mapping[str, Any]], ...] = ()
    allocatable: tuple[DeviceIds, ...] | None = None
    processes: tuple[Entry[int, Mapping[str, Any]], ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    remove: Removal = field(default_factory=Removal)


class ContradictionError(Exception):
    """A step that does not fit the node: it names something that is not there."""

    def __init__(self, line: int, key: str, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.key = key


def apply(state: NodeState, step: Step) -> NodeState:
    """Answer the node after a step. Raises ContradictionError."""
    machine = _merge_machine(state.machine, step.machine)
    gpus = _merge_gpus(_remove_gpus(state.gpus, step), step)
    pods = _merge_pods(_remove_pods(state, step.remove.pods, "remove.pods", state.pods), step)
    pod_resources = _merge_pod_resources(_remove_pods(state, step.remove.pod_resources, "remove.pod_resources", state.pod_resources), step)
    processes = dict(state.processes)
    for pid, line in step.remove.processes:
        if processes.pop(pid, None) is None:
            raise ContradictionError(line, "remove.processes", f"there is no process {pid} to remove")
    for entry in step.processes:
        processes[entry.key] = _merge_process(processes.get(entry.key), entry, machine, pods, gpus)
    return NodeState(
        machine=machine,
        gpus=gpus,
        pods=pods,
        resource_slices=state.resource_slices if step.resource_slices is None else step.resource_slices,
        resource_claims=state.resource_claims if step.resource_claims is None else step.resource_claims,
        pod_resources=pod_resources,
        allocatable=state.allocatable if step.allocatable is None else step.allocatable,
        processes=processes,
        files={**state.files, **step.files} if step.files else state.files,
        sources=_merge_sources(state.sources, step.sources),
    )


def _merge_machine(machine: Machine, said: Mapping[str, Any]) -> Machine:
    if not said:
        return machine
    merged: dict[str, Any] = {
        key: {**getattr(machine, key), **value} if isinstance(value, Mapping) else value for key, value in said.items()
    }
    return replace(machine, **merged)


def _merge_sources(sources: Sources, said: Mapping[str, str]) -> Sources:
    for source, value in said.items():
        match source, value:
            case "kubelet", "restart":
                sources = replace(sources, kubelet="up", kubelet_restarts=sources.kubelet_restarts + 1)
            case "kubernetes", "gone":
                sources = replace(sources, kubernetes="up", kubernetes_expirations=sources.kubernetes_expirations + 1)
            case _:
                changed: dict[str, Any] = {source: value}
                sources = replace(sources, **changed)
    return sources


# --- GPUs ---


def _remove_gpus(gpus: Mapping[str, Gpu], step: Step) -> Mapping[str, Gpu]:
    for gpu_uuid, line in step.remove.gpus:
        left = {key: gpu for key, gpu in gpus.items() if key != gpu_uuid}
        for gpu in gpus.values():
            if gpu_uuid in gpu.mig:
                left[gpu.uuid] = replace(gpu, mig={key: device for key, device in gpu.mig.items() if key != gpu_uuid})
        if left == gpus:
            raise ContradictionError(line, "remove.gpus", f"there is no GPU or MIG device {gpu_uuid} to remove")
        gpus = left
    return gpus


def _merge_gpus(before: Mapping[str, Gpu], step: Step) -> Mapping[str, Gpu]:
    if not step.gpus:
        return before
    gpus = dict(before)
    for entry in step.gpus:
        gpu = gpus.get(entry.key) or Gpu(uuid=entry.key)
        mig = dict(gpu.mig)
        for device in entry.said.get("mig", ()):
            known = mig.get(device.key)
            mig[device.key] = replace(known, **device.said) if known else _new_mig_device(len(mig), device.said)
        gpus[entry.key] = replace(gpu, **{**entry.said, "mig": mig})
    _check_gpus(gpus, step)
    return gpus


def _new_mig_device(position: int, said: Mapping[str, Any]) -> MigDevice:
    device = MigDevice(**{"gpu_instance_id": position + 1, **said})
    if "memory_total_bytes" in said:
        return device
    size = device.profile.rpartition(".")[2].removesuffix("gb")
    # The driver keeps half a GiB of each: 3g.40gb is seen as 40192 MiB or thereabouts.
    return replace(device, memory_total_bytes=int(size) * GIB - GIB // 2) if size.isdecimal() and int(size) else device


def _check_gpus(gpus: Mapping[str, Gpu], step: Step) -> None:
    lines = {entry.key: entry.line for entry in step.gpus}
    indexes: dict[int, str] = {}
    uuids: set[str] = set()
    for gpu, index in numbered(gpus):
        line = lines.get(gpu.uuid, step.line)
        if index in indexes:
            raise ContradictionError(line, "gpus", f"{gpu.uuid} has the index {index}, which {indexes[index]} has")
        indexes[index] = gpu.uuid
        for device_uuid in (gpu.uuid, *gpu.mig):
            if device_uuid in uuids:
                raise ContradictionError(line, "gpus", f"the uuid {device_uuid} is that of two devices")
            uuids.add(device_uuid)


def numbered(gpus: Mapping[str, Gpu]) -> list[tuple[Gpu, int]]:
    """Answer the GPUs with their NVML indexes, in the order of these."""
    pairs = [(gpu, position if gpu.index is None else gpu.index) for position, gpu in enumerate(gpus.values())]
    return sorted(pairs, key=lambda pair: pair[1])


# --- pods ---


def _remove_pods(state: NodeState, removed: Iterable[tuple[str, int]], key: str, pods: Mapping[str, Value]) -> Mapping[str, Value]:
    gone = set()
    for pod, line in removed:
        if pod not in state.pods and pod not in state.pod_resources:
            raise ContradictionError(line, key, f"there is no pod {pod} to remove")
        gone.add(pod)
    return {pod: value for pod, value in pods.items() if pod not in gone} if gone else pods


def _merge_pods(before: Mapping[str, Json], step: Step) -> Mapping[str, Json]:
    if not step.pods:
        return before
    pods = dict(before)
    for entry in step.pods:
        namespace, _, pod_name = entry.key.partition("/")
        new = {"metadata": {"name": pod_name, "namespace": namespace, "uid": _made_up_uid(entry.key, step.at_seconds)}}
        pods[entry.key] = merge_object(pods.get(entry.key, new), entry.said)
    return pods


def _made_up_uid(pod: str, at_seconds: float) -> str:
    return str(uuid.UUID(bytes=hashlib.sha256(f"{pod} {at_seconds}".encode()).digest()[:16], version=4))


def merge_object(before: Json, patch: Json) -> Json:
    """Answer a Kubernetes object with a patch on it: mappings merge key by key, all else is replaced."""
    merged = dict(before)
    for key, value in patch.items():
        known = merged.get(key)
        merged[key] = merge_object(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return merged


def _merge_pod_resources(before: Mapping[str, PodResources], step: Step) -> Mapping[str, PodResources]:
    if not step.pod_resources:
        return before
    merged = dict(before)
    for entry in step.pod_resources:
        namespace, _, pod_name = entry.key.partition("/")
        known = merged.get(entry.key) or PodResources(namespace=namespace, name=pod_name)
        merged[entry.key] = replace(known, **entry.said)
    return merged


# --- processes ---


def _merge_process(
    known: Process | None, entry: Entry[int, Mapping[str, Any]], machine: Machine, pods: Mapping[str, Json], gpus: Mapping[str, Gpu]
) -> Process:
    said = dict(entry.said)
    container = said.pop("container", None)
    if container is not None:
        said["cgroup"] = _resolve_container(container, entry.line, machine, pods)
    process = known or Process(pid=entry.key)
    uses = dict(process.gpus)
    for use in said.pop("gpus", ()):
        if use.key not in gpus and not any(use.key in gpu.mig for gpu in gpus.values()):
            raise ContradictionError(use.line, f"processes[pid={entry.key}].gpus", f"there is no GPU or MIG device {use.key}")
        uses[use.key] = replace(uses.get(use.key) or GpuUse(gpu=use.key), **use.said)
    return replace(process, gpus=uses, **said)


def _resolve_container(reference: str, line: int, machine: Machine, pods: Mapping[str, Json]) -> str:
    key = f"processes.container {reference}"
    pod_key, _, container = reference.rpartition("/")
    pod = pods.get(pod_key)
    if pod is None:
        raise ContradictionError(line, key, f"there is no pod {pod_key}")
    cgroup = container_cgroup(pod, container, machine.cgroup_driver, machine.runtime)
    if cgroup is None:
        raise ContradictionError(line, key, f"the pod {pod_key} has no container {container}")
    return cgroup
