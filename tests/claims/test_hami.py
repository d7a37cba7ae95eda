"""HAMi: device tuples in annotations of the pod. Amounts are MiB and percent, for each GPU of each container."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import Claim, Node, Scope
from exporter.claims.hami import SYSTEM
from exporter.snapshot import Container, ContainerKind, ContainerState, EnvVar, Pod

MIB = 1 << 20
GPU_A = "GPU-90a26de1-7573-44ff-b823-ed6d348a1b1f"
GPU_B = "GPU-aafc7dea-9ebb-43b3-99e3-0c65491068fe"
MIG = "MIG-653bc769-b9f5-552d-b508-27cfc66924fa"

ALLOCATED = "hami.io/vgpu-devices-allocated"
PHASE = "hami.io/bind-phase"

RUNNING, TERMINATED = ContainerState.RUNNING, ContainerState.TERMINATED


def container(name="main", *, gpus=0, state=RUNNING, **more):
    return Container(name=name, state=state, resource_limits={"nvidia.com/gpu": str(gpus)} if gpus else {}, **more)


def init(name, **more):
    return container(name, kind=ContainerKind.INIT, **({"state": TERMINATED} | more))


def pod(text, *containers, key=ALLOCATED, **annotations):
    names = {"phase": PHASE, "mig": "hami.io/vgpu-mig-allocations", "early_phase": "4pd.io/bind-phase"}
    return Pod(
        uid="uid",
        namespace="team-a",
        name="p",
        containers=containers or (container(gpus=1),),
        annotations={key: text} | {names[name]: value for name, value in annotations.items()},
    )


def resolve(of_pod):
    return SYSTEM.resolver(Node(facts=None))(of_pod)


def claims(of_pod):
    """(container, GPU, MiB, compute) of each claim; the answer has nothing else in it."""
    answer = resolve(of_pod)
    assert (answer.errors, answer.not_placed, answer.plumbing) == ((), False, False)
    return [(claim.container, claim.gpu_uuid, claim.memory_bytes / MIB, claim.compute_ratio) for claim in answer.claims]


def test_a_tuple_is_mebibytes_and_percent_of_one_gpu_walled_by_hami_core():
    assert resolve(pod(f"{GPU_A},NVIDIA,4096,25:;")).claims == (
        Claim(
            system="hami",
            gpu_uuid=GPU_A,
            container="main",
            scope=Scope.CONTAINER,
            memory_bytes=4294967296,
            compute_ratio=0.25,
            enforced=True,
        ),
    )


def test_two_containers_with_one_and_two_gpus():
    text = f"{GPU_A},NVIDIA,6000,30:;{GPU_A},NVIDIA,10000,50:{GPU_B},NVIDIA,10000,50:;"
    assert claims(pod(text, container("encode", gpus=1), container("train", gpus=2))) == [
        ("encode", GPU_A, 6000, 0.3),
        ("train", GPU_A, 10000, 0.5),
        ("train", GPU_B, 10000, 0.5),
    ]


def test_an_empty_segment_is_a_container_without_a_gpu():
    assert claims(pod(f";{GPU_A},NVIDIA,8192,100:;", container("proxy"), container("model", gpus=1))) == [("model", GPU_A, 8192, None)]


@pytest.mark.parametrize("percent", ["0", "100", "101"])
def test_no_percent_and_the_whole_gpu_leave_compute_unlimited(percent):
    (claim,) = resolve(pod(f"{GPU_A},NVIDIA,4096,{percent}:;")).claims
    assert (claim.compute_ratio, claim.compute_unlimited) == (None, True)


def test_any_other_percent_limits_compute():
    (claim,) = resolve(pod(f"{GPU_A},NVIDIA,4096,99:;")).claims
    assert (claim.compute_ratio, claim.compute_unlimited) == (0.99, False)


def test_zero_mebibytes_are_no_limit_of_memory_and_not_a_limit_of_nothing():
    (claim,) = resolve(pod(f"{GPU_A},NVIDIA,0,30:;")).claims
    assert (claim.memory_bytes, claim.compute_ratio) == (None, 0.3)


def test_a_claim_larger_than_the_card_is_stated_as_it_is():
    assert claims(pod(f"{GPU_A},NVIDIA,90000,0:;")) == [("main", GPU_A, 90000, None)]


def test_a_gpu_that_the_driver_does_not_list_is_shown():
    assert claims(pod("GPU-a,NVIDIA,3000,30:;")) == [("main", "GPU-a", 3000, 0.3)]


def test_fields_after_the_fourth_are_passed_over():
    assert claims(pod(f"{GPU_A},NVIDIA,3000,30,x,y:;")) == [("main", GPU_A, 3000, 0.3)]


def test_a_switched_off_library_makes_the_claim_a_promise():
    switched_off = container(gpus=1, env=(EnvVar(name="CUDA_DISABLE_CONTROL", value="true"),))
    (claim,) = resolve(pod(f"{GPU_A},NVIDIA,8192,30:;", switched_off)).claims
    assert (claim.enforced, claim.memory_bytes) == (False, 8192 * MIB)


@pytest.mark.parametrize("value", ["false", None])
def test_the_library_is_switched_off_by_the_literal_true_only(value):
    not_off = container(gpus=1, env=(EnvVar(name="CUDA_DISABLE_CONTROL", value=value),))
    assert resolve(pod(f"{GPU_A},NVIDIA,8192,30:;", not_off)).claims[0].enforced


# --- which container a segment belongs to ---


@pytest.mark.parametrize(
    "text",
    [
        f";{GPU_A},NVIDIA,4096,20:;",  # 2.9 and later: the init container has a slot
        f"{GPU_A},NVIDIA,4096,20:;",  # 2.8 and earlier: it has none
        f"{GPU_A},NVIDIA,4096,20:;;",  # 2.10.0: its slot is left out and the main container's follows
    ],
)
def test_every_version_of_hami_gives_the_gpu_to_the_container_that_asks_for_it(text):
    assert claims(pod(text, init("fetch"), container("main", gpus=1))) == [("main", GPU_A, 4096, 0.2)]


def test_an_init_container_that_asks_is_counted_first_and_holds_nothing_once_it_ended():
    text = f"{GPU_A},NVIDIA,1000,10:;{GPU_B},NVIDIA,2000,20:;"
    assert claims(pod(text, init("warm", gpus=1, state=RUNNING), container("main", gpus=1))) == [
        ("warm", GPU_A, 1000, 0.1),
        ("main", GPU_B, 2000, 0.2),
    ]
    assert claims(pod(text, init("warm", gpus=1), container("main", gpus=1))) == [("main", GPU_B, 2000, 0.2)]


def test_under_a_renamed_resource_position_decides_init_containers_first():
    text = f"{GPU_A},NVIDIA,1000,10:;{GPU_B},NVIDIA,2000,20:;"
    assert claims(pod(text, init("warm", state=RUNNING), container("main"))) == [("warm", GPU_A, 1000, 0.1), ("main", GPU_B, 2000, 0.2)]


def test_under_a_renamed_resource_as_many_segments_as_containers_leave_init_containers_out():
    assert claims(pod(f"{GPU_A},NVIDIA,1000,10:;", init("warm", state=RUNNING), container("main"))) == [("main", GPU_A, 1000, 0.1)]


def test_segments_that_fit_no_numbering_are_unreadable():
    answer = resolve(pod(f"{GPU_A},NVIDIA,1,1:;" * 3, container("main"), container("side")))
    assert answer.claims == ()
    assert answer.errors == (
        "hami.io/vgpu-devices-allocated: 3 segments fit neither the pod's 0 init and 2 other containers nor those that ask",
    )


def test_an_ephemeral_container_takes_no_part_in_the_numbering():
    debug = container("debug", kind=ContainerKind.EPHEMERAL)
    assert claims(pod(f"{GPU_A},NVIDIA,1000,10:;", container("main"), debug)) == [("main", GPU_A, 1000, 0.1)]


def test_a_container_that_ended_holds_nothing_and_one_that_comes_back_does():
    ended, restarting = container(gpus=1, state=TERMINATED), container(gpus=1, state=TERMINATED, will_restart=True)
    assert claims(pod(f"{GPU_A},NVIDIA,1000,10:;", ended)) == []
    assert claims(pod(f"{GPU_A},NVIDIA,1000,10:;", restarting)) == [("main", GPU_A, 1000, 0.1)]


def test_a_container_without_a_process_holds_its_claim_before_it_starts():
    assert claims(pod(f"{GPU_A},NVIDIA,1000,10:;", container(gpus=1, state=ContainerState.WAITING))) == [("main", GPU_A, 1000, 0.1)]


# --- binding ---


@pytest.mark.parametrize(("phase", "not_placed"), [("allocating", True), ("failed", False)])
def test_an_unbound_pod_holds_nothing_and_that_is_no_error(phase, not_placed):
    answer = resolve(pod(f"{GPU_A},NVIDIA,8192,0:;", phase=phase))
    assert (answer.claims, answer.errors, answer.not_placed) == ((), (), not_placed)


def test_a_pod_without_a_phase_is_taken_as_bound():
    assert claims(pod(f"{GPU_A},NVIDIA,8192,0:;")) == claims(pod(f"{GPU_A},NVIDIA,8192,0:;", phase="success"))


def test_the_annotation_that_allocate_consumes_is_never_read():
    assert claims(pod(f"{GPU_A},NVIDIA,8192,0:;", key="hami.io/vgpu-devices-to-allocate")) == []


def test_the_early_form_has_its_own_prefix_and_phase():
    early = "4pd.io/vgpu-ids-new"
    assert claims(pod(f"{GPU_A},NVIDIA,3000,30:;", key=early)) == [("main", GPU_A, 3000, 0.3)]
    assert claims(pod(f"{GPU_A},NVIDIA,3000,30:;", key=early, phase="failed")) == [("main", GPU_A, 3000, 0.3)]
    assert claims(pod(f"{GPU_A},NVIDIA,3000,30:;", key=early, early_phase="failed")) == []


# --- MIG ---


def mig_allocation(**more):
    entry = {"containerIndex": 1, "deviceIndex": 0, "gpuUUID": GPU_A, "profile": "2g.20gb", "placement": {"start": 0, "size": 2}}
    return json.dumps([entry | more])


def test_the_claim_is_on_the_mig_device_once_it_was_made():
    text, containers = f";{GPU_A},NVIDIA,19968,0:;", (container("log"), container("main", gpus=1))
    made = mig_allocation(migUUID=MIG, gpuInstanceID=3, computeInstanceID=0)
    assert claims(pod(text, *containers, mig=made)) == [("main", MIG, 19968, None)]
    assert claims(pod(text, *containers, mig=mig_allocation())) == [("main", GPU_A, 19968, None)]


def test_devices_without_an_entry_stay_on_their_gpu():
    text, made = f"{GPU_A},NVIDIA,100,0:{GPU_B},NVIDIA,200,0:;", mig_allocation(containerIndex=0, deviceIndex=1, migUUID=MIG)
    assert claims(pod(text, mig=made)) == [("main", GPU_A, 100, None), ("main", MIG, 200, None)]


def test_old_dynamic_mig_names_the_parent():
    assert claims(pod(f"{GPU_A}[0-1],NVIDIA,20480,0:;")) == [("main", GPU_A, 20480, None)]


def test_two_slices_of_one_gpu_add_up():
    text = f"{GPU_A}[0-0],NVIDIA,10240,20:{GPU_A}[0-1],NVIDIA,20480,30:;"
    (claim,) = resolve(pod(text)).claims
    assert (claim.gpu_uuid, claim.memory_bytes, claim.compute_ratio, claim.shares) == (GPU_A, 30720 * MIB, 0.5, 2)


@pytest.mark.parametrize("text", ["{", "{}", '"x"', "[1]", '[{"migUUID": 3}]', f'[{{"migUUID": "{MIG}"}}]', "[" * 100_000])
def test_unreadable_mig_allocations_make_the_whole_contract_unreadable(text):
    answer = resolve(pod(f"{GPU_A},NVIDIA,100,0:;", mig=text))
    assert answer.claims == ()
    assert len(answer.errors) == 1
    assert answer.errors[0].startswith("hami.io/vgpu-mig-allocations: ")


# --- unreadable ---


@pytest.mark.parametrize(
    "device",
    [
        f"{GPU_A},NVIDIA,abc,30",
        f"{GPU_A},NVIDIA,-1,30",
        f"{GPU_A},NVIDIA,1.5,30",
        f"{GPU_A},NVIDIA,1e3,30",
        f"{GPU_A},NVIDIA,4_000,30",
        f"{GPU_A},NVIDIA,\N{FULLWIDTH DIGIT FOUR}000,30",
        f"{GPU_A},NVIDIA, 4000,30",
        f"{GPU_A},NVIDIA,,30",
        f"{GPU_A},NVIDIA,99999999999999999999,30",
        f"{GPU_A},NVIDIA,4000,x",
        f"{GPU_A},NVIDIA,4000,-5",
        f"{GPU_A},NVIDIA,4000",
        ",NVIDIA,4000,30",
        "[0-1],NVIDIA,4000,30",
        "not a tuple",
    ],
)
def test_one_bad_device_makes_the_annotation_unreadable_as_a_whole(device):
    answer = resolve(pod(f"{GPU_B},NVIDIA,1000,10:{device}:;"))
    assert answer.claims == ()
    assert len(answer.errors) == 1
    assert answer.errors[0].startswith("hami.io/vgpu-devices-allocated: ")


def test_an_error_shows_what_stood_there_cut_to_a_sane_length():
    (error,) = resolve(pod(f"{GPU_A},NVIDIA,{'9' * 5000},30:;")).errors
    assert error.startswith("hami.io/vgpu-devices-allocated: memory: '9999")
    assert len(error) < 200


def test_an_annotation_of_more_devices_than_a_node_can_have_is_unreadable():
    (error,) = resolve(pod("".join(f"GPU-{n},NVIDIA,1,1:" for n in range(300)) + ";")).errors
    assert "more than 256 devices" in error


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_annotation_is_no_claim_and_places_nothing(text):
    assert claims(pod(text)) == []
    assert not SYSTEM.places_by_annotation(pod(text))


def test_the_kubelets_ids_of_a_pod_with_tuples_are_no_placement():
    assert SYSTEM.places_by_annotation(pod(f"{GPU_A},NVIDIA,1,1:;"))
    assert SYSTEM.places_by_annotation(pod(f"{GPU_A},NVIDIA,1,1:;", key="4pd.io/vgpu-ids-new"))
    assert not SYSTEM.places_by_annotation(pod("x", key="hami.io/dcu-devices-allocated"))


TUPLES = st.lists(st.sampled_from([GPU_A, "NVIDIA", "4096", "30", ",", ",", ",", ":", ";", "[", "-1", "", "x"]), max_size=30).map("".join)


@given(st.text() | TUPLES, st.sampled_from(["", "[]", mig_allocation(migUUID=MIG)]) | st.text())
def test_any_text_gives_claims_or_an_error_and_never_an_exception(text, mig):
    answer = resolve(pod(text, init("warm", gpus=1, state=RUNNING), container("main", gpus=1), mig=mig))
    assert not (answer.claims and answer.errors)
    assert all(claim.memory_bytes is None or claim.memory_bytes > 0 for claim in answer.claims)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["containerIndex", "deviceIndex", "migUUID", "x"]), inner),
    )
)
def test_any_json_of_mig_allocations_gives_claims_or_an_error(value):
    answer = resolve(pod(f"{GPU_A},NVIDIA,100,0:;", mig=json.dumps(value)))
    assert bool(answer.claims) != bool(answer.errors)


amounts = st.tuples(st.sampled_from([GPU_A, GPU_B]), st.integers(1, 100_000), st.integers(0, 100))


@given(st.lists(st.lists(amounts, max_size=3, unique_by=lambda amount: amount[0]), min_size=1, max_size=5))
def test_what_the_scheduler_writes_is_what_each_container_gets(given_to):
    text = "".join("".join(f"{uuid},NVIDIA,{mib},{percent}:" for uuid, mib, percent in devices) + ";" for devices in given_to)
    containers = [container(f"c{number}", gpus=len(devices)) for number, devices in enumerate(given_to)]
    assert claims(pod(text, *containers)) == [
        (f"c{number}", uuid, mib, None if percent in (0, 100) else percent / 100)
        for number, devices in enumerate(given_to)
        for uuid, mib, percent in devices
    ]
