"""The daemon as a process of its own: the real pynvml on a stand-in library, real processes in real cgroups, a gRPC kubelet, an HTTP API,
and a real Prometheus that scrapes it."""

import contextlib
import ctypes
import gzip
import json
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from hami_core_region import Process as Slot
from hami_core_region import write_region
from live import GIB, GPU, HALF, MIB, OTHER_GPU, UIDS, Daemon, device
from nvml_stand_in.stand_in import GPU_IS_LOST, HANG, LIB_RM_VERSION_MISMATCH, Busy, Process


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_each_pod_has_its_own_use_beside_its_own_limit(start, stand_in, workloads):
    half, small = workloads("half"), workloads("small")
    stand_in.write(
        device(Process(pid=half.pid, memory=30 * GIB), Process(pid=small.pid, memory=3 * GIB), samples=[Busy(pid=half.pid, sm=40)])
    )
    daemon = start()
    daemon.wait_for(30 * GIB, "fgpu_pod_memory_used_bytes", namespace="team-a", pod="half")
    assert daemon.value("fgpu_pod_memory_limit_bytes", pod="half") == HALF
    assert daemon.value("fgpu_pod_memory_used_bytes", namespace="team-b", pod="small") == 3 * GIB
    assert daemon.value("fgpu_pod_memory_limit_bytes", pod="small") == 2000 * MIB
    daemon.wait_for(1.0, "fgpu_pod_limit_exceeded", pod="small", resource="memory")
    assert daemon.value("fgpu_pod_limit_exceeded", pod="half", resource="memory") == 0.0
    assert sum(daemon.value("fgpu_gpu_unattributed_memory_bytes", gpu_uuid=GPU)) == 0.0
    time.sleep(2.0)
    assert daemon.value("fgpu_container_sm_utilization_ratio", pod="half") == pytest.approx(0.4, abs=0.06)

    small.process.kill()
    small.process.wait()
    daemon.wait_for(3 * GIB, "fgpu_gpu_unattributed_memory_bytes", reason="process_gone")
    daemon.wait_for(0.0, "fgpu_pod_memory_used_bytes", pod="small")


def test_what_hami_core_counts_is_read_where_it_is_told_to_look(start, stand_in, workloads, tmp_path):
    half = workloads("half")
    stand_in.write(device(Process(pid=half.pid, memory=3 * GIB)))
    file = tmp_path / f"host/usr/local/vgpu/containers/{UIDS['half']}_main/usage.cache"
    file.parent.mkdir(parents=True)
    processes = (Slot(half.pid, (2 * GIB,)), Slot(4194303, (GIB,)))
    file.write_bytes(write_region("2.8.2", gpus=(GPU,), limits=(9 * GIB,) * 16, processes=processes))
    daemon = start("--host-path", str(tmp_path / "host"))
    daemon.wait_for(2 * GIB, "fgpu_container_hami_core_memory_used_bytes", pod="half", container="main", gpu_uuid=GPU)
    assert daemon.value("fgpu_container_hami_core_memory_limit_bytes", pod="half") == 9 * GIB
    assert daemon.value("fgpu_source_up", source="hostfiles") == 1.0
    assert sum(daemon.value("fgpu_hostfiles_unreadable")) == 0.0
    file.write_bytes(b"torn")
    daemon.wait_for(1.0, "fgpu_hostfiles_unreadable", reason="unknown_layout")
    assert daemon.value("fgpu_container_hami_core_memory_used_bytes", pod="half") is None
    assert daemon.value("fgpu_pod_memory_used_bytes", pod="half") == 3 * GIB
    assert start().value("fgpu_source_up", source="hostfiles") is None


def test_the_paths_answer_and_the_formats_are_negotiated(start, stand_in):
    stand_in.write(device())
    daemon = start()
    daemon.wait_for(1.0, "fgpu_gpu_up", gpu_uuid=GPU)
    daemon.wait_for(1.0, "fgpu_source_up", source="kubernetes")
    assert daemon.get("/healthz")[0] == 200
    assert daemon.get("/readyz")[0] == 200
    status, headers, body = daemon.get("/metrics", Accept="application/openmetrics-text;version=1.0.0", Accept_Encoding="gzip")
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert gzip.decompress(body).endswith(b"# EOF\n")
    status, headers, body = daemon.get("/")
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/html")
    assert b'<a href="metrics">' in body
    assert daemon.get("/nothing")[0] == 404


def test_a_driver_that_comes_late_is_found(start, stand_in):
    daemon = start()
    daemon.wait_for(0.0, "fgpu_source_up", source="nvml")
    status, _, body = daemon.get("/readyz")
    assert status == 503
    assert b"nvml" in body
    assert daemon.get("/healthz")[0] == 200
    daemon.wait_for(2000 * MIB, "fgpu_pod_memory_limit_bytes", pod="small")
    stand_in.write(device())
    daemon.wait_for(1.0, "fgpu_source_up", source="nvml")
    assert daemon.get("/readyz")[0] == 200


def test_a_hanging_gpu_costs_itself_and_the_daemon_still_ends_in_time(start, stand_in, workloads):
    half = workloads("half")
    stand_in.write(device(Process(pid=half.pid, memory=GIB)), device(uuid=OTHER_GPU))
    daemon = start()
    daemon.wait_for(1.0, "fgpu_gpu_up", gpu_uuid=OTHER_GPU)
    stand_in.write(device(Process(pid=half.pid, memory=2 * GIB)), device(uuid=OTHER_GPU, calls={"*": HANG}))
    daemon.wait_for(0.0, "fgpu_gpu_up", gpu_uuid=OTHER_GPU)
    daemon.wait_for(2 * GIB, "fgpu_pod_memory_used_bytes", pod="half")
    assert daemon.stop() < 2.0
    assert daemon.process.returncode == 0


