"""What share a workload needs, and what that frees."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.advice import (
    MIB,
    Device,
    PodFacts,
    PodUse,
    Terms,
    Workload,
    build_advice,
    granted_bytes,
    history_seconds,
    share_hundredths,
    workload_of,
)

GIB = 1 << 30
HOUR = 3600
A100 = Device(model="NVIDIA A100-SXM4-80GB", memory_total_bytes=81559 * MIB)
L4 = Device(model="NVIDIA L4", memory_total_bytes=23034 * MIB)
MIG = Device(model="NVIDIA A100-SXM4-80GB", mig_profile="3g.40gb", is_mig=True, memory_total_bytes=40192 * MIB)
TERMS = Terms(headroom_ratio=Fraction("0.2"), min_history_seconds=24 * HOUR, step_seconds=300)
DEVICES = {"GPU-a": A100, "GPU-b": A100, "GPU-l4": L4, "MIG-a": MIG}


def use(name="train-0", gpu="GPU-a", *, peak=10000, limit=20000, begin=0, end=48, system="kai", **more):
    """A pod's use, in MiB and hours."""
    told = PodUse(
        pod=("", "team-a", name),
        gpu_uuid=gpu,
        known_steps=(end - begin) * 12,
        first_seconds=begin * HOUR + 300,
        last_seconds=end * HOUR,
        memory_used_p99_bytes=peak * MIB,
        memory_used_max_bytes=peak * MIB,
        is_running=True,
        memory_limit_bytes=None if limit is None else limit * MIB,
        systems=frozenset({system}) if system else frozenset(),
    )
    return replace(told, **more)


def advise(*uses, facts=None, terms=TERMS):
    owned = {each.pod: PodFacts(owner_kind="StatefulSet", owner_name="train", seen_steps=each.known_steps) for each in uses}
    return build_advice(uses, owned if facts is None else facts, DEVICES, terms)


# --- whose pods these are ---


@pytest.mark.parametrize(
    ("kind", "name", "workload"),
    [
        ("ReplicaSet", "ranker-5d8f7c9b4", ("Deployment", "ranker")),
        ("ReplicaSet", "chat-api-66d4f8c9dd", ("Deployment", "chat-api")),
        ("ReplicaSet", "web", ("ReplicaSet", "web")),
        ("ReplicaSet", "web-2", ("ReplicaSet", "web-2")),
        ("ReplicaSet", "web-frontend", ("ReplicaSet", "web-frontend")),
        ("StatefulSet", "db-5d8f7c9b4", ("StatefulSet", "db-5d8f7c9b4")),
        ("Job", "report-29453760", ("CronJob", "report")),
        ("Job", "report-20261201", ("Job", "report-20261201")),
        ("Job", "tune-3", ("Job", "tune-3")),
        ("PyTorchJob", "llm", ("PyTorchJob", "llm")),
        ("", "", ("Pod", "some-pod")),
        ("ReplicaSet", "", ("Pod", "some-pod")),
    ],
)
def test_a_pod_belongs_to_what_made_its_owner_where_the_owners_name_tells(kind, name, workload):
    assert workload_of(("eu", "team-a", "some-pod"), kind, name) == Workload("eu", "team-a", *workload)


def test_pods_of_two_clusters_are_of_two_workloads():
    assert [row.workload.cluster for row in advise(use(), use(pod=("eu", "team-a", "train-0")))] == ["", "eu"]


def test_pods_of_the_sharing_systems_are_left_out():
    assert advise(use(), facts={("", "team-a", "train-0"): PodFacts(is_system=True)}) == ()


def test_a_pod_of_which_no_facts_are_known_stands_for_itself():
    (row,) = advise(use(), facts={})
    assert row.workload == Workload("", "team-a", "Pod", "train-0")


# --- shares ---


