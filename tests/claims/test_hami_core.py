"""What HAMi-core enforces in a container under KAI."""

from dataclasses import replace
from decimal import ROUND_HALF_EVEN, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import NOT_MINE, Answer, Claim, Node, Scope
from exporter.claims.hami_core import SYSTEM, with_region_limits
from exporter.limits import build_container_limits
from exporter.snapshot import Container, ContainerState, EnvVar, NodeFacts, Pod

MIB = 1 << 20
GROUP, OTHER_GROUP = "3f6f0b5e-8d0e-4d5b-9f0e-2a4d5c1b7a10", "b1c7a9d2-4e63-4c7f-8a55-90d3e1f2a6c4"
A, B = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22", "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"
FROM_KAI = EnvVar(name="CUDA_DEVICE_MEMORY_LIMIT", config_map_key="CUDA_DEVICE_MEMORY_LIMIT")
MOUNTS = ("/usr/local/vgpu", "/etc/ld.so.preload")
SERVER = Container(name="server", state=ContainerState.RUNNING, env=(FROM_KAI,), volume_mounts=MOUNTS)


def resolve(annotations, *, container=SERVER, label="81559", groups=(GROUP,), reservations=((GROUP, A),), containers=None):
    pod = Pod(
        uid="u",
        namespace="team-b",
        name="infer-0",
        labels={f"runai-gpu-group/{group}": group for group in groups},
        annotations=annotations,
        containers=containers or (container,),
    )
    reserved = tuple(
        Pod(
            uid=f"r{number}",
            namespace="kai-resource-reservation",
            name=f"r{number}",
            labels={"runai-gpu-group": group},
            annotations={"run.ai/reserve_for_gpu_index": uuid},
        )
        for number, (group, uuid) in enumerate(reservations)
    )
    facts = NodeFacts(name="gpu-node-1", labels={} if label is None else {"nvidia.com/gpu.memory": label})
    return SYSTEM.resolver(Node(facts=facts, pods=(pod, *reserved)))(pod)


def claim(memory_mib, *, uuid=A, enforced=True):
    return Claim(
        system="hami_core",
        gpu_uuid=uuid,
        container="server",
        scope=Scope.CONTAINER,
        memory_bytes=memory_mib * MIB,
        enforced=enforced,
        supersedes=frozenset({"kai"}) if enforced else frozenset(),
    )


@pytest.mark.parametrize(
    ("annotations", "label", "memory_mib"),
    [
        ({"gpu-memory": "4096"}, "15360", 4147),
        ({"gpu-memory": "2000"}, "11264", 2027),
        ({"gpu-memory": "2000"}, "81559", 2446),
        ({"gpu-memory": "20480"}, "40960", 20889),
        ({"gpu-fraction": "0.5"}, "81559", 40779),
        ({"gpu-fraction": "0.25"}, "143771", 35942),
        ({"gpu-fraction": "0.125"}, "40960", 4915),
        ({"gpu-fraction": "0.375"}, "40960", 15564),
        ({"gpu-fraction": "0.006"}, "81559", 815),
        ({"gpu-fraction": "0.5"}, "85520809984", 40779),
    ],
)
def test_it_enforces_the_raw_label_times_the_portion_in_two_decimals_and_takes_kais_place(annotations, label, memory_mib):
    assert resolve(annotations, label=label) == Answer(claims=(claim(memory_mib),))


@given(thousandths=st.integers(min_value=1, max_value=999), label=st.integers(min_value=100, max_value=400_000))
def test_the_portion_is_rounded_as_a_float_is_printed(thousandths, label):
    memory_bytes = sum(claim.memory_bytes for claim in resolve({"gpu-fraction": f"0.{thousandths:03}"}, label=str(label)).claims)
    # The float nearest to a decimal, exactly: a tie of decimals is none of floats unless it can be written in binary.
    portion = Decimal(thousandths / 1000).quantize(Decimal("0.01"), ROUND_HALF_EVEN)
    assert memory_bytes // MIB - int(label * portion) in (-1, 0)


@pytest.mark.parametrize("fraction", ["0.004", "0.0049"])
def test_a_portion_that_is_rounded_to_0_is_no_limit_to_the_library(fraction):
    assert resolve({"gpu-fraction": fraction}) == NOT_MINE


@pytest.mark.parametrize("label", [None, "", "x", "0"])
def test_without_the_label_kai_writes_nothing_and_there_is_no_claim(label):
    assert resolve({"gpu-fraction": "0.5"}, label=label) == NOT_MINE
    assert resolve({"gpu-memory": "2000"}, label=label) == NOT_MINE


@pytest.mark.parametrize(
    "env",
    [
        (),
        (EnvVar(name="CUDA_DEVICE_MEMORY_LIMIT", value="6g"),),
        (EnvVar(name="CUDA_DEVICE_MEMORY_LIMIT", field_path="metadata.annotations['limit']"),),
        (EnvVar(name="GPU_PORTION", config_map_key="GPU_PORTION"),),
        (FROM_KAI, EnvVar(name="CUDA_DEVICE_MEMORY_LIMIT", value="6g")),
    ],
    ids=["none", "literal", "fieldRef", "portion only", "overridden"],
)
def test_only_a_value_from_a_config_map_is_kais(env):
    assert resolve({"gpu-fraction": "0.5"}, container=replace(SERVER, env=env)) == NOT_MINE


@pytest.mark.parametrize("mounts", [(), ("/usr/local/vgpu",), ("/etc/ld.so.preload",), ("/usr/local/vgpu/x", "/etc/ld.so.preload")])
def test_without_the_mounts_the_variable_limits_nothing(mounts):
    assert resolve({"gpu-fraction": "0.5"}, container=replace(SERVER, volume_mounts=mounts)).claims == (claim(40779, enforced=False),)


