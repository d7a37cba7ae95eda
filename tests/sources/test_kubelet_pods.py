"""The kubelet's own pods, asked of a real gRPC server on a unix socket."""

import contextlib
import copy
import json
import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import grpc
import pytest
from api_gate import ApiGate
from google.protobuf import descriptor_pb2, json_format
from hypothesis import given
from hypothesis import strategies as st

from exporter.clock import SystemClock
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario
from exporter.snapshot import Container, ContainerKind, ContainerState, EnvVar, Pod, PodPhase
from exporter.sources import SourceError, kubelet_pods_pb2
from exporter.sources.kubelet_pods import FallbackPodsSource, KubeletPodsSource, parse_kubelet_pod
from exporter.sources.kubelet_pods_pb2 import ListPodsResponse
from exporter.sources.kubelet_pods_pb2 import Pod as PodMessage
from exporter.sources.kubernetes import KubernetesSource
from exporter.sources.kubernetes_config import find_api_server
from exporter.sources.kubernetes_objects import parse_pod

ROOT = Path(__file__).parents[2]
CAPTURES = Path(__file__).parents[1] / "captures"
CONTAINER_ID = "5f0c" * 16


def field(number, content):
    """A field of a message on the wire: an integer, text, or the fields of a message."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    body = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(body)) + body


def varint(value):
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def entry(number, key, content):
    """An entry of a map."""
    return field(number, field(1, key) + field(2, content))


# A pod with the numbers of k8s.io/api/core/v1/generated.proto, and a few fields that no one here asks for.
METADATA = (
    field(1, "train-0")
    + field(3, "team-a")
    + field(5, "0d052d1e-0874-4dad-95df-953b0d8b2b34")
    + field(6, "4711")  # resourceVersion
    + entry(11, "runai-gpu-group", "g")
    + entry(12, "gpu-fraction", "0.5")
    + field(13, field(1, "ReplicaSet") + field(3, "train") + field(5, "apps/v1") + field(6, 1))
    + field(17, field(1, "kubelet"))  # managedFields
)
MAIN = (
    field(1, "main")
    + field(2, "registry.example/train:1")
    + field(7, field(1, "GPU_MEMORY_LIMIT") + field(2, "1024"))
    + field(
        7,
        field(1, "CUDA_FROM_FIELD") + field(2, "") + field(3, field(1, field(1, "v1") + field(2, "metadata.annotations['gpu-fraction']"))),
    )
    + field(7, field(1, "CUDA_FROM_MAP") + field(3, field(3, field(1, field(1, "a-map")) + field(2, "a-key"))))
    + field(8, entry(1, "nvidia.com/gpu", field(1, "1")) + entry(2, "cpu", field(1, "500m")) + field(3, field(1, "gpu") + field(2, "one")))
    + field(9, field(1, "libvgpu") + field(2, 1) + field(3, "/etc/ld.so.preload"))
)
SPEC = (
    field(2, MAIN)
    + field(3, "Always")
    + field(10, "gpu-node-1")
    + field(19, "kai-scheduler")
    + field(20, field(1, "sidecar") + field(24, "Always"))
    + field(34, field(1, field(1, "debug") + field(2, "busybox")) + field(2, "main"))
    + field(39, field(1, "gpu") + field(3, "exclusive"))
    + field(39, field(1, "made") + field(4, "template"))
)
STATUS = (
    field(1, "Running")
    + field(6, "10.0.0.7")  # podIP
    + field(
        8,
        field(1, "main")
        + field(2, field(2, field(1, field(1, 1767225600))))
        + field(8, f"containerd://{CONTAINER_ID}")
        + field(14, field(1, "claim:gpu/one") + field(2, field(1, "gpu.nvidia.com/node/gpu-0") + field(2, "Healthy"))),
    )
    + field(10, field(1, "sidecar") + field(2, field(3, field(1, 137) + field(3, "OOMKilled"))))
    + field(13, field(1, "debug") + field(2, field(1, field(1, "ContainerCreating"))))
    + field(15, field(1, "made") + field(2, "train-0-made-x7k2m"))
)
MARSHALLED = field(1, METADATA) + field(2, SPEC) + field(3, STATUS)
POD = Pod(
    uid="0d052d1e-0874-4dad-95df-953b0d8b2b34",
    namespace="team-a",
    name="train-0",
    phase=PodPhase.RUNNING,
    labels={"runai-gpu-group": "g"},
    annotations={"gpu-fraction": "0.5"},
    owner_kind="ReplicaSet",
    owner_name="train",
    scheduler_name="kai-scheduler",
    containers=(
        Container(
            name="sidecar",
            kind=ContainerKind.INIT,
            restartable=True,
            state=ContainerState.TERMINATED,
            will_restart=True,
            resource_limits={},
        ),
        Container(
            name="main",
            container_id=CONTAINER_ID,
            state=ContainerState.RUNNING,
            env=(
                EnvVar(name="GPU_MEMORY_LIMIT", value="1024"),
                EnvVar(name="CUDA_FROM_FIELD", field_path="metadata.annotations['gpu-fraction']"),
                EnvVar(name="CUDA_FROM_MAP", config_map_key="a-key"),
            ),
            resource_limits={"nvidia.com/gpu": "1"},
            volume_mounts=("/etc/ld.so.preload",),
            claim_requests=(("gpu", "one"),),
            allocated_resources=(("claim:gpu/one", "gpu.nvidia.com/node/gpu-0"),),
        ),
        Container(name="debug", kind=ContainerKind.EPHEMERAL, state=ContainerState.WAITING),
    ),
    resource_claims={"gpu": "exclusive", "made": "train-0-made-x7k2m"},
)


def marshalled(uid, name="p"):
    return field(1, field(1, name) + field(3, "team-a") + field(5, uid)) + field(3, field(1, "Running"))


class Kubelet(grpc.GenericRpcHandler):
    """Answers ListPods with these pods, or by calling what stands there with the call's context."""

    def __init__(self, path, *pods, answer=None):
        self.pods = pods
        self.answer = answer
        self.calls = []
        self.server = grpc.server(ThreadPoolExecutor(2), handlers=(self,))
        self.server.add_insecure_port(f"unix:{path}")
        self.server.start()

    def service(self, call_details):
        if call_details.method != "/v1alpha1.Pods/ListPods":
            return None

        def answer(request, context):
            self.calls.append(request)
            return self.answer(context) if self.answer else b"".join(field(1, pod) for pod in self.pods)

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pods-api.sock"


