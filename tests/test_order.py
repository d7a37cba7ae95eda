"""The order in which a node tells its facts changes no byte of the exposition."""

import random
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from exporter import simulated
from exporter.config import parse_config
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario
from exporter.text_format import Format

CASES = Path(__file__).parent / "cases"
CHANGING = re.compile(r"^(# \w+ )?(process_|python_|fgpu_\w+_duration_seconds)")
UNORDERED = {"pods", "pod_resources", "processes", "allocatable", "device_ids", "devices", "gpus", "mig", "containerStatuses"}


def shuffled(value, shuffle, key=None):
    """The same facts with every list shuffled whose order means nothing."""
    if isinstance(value, dict):
        items = [(name, shuffled(each, shuffle, name)) for name, each in value.items()]
        return dict(shuffle.sample(items, len(items)))
    if isinstance(value, list):
        each_shuffled = [shuffled(each, shuffle, key) for each in value]
        return shuffle.sample(each_shuffled, len(each_shuffled)) if key in UNORDERED else each_shuffled
    return value


def exposition_of(path, at_seconds=30.0):
    config = parse_config(["--scenario", str(path), "--once"], {})
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(path), clock))
        sampler = simulated.wire(config, node, clock, stack)
        for number in range(int(at_seconds // config.sample_interval_seconds) + 1):
            simulated.sample_at(node, sampler, number * config.sample_interval_seconds)
        text = sampler.exposition.render(Format.TEXT, compressed=False).decode()
    return [line for line in text.splitlines() if not CHANGING.match(line)]


@pytest.mark.parametrize("case", ["mixed/four-systems-on-one-node", "attribution/sharers-keep-their-own-numbers"])
def test_twenty_shuffled_orders_give_the_same_bytes(case, tmp_path):
    said = yaml.safe_load((CASES / f"{case}.yaml").read_text())
    for number, gpu in enumerate(said["gpus"]):
        gpu.setdefault("index", number)  # which is by default the position in the list
    file = tmp_path / "scenario.yaml"
    expected = None
    for seed in range(20):
        file.write_text(yaml.safe_dump(shuffled(said, random.Random(seed)), sort_keys=False))  # noqa: S311 - a shuffle to repeat
        found = exposition_of(file)
        expected = expected or found
        assert found == expected
    assert len(expected) > 100
