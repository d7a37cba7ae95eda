"""All systems asked about one pod: whose word counts, and what is remembered of it."""

import json

import pytest

from exporter.claims import Granter
from exporter.claims.claim import Allocation, Answer, Node, System
from exporter.snapshot import Container, ContainerAllocation, Devices, EnvVar, Gpu, NodeFacts, Pod, PodAllocation, PodPhase

MIB, GIB = 1 << 20, 1 << 30
TOTAL = 81559 * MIB
GPU_0, GPU_1 = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22", "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"
GPUS = {uuid: Gpu(gpu_uuid=uuid, memory_total_bytes=TOTAL) for uuid in (GPU_0, GPU_1)}
GROUP = "3f6f0b5e-8d0e-4d5b-9f0e-2a4d5c1b7a10"
KOORDINATOR = "scheduling.koordinator.sh/device-allocated"


def pod(*env, **more):
    defaults = {"uid": "u", "namespace": "team-a", "name": "p", "containers": (Container(name="main", env=env),)}
    return Pod(**(defaults | more))


def koordinator(uuid, memory="1Gi"):
    return {KOORDINATOR: json.dumps({"gpu": [{"id": uuid, "resources": {"koordinator.sh/gpu-memory": memory}}]})}


def node(*pods, given=(), allocatable=()):
    """A node whose kubelet gave `main` of the pod `p` these device ids."""
    devices = ContainerAllocation("main", (Devices("nvidia.com/gpu", tuple(given)),))
    return Node(
        facts=NodeFacts(name="n", labels={"nvidia.com/gpu.memory": "81559"}),
        gpus=GPUS,
        pods=pods,
        allocations={("team-a", "p"): PodAllocation("team-a", "p", (devices,))} if given else {},
        allocatable=allocatable,
    )


def granted(*looks):
    """What is granted at the last of several looks at one pod, each (pod, GPUs of the kubelet, GPUs on which `main` has processes)."""
    pins, believed, grants = {}, frozenset(), []
    for each, given, used in looks:
        granter = Granter(node(each, given=given), believed)
        grant, pins = granter.grant(each, pins, {"main": frozenset(used)} if used else {})
        believed = granter.believed
        grants.append(grant)
    return grants[-1], pins


def limits(grant, system="container_env"):
    return {claim.gpu_uuid: claim.memory_bytes for claim in grant.claims if claim.system == system}


INDEXED = (EnvVar(name="CUDA_DEVICE_MEMORY_LIMIT_0", value="1g"), EnvVar(name="CUDA_DEVICE_MEMORY_LIMIT_1", value="2g"))


def test_a_limit_by_number_is_known_on_one_gpu_and_on_two_it_is_not():
    assert limits(granted((pod(*INDEXED), [GPU_0], []))[0]) == {GPU_0: GIB}
    assert limits(granted((pod(*INDEXED), [GPU_0, GPU_1], []))[0]) == {}
    assert limits(granted((pod(*INDEXED), [], [GPU_0, GPU_1]))[0]) == {}


@pytest.mark.parametrize("given", [[GPU_0], []], ids=["given by the kubelet", "only used"])
def test_no_edit_and_no_process_makes_a_limit_by_number_unknown_again(given):
    plain, annotated = pod(*INDEXED), pod(*INDEXED, annotations=koordinator(GPU_1))
    looks = [(plain, given, [GPU_0])]
    for later in ((annotated, given, [GPU_0]), (plain, given, [GPU_0, GPU_1]), (annotated, given, [GPU_0, GPU_1])):
        looks.append(later)
        grant, _ = granted(*looks)
        assert limits(grant) == {GPU_0: GIB}
        assert "container_env" not in grant.errors


def test_a_gpu_that_the_kubelet_gives_later_counts():
    plain = pod(*INDEXED)
    assert limits(granted((plain, [], [GPU_0]), (plain, [GPU_0, GPU_1], [GPU_0]))[0]) == {}
    # And stays counted when the kubelet's word is lost.
    assert limits(granted((plain, [], [GPU_0]), (plain, [GPU_0, GPU_1], [GPU_0]), (plain, [], [GPU_0]))[0]) == {}


def test_the_gpus_that_were_counted_are_kept_through_a_moment_without_any():
    plain = pod(*INDEXED)
    _, pins = granted((plain, [], [GPU_0]), (plain, [], []))
    assert pins["container_env"].gpus_by_container == {"main": frozenset({GPU_0})}
    assert limits(granted((plain, [], [GPU_0]), (plain, [], []), (plain, [], [GPU_0, GPU_1]))[0]) == {GPU_0: GIB}


def test_each_container_is_counted_from_when_it_is_first_seen():
    containers = (Container(name="main", env=INDEXED), Container(name="side", env=INDEXED))
    two = pod(containers=containers)
    granter = Granter(node(two))
    _, pins = granter.grant(two, {}, {"main": frozenset({GPU_0})})
    _, pins = granter.grant(two, pins, {"main": frozenset({GPU_0}), "side": frozenset({GPU_1})})
    grant, _ = granter.grant(two, pins, {"main": frozenset({GPU_0, GPU_1}), "side": frozenset({GPU_0, GPU_1})})
    assert {(claim.container, claim.gpu_uuid): claim.memory_bytes for claim in grant.claims} == {("main", GPU_0): GIB, ("side", GPU_1): GIB}


