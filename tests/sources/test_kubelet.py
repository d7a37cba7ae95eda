"""What the kubelet handed out, asked of a real gRPC server on a unix socket."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2, json_format
from hypothesis import given
from hypothesis import strategies as st

from exporter.snapshot import ContainerAllocation, Devices, DynamicDevice, KubeletReading, PodAllocation
from exporter.sources import SourceError, podresources_pb2
from exporter.sources.kubelet import KubeletSource, parse_allocatable, parse_list
from exporter.sources.podresources_pb2 import AllocatableResourcesResponse, ContainerDevices, ListPodResourcesResponse

ROOT = Path(__file__).parents[2]
CAPTURES = Path(__file__).parents[1] / "captures"

GPU = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
LIST = ListPodResourcesResponse(
    pod_resources=[
        {
            "namespace": "team-a",
            "name": "train-0",
            "containers": [{"name": "main", "devices": [{"resource_name": "nvidia.com/gpu", "device_ids": [GPU]}]}],
        }
    ]
).SerializeToString()
ALLOCATABLE = AllocatableResourcesResponse(devices=[{"resource_name": "nvidia.com/gpu", "device_ids": [GPU]}]).SerializeToString()
READING = KubeletReading(
    pods=(PodAllocation("team-a", "train-0", (ContainerAllocation("main", (Devices("nvidia.com/gpu", (GPU,)),)),)),),
    allocatable=(Devices("nvidia.com/gpu", (GPU,)),),
)


class Kubelet(grpc.GenericRpcHandler):
    """Answers each method with bytes, or by calling what stands there with the call's context."""

    def __init__(self, path, *, listed=LIST, allocatable=ALLOCATABLE):
        self.answers = {"List": listed, "GetAllocatableResources": allocatable}
        self.calls = []
        self.server = grpc.server(ThreadPoolExecutor(4), handlers=(self,))
        self.server.add_insecure_port(f"unix:{path}")
        self.server.start()

    def service(self, call_details):
        service, _, method = call_details.method.rpartition("/")
        if service != "/v1.PodResourcesLister" or method not in self.answers:
            return None

        def answer(request, context):
            self.calls.append((method, request))
            found = self.answers[method]
            return found if isinstance(found, bytes) else found(context)

        return grpc.unary_unary_rpc_method_handler(answer)

    def stop(self):
        self.server.stop(None).wait()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kubelet.sock"


@pytest.fixture
def start(path):
    running = []

    def start_kubelet(at=path, **answers):
        running.append(Kubelet(at, **answers))
        return running[-1]

    yield start_kubelet
    for kubelet in running:
        kubelet.stop()


def abort(code, text):
    return lambda context: context.abort(code, text)


def test_a_reading_names_the_devices_of_containers_and_of_the_node(start, path):
    start()
    assert KubeletSource(socket=path).read() == READING


def test_a_read_makes_one_call_of_each_kind_without_arguments(start, path):
    kubelet = start()
    KubeletSource(socket=path).read()
    assert kubelet.calls == [("List", b""), ("GetAllocatableResources", b"")]


def test_a_path_may_hold_any_character(start, path):
    directory = path.parent / "a b%20?#ü"
    directory.mkdir()
    start()
    path.rename(directory / "kubelet.sock")
    assert KubeletSource(socket=directory / "kubelet.sock").read() == READING


def test_a_path_may_be_relative(start, path, monkeypatch):
    start()
    monkeypatch.chdir(path.parent)
    assert KubeletSource(socket=Path("kubelet.sock")).read() == READING


def test_the_first_read_after_the_socket_is_made_anew_succeeds(start, path):
    kubelet = start()
    source = KubeletSource(socket=path)
    source.read()
    kubelet.stop()
    path.unlink(missing_ok=True)
    for _ in range(3):
        with pytest.raises(SourceError, match=r"kubelet\.sock does not exist: .*mount the directory"):
            source.read()
    start(allocatable=b"")
    assert source.read() == KubeletReading(pods=READING.pods, allocatable=())


def test_a_socket_that_nobody_listens_on_says_so(path):
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with pytest.raises(SourceError, match="nothing listens there; the kubelet is not up"):
        KubeletSource(socket=path).read()


