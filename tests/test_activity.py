"""Counters, peaks and means over a window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.activity import NO_ACTIVITY, add_busy, add_memory
from exporter.usage import BusySeconds


def play(sm_seconds, *, interval_seconds=5.0, keep_seconds=60.0):
    activity, now = NO_ACTIVITY, 0.0
    for value in sm_seconds:
        activity = add_busy(
            activity, BusySeconds(sm=value), start_seconds=now, end_seconds=now + interval_seconds, keep_seconds=keep_seconds
        )
        now += interval_seconds
    return activity, now


def test_the_mean_is_over_the_window_alone():
    activity, now = play([5.0, 5.0, 5.0, 0.0, 0.0, 2.5])
    assert activity.mean_sm_ratio(now, 15.0) == pytest.approx(2.5 / 15)


def test_a_window_that_cuts_an_interval_takes_its_part():
    activity, now = play([5.0, 0.0])
    assert activity.mean_sm_ratio(now, 7.5) == pytest.approx(2.5 / 7.5)


def test_a_mean_over_less_than_the_window_is_over_what_is_known():
    activity, now = play([1.0])
    assert activity.mean_sm_ratio(now, 15.0) == pytest.approx(0.2)


def test_a_full_window_needs_all_of_it():
    activity, now = play([1.0] * 11)
    assert activity.full_window_sm_ratio(now, 60.0) is None
    activity, now = play([1.0] * 12)
    assert activity.full_window_sm_ratio(now, 60.0) == pytest.approx(0.2)


def test_a_gap_leaves_the_window_not_full():
    activity, now = play([1.0] * 12)
    activity = add_busy(activity, BusySeconds(sm=1.0), start_seconds=now + 5, end_seconds=now + 10, keep_seconds=60.0)
    assert activity.full_window_sm_ratio(now + 10, 60.0) is None


@pytest.mark.parametrize("interval_seconds", [0.5, 0.25], ids=["half a second", "a quarter"])
def test_short_intervals_count_as_well_as_long_ones(interval_seconds):
    activity, now = play([interval_seconds / 2] * 2, interval_seconds=interval_seconds)
    assert activity.mean_sm_ratio(now, 15.0) == pytest.approx(0.5)
    assert activity.full_window_sm_ratio(now, 2 * interval_seconds) == pytest.approx(0.5)


def test_a_window_is_not_full_a_second_too_early():
    activity, now = play([1.0] * 59, interval_seconds=1.0)
    assert activity.full_window_sm_ratio(now, 60.0) is None
    assert activity.full_window_sm_ratio(now, 59.0) == pytest.approx(1.0)


def test_nothing_known_is_no_mean():
    assert NO_ACTIVITY.mean_sm_ratio(0.0, 15.0) is None


def test_a_first_reading_counts_but_has_no_length():
    activity = add_busy(NO_ACTIVITY, BusySeconds(sm=2.0), start_seconds=None, end_seconds=5.0, keep_seconds=60.0)
    assert activity.busy_total == BusySeconds(sm=2.0)
    assert activity.mean_sm_ratio(5.0, 15.0) is None


def test_an_idle_container_is_exactly_zero():
    activity, now = play([3.3, 1.7, 0.1, 0.0, 0.0, 0.0])
    assert activity.mean_sm_ratio(now, 15.0) == 0.0


def test_the_peak_keeps_the_highest_and_the_unknown_raises_nothing():
    activity = add_memory(add_memory(add_memory(add_memory(NO_ACTIVITY, 0), 7), None), 3)
    assert activity.memory_used_peak_bytes == 7


@given(st.lists(st.floats(0, 5), min_size=1, max_size=200))
def test_what_is_kept_is_bounded_and_the_counter_is_the_sum(sm_seconds):
    activity, _ = play(sm_seconds)
    assert len(activity.intervals) <= 12
    assert activity.busy_total.sm == pytest.approx(sum(sm_seconds))


def test_it_is_known_how_much_of_a_window_is_known():
    activity, now = play([1.0, 1.0, 1.0])
    assert activity.known_seconds(now, 60.0) == pytest.approx(15.0)
    assert activity.known_seconds(now, 7.0) == pytest.approx(7.0)
    assert NO_ACTIVITY.known_seconds(now, 60.0) == 0.0
