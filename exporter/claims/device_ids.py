"""The ids by which device plugins hand out GPUs, and how many shares of a GPU there are.

NVIDIA's: `GPU-<uuid>`, `MIG-<uuid>`, before driver R470 `MIG-GPU-<uuid>/<gi>/<ci>`; any of them with `::<n>` is one replica of it.
GKE's: `nvidia<minor>`, `nvidia<minor>/gi<gi>`; either with `/vgpu<n>` is one share of it. An id is known by its shape and not by its
resource's name, which operators rename. What names no GPU of this node is no GPU allocation.

https://github.com/NVIDIA/k8s-device-plugin (shared access to GPUs)
https://github.com/GoogleCloudPlatform/container-engine-accelerators (cmd/nvidia_gpu)
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from exporter.claims.claim import Node, Phrase
from exporter.claims.quantity import parse_unsigned
from exporter.snapshot import Container, Devices, Gpu, Pod

_OLD_MIG = re.compile(r"MIG-(GPU-[0-9a-f-]+)/([0-9]{1,3})/([0-9]{1,3})")
_GKE = re.compile(r"nvidia([0-9]{1,3})(?:/gi([0-9]{1,3}))?(/vgpu[0-9]{1,3})?")

REPLICAS_LABEL = "nvidia.com/gpu.replicas"
STRATEGY_LABEL = "nvidia.com/gpu.sharing-strategy"
MIG_STRATEGY_LABEL = "nvidia.com/mig.strategy"


@dataclass(frozen=True, slots=True)
class Device:
    """One id that names a GPU of this node."""

    gpu: Gpu
    is_share: bool
    is_gke: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """What one container holds of one GPU."""

    container: Container
    gpu: Gpu
    shares: int
    """Distinct ids of shares; 0 where it holds the whole of it."""
    is_gke: bool = False
    """Whether GKE's device plugin handed it out."""
    device_ids: tuple[str, ...] = ()
    """As the kubelet lists them."""
    shares_are_listed: bool = False
    """Whether the kubelet lists the shares that the GPU is cut into; else a label of the node tells how many there are."""


class DeviceIds:
    """Reads device ids against the GPUs of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._by_instance = {
            (gpu.parent_gpu_uuid, gpu.gpu_instance_id, gpu.compute_instance_id): gpu
            for gpu in node.gpus.values()
            if gpu.parent_gpu_uuid is not None
        }
        self._by_minor = {gpu.minor: gpu for gpu in node.gpus.values() if gpu.parent_gpu_uuid is None and gpu.minor is not None}
        self._shares = self._count_shares(node.allocatable)

    def parse(self, device_id: str) -> Device | None:
        """Answer what the id names, or None where it names no GPU of this node."""
        name, separator, _ = device_id.partition("::")
        gpu = self._node.gpus.get(name)
        if gpu is None and (match := _OLD_MIG.fullmatch(name)):
            gpu = self._by_instance.get((match[1], int(match[2]), int(match[3])))
        if gpu is None and (match := _GKE.fullmatch(device_id)):
            return self._gke_device(int(match[1]), match[2], is_share=bool(match[3]))
        return Device(gpu, bool(separator)) if gpu is not None else None

    def _gke_device(self, minor: int, gpu_instance: str | None, *, is_share: bool) -> Device | None:
        gpu = self._by_minor.get(minor)
        if gpu is not None and gpu_instance is not None:
            gpu = self._by_instance.get((gpu.gpu_uuid, int(gpu_instance), 0))
        return Device(gpu, is_share, is_gke=True) if gpu is not None else None

    def held(self, pod: Pod) -> Iterator[Held]:
        """Answer what the pod's containers hold, each (container, GPU) once, those that have ended left out."""
        allocation = self._node.allocations.get((pod.namespace, pod.name))
        by_container = {each.container: each.devices for each in allocation.containers} if allocation else {}
        for container in pod.containers:
            if container.holds_claims and container.name in by_container:
                yield from self._held(container, by_container[container.name])

    def _held(self, container: Container, devices: tuple[Devices, ...]) -> Iterator[Held]:
        ids: dict[Device, list[str]] = defaultdict(list)
        for device_id in sorted({device_id for entry in devices for device_id in entry.device_ids}):
            device = self.parse(device_id)
            if device is not None:
                ids[device].append(device_id)
        for device, named in ids.items():
            shares = len(named) if device.is_share else 0
            yield Held(container, device.gpu, shares, device.is_gke, tuple(named), device.gpu.gpu_uuid in self._shares)

    def shares_listed(self, gpu: Gpu) -> int | None:
        """Answer into how many shares the kubelet says that the GPU is cut; None where it lists none."""
        return self._shares.get(gpu.gpu_uuid)

    def replicas_of(self, gpu: Gpu) -> int | None:
        """Answer the replicas of a GPU of NVIDIA's device plugin: what the kubelet lists, else the node's label, else None."""
        if listed := self.shares_listed(gpu):
            return listed
        if gpu.parent_gpu_uuid is None:
            return parse_shares_label(self._node, REPLICAS_LABEL)
        # Under MIG strategy `mixed` each profile has a label of its own and the plain one speaks of full GPUs.
        profile = (gpu.mig_profile or "").replace("+", ".")
        if of_profile := parse_shares_label(self._node, f"nvidia.com/mig-{profile}.replicas"):
            return of_profile
        return None if self._node.labels.get(MIG_STRATEGY_LABEL) == "mixed" else parse_shares_label(self._node, REPLICAS_LABEL)

    def _count_shares(self, allocatable: Iterable[Devices]) -> Mapping[str, int]:
        ids: dict[str, set[str]] = defaultdict(set)
        for entry in allocatable:
            for device_id in entry.device_ids:
                device = self.parse(device_id)
                if device is not None and device.is_share:
                    ids[device.gpu.gpu_uuid].add(device_id)
        return {uuid: len(distinct) for uuid, distinct in ids.items()}


def held_phrase(held: Held) -> Phrase:
    """Answer the contract of a GPU that the kubelet handed out."""
    first, more = held.device_ids[0], len(held.device_ids) - 1
    if more:
        return Phrase("the kubelet's device id {} and {} more of this GPU", (first, more))
    return Phrase("the kubelet's device id {}", (first,))


def parse_shares_label(node: Node, label: str) -> int | None:
    """Answer the number of shares that a label of the node tells; None where it tells none.

    1 says that GPUs are not shared and 0 that this does not apply: neither fits a container that holds a share.
    """
    try:
        shares = parse_unsigned(node.labels.get(label, ""))
    except ValueError:
        return None
    return shares if shares > 1 else None


def is_mps(node: Node) -> bool:
    """Answer whether replicas on this node are shares of MPS; with any other strategy, or none, they are shares of time."""
    return node.labels.get(STRATEGY_LABEL) == "mps"
