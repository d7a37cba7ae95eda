"""A real Prometheus that holds what the demo's story said, and one that scrapes the demo."""

import contextlib
import sys
from pathlib import Path

import pytest
import yaml
from live import Daemon
from real_prometheus import Prometheus, backfill, skip_without_prometheus

from exporter import simulated
from exporter.config import parse_config
from exporter.simulation import DEMO, SimulatedClock, SimulatedNode, load_scenario
from exporter.text_format import Format

ROOT = Path(__file__).parents[2]
# The boards are no part of the installed program.
sys.path.insert(0, str(ROOT))

STORY_SECONDS = 295
INTERVAL_SECONDS = 5
DISCOVERED = {
    "__meta_kubernetes_namespace": "fgpu-exporter",
    "__meta_kubernetes_pod_container_name": "fgpu-exporter",
    "__meta_kubernetes_pod_container_port_name": "http",
    "__meta_kubernetes_pod_name": "fgpu-exporter-x2k4q",
    "__meta_kubernetes_pod_node_name": "gpu-node-7",
    "__meta_kubernetes_pod_phase": "Running",
}
TARGET = {"job": "fgpu-exporter", "instance": "127.0.0.1:9844", "node": "gpu-node-7"}


def play_story():
    """Answer what the demo says at each sample of its story: (seconds, exposition)."""
    config, clock, said = parse_config(["--demo", "--once"], {}), SimulatedClock(), []
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(SimulatedNode(load_scenario(DEMO), clock))
        sampler = simulated.wire(config, node, clock, stack)
        for seconds in range(0, STORY_SECONDS + 1, INTERVAL_SECONDS):
            simulated.sample_at(node, sampler, float(seconds))
            said.append((clock.time(), sampler.exposition.render(Format.TEXT, compressed=False).decode()))
    return said


@pytest.fixture(scope="session")
def needs_prometheus():
    skip_without_prometheus()


@pytest.fixture(scope="session")
def story(needs_prometheus, tmp_path_factory):
    """Answer a Prometheus with the demo's whole story in it, and a function that makes a moment of the story a time."""
    folder = tmp_path_factory.mktemp("prometheus")
    said = play_story()
    backfill([(seconds, TARGET, text) for seconds, text in said], folder)
    prometheus = Prometheus(folder, {"global": {"scrape_interval": "15s"}})
    try:
        prometheus.wait_until_ready()
        prometheus.began = said[0][0]
        yield prometheus
    finally:
        prometheus.stop()


@pytest.fixture(scope="session")
def live(needs_prometheus, tmp_path_factory):
    """Answer a Prometheus that scrapes the running demo by the shipped configuration, and once more without honouring labels."""
    folder = tmp_path_factory.mktemp("live")
    daemon = Daemon(["--demo"], {}).wait_until_started()
    address = f"127.0.0.1:{daemon.port}"
    [shipped] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "scrape-config.yaml").read_text())["scrape_configs"]
    # There is no cluster to discover the target in: it is given what the discovery would say of it.
    del shipped["kubernetes_sd_configs"]
    shipped |= {"scrape_interval": "1s", "static_configs": [{"targets": [address], "labels": DISCOVERED}]}
    named = {"node": "gpu-node-7", "namespace": "fgpu-exporter", "pod": "fgpu-exporter-x2k4q"}
    jobs = [shipped, {"job_name": "not-honoured", "static_configs": [{"targets": [address], "labels": named}]}]
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
    prometheus = Prometheus(folder, config)
    try:
        yield prometheus.wait_until_ready()
    finally:
        prometheus.stop()
        daemon.stop()
