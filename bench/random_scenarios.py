"""The whole program fed random scenarios: no traceback, no answer but 200, nothing counted twice or lost, nothing that cannot be explained.

    python bench/random_scenarios.py [--count 1000] [--seed 1] [--keep FOLDER]

Each scenario is a random node: GPUs, MIG devices, pods of every sharing system with sound and broken contracts, processes of anyone on
anything, sources that go down, and a timeline that edits all of it. It is played in this process on a simulated clock, through the real
kubelet, API and /proc clients. A scenario that fails is named by its seed and kept as a file if so asked. Exit status 1 if any failed.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families

from exporter.config import parse_config
from exporter.daemon import about
from exporter.endpoints import metrics
from exporter.explain.answer import explain_gpu, explain_pod
from exporter.health import Health
from exporter.node_json import build_node, render_json
from exporter.report import Report
from exporter.sampler import Sampler
from exporter.server import Request
from exporter.simulated import sample_at, wire
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario

Json = dict[str, Any]

GPUS = tuple(f"GPU-{number:08x}-0000-4000-8000-000000000000" for number in range(3))
MIG_DEVICES = tuple(f"MIG-{number:08x}-0000-5000-8000-000000000000" for number in range(2))
UNLISTED = "GPU-ffffffff-0000-4000-8000-000000000000"
GROUPS = ("group-a", "group-b", "no-such-group")
NAMESPACES = ("team-a", "team-b", "kube-system", "kai-resource-reservation", "gpu-operator")
CONTAINERS = ("main", "side", "mps-control-daemon-ctr")
ODD_TEXTS = (
    "",
    "0",
    "0.5",
    "1",
    "-1",
    "1e400",
    "NaN",
    "half",
    "4000",
    "9" * 40,
    "x" * 2000,
    "\u202e",
    "a\nb",
    '"',
    "\\",
    "{}",
    "[",
    "null",
    ";;",
    ":,:",
)
SECONDS = 40.0
INTERVAL_SECONDS = 5.0

_DOCS = Path(__file__).parents[1] / "docs"
_NODE_SCHEMA, _EXPLAIN_SCHEMA = (
    Draft202012Validator(json.loads((_DOCS / f"{name}.v1.schema.json").read_text())) for name in ("node", "explain")
)
_ABOUT = about(parse_config(["--demo"], {}), "worker-1")


def random_scenario(random: Random) -> Json:
    """Answer a scenario file's content."""
    gpus = GPUS[: random.randint(1, len(GPUS))]
    pods = [_pod(random, number, gpus) for number in range(random.randint(0, 6))]
    pods += [_reservation(random, number, group, gpus) for number, group in enumerate(GROUPS[: random.randint(0, 2)])]
    processes = [_process(random, 4000 + number, pods, gpus) for number in range(random.randint(0, 10))]
    return {
        "node": {"name": "gpu-node-1", "labels": _labels(random), "cgroup": random.choice(["systemd", "cgroupfs"])},
        "gpus": [_gpu(random, uuid) for uuid in gpus],
        "pods": pods,
        "pod_resources": [_allocation(random, pod, gpus) for pod in pods if random.random() < 0.6],  # noqa: PLR2004
        "allocatable": [_devices(random, gpus) for _ in range(random.randint(0, 2))],
        "processes": processes,
        "timeline": [
            _step(random, at, pods, processes, gpus) for at in sorted(random.sample(range(1, int(SECONDS)), random.randint(0, 4)))
        ],
    }


def _labels(random: Random) -> Json:
    labels = {
        "nvidia.com/gpu.memory": random.choice(["81559", "85520809984", "0", "many"]),
        "nvidia.com/gpu.replicas": random.choice(["1", "2", "4", "x"]),
        "nvidia.com/gpu.sharing-strategy": random.choice(["none", "time-slicing", "mps"]),
    }
    return {key: value for key, value in labels.items() if random.random() < 0.7}  # noqa: PLR2004


