"""GKE: shares of a GPU by ids that count device minors."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims import gke, mig, time_slicing, whole_gpu
from exporter.claims.claim import Allocation, Answer, Claim, Node, Scope
from exporter.snapshot import Container, ContainerAllocation, ContainerState, Devices, EnvVar, Gpu, NodeFacts, Pod, PodAllocation

MIB = 1 << 20
MINOR_0 = "GPU-f29b798b-be08-4d2b-a7c2-8d0dbcf43674"
MINOR_1 = "GPU-cb8caa0f-e3df-4bd4-bb3d-5a4208cbbac0"
MIG = "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"
GPUS = {
    MINOR_1: Gpu(gpu_uuid=MINOR_1, index=0, minor=1, memory_total_bytes=15360 * MIB),
    MINOR_0: Gpu(gpu_uuid=MINOR_0, index=1, minor=0, memory_total_bytes=23035 * MIB),
    MIG: Gpu(gpu_uuid=MIG, minor=1, parent_gpu_uuid=MINOR_1, gpu_instance_id=3, compute_instance_id=0, memory_total_bytes=4864 * MIB),
}
EVERY_SHARE = tuple(f"nvidia{minor}/vgpu{share}" for minor in (0, 1) for share in range(4))


def node(devices, *, strategy="time-sharing", clients=None, allocatable=EVERY_SHARE):
    """A node where pod p's containers hold these device ids."""
    labels = {"cloud.google.com/gke-gpu-sharing-strategy": strategy, "cloud.google.com/gke-max-shared-clients-per-gpu": clients}
    held = tuple(ContainerAllocation(name, (Devices("nvidia.com/gpu", tuple(ids)),)) for name, ids in devices.items())
    return Node(
        facts=NodeFacts(name="n", labels={key: value for key, value in labels.items() if value is not None}),
        gpus=GPUS,
        allocations={("team-a", "p"): PodAllocation("team-a", "p", held)},
        allocatable=(Devices("nvidia.com/gpu", allocatable),),
    )


def pod(*containers):
    return Pod(uid="uid", namespace="team-a", name="p", containers=containers or (Container(name="main", state=ContainerState.RUNNING),))


def resolve(of_node, of_pod=None, system=gke):
    return system.SYSTEM.resolver(of_node)(of_pod or pod())


def claims(of_node, of_pod=None):
    return [(claim.container, claim.gpu_uuid, claim.memory_bytes, claim.compute_ratio) for claim in resolve(of_node, of_pod).claims]


def test_without_the_nodes_labels_shares_may_be_under_mps_and_have_no_amount():
    unknown = replace(node({"main": ["nvidia1/vgpu0"]}), facts=None)
    assert resolve(unknown) == Answer(allocations=(Allocation("main", MINOR_1),))


def test_a_share_of_time_is_a_fair_share_of_the_gpu_of_that_minor():
    assert resolve(node({"main": ["nvidia1/vgpu0"]})).claims == (
        Claim(
            system="gke",
            gpu_uuid=MINOR_1,
            container="main",
            scope=Scope.CONTAINER,
            memory_bytes=4026531840,
            compute_ratio=0.25,
            enforced=False,
        ),
    )


def test_two_containers_and_two_gpus_have_their_own_numbers():
    of_node = node({"a": ["nvidia0/vgpu0", "nvidia1/vgpu0"], "b": ["nvidia0/vgpu2", "nvidia0/vgpu3"]})
    running = (Container(name=name, state=ContainerState.RUNNING) for name in ("a", "b"))
    assert claims(of_node, pod(*running)) == [
        ("a", MINOR_0, 5758 * MIB, 0.25),
        ("a", MINOR_1, 3840 * MIB, 0.25),
        ("b", MINOR_0, 2 * 5758 * MIB, 0.5),
    ]


def test_the_nodes_label_tells_the_shares_where_the_kubelet_lists_none():
    assert claims(node({"main": ["nvidia0/vgpu1"]}, clients="5", allocatable=())) == [("main", MINOR_0, 4607 * MIB, 0.2)]


