"""The rows of fgpu-top, from the JSON that a real report gives."""

import ast
import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from exporter.commands.top_rows import (
    NONE,
    UNKNOWN,
    Amount,
    AnswerError,
    By,
    Choice,
    Grant,
    Kind,
    Sort,
    add,
    build_json,
    choose,
    parse_node,
)
from exporter.commands.top_table import Style, draw

GIB = 1 << 30


def pods(rows):
    return [row.pod.split("-")[0] for row in rows]


def row_of(view, pod):
    return next(row for row in view.rows if row.pod.startswith(pod))


@pytest.fixture(scope="module")
def view(demo):
    return parse_node(demo.answer)


def test_a_row_is_a_pod_on_a_gpu_with_what_it_uses_and_was_given(view):
    row = row_of(view, "detector")
    assert (row.namespace, row.pod, row.gpus[0].label) == ("vision", "detector-train-0", "0")
    assert (row.memory_used_bytes.known, row.memory_limit_bytes.known) == (39027998720, 42729472000)
    assert (row.sm_utilization_ratio.known, row.sm_utilization_mean_ratio.known) == (pytest.approx(0.44), pytest.approx(0.415))
    assert (row.processes, row.grants) == (Amount(2), (Grant("kai", enforced=False),))
    assert [(each.kind, each.container, each.processes) for each in row.rows] == [(Kind.CONTAINER, "trainer", Amount(2))]


def test_a_breach_says_of_what_and_since_when(demo, view):
    row = row_of(view, "ranker")
    assert row.breaches == ("memory", "compute")
    assert {resource: demo.sample_seconds - since for resource, since in row.exceeded_since_seconds.items()} == {
        "memory": 100,
        "compute": 80,
    }


def test_a_mig_device_stands_below_its_parent(view):
    assert [gpu.label for gpu in view.gpus] == ["0", "1", "2", "3", "3:0", "3:1"]
    assert row_of(view, "labeler").gpus[0].mig_profile == "3g.40gb"


def test_memory_that_no_container_has_is_told_by_reason(view):
    assert [dict(gpu.unattributed_memory_bytes) for gpu in view.gpus[:3]] == [{"host_process": 25165824}, {}, {"host_process": 429916160}]


def test_what_the_driver_hides_is_unknown_and_not_0(answer_of):
    row = row_of(parse_node(answer_of("attribution/hidden-memory")), "masked")
    assert (row.memory_used_bytes, row.limit_exceeded["memory"]) == (UNKNOWN, None)


def test_an_idle_pod_uses_a_measured_0(view):
    row = row_of(view, "notebook")
    assert (row.memory_used_bytes, row.sm_utilization_ratio, row.processes) == (Amount(0), Amount(0.0), Amount(0))


def test_the_time_of_a_mig_devices_pod_is_unknown(view):
    row = row_of(view, "labeler")
    assert (row.sm_utilization_ratio, row.limit_exceeded["compute"]) == (UNKNOWN, None)


def test_no_limit_is_another_thing_than_a_limit_that_cannot_be_read(view, answer_of):
    assert row_of(view, "scratch").memory_limit_bytes == NONE
    unreadable = parse_node(answer_of("hami/malformed-tuple"))
    assert row_of(unreadable, "broken").memory_limit_bytes == UNKNOWN
    assert unreadable.claim_errors == (
        "team-a/broken-0 (hami): hami.io/vgpu-devices-allocated: memory: 'abc' is no whole number of digits up to 8796093022207",
    )


def test_a_lost_gpu_does_not_answer_and_its_pod_is_unknown(answer_of):
    view = parse_node(answer_of("attribution/one-gpu-lost"))
    assert [(gpu.label, gpu.up, gpu.memory_used_bytes.whole) for gpu in view.gpus] == [("0", True, True), ("1", False, False)]
    assert row_of(view, "on-b").processes == UNKNOWN


