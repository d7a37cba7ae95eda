"""From the demo's over-using pod to a real Alertmanager that holds the alert, and lets go of it when the pod comes back."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from live import Daemon

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "fgpu.alerts.yaml"
RANKER = "ranker-5d8f7c9b4-7hm2n"
PROGRAMS = {"prometheus": "prometheus", "prometheus-alertmanager": "prometheus-alertmanager"}

# The demo's over-using pod in a hurry: it grows at 3 s and comes back at 15 s.
SCENARIO = """\
node: {name: gpu-node-7, labels: {nvidia.com/gpu.memory: "81559"}}
gpus: [{uuid: GPU-1fbd2f3c-c156-42eb-b849-32551517fe1f, model: NVIDIA A100-SXM4-80GB, memory_total: 81559Mi}]
pods:
  - metadata:
      name: gpu-reservation-4fc9ae57c1889f5d
      namespace: kai-resource-reservation
      uid: 89ff451c-7140-4495-83da-6ba7f084235f
      labels: {app: kai-resource-reservation, runai-gpu-group: 44d5180d-894c-42da-b7b7-129d78059820}
      annotations: {run.ai/reserve_for_gpu_index: GPU-1fbd2f3c-c156-42eb-b849-32551517fe1f}
    spec: {nodeName: gpu-node-7, containers: [{name: resource-reservation}]}
    status: {phase: Running}
  - metadata:
      name: ranker-5d8f7c9b4-7hm2n
      namespace: recsys
      uid: 7c2933a9-a815-4408-a61e-614d9cecacf1
      labels: {kai.scheduler/queue: recsys, runai-gpu-group: 44d5180d-894c-42da-b7b7-129d78059820}
      annotations: {gpu-fraction: "0.3", received-resource-type: Fraction}
    spec: {schedulerName: kai-scheduler, nodeName: gpu-node-7, containers: [{name: ranker}]}
    status:
      phase: Running
      containerStatuses:
        - name: ranker
          containerID: containerd://6c1cadcde525d92c07cb143df8f00e178ef245a9b26b458f0c1d3c38854d6f07
          state: {running: {startedAt: "2026-01-01T00:00:00Z"}}
pod_resources: [{namespace: recsys, name: ranker-5d8f7c9b4-7hm2n, containers: [{name: ranker}]}]
processes:
  - pid: 42077
    container: recsys/ranker-5d8f7c9b4-7hm2n/ranker
    gpus: [{gpu: GPU-1fbd2f3c-c156-42eb-b849-32551517fe1f, memory: 18900Mi}]
timeline:
  - at: 3s
    processes: [{pid: 42077, gpus: [{gpu: GPU-1fbd2f3c-c156-42eb-b849-32551517fe1f, memory: 30Gi}]}]
  - at: 15s
    processes: [{pid: 42077, gpus: [{gpu: GPU-1fbd2f3c-c156-42eb-b849-32551517fe1f, memory: 19200Mi}]}]
"""


def free_port():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


def hurried(text):
    """Answer the shipped rules with the patience of a test."""
    rules = yaml.safe_load(text)
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["for"] = "2s"
            if "keep_firing_for" in rule:
                rule["keep_firing_for"] = "1s"
    return rules


@pytest.fixture
def alertmanager(tmp_path):
    """Answer a function that asks a real Alertmanager for its alerts. A real Prometheus scrapes the exporter and tells it."""
    if missing := [package for program, package in PROGRAMS.items() if shutil.which(program) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed (Debian packages of these names)")
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    (tmp_path / "fgpu.alerts.yaml").write_text(yaml.safe_dump(hurried(ALERTS.read_text())))
    (tmp_path / "alertmanager.yaml").write_text(yaml.safe_dump({"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}]}))
    exporter = Daemon(
        ["--scenario", str(tmp_path / "scenario.yaml"), "--sample-interval-seconds", "0.5", "--breach-hold-seconds", "1"], {}
    ).wait_until_started()
    alertmanager_port, prometheus_port = free_port(), free_port()
    target = {"targets": [f"127.0.0.1:{exporter.port}"], "labels": {"node": "gpu-node-7"}}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["fgpu.alerts.yaml"],
        "scrape_configs": [{"job_name": "fgpu-exporter", "honor_labels": True, "static_configs": [target]}],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager_port}"]}]}]},
    }
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    commands = [
        [
            "prometheus-alertmanager",
            f"--config.file={tmp_path / 'alertmanager.yaml'}",
            f"--storage.path={tmp_path / 'alertmanager'}",
            f"--web.listen-address=127.0.0.1:{alertmanager_port}",
            "--cluster.listen-address=",
        ],
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yaml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{prometheus_port}",
            # An alert is told again this often: how long Alertmanager waits for one that is no longer told follows from it.
            "--rules.alert.resend-delay=1s",
        ],
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(exporter.stop)
        for command in commands:
            log = stack.enter_context((tmp_path / f"{command[0]}.log").open("w"))
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait, timeout=20)
            stack.callback(process.terminate)

        def ask():
            query = urllib.parse.urlencode({"filter": 'alertname="FGPUPodOverMemoryLimit"', "active": "true"})
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{alertmanager_port}/api/v2/alerts?{query}", timeout=5) as answer:
                    return json.load(answer)
            except (urllib.error.URLError, ConnectionError):
                return None

        yield ask


def wait_for(ask, wanted, seconds):
    deadline = time.monotonic() + seconds
    while not wanted(alerts := ask()):
        assert time.monotonic() < deadline, f"Alertmanager holds {alerts}"
        time.sleep(0.2)
    return alerts


@pytest.mark.slow
def test_alertmanager_holds_the_alert_while_the_pod_is_over_its_limit_and_not_after(alertmanager):
    [alert] = wait_for(alertmanager, bool, 30)
    assert (alert["labels"]["namespace"], alert["labels"]["pod"]) == ("recsys", RANKER)
    assert alert["annotations"]["description"].startswith(
        f"Pod recsys/{RANKER} uses 30GiB on GPU GPU-1fbd2f3c-c156-42eb-b849-32551517fe1f of node gpu-node-7; its limit there is 23.88GiB."
    )
    wait_for(alertmanager, lambda alerts: alerts == [], 30)