def test_a_lost_gpu_costs_itself_and_heals(start, stand_in):
    stand_in.write(device(), device(uuid=OTHER_GPU))
    daemon = start()
    daemon.wait_for(1.0, "fgpu_gpu_up", gpu_uuid=OTHER_GPU)
    stand_in.write(device(), device(uuid=OTHER_GPU, calls={"*": GPU_IS_LOST}))
    daemon.wait_for(0.0, "fgpu_gpu_up", gpu_uuid=OTHER_GPU)
    assert daemon.value("fgpu_gpu_up", gpu_uuid=GPU) == 1.0
    stand_in.write(device(), device(uuid=OTHER_GPU))
    daemon.wait_for(1.0, "fgpu_gpu_up", gpu_uuid=OTHER_GPU)


def test_a_library_that_no_longer_fits_ends_the_process_with_a_word(start, stand_in):
    stand_in.write(device())
    daemon = start()
    daemon.wait_for(1.0, "fgpu_source_up", source="nvml")
    stand_in.write(
        calls={"nvmlInitWithFlags": LIB_RM_VERSION_MISMATCH, "nvmlInit_v2": LIB_RM_VERSION_MISMATCH, "*": LIB_RM_VERSION_MISMATCH}
    )
    assert daemon.process.wait(timeout=20) == 3
    daemon.stop()
    assert "state=fatal" in "".join(daemon.log)


def test_the_driver_is_released_once_for_each_time_it_was_taken(start, stand_in):
    stand_in.write(device())
    daemon = start()
    daemon.wait_for(1.0, "fgpu_source_up", source="nvml")
    assert daemon.stop() < 2.0
    names = [call[0] for call in stand_in.calls()]
    assert len([name for name in names if name.startswith("nvmlInit")]) == 1
    assert names.count("nvmlShutdown") == 1
    assert names[-1] == "nvmlShutdown"


@pytest.fixture
def prometheus(tmp_path):
    """Start a Prometheus that scrapes a port; answer a function that asks it."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus to scrape with (Debian package prometheus)")
    running = []

    def start_one(target_port):
        port = free_port()
        config = tmp_path / "prometheus.yml"
        scrape = {"job_name": "fgpu-exporter", "scrape_interval": "1s", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
        config.write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
        flags = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
        running.append(subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

        def query(expression, seconds=20.0):
            url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                    if result := json.load(answer)["data"]["result"]:
                        return result
                time.sleep(0.3)
            return pytest.fail(f"Prometheus has no answer to {expression}")

        return query

    yield start_one
    for process in running:
        process.terminate()
        process.wait(timeout=10)


def test_a_real_prometheus_answers_each_pods_use_beside_its_limit(start, stand_in, workloads, prometheus):
    half, small = workloads("half"), workloads("small")
    stand_in.write(device(Process(pid=half.pid, memory=30 * GIB), Process(pid=small.pid, memory=1500 * MIB)))
    daemon = start()
    daemon.wait_for(30 * GIB, "fgpu_pod_memory_used_bytes", pod="half")
    query = prometheus(daemon.port)
    shares = query("fgpu_pod_memory_used_bytes / on (namespace, pod, gpu_uuid) fgpu_pod_memory_limit_bytes")
    found = {row["metric"].get("exported_pod") or row["metric"]["pod"]: float(row["value"][1]) for row in shares}
    assert found == {"half": pytest.approx(30 * GIB / HALF), "small": pytest.approx(0.75)}
    assert query("up")[0]["value"][1] == "1"


def test_promtool_has_nothing_to_complain_of(start, stand_in, workloads):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool to check with (Debian package prometheus)")
    half = workloads("half")
    stand_in.write(device(Process(pid=half.pid), samples=[Busy(pid=half.pid, sm=40)]))
    daemon = start()
    daemon.wait_for(GIB, "fgpu_pod_memory_used_bytes", pod="half")
    done = subprocess.run([promtool, "check", "metrics"], input=daemon.get("/metrics")[2], capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


TGKILL = {"x86_64": 234, "aarch64": 131}  # man 2 tgkill; Python has it for its own threads alone


@pytest.mark.skipif(platform.machine() not in TGKILL, reason=f"the number of tgkill is not known on {platform.machine()}")
def test_a_signal_that_the_kernel_hands_to_another_thread_ends_the_daemon_too():
    daemon = Daemon(["--demo"], {}).wait_until_started()
    try:
        other = next(int(task.name) for task in Path(f"/proc/{daemon.process.pid}/task").iterdir() if int(task.name) != daemon.process.pid)
        assert ctypes.CDLL(None).syscall(TGKILL[platform.machine()], daemon.process.pid, other, signal.SIGTERM) == 0
        assert daemon.process.wait(timeout=10) == 0
    finally:
        daemon.stop()


def test_a_burst_of_signals_ends_the_daemon_as_one_does():
    daemon = Daemon(["--demo"], {}).wait_until_started()
    try:
        for _ in range(500):
            daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(timeout=10) == 0
        log = daemon.process.stderr.read()
        assert (log.count("state=stopping signal=SIGTERM"), "Traceback" in log) == (1, False)
    finally:
        daemon.stop()


def test_a_port_in_use_is_said_in_one_line():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        command = [sys.executable, "-m", "exporter", "--demo", "--listen-address", "127.0.0.1", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("fgpu-exporter: ")]
    assert len(said) == 1
    assert port in said[0]
