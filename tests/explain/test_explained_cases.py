"""Every case is explained at each of its moments: the first sentence names the cause, and all numbers are those of the exposition."""

import json
import re
from collections import defaultdict
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from arithmetic import shows_its_amounts
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families

from exporter import simulated
from exporter.config import parse_config
from exporter.daemon import about
from exporter.duration import parse_duration
from exporter.explain.answer import explain_gpu, explain_pod
from exporter.explain.words import moment
from exporter.exposition import Format
from exporter.node_json import build_node, render_json
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario

CASES = Path(__file__).parents[1] / "cases"
NAMES = {
    "memory": "is over its memory limit on {}: ",
    "compute": "is over its compute limit on {}: ",
    "unallocated": "uses {}, which no one gave it (unallocated): ",
}
CONFIG = parse_config(["--demo"], {})
ABOUT = about(CONFIG, "gpu-node-1")
SCHEMA = Draft202012Validator(json.loads((Path(__file__).parents[2] / "docs" / "explain.v1.schema.json").read_text()))


def playable():
    return [path for path in sorted(CASES.rglob("*.yaml")) if "exit " not in path.with_suffix(".expect").read_text()]


def moments_of(path):
    found = re.findall(r"^at (\S+)$", path.with_suffix(".expect").read_text(), re.MULTILINE)
    return sorted({parse_duration(each) for each in found} or {30.0})


class Told:
    """What one exposition says, and the explanations of all that it is about."""

    def __init__(self, exposition):
        self.exposition = exposition
        self.text = exposition.render(Format.TEXT, compressed=False).decode()
        self.samples = [sample for family in text_string_to_metric_families(self.text) for sample in family.samples]
        self.node = build_node(ABOUT, exposition.health, exposition.report)
        self.pod = cache(self._explain_pod)
        self.gpus = cache(self._explain_gpus)

    def of(self, name, **labels):
        return [
            sample
            for sample in self.samples
            if sample.name == name and all(sample.labels[label] == value for label, value in labels.items())
        ]

    def value(self, name, **labels):
        found = self.of(name, **labels)
        assert len(found) <= 1
        return found[0].value if found else None

    def pods(self):
        kubernetes = self.exposition.report.evidence.snapshot.kubernetes
        return [(pod.namespace, pod.name) for pod in kubernetes.pods.values()] if kubernetes else []

    def _explain_pod(self, namespace, pod):
        return explain_pod(ABOUT, self.exposition.health, self.exposition.report, f"{namespace}/{pod}")

    def _explain_gpus(self):
        report = self.exposition.report
        uuids = [row.gpu.gpu_uuid for row in report.gpus]
        return [(uuid, explain_gpu(ABOUT, self.exposition.health, report, uuid)) for uuid in uuids]


@pytest.fixture(scope="module", params=playable(), ids=lambda path: str(path.relative_to(CASES).with_suffix("")))
def played(request):
    """What a case says at its moments."""
    told = []
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(request.param), clock))
        sampler = simulated.wire(CONFIG, node, clock, stack)
        sampled = 0
        for at_seconds in moments_of(request.param):
            while sampled * CONFIG.sample_interval_seconds <= at_seconds:
                simulated.sample_at(node, sampler, sampled * CONFIG.sample_interval_seconds)
                sampled += 1
            told.append(Told(sampler.exposition))
    return told


def test_the_first_sentence_of_a_pod_in_breach_names_the_resource_and_the_gpu(played):
    for told in played:
        for sample in told.of("fgpu_pod_limit_exceeded"):
            labels = sample.labels
            summary = told.pod(labels["namespace"], labels["pod"])["summary"]
            is_named = NAMES[labels["resource"]].format(labels["gpu_uuid"]) in summary
            assert is_named == (sample.value == 1), (labels, summary)
            if is_named:
                since = told.value("fgpu_pod_limit_exceeded_since_timestamp_seconds", **labels)
                assert f"since {moment(since)}" in summary


def test_the_first_sentence_of_a_pod_whose_contract_cannot_be_read_names_the_system_and_the_error(played):
    for told in played:
        for error in told.exposition.report.claim_errors:
            summary = told.pod(error.namespace, error.pod)["summary"]
            assert f"has a {error.system} contract that cannot be read: {'; '.join(error.errors)}" in summary


def test_the_first_sentence_of_a_gpu_names_each_reason_for_which_memory_has_no_container(played):
    for told in played:
        for uuid, explanation in told.gpus():
            for sample in told.of("fgpu_gpu_unattributed_memory_bytes", gpu_uuid=uuid):
                if sample.value > 0:
                    assert f"({sample.labels['reason']})" in explanation["summary"]


def test_a_pods_processes_on_a_gpu_add_up_to_its_memory_or_why_they_do_not_is_told(played):
    for told in played:
        for namespace, name in told.pods():
            for on_gpu in told.pod(namespace, name)["pod"]["gpus"]:
                used = told.value("fgpu_pod_memory_used_bytes", namespace=namespace, pod=name, gpu_uuid=on_gpu["gpu_uuid"])
                assert on_gpu["memory_used_bytes"] == used
                processes = [process for container in on_gpu["containers"] for process in container["processes"]]
                if used is not None:
                    assert sum(process["memory_used_bytes"] for process in processes) == used
                    assert on_gpu["use_unknown"] is None
                for container in on_gpu["containers"]:
                    labels = {"namespace": namespace, "pod": name, "container": container["container"], "gpu_uuid": on_gpu["gpu_uuid"]}
                    assert container["memory_used_bytes"] == told.value("fgpu_container_memory_used_bytes", **labels)
                    assert len(container["processes"]) == (told.value("fgpu_container_processes", **labels) or 0)


