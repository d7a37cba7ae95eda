"""The fair share of a container that holds replicas of a GPU."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import NOT_MINE, Allocation, Answer, Claim, Node, Scope
from exporter.claims.time_slicing import SYSTEM, share_bytes
from exporter.snapshot import Container, ContainerAllocation, Devices, Gpu, NodeFacts, Pod, PodAllocation

MIB = 1 << 20
UUID = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
OTHER = "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"
MIG_UUID = "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"
POD = Pod(uid="u", namespace="team-a", name="infer-0", containers=(Container(name="main"),))


def resolve(*device_ids, replicas=(), labels=None, total=81559 * MIB):
    """Resolve a container that holds the ids; `replicas` is (uuid, number of replicas that the kubelet lists)."""
    gpus = (
        Gpu(gpu_uuid=UUID, minor=0, memory_total_bytes=total),
        Gpu(gpu_uuid=OTHER, minor=1, memory_total_bytes=15360 * MIB),
        Gpu(gpu_uuid=MIG_UUID, parent_gpu_uuid=OTHER, gpu_instance_id=9, compute_instance_id=0, memory_total_bytes=9728 * MIB),
    )
    allocation = PodAllocation("team-a", "infer-0", (ContainerAllocation("main", (Devices("nvidia.com/gpu.shared", device_ids),)),))
    node = Node(
        facts=NodeFacts(name="gpu-node-1", labels=labels or {}),
        gpus={gpu.gpu_uuid: gpu for gpu in gpus},
        allocations={("team-a", "infer-0"): allocation},
        allocatable=tuple(
            Devices("nvidia.com/gpu.shared", tuple(f"{uuid}::{number}" for number in range(count))) for uuid, count in replicas
        ),
    )
    return SYSTEM.resolver(node)(POD)


def share(uuid, memory_mib, compute_ratio, shares=1):
    return Claim(
        system="time_slicing",
        gpu_uuid=uuid,
        container="main",
        scope=Scope.CONTAINER,
        memory_bytes=None if memory_mib is None else memory_mib * MIB,
        compute_ratio=compute_ratio,
        enforced=False,
        shares=shares,
    )


def test_one_of_four_replicas_is_a_quarter_in_whole_mib():
    assert resolve(f"{UUID}::2", replicas=[(UUID, 4)]).claims == (share(UUID, 20389, 0.25),)


def test_without_the_nodes_labels_replicas_may_be_under_mps_and_have_no_amount():
    allocation = PodAllocation("team-a", "infer-0", (ContainerAllocation("main", (Devices("nvidia.com/gpu", (f"{UUID}::2",)),)),))
    node = Node(
        facts=None,
        gpus={UUID: Gpu(gpu_uuid=UUID, minor=0, memory_total_bytes=81559 * MIB)},
        allocations={("team-a", "infer-0"): allocation},
        allocatable=(Devices("nvidia.com/gpu", (f"{UUID}::0", f"{UUID}::1", f"{UUID}::2")),),
    )
    assert SYSTEM.resolver(node)(POD) == Answer(allocations=(Allocation("main", UUID),))


def test_two_replicas_are_twice_the_share_and_one_claim():
    assert resolve(f"{UUID}::2", f"{UUID}::0", replicas=[(UUID, 4)]).claims == (share(UUID, 40778, 0.5, shares=2),)


def test_replicas_of_two_gpus_are_a_claim_on_each_of_its_own_size():
    claims = resolve(f"{UUID}::2", f"{OTHER}::0", replicas=[(UUID, 4), (OTHER, 2)]).claims
    assert set(claims) == {share(UUID, 20389, 0.25), share(OTHER, 7680, 0.5)}


def test_the_kubelet_counts_and_not_the_label():
    assert resolve(f"{UUID}::2", replicas=[(UUID, 4)], labels={"nvidia.com/gpu.replicas": "8"}).claims == (share(UUID, 20389, 0.25),)


def test_the_label_counts_where_the_kubelet_lists_none():
    assert resolve(f"{UUID}::7", labels={"nvidia.com/gpu.replicas": "8"}).claims == (share(UUID, 10194, 0.125),)


@pytest.mark.parametrize(
    "labels", [{}, {"nvidia.com/gpu.replicas": "1"}, {"nvidia.com/gpu.replicas": "0"}, {"nvidia.com/gpu.replicas": "x"}]
)
def test_an_unknown_number_of_replicas_leaves_the_allocation_without_a_claim(labels):
    assert resolve(f"{UUID}::7", labels=labels) == Answer(allocations=(Allocation("main", UUID),))


def test_more_replicas_than_there_are_leave_the_allocation_without_a_claim():
    assert resolve(f"{UUID}::0", f"{UUID}::7", replicas=[(UUID, 1)]) == Answer(allocations=(Allocation("main", UUID),))


def test_an_unknown_total_leaves_the_compute_claim():
    assert resolve(f"{UUID}::0", replicas=[(UUID, 4)], total=None).claims == (share(UUID, None, 0.25),)


def test_a_share_of_a_mig_device_is_of_the_mig_devices_memory_even_on_a_node_of_mps():
    labels = {"nvidia.com/gpu.sharing-strategy": "mps"}
    assert resolve(f"{MIG_UUID}::1", replicas=[(MIG_UUID, 2)], labels=labels).claims == (share(MIG_UUID, 4864, 0.5),)


@pytest.mark.parametrize("strategy", ["time-slicing", "none", "", "MPS", "mps "])
def test_any_strategy_but_mps_is_time_slicing(strategy):
    labels = {"nvidia.com/gpu.sharing-strategy": strategy}
    assert resolve(f"{UUID}::0", replicas=[(UUID, 4)], labels=labels).claims == (share(UUID, 20389, 0.25),)


def test_replicas_under_mps_whole_gpus_and_shares_of_gke_are_not_mine():
    assert resolve(f"{UUID}::0", replicas=[(UUID, 4)], labels={"nvidia.com/gpu.sharing-strategy": "mps"}) == NOT_MINE
    assert resolve(UUID, MIG_UUID, "nvidia0/vgpu1", "mlx5_0", f"{UUID}-3") == NOT_MINE


@given(total=st.integers(min_value=0, max_value=1 << 50), replicas=st.integers(min_value=1, max_value=1000))
def test_a_share_is_the_exact_quotient_cut_to_whole_mib(total, replicas):
    exact = Fraction(total, replicas) / MIB
    assert share_bytes(total, replicas) == exact.__floor__() * MIB
    assert share_bytes(total, replicas) * replicas <= total
