"""What the log says of breaches."""

import pytest

from exporter.breach import Breach, State, Verdict
from exporter.journal import breach_changes, log_line
from exporter.judge import Resource
from exporter.limits import PodLimits
from exporter.report import PodReport, Report

OFF = Breach(verdict=Verdict.BELOW)
ON = Breach(state=State.EXCEEDED, verdict=Verdict.ABOVE, since_seconds=1.0, breaches_total=1)
FROZEN = Breach(state=State.EXCEEDED, verdict=Verdict.UNKNOWN, since_seconds=1.0, breaches_total=1)


def report(breach):
    row = PodReport(
        namespace="team-a",
        pod="half",
        gpu_uuid="GPU-0",
        pod_uid="uid",
        memory_used_bytes=3 << 30,
        limits=PodLimits(memory_bytes=2 << 30),
        sm_utilization_ratio=0.25,
        sm_utilization_mean_ratio=None,
        sm_busy_seconds_total=1.0,
        breaches={Resource.MEMORY: breach},
    )
    return Report(time_seconds=0.0, monotonic_seconds=0.0, pods=(row,))


def test_a_breach_that_begins_is_told_with_its_numbers():
    assert [log_line(change) for change in breach_changes(report(OFF), report(ON))] == [
        (
            "breach=begun namespace=team-a pod=half gpu_uuid=GPU-0 resource=memory "
            "memory_used=3.00GiB memory_limit=2.00GiB sm_utilization=0.25 compute_limit=none"
        )
    ]


def test_a_breach_that_ends_is_told():
    assert [log_line(change).split()[0] for change in breach_changes(report(ON), report(OFF))] == ["breach=over"]


@pytest.mark.parametrize(("before", "after"), [(OFF, OFF), (ON, ON), (ON, FROZEN), (FROZEN, ON)])
def test_nothing_else_is_told(before, after):
    assert list(breach_changes(report(before), report(after))) == []


def test_the_first_report_tells_what_is_on():
    assert len(list(breach_changes(None, report(ON)))) == 1
