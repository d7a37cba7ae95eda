"""Whose a process is, and that nothing is counted twice or lost."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.snapshot import (
    CgroupRef,
    Container,
    Gpu,
    GpuProcess,
    GpuReading,
    Pod,
    ProcessBusy,
    ProcessFacts,
    ProcfsReading,
)
from exporter.usage import BusySeconds, Owner, Owners, Unattributed, build_gpu_usage, build_identities

A, B, MAIN_OF_A, SIDE_OF_A, MAIN_OF_B = "uid-a", "uid-b", "a" * 64, "c" * 64, "b" * 64
OWN_PID = 7


def pod(uid, containers, namespace="team-a", **more):
    return Pod(
        uid=uid,
        namespace=namespace,
        name=f"pod-{uid}",
        containers=tuple(Container(name=name, container_id=container_id) for name, container_id in containers.items()),
        **more,
    )


PODS = (pod(A, {"main": MAIN_OF_A, "side": SIDE_OF_A}), pod(B, {"main": MAIN_OF_B}))


def facts(pid, *refs, comm="python", start=100):
    return ProcessFacts(pid=pid, start_time_ticks=start, comm=comm, cgroup=tuple(CgroupRef(*ref) for ref in refs))


def owner(process, pods=PODS, system_namespaces=("kube-system",)):
    return Owners(pods, frozenset(system_namespaces)).owner_of(process, OWN_PID)


def test_a_process_belongs_to_the_container_that_its_cgroup_names():
    assert owner(facts(1, (A, MAIN_OF_A))) == Owner(A, "main", MAIN_OF_A)
    assert owner(facts(1, (A, SIDE_OF_A))) == Owner(A, "side", SIDE_OF_A)


def test_a_process_without_a_pods_cgroup_is_the_hosts():
    assert owner(facts(1)) is Unattributed.HOST_PROCESS


def test_a_process_that_is_gone_has_no_owner():
    assert owner(None) is Unattributed.PROCESS_GONE


def test_the_exporter_knows_itself():
    assert owner(facts(OWN_PID, (A, MAIN_OF_A))) is Unattributed.EXPORTER


@pytest.mark.parametrize(
    "refs",
    [(("uid-x", MAIN_OF_A),), ((A, "d" * 64),), ((A, None),), ((A, MAIN_OF_B),), ((None, "d" * 64),)],
    ids=["unknown pod", "id not in the status yet", "the pod's own cgroup", "another pod's container", "unknown id alone"],
)
def test_what_names_no_known_container_is_unknown(refs):
    assert owner(facts(1, *refs)) is Unattributed.UNKNOWN_CONTAINER


def test_a_container_id_alone_is_enough():
    assert owner(facts(1, (None, MAIN_OF_B))) == Owner(B, "main", MAIN_OF_B)


def test_a_tenant_cannot_name_another_pod_in_its_own_cgroup():
    assert owner(facts(1, (A, MAIN_OF_A), (B, MAIN_OF_B))) == Owner(A, "main", MAIN_OF_A)


def test_a_pod_in_a_pod_that_this_node_does_not_know_is_looked_up_inside():
    assert owner(facts(1, ("uid-of-an-outer-cluster", "d" * 64), (B, MAIN_OF_B))) == Owner(B, "main", MAIN_OF_B)


def test_a_static_pod_is_known_by_its_manifests_hash():
    mirror = pod("uid-m", {"main": MAIN_OF_A}, annotations={"kubernetes.io/config.hash": "f" * 32})
    assert owner(facts(1, ("f" * 32, MAIN_OF_A)), pods=(mirror,)) == Owner("uid-m", "main", MAIN_OF_A)


@pytest.mark.parametrize("claimed", ["f" * 32, "uid-m", B, "uid-x"], ids=["static pod's hash", "mirror's uid", "another's uid", "unknown"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_tenant_that_writes_a_manifests_hash_takes_and_hides_no_ones_processes(claimed, order):
    mirror = pod("uid-m", {"main": "e" * 64}, namespace="kube-system", annotations={"kubernetes.io/config.hash": "f" * 32})
    thief = pod("uid-t", {"main": "d" * 64}, annotations={"kubernetes.io/config.hash": claimed})
    pods = (thief, *PODS, mirror)[::order]
    assert owner(facts(1, ("f" * 32, "e" * 64)), pods=pods) == Owner("uid-m", "main", "e" * 64)
    assert owner(facts(1, (B, MAIN_OF_B)), pods=pods) == Owner(B, "main", MAIN_OF_B)
    assert owner(facts(1, ("uid-t", "d" * 64)), pods=pods) == Owner("uid-t", "main", "d" * 64)
    outside = facts(1, ("uid-x", "9" * 64), (B, MAIN_OF_B))
    assert owner(outside, pods=pods) == Owner(B, "main", MAIN_OF_B)


def test_a_tenant_that_writes_a_known_pods_hash_cannot_nest_itself_into_it():
    thief = pod("uid-t", {"main": "d" * 64}, annotations={"kubernetes.io/config.hash": A})
    assert owner(facts(1, (A, MAIN_OF_A), ("uid-t", "d" * 64)), pods=(*PODS, thief)) == Owner(A, "main", MAIN_OF_A)


@pytest.mark.parametrize(
    ("refs", "namespace", "expected"),
    [
        ((), "team-a", Unattributed.MPS_SERVER),
        (((A, MAIN_OF_A),), "kube-system", Unattributed.MPS_SERVER),
        (((A, MAIN_OF_A),), "team-a", Owner(A, "main", MAIN_OF_A)),
    ],
    ids=["on the host", "in a system namespace", "a tenant's process of that name"],
)
def test_the_mps_server_is_believed_where_tenants_cannot_be(refs, namespace, expected):
    pods = (pod(A, {"main": MAIN_OF_A}, namespace=namespace),)
    assert owner(facts(1, *refs, comm="nvidia-cuda-mps"), pods=pods) == expected


def usage_of(processes, of_proc, *, busy=None, previous=()):
    procfs = ProcfsReading(own_pid=OWN_PID, processes={process.pid: process for process in of_proc})
    previous = dict(previous)
    pids = {process.pid for process in processes} | {entry.pid for entry in busy or ()}
    identities = build_identities(pids, procfs, Owners(PODS, frozenset()), previous)
    reading = GpuReading(gpu=Gpu(gpu_uuid="GPU-0"), up=True, processes=tuple(processes), busy=busy)
    return build_gpu_usage(reading, procfs, identities, previous), identities


def busy(pid, sm_seconds):
    return ProcessBusy(pid=pid, sm_seconds=sm_seconds, memory_bandwidth_seconds=0, encoder_seconds=0, decoder_seconds=0)


def test_processes_of_a_container_add_up():
    usage, _ = usage_of(
        [GpuProcess(pid=1, memory_used_bytes=10), GpuProcess(pid=2, memory_used_bytes=5)],
        [facts(1, (A, MAIN_OF_A)), facts(2, (A, MAIN_OF_A))],
    )
    use = usage.by_owner[Owner(A, "main", MAIN_OF_A)]
    assert (use.memory_used_bytes, use.processes, use.largest_process_bytes) == (15, 2, 10)


def test_the_largest_process_of_a_container_is_told_even_beside_one_of_zero():
    usage, _ = usage_of(
        [GpuProcess(pid=1, memory_used_bytes=0), GpuProcess(pid=2, memory_used_bytes=0)],
        [facts(1, (A, MAIN_OF_A)), facts(2, (A, MAIN_OF_A))],
    )
    use = usage.by_owner[Owner(A, "main", MAIN_OF_A)]
    assert (use.memory_used_bytes, use.processes, use.largest_process_bytes) == (0, 2, 0)


def test_a_hidden_process_leaves_the_largest_unknown():
    usage, _ = usage_of([GpuProcess(pid=1, memory_used_bytes=None)], [facts(1, (A, MAIN_OF_A))])
    assert usage.by_owner[Owner(A, "main", MAIN_OF_A)].largest_process_bytes is None


def test_busy_time_without_a_container_is_no_ones():
    processes = [GpuProcess(pid=1, memory_used_bytes=1), GpuProcess(pid=2, memory_used_bytes=1)]
    usage, _ = usage_of(processes, [facts(1, (A, MAIN_OF_A)), facts(2)], busy=[busy(1, 1.0), busy(2, 2.0), busy(3, 4.0)])
    assert {owner: seconds.sm for owner, seconds in usage.busy_by_owner.items()} == {Owner(A, "main", MAIN_OF_A): 1.0}


def test_each_engines_time_adds_up():
    one = BusySeconds(sm=1.0, memory_bandwidth=2.0, encoder=3.0, decoder=4.0)
    assert one + one == BusySeconds(sm=2.0, memory_bandwidth=4.0, encoder=6.0, decoder=8.0)


def test_a_container_without_an_id_owns_no_process_without_one():
    waiting = pod(A, {"main": None})
    assert owner(facts(1, (A, None)), pods=(waiting,)) is Unattributed.UNKNOWN_CONTAINER
    assert owner(facts(1, (None, None)), pods=(waiting,)) is Unattributed.UNKNOWN_CONTAINER


def test_a_process_named_as_the_mps_server_in_no_container_that_is_known_is_unknown():
    assert owner(facts(1, ("uid-x", "d" * 64), comm="nvidia-cuda-mps")) is Unattributed.UNKNOWN_CONTAINER


def test_a_known_pods_own_cgroup_ends_the_search():
    assert owner(facts(1, (A, None), (B, MAIN_OF_B))) is Unattributed.UNKNOWN_CONTAINER
    assert owner(facts(1, (None, "d" * 64), (B, MAIN_OF_B))) is Unattributed.UNKNOWN_CONTAINER


def test_two_containers_of_a_pod_do_not_share_a_total():
    usage, _ = usage_of(
        [GpuProcess(pid=1, memory_used_bytes=10), GpuProcess(pid=2, memory_used_bytes=5)],
        [facts(1, (A, MAIN_OF_A)), facts(2, (A, SIDE_OF_A))],
    )
    assert {owner.container: use.memory_used_bytes for owner, use in usage.by_owner.items()} == {"main": 10, "side": 5}


def test_a_hidden_process_makes_its_containers_use_unknown_and_the_rest_partly_hidden():
    usage, _ = usage_of(
        [GpuProcess(pid=1, memory_used_bytes=None), GpuProcess(pid=2, memory_used_bytes=5)],
        [facts(1, (A, MAIN_OF_A)), facts(2, (A, MAIN_OF_A))],
    )
    use = usage.by_owner[Owner(A, "main", MAIN_OF_A)]
    assert (use.memory_used_bytes, use.processes) == (None, 2)
    assert usage.unattributed_bytes == {Unattributed.PARTLY_HIDDEN: 5}


def test_a_gpu_whose_processes_are_unknown_has_no_usage():
    reading = GpuReading(gpu=Gpu(gpu_uuid="GPU-0"), up=True, processes=None)
    assert build_gpu_usage(reading, ProcfsReading(own_pid=1, processes={}), {}, {}) is None


def test_what_a_process_did_before_it_ended_is_its_containers():
    _, before = usage_of([GpuProcess(pid=1, memory_used_bytes=1)], [facts(1, (A, MAIN_OF_A))])
    usage, _ = usage_of([], [], busy=(busy(1, 0.5),), previous=before)
    assert usage.busy_by_owner == {Owner(A, "main", MAIN_OF_A): BusySeconds(sm=0.5)}
    assert usage.by_owner == {}


def test_what_a_pid_did_while_it_changed_hands_is_no_ones():
    _, before = usage_of([GpuProcess(pid=1, memory_used_bytes=1)], [facts(1, (A, MAIN_OF_A), start=100)])
    usage, _ = usage_of(
        [GpuProcess(pid=1, memory_used_bytes=2)], [facts(1, (B, MAIN_OF_B), start=900)], busy=(busy(1, 0.5),), previous=before
    )
    assert usage.busy_by_owner == {}
    assert set(usage.by_owner) == {Owner(B, "main", MAIN_OF_B)}


def test_a_gone_process_keeps_its_memory_without_its_owner():
    _, before = usage_of([GpuProcess(pid=1, memory_used_bytes=1)], [facts(1, (A, MAIN_OF_A))])
    usage, _ = usage_of([GpuProcess(pid=1, memory_used_bytes=1)], [], previous=before)
    assert usage.unattributed_bytes == {Unattributed.PROCESS_GONE: 1}


REFS = st.sampled_from([(A, MAIN_OF_A), (A, SIDE_OF_A), (B, MAIN_OF_B), ("uid-x", "d" * 64), (None, MAIN_OF_B), (A, None)])


@given(
    st.dictionaries(
        st.integers(1, 40),
        st.tuples(st.none() | st.integers(0, 1 << 50), st.none() | st.lists(REFS, max_size=3)),
        max_size=30,
    )
)
def test_containers_and_unattributed_add_up_to_the_processes(world):
    processes = [GpuProcess(pid=pid, memory_used_bytes=memory) for pid, (memory, _) in world.items()]
    usage, _ = usage_of(processes, [facts(pid, *refs) for pid, (_, refs) in world.items() if refs is not None])
    of_containers = sum(use.memory_used_bytes or 0 for use in usage.by_owner.values())
    assert of_containers + sum(usage.unattributed_bytes.values()) == sum(process.memory_used_bytes or 0 for process in processes)
    counted = Counter(use.processes for use in usage.by_owner.values())
    assert sum(number * times for number, times in counted.items()) <= len(processes)


# --- what one process does is its own ---


def reading(*busy, processes=()):
    return GpuReading(
        gpu=Gpu(gpu_uuid="GPU-0"),
        up=True,
        processes=tuple(GpuProcess(pid=pid, memory_used_bytes=memory) for pid, memory in processes),
        busy=tuple(
            ProcessBusy(pid=pid, sm_seconds=sm, memory_bandwidth_seconds=sm * 10, encoder_seconds=sm * 100, decoder_seconds=sm * 1000)
            for pid, sm in busy
        ),
    )


def usage(gpu, present, before=()):
    """Answer the use of one GPU by the processes that are there, after those that were there before."""
    procfs = ProcfsReading(own_pid=OWN_PID, processes={each.pid: each for each in present})
    owners = Owners(PODS, frozenset())
    previous = build_identities(
        [each.pid for each in before], ProcfsReading(own_pid=OWN_PID, processes={each.pid: each for each in before}), owners, {}
    )
    pids = {process.pid for process in gpu.processes} | {entry.pid for entry in gpu.busy}
    return build_gpu_usage(gpu, procfs, build_identities(pids, procfs, owners, previous), previous)


def test_each_engines_time_is_its_own_and_adds_up_over_a_containers_processes():
    of_a = [facts(1, (A, MAIN_OF_A)), facts(2, (A, MAIN_OF_A))]
    assert usage(reading((1, 1.0), (2, 2.0)), of_a).busy_by_owner == {
        Owner(A, "main", MAIN_OF_A): BusySeconds(sm=3.0, memory_bandwidth=30.0, encoder=300.0, decoder=3000.0)
    }


def test_time_that_is_no_ones_does_not_hide_the_time_of_others():
    present = [facts(1), facts(2, (A, MAIN_OF_A), start=200), facts(4, (B, MAIN_OF_B))]
    # 1 is the host's, 2 was another process a moment ago, 3 is gone and was never known.
    found = usage(reading((1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)), present, before=[facts(2, (B, MAIN_OF_B), start=100)])
    assert {owner.pod_uid: busy.sm for owner, busy in found.busy_by_owner.items()} == {B: 1.0}


def test_a_process_that_has_just_ended_takes_its_last_time_with_it_to_its_container():
    found = usage(reading((1, 0.5)), [], before=[facts(1, (A, MAIN_OF_A))])
    assert {owner.pod_uid: busy.sm for owner, busy in found.busy_by_owner.items()} == {A: 0.5}


def test_memory_without_an_owner_adds_up_by_reason():
    found = usage(reading(processes=[(1, 3), (2, 4), (OWN_PID, 5), (9, 6)]), [facts(1), facts(2), facts(OWN_PID)])
    assert found.unattributed_bytes == {Unattributed.HOST_PROCESS: 7, Unattributed.EXPORTER: 5, Unattributed.PROCESS_GONE: 6}
    assert found.by_owner == {}


def test_a_container_that_has_no_id_yet_is_no_ones_owner():
    waiting = Pod(uid="uid-w", namespace="team-a", name="waiting", containers=(Container(name="main"),))
    assert owner(facts(1, ("uid-w", None)), pods=(waiting,)) is Unattributed.UNKNOWN_CONTAINER