@pytest.mark.parametrize(
    ("value", "enforced"), [("true", False), ("1", False), ("True", False), ("false", True), ("", True), ("yes", True)]
)
def test_a_switched_off_library_enforces_nothing(value, enforced):
    env = (FROM_KAI, EnvVar(name="CUDA_DISABLE_CONTROL", value=value))
    assert resolve({"gpu-fraction": "0.5"}, container=replace(SERVER, env=env)).claims == (claim(40779, enforced=enforced),)


def test_the_fraction_container_alone_is_limited():
    log = replace(SERVER, name="log")
    plain = Container(name="server", state=ContainerState.RUNNING)
    named = {"gpu-fraction": "0.5", "gpu-fraction-container-name": "server"}
    assert resolve(named, containers=(log, SERVER)).claims == (claim(40779),)
    assert resolve(named, containers=(log, plain)) == NOT_MINE


def test_each_device_of_the_pod_has_the_same_limit():
    answer = resolve({"gpu-fraction": "0.25"}, groups=(GROUP, OTHER_GROUP), reservations=((GROUP, A), (OTHER_GROUP, B)))
    assert set(answer.claims) == {claim(20389), claim(20389, uuid=B)}


def test_the_library_knows_one_device_where_two_groups_stand_for_one_gpu():
    answer = resolve({"gpu-fraction": "0.25"}, groups=(GROUP, OTHER_GROUP), reservations=((GROUP, A), (OTHER_GROUP, A)))
    assert answer.claims == (claim(20389),)


@pytest.mark.parametrize(
    "annotations",
    [
        {},
        {"gpu-fraction": "x"},
        {"gpu-fraction": "0.5", "gpu-memory": "2000"},
        {"gpu-fraction": "0.5", "gpu-fraction-container-name": "gone"},
        {"gpu-fraction": "0.5", "nvidia.com/container.server.gpu-memory.limit": "8Gi"},
    ],
)
def test_what_is_not_kais_or_cannot_be_read_is_not_said_twice(annotations):
    assert resolve(annotations) == NOT_MINE


@pytest.mark.parametrize("reservations", [(), ((GROUP, A), (GROUP, B))], ids=["not placed", "ambiguous"])
def test_a_pod_without_a_certain_gpu_has_no_limit_here(reservations):
    assert resolve({"gpu-fraction": "0.5"}, reservations=reservations) == NOT_MINE


def test_an_ended_container_holds_nothing():
    assert resolve({"gpu-fraction": "0.5"}, container=replace(SERVER, state=ContainerState.TERMINATED)) == NOT_MINE


# --- what the library's own regions add ---


def tightened(claims, limit_mib, *, container=SERVER, gpus=(A,), uuid=A):
    pod = Pod(uid="u", namespace="team-b", name="infer-0", containers=(container,))
    return with_region_limits(pod, claims, {("server", uuid): limit_mib * MIB}, {"server": frozenset(gpus)})


def by_contract(memory_mib, system="hami"):
    return replace(claim(memory_mib), system=system, supersedes=frozenset())


def by_region(memory_mib):
    return replace(claim(memory_mib), supersedes=frozenset())


@pytest.mark.parametrize(("limit_mib", "left_mib"), [(4146, 4146), (4147, 4147), (4148, 4147), (65536, 4147)])
def test_a_region_may_tighten_the_same_systems_claim_and_never_loosen_it(limit_mib, left_mib):
    kai = replace(by_contract(4096, "kai"), enforced=False)
    assert tightened((kai, claim(4147)), limit_mib) == (kai, claim(left_mib))


def test_a_claim_of_0_is_not_raised_by_a_region():
    assert tightened((claim(0),), 65536) == (claim(0),)


def test_a_region_does_not_make_an_unenforced_claim_a_wall():
    assert tightened((claim(4147, enforced=False),), 4147) == (claim(4147, enforced=False),)


def test_a_region_that_repeats_a_contract_or_says_more_is_no_claim():
    assert tightened((by_contract(8192),), 8192) == (by_contract(8192),)
    assert tightened((by_contract(8192, "volcano"),), 65536) == (by_contract(8192, "volcano"),)


def test_a_region_that_says_less_than_the_contract_or_all_there_is_is_a_claim():
    assert tightened((by_contract(8192),), 4096) == (by_contract(8192), by_region(4096))
    assert tightened((), 4096) == (by_region(4096),)
    unlimited = replace(by_contract(0), memory_bytes=None)
    assert tightened((unlimited,), 4096) == (unlimited, by_region(4096))


def test_a_region_of_a_container_that_has_switched_the_library_off_is_a_promise():
    off = replace(SERVER, env=(EnvVar(name="CUDA_DISABLE_CONTROL", value="true"),))
    assert tightened((), 4096, container=off) == (replace(by_region(4096), enforced=False),)


def test_a_region_says_nothing_of_a_gpu_that_the_container_has_not_or_of_an_ended_container():
    assert tightened((), 4096, uuid=B) == ()
    assert tightened((), 4096, container=replace(SERVER, name="other")) == ()
    assert tightened((), 4096, container=replace(SERVER, state=ContainerState.TERMINATED)) == ()


@given(st.lists(st.sampled_from([0, 1024, 4096, 8192]), max_size=3), st.integers(min_value=1, max_value=100_000))
def test_no_region_ever_raises_a_limit(contracts, limit_mib):
    systems = ("hami", "container_env", "hami_core")
    claims = tuple(by_contract(mib, system) for mib, system in zip(contracts, systems, strict=False))
    before, after = build_container_limits(claims).memory_bytes, build_container_limits(tightened(claims, limit_mib)).memory_bytes
    assert after is not None
    assert before is None or after <= before