def test_a_need_is_the_peak_and_the_headroom_as_a_share_that_kai_would_let_it_have():
    (row,) = advise(use(peak=24000, limit=40750))
    assert row.advised_memory_ratio == 0.36  # 28800 of 81500
    assert row.advised_memory_bytes == 29340 * MIB  # what KAI gives for 0.36
    assert row.memory_freed_bytes == (40750 - 29340) * MIB
    assert row.memory_limit_ratio == 0.5
    assert row.notes == ()


def test_a_share_whose_product_is_cut_off_below_the_need_is_not_enough():
    assert granted_bytes(57, 81559 * MIB) == 46454 * MIB  # 0.57 of 81500 in float64, cut off
    assert share_hundredths(46454 * MIB, 81559 * MIB) == 57
    assert share_hundredths(46455 * MIB, 81559 * MIB) == 58


def test_all_of_a_gpu_is_all_of_its_memory():
    assert granted_bytes(100, 81559 * MIB) == 81559 * MIB
    assert share_hundredths(81559 * MIB, 81559 * MIB) == 100
    assert share_hundredths(90000 * MIB, 81559 * MIB) == 100


@pytest.mark.parametrize("system", ["hami", "volcano", "koordinator", "aliyun", "kai_nvfractions", "dra", "container_env"])
def test_where_an_amount_is_asked_the_amount_is_advised_to_the_mib(system):
    (row,) = advise(use(peak=5001, limit=10000, system=system))
    assert row.advised_memory_bytes == 6002 * MIB  # 6001.2
    assert row.advised_memory_ratio == 0.08
    assert row.memory_freed_bytes == 3998 * MIB


def test_headroom_of_a_fifth_adds_exactly_a_fifth():
    (row,) = advise(use(peak=1000, limit=10000, system="hami"))
    assert row.advised_memory_bytes == 1200 * MIB


def test_a_workload_that_needs_more_than_it_asks_frees_less_than_nothing():
    (row,) = advise(use(peak=30000, limit=24450))
    assert (row.advised_memory_ratio, row.memory_freed_bytes) == (0.45, (24450 - 36675) * MIB)


def test_no_share_is_above_one_and_what_does_not_fit_is_said():
    (row,) = advise(use(peak=70000, limit=81559, system="whole_gpu"))
    assert (row.advised_memory_ratio, row.advised_memory_bytes, row.memory_freed_bytes) == (1.0, 81559 * MIB, 0)
    assert row.notes == ("its peak with the headroom is more than this GPU has",)


def test_what_a_pod_would_have_missed_at_its_highest_is_said():
    (row,) = advise(use(peak=10000, memory_used_max_bytes=19000 * MIB))
    assert row.notes == ("would not have fit at its highest, 19000 MiB",)


def test_without_any_use_nothing_is_needed_and_all_is_freed():
    (row,) = advise(use(peak=0))
    assert (row.advised_memory_ratio, row.memory_freed_bytes) == (0.0, 20000 * MIB)
    assert row.notes == ("used no GPU memory at all",)


def test_use_in_less_than_a_hundredth_of_the_time_gives_no_advice():
    (row,) = advise(use(peak=0, memory_used_max_bytes=9000 * MIB))
    assert (row.advised_memory_bytes, row.advised_memory_ratio, row.memory_freed_bytes) == (None, None, None)
    assert row.notes == ("used in less than 1% of the time, 9000 MiB at its highest: no advice",)


def test_without_a_limit_what_is_freed_is_not_known():
    (row,) = advise(use(limit=None, system=""))
    assert (row.advised_memory_ratio, row.memory_limit_bytes, row.memory_freed_bytes) == (0.15, None, None)
    assert row.notes == ("its limit is not known, or it has none: so is what it would free",)


def test_a_mig_device_comes_in_profiles_only():
    (row,) = advise(use(gpu="MIG-a", peak=21500, limit=40192, system="mig"))
    assert (row.advised_memory_bytes, row.memory_freed_bytes) == (25800 * MIB, None)
    assert row.notes == ("its size comes from a MIG profile: 25800 MiB would suffice, and what that frees is not known",)


