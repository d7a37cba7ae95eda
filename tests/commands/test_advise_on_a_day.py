"""A day of a node with a known truth, remembered by a real Prometheus: what `advise` says of it follows from that truth alone.

The truth is STORY. The node is made of it and played on the simulated clock, and what the exporter said is scraped twice (a pair of
replicas), from another address after noon (the exporter was restarted), and not at all from 03:00 to 04:00.
"""

import contextlib
import json
import math
import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from pathlib import Path

import pytest
import yaml
from real_prometheus import Prometheus, backfill, skip_without_prometheus

from exporter import __version__, simulated
from exporter.commands import advise
from exporter.config import parse_config
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario
from exporter.text_format import Format

DOCUMENT = Path(__file__).parents[2] / "docs" / "advise.md"
STEP_SECONDS = 600
SCRAPED_AFTER_SECONDS = 400  # each sample in its own step, the last one fresh at midnight
HOUR, DAY = 3600, 86400
KEPT = tuple(f"fgpu_{name}" for name in ("build_info", "claim_memory", "gpu_info", "gpu_memory_total", "pod_info", "pod_memory"))
GAP = range(3 * HOUR, 4 * HOUR)
MIB = 1 << 20

SHARED, BUSY, WHOLE, SLICED, BIG, SMALL = (f"GPU-{number}0000000-0000-4000-8000-000000000000" for number in range(1, 7))
MIG = "MIG-8bf7200f-1574-4593-8266-f52ade76f38c"
GROUPS = {SHARED: "57199cf7-a835-4a07-85f2-b608e5436c06", BUSY: "44d5180d-894c-42da-b7b7-129d78059820"}
TOTAL_MIB = {SHARED: 81559, BUSY: 81559, WHOLE: 81559, SLICED: 81559, BIG: 81559, SMALL: 40960, MIG: 40192}
HIDDEN = None


@dataclass(frozen=True)
class Told:
    """A pod of the story."""

    namespace: str
    name: str
    gpu: str
    asks: dict
    """Annotations, or a resource."""
    uses: list
    """(from, to, MiB) in hours; it exists from the first to the last of them."""
    owner: tuple
    workload: str
    limit_mib: int | None = None


STORY = [
    # An hour at 24,000 MiB is 4 % of the day, ten minutes at 39,000 are 0.7 %.
    Told(
        "vision",
        "detector-train-0",
        SHARED,
        {"gpu-fraction": "0.5"},
        [(0, 9, 20000), (9, 10, 24000), (10, 12, 20000), (12, 12 + 1 / 6, 39000), (12 + 1 / 6, 24, 20000)],
        ("StatefulSet", "detector-train"),
        "StatefulSet detector-train",
        40750,
    ),
    # Rolled out anew at noon: two ReplicaSets of one Deployment.
    Told(
        "nlp",
        "embedder-7c9d8b6f5-x2k4q",
        SHARED,
        {"gpu-memory": "16000"},
        [(0, 12, 9000)],
        ("ReplicaSet", "embedder-7c9d8b6f5"),
        "Deployment embedder",
        16000,
    ),
    Told(
        "nlp",
        "embedder-66d4f8c9dd-b7wzn",
        SHARED,
        {"gpu-memory": "15000"},
        [(12, 24, 8000)],
        ("ReplicaSet", "embedder-66d4f8c9dd"),
        "Deployment embedder",
        15000,
    ),
    Told(
        "research",
        "notebook-maria-0",
        SHARED,
        {"gpu-fraction": "0.2"},
        [(0, 24, 0)],
        ("StatefulSet", "notebook-maria"),
        "StatefulSet notebook-maria",
        16300,
    ),
    Told(
        "recsys",
        "ranker-5d8f7c9b4-7hm2n",
        BUSY,
        {"gpu-fraction": "0.3"},
        [(0, 8, 18900), (8, 20, 30000), (20, 24, 19200)],
        ("ReplicaSet", "ranker-5d8f7c9b4"),
        "Deployment ranker",
        24450,
    ),
    # The driver hides its process's memory for six hours.
    Told(
        "nlp",
        "translate-0",
        BUSY,
        {"gpu-fraction": "0.25"},
        [(0, 6, 15600), (6, 12, HIDDEN), (12, 24, 15600)],
        ("StatefulSet", "translate"),
        "StatefulSet translate",
        20375,
    ),
    Told("research", "scratch", BUSY, {}, [(21, 24, 2900)], ("", ""), "Pod scratch"),
    # Two runs of a CronJob, two hours each.
    Told(
        "batch",
        "report-29453760-4hq7t",
        BUSY,
        {"gpu-fraction": "0.2"},
        [(1, 3, 12000)],
        ("Job", "report-29453760"),
        "CronJob report",
        16300,
    ),
    Told(
        "batch",
        "report-29454480-9xkcd",
        BUSY,
        {"gpu-fraction": "0.2"},
        [(13, 15, 12000)],
        ("Job", "report-29454480"),
        "CronJob report",
        16300,
    ),
    Told(
        "simulation",
        "cfd-solver-0",
        WHOLE,
        {"resource": "nvidia.com/gpu"},
        [(0, 24, 62464)],
        ("StatefulSet", "cfd-solver"),
        "StatefulSet cfd-solver",
        81559,
    ),
    Told(
        "vision",
        "labeler-0",
        MIG,
        {"resource": "nvidia.com/mig-3g.40gb"},
        [(0, 24, 21500)],
        ("StatefulSet", "labeler"),
        "StatefulSet labeler",
        40192,
    ),
    Told(
        "ml",
        "tagger-6b5f9d7c8-q9wzr",
        BIG,
        {"hami.io/vgpu-devices-allocated": f"{BIG},NVIDIA,10000,30:;"},
        [(0, 24, 5000)],
        ("ReplicaSet", "tagger-6b5f9d7c8"),
        "Deployment tagger",
        10000,
    ),
    Told(
        "ml",
        "tagger-6b5f9d7c8-zz42k",
        SMALL,
        {"hami.io/vgpu-devices-allocated": f"{SMALL},NVIDIA,10000,30:;"},
        [(0, 24, 4100)],
        ("ReplicaSet", "tagger-6b5f9d7c8"),
        "Deployment tagger",
        10000,
    ),
]


