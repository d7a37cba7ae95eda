"""What a pod's author writes later, held against what stood there first."""

import pytest

from exporter.claims.claim import NOT_MINE, Answer, Claim, Scope
from exporter.claims.pins import Pin, resolve_pinned
from exporter.snapshot import Gpu, Pod

GPU_0, GPU_1, MIG_0 = "GPU-0", "GPU-1", "MIG-of-0"
GPUS = {GPU_0: Gpu(gpu_uuid=GPU_0), GPU_1: Gpu(gpu_uuid=GPU_1), MIG_0: Gpu(gpu_uuid=MIG_0, parent_gpu_uuid=GPU_0)}
LOOSENED = "edited to claim more than before, or something else; what stood there before holds"


def claim(gpu_uuid, memory_bytes, compute_ratio=None):
    return Claim(
        system="test",
        gpu_uuid=gpu_uuid,
        container="main",
        scope=Scope.CONTAINER,
        memory_bytes=memory_bytes,
        compute_ratio=compute_ratio,
        enforced=False,
    )


def resolver(pod):
    """A system whose contract is a list of (GPU, memory, compute), or says that it is unreadable or not placed."""
    contract = pod.annotations.get("contract")
    match contract:
        case None:
            return NOT_MINE
        case "unreadable":
            return Answer(errors=("no contract",))
        case "waiting":
            return Answer(not_placed=True)
        case ["partly", *claims]:
            return Answer(claims=tuple(claim(*each) for each in claims), errors=("no second half",))
        case _:
            return Answer(claims=tuple(claim(*each) for each in contract))


def pod(contract=None, **labels):
    return Pod(uid="u", namespace="team-a", name="p", annotations={} if contract is None else {"contract": contract}, labels=labels)


def edited(before, *later):
    """The answer after the last edit, and the pin then."""
    answer, pin = resolve_pinned(resolver, before, None, GPUS)
    for each in later:
        answer, pin = resolve_pinned(resolver, each, pin, GPUS)
    return answer, pin


@pytest.mark.parametrize("contract", [None, "unreadable", "waiting", ["partly", (GPU_0, 10)]], ids=str)
def test_only_a_whole_contract_of_a_placed_pod_is_pinned(contract):
    assert edited(pod(contract)) == (resolver(pod(contract)), None)


def test_the_first_readable_contract_is_pinned():
    first = pod([(GPU_0, 10)])
    assert edited(first) == (Answer(claims=(claim(GPU_0, 10),)), Pin(first))
    assert edited(pod("unreadable"), pod("waiting"), first)[1] == Pin(first)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(GPU_0, 10, 0.5)], [(GPU_0, 11, 0.5)]),
        ([(GPU_0, 10, 0.5)], [(GPU_0, 10, 0.6)]),
        ([(GPU_0, 10, 0.5)], [(GPU_0, 9, 0.6)]),
        ([(GPU_0, 10, 0.5)], [(GPU_0, 11, 0.4)]),
        ([(GPU_0, 10, 0.5)], [(GPU_0, None, 0.5)]),
        ([(GPU_0, 10, 0.5)], [(GPU_0, 10, None)]),
        ([(GPU_0, 10)], [(GPU_1, 10)]),
        ([(GPU_0, 10)], [(GPU_0, 10), (GPU_1, 1)]),
        ([(GPU_1, 10)], [(MIG_0, 10)]),
        ([(GPU_0, 10)], [("GPU-elsewhere", 10)]),
        ([(GPU_0, 10)], [(MIG_0, 11)]),
        ([(GPU_0, 10)], []),
        ([(GPU_0, 10), (GPU_1, 10)], [(GPU_0, 10)]),
        ([(GPU_0, 10), (GPU_1, 10)], [(MIG_0, 5)]),
    ],
    ids=[
        *("more memory", "more compute", "less memory and more compute", "more memory and less compute", "no memory", "no compute"),
        *("another GPU", "a GPU more", "a MIG device of another GPU", "a GPU that is not here", "more on a MIG device", "nothing"),
        *("a GPU less", "a MIG device and a GPU less"),
    ],
)
def test_an_edit_that_claims_more_is_an_error_and_changes_nothing(before, after):
    first = pod(before)
    held = resolver(first).claims
    assert edited(first, pod(after)) == (Answer(claims=held, errors=(LOOSENED,), holds_despite_errors=True), Pin(first))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(GPU_0, 10, 0.5)], [(GPU_0, 10, 0.5)]),
        ([(GPU_0, 10, 0.5)], [(GPU_0, 9, 0.5)]),
        ([(GPU_0, 10, 0.5)], [(GPU_0, 10, 0.4)]),
        ([(GPU_0, 10)], [(GPU_0, 10, 0.4)]),
        ([(GPU_0, None)], [(GPU_0, 10)]),
        ([(GPU_0, 10)], [(MIG_0, 10)]),
        ([(GPU_0, 10), (GPU_1, 10)], [(MIG_0, 10), (GPU_1, 5)]),
    ],
    ids=[
        *("the same in other words", "less memory", "less compute", "compute where there was none", "an amount where there was none"),
        *("a MIG device of that GPU", "less beside a MIG device"),
    ],
)
def test_an_edit_that_claims_no_more_applies_and_is_what_later_ones_are_held_against(before, after):
    later = pod(after, edited="yes")
    assert edited(pod(before), later) == (resolver(later), Pin(later))


