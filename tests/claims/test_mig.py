"""A MIG device by its own id, new or old."""

import pytest

from exporter.claims.claim import NOT_MINE, Answer, Claim, Node, Scope
from exporter.claims.mig import SYSTEM
from exporter.snapshot import Container, ContainerAllocation, Devices, Gpu, Pod, PodAllocation

MIB = 1 << 20
PARENT = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
UUID = "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"
TWIN = "MIG-41d7c0a8-2e93-5c64-b7f5-e90a3b6d8c21"
POD = Pod(uid="u", namespace="team-a", name="slice-0", containers=(Container(name="main"),))


def instance(uuid, compute_instance_id):
    return Gpu(
        gpu_uuid=uuid,
        parent_gpu_uuid=PARENT,
        mig_profile="1c.3g.40gb",
        gpu_instance_id=1,
        compute_instance_id=compute_instance_id,
        memory_total_bytes=9728 * MIB,
    )


def resolve(*device_ids):
    gpus = (Gpu(gpu_uuid=PARENT, minor=0, memory_total_bytes=81559 * MIB), instance(UUID, 0), instance(TWIN, 1))
    allocation = PodAllocation("team-a", "slice-0", (ContainerAllocation("main", (Devices("nvidia.com/gpu", device_ids),)),))
    node = Node(facts=None, gpus={gpu.gpu_uuid: gpu for gpu in gpus}, allocations={("team-a", "slice-0"): allocation})
    return SYSTEM.resolver(node)(POD)


def slice_claim(uuid):
    return Claim(
        system="mig", gpu_uuid=uuid, container="main", scope=Scope.CONTAINER, memory_bytes=9728 * MIB, compute_ratio=1.0, enforced=True
    )


@pytest.mark.parametrize("device_id", [UUID, f"MIG-{PARENT}/1/0", "nvidia0/gi1"])
def test_a_mig_device_is_its_own_memory_and_all_of_its_own_compute(device_id):
    assert resolve(device_id) == Answer(claims=(slice_claim(UUID),))


def test_two_devices_of_one_gpu_instance_differ_in_the_compute_instance():
    assert resolve(f"MIG-{PARENT}/1/1") == Answer(claims=(slice_claim(TWIN),))


def test_a_device_named_in_both_forms_is_one_claim():
    assert resolve(UUID, f"MIG-{PARENT}/1/0") == Answer(claims=(slice_claim(UUID),))


def test_replicas_of_a_mig_device_and_whole_gpus_are_not_mine():
    assert resolve(f"{UUID}::0", f"MIG-{PARENT}/1/0::1", PARENT) == NOT_MINE


def test_an_instance_that_the_driver_does_not_list_is_passed_over():
    assert resolve(f"MIG-{PARENT}/2/0", "MIG-00000000-0000-0000-0000-000000000000") == NOT_MINE
