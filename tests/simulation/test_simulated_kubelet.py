import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest

from exporter.clock import SystemClock
from exporter.sources import podresources_pb2 as messages

PODS = """
    node: {name: n}
    pod_resources:
      - namespace: team-a
        name: train-0
        containers:
          - name: main
            devices:
              - {resource_name: nvidia.com/gpu, device_ids: [GPU-a, GPU-b], topology: {nodes: [{ID: 1}]}}
              - {resource_name: example.com/nic, device_ids: [nic0]}
            cpu_ids: [0, 2]
          - name: side
      - namespace: team-b
        name: dra
        containers:
          - name: main
            dynamic_resources:
              - claim_name: gpu
                claim_namespace: team-b
                claim_resources: [{driver_name: gpu.nvidia.com, pool_name: n, device_name: gpu-0, share_id: s, cdi_devices: [{name: x=y}]}]
    allocatable:
      - {resource_name: nvidia.com/gpu, device_ids: [GPU-a, GPU-b]}
"""


def call(node, method, request=b"", timeout=5.0):
    with grpc.insecure_channel(f"unix://{node.kubelet_socket}", options=(("grpc.max_receive_message_length", 1 << 25),)) as channel:
        return channel.unary_unary(f"/v1.PodResourcesLister/{method}")(request, timeout=timeout)


def listed(node):
    return messages.ListPodResourcesResponse.FromString(call(node, "List")).pod_resources


def status_of(node, method="List", **options):
    with pytest.raises(grpc.RpcError) as caught:
        call(node, method, **options)
    return caught.value.code()


def test_list_has_an_entry_for_each_device_id(start):
    train, dra = sorted(listed(start(PODS)), key=lambda pod: pod.namespace)
    assert (train.namespace, train.name) == ("team-a", "train-0")
    assert [(entry.resource_name, list(entry.device_ids)) for entry in train.containers[0].devices] == [
        ("nvidia.com/gpu", ["GPU-a"]),
        ("nvidia.com/gpu", ["GPU-b"]),
        ("example.com/nic", ["nic0"]),
    ]
    assert train.containers[0].devices[0].topology.nodes[0].ID == 1
    assert list(train.containers[0].cpu_ids) == [0, 2]
    assert (train.containers[1].name, len(train.containers[1].devices)) == ("side", 0)
    (claim,) = dra.containers[0].dynamic_resources
    assert (claim.claim_namespace, claim.claim_name) == ("team-b", "gpu")
    (device,) = claim.claim_resources
    assert (device.driver_name, device.pool_name, device.device_name, device.share_id) == ("gpu.nvidia.com", "n", "gpu-0", "s")
    assert device.cdi_devices[0].name == "x=y"


def test_a_share_id_that_is_not_said_is_absent(start):
    node = start("""
        node: {name: n}
        pod_resources:
          - {name: p, containers: [{name: c, dynamic_resources: [{claim_resources: [{device_name: d}]}]}]}
    """)
    (pod,) = listed(node)
    assert not pod.containers[0].dynamic_resources[0].claim_resources[0].HasField("share_id")


def test_the_pods_come_in_another_order_at_each_call(start):
    node = start(PODS)
    orders = {tuple(pod.name for pod in listed(node)) for _ in range(2)}
    assert orders == {("train-0", "dra"), ("dra", "train-0")}


def test_allocatable_resources_are_answered(start):
    answer = messages.AllocatableResourcesResponse.FromString(call(start(PODS), "GetAllocatableResources"))
    assert [(entry.resource_name, list(entry.device_ids)) for entry in answer.devices] == [
        ("nvidia.com/gpu", ["GPU-a"]),
        ("nvidia.com/gpu", ["GPU-b"]),
    ]


def test_one_pod_is_answered_by_name(start):
    node = start(PODS)
    request = messages.PodResources(name="dra", namespace="team-b").SerializeToString()
    (pod,) = messages.ListPodResourcesResponse.FromString(call(node, "Get", request)).pod_resources
    assert pod.name == "dra"
    assert status_of(node, "Get", request=messages.PodResources(name="none").SerializeToString()) is grpc.StatusCode.UNKNOWN