def test_a_source_that_is_down_is_told_with_its_reason(demo):
    answer = copy.deepcopy(demo.answer)
    answer["sources"][0] |= {"up": False, "reason": "the driver is not loaded"}
    assert parse_node(answer).sources_down == (("nvml", "the driver is not loaded"),)


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        (Sort.OVER, ["ranker", "scratch", "detector", "whisper", "cfd", "translate", "embedder", "labeler", "notebook"]),
        (Sort.MEMORY, ["cfd", "detector", "ranker", "labeler", "whisper", "translate", "embedder", "scratch", "notebook"]),
        (Sort.SM, ["cfd", "detector", "ranker", "whisper", "embedder", "translate", "scratch", "notebook", "labeler"]),
        (Sort.NAME, ["embedder", "translate", "ranker", "notebook", "scratch", "cfd", "whisper", "detector", "labeler"]),
        (Sort.GPU, ["embedder", "notebook", "detector", "translate", "ranker", "scratch", "whisper", "cfd", "labeler"]),
    ],
)
def test_rows_stand_in_the_order_asked_for_and_the_unknown_last(view, sort, expected):
    assert pods(choose(view, Choice(sort=sort))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RANK", ["ranker"]),
        ("nlp/", ["translate", "embedder"]),
        ("scratch/shell", ["scratch"]),
        ("1fbd2f3c", ["ranker", "scratch", "whisper", "translate"]),
        ("3:0", ["labeler"]),
        ("2", ["cfd", "translate", "embedder"]),  # GPU 2, and names with a 2
        ("nothing", []),
    ],
)
def test_a_filter_takes_parts_of_names_and_of_uuids_and_whole_indices(view, text, expected):
    found = pods(choose(view, Choice(filter=text)))
    assert [pod for pod in found if pod in expected] == expected
    assert text == "2" or found == expected


def test_a_namespace_is_taken_as_a_whole(view):
    assert pods(choose(view, Choice(namespace="research"))) == ["scratch", "notebook"]
    assert choose(view, Choice(namespace="resea")) == ()


def test_a_namespace_is_the_sum_of_its_pods_on_all_gpus(view):
    sums = {row.namespace: row for row in choose(view, Choice(by=By.NAMESPACE))}
    assert sums["nlp"].memory_used_bytes == Amount(16357785600 + 12373196800)
    assert [gpu.label for gpu in sums["nlp"].gpus] == ["0", "1"]
    assert sums["research"].limit_exceeded["unallocated"] is True


def test_a_sum_with_an_unknown_part_is_that_or_more(view):
    sums = {row.namespace: row for row in choose(view, Choice(by=By.NAMESPACE))}
    assert sums["vision"].sm_utilization_ratio == Amount(pytest.approx(0.44), whole=False)
    assert sums["vision"].memory_used_bytes.whole


def test_a_pod_without_a_limit_leaves_the_sum_of_limits_whole(view):
    sums = {row.namespace: row for row in choose(view, Choice(by=By.NAMESPACE))}
    assert sums["research"].memory_limit_bytes == Amount(17091788800)


def test_a_gpu_is_the_sum_of_its_pods(view):
    first = choose(view, Choice(by=By.GPU))[0]
    assert (first.kind, first.gpus[0].label, pods(first.rows)) == (Kind.GPU, "1", ["ranker", "scratch", "whisper", "translate"])
    assert first.memory_used_bytes.known == sum(row.memory_used_bytes.known for row in first.rows)
    assert first.breaches == ("memory", "compute", "unallocated")


def test_a_pod_is_the_sum_of_its_gpus(answer_of):
    (pod,) = choose(parse_node(answer_of("hami/two-containers-two-devices")), Choice(by=By.POD))
    assert (pod.kind, pod.memory_used_bytes, len(pod.gpus)) == (Kind.POD, Amount(11 * GIB), 2)
    assert [[container.container for container in row.rows] for row in pod.rows] == [["train"], ["encode", "train"]]