@pytest.mark.parametrize("system", ["mps", "time_slicing", "gke"])
def test_replicas_are_set_for_the_node(system):
    (row,) = advise(use(system=system))
    assert row.memory_freed_bytes is None
    assert row.notes == ("its size comes from the node's number of replicas: 12000 MiB would suffice, and what that frees is not known",)


def test_of_a_gpu_whose_memory_is_not_known_an_amount_is_advised_and_no_share():
    (row,) = build_advice([use(gpu="GPU-new")], {}, DEVICES, TERMS)
    assert (row.advised_memory_bytes, row.advised_memory_ratio, row.memory_limit_ratio) == (12000 * MIB, None, None)
    assert row.memory_freed_bytes == 8000 * MIB


def test_hami_may_have_sold_more_than_there_is():
    (row,) = advise(use(gpu="GPU-l4", limit=46068, system="hami"))
    assert row.memory_limit_ratio == 2.0


# --- several pods ---


def test_the_share_suffices_for_each_pod_and_is_freed_by_each_that_runs():
    (row,) = advise(
        use("train-0", peak=10000, memory_used_max_bytes=11000 * MIB),
        use("train-1", gpu="GPU-b", peak=15000),
        use("train-2", is_running=False, peak=16000),
    )
    assert (row.pods, row.memory_used_p99_bytes, row.memory_used_max_bytes) == (2, 16000 * MIB, 16000 * MIB)
    assert row.advised_memory_bytes == 19560 * MIB  # 0.24
    assert row.memory_freed_bytes == 2 * (20000 - 19560) * MIB


def test_a_pod_on_two_gpus_is_one_pod_and_frees_on_both():
    (row,) = advise(use(gpu="GPU-a"), use(gpu="GPU-b"))
    assert (row.pods, row.memory_freed_bytes) == (1, 2 * (20000 - 12225) * MIB)


def test_while_none_runs_nothing_is_freed():
    (row,) = advise(use(is_running=False))
    assert (row.pods, row.memory_limit_bytes, row.memory_freed_bytes) == (0, 20000 * MIB, 0)
    assert row.notes == ("none runs now; 7775 MiB less while one does",)
    (row,) = advise(use(is_running=False, limit=10000))
    assert row.notes[-1] == "none runs now; 2225 MiB more while one does"


def test_what_running_pods_ask_counts_and_not_what_was_asked_before():
    (row,) = advise(use("train-0", is_running=False, limit=40000), use("train-1", limit=15000))
    assert (row.memory_limit_bytes, row.memory_freed_bytes) == (15000 * MIB, (15000 - 12225) * MIB)
    assert row.notes == ()


def test_pods_that_ask_differently_are_said():
    (row,) = advise(use("train-0", limit=16000), use("train-1", limit=20000))
    assert row.memory_limit_bytes == 20000 * MIB
    assert row.memory_freed_bytes == (16000 + 20000 - 2 * 12225) * MIB
    assert row.notes == ("its pods ask differently, from 16000 to 20000 MiB",)


def test_kinds_of_gpus_have_their_own_peaks_and_shares():
    small, large = advise(use("train-0", peak=10000), use("train-1", gpu="GPU-l4", peak=9000))
    assert (large.device, large.advised_memory_ratio) == (A100, 0.15)
    assert (small.device, small.advised_memory_ratio) == (L4, 0.47)
    assert large.notes == small.notes == ("runs on several kinds of GPU: the largest of its shares suffices on all",)


def test_the_most_that_is_freed_comes_first_and_what_is_not_known_last():
    facts = {}
    rows = build_advice(
        [
            use("short", end=3),
            use("mig", gpu="MIG-a"),
            use("more", peak=30000),
            use("little", limit=13000),
            use("much", limit=70000),
        ],
        facts,
        DEVICES,
        TERMS,
    )
    assert [row.workload.owner_name for row in rows] == ["much", "little", "more", "mig", "short"]


# --- history ---


