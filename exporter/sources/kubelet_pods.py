"""Which pods are on this node, by the kubelet's own word: ListPods of its Pods API, without the API server.

Called by the sampler's thread, once for each sample. The kubelet tells pods and nothing else: neither the Node object nor anything of DRA.
Its word on a pod is the API server's plus what it has not reported yet. Of a static pod the uid is another: the kubelet knows the
manifest's own, the API server that of the mirror pod.

Format: kubelet_pods.proto beside this file (package v1alpha1, feature gate PodsAPI); https://github.com/kubernetes/enhancements/issues/4188
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from exporter.snapshot import KubernetesReading, Pod
from exporter.sources import SourceError
from exporter.sources.kubelet import open_channel, why_unreachable
from exporter.sources.kubelet_pods_pb2 import ListPodsResponse
from exporter.sources.kubelet_pods_pb2 import Pod as PodMessage
from exporter.sources.kubernetes_objects import parse_pod

_log = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = 64 << 20  # 250 pods, the objects whole
_LIST_PODS = "/v1alpha1.Pods/ListPods"
_NOTHING = b""  # the request is a message without fields

_CONTAINER_LISTS = ("initContainers", "containers", "ephemeralContainers")


def parse_kubelet_pod(marshalled: bytes) -> Pod:
    """Answer the facts of a pod as the kubelet marshals it. Raises ValueError for bytes that are none, or without identity."""
    try:
        message = PodMessage.FromString(marshalled)
    except DecodeError as error:
        raise ValueError(f"what is no Pod ({error})") from error
    pod = MessageToDict(message, preserving_proto_field_name=True)
    spec = pod.get("spec", {})
    # Go's marshaller and JSON's differ in two places: what is inlined, and quantities.
    spec["ephemeralContainers"] = [each.get("ephemeralContainerCommon", {}) for each in spec.get("ephemeralContainers", ())]
    for containers in _CONTAINER_LISTS:
        for container in spec.get(containers, ()):
            resources = container.get("resources", {})
            resources["limits"] = {name: quantity.get("string") for name, quantity in resources.get("limits", {}).items()}
    return parse_pod(pod)


class KubeletPodsSource:
    """Asks the kubelet of this node for its pods at `socket`, whose directory must be mounted: the kubelet replaces the socket itself."""

    def __init__(self, *, socket: Path, deadline_seconds: float = 2.0) -> None:
        self._socket = socket.absolute()
        self._deadline_seconds = deadline_seconds
        self._reading: KubernetesReading | None = None
        self._known: Mapping[bytes, Pod] = {}
        self._unreadable: Mapping[bytes, str] = {}

    def read(self) -> KubernetesReading:
        """Answer the pods that the kubelet knows; the Node object and the rest are None. Raises SourceError."""
        answer = self._list_pods()
        known: dict[bytes, Pod] = {}
        unreadable: dict[bytes, str] = {}
        for marshalled in answer.pods:
            # Most pods are the same bytes as last time.
            if (pod := self._known.get(marshalled)) is not None:
                known[marshalled] = pod
                continue
            try:
                known[marshalled] = parse_kubelet_pod(marshalled)
            except ValueError as error:
                unreadable[marshalled] = str(error)
                if marshalled not in self._unreadable:
                    _log.warning("socket=%s state=unreadable_pod bytes=%d reason=%r", self._socket, len(marshalled), str(error))
        self._known, self._unreadable = known, unreadable
        self._reading = KubernetesReading(pods=MappingProxyType({pod.uid: pod for pod in known.values()}), node=None)
        return self._reading

    def last_reading(self) -> KubernetesReading | None:
        """Answer what the kubelet last said, however long ago; None: it never said anything."""
        return self._reading

    def pods_are_current(self) -> bool:
        """Answer False: pods are all that there is, so where reading failed they are not."""
        return False

    def _list_pods(self) -> ListPodsResponse:
        with open_channel(self._socket, _MAX_ANSWER_BYTES) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_LIST_PODS)
            try:
                answer = call(_NOTHING, timeout=self._deadline_seconds)
            except grpc.RpcError as error:
                raise self._explained(error) from error
        try:
            return ListPodsResponse.FromString(answer)
        except DecodeError as error:
            raise SourceError(f"ListPods on {self._socket} answered what is not a v1alpha1.ListPodsResponse ({error})") from error

    def _explained(self, error: grpc.RpcError) -> SourceError:
        code, details = error.code(), (error.details() or "")[:300]
        match code:
            case grpc.StatusCode.UNAVAILABLE:
                reason = why_unreachable(self._socket)
                if reason is None:
                    text = f"{self._socket}: the connection broke ({details}); the kubelet may be restarting"
                else:
                    text = f"{reason}. The Pods API needs a kubelet with the feature gate PodsAPI"
            case grpc.StatusCode.FAILED_PRECONDITION:
                text = f"ListPods on {self._socket}: the kubelet does not know its pods yet ({details}); it has just started"
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                text = f"ListPods on {self._socket}: no answer within {self._deadline_seconds:g} s; the kubelet hangs or is overloaded"
            case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
                text = f"ListPods on {self._socket}: the answer is larger than {_MAX_ANSWER_BYTES >> 20} MiB ({details})"
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                text = f"ListPods on {self._socket}: refused by the kubelet's rate limit ({details}), which all its clients share"
            case grpc.StatusCode.UNIMPLEMENTED:
                text = (
                    f"{self._socket} does not offer v1alpha1.Pods/ListPods ({details}): this kubelet speaks another version of the Pods API"
                )
            case _:
                text = f"ListPods on {self._socket} failed: {code.name} ({details})"
        return SourceError(text)


class PodsReader(Protocol):
    """Reads pods, with or without what goes with them."""

    def read(self) -> KubernetesReading:
        """Answer what is known now. Raises SourceError."""
        ...

    def last_reading(self) -> KubernetesReading | None:
        """Answer what was known last."""
        ...

    def pods_are_current(self) -> bool:
        """Answer whether the pods are up to date, though something else may not be."""
        ...


class FallbackPodsSource:
    """The API server's word, and while its pods are not up to date the kubelet's on the pods.

    The source counts as down all the while: the Node object and DRA's objects are as the API server last said them.
    """

    def __init__(self, *, kubernetes: PodsReader, kubelet: PodsReader) -> None:
        self._kubernetes = kubernetes
        self._kubelet = kubelet
        self._pods_of_kubelet: Mapping[str, Pod] | None = None
        """None: the API server's are up to date, or the kubelet does not answer either."""

    def read(self) -> KubernetesReading:
        """Answer what the API server says. Raises SourceError where it cannot be told, having asked the kubelet for the pods."""
        try:
            reading = self._kubernetes.read()
        except SourceError as error:
            if self._kubernetes.pods_are_current():
                self._take(None)
                raise
            try:
                self._take(self._kubelet.read().pods)
            except SourceError as other:
                self._take(None)
                raise SourceError(f"{error}; nor does the kubelet tell its pods: {other}") from error
            raise
        self._take(None)
        return reading

    def last_reading(self) -> KubernetesReading | None:
        """Answer what the API server last said, with the kubelet's pods where these are newer."""
        reading = self._kubernetes.last_reading()
        if self._pods_of_kubelet is None:
            return reading
        return replace(reading or KubernetesReading(pods={}, node=None), pods=self._pods_of_kubelet)

    def pods_are_current(self) -> bool:
        """Answer whether the pods are up to date, whoever told them."""
        return self._pods_of_kubelet is not None or self._kubernetes.pods_are_current()

    def _take(self, pods: Mapping[str, Pod] | None) -> None:
        if (pods is None) != (self._pods_of_kubelet is None):
            _log.info("pods_from=%s", "kubernetes" if pods is None else "kubelet")
        self._pods_of_kubelet = pods