@pytest.mark.parametrize(
    ("amounts", "expected"),
    [
        ([], NONE),
        ([NONE, NONE], NONE),
        ([NONE, Amount(2)], Amount(2)),
        ([Amount(0), Amount(0)], Amount(0)),
        ([UNKNOWN, UNKNOWN], UNKNOWN),
        ([UNKNOWN, Amount(2), NONE], Amount(2, whole=False)),
    ],
)
def test_a_sum_knows_what_it_lacks(amounts, expected):
    assert add(amounts) == expected


def test_json_has_the_words_of_the_metrics_and_null_for_the_unknown(view):
    answer = build_json(view, choose(view, Choice(by=By.NAMESPACE, namespace="vision")), containers=True)
    (namespace,) = answer["rows"]
    assert (answer["node"], answer["simulated"]) == ("gpu-node-7", True)
    assert (namespace["kind"], namespace["namespace"], namespace["sm_utilization_ratio"]) == ("namespace", "vision", None)
    assert set(namespace["at_least"]) == {"sm_utilization_ratio", "sm_utilization_mean_ratio"}
    detector, labeler = namespace["rows"]
    assert (labeler["gpu"], labeler["mig_profile"], labeler["gpu_uuid"][:12]) == (0, "3g.40gb", "MIG-8bf7200f")
    assert detector["rows"][0]["container"] == "trainer"
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer


def test_json_without_containers_has_none(view):
    answer = build_json(view, choose(view, Choice(filter="ranker")), containers=False)
    assert "rows" not in answer["rows"][0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda answer: answer.pop("gpus"), "gpus: is not there"),
        (lambda answer: answer["pods"][2].pop("namespace"), "pods[2].namespace: is not there"),
        (lambda answer: answer["pods"][2]["gpus"][0].update(memory_used_bytes="1"), "pods[2].gpus[0].memory_used_bytes: no number"),
        (
            lambda answer: answer["pods"][2]["gpus"][0].update(memory_used_bytes=float("nan")),
            "pods[2].gpus[0].memory_used_bytes: no number",
        ),
        (lambda answer: answer["gpus"][0].update(up="yes"), "gpus[0].up: neither true nor false"),
        (lambda answer: answer.update(claim_errors=[3]), "claim_errors[0]: no object"),
    ],
)
def test_an_answer_of_another_form_is_refused_at_its_place(demo, change, text):
    answer = copy.deepcopy(demo.answer)
    change(answer)
    with pytest.raises(AnswerError) as refused:
        parse_node(answer)
    assert str(refused.value) == text


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_stands_in_an_answer_is_drawn_or_refused(demo, data):
    answer = copy.deepcopy(demo.answer)
    path = data.draw(st.sampled_from([each for each in places(answer) if each]))
    parent = answer
    for key in path[:-1]:
        parent = parent[key]
    hostile = st.sampled_from([None, "", "\x1b[2J", -1, 0, 10**30, 0.5, float("inf"), float("nan"), True, [], {}, [None], {"a": "b"}])
    parent[path[-1]] = data.draw(hostile)
    try:
        view = parse_node(answer)
    except AnswerError:
        return
    console = Console(width=80)
    for by in By:
        with console.capture() as captured:
            console.print(draw(view, choose(view, Choice(by=by)), Style(width=80), now_seconds=0.0))
        assert "\x1b[2J" not in captured.get()
        build_json(view, choose(view, Choice(by=by)), containers=True)


@pytest.mark.parametrize("name", ["top_rows", "top_text", "top_table", "top_keys"])
def test_rows_table_and_keys_reach_neither_the_terminal_nor_a_clock(name):
    tree = ast.parse((Path(__file__).parents[2] / "exporter" / "commands" / f"{name}.py").read_text())
    imported = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"codecs", "collections", "dataclasses", "enum", "exporter", "math", "re", "rich", "typing"}
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not calls & {"open", "print", "input"}
