"""A real Prometheus that holds what the demo's story said, and one that scrapes the demo."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from live import Daemon
from prometheus_client.parser import text_string_to_metric_families

from exporter import simulated
from exporter.config import parse_config
from exporter.exposition import Format
from exporter.simulation import DEMO, SimulatedClock, SimulatedNode, load_scenario

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


class Prometheus:
    """A Prometheus of its own in a folder; answers queries."""

    def __init__(self, folder, config):
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def wait_until_ready(self):
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5).close()
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline or self.process.poll() is not None:
                    pytest.fail("Prometheus did not start: " + Path(self.log.name).read_text()[-2000:])
                time.sleep(0.1)
            else:
                return self

    def get(self, path, **parameters):
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}?{query}", timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters}: {json.load(error)['error']}")

    def query(self, expr, seconds=None):
        """Answer the labels of each series and its value."""
        at = {} if seconds is None else {"time": seconds}
        return [(row["metric"], float(row["value"][1])) for row in self.get("/api/v1/query", query=expr, **at)["result"]]

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=20)
        self.log.close()


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


def write_openmetrics(said, path):
    """Write the samples as a scrape of TARGET would have left them, a family at a time as the format wants it."""
    lines = defaultdict(list)
    for seconds, text in said:
        lines["up"].append(f"up{labels_of(TARGET)} 1 {seconds}")
        for family in text_string_to_metric_families(text):
            lines[family.name] += [
                f"{sample.name}{labels_of({**TARGET, **sample.labels})} {sample.value} {seconds}" for sample in family.samples
            ]
    path.write_text("\n".join(line for family in lines.values() for line in family) + "\n# EOF\n")


def labels_of(labels):
    return "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"


@pytest.fixture(scope="session")
def needs_prometheus():
    if missing := [program for program in ("prometheus", "promtool") if shutil.which(program) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed (Debian package prometheus)")


@pytest.fixture(scope="session")
def story(needs_prometheus, tmp_path_factory):
    """Answer a Prometheus with the demo's whole story in it, and a function that makes a moment of the story a time."""
    folder = tmp_path_factory.mktemp("prometheus")
    said = play_story()
    write_openmetrics(said, folder / "story.txt")
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", folder / "story.txt", folder / "data"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
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
