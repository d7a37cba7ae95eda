"""NVIDIA's driver for dynamic resource allocation (`gpu.nvidia.com`): pods name ResourceClaims, and those are allocated devices.

What a pod holds is in the kubelet's answer, or, before Kubernetes 1.34, in the ResourceClaims that its status names. The kubelet lists
every device of a claim for each container that names the claim: which of them a container asked for is told by the claim's results, by
its status or by the pod's request mappings. A device becomes a GPU by the ResourceSlice's attribute `uuid`, else `gpu-<N>` by the minor
number N; never by cutting a UUID out of a name.

- MPS limits in the claim's configuration hold for each client process and are enforced.
- Several consumers (pods) of a claim without an MPS limit share without an amount: an allocation and no claim.
- The only consumer has the device to itself: all of it. Named by several of its containers, the claim is the pod's.
- A share of a device's capacity (consumable capacity) is that much memory, enforced by nobody that this exporter knows.
- adminAccess sees devices and holds none: such a pod is a monitor.

https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu and https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from exporter.claims.claim import MIB, NOT_MINE, Allocation, Answer, Claim, Derivation, Node, Phrase, Resolver, Scope, System
from exporter.claims.quantity import parse_positive_percent, parse_quantity, shown
from exporter.claims.whole_gpu import whole_memory_phrase
from exporter.snapshot import ClaimResult, Container, Pod, ResourceClaim, SliceDevice

DRIVER = "gpu.nvidia.com"

_DEVICE_NAME = re.compile(r"gpu-([0-9]{1,3})")
_PASSTHROUGH_PREFIX = "gpu-vfio-"
_CDI_ID = re.compile(r"k8s\.gpu\.nvidia\.com/claim=[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}-(.+)")


@dataclass(frozen=True, slots=True, order=True)
class DeviceKey:
    """A device as Kubernetes names it."""

    driver_name: str
    pool_name: str
    device_name: str


@dataclass(frozen=True, slots=True, order=True)
class Holding:
    """A device of one ResourceClaim."""

    claim_namespace: str
    claim_name: str
    device: DeviceKey

    @property
    def claim(self) -> tuple[str, str]:
        """Answer the ResourceClaim's namespace and name."""
        return self.claim_namespace, self.claim_name


