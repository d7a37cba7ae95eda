"""Random nodes, explained at every sample: whatever is on a node has an explanation, and its numbers add up."""

import importlib.util
import json
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from jsonschema import Draft202012Validator

from exporter import simulated
from exporter.config import parse_config
from exporter.daemon import about
from exporter.explain.answer import explain_gpu, explain_pod
from exporter.node_json import render_json
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario

ROOT = Path(__file__).parents[2]
SCHEMA = Draft202012Validator(json.loads((ROOT / "docs" / "explain.v1.schema.json").read_text()))
CONFIG = parse_config(["--demo"], {})


@pytest.fixture(scope="module")
def random_scenario():
    spec = importlib.util.spec_from_file_location("random_scenarios", ROOT / "bench" / "random_scenarios.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.random_scenario


def explanations(exposition):
    here = about(CONFIG, "worker-1"), exposition.health, exposition.report
    kubernetes = exposition.report.evidence.snapshot.kubernetes
    for pod in kubernetes.pods.values() if kubernetes else ():
        yield json.loads(render_json(explain_pod(*here, f"{pod.namespace}/{pod.name}")))
    for row in exposition.report.gpus:
        yield json.loads(render_json(explain_gpu(*here, row.gpu.gpu_uuid)))


def check_pod(pod):
    for on_gpu in pod["gpus"]:
        processes = [process for container in on_gpu["containers"] for process in container["processes"]]
        if on_gpu["memory_used_bytes"] is not None:
            assert on_gpu["use_unknown"] is None
            assert sum(process["memory_used_bytes"] for process in processes) == on_gpu["memory_used_bytes"]
        elif on_gpu["containers"] or on_gpu["claims"] or on_gpu["allocations"]:
            assert on_gpu["use_unknown"] is not None
        for limit in on_gpu["limits"]:
            assert limit["limit_exceeded"] == {"exceeded": True, "frozen": None, "unknown": None, "no_limit": None}.get(
                limit["standing"], False
            )


def check_gpu(gpu):
    if gpu["use_unknown"] is None:
        theirs = sum(container["memory_used_bytes"] or 0 for container in gpu["containers"])
        assert gpu["processes_memory_bytes"] == theirs + sum(each["memory_bytes"] for each in gpu["unattributed"])
    else:
        assert gpu["processes_memory_bytes"] is None


@pytest.mark.parametrize("seed", range(7000, 7012))
def test_whatever_is_on_a_node_has_an_explanation(random_scenario, tmp_path, seed):
    path = tmp_path / "scenario.yaml"
    path.write_text(json.dumps(random_scenario(Random(seed))))  # noqa: S311 - repeatable
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(path), clock))
        sampler = simulated.wire(CONFIG, node, clock, stack)
        for second in range(0, 91, 5):
            simulated.sample_at(node, sampler, second)
            for explanation in explanations(sampler.exposition):
                assert "None" not in explanation["summary"]
                if explanation["pod"]:
                    check_pod(explanation["pod"])
                else:
                    check_gpu(explanation["gpu"])
        for explanation in explanations(sampler.exposition):
            assert [error.message for error in SCHEMA.iter_errors(explanation)] == []
