"""Aliyun's gpushare: containers' own limits in a unit that must be found out, on one GPU of the pod."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.aliyun import SYSTEM
from exporter.claims.claim import Claim, Node, Scope
from exporter.snapshot import Container, ContainerState, Devices, Gpu, NodeFacts, Pod

MIB, GIB = 1 << 20, 1 << 30
MINOR_0 = "GPU-9c356754-ddd7-4756-b8ab-94264215ba3b"
MINOR_1 = "GPU-8a7b15ad-e345-47cb-9568-3018a46d2456"
GPUS = {MINOR_1: Gpu(gpu_uuid=MINOR_1, index=0, minor=1), MINOR_0: Gpu(gpu_uuid=MINOR_0, index=1, minor=0)}
PREFIX = "ALIYUN_COM_GPU_MEM_"


def node(*, units=None, **allocatable):
    """A node whose kubelet lists so many units of each of two GPUs, if any."""
    ids = tuple(f"{uuid}-_-{unit}" for uuid in GPUS for unit in range(units or 0))
    return Node(
        facts=NodeFacts(name="n", allocatable={f"aliyun.com/{key.replace('_', '-')}": value for key, value in allocatable.items()}),
        gpus=GPUS,
        allocatable=(Devices("aliyun.com/gpu-mem", ids), Devices("cpu", ("0", "1"))) if units else (),
    )


def container(name="main", units=None, state=ContainerState.RUNNING):
    return Container(name=name, state=state, resource_limits={} if units is None else {"aliyun.com/gpu-mem": str(units)})


def pod(*containers, idx="1", assigned="true", dev=None):
    values = {"IDX": idx, "ASSIGNED": assigned, "DEV": dev}
    return Pod(
        uid="uid",
        namespace="team-a",
        name="p",
        containers=containers or (container(units=3),),
        annotations={PREFIX + key: value for key, value in values.items() if value is not None},
    )


def resolve(of_pod, of_node=None):
    return SYSTEM.resolver(of_node or node(units=15))(of_pod)


def claims(of_pod, of_node=None):
    answer = resolve(of_pod, of_node)
    assert (answer.errors, answer.not_placed) == ((), False)
    return [(claim.container, claim.gpu_uuid, claim.memory_bytes) for claim in answer.claims]


def test_the_limit_is_a_promise_of_memory_on_the_gpu_of_that_minor_number():
    assert resolve(pod()).claims == (
        Claim(system="aliyun", gpu_uuid=MINOR_1, container="main", scope=Scope.CONTAINER, memory_bytes=3 * GIB, enforced=False),
    )


def test_each_container_has_its_own_limit_and_one_without_a_limit_has_none():
    of_pod = pod(container("front", 3), container("back", 2), container("log"), container("zero", 0))
    assert claims(of_pod) == [("front", MINOR_1, 3 * GIB), ("back", MINOR_1, 2 * GIB)]


def test_pods_on_two_gpus_do_not_share_a_number():
    assert claims(pod(idx="0")) == [("main", MINOR_0, 3 * GIB)]
    assert claims(pod(idx="1")) == [("main", MINOR_1, 3 * GIB)]


@pytest.mark.parametrize(("units", "unit_bytes"), [(100, GIB), (101, MIB)])
def test_more_than_a_hundred_units_of_a_gpu_are_mebibytes(units, unit_bytes):
    assert claims(pod(), node(units=units)) == [("main", MINOR_1, 3 * unit_bytes)]


@pytest.mark.parametrize(("dev", "unit_bytes"), [("15", GIB), ("15109", MIB)])
def test_where_the_kubelet_lists_no_units_the_pods_annotation_tells_them(dev, unit_bytes):
    assert claims(pod(dev=dev), node()) == [("main", MINOR_1, 3 * unit_bytes)]


def test_the_kubelets_list_counts_before_the_annotation():
    assert claims(pod(dev="15109"), node(units=15)) == [("main", MINOR_1, 3 * GIB)]


@pytest.mark.parametrize(("gpu_mem", "unit_bytes"), [("640", GIB), ("120k", MIB)])
def test_failing_both_the_nodes_status_tells_them(gpu_mem, unit_bytes):
    assert claims(pod(), node(gpu_mem=gpu_mem, gpu_count="8")) == [("main", MINOR_1, 3 * unit_bytes)]


def test_a_limit_is_a_quantity_because_the_api_server_writes_4000_as_4k():
    assert claims(pod(container(units="4k")), node(units=101)) == [("main", MINOR_1, 4000 * MIB)]


@pytest.mark.parametrize("assigned", ["false", None, "TRUE"])
def test_a_pod_that_is_not_assigned_yet_holds_nothing_and_that_is_no_error(assigned):
    answer = resolve(pod(assigned=assigned))
    assert (answer.claims, answer.errors, answer.not_placed) == ((), (), True)


def test_a_container_that_ended_holds_nothing():
    assert claims(pod(container("done", 3, ContainerState.TERMINATED), container("main", 2))) == [("main", MINOR_1, 2 * GIB)]


@pytest.mark.parametrize("idx", ["", "x", "-1", "1.0", "7", "1,2"])
def test_an_index_that_is_none_or_no_gpu_here_is_an_error(idx):
    answer = resolve(pod(idx=idx))
    assert answer.claims == ()
    assert answer.errors[0].startswith("ALIYUN_COM_GPU_MEM_IDX: ")


def test_a_unit_that_nothing_tells_is_an_error_and_no_guess():
    assert resolve(pod(dev="many"), node()).errors[0].startswith("ALIYUN_COM_GPU_MEM_DEV: 'many'")
    assert resolve(pod(), node()).errors[0].startswith("allocatable aliyun.com/gpu-mem: ''")


def test_an_amount_beyond_all_memory_is_an_error():
    (error,) = resolve(pod(container(units="9E"))).errors
    assert error == "aliyun.com/gpu-mem: '9E' is no amount of memory"


def test_the_kubelets_ids_are_no_placement_of_a_pod_that_asks_for_units():
    assert SYSTEM.places_by_annotation(pod())
    assert not SYSTEM.places_by_annotation(pod(container("main")))


def test_an_index_on_a_pod_that_asks_for_no_units_says_nothing():
    assert claims(pod(container("main"))) == []


@given(st.text(), st.text(), st.text(), st.text())
def test_any_text_gives_claims_or_an_error_and_never_an_exception(idx, dev, units, gpu_count):
    for of_node in (node(), node(units=15), node(gpu_mem=dev, gpu_count=gpu_count)):
        answer = resolve(pod(container(units=units), container("side", 2), idx=idx, dev=dev), of_node)
        assert not (answer.claims and answer.errors)
