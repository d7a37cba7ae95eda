"""Which devices did the kubelet hand out: List and GetAllocatableResources of the pod-resources socket.

Called by the sampler's thread. A kubelet that cannot be asked, or answers what cannot be read, is a `SourceError`. Both calls are made at
each read: together they cost a few milliseconds, and an old GetAllocatableResources beside a new List would make wrong shares.

A channel lives for one read. The socket is made anew at each start of the kubelet, and a channel that has been refused for a while
stays away for many seconds after the kubelet is back. Where no channel is left grpcio ends its threads, up to 16 on a large machine, which
would wake many times between two reads.

Format: podresources.proto beside this file;
https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/#monitoring-device-plugin-resources
"""

import os
import socket as sockets
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from exporter.snapshot import ContainerAllocation, Devices, DynamicDevice, KubeletReading, PodAllocation
from exporter.sources import SourceError
from exporter.sources.podresources_pb2 import AllocatableResourcesResponse, ContainerDevices, DynamicResource, ListPodResourcesResponse

_MAX_ANSWER_BYTES = 16 << 20  # grpcio's own limit is 4 MiB, which a node with many replicas and pods can pass

_CHANNEL_OPTIONS = (
    # Since 1.57 grpcio sends the percent-encoded path as :authority, which is none and may be refused (grpc/grpc#38142).
    ("grpc.default_authority", "localhost"),
    # Else channels to one target share a connection, and its back-off, for the life of the process.
    ("grpc.use_local_subchannel_pool", 1),
)

# More than grpcio opens where it starts anew: where it finds none free it aborts the process (seen in 1.85).
_DESCRIPTORS = 16

_NOTHING = b""  # both requests are messages without fields

Answer = TypeVar("Answer", ListPodResourcesResponse, AllocatableResourcesResponse)


def parse_list(answer: ListPodResourcesResponse) -> tuple[PodAllocation, ...]:
    """Answer the allocations in a List answer, sorted by namespace and name.

    The kubelet sends an entry per device id, in an order that changes from call to call (seen in 1.36): ids of one resource are brought
    together, once each and sorted. Nothing without a name is kept.
    """
    pods: dict[tuple[str, str], dict[str, tuple[list[ContainerDevices], list[DynamicResource]]]] = {}
    for pod in answer.pod_resources:
        if not pod.name or not pod.namespace:
            continue
        containers = pods.setdefault((pod.namespace, pod.name), {})
        for container in pod.containers:
            devices, dynamic = containers.setdefault(container.name, ([], []))
            devices.extend(container.devices)
            dynamic.extend(container.dynamic_resources)
    return tuple(
        PodAllocation(
            namespace,
            name,
            tuple(
                ContainerAllocation(container, _merge_devices(devices), _merge_dynamic_devices(dynamic))
                for container, (devices, dynamic) in sorted(containers.items())
            ),
        )
        for (namespace, name), containers in sorted(pods.items())
    )


def parse_allocatable(answer: AllocatableResourcesResponse) -> tuple[Devices, ...]:
    """Answer all device ids of the node, one entry per resource, sorted. Devices of DRA drivers are not among them."""
    return _merge_devices(answer.devices)


def _merge_devices(entries: Iterable[ContainerDevices]) -> tuple[Devices, ...]:
    ids: dict[str, set[str]] = {}
    for entry in entries:
        ids.setdefault(entry.resource_name, set()).update(entry.device_ids)
    return tuple(Devices(resource_name, tuple(sorted(device_ids))) for resource_name, device_ids in sorted(ids.items()) if device_ids)


def _merge_dynamic_devices(entries: Iterable[DynamicResource]) -> tuple[DynamicDevice, ...]:
    # cdi_devices accumulates over the devices of a claim (seen in 1.36): the device's name is its identity.
    devices = {
        DynamicDevice(
            claim_namespace=entry.claim_namespace,
            claim_name=entry.claim_name,
            driver_name=device.driver_name,
            pool_name=device.pool_name,
            device_name=device.device_name,
            share_id=device.share_id if device.HasField("share_id") else None,
        )
        for entry in entries
        for device in entry.claim_resources
    }
    return tuple(
        sorted(
            devices,
            key=lambda device: (
                device.claim_namespace,
                device.claim_name,
                device.driver_name,
                device.pool_name,
                device.device_name,
                device.share_id or "",
            ),
        )
    )


