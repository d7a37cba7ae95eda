"""The daemon as a process of its own, and what it runs on: the real pynvml on a stand-in library, sockets, processes in cgroups."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nvml_stand_in.stand_in import Device
from prometheus_client.parser import text_string_to_metric_families

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


def parse_samples(body):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


class Daemon:
    """The running program."""

    def __init__(self, arguments, environment, program=("-m", "exporter")):
        self.process = subprocess.Popen(
            [sys.executable, *program, "--port", "0", "--listen-address", "127.0.0.1", *arguments],
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
        return parse_samples(body)

    @contextlib.contextmanager
    def connected(self):
        """Answer a function that scrapes over one connection, again and again."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)

        def scrape():
            connection.request("GET", "/metrics")
            return parse_samples(connection.getresponse().read())

        with contextlib.closing(connection):
            yield scrape

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


def write_kubeconfig(path, server, **user):
    """Write how the API server is reached; answer the path."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(json.dumps(config))
    return path


def device(*processes, uuid=GPU, samples=(), **more):
    return Device(uuid=uuid, memory_total=81559 * MIB, processes=tuple(processes), samples=tuple(samples), **more)
