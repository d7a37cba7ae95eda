"""What claims add up to."""

from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import Claim, Scope
from exporter.limits import build_container_limits, build_pod_limits

CONTAINER, PROCESS, POD = Scope.CONTAINER, Scope.PROCESS, Scope.POD


def claim(system="kai", *, scope=CONTAINER, memory=None, compute=None, enforced=False, **more):
    container = "" if scope is POD else "main"
    return Claim(
        system=system,
        gpu_uuid="GPU-0",
        container=container,
        scope=scope,
        memory_bytes=memory,
        compute_ratio=compute,
        enforced=enforced,
        **more,
    )


def test_without_a_claim_there_is_no_limit():
    limits = build_container_limits([])
    assert (limits.memory_bytes, limits.compute_ratio, limits.governing) == (None, None, None)


def test_the_tightest_claim_is_the_limit_in_each_dimension():
    limits = build_container_limits([claim("kai", memory=10, compute=0.5), claim("container_env", memory=7, compute=0.9)])
    assert (limits.memory_bytes, limits.compute_ratio, limits.governing.system) == (7, 0.5, "container_env")


def test_a_limit_of_each_process_counts_only_where_the_container_has_none():
    process, container = claim("mps", scope=PROCESS, memory=5, compute=0.25), claim("mps", memory=10)
    assert build_container_limits([process, container]).memory_bytes == 10
    assert build_container_limits([process, container]).process_memory_bytes == 5
    assert build_container_limits([process]).memory_bytes == 5
    assert build_container_limits([process, container]).compute_ratio == 0.25
    assert build_container_limits([process, container]).container_compute_ratio is None


def test_a_claim_that_takes_anothers_place_is_the_limit_even_when_it_is_larger():
    kai = claim("kai", memory=4096, compute=0.27)
    walled = claim("hami_core", memory=4147, enforced=True, supersedes=frozenset({"kai"}))
    limits = build_container_limits([kai, walled])
    assert (limits.memory_bytes, limits.compute_ratio, limits.governing) == (4147, 0.27, walled)


def test_a_third_tighter_claim_still_wins_over_one_that_takes_anothers_place():
    walled = claim("hami_core", memory=4147, enforced=True, supersedes=frozenset({"kai"}))
    limits = build_container_limits([claim("kai", memory=4096), walled, claim("container_env", memory=100)])
    assert limits.memory_bytes == 100


def test_a_pods_limit_is_the_sum_of_its_containers():
    containers = [build_container_limits([claim(memory=3, compute=0.25)]), build_container_limits([claim(memory=4, compute=0.5)])]
    limits = build_pod_limits([], [*containers, build_container_limits([])])
    assert (limits.memory_bytes, limits.compute_ratio) == (7, 0.75)


def test_the_pods_own_claim_comes_before_the_sum():
    containers = [build_container_limits([claim(memory=3)])]
    assert build_pod_limits([claim(scope=POD, memory=9), claim(scope=POD, memory=8)], containers).memory_bytes == 8


def test_limits_of_processes_make_no_limit_of_a_pod():
    assert build_pod_limits([], [build_container_limits([claim(scope=PROCESS, memory=5)])]).memory_bytes is None


def test_one_unlimited_container_takes_the_pods_compute_limit_away():
    containers = [build_container_limits([claim(memory=1, compute_unlimited=True)]), build_container_limits([claim(compute=0.5)])]
    limits = build_pod_limits([], containers)
    assert (limits.memory_bytes, limits.compute_ratio) == (1, None)


def test_a_pods_own_compute_claims_come_before_the_sum_and_the_tightest_counts():
    containers = [build_container_limits([claim(compute=0.5)]), build_container_limits([claim(compute_unlimited=True)])]
    pod_claims = [claim(scope=POD, compute=0.75), claim(scope=POD, compute=0.25)]
    assert build_pod_limits(pod_claims, containers).compute_ratio == 0.25


def test_a_container_with_a_compute_limit_is_not_unlimited_whatever_else_is_said():
    limits = build_container_limits([claim("hami", compute_unlimited=True), claim("container_env", compute=0.5)])
    assert limits.compute_unlimited is False
    assert build_container_limits([claim("hami", compute_unlimited=True)]).compute_unlimited is True


def test_the_claim_that_governs_is_memorys_else_computes_else_the_first_by_name():
    memory, compute = claim("volcano", memory=10), claim("container_env", compute=0.5)
    assert build_container_limits([compute, memory]).governing is memory
    assert build_container_limits([claim("a"), compute]).governing is compute
    assert build_container_limits([claim("kai"), claim("hami")]).governing.system == "hami"


def test_pods_and_containers_without_amounts_have_no_limit():
    limits = build_pod_limits([claim(scope=POD)], [build_container_limits([claim()])])
    assert (limits.memory_bytes, limits.compute_ratio) == (None, None)


AMOUNTS = st.none() | st.integers(0, 1 << 40)
CLAIMS = st.builds(
    lambda system, scope, memory, compute: claim(system, scope=scope, memory=memory, compute=compute),
    st.sampled_from(["kai", "mps", "container_env"]),
    st.just(CONTAINER),
    AMOUNTS,
    st.none() | st.floats(0, 1),
)


@given(st.lists(CLAIMS, max_size=6), CLAIMS)
def test_adding_a_claim_never_raises_a_limit(claims, one_more):
    before, after = build_container_limits(claims), build_container_limits([*claims, one_more])
    if before.memory_bytes is not None:
        assert after.memory_bytes <= before.memory_bytes
    if before.compute_ratio is not None:
        assert after.compute_ratio <= before.compute_ratio


@given(st.lists(CLAIMS, max_size=6).flatmap(lambda claims: st.tuples(st.just(claims), st.permutations(claims))))
def test_the_order_of_claims_changes_no_limit(orders):
    one, other = orders
    first, second = build_container_limits(one), build_container_limits(other)
    assert (first.memory_bytes, first.compute_ratio) == (second.memory_bytes, second.compute_ratio)
