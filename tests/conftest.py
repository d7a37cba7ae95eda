"""What tests of several rooms share."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests are no packages; this makes the folders beside this file importable, as nvml_stand_in.stand_in.
sys.path.insert(0, str(Path(__file__).parent))

import yaml
from live import SCENARIO, Daemon, Workload, write_kubeconfig
from nvml_stand_in.stand_in import StandIn, compile_stand_in, reason_not_to_compile

from exporter.clock import SystemClock
from exporter.simulation import SimulatedNode, load_scenario

# How long an example takes says more of the machine than of the code.
settings.register_profile("everyday", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("everyday")
# Of `make fuzz-long`. Tests that set their own number of examples keep it.
settings.register_profile("nightly", parent=settings.get_profile("everyday"), max_examples=10_000)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory):
    """Answer a function that compiles a stand-in for libnvidia-ml.so.1 that lacks the given symbols, and answers its path."""
    if reason := reason_not_to_compile():
        pytest.skip(reason)
    compiled = {}

    def compile_once(*without):
        key = frozenset(without)
        if key not in compiled:
            compiled[key] = compile_stand_in(tmp_path_factory.mktemp("nvml"), sorted(key))
        return compiled[key]

    return compile_once


@pytest.fixture
def stand_in(tmp_path):
    """Answer a node for the stand-in library; until it is written, the driver is not loaded."""
    return StandIn(tmp_path)


@pytest.fixture
def workloads():
    """Start a process in a cgroup like that of a pod's container; it is stopped in the end."""
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
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", node.kubernetes_url)
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