def _gpu(random: Random, uuid: str) -> Json:
    gpu: Json = {"uuid": uuid, "memory_total": random.choice(["81559Mi", "24Gi", "unsupported"])}
    if random.random() < 0.2:  # noqa: PLR2004
        gpu["fault"] = random.choice(["lost", "unknown", "no_permission"])
    if uuid == GPUS[0] and random.random() < 0.3:  # noqa: PLR2004
        gpu["mig"] = [
            {"uuid": mig, "profile": "1g.10gb", "gpu_instance_id": number + 1, "compute_instance_id": 0, "memory_total": "9856Mi"}
            for number, mig in enumerate(MIG_DEVICES)
        ]
    return gpu


def _pod(random: Random, number: int, gpus: tuple[str, ...]) -> Json:
    names = CONTAINERS[: random.randint(1, len(CONTAINERS))]
    state = random.choice([{"running": {}}, {"running": {}}, {"waiting": {}}, {"terminated": {"exitCode": random.randint(0, 1)}}])
    return {
        "metadata": {
            "namespace": random.choice(NAMESPACES),
            "name": f"pod-{number}",
            "uid": f"{number:08x}-{random.randrange(1 << 16):04x}-4000-8000-000000000000",
            "labels": _contract(random, {"runai-gpu-group": GROUPS, "kai.scheduler/queue": ("q",)}),
            "annotations": _annotations(random, gpus),
        },
        "spec": {
            "nodeName": "gpu-node-1",
            "restartPolicy": random.choice(["Always", "OnFailure", "Never"]),
            "containers": [{"name": name, "env": _environment(random), "resources": _resources(random)} for name in names],
        },
        "status": {
            "phase": random.choice(["Running", "Running", "Running", "Pending", "Succeeded", "Failed", "?"]),
            "containerStatuses": [
                {"name": name, "containerID": f"containerd://{random.getrandbits(256):064x}", "state": state}
                for name in names
                if random.random() < 0.9  # noqa: PLR2004
            ],
        },
    }


def _reservation(random: Random, number: int, group: str, gpus: tuple[str, ...]) -> Json:
    pod = _pod(random, 900 + number, gpus)
    pod["metadata"] |= {
        "namespace": random.choice(["kai-resource-reservation", "runai-reservation", "team-a"]),
        "labels": {"app": "kai-resource-reservation", "runai-gpu-group": group},
        "annotations": {"run.ai/reserve_for_gpu_index": random.choice([*gpus, ""])},
    }
    return pod


def _annotations(random: Random, gpus: tuple[str, ...]) -> Json:
    uuid = random.choice([*gpus, UNLISTED, *MIG_DEVICES])
    device_tuple = f"{uuid},NVIDIA,{random.choice(['1024', '0', '99999999', 'x'])},{random.choice(['0', '30', '100', '300'])}:;"
    koordinator = {"gpu": [{"id": uuid, "minor": 0, "resources": {"koordinator.sh/gpu-memory": random.choice(["10Gi", "1", "-1"])}}]}
    return _contract(
        random,
        {
            "gpu-fraction": ("0.5", "0.1"),
            "gpu-memory": ("4000",),
            "gpu-fraction-container-name": CONTAINERS,
            "nvidia.com/container.main.gpu-memory.limit": ("10Gi",),
            "hami.io/vgpu-devices-allocated": (device_tuple, ";" + device_tuple),
            "hami.io/bind-phase": ("allocating", "success", "failed"),
            "volcano.sh/vgpu-ids-new": (device_tuple,),
            "scheduling.koordinator.sh/device-allocated": (json.dumps(koordinator),),
            "ALIYUN_COM_GPU_MEM_IDX": ("0", "1", "7"),
            "ALIYUN_COM_GPU_MEM_ASSIGNED": ("true", "false"),
            "kubernetes.io/config.hash": ("9aac5b5c8815def09a2ef9e37b89da55",),
        },
    )


def _contract(random: Random, values: Mapping[str, tuple[str, ...]]) -> Json:
    chosen = (key for key in values if random.random() < 0.25)  # noqa: PLR2004
    return {key: random.choice(ODD_TEXTS if random.random() < 0.2 else values[key]) for key in chosen}  # noqa: PLR2004


