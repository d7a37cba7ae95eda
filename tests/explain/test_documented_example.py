"""The examples of docs/explain.md are what the command prints of the demo node."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from exporter import simulated
from exporter.commands.explain import render
from exporter.config import parse_config
from exporter.daemon import about
from exporter.explain.answer import explain_gpu, explain_pod
from exporter.simulation import DEMO, SimulatedClock, SimulatedNode, load_scenario

TEXT = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
EXAMPLES = re.findall(r"```text\n\$ fgpu-exporter explain (\S+)\n(.*?)```", TEXT, re.DOTALL)
CONFIG = parse_config(["--demo"], {})


@pytest.fixture(scope="module")
def demo():
    """The demo's report after 140 s."""
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(DEMO), clock))
        sampler = simulated.wire(CONFIG, node, clock, stack)
        for second in range(0, 141, 5):
            simulated.sample_at(node, sampler, second)
        return about(CONFIG, node.name), sampler.exposition.health, sampler.exposition.report


@pytest.mark.parametrize(("target", "printed"), EXAMPLES, ids=[target for target, _ in EXAMPLES])
def test_an_example_is_what_the_command_prints(demo, target, printed):
    explain = explain_gpu if target.startswith("GPU-") else explain_pod
    assert render(explain(*demo, target)) == printed


def test_a_pod_and_a_gpu_are_shown():
    assert [target.startswith("GPU-") for target, _ in EXAMPLES] == [False, True]
