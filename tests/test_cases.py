"""Scenarios with the exposition that is expected of them: the whole program, simulated node in, text out.

A case is NAME.yaml, a scenario, and NAME.expect, lines of the form

    at 30s                            what follows is checked on the sample of that moment
    is METRIC{label="v",...} VALUE [+- TOLERANCE]    exactly one series matches, with this value
    sum METRIC{label="v",...} VALUE [+- TOLERANCE]   the series that match add up to this
    count METRIC{label="v",...} N     so many series match
    absent METRIC{label="v",...}      no series matches
    exit N                            the command's exit status
"""

import math
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporter import simulated
from exporter.config import parse_config
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario
from exporter.text_format import Format

CASES = Path(__file__).parent / "cases"
DEFAULT_MOMENT = "30s"
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
LINE = re.compile(r"(is|sum|count|absent) (\w+)(?:\{(.*)\})?(?: (\S+)(?: \+- (\S+))?)?")


@dataclass
class Moment:
    at: str
    status: int = 0
    lines: list[str] = field(default_factory=list)


def moments_of(path):
    moments = []
    for raw in path.with_suffix(".expect").read_text().splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("at "):
            moments.append(Moment(line.removeprefix("at ")))
            continue
        if not moments:
            moments.append(Moment(DEFAULT_MOMENT))
        if line.startswith("exit "):
            moments[-1].status = int(line.removeprefix("exit "))
        else:
            moments[-1].lines.append(line)
    assert moments, f"{path} expects nothing"
    return moments


def samples_of(text):
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def unmet(line, samples):
    """What is wrong with this expectation, or None."""
    match = LINE.fullmatch(line)
    assert match, f"unreadable expectation: {line}"
    verb, name, labels, wanted, tolerance = match.groups()
    labels = dict(LABEL.findall(labels or ""))
    values = [
        sample.value
        for sample in samples
        if sample.name == name and all(sample.labels.get(label, "") == value for label, value in labels.items())
    ]
    if verb == "absent":
        return f"{line}: {len(values)} series match" if values else None
    if verb == "count":
        return None if len(values) == int(wanted) else f"{line}: {len(values)} series match"
    if verb == "is" and len(values) != 1:
        return f"{line}: {len(values)} series match"
    found = math.fsum(values)
    close = abs(found - float(wanted)) <= float(tolerance or 0) + abs(float(wanted)) * 1e-9
    return None if close else f"{line}: is {found!r}"


def cases():
    return sorted(path for path in CASES.rglob("*.yaml") if path.with_suffix(".expect").exists())


def playable():
    return [path for path in cases() if not any(moment.status for moment in moments_of(path))]


@pytest.mark.parametrize("path", playable(), ids=lambda path: str(path.relative_to(CASES).with_suffix("")))
def test_the_scenario_gives_the_expected_exposition(path):
    config = parse_config(["--scenario", str(path), "--once"], {})
    interval_seconds = config.sample_interval_seconds
    failures = []
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(path), clock))
        sampler = simulated.wire(config, node, clock, stack)
        sampled = 0
        for moment in sorted(moments_of(path), key=lambda moment: parse_config([], {"FGPU_AT": moment.at, **AT}).at_seconds):
            at_seconds = parse_config([], {"FGPU_AT": moment.at, **AT}).at_seconds
            while sampled * interval_seconds <= at_seconds:
                simulated.sample_at(node, sampler, sampled * interval_seconds)
                sampled += 1
            samples = samples_of(sampler.exposition.render(Format.TEXT, compressed=False).decode())
            failures += [f"at {moment.at}: {wrong}" for line in moment.lines if (wrong := unmet(line, samples))]
    assert not failures, "\n".join(failures)


AT = {"FGPU_DEMO": "true", "FGPU_ONCE": "true"}


def run_once(path, at, *more):
    command = [sys.executable, "-m", "exporter", "--scenario", str(path), "--once", "--at", at, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONHASHSEED": "random"})


@pytest.mark.parametrize("path", [path for path in cases() if path not in playable()], ids=lambda path: path.stem)
def test_a_scenario_that_cannot_be_used_ends_the_program_with_one_line(path):
    for moment in moments_of(path):
        done = run_once(path, moment.at)
        assert done.returncode == moment.status
        assert len(done.stderr.strip().splitlines()) == 1
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


def test_the_command_prints_what_the_case_expects_and_the_same_bytes_each_time():
    path = CASES / "kai" / "breach-begins-and-ends.yaml"
    moment = next(moment for moment in moments_of(path) if moment.at == "35s")
    first, second = run_once(path, moment.at), run_once(path, moment.at)
    assert (first.returncode, first.stderr) == (0, "") or "level=" in first.stderr
    assert [line for line in moment.lines if unmet(line, samples_of(first.stdout))] == []
    changing = re.compile(r"^(# \w+ )?(process_|python_|fgpu_\w+_duration_seconds)")
    kept = [[line for line in done.stdout.splitlines() if not changing.match(line)] for done in (first, second)]
    assert kept[0] == kept[1]
    assert len(kept[0]) > 100


def test_there_are_cases_of_every_kind():
    assert {path.parent.name for path in cases()} >= {"kai", "attribution", "hami", "volcano", "mig", "mps", "dra", "mixed"}
