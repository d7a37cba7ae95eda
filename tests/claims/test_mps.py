"""A share under MPS: a cap for each client process, and the container's share that nothing enforces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import NOT_MINE, Allocation, Answer, Claim, Node, Scope
from exporter.claims.mps import SYSTEM
from exporter.snapshot import Container, ContainerAllocation, Devices, EnvVar, Gpu, NodeFacts, Pod, PodAllocation

MIB = 1 << 20
UUID = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
OTHER = "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"
MIG_UUID = "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"
MPS = {"nvidia.com/gpu.sharing-strategy": "mps"}


def variables(**env):
    return tuple(EnvVar(name=name, value=value) for name, value in env.items())


def resolve(*device_ids, replicas=4, labels=MPS, total=81559 * MIB, env=()):
    gpus = (
        Gpu(gpu_uuid=UUID, memory_total_bytes=total),
        Gpu(gpu_uuid=OTHER, memory_total_bytes=40960 * MIB),
        Gpu(gpu_uuid=MIG_UUID, parent_gpu_uuid=OTHER, gpu_instance_id=9, compute_instance_id=0, memory_total_bytes=9728 * MIB),
    )
    allocation = PodAllocation("team-a", "client-0", (ContainerAllocation("main", (Devices("nvidia.com/gpu", device_ids),)),))
    node = Node(
        facts=NodeFacts(name="gpu-node-1", labels=labels),
        gpus={gpu.gpu_uuid: gpu for gpu in gpus},
        allocations={("team-a", "client-0"): allocation},
        allocatable=tuple(
            Devices("nvidia.com/gpu", tuple(f"{uuid}::{number}" for number in range(replicas))) for uuid in (UUID, OTHER, MIG_UUID)
        ),
    )
    return SYSTEM.resolver(node)(Pod(uid="u", namespace="team-a", name="client-0", containers=(Container(name="main", env=env),)))


def cap(memory_mib, threads_ratio, *, uuid=UUID, shares=1):
    return Claim(
        system="mps",
        gpu_uuid=uuid,
        container="main",
        scope=Scope.PROCESS,
        memory_bytes=None if memory_mib is None else memory_mib * MIB,
        compute_ratio=threads_ratio,
        enforced=True,
        shares=shares,
    )


def share(memory_mib, *, uuid=UUID, shares=1):
    return Claim(
        system="mps",
        gpu_uuid=uuid,
        container="main",
        scope=Scope.CONTAINER,
        memory_bytes=None if memory_mib is None else memory_mib * MIB,
        enforced=False,
        shares=shares,
    )


def test_one_of_four_replicas_caps_each_process_and_promises_as_much_to_the_container():
    assert resolve(f"{UUID}::1") == Answer(claims=(cap(20389, 0.25), share(20389)), allocations=(Allocation("main", UUID),))


def test_seven_replicas_of_40960_mib_are_5851_mib_and_14_percent():
    assert resolve(f"{OTHER}::1", replicas=7).claims == (cap(5851, 0.14, uuid=OTHER), share(5851, uuid=OTHER))


def test_two_replicas_double_the_containers_share_and_not_the_cap_of_a_process():
    assert resolve(f"{UUID}::0", f"{UUID}::1").claims == (cap(20389, 0.25, shares=2), share(40778, shares=2))


def test_an_unknown_total_leaves_the_cap_of_threads():
    assert resolve(f"{UUID}::0", total=None).claims == (cap(None, 0.25), share(None))


def test_an_unknown_number_of_replicas_leaves_the_allocation_without_a_claim():
    assert resolve(f"{UUID}::0", replicas=0) == Answer(allocations=(Allocation("main", UUID),))
    assert resolve(f"{UUID}::0", f"{UUID}::1", replicas=1) == Answer(allocations=(Allocation("main", UUID),))


@pytest.mark.parametrize("labels", [{}, {"nvidia.com/gpu.sharing-strategy": "time-slicing"}, {"nvidia.com/mps.capable": "true"}])
def test_without_the_strategy_nothing_is_mine(labels):
    assert resolve(f"{UUID}::0", labels=labels) == NOT_MINE


def test_whole_gpus_and_shares_of_mig_devices_are_not_mine():
    assert resolve(UUID, MIG_UUID, f"{MIG_UUID}::0") == NOT_MINE


@pytest.mark.parametrize(
    ("text", "memory_mib"),
    [
        ("0=2G", 2048),
        ("0=2g", 2048),
        ("0=2GB", 2048),
        ("0=512M,1=1G", 512),
        (f"{UUID}=3G", 3072),
        (f"0=4G,{UUID}=3G", 3072),
        (" 0=512MB , 1=1GB ", 512),
        ("1=2G", 20389),
        (f"{OTHER}=1G", 20389),
        ("0=70G", 20389),
        ("0=9999999999G", 20389),
        ("", 20389),
    ],
)
def test_a_users_memory_limit_can_only_tighten_the_cap_of_a_process(text, memory_mib):
    answer = resolve(f"{UUID}::0", env=variables(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=text))
    assert (answer.claims, answer.errors) == ((cap(memory_mib, 0.25), share(20389)), ())


def test_a_users_limit_is_the_cap_where_the_drivers_total_is_unknown():
    assert resolve(f"{UUID}::0", total=None, env=variables(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=2G")).claims[0] == cap(2048, 0.25)


def test_with_two_gpus_a_number_names_none_of_them_and_a_uuid_does():
    env = variables(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=f"0=1G,{OTHER}=2G")
    caps = {claim.gpu_uuid: claim.memory_bytes for claim in resolve(f"{UUID}::0", f"{OTHER}::0", env=env).claims if claim.enforced}
    assert caps == {UUID: 20389 * MIB, OTHER: 2048 * MIB}


@pytest.mark.parametrize(("text", "threads_ratio"), [("10", 0.1), ("12.5", 0.125), ("25", 0.25), ("100", 0.25), ("", 0.25)])
def test_a_users_thread_percentage_can_only_tighten_the_cap_of_a_process(text, threads_ratio):
    answer = resolve(f"{UUID}::0", env=variables(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=text))
    assert (answer.claims, answer.errors) == ((cap(20389, threads_ratio), share(20389)), ())


@pytest.mark.parametrize(
    "env",
    [
        {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "2G"},
        {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2"},
        {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=0G"},
        {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=-1G"},
        {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=\uff11G"},
        {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G,"},
        {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G" + ",0=1G\x00" * 2_000},
        {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "0"},
        {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "101"},
        {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "nan"},
    ],
)
def test_a_users_limit_that_cannot_be_read_is_an_error_and_the_daemons_caps_hold(env):
    answer = resolve(f"{UUID}::0", env=variables(**env))
    assert answer.claims == (cap(20389, 0.25), share(20389))
    assert len(answer.errors) == 1
    assert len(answer.errors[0]) < 300
    assert answer.errors[0].startswith(f"container main: {next(iter(env))}: ")


@given(text=st.text())
def test_any_text_of_a_users_limit_never_loosens_and_never_goes_below_zero(text):
    env = variables(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=text, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=text)
    process = resolve(f"{UUID}::0", env=env).claims[0]
    assert 0 < process.memory_bytes <= 20389 * MIB
    assert 0 < process.compute_ratio <= 0.25


@pytest.mark.parametrize("container", ["mps-control-daemon-ctr", "mps-control-daemon"])
@pytest.mark.parametrize("labels", [MPS, {}])
def test_the_control_daemon_is_plumbing_in_a_system_namespace_only(container, labels):
    node = Node(facts=NodeFacts(name="gpu-node-1", labels=labels), system_namespaces=frozenset({"gpu-operator"}))
    daemon = Pod(
        uid="u",
        namespace="gpu-operator",
        name="nvidia-device-plugin-mps-control-daemon-8xk2p",
        labels={"app": "nvidia-device-plugin-mps-control-daemon"},
        containers=(Container(name=container),),
    )
    pretender = Pod(uid="v", namespace="team-a", name=daemon.name, labels=daemon.labels, containers=daemon.containers)
    resolve = SYSTEM.resolver(node)
    assert resolve(daemon) == Answer(plumbing=True)
    assert resolve(pretender) == NOT_MINE
