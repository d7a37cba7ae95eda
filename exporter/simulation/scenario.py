"""The scenario file: which keys it has, and reading one. Everything that is wrong with a file is found before it is played."""

import base64
import binascii
import gzip
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from exporter.simulation.document import (
    Json,
    Place,
    Reader,
    ScenarioError,
    boolean,
    choice,
    duration,
    integer,
    mapping_of,
    name,
    once,
    open_document,
    plain,
    quantity,
    quantity_or,
    read_items,
    read_places,
    record,
    sequence,
    text,
)
from exporter.simulation.node import (
    ClaimDevice,
    ClaimDevices,
    ContainerResources,
    ContradictionError,
    DeviceIds,
    Entry,
    NodeState,
    Removal,
    Step,
    Withheld,
    apply,
)

DEMO = Path(__file__).with_name("demo.yaml")
"""The built-in scenario."""

_UINT32 = (1 << 32) - 1
_UINT64 = (1 << 64) - 1

_KINDS = ("compute", "graphics", "mps")
_STATES = tuple("RSDZTtXxKWPI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A node as it starts (the first step) and the steps that change it, in the order of their times."""

    file: str
    node_name: str
    steps: tuple[Step, ...]

    @property
    def duration_seconds(self) -> float:
        """Answer the time of the last step."""
        return self.steps[-1].at_seconds


def load_scenario(path: Path) -> Scenario:
    """Answer the scenario in a file. Raises ScenarioError with one line that says what is wrong where."""
    place = open_document(path)
    try:
        said = dict(_SCENARIO(place))
    except RecursionError as error:
        raise place.error("nested too deeply") from error
    timeline = said.pop("timeline", ())
    if "machine" not in said or "name" not in said["machine"]:
        raise place.error("the key node.name is missing")
    start = Step(**said)
    scenario = Scenario(
        file=str(path),
        node_name=said["machine"]["name"],
        steps=(start, *sorted(timeline, key=lambda step: step.at_seconds)),
    )
    _check(scenario)
    return scenario


def _check(scenario: Scenario) -> None:
    state = NodeState()
    for step in scenario.steps:
        try:
            state = apply(state, step)
        except ContradictionError as error:
            raise ScenarioError(f"{scenario.file}:{error.line}: {error.key}: {error} at {step.at_seconds:g} s") from error
        if state.machine.name != scenario.node_name:
            raise ScenarioError(f"{scenario.file}:{step.line}: node.name: a node keeps its name, which is {scenario.node_name}")


# --- lists that merge by a key ---


def _keyed(
    entry: Callable[[Place], Mapping[str, Any]], key_of: Callable[[Mapping[str, Any]], Any], what: str
) -> Reader[tuple[Entry[Any, Any], ...]]:
    def read(place: Place) -> tuple[Entry[Any, Any], ...]:
        entries: dict[object, Entry[Any, Any]] = {}
        for item in read_places(place):
            said = entry(item)
            key = key_of(said)
            if key in entries:
                raise item.error(f"the {what} {key} stands here twice, first on line {entries[key].line}")
            entries[key] = Entry(key, said, item.line)
        return tuple(entries.values())

    return once(read)


def _by(field: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda said: said[field]


def _by_pod(said: Mapping[str, Any]) -> str:
    return f"{said['namespace']}/{said['name']}"


# --- the readers of single values ---


def _pod_reference(place: Place) -> tuple[str, int]:
    value = text(place)
    namespace, slash, pod = value.partition("/")
    if not slash or not namespace or not pod or "/" in pod:
        raise place.wrong("namespace/name of a pod")
    return value, place.line


def _container_reference(place: Place) -> str:
    value = text(place)
    parts = value.split("/")
    if len(parts) != len(("namespace", "pod", "container")) or not all(parts):
        raise place.wrong("namespace/pod/container")
    return value


def _with_line(read: Reader[Any]) -> Reader[tuple[Any, int]]:
    return lambda place: (read(place), place.line)


def _kinds(place: Place) -> tuple[str, ...]:
    one = choice(*_KINDS)
    if isinstance(place.node, yaml.ScalarNode):
        return (one(place),)
    # A set: the driver has one list for each kind.
    return tuple(dict.fromkeys(one(item) for item in read_places(place)))


def _command(place: Place) -> str:
    value = text(place)
    if "\n" in value or "\0" in value:
        raise place.wrong("a name of one line")
    return value


def _cgroup(place: Place) -> str:
    value = text(place)
    return value if not value or value.endswith("\n") else f"{value}\n"


def _state(place: Place) -> str:
    return choice(*_STATES, "gone")(place)


def _file_bytes(place: Place) -> bytes:
    said = record({"text": ("text", text), "base64": ("base64", text), "gzip": ("gzip", text)})(place)
    if len(said) != 1:
        raise place.error("expected one of the keys text, base64 and gzip")
    ((form, value),) = said.items()
    if form == "text":
        return str(value).encode()
    try:
        content = base64.b64decode(value, validate=True)
        return gzip.decompress(content) if form == "gzip" else content
    except (binascii.Error, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise place.error(f"expected base64{' of gzip' if form == 'gzip' else ''}: {error}") from error


def _files(place: Place) -> Mapping[str, bytes]:
    files = {}
    for path, entry in read_items(place):
        if not path.startswith("/") or ".." in PurePosixPath(path).parts or path != str(PurePosixPath(path)):
            raise entry.error("expected an absolute path without . and .. as the key")
        files[path] = _file_bytes(entry)
    return files


def _kubernetes_object(place: Place) -> Json:
    value: Json = plain(place)
    fields = dict(read_items(place))
    if "metadata" not in fields:
        raise place.error("the key metadata.name is missing")
    metadata = dict(read_items(fields["metadata"]))
    if "name" not in metadata:
        raise fields["metadata"].error("the key name is missing")
    for key in ("name", "namespace", "uid"):
        if key in metadata:
            name(metadata[key])
    for key in ("labels", "annotations"):
        if key in metadata and isinstance(value["metadata"][key], Mapping):
            mapping_of(text)(metadata[key])
    for key in ("spec", "status"):
        if key in fields:
            list(read_items(fields[key]))
    return value


def _pod_key(pod: Json) -> str:
    return f"{pod['metadata'].get('namespace', 'default')}/{pod['metadata']['name']}"


def _made(make: Callable[..., Any], fields: Mapping[str, tuple[str, Reader[Any]]], *required: str) -> Reader[Any]:
    read = record(fields, required=required)
    return once(lambda place: make(**read(place)))


# --- the keys: key -> (name of the value, its reader) ---

_percent = integer(0, _UINT32, "a whole number of percent")
_ids = sequence(text)

_numa_node = _made(lambda node=0: node, {"ID": ("node", integer(0, _UINT32))})
_topology = _made(lambda nodes=(): nodes, {"nodes": ("nodes", sequence(_numa_node))})

_device_ids = _made(
    DeviceIds,
    {
        "resource_name": ("resource_name", name),
        "device_ids": ("device_ids", _ids),
        "topology": ("numa_nodes", _topology),
    },
    "resource_name",
)

_claim_device = _made(
    ClaimDevice,
    {
        "driver_name": ("driver_name", name),
        "pool_name": ("pool_name", name),
        "device_name": ("device_name", name),
        "share_id": ("share_id", text),
        "cdi_devices": ("cdi_devices", sequence(_made(lambda name: name, {"name": ("name", text)}, "name"))),
    },
)

_claim_devices = _made(
    ClaimDevices,
    {
        "claim_name": ("claim_name", name),
        "claim_namespace": ("claim_namespace", name),
        "claim_resources": ("claim_resources", sequence(_claim_device)),
    },
)

_container_resources = _made(
    ContainerResources,
    {
        "name": ("name", name),
        "devices": ("devices", sequence(_device_ids)),
        "cpu_ids": ("cpu_ids", sequence(integer(0, _UINT32))),
        "dynamic_resources": ("dynamic_resources", sequence(_claim_devices)),
    },
    "name",
)

_pod_resources = record(
    {
        "namespace": ("namespace", name),
        "name": ("name", name),
        "containers": ("containers", sequence(_container_resources)),
    },
    required=("name",),
)

_mig_device = record(
    {
        "uuid": ("uuid", name),
        "profile": ("profile", name),
        "gpu_instance_id": ("gpu_instance_id", integer(0, _UINT32)),
        "compute_instance_id": ("compute_instance_id", integer(0, _UINT32)),
        "memory_total": ("memory_total_bytes", quantity_or({"unsupported": Withheld.UNSUPPORTED})),
    },
    required=("uuid",),
)

_gpu = record(
    {
        "uuid": ("uuid", name),
        "index": ("index", integer(0, 255)),
        "minor": ("minor", integer(0, 255)),
        "model": ("model", name),
        "memory_total": ("memory_total_bytes", quantity_or({"unsupported": Withheld.UNSUPPORTED})),
        "memory_reserved": ("memory_reserved_bytes", quantity),
        "memory_used": ("memory_used_bytes", quantity),
        "utilization": ("utilization_percent", _percent),
        "fault": ("fault", choice("lost", "hang", "unknown", "no_permission", "none")),
        "mig": ("mig", _keyed(_mig_device, _by("uuid"), "uuid")),
    },
    required=("uuid",),
)

_gpu_use = record(
    {
        "gpu": ("gpu", name),
        "kind": ("kinds", _kinds),
        "memory": ("memory_bytes", quantity_or({"hidden": Withheld.HIDDEN})),
        "sm": ("sm_percent", _percent),
        "memory_bandwidth": ("memory_bandwidth_percent", _percent),
        "encoder": ("encoder_percent", _percent),
        "decoder": ("decoder_percent", _percent),
    },
    required=("gpu",),
)

_process_fields = record(
    {
        "pid": ("pid", integer(0, _UINT32)),
        "container": ("container", _container_reference),
        "cgroup": ("cgroup", _cgroup),
        "start_time": ("start_time_ticks", integer(0, _UINT64)),
        "state": ("state", _state),
        "command": ("command", _command),
        "gpus": ("gpus", _keyed(_gpu_use, _by("gpu"), "GPU")),
    },
    required=("pid",),
)


def _process(place: Place) -> Mapping[str, Any]:
    said = _process_fields(place)
    if "container" in said and "cgroup" in said:
        raise place.error("expected one of the keys container and cgroup, not both")
    return said


def _pod_resources_of(place: Place) -> Mapping[str, Any]:
    return {"namespace": "default", **_pod_resources(place)}


_machine = record(
    {
        "name": ("name", name),
        "labels": ("labels", mapping_of(text)),
        "annotations": ("annotations", mapping_of(text)),
        "allocatable": ("allocatable", mapping_of(text)),
        "cgroup": ("cgroup_driver", choice("systemd", "cgroupfs")),
        "runtime": ("runtime", choice("containerd", "crio", "docker")),
        "host_pid": ("host_pid", boolean),
    }
)

_sources = record(
    {
        "nvml": ("nvml", choice("up", "down", "not_loaded", "version_mismatch")),
        "kubelet": ("kubelet", choice("up", "down", "refuse", "denied", "hang", "restart")),
        "kubernetes": ("kubernetes", choice("up", "down", "unauthorized", "gone", "hang")),
    }
)

_BODY: Mapping[str, tuple[str, Reader[Any]]] = {
    "node": ("machine", _machine),
    "gpus": ("gpus", _keyed(_gpu, _by("uuid"), "uuid")),
    "pods": ("pods", _keyed(_kubernetes_object, _pod_key, "pod")),
    "resource_slices": ("resource_slices", sequence(_kubernetes_object)),
    "resource_claims": ("resource_claims", sequence(_kubernetes_object)),
    "pod_resources": ("pod_resources", _keyed(_pod_resources_of, _by_pod, "pod")),
    "allocatable": ("allocatable", sequence(_device_ids)),
    "processes": ("processes", _keyed(_process, _by("pid"), "pid")),
    "files": ("files", _files),
    "sources": ("sources", _sources),
}

_remove = _made(
    Removal,
    {
        "processes": ("processes", sequence(_with_line(integer(0, _UINT32)))),
        "pods": ("pods", sequence(_pod_reference)),
        "pod_resources": ("pod_resources", sequence(_pod_reference)),
        "gpus": ("gpus", sequence(_with_line(name))),
    },
)

_step_fields = record({"at": ("at_seconds", duration), **_BODY, "remove": ("remove", _remove)}, required=("at",))


def _step(place: Place) -> Step:
    return Step(line=place.line, **_step_fields(place))


_SCENARIO = record({**_BODY, "timeline": ("timeline", sequence(_step))})
