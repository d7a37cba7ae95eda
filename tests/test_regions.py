"""What HAMi-core counts is a container's only where the region's place and a living process both say so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.regions import CoreCount, build_core_counts
from exporter.snapshot import FoundRegion, Region, RegionSlot
from exporter.usage import Owner, Unattributed

A, B = "GPU-a", "GPU-b"
MAIN, SIDE = Owner("u1", "main", "c1"), Owner("u1", "side", "c2")
OTHER = Owner("u2", "main", "c3")
ALIVE = {41: MAIN, 42: MAIN, 51: SIDE, 61: OTHER, 71: Unattributed.HOST_PROCESS}


def found(*slots, gpus=(A,), limits=(1000,), containers=(("u1", "main"),), pids=()):
    return FoundRegion(Region(gpu_uuids=gpus, memory_limit_bytes=limits, slots=slots), frozenset(containers), frozenset(pids))


def slot(host_pid, *used):
    return RegionSlot(host_pid, used)


def counts(*regions, alive=ALIVE):
    return build_core_counts(regions, alive)


def only(used, limit=1000, owner=MAIN):
    return {(owner, A): CoreCount(memory_used_bytes=used, memory_limit_bytes=limit)}


def test_the_living_processes_of_a_container_add_up():
    assert counts(found(slot(41, 5), slot(42, 7))) == only(12)


def test_a_process_that_was_killed_counts_for_nothing():
    assert counts(found(slot(41, 5), slot(4711, 7))) == only(5)


def test_a_living_process_without_memory_is_a_measured_0():
    assert counts(found(slot(41, 0))) == only(0)


def test_a_region_without_a_living_process_is_no_ones():
    assert counts(found(slot(4711, 7))) == {}
    assert counts(found()) == {}
    assert counts(found(slot(41, 5)), alive={}) == {}


def test_a_folders_name_is_not_believed_against_its_processes():
    assert counts(found(slot(41, 5), containers=[("u2", "main")])) == {}
    assert counts(found(slot(41, 5), containers=[("u1", "side")])) == {}
    assert counts(found(slot(71, 5), containers=[("u1", "main")])) == {}


def test_a_process_is_not_believed_without_the_folders_name():
    assert counts(found(slot(41, 5), slot(61, 7), containers=())) == {}


def test_a_region_in_the_container_is_the_containers():
    assert counts(found(slot(41, 5), containers=(), pids=[42])) == only(5)
    assert counts(found(slot(41, 5), containers=(), pids=[61])) == {}


def test_containers_that_share_a_folder_share_a_region_and_each_counts_its_own():
    assert counts(found(slot(41, 5), slot(51, 7), containers=(), pids=[41, 51])) == only(5) | only(7, owner=SIDE)


@pytest.mark.parametrize("host_pid", [61, 71, None], ids=["another container's", "the host's", "not found out"])
def test_memory_of_a_process_that_may_or_may_not_be_the_containers_leaves_the_sum_unknown(host_pid):
    assert counts(found(slot(41, 5), slot(host_pid, 7))) == only(None)
    assert counts(found(slot(41, 5), slot(host_pid, 0))) == only(5)


def test_two_slots_of_one_process_leave_the_sum_unknown():
    assert counts(found(slot(41, 5), slot(41, 7))) == only(None)


def test_what_is_just_being_written_leaves_the_sum_unknown():
    assert counts(found(slot(41, 5), RegionSlot(42, None))) == only(None)
    assert counts(found(slot(41, 5), RegionSlot(4711, None))) == only(5)


def test_a_container_with_two_living_regions_has_no_number():
    assert counts(found(slot(41, 5)), found(slot(42, 7))) == {}
    assert counts(found(slot(41, 5)), found(slot(4711, 7))) == only(5)


def test_limits_of_several_gpus_stand_for_all_where_they_are_equal_and_for_none_where_they_differ():
    equal = counts(found(slot(41, 5, 6), gpus=(A, B), limits=(9, 9)))
    assert equal == {
        (MAIN, A): CoreCount(memory_used_bytes=5, memory_limit_bytes=9),
        (MAIN, B): CoreCount(memory_used_bytes=6, memory_limit_bytes=9),
    }
    for limits in ((9, 8), (9, None)):
        differ = counts(found(slot(41, 5, 6), gpus=(A, B), limits=limits))
        assert differ == {(MAIN, A): CoreCount(memory_used_bytes=5), (MAIN, B): CoreCount(memory_used_bytes=6)}


def test_a_gpu_without_a_uuid_has_no_number():
    assert counts(found(slot(41, 5, 6), gpus=(None, A), limits=(9, 9))) == only(6, 9)


PIDS = st.none() | st.sampled_from([*ALIVE, 4711])
SLOTS = st.lists(st.builds(RegionSlot, PIDS, st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9))), max_size=5)
FOUND = st.builds(
    lambda slots, containers, pids: found(*slots, gpus=(A, B), limits=(9, 9), containers=containers, pids=pids),
    SLOTS,
    st.sets(st.sampled_from([("u1", "main"), ("u1", "side"), ("u2", "main")])),
    st.sets(st.sampled_from([*ALIVE, 4711])),
)


@given(st.lists(FOUND, max_size=4))
def test_no_byte_is_shown_that_a_living_process_of_that_container_does_not_stand_for(regions):
    for (owner, gpu_uuid), count in counts(*regions).items():
        index = (A, B).index(gpu_uuid)
        sums = set()
        for region in regions:
            theirs = [each for each in region.region.slots if ALIVE.get(each.host_pid) == owner]
            if theirs and None not in (each.memory_used_bytes for each in theirs):
                sums.add(sum(each.memory_used_bytes[index] for each in theirs))
        assert count.memory_used_bytes is None or count.memory_used_bytes in sums