@pytest.fixture
def start(path):
    running = []

    def start_kubelet(*pods, **more):
        running.append(Kubelet(path, *pods, **more))
        return running[-1]

    yield start_kubelet
    for kubelet in running:
        kubelet.server.stop(None).wait()


# --- a pod ---


def test_a_marshalled_pod_is_read_by_the_numbers_of_its_fields():
    assert parse_kubelet_pod(MARSHALLED) == POD


def test_a_pod_that_is_being_deleted_brings_back_no_container():
    deleted = field(1, METADATA + field(9, field(1, 1767225600))) + field(2, SPEC) + field(3, STATUS)
    assert [container.will_restart for container in parse_kubelet_pod(deleted).containers] == [False, False, False]


def test_a_static_pod_has_the_manifests_hash_as_its_uid():
    pod = parse_kubelet_pod(marshalled("5a2f1c9e0b7d4e6f8a1c3e5d7b9f0a2c"))
    assert (pod.uid, pod.phase) == ("5a2f1c9e0b7d4e6f8a1c3e5d7b9f0a2c", PodPhase.RUNNING)


def in_protobuf(pod):
    """A pod as JSON has it, turned into what the kubelet would marshal."""
    pod = copy.deepcopy(pod)
    for containers in ("initContainers", "containers"):
        for container in pod["spec"].get(containers, ()):
            limits = container.get("resources", {}).get("limits", {})
            container.get("resources", {}).update(limits={name: {"string": quantity} for name, quantity in limits.items()})
    if "deletionTimestamp" in pod["metadata"]:
        pod["metadata"]["deletionTimestamp"] = {"seconds": 1}
    return json_format.ParseDict(pod, PodMessage(), ignore_unknown_fields=True).SerializeToString()


def captured_pods():
    files = [CAPTURES / "pods-list.json", *sorted(CAPTURES.glob("dra/*/pods.json"))]
    return [pod for path in files for pod in json.loads(path.read_text())["items"]]


@pytest.mark.parametrize("pod", captured_pods(), ids=lambda pod: pod["metadata"]["name"])
def test_a_captured_pod_is_the_same_by_the_kubelet_as_by_the_api_server(pod):
    # Which request of an extended resource serves which container stands in a field that the kubelet's API is not asked for.
    known = replace(parse_pod(pod), extended_resource_claim=None, extended_resource_requests=())
    assert parse_kubelet_pod(in_protobuf(pod)) == known


@given(st.binary(max_size=200) | st.integers(0, len(MARSHALLED)).map(lambda end: MARSHALLED[:end]))
def test_any_bytes_are_a_pod_or_a_value_error(marshalled_bytes):
    try:
        assert parse_kubelet_pod(marshalled_bytes).uid
    except ValueError:
        return


# --- reading ---


