"""The daemon with the kubelet's pods: without an API server, and beside one that fails."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from api_gate import ApiGate
from google.protobuf import json_format
from live import GIB, HALF, MIB, SCENARIO, device, write_kubeconfig
from nvml_stand_in.stand_in import Process

from exporter.sources.kubelet_pods_pb2 import ListPodsResponse, Pod


def marshal(pod):
    return json_format.ParseDict(pod, Pod(), ignore_unknown_fields=True).SerializeToString()


@pytest.fixture
def pods_api(tmp_path):
    """A kubelet that tells the pods of the scenario; answers its socket."""
    socket = tmp_path / "pods-api.sock"
    answer = ListPodsResponse(pods=[marshal(pod) for pod in SCENARIO["pods"]]).SerializeToString()
    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1alpha1.Pods", {"ListPods": handler}),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    yield socket
    server.stop(None).wait()


def test_without_an_api_server_pods_are_known_and_what_needs_the_nodes_labels_is_not(start, stand_in, workloads, pods_api, tmp_path):
    half = workloads("half")
    stand_in.write(device(Process(pid=half.pid, memory=30 * GIB)))
    nowhere = write_kubeconfig(tmp_path / "nowhere", "http://127.0.0.1:9")
    daemon = start("--pod-source", "kubelet", "--kubelet-pods-socket", str(pods_api), "--kubeconfig", str(nowhere))
    daemon.wait_for(30 * GIB, "fgpu_pod_memory_used_bytes", namespace="team-a", pod="half")
    assert daemon.value("fgpu_source_up", source="kubernetes") == 1.0
    assert daemon.value("fgpu_pod_memory_limit_bytes", pod="half") is None
    assert daemon.value("fgpu_pod_compute_limit_ratio", pod="half") == 0.5
    assert daemon.value("fgpu_pod_memory_limit_bytes", pod="small") == 2000 * MIB
    assert daemon.get("/readyz")[0] == 200


@pytest.fixture
def gate(node):
    with contextlib.closing(ApiGate(node.kubernetes_url)) as gate:
        yield gate


def test_in_an_outage_of_the_api_server_pods_stay_current_by_the_kubelets_word(start, gate, stand_in, workloads, pods_api, tmp_path):
    half = workloads("half")
    stand_in.write(device(Process(pid=half.pid, memory=30 * GIB)))
    kubeconfig = write_kubeconfig(tmp_path / "gated", gate.url)
    flags = ("--pod-source", "auto", "--kubelet-pods-socket", str(pods_api), "--kubeconfig", str(kubeconfig), "--identity-ttl-seconds", "0")
    daemon = start(*flags)
    daemon.wait_for(1.0, "fgpu_source_up", source="kubernetes")
    gate.forbidden = ("/api/v1/pods", "/api/v1/nodes")
    gate.end_watches()
    daemon.wait_for(0.0, "fgpu_source_up", source="kubernetes")
    assert daemon.value("fgpu_pod_memory_used_bytes", pod="half") == 30 * GIB
    # The Node object is as it was last read: its label counts as 81500 MiB.
    assert daemon.value("fgpu_pod_memory_limit_bytes", pod="half") == HALF