def test_a_gpus_processes_add_up_to_what_containers_hold_and_what_has_none_by_reason(played):
    for told in played:
        for uuid, explanation in told.gpus():
            gpu = explanation["gpu"]
            reasons = {each["reason"]: each["memory_bytes"] for each in gpu["unattributed"]}
            exposed = {sample.labels["reason"]: sample.value for sample in told.of("fgpu_gpu_unattributed_memory_bytes", gpu_uuid=uuid)}
            assert {**dict.fromkeys(exposed, 0), **reasons} == exposed
            of_containers = [container["memory_used_bytes"] or 0 for container in gpu["containers"]]
            if exposed:
                assert gpu["processes_memory_bytes"] == sum(of_containers) + sum(reasons.values())
                assert sum(of_containers) == sum(sample.value for sample in told.of("fgpu_container_memory_used_bytes", gpu_uuid=uuid))
            else:
                assert gpu["use_unknown"] is not None
                assert "is not known" in explanation["summary"]
            assert gpu["memory_used_bytes"] == told.value("fgpu_gpu_memory_used_bytes", gpu_uuid=uuid)


def test_limits_breaches_and_claims_are_those_of_the_node(played):
    for told in played:
        for pod in told.node["pods"]:
            explained = told.pod(pod["namespace"], pod["pod"])["pod"]
            for row, on_gpu in zip(pod["gpus"], explained["gpus"], strict=True):
                for key in ("gpu_uuid", "memory_limit_bytes", "compute_limit_ratio", "sm_utilization_mean_ratio"):
                    assert on_gpu[key] == row[key]
                assert {limit["resource"]: limit["limit_exceeded"] for limit in on_gpu["limits"]} == row["limit_exceeded"]
                since = "limit_exceeded_since_timestamp_seconds"
                assert {limit["resource"]: limit[since] for limit in on_gpu["limits"]} == row[since]
                keys = row["claims"][0].keys() if row["claims"] else ()
                bare = [{key: claim[key] for key in keys} for claim in on_gpu["claims"]]
                assert sorted(bare, key=repr) == sorted(row["claims"], key=repr)


def test_what_is_above_at_this_moment_is_told_while_a_breach_is_on_and_not_falling(played):
    for told in played:
        for namespace, name in told.pods():
            for on_gpu in told.pod(namespace, name)["pod"]["gpus"]:
                for limit in on_gpu["limits"]:
                    assert all(each["used"] > each["limit"] for each in limit["above"])
                    if limit["standing"] == "rising" and limit["resource"] != "unallocated":
                        assert limit["above"]
                    if limit["standing"] == "within":
                        assert not limit["above"]


def test_each_claim_says_where_it_was_read_and_its_arithmetic_gives_its_amounts(played):
    for told in played:
        for namespace, name in told.pods():
            for on_gpu in told.pod(namespace, name)["pod"]["gpus"]:
                for claim in on_gpu["claims"]:
                    assert claim["contract"]
                    told_amounts = (claim[key] for key in ("memory_bytes", "compute_ratio", "memory_rule", "compute_rule"))
                    assert shows_its_amounts(*told_amounts), claim
                for allocation in on_gpu["allocations"]:
                    assert allocation["contract"]


def test_a_limit_is_one_of_its_claims_or_their_sum(played):
    for told in played:
        for namespace, name in told.pods():
            for on_gpu in told.pod(namespace, name)["pod"]["gpus"]:
                by_scope = defaultdict(set)
                for claim in on_gpu["claims"]:
                    if claim["is_memory_limit"]:
                        by_scope[claim["scope"], claim["container"]].add(claim["memory_bytes"])
                limit = on_gpu["memory_limit_bytes"]
                of_containers = [amounts for (scope, _), amounts in by_scope.items() if scope == "container"]
                if limit is None:
                    assert not of_containers or on_gpu["memory_used_bytes"] is None
                elif ("pod", "") in by_scope:
                    assert by_scope["pod", ""] == {limit}
                else:
                    assert sum(amount for amounts in of_containers for amount in amounts) == limit


def test_an_explanation_is_what_the_schema_says(played):
    for told in played[-1:]:
        explanations = [told.pod(namespace, name) for namespace, name in told.pods()] + [each for _, each in told.gpus()]
        for explanation in explanations:
            assert [error.message for error in SCHEMA.iter_errors(json.loads(render_json(explanation)))] == []


def test_the_schema_is_a_schema_and_refuses_what_is_none_of_its_answers():
    Draft202012Validator.check_schema(SCHEMA.schema)
    assert not SCHEMA.is_valid({"summary": "a"})
    assert not SCHEMA.is_valid({"api_version": "v2"})


def test_every_sentence_is_one_and_says_something(played):
    for told in played:
        explanations = [told.pod(namespace, name) for namespace, name in told.pods()] + [each for _, each in told.gpus()]
        for explanation in explanations:
            sentences = [explanation["summary"], *(each for section in explanation["sections"] for each in section["sentences"])]
            for sentence in sentences:
                assert re.fullmatch(r"\S[^\n]*[^,.:; ]\.", sentence), sentence
                assert "None" not in sentence
                assert "{" not in sentence
