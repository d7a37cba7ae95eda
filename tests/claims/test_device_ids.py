"""Device ids of the kubelet: which of them name a GPU of this node, and into how many shares it is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import Node
from exporter.claims.device_ids import Device, DeviceIds
from exporter.snapshot import Container, ContainerAllocation, ContainerState, Devices, Gpu, NodeFacts, Pod, PodAllocation

UUID = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
OTHER = "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"
MIG_UUID = "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"
MIG_OLD_NAME = f"MIG-{UUID}/1/0"

GPU = Gpu(gpu_uuid=UUID, index=1, minor=0)
OTHER_GPU = Gpu(gpu_uuid=OTHER, index=0, minor=1)
MIG = Gpu(gpu_uuid=MIG_UUID, index=0, minor=0, parent_gpu_uuid=UUID, mig_profile="3g.40gb", gpu_instance_id=1, compute_instance_id=0)
GPUS = {gpu.gpu_uuid: gpu for gpu in (GPU, OTHER_GPU, MIG)}


def node(*, allocatable=(), labels=None, devices=None, gpus=None):
    """A node where the pod team-a/p holds `devices`: container -> device ids."""
    allocation = PodAllocation(
        "team-a", "p", tuple(ContainerAllocation(name, (Devices("nvidia.com/gpu", tuple(ids)),)) for name, ids in (devices or {}).items())
    )
    return Node(
        facts=NodeFacts(name="gpu-node-1", labels=labels or {}),
        gpus=GPUS if gpus is None else gpus,
        allocations={("team-a", "p"): allocation} if devices else {},
        allocatable=tuple(Devices(resource, tuple(ids)) for resource, ids in allocatable),
    )


def pod(*containers):
    return Pod(uid="u", namespace="team-a", name="p", containers=containers)


POD = pod(Container(name="main"))


def held(*, devices, owner=POD, **more):
    return [
        (each.container.name, each.gpu.gpu_uuid, each.shares, each.is_gke) for each in DeviceIds(node(devices=devices, **more)).held(owner)
    ]


@pytest.mark.parametrize(
    ("device_id", "device"),
    [
        (UUID, Device(GPU, is_share=False)),
        (f"{UUID}::3", Device(GPU, is_share=True)),
        (f"{UUID}::3::4", Device(GPU, is_share=True)),
        (MIG_UUID, Device(MIG, is_share=False)),
        (f"{MIG_UUID}::0", Device(MIG, is_share=True)),
        (MIG_OLD_NAME, Device(MIG, is_share=False)),
        (f"{MIG_OLD_NAME}::1", Device(MIG, is_share=True)),
        ("nvidia0", Device(GPU, is_share=False, is_gke=True)),
        ("nvidia1/vgpu2", Device(OTHER_GPU, is_share=True, is_gke=True)),
        ("nvidia0/gi1", Device(MIG, is_share=False, is_gke=True)),
        ("nvidia0/gi1/vgpu0", Device(MIG, is_share=True, is_gke=True)),
    ],
)
def test_an_id_is_known_by_its_shape(device_id, device):
    assert DeviceIds(node()).parse(device_id) == device


@pytest.mark.parametrize(
    "device_id",
    [
        "",
        "::",
        "::1",
        "mlx5_0",
        "0000:3b:00.0",
        "nvidia9",
        "nvidia0/gi7",
        "nvidia0/vgpu",
        "nvidia0::1",
        "nvidiactl",
        f"{UUID}-3",
        f"{UUID}-_-7",
        f"{UUID}_0",
        f"{UUID} ",
        UUID.upper(),
        UUID[:-1],
        UUID.removeprefix("GPU-"),
        f"MIG-{UUID}/1/1",
        f"MIG-{OTHER}/1/0",
        f"MIG-{UUID}/1/0/0",
        f"MIG-{UUID}/\uff11/0",
        f"{UUID}\x00",
        "GPU-ffffffff-3b0d-4a59-9e57-0d6a5c7f1b22",
    ],
)
def test_an_id_of_another_plugin_or_of_no_gpu_here_is_passed_over(device_id):
    assert DeviceIds(node()).parse(device_id) is None


@given(st.text())
def test_any_text_is_a_device_or_none(device_id):
    assert DeviceIds(node()).parse(device_id) is None or "::" in device_id or "nvidia" in device_id


def test_a_mig_device_of_an_old_driver_is_found_by_its_own_name():
    old = Gpu(gpu_uuid=MIG_OLD_NAME, parent_gpu_uuid=UUID, gpu_instance_id=1, compute_instance_id=0)
    assert DeviceIds(node(gpus={UUID: GPU, MIG_OLD_NAME: old})).parse(f"{MIG_OLD_NAME}::1") == Device(old, is_share=True)


def test_several_replicas_of_one_gpu_are_one_holding_of_as_many_shares():
    assert held(devices={"main": [f"{UUID}::2", f"{UUID}::0", f"{UUID}::2"]}) == [("main", UUID, 2, False)]


def test_replicas_of_different_gpus_are_a_holding_each():
    assert sorted(held(devices={"main": [f"{OTHER}::0", f"{UUID}::1", f"{OTHER}::3"]})) == [
        ("main", UUID, 1, False),
        ("main", OTHER, 2, False),
    ]


def test_one_id_per_entry_and_ids_together_are_read_alike():
    entries = tuple(Devices("nvidia.com/gpu", (f"{UUID}::{number}",)) for number in range(3))
    split = Node(
        facts=None, gpus=GPUS, allocations={("team-a", "p"): PodAllocation("team-a", "p", (ContainerAllocation("main", entries),))}
    )
    assert [each.shares for each in DeviceIds(split).held(POD)] == [3]


def test_a_container_that_has_ended_holds_nothing_and_a_restarting_one_does():
    ended = Container(name="once", state=ContainerState.TERMINATED)
    restarting = Container(name="main", state=ContainerState.TERMINATED, will_restart=True)
    assert held(devices={"once": [UUID], "main": [OTHER]}, owner=pod(ended, restarting)) == [("main", OTHER, 0, False)]


def test_devices_of_a_container_that_the_pod_does_not_have_are_of_another_pod_of_that_name():
    assert held(devices={"gone": [UUID]}) == []


def test_a_pod_that_the_kubelet_does_not_list_holds_nothing():
    assert list(DeviceIds(node()).held(POD)) == []


def test_replicas_are_the_distinct_ids_that_the_kubelet_lists_over_all_messages():
    allocatable = [("nvidia.com/gpu", [f"{UUID}::0", f"{UUID}::1", f"{OTHER}::0"]), ("nvidia.com/gpu", [f"{UUID}::1", f"{UUID}::2"])]
    ids = DeviceIds(node(allocatable=allocatable, labels={"nvidia.com/gpu.replicas": "8"}))
    assert (ids.replicas_of(GPU), ids.replicas_of(OTHER_GPU)) == (3, 1)


def test_where_the_kubelet_lists_no_replica_of_the_gpu_the_label_tells():
    ids = DeviceIds(node(allocatable=[("nvidia.com/gpu", [UUID, f"{OTHER}::0"])], labels={"nvidia.com/gpu.replicas": "8"}))
    assert ids.replicas_of(GPU) == 8


@pytest.mark.parametrize("label", [None, "", "0", "1", "-4", "four", "4.0", "\uff14", "4 ", "4" * 63])
def test_a_label_that_does_not_fit_a_shared_gpu_tells_nothing(label):
    assert DeviceIds(node(labels={} if label is None else {"nvidia.com/gpu.replicas": label})).replicas_of(GPU) is None


def test_nothing_is_known_of_replicas_while_the_node_was_never_read():
    assert DeviceIds(Node(facts=None, gpus=GPUS)).replicas_of(GPU) is None


def test_replicas_of_a_mig_device_are_its_own():
    ids = DeviceIds(node(allocatable=[("nvidia.com/gpu", [f"{MIG_UUID}::0", f"{MIG_UUID}::1", f"{UUID}::0"])]))
    assert (ids.replicas_of(MIG), ids.replicas_of(GPU)) == (2, 1)


@pytest.mark.parametrize(
    ("labels", "replicas"),
    [
        ({"nvidia.com/mig-3g.40gb.replicas": "2", "nvidia.com/gpu.replicas": "4", "nvidia.com/mig.strategy": "mixed"}, 2),
        ({"nvidia.com/gpu.replicas": "4", "nvidia.com/mig.strategy": "mixed"}, None),
        ({"nvidia.com/gpu.replicas": "4", "nvidia.com/mig.strategy": "single"}, 4),
    ],
)
def test_the_label_of_a_mig_device_is_its_profiles_and_under_strategy_single_the_plain_one(labels, replicas):
    assert DeviceIds(node(labels=labels)).replicas_of(MIG) == replicas
