"""Every board is what its code says, every expression on it answers on the demo, and every panel explains itself."""

import json
import math
import re
import time
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.generate import BOARDS as BUILT
from dashboards.generate import render

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "dashboards" / "json").glob("*.json"))
BOARDS = {path.stem: json.loads(path.read_text()) for path in FILES}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"] if panel["type"] != "row"]
TARGETS = [(name, panel, target) for name, panel in PANELS for target in panel["targets"]]
VARIABLES = [(name, variable) for name, board in BOARDS.items() for variable in board["templating"]["list"] if variable["type"] == "query"]

# Of packages/grafana-data/src/valueFormats/categories.ts of Grafana 11.
UNITS = {"none", "short", "percentunit", "bytes", "s", "h", "cps", "dateTimeFromNow"}
# Okabe and Ito's, and a grey so light that it reads as empty.
COLOURS = {"#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#E5E5E5"}

SHARED_GPU = "GPU-1fbd2f3c-c156-42eb-b849-32551517fe1f"
# The panels of the row that is repeated for each GPU.
REPEATED = {("fgpu-node", title) for title in ("Memory by pod", "SM time by pod", "Use beside limit", "Breaches")}
MOMENTS_SECONDS = (200, 140, 280)
ALL = {"cluster": ".*", "node": "gpu-node-7", "namespace": ".*", "queue": ".*", "pod": ".*", "__rate_interval": "1m", "__range": "3m"}


def fill(expr, gpu):
    variables = {**ALL, "gpu": gpu}
    return re.sub(r"\$([a-z_]\w*)", lambda match: variables[match[1]], expr)


def of(case):
    return f"{case[0]}-{case[1].get('title') or case[1]['name']}-{case[2]['refId'] if len(case) > 2 else ''}".replace(" ", "_")


def columns(panel):
    by_id = {step["id"]: step["options"] for step in panel.get("transformations", [])}
    return by_id["filterFieldsByName"]["include"]["names"] if by_id else []


