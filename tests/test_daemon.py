"""The daemon as a process of its own: the real pynvml on a stand-in library, real processes in real cgroups, a gRPC kubelet, an HTTP API,
and a real Prometheus that scrapes it."""

import contextlib
import gzip
import http.client
import json
import os
import re
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
from nvml_stand_in.stand_in import GPU_IS_LOST, HANG, LIB_RM_VERSION_MISMATCH, Busy, Device, Process
from prometheus_client.parser import text_string_to_metric_families

from exporter.clock import SystemClock
from exporter.simulation import SimulatedNode, load_scenario

MIB, GIB = 1 << 20, 1 << 30
GPU = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
OTHER_GPU = "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"
GROUP = "3f6f0b5e-8d0e-4d5b-9f0e-2a4d5c1b7a10"
HALF = 40750 * MIB
UIDS = {"half": "0d052d1e-0874-4dad-95df-953b0d8b2b34", "small": "e71122ed-0e30-40b9-b0d4-c72398a947be"}
IDS = {"half": "f3" * 32, "small": "c3" * 32, "reservation": "69" * 32}
HIERARCHIES = [Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]


def pod(namespace, name, uid, container_id, **metadata):
    return {
        "metadata": {"namespace": namespace, "name": name, "uid": uid, **metadata},
        "spec": {"nodeName": "gpu-node-1", "schedulerName": "kai-scheduler", "containers": [{"name": "main"}]},
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {"name": "main", "containerID": f"containerd://{container_id}", "state": {"running": {"startedAt": "2026-03-02T08:00:00Z"}}}
            ],
        },
    }


SCENARIO = {
    "node": {"name": "gpu-node-1", "labels": {"nvidia.com/gpu.memory": "81559"}},
    "gpus": [{"uuid": GPU}],
    "pods": [
        pod("team-a", "half", UIDS["half"], IDS["half"], labels={"runai-gpu-group": GROUP}, annotations={"gpu-fraction": "0.5"}),
        pod("team-b", "small", UIDS["small"], IDS["small"], labels={"runai-gpu-group": GROUP}, annotations={"gpu-memory": "2000"}),
        pod(
            "kai-resource-reservation",
            "gpu-reservation-76e2d625ef0b9e16",
            "2291c467-6946-4371-a9fd-7bbfacdb0d0a",
            IDS["reservation"],
            labels={"app": "kai-resource-reservation", "runai-gpu-group": GROUP},
            annotations={"run.ai/reserve_for_gpu_index": GPU},
        ),
    ],
    "pod_resources": [
        {"namespace": "team-a", "name": "half", "containers": [{"name": "main"}]},
        {"namespace": "team-b", "name": "small", "containers": [{"name": "main"}]},
    ],
}


class Daemon:
    """The running program."""

    def __init__(self, arguments, environment):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "exporter", "--port", "0", "--listen-address", "127.0.0.1", *arguments],
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = []
        self.port = None

    def wait_until_started(self):
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r"state=started .*port=(\d+)", line):
                self.port = int(match[1])
                return self
        pytest.fail("the daemon ended: " + "".join(self.log))

    def get(self, path, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def metrics(self):
        status, _, body = self.get("/metrics")
        assert status == 200
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }

    def value(self, name, **labels):
        found = [
            value
            for (found_name, found_labels), value in self.metrics().items()
            if found_name == name and set(labels.items()) <= set(found_labels)
        ]
        return found[0] if len(found) == 1 else found or None

    def wait_for(self, expected, name, *, seconds=15.0, **labels):
        deadline = time.monotonic() + seconds
        while (found := self.value(name, **labels)) != expected:
            if time.monotonic() > deadline:
                pytest.fail(f"{name}{labels} is {found!r} and not {expected!r} after {seconds} s")
            time.sleep(0.1)

    def stop(self):
        started = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.log += self.process.communicate(timeout=10)[1].splitlines(keepends=True)
        return time.monotonic() - started


class Workload:
    """A process of this machine in a cgroup like a pod's."""

    def __init__(self, name):
        self.process = subprocess.Popen(["/bin/sleep", "300"])
        self.folders = []
        hierarchy = next((path for path in HIERARCHIES if os.access(path / "cgroup.procs", os.W_OK)), None)
        try:
            if hierarchy is None:
                raise PermissionError("no cgroup hierarchy can be written")
            folder = hierarchy / "kubepods" / f"pod{UIDS[name]}" / IDS[name]
            self.folders = [folder, folder.parent, folder.parent.parent]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cgroup.procs").write_text(str(self.process.pid))
        except OSError as error:
            self.stop()
            pytest.skip(f"this machine does not let the test make cgroups ({error}); the simulated node's /proc tree is tested instead")

    @property
    def pid(self):
        return self.process.pid

    def stop(self):
        self.process.kill()
        self.process.wait()
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


@pytest.fixture
def workloads():
    started = []

    def start(name):
        started.append(Workload(name))
        return started[-1]

    yield start
    for workload in started:
        workload.stop()


@pytest.fixture
def node(tmp_path):
    """A kubelet and an API server."""
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(SCENARIO))
    with SimulatedNode(load_scenario(file), SystemClock()) as node:
        node.advance_to(0.0)
        yield node


@pytest.fixture
def start(node, nvml_library, stand_in, tmp_path):
    """Start the daemon on the node; it is stopped in the end."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": node.kubernetes_url}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )
    daemons = []

    def start_one(*arguments):
        flags = ["--node-name", "gpu-node-1", "--kubelet-socket", str(node.kubelet_socket), "--kubeconfig", str(kubeconfig)]
        flags += ["--sample-interval-seconds", "0.5", "--breach-hold-seconds", "1", *arguments]
        environment = {"LD_LIBRARY_PATH": str(nvml_library().parent), "NO_PROXY": "*", **stand_in.environment}
        daemons.append(Daemon(flags, environment))
        return daemons[-1].wait_until_started()

    yield start_one
    for daemon in daemons:
        daemon.stop()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def device(*processes, uuid=GPU, samples=(), **more):
    return Device(uuid=uuid, memory_total=81559 * MIB, processes=tuple(processes), samples=tuple(samples), **more)


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


def test_the_paths_answer_and_the_formats_are_negotiated(start, stand_in):
    stand_in.write(device())
    daemon = start()
    daemon.wait_for(1.0, "fgpu_gpu_up", gpu_uuid=GPU)
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