def test_a_limit_by_an_annotation_of_the_author_cannot_be_loosened():
    by_field = (EnvVar(name="GPU_MEMORY_LIMIT", field_path="metadata.annotations['limit']"),)
    before, after = (pod(*by_field, annotations={"limit": text}) for text in ("1024", "4096"))
    grant, pins = granted((before, [GPU_0], []), (after, [GPU_0], []))
    assert limits(grant) == {GPU_0: 1024}
    assert list(grant.errors) == ["container_env"]
    assert grant.unreadable is False
    assert pins["container_env"].pod == before


def test_a_limit_in_the_environment_gives_no_gpu_and_holds_where_processes_are():
    limited = pod(EnvVar(name="GPU_MEMORY_LIMIT", value="1024"))
    grant, _ = granted((limited, [GPU_0], [GPU_1]))
    assert limits(grant) == {GPU_0: 1024, GPU_1: 1024}
    assert grant.allocations == {Allocation("main", GPU_0)}


def test_a_limit_in_the_environment_holds_on_a_gpu_that_is_used_later():
    limited = pod(EnvVar(name="GPU_MEMORY_LIMIT", value="1024"))
    assert limits(granted((limited, [GPU_0], []), (limited, [GPU_0], [GPU_1]))[0]) == {GPU_0: 1024, GPU_1: 1024}


def invents(count, *, author_writable):
    """A system that names so many GPUs that the driver does not list, and one that it lists."""

    def resolve(_pod):
        return Answer(allocations=(Allocation("main", GPU_0), *(Allocation("main", f"GPU-{number}") for number in range(count))))

    return System(name="invents", resolver=lambda _node: resolve, author_writable=author_writable)


@pytest.mark.parametrize(("count", "author_writable", "believed"), [(16, True, True), (17, True, False), (17, False, True)])
def test_an_author_names_no_more_gpus_that_the_driver_does_not_list_than_a_node_may_have(count, author_writable, believed):
    plain = pod()
    grant, _ = Granter(node(plain), systems=(invents(count, author_writable=author_writable),)).grant(plain, {}, {})
    assert len(grant.allocations) == (count + 1 if believed else 0)
    assert grant.errors == ({} if believed else {"invents": ("names 17 GPUs that the driver does not list; up to 16 are believed",)})


def test_the_kubelets_word_is_believed_from_the_first_sight_of_it_on():
    plain, annotated = pod(), pod(annotations=koordinator(GPU_1, "2Gi"))
    whole = {GPU_0: TOTAL}
    assert limits(granted((plain, [GPU_0], []))[0], "whole_gpu") == whole
    assert limits(granted((plain, [GPU_0], []), (annotated, [GPU_0], []))[0], "whole_gpu") == whole
    # Koordinator placed this one before the kubelet started it: its device ids are no placement, and do not become it.
    assert limits(granted((annotated, [GPU_0], []))[0], "whole_gpu") == {}
    assert limits(granted((annotated, [GPU_0], []), (annotated, [GPU_0], []))[0], "whole_gpu") == {}


def test_only_pods_with_devices_of_the_kubelet_are_believed():
    other = pod(uid="other", name="q")
    assert Granter(node(pod(), other, given=[GPU_0])).believed == {"u"}
    assert Granter(node(pod(annotations=koordinator(GPU_1)), other, given=[GPU_0])).believed == frozenset()
    # A pod that is gone is forgotten.
    assert Granter(node(other, given=[GPU_0]), frozenset({"u"})).believed == frozenset()


def test_a_pod_that_waits_for_its_gpu_is_not_placed_and_one_that_cannot_be_read_is_unreadable():
    waiting = pod(annotations={"gpu-fraction": "0.5"}, labels={"runai-gpu-group": GROUP})
    unreadable = pod(annotations={"gpu-fraction": "half"})
    found = {name: granted((each, [], []))[0] for name, each in (("waiting", waiting), ("unreadable", unreadable), ("plain", pod()))}
    assert {name: (grant.not_placed, grant.unreadable) for name, grant in found.items()} == {
        "waiting": (True, False),
        "unreadable": (False, True),
        "plain": (False, False),
    }


def test_a_reservation_pod_is_plumbing_and_is_remembered_for_nothing():
    reservation = pod(namespace="kai-resource-reservation", labels={"runai-gpu-group": GROUP}, annotations=koordinator(GPU_0))
    grant, pins = granted((reservation, [GPU_0], [GPU_0]))
    assert (grant.plumbing, grant.claims, grant.allocations, pins) == (True, (), frozenset(), {})


def test_a_pod_that_has_ended_holds_nothing_and_is_forgotten():
    running = pod(annotations=koordinator(GPU_0))
    grant, pins = granted((running, [], []), (pod(annotations=koordinator(GPU_0), phase=PodPhase.SUCCEEDED), [GPU_0], []))
    assert (grant.claims, grant.allocations, pins) == ((), frozenset(), {})