def _environment(random: Random) -> list[Json]:
    names = (
        "GPU_MEMORY_LIMIT",
        "CUDA_DEVICE_MEMORY_LIMIT",
        "CUDA_DEVICE_SM_LIMIT",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "CUDA_DISABLE_CONTROL",
    )
    values = ("1073741824", "4g", "30", "0=2G", "true", *ODD_TEXTS)
    return [{"name": name, "value": random.choice(values)} for name in names if random.random() < 0.1]  # noqa: PLR2004


def _resources(random: Random) -> Json:
    keys = ("nvidia.com/gpu", "aliyun.com/gpu-mem", "volcano.sh/vgpu-number", "nvidia.com/gpumem")
    return {"limits": {key: random.choice(["1", "2", "4k", "x"]) for key in keys if random.random() < 0.2}}  # noqa: PLR2004


def _devices(random: Random, gpus: tuple[str, ...]) -> Json:
    forms = ("{}", "{}::0", "{}::1", "{}-_-3", "{}/vgpu1", "nvidia0", "nvidia0/gi1", "x")
    ids = [random.choice(forms).format(random.choice([*gpus, UNLISTED, *MIG_DEVICES])) for _ in range(random.randint(0, 4))]
    names = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "aliyun.com/gpu-mem", "volcano.sh/vgpu-number")
    return {"resource_name": random.choice(names), "device_ids": ids}


def _allocation(random: Random, pod: Json, gpus: tuple[str, ...]) -> Json:
    containers = [{"name": each["name"], "devices": [_devices(random, gpus)]} for each in pod["spec"]["containers"]]
    return {"namespace": pod["metadata"]["namespace"], "name": pod["metadata"]["name"], "containers": containers}


def _process(random: Random, pid: int, pods: list[Json], gpus: tuple[str, ...]) -> Json:
    process: Json = {
        "pid": pid,
        "start_time": random.randint(1, 500),
        "command": random.choice(["python", "nvidia-cuda-mps-server", ") (", "x" * 40]),
        "state": random.choice(["S", "R", "Z", "gone"]),
        "gpus": [_use(random, uuid) for uuid in random.sample(gpus, random.randint(1, len(gpus)))],
    }
    if pods and random.random() < 0.8:  # noqa: PLR2004
        pod = random.choice(pods)
        container = random.choice(pod["spec"]["containers"])["name"]
        process["container"] = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}/{container}"
    elif random.random() < 0.5:  # noqa: PLR2004
        process["cgroup"] = f"0::/kubepods/pod{random.getrandbits(128):032x}/{random.getrandbits(256):064x}"
    return process


def _use(random: Random, uuid: str) -> Json:
    memory = random.choice(["0", "1Gi", "30Gi", "200Gi", "hidden"])
    return {"gpu": uuid, "memory": memory, "sm": random.choice([0, 5, 100]), "kind": random.choice(["compute", "graphics", "mps"])}


def _step(random: Random, at: int, pods: list[Json], processes: list[Json], gpus: tuple[str, ...]) -> Json:
    step: Json = {"at": f"{at}s"}
    if random.random() < 0.4:  # noqa: PLR2004
        states = {
            "nvml": ["up", "down", "not_loaded"],
            "kubelet": ["up", "down", "refuse", "denied", "restart"],
            "kubernetes": ["up", "gone"],
        }
        step["sources"] = {source: random.choice(states[source]) for source in random.sample(sorted(states), 1)}
    if random.random() < 0.4:  # noqa: PLR2004
        step["gpus"] = [{"uuid": random.choice(gpus), "fault": random.choice(["lost", "none", "unknown"])}]
    if pods and random.random() < 0.5:  # noqa: PLR2004
        metadata = random.choice(pods)["metadata"]
        identity = {key: metadata[key] for key in ("namespace", "name")}
        step["pods"] = [{"metadata": identity | {"annotations": _annotations(random, gpus)}}]
    if processes and random.random() < 0.6:  # noqa: PLR2004
        pid = random.choice(processes)["pid"]
        step["processes"] = [{"pid": pid, "start_time": random.randint(1, 500), "gpus": [_use(random, random.choice(gpus))]}]
    return step