@dataclass(frozen=True, slots=True)
class MpsLimits:
    """What a claim's configuration lets each MPS client process have."""

    memory_bytes: int | None
    compute_ratio: float | None


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod was given by dynamic resource allocation."""
    return _Resolver(node).resolve


def held_devices(node: Node) -> tuple[SliceDevice, ...]:
    """Answer the known devices that someone on this node holds: their uuids outlive the slices of a driver that stops."""
    held = {
        DeviceKey(device.driver_name, device.pool_name, device.device_name)
        for pod in node.allocations.values()
        for container in pod.containers
        for device in container.dynamic_devices
    }
    held |= {_key_of(result) for claim in node.resource_claims for result in claim.results}
    return tuple(device for device in node.slice_devices if _key_of(device) in held)


def _key_of(device: ClaimResult | SliceDevice) -> DeviceKey:
    return DeviceKey(device.driver_name, device.pool_name, device.device_name)


class _Resolver:
    """What is known of claims and devices on one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._claims = {(claim.namespace, claim.name): claim for claim in node.resource_claims}
        self._uuids = {_key_of(device): device.gpu_uuid for device in node.slice_devices if device.gpu_uuid}
        self._by_minor = node.gpus_by_minor
        self._consumers: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._claims_of_device: dict[DeviceKey, set[tuple[str, str]]] = defaultdict(set)
        self._index_consumers()

    def _index_consumers(self) -> None:
        """Count pods by the claims that they name: those that the claim's status reserves it for and those that the kubelet lists."""
        pods = {(pod.namespace, pod.name): pod for pod in self._node.pods}
        ended = {pod.uid for pod in self._node.pods if pod.ended}
        for claim in self._node.resource_claims:
            self._consumers[claim.namespace, claim.name].update(uid for uid in claim.reserved_for_pod_uids if uid not in ended)
        for name in {*pods, *self._node.allocations}:
            pod = pods.get(name)
            if pod is not None and pod.ended:
                continue
            for holding in frozenset().union(*self._listed(*name, pod).values()):
                self._consumers[holding.claim].add(pod.uid if pod else "/".join(name))
                if not self._is_admin(holding):
                    self._claims_of_device[holding.device].add(holding.claim)

    def resolve(self, pod: Pod) -> Answer:
        """Answer what the pod holds."""
        listed = self._listed(pod.namespace, pod.name, pod)
        if not any(listed.values()):
            return NOT_MINE
        if all(self._is_admin(holding) for holdings in listed.values() for holding in holdings):
            return Answer(plumbing=True)
        holders: dict[Holding, list[Container]] = defaultdict(list)
        for container in pod.containers:
            if container.holds_claims:
                for holding in listed.get(container.name, frozenset()):
                    if not self._is_admin(holding) and self._asked_for(pod, container, holding):
                        holders[holding].append(container)
        claims: list[Claim] = []
        allocations: list[Allocation] = []
        errors: list[str] = []
        for holding, containers in sorted(holders.items(), key=lambda item: item[0]):
            if holding.device.device_name.startswith(_PASSTHROUGH_PREFIX):
                continue
            try:
                gpu_uuid = self._gpu_uuid(holding.device)
                derivation = Derivation(contract=_contract(holding), memory=self._no_amount(holding))
                allocations += (Allocation(container.name, gpu_uuid, derivation) for container in containers)
                claims += self._claims_on(pod, holding, gpu_uuid, containers)
            except ValueError as error:
                errors.append(f"claim {shown(holding.claim_name)}: {error}")
        return Answer(claims=tuple(claims), allocations=tuple(allocations), errors=tuple(errors))

    # --- who holds what ---

    def _listed(self, namespace: str, name: str, pod: Pod | None) -> Mapping[str, frozenset[Holding]]:
        """Answer container -> devices of the claims that it names, as the kubelet lists them or, failing that, as the pod says."""
        allocation = self._node.allocations.get((namespace, name))
        listed = {
            each.container: frozenset(
                Holding(device.claim_namespace, device.claim_name, DeviceKey(device.driver_name, device.pool_name, device.device_name))
                for device in each.dynamic_devices
                if device.driver_name == DRIVER
            )
            for each in (allocation.containers if allocation else ())
        }
        if pod is None or any(listed.values()):
            return listed
        return {
            container.name: frozenset(
                Holding(namespace, claim_name, _key_of(result))
                for claim_name in _named_claims(pod, container)
                for result in self._results((namespace, claim_name))
                if result.driver_name == DRIVER
            )
            for container in pod.containers
        }

    def _asked_for(self, pod: Pod, container: Container, holding: Holding) -> bool:
        """Answer whether the container asked for this device of the claim; True where that cannot be told."""
        requests = _requests(pod, container, holding.claim_name)
        if None in requests:
            return True
        if requests and (results := self._results_of(holding)):
            return any(_main_request(result.request) in requests for result in results)
        told = _device_names(pod, container, holding.claim_name)
        return holding.device.device_name in told or not told

    def _is_admin(self, holding: Holding) -> bool:
        results = self._results_of(holding)
        return bool(results) and all(result.admin_access for result in results)

    def _results(self, claim: tuple[str, str]) -> tuple[ClaimResult, ...]:
        known = self._claims.get(claim)
        return known.results if known else ()

    def _results_of(self, holding: Holding) -> tuple[ClaimResult, ...]:
        """Answer what the claim says of this device: several results where it was allocated several shares of it."""
        return tuple(result for result in self._results(holding.claim) if _key_of(result) == holding.device)

    def _gpu_uuid(self, device: DeviceKey) -> str:
        if uuid := self._uuids.get(device):
            return uuid
        match = _DEVICE_NAME.fullmatch(device.device_name)
        gpu = self._by_minor.get(int(match[1])) if match else None
        if gpu is None:
            raise ValueError(f"device {shown(device.device_name)} is in no ResourceSlice of this node and names no GPU here")
        return gpu.gpu_uuid

    # --- how much ---

    def _claims_on(self, pod: Pod, holding: Holding, gpu_uuid: str, containers: list[Container]) -> list[Claim]:
        limits = self._mps_limits(holding, gpu_uuid)
        contract = _contract(holding)
        claims = [
            Claim(
                system="dra",
                gpu_uuid=gpu_uuid,
                container=container.name,
                scope=Scope.PROCESS,
                memory_bytes=limits.memory_bytes,
                compute_ratio=limits.compute_ratio,
                enforced=True,
                derivation=Derivation(
                    contract=contract,
                    memory=Phrase("{} bytes (of each process, by the MPS limits in the claim's configuration)", (limits.memory_bytes,))
                    if limits.memory_bytes is not None
                    else None,
                    compute=Phrase(
                        "{} (of each process's threads, by the MPS limits in the claim's configuration)", (limits.compute_ratio,)
                    )
                    if limits.compute_ratio is not None
                    else None,
                ),
            )
            for container in containers
            if limits is not None
        ]
        if (limits is not None and limits.memory_bytes is not None) or len(self._consumers[holding.claim]) > 1:
            return claims
        owner, scope = (containers[0].name, Scope.CONTAINER) if len(containers) == 1 else ("", Scope.POD)
        if shares := [result for result in self._results_of(holding) if result.share_id or result.consumed_capacity]:
            memory_bytes = _consumed_memory(result for result in shares if _is_named(pod, containers, holding.claim_name, result))
            if memory_bytes is not None:
                claims.append(
                    Claim(
                        system="dra",
                        gpu_uuid=gpu_uuid,
                        container=owner,
                        scope=scope,
                        memory_bytes=memory_bytes,
                        enforced=False,
                        derivation=Derivation(
                            contract=contract,
                            memory=Phrase("{} bytes (the capacity of the device that the claim consumes)", (memory_bytes,)),
                        ),
                    )
                )
        elif len(self._claims_of_device[holding.device]) == 1:
            gpu = self._node.gpus.get(gpu_uuid)
            total = gpu.memory_total_bytes if gpu else None
            claims.append(
                Claim(
                    system="dra",
                    gpu_uuid=gpu_uuid,
                    container=owner,
                    scope=scope,
                    memory_bytes=total,
                    compute_ratio=1.0 if limits is None else None,
                    enforced=True,
                    derivation=Derivation(
                        contract=contract,
                        memory=whole_memory_phrase(total),
                        compute=Phrase("1 (the only consumer has the device to itself)") if limits is None else None,
                    ),
                )
            )
        return claims

    def _no_amount(self, holding: Holding) -> Phrase | None:
        consumers = len(self._consumers[holding.claim])
        return Phrase("{} pods share this claim, and nothing says how much each may have", (consumers,)) if consumers > 1 else None

    def _mps_limits(self, holding: Holding, gpu_uuid: str) -> MpsLimits | None:
        claim, results = self._claims.get(holding.claim), self._results_of(holding)
        return _parse_mps_limits(claim, results[0], gpu_uuid) if claim is not None and results else None