class KubeletSource:
    """Asks the kubelet of this node at `socket`, whose directory must be mounted: the kubelet replaces the socket itself."""

    def __init__(self, *, socket: Path, deadline_seconds: float = 2.0) -> None:
        self._socket = socket.absolute()
        self._deadline_seconds = deadline_seconds

    def read(self) -> KubeletReading:
        """Answer what the kubelet handed out. Raises SourceError, at the latest when a call's deadline is over."""
        with open_channel(self._socket, _MAX_ANSWER_BYTES) as channel:
            try:
                listed = self._call(channel, "List", ListPodResourcesResponse)
            except grpc.RpcError as error:
                raise self._explained("List", error) from error
            try:
                allocatable = self._call(channel, "GetAllocatableResources", AllocatableResourcesResponse)
            except grpc.RpcError as error:
                if not _lacks_allocatable(error):
                    raise self._explained("GetAllocatableResources", error) from error
                allocatable = None
        return KubeletReading(
            pods=parse_list(listed),
            allocatable=None if allocatable is None else parse_allocatable(allocatable),
        )

    def _call(self, channel: grpc.Channel, method: str, answer_type: type[Answer]) -> Answer:
        # The bytes are decoded here and not by grpcio, which would log a traceback for each answer that is none.
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/v1.PodResourcesLister/{method}")
        answer = call(_NOTHING, timeout=self._deadline_seconds)
        try:
            return answer_type.FromString(answer)
        except DecodeError as error:
            raise SourceError(f"{method} on {self._socket} answered what is not a {answer_type.DESCRIPTOR.full_name} ({error})") from error

    def _explained(self, method: str, error: grpc.RpcError) -> SourceError:
        code, details = error.code(), (error.details() or "")[:300]
        match code:
            case grpc.StatusCode.UNAVAILABLE:
                text = why_unreachable(self._socket) or f"{self._socket}: the connection broke ({details}); the kubelet may be restarting"
            case grpc.StatusCode.PERMISSION_DENIED:
                text = f"{method} on {self._socket} was denied ({details}); run as uid 0"
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                text = f"{method} on {self._socket}: no answer within {self._deadline_seconds:g} s; the kubelet hangs or is overloaded"
            case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
                text = f"{method} on {self._socket}: the answer is larger than {_MAX_ANSWER_BYTES >> 20} MiB ({details})"
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                text = (
                    f"{method} on {self._socket}: refused by the kubelet's rate limit ({details}), which all its clients share; "
                    "see what else on this node asks that often"
                )
            case grpc.StatusCode.UNIMPLEMENTED:
                text = f"{self._socket} does not offer v1.PodResourcesLister/{method} ({details}): Kubernetes 1.20 or later is needed"
            case _:
                text = f"{method} on {self._socket} failed: {code.name} ({details})"
        return SourceError(text)


def open_channel(socket: Path, max_answer_bytes: int) -> grpc.Channel:
    """Answer a channel to a socket of the kubelet's, an absolute path. Raises SourceError where there are no descriptors for it."""
    _require_descriptors(socket)
    target = "unix" + socket.as_uri().removeprefix("file")  # percent-encoded, as grpcio reads it
    return grpc.insecure_channel(target, options=(*_CHANNEL_OPTIONS, ("grpc.max_receive_message_length", max_answer_bytes)))


def _require_descriptors(socket: Path) -> None:
    taken: list[int] = []
    try:
        taken.extend(os.eventfd(0) for _ in range(_DESCRIPTORS))
    except OSError as error:
        raise SourceError(f"{socket} is not asked: {error}; raise the limit on open files (ulimit -n) of this process") from error
    finally:
        for descriptor in taken:
            os.close(descriptor)


def why_unreachable(socket: Path) -> str | None:
    """Answer why a socket cannot be connected to; None where it can. grpcio has one status for all of this, and changing words."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(0.1)
        try:
            probe.connect(str(socket))
        except FileNotFoundError:
            return (
                f"{socket} does not exist: the kubelet is not up, or the directory is not mounted from the host "
                "(mount the directory, not the socket)"
            )
        except PermissionError:
            return f"{socket}: permission denied; run as uid 0 and, with SELinux, as a type that may connect"
        except ConnectionRefusedError:
            return f"{socket}: nothing listens there; the kubelet is not up"
        except OSError as error:
            return f"{socket} cannot be connected to ({error})"
    return None


def _lacks_allocatable(error: grpc.RpcError) -> bool:
    # Kubernetes 1.20 does not know the call; 1.21 and 1.22 have it behind a gate and answer UNKNOWN "... disabled" without it.
    code = error.code()
    return code is grpc.StatusCode.UNIMPLEMENTED or (code is grpc.StatusCode.UNKNOWN and "disabled" in (error.details() or ""))
