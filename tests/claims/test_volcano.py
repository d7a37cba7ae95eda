"""Volcano: vGPUs in HAMi's encoding with another numbering, and the older gpushare."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import Allocation, Claim, Node, Scope
from exporter.claims.volcano import SYSTEM
from exporter.snapshot import Container, ContainerKind, ContainerState, EnvVar, Gpu, Pod

MIB = 1 << 20
GPU_A = "GPU-e51aa175-78a3-4fc5-9e05-4df1dc4d1875"
GPU_B = "GPU-42ccf39b-885a-4a7d-9ad8-7d8ceb34d917"
NODE = Node(
    facts=None,
    gpus={
        GPU_A: Gpu(gpu_uuid=GPU_A, index=0, minor=1),
        GPU_B: Gpu(gpu_uuid=GPU_B, index=1, minor=0),
        "MIG-0": Gpu(gpu_uuid="MIG-0", index=0, minor=2, parent_gpu_uuid=GPU_B),
    },
)

VGPUS = "volcano.sh/vgpu-ids-new"
PHASE = "volcano.sh/bind-phase"


def container(name="main", *, state=ContainerState.RUNNING, kind=ContainerKind.REGULAR, env=(), **limits):
    names = {"vgpus": "vgpu-number", "memory": "gpu-memory", "gpus": "gpu-number"}
    return Container(
        name=name,
        state=state,
        kind=kind,
        env=env,
        resource_limits={f"volcano.sh/{names[key]}": str(value) for key, value in limits.items()},
    )


def pod(annotations, *containers):
    return Pod(uid="uid", namespace="team-a", name="p", containers=containers or (container(vgpus=1),), annotations=annotations)


def resolve(of_pod):
    return SYSTEM.resolver(NODE)(of_pod)


def claims(of_pod):
    """(container, GPU, MiB, compute) of each claim; the answer has nothing else in it."""
    answer = resolve(of_pod)
    assert (answer.errors, answer.not_placed, answer.plumbing, answer.allocations) == ((), False, False, ())
    return [(claim.container, claim.gpu_uuid, claim.memory_bytes / MIB, claim.compute_ratio) for claim in answer.claims]


# --- vGPUs ---


def test_the_only_segment_is_that_of_the_only_container_that_asks():
    text = f"{GPU_A},NVIDIA,8192,50:{GPU_B},NVIDIA,8192,50:"
    assert claims(pod({VGPUS: text, PHASE: "success"}, container("log"), container("train", vgpus=2))) == [
        ("train", GPU_A, 8192, 0.5),
        ("train", GPU_B, 8192, 0.5),
    ]


def test_containers_that_do_not_ask_are_passed_over_in_the_numbering():
    text = f"{GPU_A},NVIDIA,4096,0:;{GPU_B},NVIDIA,8192,100:"
    four = (container("proxy"), container("worker", vgpus=1), container("agent"), container("server", vgpus=1))
    assert claims(pod({VGPUS: text}, *four)) == [("worker", GPU_A, 4096, None), ("server", GPU_B, 8192, None)]
    assert all(claim.compute_unlimited for claim in resolve(pod({VGPUS: text}, *four)).claims)


@pytest.mark.parametrize("text", [f"{GPU_A},NVIDIA,1024,20:", f"{GPU_A},NVIDIA,1024,20:;", f";;{GPU_A},NVIDIA,1024,20:;"])
def test_a_trailing_semicolon_and_empty_segments_change_nothing(text):
    assert claims(pod({VGPUS: text}, container("log"), container("train", vgpus=1))) == [("train", GPU_A, 1024, 0.2)]


def test_init_containers_take_no_part_in_the_numbering():
    warm = container("warm", vgpus=1, kind=ContainerKind.INIT)
    assert claims(pod({VGPUS: f"{GPU_A},NVIDIA,1024,20:"}, warm, container("train", vgpus=1))) == [("train", GPU_A, 1024, 0.2)]


def test_a_claim_is_walled_by_hami_core_unless_the_container_switches_it_off():
    switched_off = container(vgpus=1, env=(EnvVar(name="CUDA_DISABLE_CONTROL", value="true"),))
    (walled,) = resolve(pod({VGPUS: f"{GPU_A},NVIDIA,1024,20:"})).claims
    (promised,) = resolve(pod({VGPUS: f"{GPU_A},NVIDIA,1024,20:"}, switched_off)).claims
    assert (walled.system, walled.scope, walled.enforced, promised.enforced) == ("volcano", Scope.CONTAINER, True, False)


def test_the_old_mig_form_names_the_parent():
    assert claims(pod({VGPUS: f"{GPU_A}[0-1],NVIDIA,1024,20:"})) == [("main", GPU_A, 1024, 0.2)]


@pytest.mark.parametrize(("phase", "not_placed"), [("allocating", True), ("failed", False)])
def test_an_unbound_pod_holds_nothing_and_that_is_no_error(phase, not_placed):
    answer = resolve(pod({VGPUS: f"{GPU_A},NVIDIA,4096,0:", PHASE: phase}))
    assert (answer.claims, answer.errors, answer.not_placed) == ((), (), not_placed)


@pytest.mark.parametrize(
    ("text", "containers"),
    [
        (f"{GPU_A},NVIDIA,1,1:;{GPU_B},NVIDIA,1,1:", [container(vgpus=1)]),
        (f"{GPU_A},NVIDIA,1,1:", [container("a", vgpus=1), container("b", vgpus=1)]),
        (f"{GPU_A},NVIDIA,1,1:", [container("log")]),
        (f"{GPU_A},NVIDIA,x,1:", [container(vgpus=1)]),
        (f"{GPU_A},NVIDIA,1:", [container(vgpus=1)]),
        (",NVIDIA,1,1:", [container(vgpus=1)]),
    ],
)
def test_an_annotation_that_does_not_fit_or_read_is_an_error_as_a_whole(text, containers):
    answer = resolve(pod({VGPUS: text}, *containers))
    assert answer.claims == ()
    assert len(answer.errors) == 1
    assert answer.errors[0].startswith("volcano.sh/vgpu-ids-new: ")


def test_a_container_that_ended_holds_nothing_and_keeps_its_number():
    ended = container("first", vgpus=1, state=ContainerState.TERMINATED)
    text = f"{GPU_A},NVIDIA,1,1:;{GPU_B},NVIDIA,2,2:"
    assert claims(pod({VGPUS: text}, ended, container("second", vgpus=1))) == [("second", GPU_B, 2, 0.02)]


def test_the_annotation_that_allocate_consumes_is_never_read():
    assert claims(pod({"volcano.sh/devices-to-allocate": f"{GPU_A},NVIDIA,1,1:"})) == []


def test_the_kubelets_ids_are_hidden_only_where_the_pod_asks_for_vgpus_which_no_edit_can_add():
    assert SYSTEM.places_by_annotation(pod({VGPUS: f"{GPU_A},NVIDIA,1,1:"}))
    assert not SYSTEM.places_by_annotation(pod({VGPUS: f"{GPU_A},NVIDIA,1,1:"}, container("main")))
    assert not SYSTEM.places_by_annotation(pod({}))


# --- gpushare ---


def test_gpushare_gives_each_container_its_own_limit_on_the_gpu_of_that_minor():
    of_pod = pod({"volcano.sh/gpu-index": "1"}, container("a", memory=4096), container("b", memory="2k"), container("log"))
    assert resolve(of_pod).claims == (
        Claim(system="volcano", gpu_uuid=GPU_A, container="a", scope=Scope.CONTAINER, memory_bytes=4096 * MIB, enforced=False),
        Claim(system="volcano", gpu_uuid=GPU_A, container="b", scope=Scope.CONTAINER, memory_bytes=2000 * MIB, enforced=False),
    )


def test_whole_gpus_of_gpushare_are_allocations_of_the_pod():
    answer = resolve(pod({"volcano.sh/gpu-index": "0,1"}, container(gpus=2)))
    assert (answer.claims, answer.allocations) == ((), (Allocation("", GPU_B), Allocation("", GPU_A)))


def test_gpushare_that_is_not_assigned_yet_is_not_placed():
    assert resolve(pod({"volcano.sh/gpu-index": "1", "volcano.sh/gpu-assigned": "false"}, container(memory=1))).not_placed
    assert resolve(pod({"volcano.sh/gpu-index": "1", "volcano.sh/gpu-assigned": "true"}, container(memory=1))).claims


@pytest.mark.parametrize("index", ["", "x", "-1", "7", "2", "0,1", "0,"])
def test_an_index_that_names_no_one_gpu_here_is_an_error(index):
    answer = resolve(pod({"volcano.sh/gpu-index": index}, container(memory=1)))
    assert answer.claims == ()
    assert answer.errors[0].startswith("volcano.sh/gpu-index: ")


def test_an_amount_that_is_no_memory_is_an_error():
    (error,) = resolve(pod({"volcano.sh/gpu-index": "1"}, container(memory="9E"))).errors
    assert error == "volcano.sh/gpu-memory: '9E' is no amount of memory"


def test_an_index_on_a_pod_that_asks_for_no_gpu_says_nothing():
    assert claims(pod({"volcano.sh/gpu-index": "1"}, container("log"))) == []


@given(st.text(), st.text(), st.text())
def test_any_text_gives_claims_or_an_error_and_never_an_exception(tuples, index, amount):
    for of_pod in (pod({VGPUS: tuples}), pod({"volcano.sh/gpu-index": index}, container(memory=amount), container("b", gpus=1))):
        answer = resolve(of_pod)
        assert not (answer.claims and answer.errors)
