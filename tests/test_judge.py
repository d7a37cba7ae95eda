"""One look at each limit of a report, and what it does to the breaches."""

import pytest

from exporter.breach import Breach, State, Verdict
from exporter.judge import ContainerKey, Judge, Resource, look
from exporter.limits import ContainerLimits, PodLimits
from exporter.usage import Use

KEY = ContainerKey("uid", "main", "a" * 64)
GPU = "GPU-0"
MEMORY, COMPUTE, UNALLOCATED = Resource.MEMORY, Resource.COMPUTE, Resource.UNALLOCATED


def judge(*, containers=None, pods=None, at=0.0, hold=10.0):
    return Judge(
        time_seconds=1000.0 + at,
        monotonic_seconds=at,
        hold_seconds=hold,
        container_breaches={(KEY, GPU, resource): breach for resource, breach in (containers or {}).items()},
        pod_breaches={("uid", GPU, resource): breach for resource, breach in (pods or {}).items()},
    )


def container(judge, limits, *, use=None, compute=None, missing=False):
    return judge.judge_container(KEY, GPU, limits, use=use, compute_mean_ratio=compute, limits_may_be_missing=missing)


def pod(judge, limits=None, *, used=None, compute=None, of=(), unallocated=Verdict.BELOW, missing=False):
    return judge.judge_pod(
        "uid",
        GPU,
        limits or PodLimits(),
        memory_used_bytes=used,
        compute_mean_ratio=compute,
        of_containers=of,
        unallocated=unallocated,
        limits_may_be_missing=missing,
    )


def verdicts(breaches):
    return {resource: breach.verdict for resource, breach in breaches.items()}


def limits(memory=None, process=None, compute=None):
    tightest = memory if memory is not None else process
    return ContainerLimits(
        memory_bytes=tightest, container_memory_bytes=memory, process_memory_bytes=process, container_compute_ratio=compute
    )


@pytest.mark.parametrize(
    ("limit", "used", "missing", "verdict"),
    [
        (10, 11, False, Verdict.ABOVE),
        (10, 10, False, Verdict.BELOW),
        (10, 0, False, Verdict.BELOW),
        (0, 1, False, Verdict.ABOVE),
        (10, None, False, Verdict.UNKNOWN),
        (None, 11, False, Verdict.NO_LIMIT),
        (None, None, False, Verdict.NO_LIMIT),
        (10, 11, True, Verdict.ABOVE),
        (10, 10, True, Verdict.UNKNOWN),
        (10, None, True, Verdict.UNKNOWN),
        (None, 11, True, Verdict.UNKNOWN),
    ],
)
def test_a_look_says_above_whatever_is_missing_and_below_only_when_nothing_is(limit, used, missing, verdict):
    assert look(limit, used, limits_may_be_missing=missing) is verdict


def test_a_container_is_judged_only_where_it_has_a_limit():
    assert container(judge(), limits(), use=Use(memory_used_bytes=5), compute=0.5) == {}
    assert set(container(judge(), limits(memory=10), use=Use(memory_used_bytes=5), compute=0.5)) == {MEMORY}
    assert set(container(judge(), limits(compute=0.5), use=Use(memory_used_bytes=5), compute=0.5)) == {COMPUTE}


def test_a_limit_that_goes_away_ends_its_breach_and_keeps_its_counters():
    before = Breach(state=State.EXCEEDED, verdict=Verdict.ABOVE, since_seconds=990.0, exceeded_seconds_total=7.0, breaches_total=1)
    after = container(judge(containers={MEMORY: before}, at=5.0), limits(), use=Use(memory_used_bytes=5))
    assert set(after) == {MEMORY}
    assert (after[MEMORY].state, after[MEMORY].verdict, after[MEMORY].breaches_total) == (State.WITHIN, Verdict.NO_LIMIT, 1)


@pytest.mark.parametrize(
    ("use", "verdict"),
    [
        (Use(memory_used_bytes=9, processes=2, largest_process_bytes=5), Verdict.BELOW),
        (Use(memory_used_bytes=9, processes=2, largest_process_bytes=6), Verdict.ABOVE),
        (Use(memory_used_bytes=11, processes=3, largest_process_bytes=4), Verdict.ABOVE),
        (Use(memory_used_bytes=None, processes=1, largest_process_bytes=None), Verdict.UNKNOWN),
        (None, Verdict.UNKNOWN),
    ],
    ids=["within both", "one process above", "their sum above", "hidden", "not known"],
)
def test_a_container_is_above_when_its_sum_or_one_of_its_processes_is(use, verdict):
    assert verdicts(container(judge(), limits(memory=10, process=5), use=use)) == {MEMORY: verdict}


def test_a_limit_on_each_process_alone_says_nothing_of_their_sum():
    use = Use(memory_used_bytes=100, processes=20, largest_process_bytes=5)
    assert verdicts(container(judge(), limits(process=5), use=use)) == {MEMORY: Verdict.BELOW}