# --- the node that the story is of ---


def pod(number, namespace, name, labels, annotations, resource=None, owner=("", "")):
    owners = [
        {"apiVersion": "v1", "kind": kind, "name": owned_by, "uid": f"{number:08x}-0000-4000-8000-0000000000ff", "controller": True}
        for kind, owned_by in [owner]
        if kind
    ]
    container = {"name": "main", "resources": {"limits": {resource: "1"}}} if resource else {"name": "main"}
    status = {"name": "main", "containerID": f"containerd://{number:064x}", "state": {"running": {}}}
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": f"{number:08x}-0000-4000-8000-000000000000",
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": owners,
        },
        "spec": {"nodeName": "gpu-node-1", "schedulerName": "kai-scheduler", "containers": [container]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


def scenario():
    reservations = [
        pod(
            900 + number,
            "kai-resource-reservation",
            f"gpu-reservation-{number}",
            {"app": "kai-resource-reservation", "runai-gpu-group": group},
            {"run.ai/reserve_for_gpu_index": gpu},
            "nvidia.com/gpu",
        )
        for number, (gpu, group) in enumerate(GROUPS.items())
    ]
    steps = {}
    for number, told in enumerate(STORY, start=1):
        asks = dict(told.asks)
        resource = asks.pop("resource", "nvidia.com/gpu" if told.gpu in (BIG, SMALL) else None)
        labels = {"runai-gpu-group": GROUPS[told.gpu]} if {"gpu-fraction", "gpu-memory"} & asks.keys() else {}
        devices = [{"resource_name": resource, "device_ids": [told.gpu]}] if told.gpu in (WHOLE, MIG) else []
        begin, end = told.uses[0][0], told.uses[-1][1]
        step = steps.setdefault(begin, {"pods": [], "pod_resources": [], "processes": [], "remove": {"pods": [], "processes": []}})
        step["pods"].append(pod(number, told.namespace, told.name, labels, asks, resource, told.owner))
        step["pod_resources"].append({"namespace": told.namespace, "name": told.name, "containers": [{"name": "main", "devices": devices}]})
        for hour, _, mib in told.uses:
            step = steps.setdefault(hour, {"pods": [], "pod_resources": [], "processes": [], "remove": {"pods": [], "processes": []}})
            process = {"pid": 40000 + number, "gpus": [{"gpu": told.gpu, "memory": "hidden" if mib is HIDDEN else f"{mib}Mi"}]}
            if hour == begin:
                process["container"] = f"{told.namespace}/{told.name}/main"
            if mib != 0:
                step["processes"].append(process)
        if end < 24:
            step = steps.setdefault(end, {"pods": [], "pod_resources": [], "processes": [], "remove": {"pods": [], "processes": []}})
            step["remove"]["pods"].append(f"{told.namespace}/{told.name}")
            step["remove"]["processes"].append(40000 + number)
    first = steps.pop(0)
    first.pop("remove")
    first["pods"] = [*reservations, *first["pods"]]
    gpus = [{"uuid": gpu, "memory_total": f"{TOTAL_MIB[gpu]}Mi"} for gpu in (SHARED, BUSY, WHOLE, SLICED, BIG, SMALL)]
    gpus[3]["mig"] = [
        {"uuid": MIG, "profile": "3g.40gb", "gpu_instance_id": 2, "compute_instance_id": 0, "memory_total": f"{TOTAL_MIB[MIG]}Mi"}
    ]
    gpus[5]["model"] = "NVIDIA A100-PCIE-40GB"
    return {
        "node": {"name": "gpu-node-1", "labels": {"nvidia.com/gpu.memory": "81559"}},
        "gpus": gpus,
        **first,
        "timeline": [{"at": f"{round(hour * HOUR)}s", **step} for hour, step in sorted(steps.items())],
    }


def play(folder):
    """Answer what was scraped in the day: (seconds, target, exposition)."""
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario()))
    config, clock, said = parse_config(["--demo", "--once"], {}), SimulatedClock(), []
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(SimulatedNode(load_scenario(folder / "scenario.yaml"), clock))
        sampler = simulated.wire(config, node, clock, stack)
        for seconds in range(0, DAY, STEP_SECONDS):
            simulated.sample_at(node, sampler, float(seconds))
            text = sampler.exposition.render(Format.TEXT, compressed=False).decode()
            kept = "\n".join(line for line in text.splitlines() if line.startswith(KEPT))
            address = "10.0.0.1:9844" if seconds < DAY / 2 else "10.0.0.9:9844"
            for replica in range(2) if seconds not in GAP else ():
                target = {"job": f"fgpu-exporter-{replica}", "instance": address, "node": "gpu-node-1"}
                said.append((clock.time() + SCRAPED_AFTER_SECONDS + replica * 2, target, kept + "\n"))
        end = clock.time() + STEP_SECONDS
    return [*said, *other_clusters(said[-1])], end


