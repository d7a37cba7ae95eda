"""The report as JSON: the same words as the metrics, a schema that holds, and null for what is unknown."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from exporter import simulated
from exporter.config import parse_config
from exporter.daemon import about
from exporter.health import Health, SourceHealth
from exporter.metrics import NODE_METRICS
from exporter.node_json import build_node, render_json
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads((ROOT / "docs" / "node.v1.schema.json").read_text())
CASES = sorted((ROOT / "tests" / "cases").rglob("*.yaml"))
# Facts about groups of pods and files of the host: no page or table of a node shows them.
NOT_IN_JSON = {"kai_gpu_group_info", "hostfiles_unreadable"}
ENTITIES = ("container_", "pod_", "gpu_", "claim_")
CONFIG = parse_config(["--demo"], {})
ABOUT = about(CONFIG, "worker-1")


def nodes(path, seconds=(0, 15, 30)):
    """The JSON of a scenario at some moments."""
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(path), clock))
        sampler = simulated.wire(CONFIG, node, clock, stack)
        for second in range(0, max(seconds) + 1, 5):
            simulated.sample_at(node, sampler, second)
            if second in seconds:
                exposition = sampler.exposition
                yield json.loads(render_json(build_node(ABOUT, exposition.health, exposition.report)))


def case(name):
    return next(path for path in CASES if path.stem == name)


def playable():
    return [path for path in CASES if not path.with_suffix(".expect").read_text().startswith("exit")]


@pytest.mark.parametrize("path", playable()[::3], ids=lambda path: path.stem)
def test_the_json_of_a_node_is_what_the_schema_says(path):
    for answer in nodes(path):
        assert [error.message for error in Draft202012Validator(SCHEMA).iter_errors(answer)] == []


def test_the_schema_is_a_schema_and_refuses_what_is_none_of_its_answers():
    Draft202012Validator.check_schema(SCHEMA)
    answer = build_node(ABOUT, Health(), None)
    assert not Draft202012Validator(SCHEMA).is_valid({**answer, "api_version": "v2"})
    assert not Draft202012Validator(SCHEMA).is_valid({**answer, "pods": [{"pod": "a"}]})


def test_a_key_is_a_metrics_name_without_its_entity():
    keys = {key for entity in (SCHEMA, *SCHEMA["$defs"].values()) for key in entity["properties"]}
    for row in NODE_METRICS:
        if row.name in NOT_IN_JSON or row.name.endswith("_info"):
            continue
        bare = next((row.name.removeprefix(entity) for entity in ENTITIES if row.name.startswith(entity)), row.name)
        assert {row.name, bare} & keys, row.name


def test_every_label_of_facts_is_a_key():
    keys = {key for entity in (SCHEMA, *SCHEMA["$defs"].values()) for key in entity["properties"]}
    labels = {label for row in NODE_METRICS if row.name in {"container_info", "pod_info", "gpu_info"} for label in row.labels}
    assert labels - keys == set()


def test_two_sharers_of_a_gpu_stand_each_with_their_own_numbers():
    (answer,) = nodes(case("sharers-keep-their-own-numbers"), [30])
    rows = [on_gpu for pod in answer["pods"] for on_gpu in pod["gpus"] if pod["role"] == "workload"]
    assert len({row["memory_used_bytes"] for row in rows}) > 1
    assert all(row["memory_used_bytes"] == sum(each["memory_used_bytes"] for each in row["containers"]) for row in rows)
    assert answer["node"] == "worker-1"


def test_without_a_report_all_that_is_measured_is_null_and_the_sources_say_why():
    health = Health(sources=(SourceHealth(source="nvml", up=False, reason="the driver is not loaded"),))
    answer = build_node(ABOUT, health, None)
    assert (answer["gpus"], answer["pods"], answer["driver_version"]) == (None, None, None)
    assert answer["sources"][0]["reason"] == "the driver is not loaded"
    assert Draft202012Validator(SCHEMA).is_valid(answer)


def test_what_an_author_wrote_cannot_break_the_text():
    health = Health(sources=(SourceHealth(source="nvml", up=False, reason='"</script>\udcff\u2028\n'),))
    text = render_json(build_node(ABOUT, health, None))
    assert json.loads(text)["sources"][0]["reason"] == '"</script>\udcff\u2028\n'
    assert b"\n" not in text
    assert text.isascii()