def test_a_contract_that_was_tightened_cannot_be_taken_back():
    tight = pod([(GPU_0, 5)])
    assert edited(pod([(GPU_0, 10)]), tight, pod([(GPU_0, 10)])) == (
        Answer(claims=(claim(GPU_0, 5),), errors=(LOOSENED,), holds_despite_errors=True),
        Pin(tight),
    )


def test_a_contract_that_becomes_unreadable_is_an_error_and_what_it_said_is_all_known():
    first = pod([(GPU_0, 10)])
    answer, pin = edited(first, pod("unreadable"))
    assert answer == Answer(claims=(claim(GPU_0, 10),), errors=("no contract; what stood there before holds",), holds_despite_errors=True)
    assert pin == Pin(first)


def test_a_contract_that_is_taken_away_holds():
    first = pod([(GPU_0, 10)])
    assert edited(first, pod(), pod()) == (Answer(claims=(claim(GPU_0, 10),), errors=(LOOSENED,), holds_despite_errors=True), Pin(first))


def test_an_edit_of_a_label_alone_is_an_edit():
    """A system may read its contract from labels: KAI's group is one."""

    def by_label(pod):
        return Answer(claims=(claim(GPU_0, int(pod.labels["limit"])),))

    first, looser = pod(limit="10"), pod(limit="20")
    _, pin = resolve_pinned(by_label, first, None, GPUS)
    answer, pin = resolve_pinned(by_label, looser, pin, GPUS)
    assert (answer.claims, pin) == ((claim(GPU_0, 10),), Pin(first))


def test_what_changes_by_right_is_not_held_against_the_author():
    """The node's label, or a container that ends, makes another claim of the same words."""
    contract = {"limit": 10}

    def by_node(_pod):
        return Answer(claims=(claim(GPU_0, contract["limit"]),))

    first = pod("same")
    _, pin = resolve_pinned(by_node, first, None, GPUS)
    contract["limit"] = 20
    unchanged, pin = resolve_pinned(by_node, pod("same"), pin, GPUS)
    relabelled, _ = resolve_pinned(by_node, pod("same", other="label"), pin, GPUS)
    assert (unchanged, relabelled) == (Answer(claims=(claim(GPU_0, 20),)),) * 2


def test_a_contract_that_can_no_longer_be_resolved_either_way_says_so():
    """The words of then are unreadable now, too: nothing was held, and nothing is known."""
    state = {"readable": True}

    def by_node(_pod):
        return Answer(claims=(claim(GPU_0, 10),)) if state["readable"] else Answer(errors=("no label on the node",))

    _, pin = resolve_pinned(by_node, pod("a"), None, GPUS)
    state["readable"] = False
    answer, kept = resolve_pinned(by_node, pod("b"), pin, GPUS)
    assert answer == Answer(errors=("no label on the node",))
    assert kept == pin
