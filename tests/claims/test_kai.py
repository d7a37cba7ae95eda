"""KAI's fractions: which container, on which GPU, how much."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import NOT_MINE, Answer, Claim, Node, Scope
from exporter.claims.kai import SYSTEM, GpuGroup, gpu_groups, queue
from exporter.snapshot import Container, ContainerKind, ContainerState, Gpu, NodeFacts, Pod, PodPhase

MIB = 1 << 20
GROUP = "3f6f0b5e-8d0e-4d5b-9f0e-2a4d5c1b7a10"
OTHER_GROUP = "b1c7a9d2-4e63-4c7f-8a55-90d3e1f2a6c4"
A, B = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22", "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"
MAIN = Container(name="main", state=ContainerState.RUNNING)


def reservation(group=GROUP, uuid=A, *, name="gpu-reservation-76e2d625ef0b9e16", namespace="kai-resource-reservation", **more):
    annotations = {"karpenter.sh/do-not-disrupt": "true"} | ({} if uuid is None else {"run.ai/reserve_for_gpu_index": uuid})
    labels = {"app": namespace, "runai-gpu-group": group}
    return Pod(uid=f"uid-{namespace}-{name}", namespace=namespace, name=name, labels=labels, annotations=annotations, **more)


def fraction_pod(annotations, *, groups=(GROUP,), labels=None, containers=(MAIN,), **more):
    by_form = {"runai-gpu-group": groups[0]} if len(groups) == 1 else {f"runai-gpu-group/{group}": group for group in groups}
    return Pod(
        uid="u",
        namespace="team-a",
        name="half-gpu",
        phase=PodPhase.RUNNING,
        labels=by_form if labels is None else labels,
        annotations=annotations,
        containers=containers,
        **more,
    )


def node(*pods, label="81559", totals=None):
    """A node with the pods, the label nvidia.com/gpu.memory and GPUs as uuid -> total bytes."""
    totals = {A: 81559 * MIB, B: 81559 * MIB} if totals is None else totals
    return Node(
        facts=NodeFacts(name="gpu-node-1", labels={} if label is None else {"nvidia.com/gpu.memory": label}),
        gpus={uuid: Gpu(gpu_uuid=uuid, memory_total_bytes=total) for uuid, total in totals.items()},
        pods=pods,
    )


def resolve(pod, *pods, **more):
    return SYSTEM.resolver(node(pod, *(pods or (reservation(),)), **more))(pod)


def resolve_amount(annotations, **more):
    """Answer (MiB, share of compute) of a sound pod on one GPU."""
    answer = resolve(fraction_pod(annotations), **more)
    assert answer.errors == ()
    (claim,) = answer.claims
    return None if claim.memory_bytes is None else claim.memory_bytes / MIB, claim.compute_ratio


def claim(uuid, memory_mib, compute_ratio, *, container="main", shares=1):
    return Claim(
        system="kai",
        gpu_uuid=uuid,
        container=container,
        scope=Scope.CONTAINER,
        memory_bytes=memory_mib * MIB,
        compute_ratio=compute_ratio,
        enforced=False,
        shares=shares,
    )


# --- how much ---


def test_half_a_gpu_is_half_of_the_label_floored_to_a_hundred_and_nothing_enforces_it():
    assert resolve(fraction_pod({"gpu-fraction": "0.5"})) == Answer(claims=(claim(A, 40750, 0.5),))


@pytest.mark.parametrize(
    ("label", "fraction", "memory_mib"),
    [
        ("81559", "0.5", 40750),
        ("81559", "0.57", 46454),
        ("40960", "0.125", 5112),
        ("40960", "0.375", 15337),
        ("143771", "0.25", 35925),
        ("15360", "0.2", 3060),
        ("81559", "0.1", 8150),
        ("81559", "0.3", 24450),
        ("81559", "0.0000001", 0),
        ("85520809984", "0.5", 40750),
        ("1048576", "0.5", None),
        ("1048575", "0.5", 524250),
    ],
)
def test_a_fraction_is_cut_off_after_a_product_in_float64(label, fraction, memory_mib):
    amount, compute_ratio = resolve_amount({"gpu-fraction": fraction}, label=label, totals={})
    assert (amount, compute_ratio) == (memory_mib, float(fraction))


@pytest.mark.parametrize(
    ("label", "memory", "compute_ratio"),
    [
        ("15360", "4096", 0.27),
        ("11264", "2000", 0.18),
        ("81559", "2000", 0.03),
        ("40960", "20480", 0.51),
        ("81559", "4000", 0.05),
        ("81559", "12000", 0.15),
        ("85520809984", "12000", 0.15),
        ("81559", "5705", 0.08),
        ("81559", "1", 0.01),
        ("81559", "81500", 1.0),
    ],
)
def test_an_amount_of_memory_is_as_written_and_its_compute_is_rounded_up_to_a_percent(label, memory, compute_ratio):
    assert resolve_amount({"gpu-memory": memory}, label=label) == (int(memory), compute_ratio)


@pytest.mark.parametrize("label", [None, "", "eighty", "-81559", "0", "99", "8.1e4", "\uff18", "9223372036854775808", "9" * 63])
def test_without_a_usable_label_a_fraction_is_of_the_drivers_total_and_an_amount_has_no_compute(label):
    assert resolve_amount({"gpu-fraction": "0.5"}, label=label, totals={A: 40960 * MIB}) == (20480, 0.5)
    assert resolve_amount({"gpu-memory": "6000"}, label=label) == (6000, None)


def test_the_drivers_total_is_not_floored_to_a_hundred_and_the_product_is_in_whole_mib():
    assert resolve_amount({"gpu-fraction": "0.5"}, label=None, totals={A: 81559 * MIB + 5}) == (40779, 0.5)


def test_without_label_and_total_the_memory_is_unknown_and_the_compute_is_not():
    assert resolve_amount({"gpu-fraction": "0.4"}, label=None, totals={A: None}) == (None, 0.4)
    assert resolve_amount({"gpu-fraction": "0.4"}, label=None, totals={}) == (None, 0.4)
    assert resolve_amount({"gpu-memory": "8000"}, label=None, totals={A: None}) == (8000, None)


def test_a_node_that_was_never_read_is_not_one_without_the_label():
    pod = fraction_pod({"gpu-fraction": "0.5"})
    unread = replace(node(pod, reservation()), facts=None)
    claim = SYSTEM.resolver(unread)(pod).claims[0]
    assert (claim.memory_bytes, claim.compute_ratio) == (None, 0.5)


@given(percent=st.integers(min_value=1, max_value=9999), label=st.integers(min_value=100, max_value=400_000))
def test_a_fraction_is_within_one_mib_of_exact_arithmetic_and_never_above_it_by_more(percent, label):
    amount, _ = resolve_amount({"gpu-fraction": f"0.{percent:04}"}, label=str(label))
    exact = Fraction(percent, 10_000) * (label // 100 * 100)
    assert exact - 1 - Fraction(1, 10**6) <= amount <= exact + Fraction(1, 10**6)


@given(fraction=st.floats(min_value=1e-9, max_value=1, exclude_max=True), total=st.integers(min_value=1, max_value=1 << 42))
def test_a_fraction_of_the_drivers_total_is_within_one_mib_of_exact_arithmetic(fraction, total):
    amount, compute_ratio = resolve_amount({"gpu-fraction": repr(fraction)}, label=None, totals={A: total})
    exact = Fraction(fraction) * total / MIB
    assert exact - 1 - Fraction(1, 10**6) <= amount <= exact + Fraction(1, 10**6)
    assert compute_ratio == fraction


@given(memory=st.integers(min_value=1, max_value=400_000), label=st.integers(min_value=100, max_value=400_000))
def test_the_compute_of_an_amount_is_the_exact_percentage_rounded_up_but_for_float64(memory, label):
    _, compute_ratio = resolve_amount({"gpu-memory": str(memory)}, label=str(label))
    exact_percent = math.ceil(Fraction(memory, label // 100 * 100) * 100)
    assert round(compute_ratio * 100) - exact_percent in (0, 1)


# --- what is readable ---

NO_AMOUNTS = [
    "2Gi",
    "2000Mi",
    "1.5",
    "-1",
    "+4000",
    " 4000",
    "4_000",
    "0x1000",
    "4e3",
    "",
    "0",
    "\uff14\uff10\uff10\uff10",
    "18446744073709551616",
    "18446744073709551615",
    "8796093022208",
    "4000\x00",
    "4" * 10_000,
]
NO_FRACTIONS = [
    "",
    "0",
    "1",
    "1.0",
    "1.5",
    "-1",
    "0,5",
    "1e400",
    "NaN",
    "inf",
    "0x1p-1",
    " 0.5 ",
    "0_5",
    "\uff10.\uff15",
    "0.5\x00",
    "half of the card, please; " * 400,
]


@pytest.mark.parametrize(
    ("key", "value"), [("gpu-memory", value) for value in NO_AMOUNTS] + [("gpu-fraction", value) for value in NO_FRACTIONS]
)
def test_what_kai_itself_refuses_is_one_short_error_that_names_the_key(key, value):
    answer = resolve(fraction_pod({key: value}))
    assert answer == Answer(errors=answer.errors)
    assert len(answer.errors) == 1
    assert answer.errors[0].startswith(f"{key}: ")
    assert len(answer.errors[0]) < 200
    assert answer.errors[0].isprintable()


def test_the_largest_amount_is_below_2_to_the_63_bytes():
    assert resolve_amount({"gpu-memory": "8796093022207"}, label=None) == (8796093022207, None)


def test_both_keys_together_are_unreadable():
    assert resolve(fraction_pod({"gpu-fraction": "0.5", "gpu-memory": "2000"})).errors == (
        "gpu-fraction and gpu-memory exclude each other",
    )


@pytest.mark.parametrize("annotations", [{"gpu-fraction": "0.5"}, {"gpu-memory": "2000"}])
def test_a_whole_gpu_limit_on_any_container_excludes_a_fraction(annotations):
    side = Container(name="side", resource_limits={"nvidia.com/gpu": "1"})
    (error,) = resolve(fraction_pod(annotations, containers=(MAIN, side))).errors
    assert "nvidia.com/gpu" in error


def test_a_whole_gpu_limit_of_zero_excludes_nothing():
    side = Container(name="side", resource_limits={"nvidia.com/gpu": "0"})
    assert resolve(fraction_pod({"gpu-fraction": "0.5"}, containers=(MAIN, side))).claims == (claim(A, 40750, 0.5),)


@pytest.mark.parametrize("devices", ["2", "", "-1", "many", "9" * 10_000])
def test_the_number_of_devices_is_not_read_because_the_group_labels_decide(devices):
    assert resolve(fraction_pod({"gpu-fraction": "0.5", "gpu-fraction-num-devices": devices})).claims == (claim(A, 40750, 0.5),)


@given(annotations=st.dictionaries(st.sampled_from(["gpu-fraction", "gpu-memory", "gpu-fraction-container-name"]), st.text()))
def test_any_annotations_give_claims_that_are_not_negative_or_one_error(annotations):
    answer = resolve(fraction_pod(annotations))
    assert len(answer.claims) + len(answer.errors) <= 1
    assert all(each.memory_bytes >= 0 and each.compute_ratio > 0 for each in answer.claims)


def test_a_pod_without_either_key_is_not_mine_whatever_its_labels():
    assert resolve(fraction_pod({"received-resource-type": "Fraction", "gpu-fraction-num-devices": "2"})) == NOT_MINE


def test_a_pod_with_nvfractions_is_not_mine():
    annotations = {"gpu-fraction": "0.5", "nvidia.com/container.main.gpu-memory.request": "40779Mi"}
    assert resolve(fraction_pod(annotations)) == NOT_MINE


@pytest.mark.parametrize("key", ["nvidia.com/container.gpu-memory.request", "nvidia.com/container.main.gpus.devices"])
def test_keys_that_look_like_nvfractions_take_nothing_from_a_fraction(key):
    assert resolve(fraction_pod({"gpu-fraction": "0.5", key: "1Gi"})).claims == (claim(A, 40750, 0.5),)


# --- which container ---

INIT = Container(name="gpu-init", kind=ContainerKind.INIT, state=ContainerState.RUNNING)
DEBUG = Container(name="debug", kind=ContainerKind.EPHEMERAL, state=ContainerState.RUNNING)
SIDE = Container(name="side", state=ContainerState.RUNNING)


def container_of(annotations, *containers):
    answer = resolve(fraction_pod({"gpu-fraction": "0.5", **annotations}, containers=containers))
    return [each.container for each in answer.claims] or answer


def test_the_first_regular_container_has_the_fraction():
    assert container_of({}, INIT, MAIN, SIDE) == ["main"]


def test_a_named_container_has_the_fraction_an_init_container_too():
    assert container_of({"gpu-fraction-container-name": "side"}, INIT, MAIN, SIDE) == ["side"]
    assert container_of({"gpu-fraction-container-name": "gpu-init"}, INIT, MAIN, SIDE) == ["gpu-init"]


@pytest.mark.parametrize("name", ["", "Main", "main ", "debug", "x" * 10_000, "m\x00"])
def test_a_container_that_the_pod_does_not_have_is_an_error(name):
    (error,) = container_of({"gpu-fraction-container-name": name}, INIT, MAIN, DEBUG).errors
    assert error.startswith("gpu-fraction-container-name: the pod has no container ")
    assert len(error) < 200


def test_an_ended_container_holds_nothing_and_its_contract_is_no_error():
    ended = replace(INIT, state=ContainerState.TERMINATED)
    assert container_of({"gpu-fraction-container-name": "gpu-init"}, ended, MAIN) == NOT_MINE
    assert container_of({"gpu-fraction-container-name": "gpu-init", "gpu-fraction": "x"}, ended, MAIN) == NOT_MINE


@pytest.mark.parametrize(
    "container",
    [
        replace(INIT, restartable=True),
        replace(INIT, state=ContainerState.WAITING),
        replace(INIT, state=None),
        replace(INIT, state=ContainerState.TERMINATED, will_restart=True),
    ],
)
def test_a_waiting_or_restarting_container_holds_its_fraction(container):
    assert container_of({"gpu-fraction-container-name": "gpu-init"}, container, MAIN) == ["gpu-init"]


# --- which GPU ---


def test_several_devices_have_a_label_each_and_the_same_amount_each():
    pod = fraction_pod({"gpu-fraction": "0.25"}, groups=(GROUP, OTHER_GROUP))
    assert set(resolve(pod, reservation(), reservation(OTHER_GROUP, B, name="r2")).claims) == {claim(A, 20375, 0.25), claim(B, 20375, 0.25)}


def test_both_forms_of_the_label_are_read_together():
    labels = {"runai-gpu-group": GROUP, f"runai-gpu-group/{OTHER_GROUP}": OTHER_GROUP, "runai-gpu-group-of": "x"}
    answer = resolve(fraction_pod({"gpu-fraction": "0.25"}, labels=labels), reservation(), reservation(OTHER_GROUP, B, name="r2"))
    assert {each.gpu_uuid for each in answer.claims} == {A, B}


def test_one_group_in_both_forms_is_one_device():
    labels = {"runai-gpu-group": GROUP, f"runai-gpu-group/{GROUP}": GROUP}
    assert resolve(fraction_pod({"gpu-fraction": "0.25"}, labels=labels)).claims == (claim(A, 20375, 0.25),)


def test_two_groups_that_stand_for_one_gpu_are_two_devices_of_it():
    pod = fraction_pod({"gpu-fraction": "0.25"}, groups=(GROUP, OTHER_GROUP))
    assert resolve(pod, reservation(), reservation(OTHER_GROUP, A, name="r2")).claims == (claim(A, 40750, 0.5, shares=2),)


def test_a_claim_stands_on_a_gpu_that_the_driver_does_not_list():
    assert resolve(fraction_pod({"gpu-fraction": "0.5"}), totals={}).claims == (claim(A, 40750, 0.5),)


@pytest.mark.parametrize(
    "reservations",
    [
        (),
        (reservation(uuid=None),),
        (reservation(uuid=""),),
        (reservation(OTHER_GROUP),),
        (reservation(phase=PodPhase.SUCCEEDED),),
        (reservation(phase=PodPhase.FAILED),),
        (reservation(namespace="team-a"),),
        (reservation(namespace="kube-system"),),
    ],
    ids=["none", "no uuid", "empty uuid", "other group", "succeeded", "failed", "tenant's namespace", "other namespace"],
)
def test_a_group_without_a_believable_reservation_pod_is_not_placed_yet(reservations):
    pod = fraction_pod({"gpu-fraction": "0.5"})
    assert SYSTEM.resolver(node(pod, *reservations))(pod) == Answer(not_placed=True)


@pytest.mark.parametrize("labels", [{}, {"runai-gpu-group": ""}, {"runai-gpu-groups": GROUP}])
def test_a_pod_without_a_group_is_not_placed_yet(labels):
    assert resolve(fraction_pod({"gpu-fraction": "0.5"}, labels=labels)) == Answer(not_placed=True)


def test_a_pod_with_one_of_two_groups_placed_is_not_placed_yet():
    assert resolve(fraction_pod({"gpu-fraction": "0.25"}, groups=(GROUP, OTHER_GROUP)), reservation()) == Answer(not_placed=True)


def test_a_group_on_two_gpus_is_an_error_and_not_a_guess():
    pod = fraction_pod({"gpu-fraction": "0.5"})
    answer = resolve(pod, reservation(name="r1"), reservation(uuid=B, name="r2"))
    assert answer == Answer(errors=(f"group '{GROUP}' has reservation pods of different GPUs",))


def test_an_ambiguous_group_costs_a_pod_of_two_groups_that_group_only():
    pod = fraction_pod({"gpu-fraction": "0.25"}, groups=(GROUP, OTHER_GROUP))
    answer = resolve(pod, reservation(name="r1"), reservation(OTHER_GROUP, A, name="r2"), reservation(OTHER_GROUP, B, name="r3"))
    assert answer.claims == (claim(A, 20375, 0.25),)
    assert answer.errors == (f"group '{OTHER_GROUP}' has reservation pods of different GPUs",)
    assert not answer.not_placed


def test_two_reservation_pods_of_one_group_on_one_gpu_are_not_ambiguous():
    assert resolve(fraction_pod({"gpu-fraction": "0.5"}), reservation(name="r1"), reservation(name="r2")).claims == (claim(A, 40750, 0.5),)


def test_a_finished_duplicate_makes_no_group_ambiguous():
    answer = resolve(fraction_pod({"gpu-fraction": "0.5"}), reservation(name="r1"), reservation(uuid=B, name="r2", phase=PodPhase.FAILED))
    assert answer.claims == (claim(A, 40750, 0.5),)


def test_an_ambiguous_group_costs_the_pods_of_that_group_only():
    sound = fraction_pod({"gpu-fraction": "0.5"}, groups=(OTHER_GROUP,))
    answer = resolve(sound, reservation(name="r1"), reservation(uuid=B, name="r2"), reservation(OTHER_GROUP, B, name="r3"))
    assert answer.claims == (claim(B, 40750, 0.5),)


def test_the_reservation_namespaces_are_those_of_the_node():
    pod = fraction_pod({"gpu-fraction": "0.5"})
    moved = reservation(namespace="gpu-reservations")
    renamed = replace(node(pod, moved), kai_reservation_namespaces=frozenset({"gpu-reservations"}))
    assert SYSTEM.resolver(renamed)(pod).claims == (claim(A, 40750, 0.5),)
    assert SYSTEM.resolver(renamed)(moved) == Answer(plumbing=True)
    assert SYSTEM.resolver(renamed)(reservation()) == NOT_MINE


@pytest.mark.parametrize("namespace", ["kai-resource-reservation", "runai-reservation"])
@pytest.mark.parametrize("uuid", [A, None])
def test_a_reservation_pod_is_plumbing_with_or_without_its_uuid(namespace, uuid):
    pod = reservation(uuid=uuid, namespace=namespace)
    assert SYSTEM.resolver(node(pod))(pod) == Answer(plumbing=True)


def test_no_label_makes_a_tenants_pod_plumbing():
    pod = reservation(namespace="team-a")
    assert SYSTEM.resolver(node(pod))(pod) == NOT_MINE


# --- what else is told ---


def test_each_reservation_pod_that_tells_its_gpu_is_a_row():
    old = reservation(OTHER_GROUP, B, name="gpu-reservation-gpu-node-1-k3x9z", namespace="runai-reservation")
    others = (reservation("x", uuid=None), reservation("y", phase=PodPhase.SUCCEEDED), reservation("z", namespace="team-a"))
    assert gpu_groups(node(reservation(), old, *others, fraction_pod({"gpu-fraction": "0.5"}))) == (
        GpuGroup(GROUP, A, "kai-resource-reservation", "gpu-reservation-76e2d625ef0b9e16"),
        GpuGroup(OTHER_GROUP, B, "runai-reservation", "gpu-reservation-gpu-node-1-k3x9z"),
    )


@pytest.mark.parametrize(
    ("labels", "name"),
    [({}, None), ({"kai.scheduler/queue": "a"}, "a"), ({"runai/queue": "b"}, "b"), ({"runai/queue": "b", "kai.scheduler/queue": "a"}, "a")],
)
def test_the_queue_stands_under_the_new_key_or_the_old_one(labels, name):
    assert queue(fraction_pod({}, labels=labels)) == name


def test_authors_write_the_contract_and_annotations_of_kai_do_not_displace_the_kubelet():
    assert SYSTEM.author_writable
    assert not SYSTEM.places_by_annotation(fraction_pod({"gpu-fraction": "0.5"}))