def test_a_reading_has_the_pods_by_uid_and_nothing_of_the_node(start, path):
    kubelet = start(MARSHALLED, marshalled("b"))
    source = KubeletPodsSource(socket=path)
    reading = source.read()
    assert dict(reading.pods) == {POD.uid: POD, "b": parse_kubelet_pod(marshalled("b"))}
    assert (reading.node, reading.slice_devices, reading.resource_claims) == (None, None, None)
    assert kubelet.calls == [b""]


def test_pods_that_did_not_change_are_the_very_ones_of_before(start, path):
    kubelet = start(MARSHALLED, marshalled("b"))
    source = KubeletPodsSource(socket=path)
    before = source.read().pods
    kubelet.pods = (MARSHALLED, marshalled("b", name="renamed"))
    after = source.read().pods
    assert after[POD.uid] is before[POD.uid]
    assert (before["b"].name, after["b"].name) == ("p", "renamed")


def test_a_pod_that_cannot_be_read_costs_no_other_and_is_told_once(start, path, caplog):
    start(b"\x0a\xff", field(1, field(1, "no-uid")), marshalled("b"))
    source = KubeletPodsSource(socket=path)
    assert [list(source.read().pods) for _ in range(2)] == [["b"], ["b"]]
    assert [record.getMessage().split(" ", 1)[1][:27] for record in caplog.records] == [
        "state=unreadable_pod bytes=",
        "state=unreadable_pod bytes=",
    ]


def test_pods_that_are_gone_are_forgotten(start, path):
    kubelet = start(marshalled("a"), marshalled("b"))
    source = KubeletPodsSource(socket=path)
    source.read()
    kubelet.pods = (marshalled("b"),)
    assert list(source.read().pods) == ["b"]
    kubelet.pods = ()
    assert dict(source.read().pods) == {}


def test_an_answer_of_more_than_four_mebibytes_is_read(start, path):
    large = field(1, field(1, "p") + field(3, "n") + field(5, "a") + entry(12, "note", "x" * (6 << 20)))
    start(large)
    assert len(KubeletPodsSource(socket=path).read().pods["a"].annotations["note"]) == 6 << 20


def abort(code, text):
    return lambda context: context.abort(code, text)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (abort(grpc.StatusCode.FAILED_PRECONDITION, "Kubelet is initializing"), "does not know its pods yet"),
        (abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit"), "rate limit"),
        (abort(grpc.StatusCode.UNIMPLEMENTED, "unknown service v1alpha1.Pods"), "another version of the Pods API"),
        (abort(grpc.StatusCode.INTERNAL, "failed to marshal pod"), "INTERNAL"),
        (lambda context: b"\xff\xff", "not a v1alpha1.ListPodsResponse"),
    ],
    ids=["starting", "rate limit", "other version", "internal", "no message"],
)
def test_a_kubelet_that_refuses_is_a_source_error_that_says_why(start, path, answer, said):
    start(answer=answer)
    with pytest.raises(SourceError, match=said):
        KubeletPodsSource(socket=path).read()


def test_a_kubelet_that_hangs_is_a_source_error_when_the_deadline_is_over(start, path):
    gate = threading.Event()
    start(answer=lambda context: gate.wait(10) and b"")
    try:
        with pytest.raises(SourceError, match=r"no answer within 0\.2 s"):
            KubeletPodsSource(socket=path, deadline_seconds=0.2).read()
    finally:
        gate.set()


def test_a_kubelet_without_the_pods_api_is_a_source_error_that_names_the_feature(path):
    with pytest.raises(SourceError, match=r"pods-api\.sock does not exist.*feature gate PodsAPI"):
        KubeletPodsSource(socket=path).read()


def test_what_was_said_last_is_remembered_and_not_current(start, path):
    source = KubeletPodsSource(socket=path)
    assert source.last_reading() is None
    kubelet = start(marshalled("a"))
    source.read()
    kubelet.answer = abort(grpc.StatusCode.INTERNAL, "")
    with pytest.raises(SourceError):
        source.read()
    assert list(source.last_reading().pods) == ["a"]
    assert source.pods_are_current() is False


# --- the API server, and the kubelet while it does not answer ---

SCENARIO = """
node: {name: gpu-node-1, labels: {nvidia.com/gpu.memory: "81559"}}
pods:
  - metadata: {namespace: team-a, name: old, uid: old}
    spec: {nodeName: gpu-node-1, containers: [{name: main}]}
    status: {phase: Running}
sources: {kubernetes: up}
timeline:
  - at: 10s
    sources: {kubernetes: down}
  - at: 30s
    sources: {kubernetes: up}
"""


def api_source(url, clock):
    return KubernetesSource(api=lambda: find_api_server(host=url), node_name="gpu-node-1", clock=clock, jitter=Random(0))  # noqa: S311 - guards nothing


