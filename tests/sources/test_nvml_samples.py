"""The seconds that the driver's utilization samples come to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.snapshot import ProcessBusy
from exporter.sources.nvml_samples import Moment, Sample, SampleMemory, is_doubtful, is_outdated, prime, reconsider, step

PID_MAX = 4194304
SECOND = 1_000_000
# Microseconds of the driver's clock, which counts from anywhere.
T = 5_000_000_000


def moment(seconds, number=None, wall=1_800_000_000.0):
    return Moment(number if number is not None else int(seconds), float(seconds), wall + seconds)


def sample(pid, seconds, sm=50, **others):
    others = {"memory_bandwidth_percent": 0, "encoder_percent": 0, "decoder_percent": 0, **others}
    return Sample(pid=pid, time_stamp=T + round(seconds * SECOND), sm_percent=sm, **others)


def primed(*samples, at=0):
    return prime(samples, moment(at), PID_MAX).memory


def advance(memory, samples, at, listed_pids=None):
    return step(memory, samples, moment(at), listed_pids=listed_pids, pid_max=PID_MAX)


def sm_seconds(taken):
    return {entry.pid: pytest.approx(entry.sm_seconds) for entry in taken.busy}


# --- weights ---


def test_a_sample_weighs_the_time_since_the_processs_previous_one_across_readings():
    memory = primed(sample(7, 0))
    first = advance(memory, [sample(7, 2)], at=5)
    second = advance(first.memory, [sample(7, 5)], at=10)
    assert sm_seconds(first) == {7: 1.0}
    assert sm_seconds(second) == {7: 1.5}


def test_of_several_samples_none_weighs_more_than_their_largest_spacing():
    # The process slept from 0 to 10; its samples of this answer lie half a second apart.
    memory = primed(sample(7, 0))
    assert sm_seconds(advance(memory, [sample(7, 10), sample(7, 10.5), sample(7, 11)], at=12)) == {7: 0.75}


def test_a_single_sample_weighs_no_more_than_the_time_since_the_previous_reading():
    memory = primed(sample(7, 0), at=0)
    asleep = advance(memory, [], at=55).memory
    assert sm_seconds(advance(asleep, [sample(7, 60)], at=60)) == {7: 2.5}


def test_a_processs_very_first_sample_weighs_a_sixth_of_a_second():
    memory = primed(sample(8, 0))
    assert sm_seconds(advance(memory, [sample(7, 3, sm=60)], at=5)) == {7: 0.1}
    assert sm_seconds(advance(memory, [sample(7, 3, sm=60), sample(7, 4, sm=60)], at=5)) == {7: 0.7}


def test_a_processs_very_first_sample_weighs_no_more_than_its_spacing():
    memory = primed(sample(8, 0))
    assert sm_seconds(advance(memory, [sample(7, 3, sm=100), sample(7, 3.125, sm=100)], at=5)) == {7: 0.25}


def test_two_samples_with_one_stamp_count_once():
    memory = primed(sample(7, 0))
    assert sm_seconds(advance(memory, [sample(7, 1), sample(7, 2), sample(7, 2)], at=5)) == {7: 1.0}


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_samples_with_one_stamp_the_busier_counts(order):
    memory = primed(sample(7, 0))
    answer = [sample(7, 1, sm=80), sample(7, 1, sm=0), sample(7, 2, sm=80), sample(7, 2, sm=0)]
    assert sm_seconds(advance(memory, answer[::order], at=5)) == {7: 1.6}


def test_the_order_of_an_answer_does_not_matter():
    memory = primed(sample(7, 0), sample(8, 0))
    answer = [sample(7, 2, sm=10), sample(8, 1), sample(7, 1, sm=90), sample(7, 4, sm=20)]
    assert advance(memory, answer, at=5) == advance(memory, answer[::-1], at=5)


def test_all_engines_are_told():
    memory = primed(sample(7, 0))
    answer = [sample(7, 2, sm=80, memory_bandwidth_percent=40, encoder_percent=20, decoder_percent=10)]
    assert advance(memory, answer, at=5).busy == (
        ProcessBusy(pid=7, sm_seconds=1.6, memory_bandwidth_seconds=0.8, encoder_seconds=0.4, decoder_seconds=0.2),
    )


@given(st.lists(st.integers(1, 60), max_size=12), st.integers(1, 100))
def test_a_process_that_is_always_busy_is_so_whenever_the_driver_is_read(gaps, percent):
    # A sample every 1/6 s; a reading after each of the gaps, counted in samples.
    memory, at, total = primed(sample(7, 0)), 0, 0.0
    for gap in gaps:
        answer = [sample(7, tick / 6, sm=percent) for tick in range(at + 1, at + gap + 1)]
        at += gap
        taken = step(memory, answer, moment(at / 6, number=0), listed_pids={7}, pid_max=PID_MAX)
        memory, total = taken.memory, total + taken.busy[0].sm_seconds
        assert taken.dropped == {}
    assert total == pytest.approx(at / 6 * percent / 100, abs=1e-4)


@given(
    st.lists(
        st.builds(
            Sample,
            st.sampled_from([0, 7, 8, 2**32 - 1]),
            st.integers(0, 2**64 - 1) | st.integers(T - SECOND, T + 10 * SECOND),
            *[st.integers(0, 110)] * 4,
        )
    )
)
def test_whatever_the_driver_says_a_process_is_busy_for_no_longer_than_time_has_passed(samples):
    memory = primed(sample(7, 0), sample(8, 0))
    taken = advance(memory, samples, at=5, listed_pids={7, 8})
    credible_seconds = (taken.memory.last_seen - memory.last_seen) / SECOND
    for entry in taken.busy:
        assert 0 <= entry.sm_seconds <= max(credible_seconds, 5) + 1e-6
    assert taken.memory.last_seen >= memory.last_seen
    old = sum(0 < each.time_stamp <= memory.last_seen for each in samples)
    assert sum(taken.dropped.values()) <= len(samples) - old


# --- stamps ---


def test_a_first_answer_is_only_remembered():
    taken = prime([sample(7, 0), sample(8, 3)], moment(0), PID_MAX)
    assert taken.busy is None
    assert taken.memory.last_seen == T + 3 * SECOND
    assert taken.memory.newest_of_pid == {7: T, 8: T + 3 * SECOND}


def test_a_first_answer_that_is_empty_tells_that_nobody_ran():
    taken = prime([], moment(0), PID_MAX)
    assert (taken.busy, taken.memory.last_seen) == ((), 0)
    assert sm_seconds(advance(taken.memory, [sample(7, 0), sample(7, 0.5)], at=5)) == {7: pytest.approx(0.25 + 0.5 / 6)}


def test_old_samples_of_a_first_answer_may_be_days_apart():
    taken = prime([sample(7, 0), sample(8, 200_000), sample(9, 400_000)], moment(0), PID_MAX)
    assert (taken.memory.last_seen, taken.dropped) == (T + 400_000 * SECOND, {})


@pytest.mark.parametrize("absurd", [2**63, 2**64 - 1, 4_000_000_000 * SECOND])
def test_an_absurd_stamp_in_the_first_answer_is_not_taken_for_the_newest(absurd):
    taken = prime([sample(7, 0), sample(8, 0)._replace(time_stamp=absurd)], moment(0), PID_MAX)
    assert (taken.memory.last_seen, taken.dropped) == (T, {"bad_timestamp": 1})


def test_an_absurd_stamp_is_dropped_each_time_and_silences_nobody():
    memory = primed(sample(7, 0))
    absurd = sample(7, 0)._replace(time_stamp=2**62)
    for at in (5, 10, 15):
        taken = advance(memory, [sample(7, at), absurd], at=at)
        assert taken.dropped == {"bad_timestamp": 1}
        assert sm_seconds(taken) == {7: 2.5}
        memory = taken.memory
    alone = advance(memory, [absurd], at=20)
    assert (alone.busy, alone.dropped, alone.memory.last_seen) == ((), {"bad_timestamp": 1}, T + 15 * SECOND)


def test_a_stamp_may_be_as_much_ahead_as_time_has_passed():
    memory = primed(sample(7, 0))
    idle = advance(memory, [], at=86_400).memory
    assert advance(idle, [sample(7, 86_404)], at=86_405).dropped == {}


def test_a_clock_that_was_set_forward_is_believed_as_soon_as_two_stamps_say_so():
    memory = primed(sample(7, 0))
    ahead = 3600
    together = advance(memory, [sample(7, ahead + 1), sample(7, ahead + 2)], at=5)
    assert (sm_seconds(together), together.dropped) == ({7: 1.0}, {})
    first = advance(memory, [sample(7, ahead + 1)], at=5)
    assert (first.busy, first.dropped) == ((), {"bad_timestamp": 1})
    second = advance(first.memory, [sample(7, ahead + 6)], at=10)
    assert (sm_seconds(second), second.dropped) == ({7: 2.5}, {})


def test_a_stamp_that_agrees_with_the_wall_clock_is_believed_after_a_long_idle_time():
    # The newest sample of the first answer was hours old.
    now = 1_800_000_000
    old = Sample(7, (now - 7200) * SECOND, 50, 0, 0, 0)
    memory = primed(old)
    taken = advance(memory, [Sample(7, (now + 4) * SECOND, 50, 0, 0, 0)], at=5)
    assert (sm_seconds(taken), taken.dropped) == ({7: 2.5}, {})


def test_a_stamp_without_a_successor_is_doubted_after_a_minute():
    memory = primed(sample(7, 0))
    assert not is_doubtful(memory, moment(59))
    assert is_doubtful(memory, moment(60))
    assert not is_doubtful(SampleMemory(read_at=moment(0)), moment(60))


def test_a_doubted_stamp_stays_where_it_is_the_newest_that_the_driver_has():
    memory = primed(sample(7, 0))
    again = reconsider(memory, [sample(7, -3), sample(7, 0)], moment(60), PID_MAX)
    assert again.last_seen == T
    assert not is_doubtful(again, moment(61))
    assert reconsider(memory, [], moment(60), PID_MAX).last_seen == T


def test_a_doubted_stamp_that_all_others_are_older_than_is_given_up():
    memory = primed(sample(7, 3600))
    again = reconsider(memory, [sample(7, 1), sample(7, 2)], moment(60), PID_MAX)
    assert again.last_seen == T + 2 * SECOND
    assert sm_seconds(advance(again, [sample(7, 4)], at=65)) == {7: 1.0}


# --- outages and processes ---


@pytest.mark.parametrize(("number", "seconds", "outdated"), [(1, 60, False), (2, 10, False), (2, 11, True), (9, 45, True)])
def test_what_is_remembered_is_outdated_after_readings_that_failed_for_longer_than_the_driver_remembers(number, seconds, outdated):
    memory = prime([], moment(0, number=0), PID_MAX).memory
    assert is_outdated(memory, moment(seconds, number=number)) is outdated


@pytest.mark.parametrize(("set_by", "outdated"), [(0.0, False), (0.9, False), (-0.9, False), (1.1, True), (-1.1, True), (-3600, True)])
def test_what_is_remembered_is_outdated_when_the_wall_clock_was_set(set_by, outdated):
    memory = prime([], moment(0, number=0), PID_MAX).memory
    assert is_outdated(memory, moment(5, number=1, wall=1_800_000_000.0 + set_by)) is outdated


def test_a_pid_that_no_list_names_is_dropped():
    memory = primed(sample(7, 0))
    taken = advance(memory, [sample(7, 1), sample(9, 1)], at=5, listed_pids={7})
    assert ([entry.pid for entry in taken.busy], taken.dropped) == ([7], {"unknown_pid": 1})


def test_where_the_lists_are_not_known_no_pid_is_unknown():
    taken = advance(primed(sample(7, 0)), [sample(9, 1)], at=5, listed_pids=None)
    assert ([entry.pid for entry in taken.busy], taken.dropped) == ([9], {})


def test_processes_that_are_gone_are_forgotten():
    memory = primed(*(sample(pid, 0) for pid in range(1, 100)))
    assert set(advance(memory, [], at=5, listed_pids={7}).memory.newest_of_pid) == {7}


def test_without_lists_processes_are_forgotten_by_their_age():
    memory = primed(*(sample(pid, 0) for pid in range(1, 100)))
    assert set(advance(memory, [sample(200, 60)], at=60).memory.newest_of_pid) == {200}
