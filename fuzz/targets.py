# ruff: noqa: INP001, PLR2004, PT017, S101 - a script; an assertion is what a fuzzer looks for
"""What is fuzzed: each target takes bytes, as the outside would send them, and raises only where the program is wrong."""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from exporter.access import _parse_basic
from exporter.claims import Granter
from exporter.claims.claim import Node
from exporter.claims.quantity import (
    parse_cuda_limit,
    parse_cuda_percent,
    parse_fraction,
    parse_percent,
    parse_positive_percent,
    parse_quantity,
    parse_share,
    parse_unsigned,
)
from exporter.config import ConfigError, parse_config
from exporter.duration import parse_duration
from exporter.exposition import accepts_gzip, choose_format
from exporter.simulation import ScenarioError, load_scenario
from exporter.snapshot import (
    Container,
    ContainerAllocation,
    ContainerKind,
    ContainerState,
    Devices,
    EnvVar,
    Gpu,
    NodeFacts,
    Pod,
    PodAllocation,
    PodPhase,
)
from exporter.sources.hostfiles import LAYOUTS, RegionError, parse_is_local, parse_region
from exporter.sources.kubelet import parse_allocatable, parse_list
from exporter.sources.kubernetes_objects import may_be_used_on, parse_claim, parse_node, parse_pod, parse_slice
from exporter.sources.podresources_pb2 import AllocatableResourcesResponse, ListPodResourcesResponse
from exporter.sources.procfs import parse_cgroup, parse_stat
from exporter.web_config import WebConfigError, parse_web_config

GPU_0, GPU_1 = "GPU-00000000-0000-4000-8000-000000000000", "GPU-00000001-0000-4000-8000-000000000000"
GPUS = {uuid: Gpu(gpu_uuid=uuid, index=number, minor=number, memory_total_bytes=80 << 30) for number, uuid in enumerate((GPU_0, GPU_1))}
NOBODYS = 1 << 80
"""More than any amount that a contract may state."""


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def fuzz_cgroup(data: bytes) -> None:
    """Whatever a cgroup is called, its refs have the forms that the core compares."""
    for ref in parse_cgroup(_text(data)):
        assert ref.pod_uid or ref.container_id
        assert ref.container_id is None or len(ref.container_id) == 64
        assert ref.pod_uid is None or "_" not in ref.pod_uid


def fuzz_stat(data: bytes) -> None:
    """Whatever a process is called, a stat line is read or refused."""
    try:
        comm, start_time_ticks = parse_stat(_text(data))
    except ValueError:
        return
    assert isinstance(comm, str)
    assert isinstance(start_time_ticks, int)


def fuzz_quantities(data: bytes) -> None:
    """A number of any grammar is not negative and finite, or refused."""
    parsers = (
        parse_unsigned,
        parse_percent,
        parse_fraction,
        parse_share,
        parse_positive_percent,
        parse_quantity,
        parse_cuda_limit,
        parse_cuda_percent,
        parse_duration,
    )
    for parse in parsers:
        try:
            value = parse(_text(data))
        except ValueError:
            continue
        assert 0 <= value < math.inf


_KEYS = (
    "gpu-fraction",
    "gpu-memory",
    "gpu-fraction-container-name",
    "gpu-fraction-num-devices",
    "nvidia.com/container.main.gpu-memory.limit",
    "nvidia.com/container.main.gpu-memory.request",
    "hami.io/vgpu-devices-allocated",
    "hami.io/vgpu-mig-allocations",
    "hami.io/bind-phase",
    "4pd.io/vgpu-ids-new",
    "volcano.sh/vgpu-ids-new",
    "volcano.sh/bind-phase",
    "scheduling.koordinator.sh/device-allocated",
    "ALIYUN_COM_GPU_MEM_IDX",
    "ALIYUN_COM_GPU_MEM_DEV",
    "ALIYUN_COM_GPU_MEM_ASSIGNED",
)
_VARIABLES = (
    "GPU_MEMORY_LIMIT",
    "CUDA_DEVICE_MEMORY_LIMIT",
    "CUDA_DEVICE_MEMORY_LIMIT_0",
    "CUDA_DEVICE_SM_LIMIT",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
)
_SEPARATOR = "\x1f"


