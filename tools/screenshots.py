"""Takes the pictures of the node page into docs/captures: of the built-in scenario, and of a node of 8 GPUs and 250 pods.

    python tools/screenshots.py

Needs Chromium (`apt-get install chromium`). The nodes are played on a simulated clock, so that the pictures tell the same each time.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml
from playwright.sync_api import Browser, sync_playwright

from exporter import simulated
from exporter.config import parse_config
from exporter.daemon import about
from exporter.endpoints import build_routes
from exporter.server import Server
from exporter.simulation import DEMO, SimulatedClock, SimulatedNode, load_scenario

CAPTURES = Path(__file__).parents[1] / "docs" / "captures"
INTERVAL_SECONDS = 5
PODS, END_SECONDS = 250, 900
GREEDY, GREEDY_FROM_SECONDS = range(7, PODS, 50), 300
DEMO_SECONDS = 1340  # the fifth round of its story, at 2:20
DESKTOP, PHONE = (1280, 1100), (360, 740)


@dataclass(frozen=True, slots=True)
class Picture:
    """One file."""

    name: str
    size: tuple[int, int] = DESKTOP
    color_scheme: str = "light"
    scrolled_to: str = "body"
    """What stands at the top."""


def make_large_scenario() -> dict[str, Any]:
    """Answer a node of 8 GPUs shared by 250 pods, a few of which take more than they were given. The same each time."""
    random = Random(8250)  # noqa: S311 - guards nothing
    gpus = [f"GPU-{number:08x}-5b1c-4d3e-9f20-6a7b8c9d0e1f" for number in range(8)]
    teams = ["vision", "speech", "nlp", "recsys", "research", "simulation"]
    works = ["notebook", "train", "serve", "embed", "label", "tune"]
    pods, processes, changes = [], [], []
    for number, uuid in enumerate(gpus):
        annotations = {"run.ai/reserve_for_gpu_index": uuid}
        pods.append(
            _pod(
                "kai-resource-reservation",
                f"gpu-reservation-{number}",
                9000 + number,
                number,
                {"app": "kai-resource-reservation"},
                annotations,
            )
        )
    for number in range(PODS):
        namespace = teams[random.randrange(len(teams))]
        name = f"{works[random.randrange(len(works))]}-{number:03d}"
        granted_mib = random.choice([1000, 2000, 2000, 3000, 4000])
        pods.append(_pod(namespace, name, number, number % 8, {"kai.scheduler/queue": namespace}, {"gpu-memory": str(granted_mib)}))
        use = {"pid": 40000 + number, "container": f"{namespace}/{name}/main"}
        first = int(granted_mib * random.uniform(0.05, 0.9))
        processes.append({**use, "gpus": [{"gpu": gpus[number % 8], "memory": f"{first}Mi", "sm": random.randrange(2)}]})
        greedy_from = GREEDY_FROM_SECONDS if number in GREEDY else END_SECONDS
        for at_seconds in sorted(random.sample(range(20, END_SECONDS, 15), 3)):
            share = random.uniform(1.05, 1.3) if at_seconds > greedy_from else random.uniform(0.05, 0.95)
            then = {"gpu": gpus[number % 8], "memory": f"{int(granted_mib * share)}Mi", "sm": random.randrange(1, 2 + granted_mib // 1500)}
            changes.append({"at": f"{at_seconds}s", "processes": [{"pid": use["pid"], "gpus": [then]}]})
    return {
        "node": {"name": "gpu-node-42", "labels": {"nvidia.com/gpu.memory": "81559"}},
        "gpus": [{"uuid": uuid, "model": "NVIDIA H100 80GB HBM3", "memory_total": "81559Mi"} for uuid in gpus],
        "pods": pods,
        "processes": processes,
        "timeline": sorted(changes, key=lambda change: int(change["at"][:-1])),
    }


def _pod(namespace: str, name: str, number: int, gpu: int, labels: dict[str, str], annotations: dict[str, str]) -> dict[str, Any]:
    uid = f"{number:08x}-0000-4000-8000-0000000000aa"
    status = {"name": "main", "containerID": f"containerd://{number:064x}", "state": {"running": {}}}
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": uid,
            "labels": {"runai-gpu-group": f"group-{gpu}", **labels},
            "annotations": annotations,
        },
        "spec": {"nodeName": "gpu-node-42", "schedulerName": "kai-scheduler", "containers": [{"name": "main"}]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


@contextmanager
def serving(scenario: Path, until_seconds: int) -> Iterator[int]:
    """Serve the node of a scenario as it is at that time; answer the port."""
    config = parse_config(["--scenario", str(scenario)], {})
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(scenario), clock, repeat=scenario == DEMO))
        sampler = simulated.wire(config, node, clock, stack)
        for seconds in range(0, until_seconds + 1, INTERVAL_SECONDS):
            simulated.sample_at(node, sampler, seconds)
        server = Server(address="127.0.0.1", port=0, routes=build_routes(sampler, about(config, node.name)))
        server.start()
        stack.callback(server.close)
        yield server.port


def take(browser: Browser, port: int, picture: Picture) -> None:
    """Write one picture."""
    width, height = picture.size
    scale = 2 if width < DESKTOP[0] else 1
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme=picture.color_scheme, device_scale_factor=scale, reduced_motion="reduce"
    )
    page.goto(f"http://127.0.0.1:{port}/")
    page.wait_for_selector("#view:not([hidden])")
    page.evaluate("selector => document.querySelector(selector).scrollIntoView()", picture.scrolled_to)
    page.screenshot(path=CAPTURES / f"page-{picture.name}.png")
    page.close()


def main() -> int:
    """Take every picture; answer the exit status."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.stderr.write("screenshots: chromium is not there; apt-get install chromium\n")
        return 1
    CAPTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        large = Path(folder) / "large.yaml"
        large.write_text(yaml.safe_dump(make_large_scenario()))
        pictures = [
            (
                DEMO,
                DEMO_SECONDS,
                [
                    Picture("light"),
                    Picture("dark", color_scheme="dark"),
                    Picture("pods", scrolled_to="#pods-title"),
                    Picture("phone", size=PHONE),
                    Picture("phone-pods", size=PHONE, color_scheme="dark", scrolled_to="#pods-title"),
                ],
            ),
            (large, END_SECONDS, [Picture("250-pods"), Picture("250-pods-table", color_scheme="dark", scrolled_to="#pods-title")]),
        ]
        browser = playwright.chromium.launch(executable_path=chromium)
        for scenario, until_seconds, wanted in pictures:
            with serving(scenario, until_seconds) as port:
                for picture in wanted:
                    take(browser, port, picture)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
