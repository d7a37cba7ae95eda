"""The kubelet's pod-resources socket of a simulated node: a gRPC server on a unix socket.

As a real kubelet (1.36) it sends one ContainerDevices entry for each device id, and the pods in another order at each call.
Messages: exporter/sources/podresources.proto.
"""

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import grpc

from exporter.simulation.node import ClaimDevice, ContainerResources, DeviceIds, NodeState, PodResources, Sources
from exporter.sources import podresources_pb2 as messages

_SERVICE = "v1.PodResourcesLister"
_THREADS = 4


class SimulatedKubelet:
    """Serves `socket`. The calls of this class belong to one thread."""

    def __init__(self, socket: Path, *, real_time: bool) -> None:
        """Take the path of the socket.

        In real time a kubelet that hangs lets its callers wait until they give up; on a simulated clock it says at once that their deadline
        is over, because their real one would have the simulation stand still.
        """
        self._socket = socket
        self._real_time = real_time
        self._state = NodeState()
        self._server: grpc.Server | None = None
        self._fragments: tuple[bytes, ...] = ()
        self._known: dict[int, tuple[PodResources, bytes]] = {}
        self._allocatable = b""
        self._calls = count()
        self._is_closed = False
        self._changed = threading.Condition()

    def update(self, state: NodeState) -> None:
        """Take a new state of the node."""
        before, self._state = self._state, state
        if state.pod_resources is not before.pod_resources:
            self._encode(state.pod_resources)
        if state.allocatable is not before.allocatable:
            self._allocatable = messages.AllocatableResourcesResponse(devices=_split(state.allocatable)).SerializeToString()
        self._wake()
        self._serve(before.sources, state.sources)

    def close(self) -> None:
        """Stop serving."""
        self._is_closed = True
        self._wake()
        self._stop()

    def _encode(self, pods: Mapping[str, PodResources]) -> None:
        # A repeated field is the concatenation of its elements, so that an answer of megabytes is put together without encoding it anew.
        known = {}
        for pod in pods.values():
            entry = self._known.get(id(pod))
            known[id(pod)] = entry or (pod, messages.ListPodResourcesResponse(pod_resources=[_encode_pod(pod)]).SerializeToString())
        self._known = known
        self._fragments = tuple(fragment for _, fragment in known.values())

    # --- up and down ---

    def _serve(self, before: Sources, now: Sources) -> None:
        if now.kubelet == "down":
            self._stop()
            return
        if now.kubelet_restarts != before.kubelet_restarts:
            self._stop()
        if self._server is None:
            self._start()
        # This stops whoever is not root. For root, who may pass everywhere, the answer is the nearest thing to it that gRPC has.
        self._socket.chmod(0o000 if now.kubelet == "denied" else 0o600)

    def _start(self) -> None:
        server = grpc.server(ThreadPoolExecutor(_THREADS, thread_name_prefix="simulated-kubelet"))
        handlers = {"List": self._list, "GetAllocatableResources": self._get_allocatable, "Get": self._get}
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    _SERVICE, {name: grpc.unary_unary_rpc_method_handler(handler) for name, handler in handlers.items()}
                ),
            )
        )
        server.add_insecure_port(f"unix:{self._socket}")
        server.start()
        self._server = server

    def _stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
        self._socket.unlink(missing_ok=True)

    # --- calls ---

    def _list(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        _ = request
        self._check(context)
        fragments = self._fragments
        first = next(self._calls) % max(len(fragments), 1)
        return b"".join((*fragments[first:], *fragments[:first]))

    def _get_allocatable(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        _ = request
        self._check(context)
        return self._allocatable

    def _get(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self._check(context)
        # The request has the pod's name in field 1 and its namespace in field 2, as PodResources has.
        wanted = messages.PodResources.FromString(request)
        pod = self._state.pod_resources.get(f"{wanted.namespace}/{wanted.name}")
        if pod is None:
            context.abort(grpc.StatusCode.UNKNOWN, f"pod {wanted.name} in namespace {wanted.namespace} not found")
        # The answer has the pod in field 1, as that of List has.
        return self._known[id(pod)][1]

    def _check(self, context: grpc.ServicerContext) -> None:
        match self._state.sources.kubelet:
            case "refuse":
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
            case "denied":
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "permission denied")
            case "hang":
                self._hang(context)

    def _hang(self, context: grpc.ServicerContext) -> None:
        if not self._real_time:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        context.add_callback(self._wake)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._state.sources.kubelet != "hang" or not context.is_active())

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _encode_pod(pod: PodResources) -> messages.PodResources:
    return messages.PodResources(
        name=pod.name, namespace=pod.namespace, containers=[_encode_container(container) for container in pod.containers]
    )


def _encode_container(container: ContainerResources) -> messages.ContainerResources:
    return messages.ContainerResources(
        name=container.name,
        devices=_split(container.devices),
        cpu_ids=container.cpu_ids,
        dynamic_resources=[
            messages.DynamicResource(
                claim_name=claim.claim_name,
                claim_namespace=claim.claim_namespace,
                claim_resources=[_encode_claim_device(device) for device in claim.claim_resources],
            )
            for claim in container.dynamic_resources
        ],
    )


def _encode_claim_device(device: ClaimDevice) -> messages.ClaimResource:
    return messages.ClaimResource(
        driver_name=device.driver_name,
        pool_name=device.pool_name,
        device_name=device.device_name,
        share_id=device.share_id,
        cdi_devices=[messages.CDIDevice(name=name) for name in device.cdi_devices],
    )


def _split(devices: Iterable[DeviceIds]) -> list[messages.ContainerDevices]:
    return [
        messages.ContainerDevices(
            resource_name=entry.resource_name,
            device_ids=[device_id],
            topology=messages.TopologyInfo(nodes=[messages.NUMANode(ID=node) for node in entry.numa_nodes]) if entry.numa_nodes else None,
        )
        for entry in devices
        for device_id in entry.device_ids
    ]
