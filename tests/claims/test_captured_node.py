"""A real node's answers (tests/captures) through every system: the claims of its pods."""

import json
from pathlib import Path

import pytest

from exporter.claims import SYSTEMS, Granter
from exporter.claims.claim import Node
from exporter.claims.kai import GpuGroup, gpu_groups
from exporter.snapshot import Gpu
from exporter.sources.kubelet import parse_allocatable, parse_list
from exporter.sources.kubernetes_objects import parse_node, parse_pod
from exporter.sources.podresources_pb2 import AllocatableResourcesResponse, ListPodResourcesResponse

CAPTURES = Path(__file__).parents[1] / "captures"
MIB = 1 << 20
KAI_GPU = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
SLICED_GPU = "GPU-1f9d2a77-0c4b-4e8e-9b7a-7d3e5a6c8b90"
MIG_PARENT = "GPU-77c0b1de-52a4-4b7b-8f0e-6c2d9b1e4a33"
MIG_HELPER, MIG_MAIN = "MIG-41d7c0a8-2e93-5c64-b7f5-e90a3b6d8c21", "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"


@pytest.fixture(scope="module")
def node():
    gpus = [Gpu(gpu_uuid=uuid, memory_total_bytes=81559 * MIB) for uuid in (KAI_GPU, SLICED_GPU, MIG_PARENT)] + [
        Gpu(
            gpu_uuid=uuid,
            parent_gpu_uuid=MIG_PARENT,
            mig_profile="3g.40gb",
            gpu_instance_id=number,
            compute_instance_id=0,
            memory_total_bytes=40192 * MIB,
        )
        for number, uuid in enumerate((MIG_HELPER, MIG_MAIN), start=1)
    ]
    listed = parse_list(ListPodResourcesResponse.FromString((CAPTURES / "podresources-list.bin").read_bytes()))
    return Node(
        facts=parse_node(json.loads((CAPTURES / "node.json").read_text())),
        gpus={gpu.gpu_uuid: gpu for gpu in gpus},
        pods=tuple(parse_pod(item) for item in json.loads((CAPTURES / "pods-list.json").read_text())["items"]),
        allocations={(pod.namespace, pod.name): pod for pod in listed},
        allocatable=parse_allocatable(AllocatableResourcesResponse.FromString((CAPTURES / "podresources-allocatable.bin").read_bytes())),
    )


@pytest.fixture(scope="module")
def grants(node):
    granter = Granter(node)
    return {pod.name: granter.grant(pod, {}, {})[0] for pod in node.pods}


def claims(grant):
    return {(each.system, each.container, each.gpu_uuid, each.memory_bytes, each.compute_ratio, each.shares) for each in grant.claims}


def test_the_fraction_pods_share_the_gpu_of_the_reservation_pod(grants):
    assert claims(grants["half-gpu"]) == {("kai", "main", KAI_GPU, 40750 * MIB, 0.5, 1)}
    assert claims(grants["memory-gpu"]) == {("kai", "server", KAI_GPU, 2000 * MIB, 0.03, 1)}


def test_the_reservation_pod_that_the_kubelet_lists_with_the_gpu_has_no_claim(node, grants):
    (reservation,) = (pod for pod in node.pods if pod.namespace == "kai-resource-reservation")
    assert (reservation.namespace, reservation.name) in node.allocations
    assert grants[reservation.name].plumbing
    assert grants[reservation.name].claims == ()


def test_the_reservation_pod_names_its_group_and_gpu(node):
    assert gpu_groups(node) == (
        GpuGroup("3f6f0b5e-8d0e-4d5b-9f0e-2a4d5c1b7a10", KAI_GPU, "kai-resource-reservation", "gpu-reservation-76e2d625ef0b9e16"),
    )


def test_two_of_four_replicas_are_two_shares_of_one_container(grants):
    assert claims(grants["sliced-two"]) == {("time_slicing", "infer", SLICED_GPU, 2 * 20389 * MIB, 0.5, 2)}


def test_the_sidecar_and_the_main_container_hold_a_mig_device_each_and_the_finished_init_container_none(grants):
    assert claims(grants["mig-sidecar"]) == {
        ("mig", "helper", MIG_HELPER, 40192 * MIB, 1.0, 1),
        ("mig", "main", MIG_MAIN, 40192 * MIB, 1.0, 1),
    }


def test_pods_that_asked_for_no_gpu_or_have_ended_have_no_claims(grants):
    for name in ("crasher", "done", "node-agent-node-a"):
        assert (grants[name].claims, grants[name].allocations, grants[name].plumbing) == ((), frozenset(), False)


def test_nothing_on_a_real_node_is_unreadable(grants):
    assert all(not grant.errors and not grant.not_placed for grant in grants.values())


def test_every_system_is_asked_under_a_name_of_its_own():
    assert len({system.name for system in SYSTEMS}) == len(SYSTEMS) == 13