def fuzz_contracts(data: bytes) -> None:
    """Whatever stands in a contract's place gives claims that can be, or errors that can be read.

    The input is KEY VALUE KEY VALUE ..., separated by 0x1f; KEY is a number: which annotation, variable, label, resource or device id.
    """
    fields = _text(data).split(_SEPARATOR)
    annotations, labels, limits, ids, node_labels, env = {}, {}, {}, [], {}, []
    for key, value in zip(fields[::2], fields[1::2], strict=False):
        number = sum(map(ord, key[:4]))
        if number < len(_KEYS):
            annotations[_KEYS[number]] = value
            continue
        kind = number % 6
        if kind == 0:
            env.append(EnvVar(name=_VARIABLES[number // 6 % len(_VARIABLES)], value=value))
        elif kind == 1:
            labels[("runai-gpu-group", "runai-gpu-group/x", "koordinator.sh/gpu-isolation-provider")[number // 6 % 3]] = value
        elif kind == 2:
            limits[("nvidia.com/gpu", "aliyun.com/gpu-mem", "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory")[number // 6 % 4]] = value
        elif kind == 3:
            ids.append(value)
        elif kind == 4:
            names = (
                "nvidia.com/gpu.memory",
                "nvidia.com/gpu.replicas",
                "nvidia.com/gpu.sharing-strategy",
                "cloud.google.com/gke-gpu-sharing-strategy",
            )
            node_labels[names[number // 6 % 4]] = value
        else:
            annotations[_KEYS[number % len(_KEYS)]] = value
    container = Container(
        name="main", container_id="a" * 64, state=ContainerState.RUNNING, kind=ContainerKind.REGULAR, env=tuple(env), resource_limits=limits
    )
    pod = Pod(
        uid="uid", namespace="team-a", name="pod", phase=PodPhase.RUNNING, labels=labels, annotations=annotations, containers=(container,)
    )
    reservation = Pod(
        uid="reservation",
        namespace="kai-resource-reservation",
        name="reservation",
        labels={"runai-gpu-group": "group"},
        annotations={"run.ai/reserve_for_gpu_index": GPU_0},
    )
    devices = Devices("nvidia.com/gpu", tuple(ids))
    node = Node(
        facts=NodeFacts(name="n", labels=node_labels, allocatable=limits),
        gpus=GPUS,
        pods=(pod, reservation),
        allocations={("team-a", "pod"): PodAllocation("team-a", "pod", (ContainerAllocation("main", (devices,)),))},
        allocatable=(devices,),
    )
    grant, pins = Granter(node).grant(pod, {}, {"main": frozenset({GPU_1})})
    for claim in grant.claims:
        assert claim.gpu_uuid
        assert claim.memory_bytes is None or 0 <= claim.memory_bytes < NOBODYS
        assert claim.compute_ratio is None or 0 <= claim.compute_ratio < math.inf
        assert claim.shares >= 0
    for errors in grant.errors.values():
        assert all(0 < len(error) < 1000 for error in errors)
    # What was pinned is held, and an unchanged pod is never its own offender.
    again, _ = Granter(node).grant(pod, pins, {"main": frozenset({GPU_1})})
    assert again == grant


def fuzz_objects(data: bytes) -> None:
    """Any JSON in an API object's place is read or refused."""
    try:
        candidate: Any = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(candidate, dict):
        return
    may_be_used_on(candidate, "n")
    for parse in (parse_pod, parse_node, parse_slice, parse_claim):
        try:
            facts = parse(candidate)
        except ValueError:
            continue
        repr(facts).encode("utf-8")


def fuzz_pod_resources(data: bytes) -> None:
    """Any bytes from the kubelet's socket are allocations or refused as the source refuses them."""
    try:
        parse_list(ListPodResourcesResponse.FromString(data))
        parse_allocatable(AllocatableResourcesResponse.FromString(data))
    except DecodeError:
        return


def fuzz_regions(data: bytes) -> None:
    """Any content of a region's file is a region or refused; the first byte chooses its size."""
    if not data:
        return
    layout = LAYOUTS[data[0] % len(LAYOUTS)]
    whole = data[1 : layout.file_bytes + 1].ljust(layout.file_bytes, b"\0")
    for content in (data, whole, whole[: layout.proc_num] + data[1:5].ljust(4, b"\0") + whole[layout.proc_num + 4 :]):
        try:
            parse_region(content)
        except RegionError:
            continue
    parse_is_local(_text(data), "/tmp/cudevshr.cache")  # noqa: S108 - a name in a container, never opened here


def fuzz_scenario(data: bytes) -> None:
    """Any file is a scenario or refused in one line."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        try:
            load_scenario(Path(file.name))
        except ScenarioError as error:
            assert "\n" not in str(error)


def fuzz_web_config(data: bytes) -> None:
    """Any text is a web configuration or refused; no file is there for it to name."""

    def read(path: Path) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    try:
        parse_web_config(_text(data), Path("/nowhere"), read)
    except WebConfigError:
        return


def fuzz_headers(data: bytes) -> None:
    """Any header of a request is understood or taken for none."""
    header = data.decode("latin-1")
    choose_format(header)
    accepts_gzip(header)
    _parse_basic(header)


def fuzz_flags(data: bytes) -> None:
    """Any arguments are a configuration or refused in one line."""
    arguments = [argument for argument in _text(data).split("\n") if not argument.startswith(("--h", "-h", "--v"))]
    try:
        parse_config(arguments, {})
    except ConfigError as error:
        assert len(str(error)) < 100_000


TARGETS: dict[str, Callable[[bytes], None]] = {
    "cgroup": fuzz_cgroup,
    "contracts": fuzz_contracts,
    "flags": fuzz_flags,
    "headers": fuzz_headers,
    "objects": fuzz_objects,
    "pod_resources": fuzz_pod_resources,
    "quantities": fuzz_quantities,
    "regions": fuzz_regions,
    "scenario": fuzz_scenario,
    "stat": fuzz_stat,
    "web_config": fuzz_web_config,
}