class _Tracebacks(logging.Handler):
    """Keeps what was logged with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self.found.append(self.format(record))


def play(path: Path) -> list[str]:
    """Play a scenario to its end; answer what was wrong, nothing where all is well."""
    tracebacks = _Tracebacks()
    logger = logging.getLogger("exporter")
    logger.addHandler(tracebacks)
    try:
        with ExitStack() as stack:
            clock = SimulatedClock()
            node = stack.enter_context(SimulatedNode(load_scenario(path), clock))
            sampler = wire(parse_config(["--scenario", str(path), "--once"], {}), node, clock, stack)
            wrong = []
            for number in range(int(SECONDS / INTERVAL_SECONDS) + 1):
                sample_at(node, sampler, number * INTERVAL_SECONDS)
                wrong += [f"at {number * INTERVAL_SECONDS:g}s: {each}" for each in _wrongs(sampler)]
            return wrong + tracebacks.found
    finally:
        logger.removeHandler(tracebacks)


def _wrongs(sampler: Sampler) -> Iterator[str]:
    response = metrics(sampler, Request(path="/metrics"))
    if response.status != 200:  # noqa: PLR2004 - HTTP's OK
        yield f"/metrics answers {response.status}"
    samples = [sample for family in text_string_to_metric_families(response.body.decode()) for sample in family.samples]
    for sample in samples:
        if sample.name.startswith("fgpu_") and not 0 <= sample.value < float("inf"):
            yield f"{sample.name}{sample.labels} is {sample.value}"
    report = sampler.exposition.report
    if report is None:
        yield "there is no report"
        return
    yield from not_conserved(report, samples)
    yield from _untold(report, sampler.exposition.health)


def _untold(report: Report, health: Health) -> Iterator[str]:
    """Answer what of the JSON breaks its schema; that everything can be explained is seen on the way."""
    pods = [f"{pod.namespace}/{pod.pod}" for pod in report.pod_infos]
    gpus = [row.gpu.gpu_uuid for row in report.gpus]
    answers = [("node", _NODE_SCHEMA, build_node(_ABOUT, health, report))]
    answers += [(pod, _EXPLAIN_SCHEMA, explain_pod(_ABOUT, health, report, pod)) for pod in pods]
    answers += [(gpu, _EXPLAIN_SCHEMA, explain_gpu(_ABOUT, health, report, gpu)) for gpu in gpus]
    for name, schema, answer in answers:
        for error in schema.iter_errors(json.loads(render_json(answer))):
            yield f"the JSON of {name}: {error.json_path} {error.message[:200]}"


def not_conserved(report: Report, samples: list[Any]) -> Iterator[str]:
    """Answer the GPUs on which the samples do not add up to the processes that the driver listed."""
    named = ("fgpu_container_memory_used_bytes", "fgpu_gpu_unattributed_memory_bytes")
    for gpu in report.gpus:
        if gpu.unattributed_bytes is None or gpu.reading is None:
            continue
        listed = sum(process.memory_used_bytes or 0 for process in gpu.reading.processes or ())
        found = sum(sample.value for sample in samples if sample.name in named and sample.labels["gpu_uuid"] == gpu.gpu.gpu_uuid)
        if found != listed:
            yield f"{gpu.gpu.gpu_uuid}: processes use {listed}, containers and what has no owner {found:.0f}"


def main() -> int:
    """Play as many as asked; answer the exit status."""
    parser = argparse.ArgumentParser(description="The whole program fed random scenarios.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first scenario; each next one has the next number")
    parser.add_argument("--keep", type=Path, help="folder for scenarios that fail")
    arguments = parser.parse_args()
    failed = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            path = Path(folder) / f"seed-{seed}.yaml"
            path.write_text(json.dumps(random_scenario(Random(seed))))  # noqa: S311 - repeatable
            wrong = play(path)
            if wrong:
                failed += 1
                print(f"seed {seed}: {len(wrong)} wrong", *wrong[:3], sep="\n  ", flush=True)  # noqa: T201
                if arguments.keep:
                    arguments.keep.mkdir(parents=True, exist_ok=True)
                    path.replace(arguments.keep / path.name)
            path.unlink(missing_ok=True)
    print(f"{arguments.count} scenarios, {failed} failed, {time.monotonic() - started:.0f} s")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