def test_a_short_history_gives_no_advice():
    (row,) = advise(use(end=3))
    assert (row.advised_memory_bytes, row.memory_freed_bytes) == (None, None)
    assert row.memory_used_p99_bytes == 10000 * MIB
    assert row.notes == ("history too short: 3h of 24h",)


def test_history_that_just_suffices_suffices():
    assert advise(use(end=24))[0].advised_memory_bytes is not None
    assert advise(use(end=24, known_steps=287))[0].notes == ("history too short: 23h55m of 24h",)


def test_pods_beside_each_other_do_not_make_more_of_the_same_time():
    assert history_seconds([use("a", end=8), use("b", end=8), use("c", begin=4, end=9)], 300) == 9 * HOUR


def test_pods_one_after_the_other_do():
    assert history_seconds([use("a", end=2), use("b", begin=24, end=26), use("c", begin=26, end=27)], 300) == 5 * HOUR


def test_gaps_do_not_count():
    assert history_seconds([use(end=20, known_steps=120)], 300) == 10 * HOUR


def test_where_pods_overlap_the_better_known_one_counts():
    assert history_seconds([use("a", end=20, known_steps=120), use("b", begin=10, end=14)], 300) == pytest.approx((16 / 2 + 4) * HOUR)


def test_no_pod_is_no_history():
    assert history_seconds([], 300) == 0.0


def test_use_that_was_often_unknown_is_said():
    facts = {("", "team-a", "train-0"): PodFacts(seen_steps=48 * 12)}
    (row,) = advise(use(known_steps=30 * 12), facts=facts)
    assert row.notes == ("its use was not known for 38% of the time it ran",)
    (row,) = advise(use(known_steps=47 * 12), facts=facts)
    assert row.notes == ()


# --- whatever is used ---

amounts = st.floats(0, 300 * GIB)
totals = st.integers(1 * MIB, 300 * GIB)
systems = st.sampled_from(["kai", "hami", "whole_gpu", "volcano", "hami_core", "koordinator"])


@given(
    peaks=st.lists(st.tuples(amounts, st.booleans(), st.integers(0, 300 * GIB)), min_size=1, max_size=4),
    total=totals,
    headroom=st.fractions(0, 10, max_denominator=1000),
    system=systems,
)
def test_a_share_holds_the_need_and_what_is_freed_is_what_is_asked_less_what_is_advised(peaks, total, headroom, system):
    uses = [
        PodUse(
            pod=("", "team-a", f"train-{number}"),
            gpu_uuid="GPU-x",
            known_steps=1000,
            first_seconds=300.0,
            last_seconds=300000.0,
            memory_used_p99_bytes=peak,
            memory_used_max_bytes=peak,
            is_running=running,
            memory_limit_bytes=limit,
            systems=frozenset({system}),
        )
        for number, (peak, running, limit) in enumerate(peaks)
    ]
    facts = {each.pod: PodFacts(owner_kind="StatefulSet", owner_name="train") for each in uses}
    terms = Terms(headroom_ratio=headroom, min_history_seconds=HOUR, step_seconds=300)
    (row,) = build_advice(uses, facts, {"GPU-x": Device(memory_total_bytes=total)}, terms)
    need = max(Fraction(peak) for peak, _, _ in peaks) * (1 + headroom)
    hundredths = round(row.advised_memory_ratio * 100)
    assert 0 <= hundredths <= 100
    assert row.advised_memory_bytes <= total
    if need <= total // MIB * MIB:
        assert row.advised_memory_bytes >= need
        assert Fraction(hundredths, 100) * total >= need
        assert granted_bytes(hundredths, total) >= need
    if need > total:
        assert hundredths == 100
        assert "its peak with the headroom is more than this GPU has" in row.notes
    if hundredths > 1 and granted_bytes(99, total) > 0:
        assert granted_bytes(hundredths - 1, total) < need + MIB  # a hundredth less would not do
    assert row.memory_freed_bytes == sum(limit - row.advised_memory_bytes for _, running, limit in peaks if running)