def test_a_directory_that_may_not_be_entered_says_which_user_is_needed(start, path):
    start()
    path.parent.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(SourceError, match="permission denied; run as uid 0"):
            KubeletSource(socket=path).read()
    finally:
        os.seteuid(user)
        path.parent.chmod(0o700)
    assert KubeletSource(socket=path).read() == READING


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit", r"List on .* refused by the kubelet's rate limit \(rejected by"),
        (grpc.StatusCode.PERMISSION_DENIED, "no", "was denied"),
        (grpc.StatusCode.UNIMPLEMENTED, "unknown service", r"does not offer v1\.PodResourcesLister/List"),
        (grpc.StatusCode.INTERNAL, "broken " * 1000, "List on .* failed: INTERNAL"),
        (grpc.StatusCode.UNAVAILABLE, "going away", r"the connection broke \(going away\)"),
    ],
)
def test_a_refusal_says_what_was_refused_and_what_to_do(start, path, code, text, expected):
    start(listed=abort(code, text))
    with pytest.raises(SourceError, match=expected) as caught:
        KubeletSource(socket=path).read()
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("code", "text"),
    [(grpc.StatusCode.UNIMPLEMENTED, "unknown method"), (grpc.StatusCode.UNKNOWN, "PodResources API GetAllocatableResources disabled")],
)
def test_a_kubelet_without_allocatable_is_read_without_it(start, path, code, text):
    start(allocatable=abort(code, text))
    assert KubeletSource(socket=path).read() == KubeletReading(pods=READING.pods, allocatable=None)


