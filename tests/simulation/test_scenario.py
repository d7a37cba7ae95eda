import time
from pathlib import Path

import pytest

from exporter.simulation import DEMO, ScenarioError, load_scenario
from exporter.simulation.node import Withheld

CASES = Path(__file__).parents[1] / "cases"
UNUSABLE = CASES / "attribution" / "unknown-key-in-the-file.yaml"


@pytest.mark.parametrize("path", sorted(set(CASES.rglob("*.yaml")) - {UNUSABLE}), ids=lambda path: path.stem)
def test_every_case_can_be_loaded(path):
    assert load_scenario(path).node_name == "gpu-node-1"


def test_the_built_in_demo_can_be_loaded():
    assert load_scenario(DEMO).duration_seconds == 300


def test_a_misspelt_key_is_named_with_its_line_and_the_key_that_was_meant():
    with pytest.raises(ScenarioError) as caught:
        load_scenario(UNUSABLE)
    assert str(caught.value) == (
        f"{UNUSABLE}:8: gpus[0].memory_totl: unknown key; did you mean memory_total? expected one of uuid, index, minor, model, "
        "memory_total, memory_reserved, memory_used, utilization, fault, mig"
    )


# What is wrong, the line on which it stands (the file begins with `node: {name: n}` on line 1), the key, and what is said about it.
WRONG = [
    ("gpu: []", 2, "gpu", "unknown key"),
    ("gpus: {}", 2, "gpus", "expected a list, found a mapping"),
    ("gpus:", 2, "gpus", "expected a list, found nothing"),
    ("gpus:\n  - index: 0", 3, "gpus[0]", "the key uuid is missing"),
    ("gpus:\n  - uuid: 5", 3, "gpus[0].uuid", "expected text, found a number ('5'); put it in quotes"),
    ("gpus:\n  - uuid: ''", 3, "gpus[0].uuid", "expected a name"),
    ("gpus:\n  - uuid: G\n  - uuid: G", 4, "gpus[1]", "the uuid G stands here twice, first on line 3"),
    ("gpus:\n  - uuid: G\n    index: '0'", 4, "gpus[0].index", "expected a whole number from 0 to 255, found '0'"),
    ("gpus:\n  - uuid: G\n    index: 010", 4, "gpus[0].index", "expected a whole number"),
    ("gpus:\n  - uuid: G\n    memory_total: 10GB", 4, "gpus[0].memory_total", "expected a Kubernetes quantity such as 10Gi"),
    ("gpus:\n  - uuid: G\n    memory_total: -1", 4, "gpus[0].memory_total", "is no amount from 0"),
    ("gpus:\n  - uuid: G\n    memory_used: hidden", 4, "gpus[0].memory_used", "expected a Kubernetes quantity"),
    ("gpus:\n  - uuid: G\n    fault: broken", 4, "gpus[0].fault", "expected one of lost, hang, unknown, no_permission, none"),
    ("gpus:\n  - uuid: G\n    mig:\n      - {uuid: M}\n      - {uuid: M}", 6, "gpus[0].mig[1]", "the uuid M stands here twice"),
    ("gpus:\n  - {uuid: G, index: 1}\n  - {uuid: H}", 4, "gpus", "H has the index 1, which G has"),
    ("gpus:\n  - {uuid: G}\n  - {uuid: H, mig: [{uuid: G}]}", 4, "gpus", "the uuid G is that of two devices"),
    ("gpus: []\ngpus: []", 3, "gpus", "stands here twice, first on line 2"),
    ("processes:\n  - command: a", 3, "processes[0]", "the key pid is missing"),
    ("processes:\n  - pid: 1.5", 3, "processes[0].pid", "expected a whole number from 0 to 4294967295"),
    ("processes:\n  - pid: -1", 3, "processes[0].pid", "expected a whole number"),
    ("processes:\n  - pid: 7\n  - pid: 7", 4, "processes[1]", "the pid 7 stands here twice"),
    ("processes:\n  - pid: 7\n    state: Q", 4, "processes[0].state", "expected one of R, S, D"),
    ("processes:\n  - pid: 7\n    container: a/b", 4, "processes[0].container", "expected namespace/pod/container"),
    ("processes:\n  - pid: 7\n    container: a/b/c", 3, "processes.container a/b/c", "there is no pod a/b at 0 s"),
    ("processes:\n  - {pid: 7, container: a/b/c, cgroup: x}", 3, "processes[0]", "expected one of the keys container and cgroup, not both"),
    ("processes:\n  - pid: 7\n    gpus: [{gpu: G}]", 4, "processes[pid=7].gpus", "there is no GPU or MIG device G"),
    ("processes:\n  - pid: 7\n    gpus: [{gpu: G, kind: cuda}]", 4, "processes[0].gpus[0].kind", "expected one of compute, graphics, mps"),
    ("processes:\n  - pid: 7\n    gpus: [{gpu: G, sm: 12.5}]", 4, "processes[0].gpus[0].sm", "expected a whole number of percent"),
    ("processes:\n  - pid: 7\n    command: 'a\n\n      b'", 4, "processes[0].command", "expected a name of one line"),
    ("pods:\n  - spec: {}", 3, "pods[0]", "the key metadata.name is missing"),
    ("pods:\n  - metadata: {namespace: a}", 3, "pods[0].metadata", "the key name is missing"),
    ("pods:\n  - metadata: {name: a}\n  - metadata: {name: a, namespace: default}", 4, "pods[1]", "the pod default/a stands here twice"),
    ("pods:\n  - metadata: {name: a, annotations: {gpu-fraction: 0.5}}", 3, "pods[0].metadata.annotations.gpu-fraction", "it in quotes"),
    ("pods:\n  - metadata: {name: a}\n    spec: []", 4, "pods[0].spec", "expected a mapping, found a list"),
    ("pods:\n  - metadata: {name: a, name: b}", 3, "pods[0].metadata.name", "stands here twice"),
    ("pods:\n  - metadata: {name: a}\n    spec: &s {x: *s}", 4, "pods[0].spec.x", "refers to itself"),
    ("pods:\n  - metadata: {name: a}\n    spec: {x: .inf}", 4, "pods[0].spec.x", "a value that JSON can carry"),
    ("pod_resources:\n  - {namespace: a, name: b, container: []}", 3, "pod_resources[0].container", "did you mean containers?"),
    ("allocatable: [{device_ids: []}]", 2, "allocatable[0]", "the key resource_name is missing"),
    ("pod_resources:\n  - {name: b, containers: [{name: c, devices: [{}]}]}", 3, "pod_resources[0].containers[0].devices[0]", "is missing"),
    ("allocatable:\n  - {resource_name: r, device_ids: x}", 3, "allocatable[0].device_ids", "expected a list, found 'x'"),
    ("sources: {nvml: gone}", 2, "sources.nvml", "expected one of up, down, not_loaded, version_mismatch"),
    ("sources: {dcgm: up}", 2, "sources.dcgm", "unknown key"),
    ("files: {etc/x: {text: a}}", 2, "files.etc/x", "expected an absolute path"),
    ("files: {/etc/../x: {text: a}}", 2, "files./etc/../x", "expected an absolute path"),
    ("files: {/x: {text: a, base64: YQ==}}", 2, "files./x", "expected one of the keys text, base64 and gzip"),
    ("files: {/x: {gzip: YQ==}}", 2, "files./x", "expected base64 of gzip: Not a gzipped file (b'a')"),
    ("files: {/x: {base64: '*'}}", 2, "files./x", "expected base64"),
    ("timeline:\n  - pods: []", 3, "timeline[0]", "the key at is missing"),
    ("timeline:\n  - at: soon", 3, "timeline[0].at", "expected a time from the start such as 20s, 1m30s or 2h, found 'soon'"),
    ("timeline:\n  - at: -5s", 3, "timeline[0].at", "expected a time"),
    ("timeline:\n  - {at: 5s, removed: {}}", 3, "timeline[0].removed", "did you mean remove?"),
    ("timeline:\n  - at: 5s\n    remove: {processes: [7]}", 4, "remove.processes", "there is no process 7 to remove at 5 s"),
    ("timeline:\n  - at: 5s\n    remove: {pods: [b]}", 4, "timeline[0].remove.pods[0]", "expected namespace/name of a pod"),
    ("timeline:\n  - at: 5s\n    remove: {pods: [a/b]}", 4, "remove.pods", "there is no pod a/b to remove at 5 s"),
    ("timeline:\n  - at: 5s\n    remove: {gpus: [G]}", 4, "remove.gpus", "there is no GPU or MIG device G to remove at 5 s"),
    ("timeline:\n  - at: 5s\n    processes: [{pid: 7, container: a/b/c}]", 4, "processes.container a/b/c", "there is no pod a/b at 5 s"),
    ("timeline:\n  - at: 5s\n    node: {name: m}", 3, "node.name", "a node keeps its name, which is n"),
    ("timeline:\n  - at: 5s\n    timeline: []", 4, "timeline[0].timeline", "unknown key"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "key", "says"), WRONG, ids=[text.replace("\n", " ") for text, *_ in WRONG])
