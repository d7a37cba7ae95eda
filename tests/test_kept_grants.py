"""Grants are kept while what they follow from stays the same: a report says what it would say if each were made anew."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from exporter import simulated
from exporter.config import parse_config
from exporter.report import NOTHING_REMEMBERED, Rules, build
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario

CASES = Path(__file__).parent / "cases"
RULES = Rules()


def playable():
    return [path for path in sorted(CASES.rglob("*.yaml")) if "\nexit " not in "\n" + path.with_suffix(".expect").read_text()]


def snapshots(path, samples=14):
    """What the sources read of a scenario, a snapshot for each sample."""
    config = parse_config(["--scenario", str(path), "--once"], {})
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(path), clock))
        sampler = simulated.wire(config, node, clock, stack)
        for number in range(samples):
            simulated.sample_at(node, sampler, number * config.sample_interval_seconds)
            yield sampler.exposition.report.evidence.snapshot


@pytest.mark.parametrize("path", playable(), ids=lambda path: str(path.relative_to(CASES).with_suffix("")))
def test_a_kept_grant_is_the_grant_that_would_be_made(path):
    kept = anew = NOTHING_REMEMBERED
    for snapshot in snapshots(path):
        report, kept = build(snapshot, kept, RULES)
        expected, anew = build(snapshot, replace(anew, granted=None), RULES)
        assert report == expected
        assert replace(kept, granted=None) == replace(anew, granted=None)


def test_a_grant_is_kept_while_nothing_changes_and_made_anew_for_the_pod_that_changes():
    path = next(path for path in playable() if path.stem == "sharers-keep-their-own-numbers")
    kept = NOTHING_REMEMBERED
    grants = []
    *first, last = snapshots(path, samples=6)
    for snapshot in first:
        report, kept = build(snapshot, kept, RULES)
        grants.append(report.evidence.grants)
    uids = list(grants[-1])
    assert all(grants[-1][uid] is grants[-2][uid] for uid in uids)
    pods = dict(last.kubernetes.pods)
    pods[uids[0]] = replace(pods[uids[0]], annotations={**pods[uids[0]].annotations, "note": "edited"})
    report, kept = build(replace(last, kubernetes=replace(last.kubernetes, pods=pods)), kept, RULES)
    assert report.evidence.grants == grants[-1]
    assert report.evidence.grants[uids[0]] is not grants[-1][uids[0]]
