"""What the exporter costs on a node: memory, processor time, scrapes, calls; beside nvitop-exporter on the same node.

    python bench/light.py [--minutes 60] [--only typical|extreme] [--write]

Sets up two nodes (bench/nodes.py) with real processes on the stand-in driver library, a gRPC kubelet and an API server over TLS, lets an
exporter run on each with Prometheus's own scrapes every 15 s, and then measures what takes a moment. Prints the tables; `--write` puts them
into docs/performance.md. Linux and root; `wrk` of the system.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import document
import machine
import nodes

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "bench.json"

# What Prometheus 3 sends.
PROMETHEUS_HEADERS = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.4,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}
SCRAPE_SECONDS = 15.0
SAMPLE_SECONDS = 5.0
PAST_SECONDS = 900.0
"""Of so much past the exporter keeps points."""
READINGS = 8
"""Of resident memory, two minutes."""
# As the image sets it.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}


@dataclass(slots=True)
class Running:
    """An exporter on its node."""

    size: nodes.Size
    machine: machine.Machine
    program: machine.Program
    port: int
    found: dict[str, float] = field(default_factory=dict)
    """What was measured."""


def scrape(port: int, path: str = "/metrics", headers: Mapping[str, str] = PROMETHEUS_HEADERS) -> tuple[float, bytes]:
    """Answer how many seconds one scrape over a new connection took, and its body."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=dict(headers))
    body = connection.getresponse().read()
    connection.close()
    return time.perf_counter() - started, body


def wait_until_ready(port: int, program: machine.Program) -> float:
    """Answer how many seconds after its start the exporter had its first whole report."""
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return time.monotonic() - program.started_seconds
        except urllib.error.HTTPError:
            time.sleep(0.005)


def start(size: nodes.Size, stack: ExitStack, *flags: str) -> Running:
    """Answer an exporter on a node of this size, with its first whole report."""
    on = machine.set_up(nodes.plan(size), stack)
    program, port = machine.start_exporter(on, stack, *flags, **ENVIRONMENT)
    running = Running(size, on, program, port)
    running.found["start_seconds"] = wait_until_ready(port, program)
    return running


# --- long: memory, calls ---


def live(running: list[Running], minutes: float) -> None:
    """Let the exporters run, scraped every 15 s, and note what that cost."""
    time.sleep(2 * SCRAPE_SECONDS)
    before = {}
    for each in running:
        scrape(each.port)
        before[each.size.name] = (time.monotonic(), each.machine.servers.calls())
    resident = _scrape_for(running, minutes)
    for each in running:
        at, calls = before[each.size.name]
        seconds = time.monotonic() - at
        now = each.machine.servers.calls()
        ticks = seconds / SAMPLE_SECONDS
        mib = resident[each.size.name]
        # A rendering comes and goes, so that one reading says little; and until then the past that it keeps is not full.
        settled = int(min(PAST_SECONDS / SCRAPE_SECONDS, len(mib) / 2))
        each.found |= {
            "minutes": seconds / 60,
            "resident_at_first_mib": mib[0],
            "resident_settled_mib": statistics.median(mib[settled : settled + READINGS]),
            "resident_mib": statistics.median(mib[-READINGS:]),
            "resident_peak_mib": max(mib),
            "anonymous_mib": each.program.memory_kib()["Anonymous"] / 1024,
            "list_calls_per_tick": (now["kubelet List"] - calls["kubelet List"]) / ticks,
            "allocatable_calls_per_tick": (now["kubelet GetAllocatableResources"] - calls["kubelet GetAllocatableResources"]) / ticks,
            # A watch is opened anew every five to ten minutes; that is no call of a tick or a scrape.
            "api_lists": now["API list"] - calls["API list"],
            "api_watches": now["API watch"] - calls["API watch"],
        }


def _scrape_for(running: list[Running], minutes: float) -> dict[str, list[float]]:
    """Scrape each every 15 s for so long; answer the resident memory of each after every scrape, in MiB."""
    resident: dict[str, list[float]] = defaultdict(list)
    end = time.monotonic() + minutes * 60
    while time.monotonic() < end:
        time.sleep(SCRAPE_SECONDS)
        for each in running:
            scrape(each.port)
            resident[each.size.name].append(each.program.memory_kib()["Rss"] / 1024)
    return resident


# --- short: processor time ---


def measure_processor(running: list[Running], minutes: float) -> None:
    """Note how much of a core sampling every 5 s and a scrape every 15 s take."""
    before = {each.size.name: (time.monotonic(), each.program.cpu_seconds()) for each in running}
    _scrape_for(running, minutes)
    for each in running:
        at, cpu_seconds = before[each.size.name]
        each.found["cpu_percent"] = 100 * (each.program.cpu_seconds() - cpu_seconds) / (time.monotonic() - at)


# --- short: scrapes ---