def test_there_are_three_boards():
    assert {name: board["title"] for name, board in BOARDS.items()} == {
        "fgpu-fleet": "Shared GPUs: fleet",
        "fgpu-node": "Shared GPUs: node",
        "fgpu-pod": "Shared GPUs: team and pod",
    }


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_what_its_code_says(name):
    assert (ROOT / "dashboards" / "json" / f"{name}.json").read_text() == render(BUILT[name]()), "run `make docs`"


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_survives_the_sdk(name):
    assert json.loads(json.dumps(Dashboard.from_json(BOARDS[name]), cls=JSONEncoder)) == BOARDS[name]


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_has_an_address_variables_and_links_to_the_others(name):
    board = BOARDS[name]
    assert board["uid"] == name
    assert board["links"][0]["tags"] == ["fgpu"]
    assert "fgpu" in board["tags"]
    assert [variable["name"] for variable in board["templating"]["list"]][:3] == ["datasource", "cluster", "node"]
    used = set(re.findall(r"\$([a-z_]\w*)", json.dumps([panel["targets"] for panel in board["panels"] if panel["type"] != "row"])))
    assert used <= {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval", "__range"}


@pytest.mark.parametrize("case", PANELS, ids=of)
def test_a_panel_says_what_it_shows_in_units_and_colours_that_exist(case):
    _, panel = case
    text = json.dumps(panel)
    assert len(panel["description"]) > 20
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    units = {panel["fieldConfig"]["defaults"].get("unit", "none")} | set(re.findall(r'"id": "unit", "value": "(\w+)"', text))
    assert units <= UNITS
    assert set(re.findall(r"#[0-9A-Fa-f]{6}\b", text)) <= COLOURS
    assert not re.search(r'"(?:fixedColor|color)": "(?!#)', text)


def test_no_two_panels_of_a_board_overlap():
    for board in BOARDS.values():
        taken = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not cells & taken, panel["title"]
            taken |= cells


@pytest.mark.parametrize("case", TARGETS, ids=of)
def test_an_expression_answers_on_the_demo_with_the_labels_that_it_is_shown_by(case, story):
    _, panel, target = case
    expr = fill(target["expr"], SHARED_GPU if (case[0], panel["title"]) in REPEATED else ".*")
    answers = [story.query(expr, story.began + seconds) for seconds in MOMENTS_SECONDS]
    assert any(answers), "no data at any moment of the story"
    for labels, value in (row for answer in answers for row in answer):
        assert not math.isnan(value), f"NaN at {labels}"
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert labels.get(label), f"{label} is not in {labels}"
        if target.get("format") == "table":
            for label in (name for name in columns(panel) if not name.startswith("Value")):
                assert label in labels, f"{label} is not in {labels}"


@pytest.mark.parametrize("case", VARIABLES, ids=of)
def test_a_variable_finds_its_values_on_the_demo(case, story):
    name, variable = case
    metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
    found = {labels.get(label) for labels, _ in story.query(fill(metric, ".*"), story.began + 140)}
    assert found, name
    # The demo's Prometheus is of one cluster and has no such label, and reservation pods are in no queue: All finds them too.
    assert (None in found) == (variable["name"] in {"cluster", "queue"})
    assert variable["allValue"] == ".*"


def by_title(board, title):
    return next(panel for name, panel in PANELS if name == board and panel["title"] == title)


def ask(story, board, title, seconds, gpu=".*", number=0):
    return story.query(fill(by_title(board, title)["targets"][number]["expr"], gpu), story.began + seconds)


def test_the_over_user_of_the_story_is_on_top_of_the_fleet(story):
    found = {labels["pod"]: value for labels, value in ask(story, "fgpu-fleet", "Top over-users", 140)}
    assert found == {"ranker-5d8f7c9b4-7hm2n": 31562137600 - 25637683200, "scratch": 2900 * 2**20}
    assert ask(story, "fgpu-fleet", "Over their limit", 140) == [({}, 2.0)]
    assert ask(story, "fgpu-fleet", "Over their limit", 280) == [({}, 0.0)]


def test_the_idle_notebook_of_the_story_is_idle(story):
    found = {labels["pod"] for labels, _ in ask(story, "fgpu-pod", "Idle allocations", 280)}
    assert found == {"notebook-maria-0"}


def test_the_stack_of_a_gpu_is_as_high_as_the_gpu(story):
    panel = by_title("fgpu-node", "Memory by pod")
    stacked = [target for target in panel["targets"] if target["legendFormat"] != "granted in total"]
    heights = [value for target in stacked for _, value in story.query(fill(target["expr"], SHARED_GPU), story.began + 140)]
    assert sum(heights) == 81559 * 2**20


def test_the_devices_of_the_story_are_counted_without_their_mig_devices(story):
    assert ask(story, "fgpu-fleet", "Devices", 140) == [({}, 4.0)]


def rules():
    files = [ROOT / "deploy" / "prometheus" / name for name in ("fgpu.rules.yaml", "fgpu.alerts.yaml")]
    return [rule for path in files for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


RECORDED = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def expand(expr):
    """Answer an expression without recorded series: each is put in by what it is made of."""
    return re.sub(r"(?<![\w:])[a-z_]+:[a-z0-9_]+:[a-z0-9_]+", lambda match: f"({expand(RECORDED[match[0]])})", expr)


@pytest.mark.parametrize("name", [name for name in RECORDED if ":dcgm_" not in name])
def test_a_recording_rule_gives_numbers_on_the_demo(name, story):
    found = story.query(expand(RECORDED[name]), story.began + 200)
    assert found
    assert all(value >= 0 for _, value in found)


@pytest.mark.parametrize(
    ("alert", "pods"),
    [
        ("FGPUPodOverMemoryLimit", {"ranker-5d8f7c9b4-7hm2n"}),
        ("FGPUPodOverComputeShare", {"ranker-5d8f7c9b4-7hm2n"}),
        ("FGPUPodUsesUnallocatedGPU", {"scratch"}),
        ("FGPUClaimUnreadable", set()),
    ],
)
def test_an_alert_is_about_the_pods_of_the_story_that_it_is_meant_for(alert, pods, story):
    expr = next(expand(rule["expr"]) for rule in rules() if rule.get("alert") == alert)
    assert {labels["pod"] for labels, _ in story.query(expr, story.began + 140)} == pods
    assert {labels["pod"] for labels, _ in story.query(expr, story.began + 290)} == set()


def wait_for(ask_again, seconds=30):
    deadline = time.monotonic() + seconds
    while not (found := ask_again()):
        assert time.monotonic() < deadline, "nothing was scraped"
        time.sleep(0.2)
    return found


def test_a_scrape_of_the_running_demo_keeps_the_pods_names_and_gets_the_nodes(live):
    selector = 'fgpu_pod_memory_used_bytes{job="fgpu-exporter",pod="detector-train-0"}'
    [(labels, value)] = wait_for(lambda: live.query(selector))
    assert (labels["namespace"], labels["node"]) == ("vision", "gpu-node-7")
    assert value > 0
    assert live.query('{__name__=~"fgpu_.+",exported_pod!="",job="fgpu-exporter"}') == []


def test_a_scrape_that_does_not_honour_labels_is_told_by_the_alert_and_the_stat(live):
    wait_for(lambda: live.query('fgpu_pod_info{job="not-honoured"}'))
    alert = next(rule for rule in rules() if rule.get("alert") == "FGPULabelsNotHonoured")
    pods = 'count by (job) (fgpu_pod_info{job="not-honoured"})'
    assert live.query(f"({alert['expr']}) == on (job) {pods}") != []
    assert {labels["job"] for labels, _ in live.query(alert["expr"])} == {"not-honoured"}
    expr = fill(by_title("fgpu-fleet", "Labels not honoured")["targets"][0]["expr"], ".*")
    assert live.query(f"({expr}) == on () {pods}") != []


def test_a_gpus_series_gets_no_pod_of_the_exporters(live):
    [(labels, _)] = wait_for(lambda: live.query(f'fgpu_gpu_memory_used_bytes{{job="fgpu-exporter",gpu_uuid="{SHARED_GPU}"}}'))
    assert set(labels) == {"__name__", "gpu_uuid", "instance", "job", "node"}