def _contract(holding: Holding) -> Phrase:
    return Phrase("ResourceClaim {}, which was allocated device {}", (holding.claim_name, holding.device.device_name))


def _main_request(request: str) -> str:
    """Answer the request of a result; one with alternatives is named `accel/mig` there and `accel` elsewhere."""
    return request.partition("/")[0]


def _named_claims(pod: Pod, container: Container) -> set[str]:
    """Answer the names of the ResourceClaims that serve the container."""
    names = {pod.resource_claims[name] for name, _ in container.claim_requests if name in pod.resource_claims}
    if pod.extended_resource_claim and any(each.container == container.name for each in pod.extended_resource_requests):
        names.add(pod.extended_resource_claim)
    return names


def _requests(pod: Pod, container: Container, claim_name: str) -> frozenset[str | None]:
    """Answer the requests of the claim that the container names; None among them stands for all."""
    if claim_name == pod.extended_resource_claim:
        return frozenset(each.request for each in pod.extended_resource_requests if each.container == container.name)
    return frozenset(request for name, request in container.claim_requests if pod.resource_claims.get(name) == claim_name)


def _is_named(pod: Pod, containers: Iterable[Container], claim_name: str, result: ClaimResult) -> bool:
    named = [_requests(pod, container, claim_name) for container in containers]
    return any(not requests or None in requests or _main_request(result.request) in requests for requests in named)