def test_what_is_wrong_is_said_in_one_line_with_file_line_and_key(tmp_path, text, line, key, says):
    path = tmp_path / "node.yaml"
    path.write_text(f"node: {{name: n}}\n{text}\n")
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: {key}: ")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ":1: the file is empty"),
        (b"node: {name: n}\ngpus: [", ":3: no valid YAML: "),
        (b"node: {name: n}\ngpus: *nobody", ":2: no valid YAML: found undefined alias"),
        (b"node: {name: n}\n---\nnode: {}", ":2: no valid YAML: but found another document"),
        (b"node: {name: n}\n\ngpus: \x07", ":3: no valid YAML: control characters are not allowed"),
        (b"node: {name: \xff}", ": cannot be read: no UTF-8 text"),
        (b"- 1", ":1: the file: expected a mapping, found a list"),
        (b"gpus: []", ":1: the file: the key node.name is missing"),
        (b"node: {name: n}\npods: [{metadata: {name: p}, spec: {a: " + 600 * b"[" + 600 * b"]" + b"}}]", ":1: the file: nested too deeply"),
        (b"node: {name: n}\ngpus: !gpus []", ":2: gpus: expected a list, found the tag !gpus"),
    ],
)
def test_a_file_that_is_no_scenario_is_refused_in_one_line(tmp_path, content, says):
    path = tmp_path / "node.yaml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    assert str(caught.value).startswith(f"{path}{says}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ScenarioError, match=r"nowhere\.yaml: cannot be read: No such file or directory"):
        load_scenario(tmp_path / "nowhere.yaml")


