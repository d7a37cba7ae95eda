"""Koordinator: JSON in an annotation, for the pod as a whole and for each GPU."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import Claim, Node, Scope
from exporter.claims.koordinator import SYSTEM
from exporter.snapshot import Container, ContainerState, Gpu, Pod

GIB = 1 << 30
GPU_0 = "GPU-4165a243-5aa6-47bf-9ed1-91f07b6fd12d"
GPU_1 = "GPU-a73b44ec-019d-47bd-b104-d728236ac5a1"
NODE = Node(facts=None, gpus={GPU_0: Gpu(gpu_uuid=GPU_0, index=1, minor=0), GPU_1: Gpu(gpu_uuid=GPU_1, index=0, minor=1)})

ALLOCATED = "scheduling.koordinator.sh/device-allocated"
ISOLATED = {"koordinator.sh/gpu-isolation-provider": "HAMi-core"}


def gpu(uuid=GPU_0, minor=0, **resources):
    entry = {"minor": minor, "resources": {f"koordinator.sh/gpu-{name.replace('_', '-')}": value for name, value in resources.items()}}
    return entry if uuid is None else entry | {"id": uuid}


def pod(allocated, *containers, labels=None):
    return Pod(
        uid="uid",
        namespace="team-a",
        name="p",
        labels=labels or {},
        containers=containers or (Container(name="main", state=ContainerState.RUNNING),),
        annotations={ALLOCATED: allocated if isinstance(allocated, str) else json.dumps(allocated)},
    )


def resolve(of_pod):
    return SYSTEM.resolver(NODE)(of_pod)


def error(allocated):
    answer = resolve(pod(allocated))
    assert answer.claims == ()
    (text,) = answer.errors
    assert text.startswith(f"{ALLOCATED}: ")
    return text


def test_the_claim_is_the_pods_and_not_a_containers():
    two = (Container(name="left", state=ContainerState.RUNNING), Container(name="right", state=ContainerState.RUNNING))
    assert resolve(pod({"gpu": [gpu(core="50", memory="8Gi", memory_ratio="10")]}, *two)).claims == (
        Claim(system="koordinator", gpu_uuid=GPU_0, container="", scope=Scope.POD, memory_bytes=8 * GIB, compute_ratio=0.5, enforced=False),
    )


def test_of_two_gpus_each_has_the_amounts_that_stand_with_it():
    answer = resolve(pod({"gpu": [gpu(core="100", memory="32Gi"), gpu(GPU_1, 1, core="50", memory="16Gi")]}))
    assert [(claim.gpu_uuid, claim.memory_bytes, claim.compute_ratio) for claim in answer.claims] == [
        (GPU_0, 32 * GIB, 1.0),
        (GPU_1, 16 * GIB, 0.5),
    ]


@pytest.mark.parametrize("uuid", [None, ""])
def test_without_an_id_the_minor_number_tells_the_gpu_and_not_the_index(uuid):
    assert [claim.gpu_uuid for claim in resolve(pod({"gpu": [gpu(uuid, minor=1, memory="1Gi")]})).claims] == [GPU_1]


def test_an_id_that_the_driver_does_not_list_is_shown():
    assert [claim.gpu_uuid for claim in resolve(pod({"gpu": [gpu("GPU-a", memory="1Gi")]})).claims] == ["GPU-a"]


@pytest.mark.parametrize(
    ("labels", "ratio", "enforced"),
    [(ISOLATED, "50", True), (ISOLATED, "100", False), (ISOLATED, None, False), ({}, "50", False)],
)
def test_it_is_a_wall_only_with_the_isolation_label_and_less_than_a_whole_gpu(labels, ratio, enforced):
    resources = {"memory": "8Gi"} | ({"memory_ratio": ratio} if ratio else {})
    assert resolve(pod({"gpu": [gpu(**resources)]}, labels=labels)).claims[0].enforced is enforced


@pytest.mark.parametrize(
    ("resources", "memory_bytes", "compute_ratio"),
    [({"core": "30"}, None, 0.3), ({"memory": "4G"}, 4_000_000_000, None), ({"memory": 1024, "core": 5}, 1024, 0.05), ({}, None, None)],
)
def test_a_resource_that_is_missing_gives_no_claim_in_that_dimension(resources, memory_bytes, compute_ratio):
    (claim,) = resolve(pod({"gpu": [gpu(**resources)]})).claims
    assert (claim.memory_bytes, claim.compute_ratio) == (memory_bytes, compute_ratio)


def test_nothing_given_is_no_claim_of_nothing():
    (claim,) = resolve(pod({"gpu": [gpu(memory="0", core="0")]})).claims
    assert (claim.memory_bytes, claim.compute_ratio) == (None, None)


@pytest.mark.parametrize("allocated", [{"rdma": [{"minor": 0, "id": "0000:3b:00.1"}]}, {}, {"gpu": None}, {"gpu": []}, "", " "])
def test_other_devices_and_none_are_not_mine(allocated):
    answer = resolve(pod(allocated))
    assert (answer.claims, answer.errors) == ((), ())


def test_a_pod_whose_containers_have_all_ended_holds_nothing():
    ended = Container(name="main", state=ContainerState.TERMINATED)
    assert resolve(pod({"gpu": [gpu(memory="8Gi")]}, ended)).claims == ()
    assert resolve(pod({"gpu": [gpu(memory="8Gi")]}, ended, Container(name="side", state=ContainerState.RUNNING))).claims != ()


@pytest.mark.parametrize(
    "text", ["{", "[]", "3", "null", '{"gpu": {}}', '{"gpu": ""}', '{"gpu": [1]}', '{"gpu": [{"resources": 1}]}', "[" * 100_000]
)
def test_what_is_no_list_of_gpus_is_an_error(text):
    assert error(text)


@pytest.mark.parametrize(
    "resources", [{"memory": "8GiB"}, {"memory": "-1"}, {"memory": True}, {"memory": [1]}, {"core": "x"}, {"memory_ratio": "x"}]
)
def test_a_quantity_that_is_none_makes_the_annotation_unreadable(resources):
    assert error({"gpu": [gpu(GPU_1, 1, memory="1Gi"), gpu(**resources)]})


@pytest.mark.parametrize("entry", [gpu(None, minor=7), gpu(None, minor=None), gpu(None, minor="0"), gpu(3), gpu(["GPU-a"])])
def test_a_gpu_that_cannot_be_told_is_an_error(entry):
    assert "neither an id nor the minor number" in error({"gpu": [entry]})


def test_the_same_gpu_twice_is_an_error():
    assert "stands there twice" in error({"gpu": [gpu(memory="1Gi"), gpu(None, minor=0, memory="2Gi")]})


def test_more_gpus_than_a_node_can_have_are_an_error():
    assert error({"gpu": [gpu(f"GPU-{number}") for number in range(300)]})


def test_the_annotation_places_the_pod():
    assert SYSTEM.places_by_annotation(pod({"gpu": []}))
    assert not SYSTEM.places_by_annotation(pod(""))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["gpu", "id", "minor", "resources", "koordinator.sh/gpu-core", "koordinator.sh/gpu-memory"]), inner
        )
    ),
)


@given(st.text() | JSON.map(json.dumps) | JSON.map(lambda value: json.dumps({"gpu": [value]})))
def test_any_text_and_any_json_give_claims_or_an_error_and_never_an_exception(text):
    answer = resolve(pod(text))
    assert not (answer.claims and answer.errors)