def measure_scrapes(running: Running, *, seconds: float = 60.0, each_second: float = 20.0) -> None:
    """Note how long scrapes take, at a steady rate over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    taken = []
    body = b""
    for _ in range(int(seconds * each_second)):
        time.sleep(1 / each_second)
        started = time.perf_counter()
        connection.request("GET", "/metrics", headers=PROMETHEUS_HEADERS)
        body = connection.getresponse().read()
        taken.append(time.perf_counter() - started)
    connection.close()
    running.found |= {
        "scrape_p50_ms": statistics.median(taken) * 1e3,
        "scrape_p99_ms": statistics.quantiles(taken, n=100)[98] * 1e3,
        "scrape_bytes": len(body),
        "series": scrape(running.port, headers={})[1].count(b"\n") - 2 * scrape(running.port, headers={})[1].count(b"# TYPE"),
    }


def wrk(port: int, seconds: int = 10) -> dict[str, float]:
    """Answer how many scrapes a second one connection gets that asks again at once, and the slowest in a hundred."""
    headers = [part for name, value in PROMETHEUS_HEADERS.items() for part in ("-H", f"{name}: {value}")]
    command = ["wrk", "-t1", "-c1", f"-d{seconds}", "--latency", *headers, f"http://127.0.0.1:{port}/metrics"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - our own
    number, unit = re.search(r"99%\s+([\d.]+)(us|ms|s)", text).groups()  # type: ignore[union-attr]
    return {
        "scrapes_per_second": float(re.search(r"Requests/sec:\s+([\d.]+)", text)[1]),  # type: ignore[index]
        "saturated_p99_ms": float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit],
    }


# --- the driver's calls ---


def measure_driver_calls(running: Running) -> None:
    """Note how many calls of the driver one sample makes, by a run of its own that logs them."""
    with ExitStack() as stack:
        log = running.machine.folder / "calls"
        environment = {"NVML_STAND_IN_LOG": str(log), **ENVIRONMENT}
        program, port = machine.start_exporter(running.machine, stack, "--sample-interval-seconds", "1", **environment)
        wait_until_ready(port, program)

        def samples_and_calls() -> tuple[float, int]:
            text = scrape(port, headers={})[1].decode()
            return float(re.search(r"^fgpu_samples_total (\S+)", text, re.MULTILINE)[1]), log.read_text().count("\n")  # type: ignore[index]

        time.sleep(2.5)
        samples, calls = samples_and_calls()
        time.sleep(8)
        more_samples, more_calls = samples_and_calls()
        running.found["driver_calls_per_tick"] = (more_calls - calls) / (more_samples - samples)


# --- beside nvitop-exporter ---


@contextmanager
def nvitop(on: machine.Machine) -> Iterator[tuple[machine.Program, int]]:
    """Start nvitop-exporter on this machine's library and processes."""
    environment = ROOT / "build" / "nvitop"
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)  # noqa: S603 - our own
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "nvitop-exporter"], check=True)  # noqa: S603 - our own
    port = free_port()
    command = [str(python), "-m", "nvitop_exporter", "--hostname", "127.0.0.1", "--port", str(port), "--interval", str(SAMPLE_SECONDS)]
    program = machine.Program(command, on.environment, on.folder / "nvitop.log")
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                scrape(port)
                break
            except OSError:
                time.sleep(0.1)
        yield program, port
    finally:
        program.stop()


def free_port() -> int:
    """Answer a TCP port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def measure_nvitop(running: Running) -> None:
    """Note what nvitop-exporter does on the same node."""
    with nvitop(running.machine) as (program, port):
        time.sleep(2 * SAMPLE_SECONDS)
        at, cpu_seconds = time.monotonic(), program.cpu_seconds()
        time.sleep(6 * SAMPLE_SECONDS)
        idle_percent = 100 * (program.cpu_seconds() - cpu_seconds) / (time.monotonic() - at)
        rates = wrk(port)
        running.found |= {
            "nvitop_cpu_percent": idle_percent,
            "nvitop_resident_mib": program.memory_kib()["Rss"] / 1024,
            "nvitop_scrapes_per_second": rates["scrapes_per_second"],
            "nvitop_p99_ms": rates["saturated_p99_ms"],
        }


# --- growth ---


def measure_growth(factor: int) -> dict[str, float]:
    """Answer what a node costs that is so many times the typical one."""
    with ExitStack() as stack:
        running = start(nodes.scaled(factor), stack, "--max-series", "1000000")
        scrape(running.port)
        time.sleep(2 * SAMPLE_SECONDS)
        at, cpu_seconds = time.monotonic(), running.program.cpu_seconds()
        for _ in range(6):
            time.sleep(SAMPLE_SECONDS)
            _, body = scrape(running.port)
        text = scrape(running.port, headers={})[1]
        return {
            "factor": factor,
            "pods": running.size.gpu_pods,
            "processes": running.size.processes,
            "cpu_percent": 100 * (running.program.cpu_seconds() - cpu_seconds) / (time.monotonic() - at),
            "resident_mib": running.program.memory_kib()["Rss"] / 1024,
            "series": text.count(b"\n") - 2 * text.count(b"# TYPE"),
            "scrape_bytes": len(body),
            "start_seconds": running.found["start_seconds"],
        }


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the exporters run before their memory is read")
    parser.add_argument("--only", choices=sorted(nodes.SIZES))
    parser.add_argument("--write", action="store_true", help="write docs/performance.md")
    arguments = parser.parse_args()
    if not shutil.which("wrk"):
        raise SystemExit("bench: wrk is not installed: apt-get install wrk")
    results: dict[str, object] = {"machine": machine.description(), "commit": _commit(), "date": time.strftime("%Y-%m-%d")}
    sizes = [nodes.SIZES[arguments.only]] if arguments.only else list(nodes.SIZES.values())
    with ExitStack() as stack:
        running = [start(size, stack) for size in sizes]
        live(running, arguments.minutes)
        measure_processor(running, min(arguments.minutes, 4.0))
        for each in running:
            measure_scrapes(each)
            each.found |= wrk(each.port)
            measure_driver_calls(each)
            measure_nvitop(each)
        results["nodes"] = {each.size.name: each.found for each in running}
    if not arguments.only:
        results["growth"] = [measure_growth(factor) for factor in (1, 2, 4, 8)]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(document.render(results))
    if arguments.write:
        document.write("light", document.render(results))


def _commit() -> str:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    return git.stdout.strip() or os.environ.get("COMMIT", "unknown")


if __name__ == "__main__":
    main()
