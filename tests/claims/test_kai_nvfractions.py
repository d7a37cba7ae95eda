"""NvFractions: what the pod's own annotations ask for, and where they place it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import NOT_MINE, Answer, Claim, Node, Scope
from exporter.claims.kai_nvfractions import SYSTEM
from exporter.snapshot import Container, ContainerKind, ContainerState, Pod

MIB = 1 << 20
GROUP, OTHER_GROUP = "3f6f0b5e-8d0e-4d5b-9f0e-2a4d5c1b7a10", "b1c7a9d2-4e63-4c7f-8a55-90d3e1f2a6c4"
A, B = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22", "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"
TRAINER = Container(name="trainer", state=ContainerState.RUNNING)
REPORTER = Container(name="reporter", state=ContainerState.RUNNING)


def key(what, container="trainer"):
    return f"nvidia.com/container.{container}.{what}"


REQUEST, LIMIT, DEVICES, PORTION = key("gpu-memory.request"), key("gpu-memory.limit"), key("gpus.devices"), key("gpu-compute.portion")


def pod(annotations, *, groups=(GROUP,), containers=(REPORTER, TRAINER)):
    labels = {"runai-gpu-group": groups[0]} if len(groups) == 1 else {f"runai-gpu-group/{group}": group for group in groups}
    return Pod(uid="u", namespace="team-a", name="elastic", labels=labels, annotations=annotations, containers=containers)


def reservation(group, uuid, name):
    return Pod(
        uid=name,
        namespace="kai-resource-reservation",
        name=name,
        labels={"runai-gpu-group": group},
        annotations={"run.ai/reserve_for_gpu_index": uuid},
    )


def resolve(pod, *reservations):
    return SYSTEM.resolver(Node(facts=None, pods=(pod, *reservations)))(pod)


def claim(uuid=A, memory_mib=8192, compute_ratio=None, container="trainer"):
    return Claim(
        system="kai_nvfractions",
        gpu_uuid=uuid,
        container=container,
        scope=Scope.CONTAINER,
        memory_bytes=memory_mib * MIB,
        compute_ratio=compute_ratio,
        enforced=True,
    )


def test_the_limit_counts_and_not_the_request_and_it_is_enforced():
    assert resolve(pod({REQUEST: "4096Mi", LIMIT: "8Gi", DEVICES: A})) == Answer(claims=(claim(),))


@pytest.mark.parametrize("annotations", [{REQUEST: "8Gi"}, {LIMIT: "8Gi"}, {REQUEST: "8Gi", LIMIT: "8192Mi"}])
def test_a_missing_one_of_the_two_equals_the_other(annotations):
    assert resolve(pod({**annotations, DEVICES: A})).claims == (claim(),)


@pytest.mark.parametrize(
    ("quantity", "memory_mib"),
    [("1000M", 954), ("2500M", 2385), ("8Gi", 8192), ("4096Mi", 4096), ("40779Mi", 40779), ("1", 1), ("1048577", 2), ("1.5Gi", 1536)],
)
def test_an_amount_is_rounded_up_to_whole_mib(quantity, memory_mib):
    assert resolve(pod({LIMIT: quantity, DEVICES: A})).claims == (claim(memory_mib=memory_mib),)


@pytest.mark.parametrize(
    ("text", "uuids"),
    [
        (A, [A]),
        (f"k8s.device-plugin.nvidia.com/gpu={A}", [A]),
        (f"k8s.device-plugin.nvidia.com/gpu={A},{B}", [A, B]),
        (f" {A} , {B} ,", [A, B]),
        (f"{A},{A}", [A]),
    ],
)
def test_the_devices_stand_bare_or_as_cdi_names(text, uuids):
    assert [each.gpu_uuid for each in resolve(pod({LIMIT: "8Gi", DEVICES: text})).claims] == uuids


def test_without_the_devices_the_group_labels_place_the_pod():
    two = pod({LIMIT: "8Gi"}, groups=(GROUP, OTHER_GROUP))
    assert set(resolve(two, reservation(GROUP, A, "r1"), reservation(OTHER_GROUP, B, "r2")).claims) == {claim(A), claim(B)}


def test_an_empty_list_of_devices_is_a_missing_one():
    assert resolve(pod({LIMIT: "8Gi", DEVICES: ""}), reservation(GROUP, B, "r1")).claims == (claim(B),)


def test_a_pod_whose_gpu_is_not_known_is_not_placed_yet():
    assert resolve(pod({LIMIT: "8Gi"})) == Answer(not_placed=True)


def test_an_ambiguous_group_is_an_error_unless_the_devices_tell():
    duplicates = (reservation(GROUP, A, "r1"), reservation(GROUP, B, "r2"))
    (error,) = resolve(pod({LIMIT: "8Gi"}), *duplicates).errors
    assert "reservation pods of different GPUs" in error
    assert resolve(pod({LIMIT: "8Gi", DEVICES: A}), *duplicates) == Answer(claims=(claim(),))


def test_an_ambiguous_group_costs_a_pod_of_two_groups_that_group_only():
    answer = resolve(
        pod({LIMIT: "8Gi"}, groups=(GROUP, OTHER_GROUP)),
        reservation(GROUP, A, "r1"),
        reservation(OTHER_GROUP, A, "r2"),
        reservation(OTHER_GROUP, B, "r3"),
    )
    assert (answer.claims, len(answer.errors), answer.not_placed) == ((claim(A),), 1, False)


def test_a_portion_is_a_share_of_compute():
    assert resolve(pod({LIMIT: "8Gi", DEVICES: A, PORTION: "0.25"})).claims == (claim(compute_ratio=0.25),)
    assert resolve(pod({LIMIT: "8Gi", DEVICES: A, PORTION: "1"})).claims == (claim(compute_ratio=1.0),)


def test_a_mode_is_no_amount():
    assert resolve(pod({LIMIT: "8Gi", DEVICES: A, key("gpu-compute.mode"): "sm-sharing"})).claims == (claim(),)


def test_several_containers_have_a_claim_each():
    annotations = {LIMIT: "8Gi", DEVICES: A, key("gpu-memory.limit", "reporter"): "1Gi", key("gpus.devices", "reporter"): B}
    assert resolve(pod(annotations)).claims == (claim(B, 1024, container="reporter"), claim())


def test_an_unreadable_container_costs_itself_only():
    answer = resolve(pod({LIMIT: "8Gi", DEVICES: A, key("gpu-memory.limit", "reporter"): "much"}))
    assert answer.claims == (claim(),)
    assert len(answer.errors) == 1


@pytest.mark.parametrize(
    ("annotations", "culprit"),
    [
        ({LIMIT: ""}, LIMIT),
        ({LIMIT: "8GB"}, LIMIT),
        ({LIMIT: "-8Gi"}, LIMIT),
        ({LIMIT: "0"}, LIMIT),
        ({LIMIT: "9223372036854775807"}, LIMIT),
        ({LIMIT: "8Ei"}, LIMIT),
        ({LIMIT: "\uff18Gi"}, LIMIT),
        ({LIMIT: "8Gi" * 4_000}, LIMIT),
        ({REQUEST: "much", LIMIT: "8Gi"}, REQUEST),
        ({REQUEST: "8Gi", LIMIT: "4Gi"}, LIMIT),
        ({LIMIT: "8Gi", PORTION: "0"}, PORTION),
        ({LIMIT: "8Gi", PORTION: "1.1"}, PORTION),
        ({LIMIT: "8Gi", PORTION: "nan"}, PORTION),
        ({LIMIT: "8Gi", DEVICES: "0"}, DEVICES),
        ({LIMIT: "8Gi", DEVICES: "all"}, DEVICES),
        ({LIMIT: "8Gi", DEVICES: f"{A};{B}"}, DEVICES),
        ({LIMIT: "8Gi", DEVICES: f"nvidia.com/gpu={A}"}, DEVICES),
        ({LIMIT: "8Gi", DEVICES: "GPU-" + "a" * 10_000}, DEVICES),
    ],
)
def test_what_cannot_be_read_is_one_short_error_that_names_the_key(annotations, culprit):
    answer = resolve(pod({DEVICES: A, **annotations}))
    assert answer == Answer(errors=answer.errors)
    assert len(answer.errors) == 1
    assert answer.errors[0].startswith(f"{culprit}: ")
    assert len(answer.errors[0]) < 250


@pytest.mark.parametrize("name", ["other", "debug", "Trainer", "x" * 200])
def test_a_container_that_the_pod_does_not_have_is_an_error(name):
    debug = Container(name="debug", kind=ContainerKind.EPHEMERAL)
    (error,) = resolve(pod({key("gpu-memory.limit", name): "8Gi"}, containers=(TRAINER, debug))).errors
    assert "the pod has no container of that name" in error
    assert len(error) < 200


def test_an_ended_container_holds_nothing_and_its_contract_is_no_error():
    ended = replace(TRAINER, state=ContainerState.TERMINATED)
    assert resolve(pod({LIMIT: "much", DEVICES: "all"}, containers=(REPORTER, ended))) == NOT_MINE


@pytest.mark.parametrize(
    "annotations", [{}, {"gpu-fraction": "0.5"}, {DEVICES: A}, {"nvidia.com/container.gpu-memory.limit": "8Gi"}, {PORTION: "0.5"}]
)
def test_a_pod_without_a_request_or_a_limit_is_not_mine(annotations):
    assert resolve(pod(annotations)) == NOT_MINE


@given(annotations=st.dictionaries(st.sampled_from([REQUEST, LIMIT, DEVICES, PORTION]), st.text()))
def test_any_annotations_give_claims_above_zero_or_one_error(annotations):
    answer = resolve(pod(annotations), reservation(GROUP, A, "r1"))
    assert not (answer.claims and answer.errors)
    assert len(answer.errors) <= 1
    assert all(0 < each.memory_bytes < 1 << 63 for each in answer.claims)
