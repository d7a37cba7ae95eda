"""Limits that stand in a container's own environment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import NOT_MINE, Answer, Claim, Scope
from exporter.claims.container_env import resolve
from exporter.snapshot import Container, ContainerState, EnvVar, Pod

GIB = 1 << 30
A, B = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22", "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"


def literal(name, value):
    return EnvVar(name=name, value=value)


def pod(*env, labels=None, annotations=None, state=ContainerState.RUNNING):
    main = Container(name="main", env=env, state=state)
    return Pod(uid="u", namespace="team-a", name="p", containers=(main,), labels=labels or {}, annotations=annotations or {})


def on(uuid, memory_bytes=None, compute_ratio=None, container="main"):
    return Claim(
        system="container_env",
        gpu_uuid=uuid,
        container=container,
        scope=Scope.CONTAINER,
        memory_bytes=memory_bytes,
        compute_ratio=compute_ratio,
        enforced=False,
    )


def limits(*env, gpus=(A,), **more):
    """The claims of one container on the GPUs as {uuid: (memory_bytes, compute_ratio)}."""
    answer = resolve(pod(*env, **more), {"main": frozenset(gpus)})
    assert answer.errors == ()
    return {claim.gpu_uuid: (claim.memory_bytes, claim.compute_ratio) for claim in answer.claims}


@pytest.mark.parametrize(
    ("name", "value", "memory_bytes"),
    [
        ("GPU_MEMORY_LIMIT", "8589934592", 8 * GIB),
        ("CUDA_DEVICE_MEMORY_LIMIT", "8589934592", 8 * GIB),
        ("CUDA_DEVICE_MEMORY_LIMIT", "6g", 6 * GIB),
        ("CUDA_DEVICE_MEMORY_LIMIT", "3000m", 3000 << 20),
        ("CUDA_DEVICE_MEMORY_LIMIT", "2097152k", 2 * GIB),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "6G", 6 * GIB),
    ],
)
def test_a_memory_limit_is_a_claim_of_the_container_that_nothing_enforces(name, value, memory_bytes):
    assert resolve(pod(literal(name, value)), {"main": frozenset({A})}) == Answer(claims=(on(A, memory_bytes),))


@pytest.mark.parametrize(("value", "compute_ratio"), [("10", 0.1), ("1", 0.01), ("100", 1.0)])
@pytest.mark.parametrize("name", ["CUDA_DEVICE_SM_LIMIT", "CUDA_DEVICE_SM_LIMIT_0"])
def test_a_compute_limit_is_a_percentage(name, value, compute_ratio):
    assert resolve(pod(literal(name, value)), {"main": frozenset({A})}) == Answer(claims=(on(A, None, compute_ratio),))


def test_it_holds_on_each_gpu_that_the_container_has():
    env = (literal("GPU_MEMORY_LIMIT", "1024"), literal("CUDA_DEVICE_SM_LIMIT", "10"))
    assert resolve(pod(*env), {"main": frozenset({B, A})}) == Answer(claims=(on(A, 1024, 0.1), on(B, 1024, 0.1)))


def test_it_gives_no_gpu_to_a_container_that_has_none():
    assert resolve(pod(literal("GPU_MEMORY_LIMIT", "1024")), {}) == NOT_MINE
    assert resolve(pod(literal("GPU_MEMORY_LIMIT", "1024")), {"main": frozenset(), "other": frozenset({A})}) == NOT_MINE


def test_the_limits_of_one_container_are_not_its_neighbours():
    two = Pod(
        uid="u",
        namespace="team-a",
        name="p",
        containers=(Container(name="main", env=(literal("GPU_MEMORY_LIMIT", "1024"),)), Container(name="side")),
    )
    assert resolve(two, {"main": frozenset({A}), "side": frozenset({A})}) == Answer(claims=(on(A, 1024),))


def test_of_the_two_contracts_the_tighter_one_holds():
    assert limits(literal("GPU_MEMORY_LIMIT", "2048"), literal("CUDA_DEVICE_MEMORY_LIMIT", "1k")) == {A: (1024, None)}
    assert limits(literal("GPU_MEMORY_LIMIT", "512"), literal("CUDA_DEVICE_MEMORY_LIMIT", "1k")) == {A: (512, None)}


@pytest.mark.parametrize("value", ["0", "0m", "", None])
def test_zero_and_empty_are_no_limit(value):
    assert limits(literal("CUDA_DEVICE_MEMORY_LIMIT", value), literal("CUDA_DEVICE_SM_LIMIT", "0"), literal("GPU_MEMORY_LIMIT", "0")) == {}


def test_a_field_reference_is_read_from_the_pods_annotations_and_labels():
    env = (
        EnvVar(name="GPU_MEMORY_LIMIT", field_path="metadata.annotations['example.com/gpu-memory']"),
        EnvVar(name="CUDA_DEVICE_SM_LIMIT", field_path="metadata.labels['sm']"),
    )
    assert limits(*env, annotations={"example.com/gpu-memory": "1024"}, labels={"sm": "20"}) == {A: (1024, 0.2)}


@pytest.mark.parametrize("field_path", ["metadata.annotations['gone']", "metadata.name", "metadata.annotations", "status.podIP", ""])
def test_a_reference_to_what_is_not_there_or_no_text_of_the_author_is_no_limit(field_path):
    assert limits(EnvVar(name="GPU_MEMORY_LIMIT", field_path=field_path)) == {}


def test_a_value_from_a_config_map_is_kais_and_not_mine():
    assert limits(EnvVar(name="CUDA_DEVICE_MEMORY_LIMIT", config_map_key="CUDA_DEVICE_MEMORY_LIMIT")) == {}


def test_of_several_variables_of_one_name_the_last_is_what_processes_see():
    assert limits(literal("GPU_MEMORY_LIMIT", "1024"), literal("GPU_MEMORY_LIMIT", "4096")) == {A: (4096, None)}
    assert limits(literal("CUDA_DEVICE_MEMORY_LIMIT", "1k"), EnvVar(name="CUDA_DEVICE_MEMORY_LIMIT", config_map_key="x")) == {}


def test_the_form_with_an_index_beats_the_plain_one():
    assert limits(literal("CUDA_DEVICE_MEMORY_LIMIT", "1g"), literal("CUDA_DEVICE_MEMORY_LIMIT_0", "2g")) == {A: (2 * GIB, None)}
    assert limits(literal("CUDA_DEVICE_MEMORY_LIMIT", "1g"), literal("CUDA_DEVICE_MEMORY_LIMIT_0", "0")) == {A: (GIB, None)}


def test_an_index_beyond_the_containers_gpus_says_nothing():
    assert limits(literal("CUDA_DEVICE_MEMORY_LIMIT_1", "1g")) == {}


def test_with_two_gpus_equal_indexed_limits_hold_on_both():
    env = (literal("CUDA_DEVICE_MEMORY_LIMIT_0", "1g"), literal("CUDA_DEVICE_MEMORY_LIMIT_1", "1024m"))
    assert limits(*env, gpus=(A, B)) == {A: (GIB, None), B: (GIB, None)}


@pytest.mark.parametrize(
    "env",
    [
        {"CUDA_DEVICE_MEMORY_LIMIT_0": "1g", "CUDA_DEVICE_MEMORY_LIMIT_1": "2g"},
        {"CUDA_DEVICE_MEMORY_LIMIT_0": "1g"},
        {"CUDA_DEVICE_MEMORY_LIMIT": "1g", "CUDA_DEVICE_MEMORY_LIMIT_1": "2g"},
        {"CUDA_DEVICE_SM_LIMIT_0": "10", "CUDA_DEVICE_SM_LIMIT_1": "20"},
    ],
)
def test_with_two_gpus_different_indexed_limits_are_not_guessed_onto_them(env):
    assert limits(*(literal(name, value) for name, value in env.items()), gpus=(A, B)) == {}


def test_a_gpu_that_comes_later_takes_no_limit_by_number_from_those_that_were_counted_first():
    indexed = pod(literal("CUDA_DEVICE_MEMORY_LIMIT_0", "1g"), literal("CUDA_DEVICE_SM_LIMIT_0", "10"))
    both, first = {"main": frozenset({A, B})}, {"main": frozenset({A})}
    assert resolve(indexed, both, first) == Answer(claims=(on(A, GIB, 0.1),))
    assert resolve(indexed, both, both) == NOT_MINE
    assert resolve(indexed, {"main": frozenset({B})}, first) == Answer(claims=(on(B, GIB, 0.1),))


def test_a_gpu_that_comes_later_has_the_plain_limit_and_one_that_all_numbers_share():
    plain = pod(literal("GPU_MEMORY_LIMIT", "1024"))
    equal = pod(literal("CUDA_DEVICE_MEMORY_LIMIT_0", "1k"), literal("CUDA_DEVICE_MEMORY_LIMIT_1", "1024"))
    for each in (plain, equal):
        assert resolve(each, {"main": frozenset({A, B})}, {"main": frozenset({A})}) == Answer(claims=(on(A, 1024), on(B, 1024)))


def test_what_cannot_be_read_is_one_error_though_gpus_came_later():
    answer = resolve(pod(literal("GPU_MEMORY_LIMIT", "x")), {"main": frozenset({A, B})}, {"main": frozenset({A})})
    assert len(answer.errors) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GPU_MEMORY_LIMIT", "8g"),
        ("GPU_MEMORY_LIMIT", "-1"),
        ("GPU_MEMORY_LIMIT", "9223372036854775808"),
        ("GPU_MEMORY_LIMIT", "\uff11\uff10"),
        ("GPU_MEMORY_LIMIT", "$(LIMIT)"),
        ("CUDA_DEVICE_MEMORY_LIMIT", "8Gi"),
        ("CUDA_DEVICE_MEMORY_LIMIT", "lots\x00" * 2_000),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "x"),
        ("CUDA_DEVICE_SM_LIMIT", "101"),
        ("CUDA_DEVICE_SM_LIMIT", "10%"),
        ("CUDA_DEVICE_SM_LIMIT_0", "0.5"),
    ],
)
def test_a_value_that_cannot_be_read_is_one_error_and_no_claim(name, value):
    answer = resolve(pod(literal(name, value)), {"main": frozenset({A})})
    assert answer.claims == ()
    assert len(answer.errors) == 1
    assert answer.errors[0].startswith(f"container main: {name}: ")
    assert len(answer.errors[0]) < 300


def test_an_unreadable_variable_costs_itself_only():
    answer = resolve(pod(literal("GPU_MEMORY_LIMIT", "x"), literal("CUDA_DEVICE_SM_LIMIT", "10")), {"main": frozenset({A})})
    assert answer.claims == (on(A, None, 0.1),)
    assert len(answer.errors) == 1


def test_an_ended_container_has_no_limits_and_no_errors():
    assert resolve(pod(literal("GPU_MEMORY_LIMIT", "x"), state=ContainerState.TERMINATED), {"main": frozenset({A})}) == NOT_MINE


@given(
    values=st.dictionaries(
        st.sampled_from(["GPU_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_DEVICE_SM_LIMIT_1"]),
        st.one_of(st.text(), st.from_regex(r"\A[0-9]{1,20}[kmg]?\Z")),
    ),
    gpus=st.sets(st.sampled_from([A, B])),
)
def test_any_environment_gives_positive_limits_or_none(values, gpus):
    answer = resolve(pod(*(literal(name, value) for name, value in values.items())), {"main": frozenset(gpus)})
    assert all(claim.memory_bytes is None or 0 < claim.memory_bytes < 1 << 63 for claim in answer.claims)
    assert all(claim.compute_ratio is None or 0 < claim.compute_ratio <= 1 for claim in answer.claims)
    assert {claim.gpu_uuid for claim in answer.claims} <= gpus
