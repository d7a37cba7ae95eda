"""The last fifteen minutes: points and gaps, what goes and what stays, and what it costs."""

import gzip
import json
import tracemalloc
from contextlib import ExitStack
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from exporter import simulated
from exporter.config import parse_config
from exporter.daemon import about
from exporter.endpoints import build_routes
from exporter.history import MAX_PODS, History, begin_history, build_history
from exporter.limits import PodLimits
from exporter.report import GpuReport, PodReport, Report
from exporter.server import Request
from exporter.simulation import DEMO, SimulatedClock, SimulatedNode, load_scenario
from exporter.snapshot import Gpu, GpuReading

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads((ROOT / "docs" / "history.v1.schema.json").read_text())
GIB = 1 << 30


def gpu(uuid="GPU-0", used=GIB, utilization=0.5, *, reading=True):
    of = Gpu(gpu_uuid=uuid, memory_total_bytes=80 * GIB)
    return GpuReport(
        gpu=of,
        reading=GpuReading(gpu=of, up=True, memory_used_bytes=used, utilization_ratio=utilization) if reading else None,
        memory_allocated_bytes=0,
        compute_allocated_ratio=0.0,
        pods=0,
        unattributed_bytes=None,
        processes_memory_hidden=None,
    )


def pod(name="train", used=GIB, utilization=0.25, limit=2 * GIB, uuid="GPU-0"):
    return PodReport(
        namespace="team-a",
        pod=name,
        gpu_uuid=uuid,
        pod_uid=f"uid-of-{name}",
        memory_used_bytes=used,
        limits=PodLimits(memory_bytes=limit, compute_ratio=None),
        sm_utilization_ratio=utilization,
        sm_utilization_mean_ratio=None,
        sm_busy_seconds_total=None,
        breaches={},
    )


def report(seconds, *pods, gpus=()):
    return Report(time_seconds=1_700_000_000.0 + seconds, monotonic_seconds=float(seconds), pods=pods, gpus=gpus)


def record(*reports):
    history = History()
    for each in reports:
        history = history.add(each)
    return history


def build(history, age_seconds=0.0):
    return build_history(history, history.steps_since(age_seconds))


def past(history, age_seconds=0.0):
    (only,) = build(history, age_seconds)["pods"]
    return only["memory_used_bytes"]


def test_a_point_stands_for_each_step_and_the_newest_is_the_last():
    assert past(record(*(report(15 * step, pod(used=step)) for step in range(100, 160)))) == list(range(100, 160))


def test_a_point_is_the_last_sample_of_its_step():
    history = record(report(900, pod(used=1)), report(905, pod(used=2)), report(910, pod(used=3)), report(915, pod(used=4)))
    assert past(history)[-2:] == [3, 4]


def test_what_is_older_than_fifteen_minutes_is_gone():
    history = record(*(report(15 * step, pod(used=step)) for step in range(200)))
    assert past(history) == list(range(140, 200))
    assert len(history.points) == 60


def test_a_gap_between_samples_stays_a_gap():
    assert past(record(report(900, pod(used=1)), report(960, pod(used=2))))[-5:] == [1, None, None, None, 2]


def test_a_sample_interval_above_the_step_makes_no_gaps():
    history = begin_history(60.0)
    for number in range(60):
        history = history.add(report(60 * number + number % 3, pod(used=number)))
    known = [amount for amount in past(history) if amount is not None]
    assert build(history)["step_seconds"] == 90.0
    assert past(history)[-len(known) :] == known
    assert (len(known), known[-1]) == (40, 59)


def test_when_samples_stop_the_newest_steps_are_unknown():
    history = record(report(900, pod(used=7)))
    assert past(history, age_seconds=14.0)[-1] == 7
    assert past(history, age_seconds=31.0)[-3:] == [7, None, None]
    assert build(history, 31.0)["end_timestamp_seconds"] == 1_700_000_930.0
    assert past(history, age_seconds=100_000.0) == [None] * 60


def test_unknown_is_null_and_zero_is_zero():
    history = record(report(900, pod(used=None, utilization=None)), report(915, pod(used=0, utilization=0.0)))
    (only,) = build(history)["pods"]
    assert only["memory_used_bytes"][-2:] == [None, 0]
    assert only["sm_utilization_ratio"][-2:] == [None, 0.0]


def test_a_gpu_has_a_past_of_its_own_and_none_while_the_driver_is_away():
    history = record(
        report(900, gpus=(gpu(used=3 * GIB, utilization=0.123456),)),
        report(915, gpus=(gpu(reading=False),)),
        report(930, gpus=(gpu(used=4 * GIB, utilization=None),)),
    )
    (only,) = build(history)["gpus"]
    assert only["memory_used_bytes"][-3:] == [3 * GIB, None, 4 * GIB]
    assert only["utilization_ratio"][-3:] == [0.1235, None, None]
    assert only["memory_total_bytes"] == 80 * GIB


def test_pods_of_one_gpu_keep_apart_while_they_come_and_go():
    history = record(
        report(900, pod("a", used=1), pod("b", used=10)),
        report(915, pod("b", used=20), pod("c", used=200)),
        report(930, pod("a", used=3), pod("b", used=30), pod("c", used=300)),
    )
    told = {row["pod"]: row["memory_used_bytes"][-3:] for row in build(history)["pods"]}
    assert told == {"a": [1, None, 3], "b": [10, 20, 30], "c": [None, 200, 300]}


