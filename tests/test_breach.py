"""The breach table, and breaches over time."""

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from exporter.breach import TRANSITIONS, WHEN_HELD, Breach, State, Verdict, step

ABOVE, BELOW, UNKNOWN, NO_LIMIT = Verdict.ABOVE, Verdict.BELOW, Verdict.UNKNOWN, Verdict.NO_LIMIT


def play(verdicts, *, hold_seconds=10.0, interval_seconds=5.0, breach=None):
    breaches = []
    breach = breach or Breach()
    for number, verdict in enumerate(verdicts):
        now = number * interval_seconds
        breach = step(breach, verdict, time_seconds=1000.0 + now, monotonic_seconds=now, hold_seconds=hold_seconds)
        breaches.append(breach)
    return breaches


def flags(verdicts, **options):
    return [breach.exceeded for breach in play(verdicts, **options)]


def test_the_table_is_total():
    assert set(TRANSITIONS) == set(product(State, Verdict))


def test_no_row_skips_the_hold():
    assert set(WHEN_HELD) == {State.RISING, State.FALLING}
    assert State.EXCEEDED not in {TRANSITIONS[State.WITHIN, verdict] for verdict in Verdict}


def test_a_breach_begins_when_the_hold_is_reached_counted_from_the_first_sample_above():
    assert flags([BELOW, ABOVE, ABOVE, ABOVE]) == [False, False, False, True]


def test_a_breach_ends_as_late_as_it_began():
    assert flags([ABOVE, ABOVE, ABOVE, BELOW, BELOW, BELOW]) == [False, False, True, True, True, False]


def test_a_spike_shorter_than_the_hold_is_no_breach():
    assert not any(flags([ABOVE, ABOVE, BELOW, ABOVE, ABOVE, BELOW]))


def test_a_dip_shorter_than_the_hold_ends_nothing_and_is_counted_once():
    breaches = play([ABOVE, ABOVE, ABOVE, BELOW, ABOVE, ABOVE])
    assert breaches[-1].exceeded
    assert breaches[-1].breaches_total == 1


def test_since_is_the_first_sample_above_and_goes_with_the_breach():
    breaches = play([BELOW, ABOVE, ABOVE, ABOVE, BELOW, BELOW, BELOW])
    assert [breach.since_seconds for breach in breaches] == [None, 1005.0, 1005.0, 1005.0, 1005.0, 1005.0, None]


def test_seconds_count_while_the_flag_is_up():
    assert play([BELOW, ABOVE, ABOVE, ABOVE, ABOVE, BELOW, BELOW, BELOW, BELOW])[-1].exceeded_seconds_total == 20.0


def test_the_unknown_freezes_a_breach():
    breaches = play([ABOVE, ABOVE, ABOVE, UNKNOWN, UNKNOWN, UNKNOWN, ABOVE])
    assert [breach.exceeded for breach in breaches] == [False, False, True, None, None, None, True]
    assert breaches[-1].breaches_total == 1
    assert breaches[-1].exceeded_seconds_total == 0.0


def test_unknown_time_does_not_count_toward_the_hold():
    assert flags([ABOVE, UNKNOWN, UNKNOWN, ABOVE, ABOVE, ABOVE]) == [False, None, None, False, False, True]


def test_without_a_limit_there_is_no_flag_and_the_breach_is_over():
    breaches = play([ABOVE, ABOVE, ABOVE, NO_LIMIT, BELOW])
    assert [breach.exceeded for breach in breaches] == [False, False, True, None, False]


def test_without_a_hold_a_breach_begins_and_ends_at_once():
    breaches = play([BELOW, ABOVE, BELOW, ABOVE], hold_seconds=0.0)
    assert [breach.exceeded for breach in breaches] == [False, True, False, True]
    assert breaches[-1].breaches_total == 2


def test_a_clock_that_stands_still_counts_nothing():
    breach = play([ABOVE, ABOVE, ABOVE])[-1]
    again = step(breach, ABOVE, time_seconds=0.0, monotonic_seconds=breach.looked_at_seconds, hold_seconds=10.0)
    assert again.exceeded_seconds_total == breach.exceeded_seconds_total


@given(st.lists(st.sampled_from(list(Verdict)), max_size=60), st.sampled_from([0.0, 5.0, 10.0, 17.0]))
def test_counters_never_fall_and_the_flag_is_known_exactly_when_the_look_is(verdicts, hold_seconds):
    breaches = play(verdicts, hold_seconds=hold_seconds)
    for earlier, later in pairwise(breaches):
        assert later.exceeded_seconds_total >= earlier.exceeded_seconds_total
        assert later.breaches_total >= earlier.breaches_total
    for verdict, breach in zip(verdicts, breaches, strict=True):
        assert (breach.exceeded is None) == (verdict in (UNKNOWN, NO_LIMIT))
        assert (breach.since_seconds is None) == (breach.state is State.WITHIN)
