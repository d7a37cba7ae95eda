"""The two nodes that everything is measured on, as values: *typical* and *extreme*, and multiples of the former.

Pods of three sharing systems share eight GPUs: KAI fractions, time-slicing and HAMi; on the extreme node two GPUs are divided by MIG. Each
pod has one or two processes. The rest of the node's pods have nothing to do with GPUs, as on any node.
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
GPU_MEMORY_MIB = 81559
GPUS = 8
NODE_NAME = "gpu-node-1"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """How large a node is."""

    name: str
    gpu_pods: int
    other_pods: int
    processes: int
    mig_gpus: int = 0


TYPICAL = Size("typical", gpu_pods=64, other_pods=46, processes=96)
EXTREME = Size("extreme", gpu_pods=250, other_pods=0, processes=500, mig_gpus=2)
SIZES = {size.name: size for size in (TYPICAL, EXTREME)}
MIG_DEVICES = 7


def scaled(factor: int) -> Size:
    """Answer a node with so many times the pods and processes of the typical one."""
    return Size(f"{factor}x", TYPICAL.gpu_pods * factor, TYPICAL.other_pods * factor, TYPICAL.processes * factor)


@dataclass(frozen=True, slots=True)
class Client:
    """A process that uses a GPU."""

    pod_uid: str
    container_id: str
    gpu: int
    mig: int | None
    """Which of the GPU's MIG devices."""
    memory_bytes: int
    sm_percent: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A node: what its kubelet and API server say (a scenario without processes), and the processes."""

    scenario: Json
    clients: tuple[Client, ...]


def gpu_uuid(index: int) -> str:
    """Answer the uuid of a GPU."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'gpu {index}')}"


def mig_uuid(index: int, slot: int) -> str:
    """Answer the uuid of a MIG device."""
    return f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, f'mig {index} {slot}')}"


def plan(size: Size) -> Plan:
    """Answer the node of this size."""
    pods = list(_gpu_pods(size))
    clients = tuple(
        Client(
            pod_uid=pod.uid,
            container_id=pod.container_id,
            gpu=pod.gpu,
            mig=pod.mig,
            memory_bytes=(300 + 7 * number % 400) * MIB,
            sm_percent=1 + number % 3,
        )
        for number in range(size.processes)
        for pod in [pods[number % len(pods)]]
    )
    shared = size.mig_gpus
    scenario = {
        "node": {"name": NODE_NAME, "labels": {"nvidia.com/gpu.memory": str(GPU_MEMORY_MIB), "nvidia.com/gpu.replicas": "64"}},
        "gpus": [{"uuid": gpu_uuid(index), **({"mig": _mig(index)} if index < size.mig_gpus else {})} for index in range(GPUS)],
        "pods": [pod.manifest for pod in pods]
        + [_reservation(index) for index in range(shared, GPUS - 2)]
        + [_manifest("apps", f"web-{number}", {}, {}, "default-scheduler") for number in range(size.other_pods)],
        "pod_resources": [pod.resources for pod in pods if pod.resources],
        "allocatable": [
            {"resource_name": "nvidia.com/gpu", "device_ids": [f"{gpu_uuid(GPUS - 2)}::{replica}" for replica in range(64)]},
        ],
    }
    return Plan(scenario=scenario, clients=clients)


@dataclass(frozen=True, slots=True)
class _GpuPod:
    uid: str
    container_id: str
    gpu: int
    mig: int | None
    manifest: Json
    resources: Json | None