def test_memory_has_a_hold_and_a_mean_has_none():
    rising = container(judge(), limits(memory=10, compute=0.5), use=Use(memory_used_bytes=11), compute=0.6)
    assert (rising[MEMORY].exceeded, rising[COMPUTE].exceeded) == (False, True)
    early = container(judge(containers=rising, at=9.0), limits(memory=10), use=Use(memory_used_bytes=11))
    assert early[MEMORY].exceeded is False
    held = container(judge(containers=rising, at=10.0), limits(memory=10), use=Use(memory_used_bytes=11))
    assert held[MEMORY].exceeded is True
    assert held[MEMORY].since_seconds == 1000.0


def test_a_container_below_a_limit_is_not_fine_while_another_limit_may_be_missing():
    of_container = container(judge(), limits(memory=10, process=5, compute=0.5), use=Use(memory_used_bytes=1), compute=0.1, missing=True)
    assert verdicts(of_container) == {MEMORY: Verdict.UNKNOWN, COMPUTE: Verdict.UNKNOWN}
    assert verdicts(container(judge(), limits(process=5), use=Use(memory_used_bytes=1), missing=True)) == {MEMORY: Verdict.UNKNOWN}
    assert verdicts(container(judge(), limits(memory=10), use=Use(memory_used_bytes=1), missing=True)) == {MEMORY: Verdict.UNKNOWN}


def test_a_pod_below_its_limits_is_not_fine_while_another_limit_may_be_missing():
    of_pod = pod(judge(), PodLimits(memory_bytes=10, compute_ratio=0.5), used=1, compute=0.1, missing=True)
    assert verdicts(of_pod) == {MEMORY: Verdict.UNKNOWN, COMPUTE: Verdict.UNKNOWN, UNALLOCATED: Verdict.BELOW}


def test_a_pods_memory_has_a_hold_and_its_mean_has_none():
    breaches = pod(judge(), PodLimits(memory_bytes=10, compute_ratio=0.5), used=11, compute=0.6)
    assert (breaches[MEMORY].exceeded, breaches[COMPUTE].exceeded) == (False, True)


def test_what_was_judged_is_kept_and_what_was_not_is_gone():
    other = Breach(state=State.EXCEEDED, verdict=Verdict.ABOVE)
    first = judge(containers={MEMORY: other}, pods={MEMORY: other, UNALLOCATED: other})
    assert (first.container_breaches, first.pod_breaches) == ({}, {})
    breaches = container(first, limits(memory=10), use=Use(memory_used_bytes=1))
    assert first.container_breaches == {(KEY, GPU, MEMORY): breaches[MEMORY]}
    of_pod = pod(first, PodLimits(memory_bytes=10), used=1)
    assert first.pod_breaches == {("uid", GPU, resource): breach for resource, breach in of_pod.items()}


def test_a_pod_without_limits_is_judged_for_what_no_one_gave_it_alone():
    assert verdicts(pod(judge(), used=5, compute=0.5)) == {UNALLOCATED: Verdict.BELOW}
    assert verdicts(pod(judge(), used=5, unallocated=Verdict.ABOVE)) == {UNALLOCATED: Verdict.ABOVE}
    assert pod(judge(), used=5, unallocated=None) == {}


def test_a_pod_is_above_while_any_of_its_containers_is():
    above, below, unknown = (Breach(verdict=verdict) for verdict in (Verdict.ABOVE, Verdict.BELOW, Verdict.UNKNOWN))
    own = PodLimits(memory_bytes=100, compute_ratio=0.5)

    def memory(*of, used=50):
        return pod(judge(), own, used=used, compute=0.1, of=[{MEMORY: each} for each in of])[MEMORY].verdict

    assert memory(below, above) is Verdict.ABOVE
    assert memory(below, unknown) is Verdict.UNKNOWN
    assert memory(below, below) is Verdict.BELOW
    assert memory(below, used=101) is Verdict.ABOVE
    assert memory(unknown, above, used=None) is Verdict.ABOVE
    assert pod(judge(), own, used=50, compute=0.6, of=[{MEMORY: above}])[COMPUTE].verdict is Verdict.ABOVE


def test_a_pod_whose_only_limits_are_its_containers_is_judged_by_theirs():
    of_containers = [{MEMORY: Breach(verdict=Verdict.BELOW)}, {}]
    assert verdicts(pod(judge(), used=5, of=of_containers)) == {MEMORY: Verdict.BELOW, UNALLOCATED: Verdict.BELOW}


def test_a_pod_that_had_a_limit_stays_judged():
    before = Breach(state=State.EXCEEDED, verdict=Verdict.ABOVE, since_seconds=990.0, breaches_total=3)
    after = pod(judge(pods={COMPUTE: before}, at=5.0))
    assert verdicts(after) == {COMPUTE: Verdict.NO_LIMIT, UNALLOCATED: Verdict.BELOW}
    assert after[COMPUTE].breaches_total == 3


def test_use_of_what_no_one_gave_has_the_hold_of_memory():
    first = pod(judge(), unallocated=Verdict.ABOVE)
    assert first[UNALLOCATED].exceeded is False
    assert pod(judge(pods=first, at=9.0), unallocated=Verdict.ABOVE)[UNALLOCATED].exceeded is False
    assert pod(judge(pods=first, at=10.0), unallocated=Verdict.ABOVE)[UNALLOCATED].exceeded is True
