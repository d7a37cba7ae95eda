"""A real Prometheus that scrapes by the shipped configuration keeps whose numbers they are."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian package prometheus)")

# What service discovery knows of the exporter's own pod.
META_LABELS = {
    "__meta_kubernetes_namespace": "fgpu-exporter",
    "__meta_kubernetes_pod_name": "fgpu-exporter-x7k2p",
    "__meta_kubernetes_pod_node_name": "gpu-node-1",
    "__meta_kubernetes_pod_phase": "Running",
    "__meta_kubernetes_pod_container_name": "exporter",
    "__meta_kubernetes_pod_container_port_name": "http",
    "__meta_kubernetes_pod_label_app_kubernetes_io_name": "fgpu-exporter",
}


def plain_job():
    """Answer the job of scrape-config.yaml."""
    (job,) = yaml.safe_load((DEPLOY / "prometheus/scrape-config.yaml").read_text())["scrape_configs"]
    return job


def operators_job():
    """Answer the job that the Prometheus operator makes of the PodMonitor: its own relabelling, then ours.

    https://github.com/prometheus-operator/prometheus-operator/blob/v0.86.0/pkg/prometheus/promcfg.go, generatePodMonitorConfig.
    """
    monitor = yaml.safe_load((DEPLOY / "podmonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    job_label = "__meta_kubernetes_pod_label_" + monitor["spec"]["jobLabel"].translate(str.maketrans("./", "__"))
    spelling = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return {
        "job_name": "podMonitor/fgpu-exporter/fgpu-exporter/0",
        "honor_labels": endpoint["honorLabels"],
        "metrics_path": endpoint["path"],
        "relabel_configs": [
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": ["__meta_kubernetes_pod_container_name"], "target_label": "container"},
            {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
            {"target_label": "job", "replacement": "fgpu-exporter/fgpu-exporter"},
            {"source_labels": [job_label], "target_label": "job", "regex": "(.+)", "replacement": "${1}"},
            {"target_label": "endpoint", "replacement": endpoint["port"]},
            *({spelling.get(key, key): value for key, value in each.items()} for each in endpoint["relabelings"]),
        ],
    }


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def exporter():
    """The simulated node; answer its port."""
    port = free_port()
    daemon = subprocess.Popen(
        [sys.executable, "-m", "exporter", "--demo", "--listen-address", "127.0.0.1", "--port", str(port)], stderr=subprocess.DEVNULL
    )
    yield port
    daemon.terminate()
    daemon.wait(timeout=10)


@pytest.fixture(scope="module", params=[plain_job, operators_job])
def ask(request, exporter, tmp_path_factory):
    """Answer a function that asks a Prometheus, which scrapes by that job, for the labels of the series of an expression."""
    job = request.param()
    job.pop("kubernetes_sd_configs", None)
    job |= {"scrape_interval": "1s", "static_configs": [{"targets": [f"127.0.0.1:{exporter}"], "labels": META_LABELS}]}
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    port = free_port()
    log = (folder / "log").open("w")
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=log,
    )

    def series_of(expression):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            query = urllib.parse.urlencode({"query": expression})
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=5) as answer:
                    if result := json.load(answer)["data"]["result"]:
                        return [series["metric"] for series in result]
            except OSError:
                pass
            time.sleep(0.3)
        pytest.fail(f"no series of {expression} after 30 s: {(folder / 'log').read_text()[-2000:]}")

    yield series_of
    server.terminate()
    server.wait(timeout=20)
    log.close()


def test_a_pods_series_keep_the_pods_labels(ask):
    pods = {(series["namespace"], series["pod"]) for series in ask("fgpu_container_memory_used_bytes")}
    assert ("recsys", "ranker-5d8f7c9b4-7hm2n") in pods
    assert not {namespace for namespace, _ in pods} & {"fgpu-exporter"}


def test_a_gpus_series_get_no_pod(ask):
    for series in ask("fgpu_gpu_memory_total_bytes"):
        assert set(series) == {"__name__", "instance", "job", "node", "gpu_uuid"}


def test_no_label_was_put_aside(ask):
    for series in ask('{__name__=~"fgpu_.+"}'):
        assert not [label for label in series if label.startswith("exported_")]


def test_every_series_says_its_node_and_its_job(ask):
    for series in ask('{__name__=~"fgpu_.+|up"}'):
        assert (series["node"], series["job"]) == ("gpu-node-1", "fgpu-exporter")


def test_the_plain_job_finds_the_daemonsets_pods_by_their_labels():
    daemonset = next(each for each in yaml.safe_load_all((DEPLOY / "daemonset.yaml").read_text()) if each["kind"] == "DaemonSet")
    (discovery,) = plain_job()["kubernetes_sd_configs"]
    key, _, value = discovery["selectors"][0]["label"].partition("=")
    assert discovery["namespaces"]["names"] == [daemonset["metadata"]["namespace"]]
    assert daemonset["spec"]["template"]["metadata"]["labels"][key] == value


def test_promtool_finds_nothing_in_the_plain_configuration(tmp_path):
    job = plain_job()
    # Debian builds Prometheus without the discovery of Kubernetes.
    del job["kubernetes_sd_configs"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
