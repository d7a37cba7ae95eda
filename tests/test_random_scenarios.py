"""The whole program fed random scenarios: a few here, ten thousand with bench/random_scenarios.py --count 10000."""

import importlib.util
import json
from pathlib import Path
from random import Random

import pytest

from exporter.report import GpuReport, Report
from exporter.simulation import load_scenario
from exporter.snapshot import Gpu, GpuProcess, GpuReading
from exporter.usage import Unattributed

SCRIPT = Path(__file__).parents[1] / "bench" / "random_scenarios.py"


@pytest.fixture(scope="module")
def random_scenarios():
    spec = importlib.util.spec_from_file_location("random_scenarios", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_random_scenarios_give_no_traceback_and_lose_nothing(random_scenarios, tmp_path):
    path = tmp_path / "scenario.yaml"
    for seed in range(5000, 5030):
        path.write_text(json.dumps(random_scenarios.random_scenario(Random(seed))))  # noqa: S311 - repeatable
        assert random_scenarios.play(path) == [], f"seed {seed}"


def test_random_scenarios_have_everything_in_them(random_scenarios, tmp_path):
    path = tmp_path / "scenario.yaml"
    seen = set()
    for seed in range(200):
        content = random_scenarios.random_scenario(Random(seed))  # noqa: S311 - repeatable
        path.write_text(json.dumps(content))
        load_scenario(path)
        seen |= {key for step in content["timeline"] for key in step}
        seen |= {key for pod in content["pods"] for key in pod["metadata"]["annotations"]}
        seen |= {gpu.get("fault", "sound") for gpu in content["gpus"]}
    assert seen >= {"sources", "gpus", "pods", "processes", "gpu-fraction", "hami.io/vgpu-devices-allocated", "lost", "sound"}


def test_a_byte_that_is_lost_is_seen(random_scenarios):
    gpu = Gpu(gpu_uuid="GPU-0")
    row = GpuReport(
        gpu=gpu,
        reading=GpuReading(gpu=gpu, up=True, processes=(GpuProcess(pid=1, memory_used_bytes=7),)),
        memory_allocated_bytes=0,
        compute_allocated_ratio=0.0,
        pods=0,
        unattributed_bytes=dict.fromkeys(Unattributed, 0),
        processes_memory_hidden=0,
    )
    report = Report(time_seconds=0.0, monotonic_seconds=0.0, gpus=(row,))
    assert list(random_scenarios.not_conserved(report, [])) == ["GPU-0: processes use 7, containers and what has no owner 0"]
