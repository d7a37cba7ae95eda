"""A plain device id is the whole GPU."""

from exporter.claims.claim import NOT_MINE, Answer, Claim, Node, Scope
from exporter.claims.whole_gpu import SYSTEM
from exporter.snapshot import Container, ContainerAllocation, ContainerState, Devices, Gpu, NodeFacts, Pod, PodAllocation

MIB = 1 << 20
UUID = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
OTHER = "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"
MIG_UUID = "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"
POD = Pod(uid="u", namespace="team-a", name="train-0", containers=(Container(name="main"), Container(name="log")))


def resolve(*device_ids, resource="nvidia.com/gpu", total=81559 * MIB, pod=POD):
    gpus = (
        Gpu(gpu_uuid=UUID, memory_total_bytes=total),
        Gpu(gpu_uuid=OTHER, memory_total_bytes=15360 * MIB),
        Gpu(gpu_uuid=MIG_UUID, parent_gpu_uuid=OTHER, gpu_instance_id=1, compute_instance_id=0, memory_total_bytes=9728 * MIB),
    )
    allocation = PodAllocation(
        "team-a", "train-0", (ContainerAllocation("main", (Devices(resource, device_ids),)), ContainerAllocation("log"))
    )
    node = Node(
        facts=NodeFacts(name="gpu-node-1", labels={"nvidia.com/gpu.memory": "1"}),
        gpus={gpu.gpu_uuid: gpu for gpu in gpus},
        allocations={("team-a", "train-0"): allocation},
    )
    return SYSTEM.resolver(node)(pod)


def whole(uuid, memory_bytes):
    return Claim(
        system="whole_gpu",
        gpu_uuid=uuid,
        container="main",
        scope=Scope.CONTAINER,
        memory_bytes=memory_bytes,
        compute_ratio=1.0,
        enforced=True,
    )


def test_a_whole_gpu_is_its_drivers_total_and_all_of_its_compute():
    assert resolve(UUID) == Answer(claims=(whole(UUID, 81559 * MIB),))


def test_each_whole_gpu_of_a_container_is_a_claim_of_its_own_size():
    assert set(resolve(OTHER, UUID).claims) == {whole(UUID, 81559 * MIB), whole(OTHER, 15360 * MIB)}


def test_the_resources_name_says_nothing():
    assert resolve(UUID, resource="nvidia.com/a100") == Answer(claims=(whole(UUID, 81559 * MIB),))


def test_an_unknown_total_leaves_the_compute_claim():
    assert resolve(UUID, total=None) == Answer(claims=(whole(UUID, None),))


def test_shares_mig_devices_network_adapters_and_look_alikes_are_no_whole_gpu():
    ids = (f"{UUID}::1", MIG_UUID, "mlx5_0", f"{UUID}-1", f"{UUID}-_-1", "GPU-00000000-0000-0000-0000-000000000000")
    assert resolve(*ids) == NOT_MINE


def test_a_plain_id_of_gke_is_the_whole_gpu_of_that_minor():
    node = Node(
        facts=None,
        gpus={UUID: Gpu(gpu_uuid=UUID, minor=3, memory_total_bytes=81559 * MIB)},
        allocations={
            ("team-a", "train-0"): PodAllocation(
                "team-a", "train-0", (ContainerAllocation("main", (Devices("nvidia.com/gpu", ("nvidia3",)),)),)
            )
        },
    )
    assert SYSTEM.resolver(node)(POD) == Answer(claims=(whole(UUID, 81559 * MIB),))


def test_an_ended_container_holds_nothing():
    ended = Pod(uid="u", namespace="team-a", name="train-0", containers=(Container(name="main", state=ContainerState.TERMINATED),))
    assert resolve(UUID, pod=ended) == NOT_MINE