def test_a_refused_allocatable_is_not_taken_for_a_missing_one(start, path):
    start(allocatable=abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit"))
    with pytest.raises(SourceError, match=r"GetAllocatableResources on .* rate limit"):
        KubeletSource(socket=path).read()


def test_a_kubelet_that_hangs_costs_the_deadline_and_no_more(start, path):
    release = threading.Event()
    start(listed=lambda _: release.wait(10) and b"")
    started = time.monotonic()
    with pytest.raises(SourceError, match=r"no answer within 0\.3 s"):
        KubeletSource(socket=path, deadline_seconds=0.3).read()
    assert time.monotonic() - started < 1.5
    release.set()


def test_a_listener_that_never_accepts_costs_the_deadline_and_no_more(path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen(8)
        started = time.monotonic()
        with pytest.raises(SourceError, match=r"no answer within 0\.3 s"):
            KubeletSource(socket=path, deadline_seconds=0.3).read()
        assert time.monotonic() - started < 1.5


def test_a_listener_that_speaks_another_protocol_is_an_error(path):
    def babble(listener):
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        thread = threading.Thread(target=babble, args=(listener,), daemon=True)
        thread.start()
        with pytest.raises(SourceError):
            KubeletSource(socket=path, deadline_seconds=0.5).read()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(2)


@pytest.mark.parametrize(
    "answer",
    [b"\xff\xff\xff", b"\x0a\x04\x0a\x02\xff\xfe", LIST[:-3]],
    ids=["no protobuf", "a name that is no UTF-8", "cut off"],
)
def test_an_answer_that_cannot_be_decoded_is_an_error_and_no_empty_node(start, path, answer, caplog):
    start(listed=answer)
    with pytest.raises(SourceError, match=r"List on .* answered what is not a v1\.ListPodResourcesResponse"):
        KubeletSource(socket=path).read()
    start(at=path.with_name("other.sock"), allocatable=b"\xff")
    with pytest.raises(SourceError, match=r"answered what is not a v1\.AllocatableResourcesResponse"):
        KubeletSource(socket=path.with_name("other.sock")).read()
    assert caplog.records == []


def _large(mebibytes):
    ids = [f"GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22::{n:06}" for n in range(mebibytes * (1 << 20) // 52)]
    return ids, AllocatableResourcesResponse(devices=[ContainerDevices(resource_name="r", device_ids=ids)]).SerializeToString()


@pytest.mark.parametrize("mebibytes", [6, 15])
def test_answers_far_above_the_default_limit_are_read(start, path, mebibytes):
    ids, answer = _large(mebibytes)
    assert len(answer) > mebibytes * 1_000_000
    start(allocatable=answer)
    assert KubeletSource(socket=path, deadline_seconds=10).read().allocatable == (Devices("r", tuple(ids)),)


def test_an_answer_above_the_limit_is_told_from_the_rate_limit(start, path):
    start(listed=b"\x0a" * (17 << 20))
    with pytest.raises(SourceError, match="the answer is larger than 16 MiB"):
        KubeletSource(socket=path, deadline_seconds=10).read()


def test_reads_leave_no_descriptor_and_no_thread_behind(path, tmp_path):
    """In a process of its own: grpcio ends its threads where nothing else uses it."""
    script = """if True:
        import os, sys, time
        from pathlib import Path
        from exporter.sources.kubelet import KubeletSource

        def left():
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        before, source = left(), KubeletSource(socket=Path(sys.argv[1]))
        for _ in range(100):
            source.read()
        deadline = time.monotonic() + 10
        while left() != before and time.monotonic() < deadline:
            time.sleep(0.05)
        print(before, left(), sep="\\n")
    """
    kubelet = Kubelet(path)
    try:
        told = subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    finally:
        kubelet.stop()
    before, after = told.splitlines()
    assert before == after


def test_without_free_descriptors_it_says_so_and_comes_back(start, path):
    start()
    source = KubeletSource(socket=path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, hard))  # noqa: PTH208 - counts, opens nothing
    try:
        with pytest.raises(SourceError, match=r"Too many open files; raise the limit"):
            source.read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert source.read() == READING


def test_the_captured_list_names_who_holds_what():
    listed = parse_list(ListPodResourcesResponse.FromString((CAPTURES / "podresources-list.bin").read_bytes()))
    shared = "GPU-1f9d2a77-0c4b-4e8e-9b7a-7d3e5a6c8b90"
    mig = "nvidia.com/mig-3g.40gb"
    assert listed == (
        PodAllocation(
            "kai-resource-reservation",
            "gpu-reservation-76e2d625ef0b9e16",
            (ContainerAllocation("resource-reservation", (Devices("nvidia.com/gpu", (GPU,)),)),),
        ),
        PodAllocation("kube-system", "node-agent-node-a", (ContainerAllocation("agent"),)),
        PodAllocation("team-a", "half-gpu", (ContainerAllocation("main"),)),
        PodAllocation(
            "team-a",
            "sliced-two",
            (
                ContainerAllocation("infer", (Devices("nvidia.com/gpu.shared", (f"{shared}::1", f"{shared}::2")),)),
                ContainerAllocation("side"),
            ),
        ),
        PodAllocation("team-b", "crasher", (ContainerAllocation("main"),)),
        PodAllocation(
            "team-b",
            "memory-gpu",
            (ContainerAllocation("log-sidecar"), ContainerAllocation("proxy"), ContainerAllocation("server")),
        ),
        PodAllocation(
            "team-b",
            "mig-sidecar",
            (
                ContainerAllocation("helper", (Devices(mig, ("MIG-41d7c0a8-2e93-5c64-b7f5-e90a3b6d8c21",)),)),
                ContainerAllocation("main", (Devices(mig, ("MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10",)),)),
            ),
        ),
    )


def test_the_captured_allocatable_brings_the_ids_of_a_resource_together():
    answer = AllocatableResourcesResponse.FromString((CAPTURES / "podresources-allocatable.bin").read_bytes())
    assert parse_allocatable(answer) == (
        Devices("nvidia.com/gpu", (GPU, "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417")),
        Devices("nvidia.com/gpu.shared", tuple(f"GPU-1f9d2a77-0c4b-4e8e-9b7a-7d3e5a6c8b90::{n}" for n in range(4))),
        Devices("nvidia.com/mig-3g.40gb", ("MIG-41d7c0a8-2e93-5c64-b7f5-e90a3b6d8c21", "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10")),
    )


@pytest.mark.parametrize("name", ["podresources-list", "podresources-allocatable"])
def test_the_raw_captures_decode_to_what_was_decoded_when_they_were_taken(name):
    kind = ListPodResourcesResponse if name.endswith("list") else AllocatableResourcesResponse
    decoded = kind.FromString((CAPTURES / f"{name}.bin").read_bytes())
    # protobuf's JSON has 64-bit numbers as text and leaves zeros out, as the capture does; there are none here.
    assert decoded == json_format.Parse((CAPTURES / f"{name}.json").read_text(), kind())


@pytest.mark.parametrize("case", sorted(path.parent.name for path in CAPTURES.glob("dra/*/podresources-list.bin")))
def test_the_raw_captures_of_dynamic_resources_decode_likewise(case):
    folder = CAPTURES / "dra" / case
    decoded = ListPodResourcesResponse.FromString((folder / "podresources-list.bin").read_bytes())
    expected = json_format.Parse((folder / "podresources-list.dra-only.json").read_text(), ListPodResourcesResponse())
    assert [pod for pod in parse_list(decoded) if pod.namespace == "dra"] == list(parse_list(expected))
    assert list(parse_list(expected))


def test_every_device_of_a_claim_stands_at_the_container_and_cdi_names_do_not_matter():
    folder = CAPTURES / "dra" / "5c-per-request-cdi"
    decoded = ListPodResourcesResponse.FromString((folder / "podresources-list.bin").read_bytes())
    pod = next(pod for pod in parse_list(decoded) if pod.name == "per-request")
    claim = {"claim_namespace": "dra", "claim_name": "per-request-both-6pchw", "driver_name": "gpu.nvidia.com", "pool_name": "node-a"}
    both = (DynamicDevice(device_name="gpu-0", **claim), DynamicDevice(device_name="gpu-2-mig-3g40gb-9-0", **claim))
    assert [(container.container, container.dynamic_devices) for container in pod.containers] == [
        ("wants-all", both),
        ("wants-full", both),
        ("wants-slice", both),
    ]


def test_a_share_id_tells_two_shares_of_a_device_apart():
    def device(**more):
        return {"driver_name": "gpu.nvidia.com", "pool_name": "n", "device_name": "gpu-0", **more}

    claims = [{"claim_namespace": "a", "claim_name": "c", "claim_resources": [device(share_id="s"), device(), device(share_id="s")]}]
    answer = ListPodResourcesResponse(
        pod_resources=[{"namespace": "a", "name": "p", "containers": [{"name": "m", "dynamic_resources": claims}]}]
    )
    devices = parse_list(answer)[0].containers[0].dynamic_devices
    assert [found.share_id for found in devices] == [None, "s"]


def test_a_pod_listed_twice_is_one_pod_with_the_devices_of_both():
    def pod(device):
        return {
            "namespace": "a",
            "name": "db-0",
            "containers": [{"name": "m", "devices": [{"resource_name": "r", "device_ids": [device]}]}],
        }

    answer = ListPodResourcesResponse(pod_resources=[pod("2"), {"namespace": "a"}, {"name": "nowhere"}, pod("1")])
    assert parse_list(answer) == (PodAllocation("a", "db-0", (ContainerAllocation("m", (Devices("r", ("1", "2")),)),)),)


@given(st.permutations(["d", "c", "b", "a", "b"]), st.randoms())
def test_the_order_of_an_answer_does_not_matter(ids, random):
    containers = [
        {"name": name, "devices": [{"resource_name": resource, "device_ids": [one]} for one in ids for resource in ("r", "s")]}
        for name in ("x", "y")
    ]
    random.shuffle(containers)
    answer = ListPodResourcesResponse(pod_resources=[{"namespace": "n", "name": "p", "containers": containers}])
    devices = (Devices("r", ("a", "b", "c", "d")), Devices("s", ("a", "b", "c", "d")))
    assert parse_list(answer) == (PodAllocation("n", "p", (ContainerAllocation("x", devices), ContainerAllocation("y", devices))),)


@given(st.text(), st.text(), st.text(), st.text())
def test_no_text_in_an_answer_raises(namespace, name, container, device):
    answer = ListPodResourcesResponse(
        pod_resources=[
            {
                "namespace": namespace,
                "name": name,
                "containers": [{"name": container, "devices": [{"resource_name": device, "device_ids": [device]}]}],
            }
        ]
    )
    assert len(parse_list(ListPodResourcesResponse.FromString(answer.SerializeToString()))) == bool(namespace and name)


def test_the_generated_code_is_that_of_the_proto_file(tmp_path):
    output = tmp_path / "descriptors"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={ROOT}",
            f"--descriptor_set_out={output}",
            "exporter/sources/podresources.proto",
        ],
        check=True,
        cwd=ROOT,
    )
    written = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file[0]
    for message in written.message_type:
        for field in message.field:
            field.ClearField("json_name")  # told to a file of descriptors, not to generated code
    generated = descriptor_pb2.FileDescriptorProto()
    podresources_pb2.DESCRIPTOR.CopyToProto(generated)
    assert generated == written


def test_the_generated_code_asks_for_no_newer_protobuf_than_the_project_does():
    assert "# Protobuf Python Version: 5.27." in (ROOT / "exporter/sources/podresources_pb2.py").read_text()
