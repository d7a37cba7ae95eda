"""A simulated node from a few lines of a scenario."""

from textwrap import dedent

import pytest

from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario


@pytest.fixture
def load(tmp_path):
    """Answer a function from the text of a scenario file to the scenario."""

    def load_text(text):
        path = tmp_path / "node.yaml"
        path.write_text(dedent(text))
        return load_scenario(path)

    return load_text


@pytest.fixture
def start(load):
    """Answer a function from the text of a scenario file to a node that plays it, on a simulated clock."""
    nodes = []

    def start_text(text, clock=None):
        node = SimulatedNode(load(text), clock or SimulatedClock())
        nodes.append(node)
        return node

    yield start_text
    for node in nodes:
        node.close()