def test_a_pod_that_is_gone_takes_its_past_with_it():
    history = record(report(900, pod("a"), pod("b")), report(915, pod("b")))
    assert [row["pod"] for row in build(history)["pods"]] == ["b"]


def test_a_new_pod_of_the_same_name_begins_anew():
    old = report(900, pod("a", used=5))
    new = PodReport(**{name: getattr(pod("a", used=6), name) for name in PodReport.__slots__} | {"pod_uid": "another"})
    assert past(record(old, report(915, new)))[-2:] == [None, 6]


def test_limits_are_those_of_now():
    history = record(report(900, pod(limit=GIB)), report(915, pod(limit=3 * GIB)))
    assert build(history)["pods"][0]["memory_limit_bytes"] == 3 * GIB


def test_more_pods_than_are_kept_are_counted():
    history = record(report(900, *(pod(f"pod-{number:04d}") for number in range(MAX_PODS + 7))))
    answer = build(history)
    assert (len(answer["pods"]), answer["pods_left_out"]) == (MAX_PODS, 7)
    assert len(history.points[0].pod_values) == 2 * MAX_PODS


def test_before_the_first_sample_there_is_no_past():
    answer = build(History())
    assert (answer["gpus"], answer["pods"], answer["end_timestamp_seconds"]) == ([], [], None)
    assert Draft202012Validator(SCHEMA).is_valid(answer)


def test_adding_a_report_changes_no_history_that_someone_holds():
    before = record(report(900, pod(used=1)))
    told = build(before)
    before.add(report(905, pod(used=2)))
    assert build(before) == told


def test_a_full_past_of_250_pods_on_8_gpus_takes_less_than_half_a_mebibyte():
    gpus = tuple(gpu(f"GPU-{number}") for number in range(8))
    pods = tuple(pod(f"pod-{number}", uuid=f"GPU-{number % 8}") for number in range(250))
    reports = [report(15 * step, *pods, gpus=gpus) for step in range(60)]
    tracemalloc.start()
    try:
        history = record(*reports)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(history.points) == 60
    assert held < 512 * 1024


def test_the_schema_is_a_schema_and_refuses_what_is_none_of_its_answers():
    Draft202012Validator.check_schema(SCHEMA)
    answer = build(record(report(900, pod())))
    assert not Draft202012Validator(SCHEMA).is_valid({**answer, "api_version": "v2"})
    assert not Draft202012Validator(SCHEMA).is_valid({**answer, "pods": [{"pod": "a"}]})


@pytest.fixture(scope="module")
def demo():
    """The built-in node, played for two minutes and twenty seconds; answer its sampler, its clock and its paths."""
    config = parse_config(["--demo"], {})
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(DEMO), clock))
        sampler = simulated.wire(config, node, clock, stack)
        for seconds in range(0, 145, 5):
            simulated.sample_at(node, sampler, seconds)
        yield sampler, clock, build_routes(sampler, about(config, "worker-1"))


def ask(routes, path):
    return json.loads(routes[path](Request(path)).body)


def test_the_past_that_is_answered_ends_with_what_the_node_says_now(demo):
    _, _, routes = demo
    answer, node = ask(routes, "/api/v1/history"), ask(routes, "/api/v1/node")
    assert [error.message for error in Draft202012Validator(SCHEMA).iter_errors(answer)] == []
    now = {(one["pod_uid"], on["gpu_uuid"]): on for one in node["pods"] for on in one["gpus"]}
    assert {(row["pod_uid"], row["gpu_uuid"]) for row in answer["pods"]} == set(now)
    for row in answer["pods"]:
        on = now[row["pod_uid"], row["gpu_uuid"]]
        assert row["memory_used_bytes"][-1] == on["memory_used_bytes"]
        assert row["sm_utilization_ratio"][-1] == pytest.approx(on["sm_utilization_ratio"], abs=1e-4)
        assert (row["memory_limit_bytes"], row["compute_limit_ratio"]) == (on["memory_limit_bytes"], on["compute_limit_ratio"])
    assert {row["gpu_uuid"]: row["memory_used_bytes"][-1] for row in answer["gpus"]} == {
        row["gpu_uuid"]: row["memory_used_bytes"] for row in node["gpus"]
    }


@pytest.mark.parametrize("path", ["/api/v1/node", "/api/v1/history"])
def test_however_many_ask_an_answer_is_made_once_until_something_changes(demo, path):
    sampler, _, routes = demo
    first = routes[path](Request(path))
    assert routes[path](Request(path)) is first
    compressed = routes[path](Request(path, accept_encoding="gzip"))
    assert gzip.decompress(compressed.body) == first.body
    assert dict(compressed.headers)["Content-Encoding"] == "gzip"
    assert routes[path](Request(path)).body == first.body
    sampler.sample()
    assert routes[path](Request(path)) is not first


def test_the_age_of_the_newest_sample_goes_on_between_samples(demo):
    _, clock, routes = demo
    before = ask(routes, "/api/v1/node")["last_sample_age_seconds"]
    clock.advance_to(clock.monotonic() + 2.0)
    assert ask(routes, "/api/v1/node")["last_sample_age_seconds"] == before + 2


def test_the_past_of_a_pod_tells_its_story(demo):
    _, _, routes = demo
    (ranker,) = [row for row in ask(routes, "/api/v1/history")["pods"] if row["pod"].startswith("ranker")]
    known = [amount for amount in ranker["memory_used_bytes"] if amount is not None]
    assert len(known) == 10  # 0 to 140 s
    assert known[0] < ranker["memory_limit_bytes"] < known[-1]