@pytest.fixture
def fallback(tmp_path, path):
    """A node, and the API server's word on it with the kubelet's pods to fall back on, from 0 s on."""
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO)
    clock = SimulatedClock()
    with SimulatedNode(load_scenario(file), clock) as node, contextlib.closing(api_source(node.kubernetes_url, clock)) as api:
        api.start()
        node.add_client(api)
        yield node, FallbackPodsSource(kubernetes=api, kubelet=KubeletPodsSource(socket=path))


def play(node, seconds):
    node.advance_to(seconds)
    node.settle()


def test_while_the_api_server_answers_the_kubelet_is_not_asked(fallback, start):
    node, source = fallback
    kubelet = start(marshalled("new"))
    play(node, 5)
    assert list(source.read().pods) == ["old"]
    assert source.pods_are_current()
    assert kubelet.calls == []


def test_in_an_outage_the_pods_are_the_kubelets_and_the_node_is_as_it_was_and_the_source_is_down(fallback, start, caplog):
    caplog.set_level(logging.INFO, "exporter.sources.kubelet_pods")
    node, source = fallback
    start(marshalled("new"))
    play(node, 5)
    source.read()
    play(node, 20)
    for _ in range(2):
        with pytest.raises(SourceError, match="pods"):
            source.read()
    assert list(source.last_reading().pods) == ["new"]
    assert source.last_reading().node.labels == {"nvidia.com/gpu.memory": "81559"}
    assert source.pods_are_current()
    play(node, 120)
    assert list(source.read().pods) == list(source.last_reading().pods) == ["old"]
    ours = [record.getMessage() for record in caplog.records if record.name == "exporter.sources.kubelet_pods"]
    assert ours == ["pods_from=kubelet", "pods_from=kubernetes"]


def test_where_neither_answers_pods_are_remembered_and_both_are_named(fallback):
    node, source = fallback
    play(node, 5)
    source.read()
    play(node, 20)
    with pytest.raises(SourceError, match=r"pods: .*; nor does the kubelet tell its pods: .*pods-api\.sock does not exist"):
        source.read()
    assert list(source.last_reading().pods) == ["old"]
    assert source.pods_are_current() is False


def test_before_the_api_server_ever_answered_the_kubelets_pods_are_all_there_is(start, path):
    start(marshalled("new"))
    with contextlib.closing(api_source("http://127.0.0.1:9", SystemClock())) as api:
        source = FallbackPodsSource(kubernetes=api, kubelet=KubeletPodsSource(socket=path))
        with pytest.raises(SourceError):
            source.read()
        assert (list(source.last_reading().pods), source.last_reading().node) == (["new"], None)
        assert source.pods_are_current()


def test_pods_that_the_api_server_keeps_current_are_not_asked_of_the_kubelet(fallback, start, path):
    node, _ = fallback
    kubelet = start(marshalled("new"))
    with contextlib.closing(ApiGate(node.kubernetes_url)) as gate, contextlib.closing(api_source(gate.url, SystemClock())) as api:
        gate.forbidden = ("/api/v1/nodes",)
        api.start()
        patience = time.monotonic() + 10
        while not (api.pods_are_current() and failure_of(api)) and time.monotonic() < patience:
            time.sleep(0.01)
        source = FallbackPodsSource(kubernetes=api, kubelet=KubeletPodsSource(socket=path))
        with pytest.raises(SourceError, match="nodes: "):
            source.read()
        assert list(source.last_reading().pods) == ["old"]
        assert kubelet.calls == []


def failure_of(source):
    try:
        source.read()
    except SourceError as error:
        return str(error)
    return None


# --- the generated code ---


def test_the_generated_code_is_that_of_the_proto_file(tmp_path):
    output = tmp_path / "descriptors"
    proto = "exporter/sources/kubelet_pods.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT}", f"--descriptor_set_out={output}", proto]
    subprocess.run(command, check=True, cwd=ROOT)
    written = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file[0]
    forget_json_names(written.message_type)
    generated = descriptor_pb2.FileDescriptorProto()
    kubelet_pods_pb2.DESCRIPTOR.CopyToProto(generated)
    forget_json_names(generated.message_type)
    assert generated == written


def forget_json_names(messages):
    """They are told to a file of descriptors, and not always to generated code."""
    for message in messages:
        for each in message.field:
            each.ClearField("json_name")
        forget_json_names(message.nested_type)


def test_the_generated_code_asks_for_no_newer_protobuf_than_the_project_does():
    assert "# Protobuf Python Version: 5.27." in (ROOT / "exporter/sources/kubelet_pods_pb2.py").read_text()


def test_an_answer_is_a_list_of_bytes_on_the_wire():
    assert ListPodsResponse(pods=[b"ab", b"c"]).SerializeToString() == b"\x0a\x02ab\x0a\x01c"