def other_clusters(last):
    """What the exporters of other clusters said at the end: by cluster, what a scrape or an exporter gets wrong there."""
    seconds, target, text = last
    of_other = {
        "renamed": re.sub(r"\b(namespace|pod)=", r"exported_\1=", text),
        "old": re.sub(r'(owner_kind|owner_name|role)="[^"]*",?', "", text).replace(f'version="{__version__}"', 'version="0.0.9"'),
        "idle": "\n".join(line for line in text.splitlines() if "fgpu_build_info" in line) + "\n",
        "plumbing": text.replace('role="workload"', 'role="system"'),
    }
    return [(seconds, {**target, "cluster": cluster}, text) for cluster, text in of_other.items()]


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    """Answer the flags that ask a Prometheus for the whole day."""
    skip_without_prometheus()
    folder = tmp_path_factory.mktemp("day")
    said, end = play(folder)
    backfill(said, folder)
    prometheus = Prometheus(folder, {"global": {"scrape_interval": "15s"}})
    try:
        prometheus.wait_until_ready()
        yield [
            "--prometheus-url",
            f"http://127.0.0.1:{prometheus.port}",
            "--time",
            f"{end:.0f}",
            "--range",
            "24h",
            "--step",
            "10m",
            "--selector",
            'cluster=""',
        ]
    finally:
        prometheus.stop()