def test_what_the_kubelet_lists_counts_before_the_nodes_label():
    assert claims(node({"main": ["nvidia1/vgpu1"]}, clients="8")) == [("main", MINOR_1, 3840 * MIB, 0.25)]


@pytest.mark.parametrize("clients", [None, "", "x", "0", "1", "-4"])
def test_where_nothing_tells_the_shares_there_is_an_allocation_and_no_claim(clients):
    answer = resolve(node({"main": ["nvidia0/vgpu1"]}, clients=clients, allocatable=()))
    assert (answer.claims, answer.allocations, answer.errors) == ((), (Allocation("main", MINOR_0),), ())


def test_a_share_of_a_mig_device_is_one_of_that_mig_device():
    of_node = node({"main": ["nvidia1/gi3/vgpu1"]}, allocatable=("nvidia1/gi3/vgpu0", "nvidia1/gi3/vgpu1"))
    assert claims(of_node) == [("main", MIG, 2432 * MIB, 0.5)]


def test_under_mps_each_process_is_capped_and_the_container_has_its_share():
    assert resolve(node({"main": ["nvidia1/vgpu0"]}, strategy="mps")).claims == (
        Claim(
            system="gke",
            gpu_uuid=MINOR_1,
            container="main",
            scope=Scope.PROCESS,
            memory_bytes=4026531840,
            compute_ratio=0.25,
            enforced=True,
        ),
        Claim(system="gke", gpu_uuid=MINOR_1, container="main", scope=Scope.CONTAINER, memory_bytes=4026531840, enforced=False),
    )


def test_under_mps_the_cap_of_a_process_is_the_sum_of_its_containers_shares():
    process, container = resolve(node({"main": ["nvidia0/vgpu0", "nvidia0/vgpu2", "nvidia0/vgpu3"]}, strategy="mps")).claims
    assert (process.memory_bytes, process.compute_ratio, process.shares) == (17276 * MIB, 0.75, 3)
    assert (container.memory_bytes, container.compute_ratio, container.shares) == (17276 * MIB, None, 3)


def test_plain_ids_are_whole_gpus_and_mig_devices_of_those_systems():
    whole, part = node({"main": ["nvidia0"]}), node({"main": ["nvidia1/gi3"]})
    assert [resolve(each).claims for each in (whole, part)] == [(), ()]
    assert [claim.gpu_uuid for claim in resolve(whole, system=whole_gpu).claims] == [MINOR_0]
    assert [claim.gpu_uuid for claim in resolve(part, system=mig).claims] == [MIG]


def test_shares_of_gke_are_not_those_of_nvidias_plugin_and_the_other_way_round():
    assert resolve(node({"main": ["nvidia0/vgpu1"]}), system=time_slicing).claims == ()
    assert resolve(node({"main": [f"{MINOR_0}::1"]})).claims == ()


def test_a_container_that_ended_holds_nothing():
    assert resolve(node({"main": ["nvidia0/vgpu1"]}), pod(Container(name="main", state=ContainerState.TERMINATED))).claims == ()


def test_an_unreadable_limit_of_the_user_is_an_error_and_the_plugins_holds():
    of_pod = pod(
        Container(name="main", state=ContainerState.RUNNING, env=(EnvVar(name="CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", value="lots"),))
    )
    answer = resolve(node({"main": ["nvidia1/vgpu0"]}, strategy="mps"), of_pod)
    assert [claim.compute_ratio for claim in answer.claims] == [0.25, None]
    assert len(answer.errors) == 1


@given(
    st.text() | st.from_regex(r"nvidia[0-9]{0,4}(/gi[0-9]{0,4})?(/vgpu[0-9]{0,4})?", fullmatch=True),
    st.text(),
    st.sampled_from(["mps", "x"]),
)
def test_any_id_and_any_label_give_an_answer_and_never_an_exception(device_id, clients, strategy):
    answer = resolve(node({"main": [device_id]}, strategy=strategy, clients=clients, allocatable=(device_id,)))
    assert {claim.gpu_uuid for claim in answer.claims} <= {allocation.gpu_uuid for allocation in answer.allocations} <= set(GPUS)
