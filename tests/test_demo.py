"""The built-in demo tells its story and no other."""

from contextlib import ExitStack

import pytest

from exporter import simulated
from exporter.config import parse_config
from exporter.simulation import DEMO, SimulatedClock, SimulatedNode, load_scenario

DURATION_SECONDS = 300


@pytest.fixture(scope="module")
def reports():
    """The reports of one round of the story, by their time."""
    config = parse_config(["--demo", "--once"], {})
    found = {}
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(DEMO), clock))
        sampler = simulated.wire(config, node, clock, stack)
        for number in range(int(DURATION_SECONDS // config.sample_interval_seconds) + 1):
            simulated.sample_at(node, sampler, number * config.sample_interval_seconds)
            found[number * config.sample_interval_seconds] = sampler.exposition.report
    return found


def exceeded(report):
    return {(row.pod.split("-")[0], resource.value) for row in report.pods for resource, breach in row.breaches.items() if breach.exceeded}


def test_only_the_pods_of_the_story_are_ever_in_breach(reports):
    assert set().union(*(exceeded(report) for report in reports.values())) == {
        ("ranker", "memory"),
        ("ranker", "compute"),
        ("scratch", "unallocated"),
    }


@pytest.mark.parametrize(
    ("at_seconds", "expected"),
    [
        (30, set()),
        (60, {("ranker", "memory"), ("ranker", "compute")}),
        (140, {("ranker", "memory"), ("ranker", "compute"), ("scratch", "unallocated")}),
        (300, set()),
    ],
)
def test_the_story_is_told_at_its_times(reports, at_seconds, expected):
    assert exceeded(reports[at_seconds]) == expected


def test_an_idle_grant_can_be_seen(reports):
    idle = [row for row in reports[140].pods if row.pod == "notebook-maria-0"]
    assert [(row.memory_used_bytes, row.limits.memory_bytes) for row in idle] == [(0, 16300 << 20)]


def test_nothing_is_unreadable_and_everything_has_an_owner(reports):
    for report in reports.values():
        assert report.claim_errors == ()
        for gpu in report.gpus:
            owned = {reason.value: amount for reason, amount in gpu.unattributed_bytes.items() if amount}
            assert set(owned) <= {"host_process"}
