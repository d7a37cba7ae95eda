"""A real Prometheus that scrapes 200 nodes on loopback: what a node's series cost the monitoring.

    python bench/fleet.py [--nodes 200] [--minutes 10] [--write]

Each node is a port of its own with the exporter's own HTTP server. Behind them are a few simulated typical nodes (bench/nodes.py), sampled
every 5 s; to Prometheus each port is an instance with its own series. Prints what Prometheus says of itself, and what follows for a fleet.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import document
import nodes
import yaml
from light import SCRAPE_SECONDS, free_port, scrape

from exporter.clock import SystemClock
from exporter.config import parse_config
from exporter.daemon import about
from exporter.endpoints import build_routes
from exporter.sampler import Sampler
from exporter.server import Server
from exporter.simulated import wire
from exporter.simulation import SimulatedNode, load_scenario

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "fleet.json"
BEHIND = 2


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--write", action="store_true", help="write docs/performance.md")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fgpu-fleet-")))
        stop = threading.Event()
        stack.callback(stop.set)
        samplers = [_sampler(folder, stack) for _ in range(BEHIND)]
        for sampler in samplers:
            sampler.sample()
            threading.Thread(target=sampler.run, args=(stop,), daemon=True).start()
        config = parse_config(["--demo"], {})
        ports = []
        for number in range(arguments.nodes):
            routes = build_routes(samplers[number % BEHIND], about(config, f"node-{number}"))
            server = Server(address="127.0.0.1", port=0, routes=routes)
            server.start()
            stack.callback(server.close)
            ports.append(server.port)
        port, process = _prometheus(folder, ports)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        time.sleep(arguments.minutes * 60)
        found = _ask(port, process.pid)
        found["scrape_bytes"] = len(scrape(ports[0])[1])
    found |= {"nodes": arguments.nodes, "minutes": arguments.minutes, "scrape_interval_seconds": SCRAPE_SECONDS, "version": _version()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(document.render_fleet(found))
    if arguments.write:
        document.write("fleet", document.render_fleet(found))


def _sampler(folder: Path, stack: ExitStack) -> Sampler:
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump(nodes.with_processes(nodes.plan(nodes.TYPICAL))))
    clock = SystemClock()
    node = stack.enter_context(SimulatedNode(load_scenario(file), clock))
    return wire(parse_config(["--demo"], {}), node, clock, stack)


def _prometheus(folder: Path, ports: list[int]) -> tuple[int, "subprocess.Popen[bytes]"]:
    Random(0).shuffle(ports)  # noqa: S311 - guards nothing
    own = free_port()
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS:g}s"},
        "scrape_configs": [
            {"job_name": "fgpu", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]},
            {"job_name": "prometheus", "static_configs": [{"targets": [f"127.0.0.1:{own}"]}]},
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{own}"]
    log = (folder / "prometheus.log").open("wb")
    return own, subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - our own


def _ask(port: int, pid: int) -> dict[str, Any]:
    def query(expression: str) -> float:
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(url, timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
        return float(result[0]["value"][1]) if result else float("nan")

    status = Path(f"/proc/{pid}/status").read_text()
    return {
        "up": query('sum(up{job="fgpu"})'),
        "series_per_node": query('avg(scrape_samples_scraped{job="fgpu"})'),
        "head_series": query("prometheus_tsdb_head_series"),
        "samples_per_second": query("rate(prometheus_tsdb_head_samples_appended_total[2m])"),
        "scrape_seconds_p99": query('quantile(0.99, max_over_time(scrape_duration_seconds{job="fgpu"}[5m]))'),
        "scrape_seconds_mean": query('avg(avg_over_time(scrape_duration_seconds{job="fgpu"}[5m]))'),
        "prometheus_resident_bytes": int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024,
        "prometheus_cpu_ratio": query('rate(process_cpu_seconds_total{job="prometheus"}[5m])'),
        "head_chunk_bytes": query("prometheus_tsdb_head_chunks_storage_size_bytes"),
        "head_chunks": query("prometheus_tsdb_head_chunks"),
        "churned_series": query("increase(prometheus_tsdb_head_series_created_total[5m])"),
    }


def _version() -> str:
    done = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=True)  # noqa: S607
    return (done.stdout or done.stderr).split()[2]


if __name__ == "__main__":
    main()