def _gpu_pods(size: Size) -> Iterator[_GpuPod]:
    slots = [(index, slot) for index in range(size.mig_gpus) for slot in range(MIG_DEVICES)]
    for number, (index, slot) in enumerate(slots):
        device = {"resource_name": "nvidia.com/mig-1g.10gb", "device_ids": [mig_uuid(index, slot)]}
        yield _pod("team-m", f"infer-{number}", {}, {}, index, slot, [device])
    for number in range(size.gpu_pods - len(slots)):
        gpu = size.mig_gpus + number % (GPUS - size.mig_gpus)
        name, namespace = f"train-{number}", f"team-{number % 6}"
        if gpu == GPUS - 1:
            devices = f"{gpu_uuid(gpu)},NVIDIA,2000,10:"
            yield _pod(
                namespace, name, {}, {"hami.io/vgpu-node": NODE_NAME, "hami.io/vgpu-devices-allocated": f"{devices};"}, gpu, None, []
            )
        elif gpu == GPUS - 2:
            device = {"resource_name": "nvidia.com/gpu", "device_ids": [f"{gpu_uuid(gpu)}::{number % 64}"]}
            yield _pod(namespace, name, {}, {}, gpu, None, [device])
        else:
            yield _pod(namespace, name, {"runai-gpu-group": _group(gpu)}, {"gpu-fraction": "0.02"}, gpu, None, [])


def _pod(namespace: str, name: str, labels: Json, annotations: Json, gpu: int, mig: int | None, devices: list[Json]) -> _GpuPod:
    manifest = _manifest(namespace, name, labels, annotations, "kai-scheduler" if labels else "default-scheduler")
    resources = {"namespace": namespace, "name": name, "containers": [{"name": "main", "devices": devices}]}
    return _GpuPod(manifest["metadata"]["uid"], _container_id(namespace, name), gpu, mig, manifest, resources)


def _manifest(namespace: str, name: str, labels: Json, annotations: Json, scheduler: str) -> Json:
    """Answer a pod with as much beside what is needed as pods have."""
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{namespace}/{name}")),
            "labels": {"app": name, "pod-template-hash": "6d4b75cb6d", **labels},
            "annotations": annotations,
            "ownerReferences": [
                {"kind": "ReplicaSet", "name": f"{name}-6d4b75cb6d", "controller": True, "apiVersion": "apps/v1", "uid": "x"}
            ],
        },
        "spec": {
            "nodeName": NODE_NAME,
            "schedulerName": scheduler,
            "containers": [
                {
                    "name": "main",
                    "image": "example.com/team/train:1.0",
                    "env": [{"name": f"SETTING_{number}", "value": "x" * 40} for number in range(20)],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }
            ],
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {"name": "main", "containerID": f"containerd://{_container_id(namespace, name)}", "state": {"running": {}}, "ready": True}
            ],
        },
    }


def _container_id(namespace: str, name: str) -> str:
    return (uuid.uuid5(uuid.NAMESPACE_URL, f"{namespace}/{name}").hex * 2)[:64]


def _group(gpu: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"group {gpu}"))


def _reservation(gpu: int) -> Json:
    return _manifest(
        "kai-resource-reservation",
        f"gpu-reservation-{gpu}",
        {"app": "kai-resource-reservation", "runai-gpu-group": _group(gpu)},
        {"run.ai/reserve_for_gpu_index": gpu_uuid(gpu)},
        "kai-scheduler",
    )


def _mig(index: int) -> list[Json]:
    return [
        {"uuid": mig_uuid(index, slot), "profile": "1g.10gb", "gpu_instance_id": slot + 7, "compute_instance_id": 0}
        for slot in range(MIG_DEVICES)
    ]


def with_processes(of: Plan, first_pid: int = 40_001) -> Json:
    """Answer the scenario with its processes in it, for the simulated node."""
    containers = {pod["metadata"]["uid"]: f"{pod['metadata']['namespace']}/{pod['metadata']['name']}/main" for pod in of.scenario["pods"]}
    processes = [
        {
            "pid": first_pid + number,
            "container": containers[client.pod_uid],
            "gpus": [
                {
                    "gpu": gpu_uuid(client.gpu) if client.mig is None else mig_uuid(client.gpu, client.mig),
                    "memory": str(client.memory_bytes),
                    "sm": client.sm_percent if client.mig is None else 0,
                }
            ],
        }
        for number, client in enumerate(of.clients)
    ]
    return {**of.scenario, "processes": processes}