def test_what_stands_behind_an_alias_is_read_once(tmp_path):
    path = tmp_path / "node.yaml"
    ids = ", ".join(f"device-{number}" for number in range(1000))
    path.write_text(
        "node: {name: n}\npod_resources:\n"
        f"- {{name: p0, containers: &all [{{name: c, devices: [{{resource_name: r, device_ids: [{ids}]}}]}}]}}\n"
        + "".join(f"- {{name: p{number}, containers: *all}}\n" for number in range(1, 2000))
    )
    began = time.process_time()
    (step,) = load_scenario(path).steps
    assert time.process_time() - began < 2
    assert len(step.pod_resources) == 2000
    assert step.pod_resources[1999].said["containers"] is step.pod_resources[0].said["containers"]


def test_merge_keys_bring_what_is_not_said_itself(load):
    (step,) = load("""
        node: {name: n}
        gpus:
          - &first {uuid: G, model: NVIDIA H100, memory_total: 81559Mi}
          - {<<: *first, uuid: H, memory_reserved: 640Mi}
    """).steps
    assert step.gpus[1].said == {
        "uuid": "H", "model": "NVIDIA H100", "memory_total_bytes": 81559 << 20, "memory_reserved_bytes": 640 << 20
    }  # fmt: skip


def test_words_stand_where_the_driver_says_no_number(load):
    (step,) = load("""
        node: {name: n}
        gpus: [{uuid: G, memory_total: unsupported}]
        processes: [{pid: 7, gpus: [{gpu: G, memory: hidden, kind: [compute, mps, compute]}]}]
    """).steps
    assert step.gpus[0].said["memory_total_bytes"] is Withheld.UNSUPPORTED
    use = step.processes[0].said["gpus"][0].said
    assert use == {"gpu": "G", "memory_bytes": Withheld.HIDDEN, "kinds": ("compute", "mps")}


def test_dates_in_kubernetes_objects_stay_text(load):
    (step,) = load("""
        node: {name: n}
        pods: [{metadata: {name: p, creationTimestamp: 2026-01-01T00:00:00Z}, spec: {priority: 7, hostPID: true, nothing: null}}]
    """).steps
    pod = step.pods[0].said
    assert pod["metadata"]["creationTimestamp"] == "2026-01-01T00:00:00Z"
    assert pod["spec"] == {"priority": 7, "hostPID": True, "nothing": None}


def test_steps_are_played_in_the_order_of_their_times(load):
    scenario = load("""
        node: {name: n}
        timeline:
          - {at: 1m, node: {labels: {step: second}}}
          - {at: 5, node: {labels: {step: first}}}
    """)
    assert [(step.at_seconds, step.machine.get("labels")) for step in scenario.steps[1:]] == [
        (5, {"step": "first"}),
        (60, {"step": "second"}),
    ]


def test_files_are_bytes(load):
    (step,) = load("""
        node: {name: n}
        files: {/etc/a: {text: "x\\n"}, /etc/b: {base64: AAH/}}
    """).steps
    assert step.files == {"/etc/a": b"x\n", "/etc/b": b"\x00\x01\xff"}