@pytest.fixture
def run(day, capsys):
    """Answer a function that runs the command on the day: its exit status, what it printed, and what it said on stderr."""

    def run_one(*arguments):
        status = advise.main([*day, "--min-history", "12h", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run_one


@pytest.fixture
def rows(run):
    status, out, err = run("--json")
    assert (status, err) == (0, "")
    return {
        (row["namespace"], f"{row['owner_kind']} {row['owner_name']}", row["gpu_memory_total_bytes"] // MIB): row
        for row in json.loads(out)["workloads"]
    }


# --- the truth ---


def known_mib(told):
    """What the pod used at each moment that was sampled and scraped and at which it could be known."""
    moments = [second for second in range(0, DAY, STEP_SECONDS) if second not in GAP]
    return [mib for second in moments for begin, end, mib in told.uses if begin * HOUR <= second < end * HOUR - 1 and mib is not HIDDEN]


def p99(values):
    """The quantile as statistics has it: between the two values around rank 0.99 (n - 1)."""
    values = sorted(values)
    rank = 0.99 * (len(values) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (rank - below)


def truth():
    """(namespace, workload, MiB of its GPU) -> its pods."""
    found = {}
    for told in STORY:
        found.setdefault((told.namespace, told.workload, TOTAL_MIB[told.gpu]), []).append(told)
    return found


def true_share(pods, headroom="1.2"):
    """The hundredths of the GPU, counted as KAI does, that hold the largest 99th percentile and the headroom."""
    peak = Decimal(max(p99(known_mib(told)) for told in pods)) * Decimal(headroom)
    counted = Decimal(TOTAL_MIB[pods[0].gpu] // 100 * 100)
    return float((peak / counted).quantize(Decimal("0.01"), rounding=ROUND_CEILING))


ADVISED = {
    ("vision", "StatefulSet detector-train", 81559): 0.36,
    ("nlp", "Deployment embedder", 81559): 0.14,
    ("research", "StatefulSet notebook-maria", 81559): 0.0,
    ("recsys", "Deployment ranker", 81559): 0.45,
    ("nlp", "StatefulSet translate", 81559): 0.23,
    ("simulation", "StatefulSet cfd-solver", 81559): 0.92,
    ("vision", "StatefulSet labeler", 40192): 0.65,
    ("ml", "Deployment tagger", 81559): 0.08,
    ("ml", "Deployment tagger", 40960): 0.13,
}
TOO_SHORT = {("research", "Pod scratch", 81559), ("batch", "CronJob report", 81559)}


def test_the_shares_are_those_that_the_story_makes_true(rows):
    told = {key: row["advised_memory_ratio"] for key, row in rows.items() if row["advised_memory_ratio"] is not None}
    assert told == {key: true_share(pods) for key, pods in truth().items() if key not in TOO_SHORT}
    assert told == ADVISED


def test_each_workload_of_the_story_has_one_row_for_each_kind_of_gpu(rows):
    assert rows.keys() == truth().keys()


def test_peaks_and_what_is_asked_are_those_of_the_story(rows):
    for key, pods in truth().items():
        assert rows[key]["memory_used_p99_bytes"] == math.ceil(max(p99(known_mib(told)) for told in pods) * MIB), key
        assert rows[key]["memory_used_peak_bytes"] == max(mib for told in pods for mib in known_mib(told)) * MIB, key
    asked = {key: row["memory_limit_bytes"] and row["memory_limit_bytes"] // MIB for key, row in rows.items()}
    assert asked == {key: pods[-1].limit_mib for key, pods in truth().items()}


def test_what_would_be_freed_is_what_running_pods_ask_less_what_they_would_be_given(rows):
    freed = {key: row["memory_freed_bytes"] // MIB for key, row in rows.items() if row["memory_freed_bytes"] is not None}
    assert freed == {
        ("research", "StatefulSet notebook-maria", 81559): 16300,
        ("vision", "StatefulSet detector-train", 81559): 40750 - 29340,  # 0.36 of 81500
        ("simulation", "StatefulSet cfd-solver", 81559): 81559 - 74980,  # 0.92
        ("ml", "Deployment tagger", 40960): 10000 - 4920,  # 1.2 * 4100: HAMi is asked in MiB
        ("ml", "Deployment tagger", 81559): 10000 - 6000,
        ("nlp", "Deployment embedder", 81559): 15000 - 11410,  # the pod that runs now; 0.14
        ("nlp", "StatefulSet translate", 81559): 20375 - 18745,  # 0.23
        ("recsys", "Deployment ranker", 81559): 24450 - 36675,  # 0.45: it needs more than it asks
    }


def test_the_most_that_is_freed_comes_first(rows):
    freed = [row["memory_freed_bytes"] for row in rows.values()]
    known = [value for value in freed if value is not None]
    assert known == sorted(known, reverse=True)
    assert freed[len(known) :] == [None] * 3


def test_history_is_the_time_in_which_the_use_of_any_pod_was_known(rows):
    hours = {key: row["history_seconds"] / HOUR for key, row in rows.items()}
    assert hours == pytest.approx(
        {
            ("vision", "StatefulSet detector-train", 81559): 23,  # the gap in the scrapes
            ("nlp", "Deployment embedder", 81559): 23,  # two pods, one after the other
            ("research", "StatefulSet notebook-maria", 81559): 23,
            ("recsys", "Deployment ranker", 81559): 23,
            ("nlp", "StatefulSet translate", 81559): 17,  # six hours hidden
            ("research", "Pod scratch", 81559): 3,
            ("batch", "CronJob report", 81559): 4,  # two runs
            ("simulation", "StatefulSet cfd-solver", 81559): 23,
            ("vision", "StatefulSet labeler", 40192): 23,
            ("ml", "Deployment tagger", 81559): 23,
            ("ml", "Deployment tagger", 40960): 23,
        }
    )


def test_each_row_says_what_there_is_to_say_of_it(rows):
    several = "runs on several kinds of GPU: the largest of its shares suffices on all"
    assert {key: row["notes"] for key, row in rows.items() if row["notes"]} == {
        ("vision", "StatefulSet detector-train", 81559): ["would not have fit at its highest, 39000 MiB"],
        ("research", "StatefulSet notebook-maria", 81559): ["used no GPU memory at all"],
        ("nlp", "StatefulSet translate", 81559): ["its use was not known for 26% of the time it ran"],
        ("research", "Pod scratch", 81559): ["history too short: 3h of 12h"],
        ("batch", "CronJob report", 81559): ["history too short: 4h of 12h"],
        ("vision", "StatefulSet labeler", 40192): [
            "its size comes from a MIG profile: 25800 MiB would suffice, and what that frees is not known"
        ],
        ("ml", "Deployment tagger", 81559): [several],
        ("ml", "Deployment tagger", 40960): [several],
    }


def test_more_headroom_is_a_larger_share(run):
    _, out, _ = run("--json", "--headroom", "0.5", "--namespace", "vision")
    shares = {row["owner_name"]: row["advised_memory_ratio"] for row in json.loads(out)["workloads"]}
    of_story = {told.owner[1]: true_share([told], "1.5") for told in STORY if told.namespace == "vision"}
    assert shares == of_story
    assert shares["detector-train"] == 0.45


def test_only_the_named_namespaces_are_shown(run):
    _, out, _ = run("--json", "--namespace", "ml", "--namespace", "recsys")
    assert {row["namespace"] for row in json.loads(out)["workloads"]} == {"ml", "recsys"}


def test_a_selector_says_which_series_are_looked_at(run):
    _, out, _ = run("--json", "--selector", 'job="fgpu-exporter-0",node=~"gpu-.*"')
    assert len(json.loads(out)["workloads"]) == len(truth())
    _, out, _ = run("--json", "--selector", '{cluster="", node="gpu-node-1"}')
    assert len(json.loads(out)["workloads"]) == len(truth())
    status, out, err = run("--selector", 'node="gpu-node-2"')
    assert (status, out) == (1, "")
    assert 'no series of fgpu-exporter with node="gpu-node-2" in the 24h looked at' in err


def test_a_namespace_without_a_pod_on_a_gpu_is_said(run):
    status, out, err = run("--namespace", "vison")
    assert (status, out) == (1, "")
    assert "knows no pod of vison on a GPU" in err


def test_a_time_of_which_prometheus_knows_nothing_is_said(run):
    status, out, err = run("--time", "2020-01-01T00:00:00Z")
    assert (status, out) == (1, "")
    assert 'has no series of fgpu-exporter with cluster="" in the 24h looked at' in err


def test_a_selector_that_is_none_is_said(run):
    status, _, err = run("--selector", "node=gpu")
    assert status == 1
    assert "is --selector a list of label matchers?" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("renamed", "series have the exporter's labels namespace and pod as exported_namespace and exported_pod: scrape the exporter with"),
        ("old", "fgpu_pod_info is missing or lacks owner_kind, owner_name and role (exporter of version 0.0.9)"),
        ("idle", "no pod's memory in the 24h looked at: has any pod used a GPU, and for longer than --step 10m?"),
        ("plumbing", "only pods of the sharing systems themselves are on GPUs there"),
    ],
)
def test_series_that_cannot_be_used_are_said_with_what_to_do(run, cluster, said):
    status, out, err = run("--selector", f'cluster="{cluster}"')
    assert (status, out) == (1, "")
    assert said in err
    assert err.count("\n") == 1


def test_the_table_is_for_a_person_and_is_the_one_that_the_documentation_shows(run):
    status, out, err = run()
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert out in DOCUMENT.read_text()
