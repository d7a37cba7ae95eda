"""The rules for Prometheus are valid, do what their tests say, and name only what exists."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from exporter.metrics import EXPORTER_METRICS, NODE_METRICS, PREFIX

ROOT = Path(__file__).parents[2]
RULE_FILES = sorted(path for path in (ROOT / "deploy" / "prometheus").glob("fgpu.*.yaml") if ".test." not in path.name)
TEST_FILES = sorted((ROOT / "deploy" / "prometheus").glob("*.test.yaml"))
RULES = [rule for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
METRICS = {PREFIX + row.name for row in (*NODE_METRICS, *EXPORTER_METRICS)} | {"up", "process_start_time_seconds"}
DCGM = {"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE"}
RUNBOOKS = ROOT / "docs" / "runbooks.md"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")


def named_metrics(text):
    return set(re.findall(r"(?<![\w:])(?:fgpu_[a-z0-9_]+|DCGM_[A-Z_]+)(?![\w:])", text))


def named_records(text):
    return set(re.findall(r"(?<![\w:])[a-z_]+:[a-z0-9_]+:[a-z0-9_]+", text))


def texts(rule):
    return [rule["expr"], *rule.get("annotations", {}).values()]


def test_there_are_rules_alerts_and_tests_of_both():
    assert [path.name for path in RULE_FILES] == ["fgpu.alerts.yaml", "fgpu.rules.yaml"]
    assert [path.name for path in TEST_FILES] == ["fgpu.alerts.test.yaml", "fgpu.rules.test.yaml"]


@needs_promtool
@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.name)
def test_promtool_accepts_the_rules(path):
    said = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stdout + said.stderr


@needs_promtool
@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.name)
def test_the_rules_pass_their_unit_tests(path):
    said = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_names_only_series_that_exist(rule):
    for text in texts(rule):
        assert named_metrics(text) <= METRICS | DCGM
        assert named_records(text) <= RECORDED


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_stands_without_the_recording_rules(rule):
    assert {name for name in named_records(rule["expr"]) if not name.startswith("fgpu:threshold:")} == set()


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_fires_and_is_over_and_is_quiet_in_its_tests(rule):
    cases = [
        (minutes(case["eval_time"]), bool(case["exp_alerts"]), number)
        for number, test in enumerate(yaml.safe_load(TEST_FILES[0].read_text())["tests"])
        for case in test["alert_rule_test"]
        if case["alertname"] == rule["alert"]
    ]
    story = [fires for _, fires, number in sorted(cases, key=lambda case: (case[2], case[0])) if number == min(case[2] for case in cases)]
    assert story[0] is False
    assert True in story
    assert story[-1] is False


def minutes(text):
    return int(re.fullmatch(r"(\d+)m", text)[1])


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_what_happened_and_what_to_do(rule):
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")
    assert "for" in rule
    page, anchor = rule["annotations"]["runbook_url"].split("#")
    assert page == "docs/runbooks.md"
    headings = [line.removeprefix("## ") for line in RUNBOOKS.read_text().splitlines() if line.startswith("## ")]
    assert anchor in [heading.lower() for heading in headings]
    assert rule["alert"] in headings


def test_every_runbook_is_of_an_alert():
    headings = [line.removeprefix("## ") for line in RUNBOOKS.read_text().splitlines() if line.startswith("## FGPU")]
    assert headings == [rule["alert"] for rule in ALERTS]


def test_every_threshold_is_used():
    thresholds = {name for name in RECORDED if name.startswith("fgpu:threshold:")}
    assert thresholds
    assert {name for rule in ALERTS for name in named_records(rule["expr"])} == thresholds


def test_the_operators_manifest_is_made_of_the_rule_files():
    spec = importlib.util.spec_from_file_location("generate_prometheusrule", ROOT / "tools" / "generate_prometheusrule.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert (ROOT / "deploy" / "prometheusrule.yaml").read_text() == generator.render(), "run `make docs`"
    groups = yaml.safe_load((ROOT / "deploy" / "prometheusrule.yaml").read_text())["spec"]["groups"]
    assert sorted(str(rule) for group in groups for rule in group["rules"]) == sorted(str(rule) for rule in RULES)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_a_document_names_only_rules_that_exist(path):
    text = path.read_text()
    assert {name for name in named_records(text) if "fgpu" in name or "dcgm" in name} <= RECORDED
    assert set(re.findall(r"\bFGPU[A-Z]\w+", text)) <= {rule["alert"] for rule in ALERTS}