def test_the_answer_follows_the_timeline(start):
    node = start(PODS + "    timeline: [{at: 5s, remove: {pod_resources: [team-b/dra]}, allocatable: []}]")
    assert len(listed(node)) == 2
    node.advance_to(5)
    assert [pod.name for pod in listed(node)] == ["train-0"]
    assert call(node, "GetAllocatableResources") == b""


def test_an_answer_of_megabytes_is_put_together_and_not_encoded_anew(start):
    ids = ", ".join(f"device-{number:050}" for number in range(500))
    holders = "".join(f"      - {{name: p{number}, containers: *all}}\n" for number in range(1, 200))
    devices = f"[{{resource_name: r, device_ids: [{ids}]}}]"
    node = start(
        "    node: {name: n}\n    pod_resources:\n"
        f"      - {{name: p0, containers: &all [{{name: c, devices: {devices}}}]}}\n"
        + holders
        + "    timeline: [{at: 5s, pod_resources: [{name: new}]}]\n"
    )
    before = node._kubelet._fragments
    assert len(call(node, "List")) > 6 << 20
    node.advance_to(5)
    assert all(first is second for first, second in zip(before, node._kubelet._fragments, strict=False))
    assert len(node._kubelet._fragments) == 201


def test_a_kubelet_that_is_down_has_no_socket(start):
    node = start("""
        node: {name: n}
        sources: {kubelet: down}
        timeline: [{at: 5s, sources: {kubelet: up}}, {at: 9s, sources: {kubelet: down}}]
    """)
    assert not node.kubelet_socket.exists()
    assert status_of(node) is grpc.StatusCode.UNAVAILABLE
    node.advance_to(5)
    assert list(listed(node)) == []
    node.advance_to(9)
    assert not node.kubelet_socket.exists()


def test_a_restart_makes_the_socket_anew(start):
    node = start("{node: {name: n}, timeline: [{at: 5s, sources: {kubelet: restart}}]}")
    with grpc.insecure_channel(f"unix://{node.kubelet_socket}") as channel, socket.socket(socket.AF_UNIX) as old:
        channel.unary_unary("/v1.PodResourcesLister/List")(b"", timeout=5)
        old.connect(str(node.kubelet_socket))
        old.settimeout(5)
        before = node.kubelet_socket.stat()
        node.advance_to(5)
        after = node.kubelet_socket.stat()
        assert (before.st_ino, before.st_ctime_ns) != (after.st_ino, after.st_ctime_ns)
        with suppress(ConnectionResetError):
            while old.recv(4096):
                pass
    assert list(listed(node)) == []


def test_a_refusing_kubelet_says_that_its_resources_are_exhausted(start):
    node = start("{node: {name: n}, sources: {kubelet: refuse}, timeline: [{at: 5s, sources: {kubelet: up}}]}")
    assert status_of(node) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status_of(node, "GetAllocatableResources") is grpc.StatusCode.RESOURCE_EXHAUSTED
    node.advance_to(5)
    assert list(listed(node)) == []


def test_a_denying_kubelet_lets_nobody_connect_but_root_and_root_do_nothing(start):
    node = start("{node: {name: n}, sources: {kubelet: denied}, timeline: [{at: 5s, sources: {kubelet: up}}]}")
    assert node.kubelet_socket.stat().st_mode & 0o777 == 0
    assert status_of(node) is (grpc.StatusCode.UNAVAILABLE if os.getuid() else grpc.StatusCode.PERMISSION_DENIED)
    node.advance_to(5)
    assert list(listed(node)) == []


def test_a_kubelet_that_hangs_is_over_its_deadline_at_once_on_a_simulated_clock(start):
    node = start("{node: {name: n}, sources: {kubelet: hang}}")
    assert status_of(node, timeout=3600.0) is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_kubelet_that_hangs_answers_nothing_in_real_time_until_it_does_not(start):
    node = start("{node: {name: n}, sources: {kubelet: hang}, timeline: [{at: 5s, sources: {kubelet: up}}]}", SystemClock())
    assert status_of(node, timeout=0.1) is grpc.StatusCode.DEADLINE_EXCEEDED
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, node, "List", timeout=30.0)
        threading.Timer(0.1, lambda: node.advance_to(5)).start()
        assert waiting.result(30) == b""