def _device_names(pod: Pod, container: Container, claim_name: str) -> frozenset[str]:
    """Answer the devices of the claim that the container's status names, as `<driver>/<pool>/<device>` or by CDI's name."""
    names = {name for name, object_name in pod.resource_claims.items() if object_name == claim_name}
    devices = set()
    for resource_name, resource_id in container.allocated_resources:
        if resource_name.removeprefix("claim:").partition("/")[0] in names:
            match = _CDI_ID.fullmatch(resource_id)
            devices.add(match[1] if match else resource_id.removeprefix(f"{DRIVER}/").rpartition("/")[2])
    return frozenset(devices)


def _consumed_memory(shares: Iterable[ClaimResult]) -> int | None:
    """Answer the memory that shares of a device add up to; None where one does not tell it. Raises ValueError."""
    amounts = [
        next((parse_quantity(amount) for key, amount in share.consumed_capacity.items() if key.rpartition("/")[2] == "memory"), None)
        for share in shares
    ]
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known and len(known) == len(amounts) else None


def _parse_mps_limits(claim: ResourceClaim, result: ClaimResult, gpu_uuid: str) -> MpsLimits | None:
    """Answer the MPS limits that apply to one device of a claim; None without any. Raises ValueError for what cannot be read."""
    kind = "MigDeviceConfig" if gpu_uuid.startswith("MIG-") else "GpuConfig"
    sharing: object = None
    for config in claim.configs:
        applies = not config.requests or bool({result.request, _main_request(result.request)} & set(config.requests))
        if config.driver_name == DRIVER and applies and config.parameters.get("kind") == kind:
            sharing = config.parameters.get("sharing")  # Those of the claim stand after those of its class, and win.
    if not isinstance(sharing, Mapping) or sharing.get("strategy") != "MPS":
        return None
    mps = sharing.get("mpsConfig") or {}
    if not isinstance(mps, Mapping):
        raise ValueError("mpsConfig is no object")
    memory_bytes = _parse_memory_limit(mps, claim, result, gpu_uuid)
    percent = mps.get("defaultActiveThreadPercentage")
    if percent is None and memory_bytes is None:
        return None
    if percent is not None and (not isinstance(percent, int) or isinstance(percent, bool)):
        raise ValueError("defaultActiveThreadPercentage is no number")
    return MpsLimits(memory_bytes, None if percent is None else parse_positive_percent(str(percent)) / 100)


def _parse_memory_limit(mps: Mapping[str, object], claim: ResourceClaim, result: ClaimResult, gpu_uuid: str) -> int | None:
    by_device = mps.get("defaultPerDevicePinnedMemoryLimit") or {}
    if not isinstance(by_device, Mapping):
        raise ValueError("defaultPerDevicePinnedMemoryLimit is no object")
    position = str([each for each in claim.results if each.driver_name == DRIVER].index(result))
    limit = next((by_device[key] for key in (gpu_uuid, position) if key in by_device), mps.get("defaultPinnedDeviceMemoryLimit"))
    if limit is None:
        return None
    if not isinstance(limit, str | int) or isinstance(limit, bool):
        raise ValueError("a memory limit of MPS that is no quantity")
    memory_bytes = parse_quantity(str(limit)) // MIB * MIB
    if memory_bytes == 0:
        raise ValueError(f"a memory limit of MPS of {shown(str(limit))} is below 1 MiB, which the driver refuses")
    return memory_bytes


SYSTEM = System(name="dra", resolver=resolver)
