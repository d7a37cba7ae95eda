"""What breaks on a node, one fault at a time, under the running daemon: what it still serves, that it says so, and that it is whole again.

The daemon is a process of its own: the real pynvml on a stand-in library, a gRPC kubelet, an HTTP API behind a gate that can fail, a tree
like /proc. `make reliability` writes docs/reliability.md from what these tests measure.
"""

import os
import resource
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import yaml
from api_gate import ApiGate
from live import GIB, GPU, HALF, MIB, OTHER_GPU, SCENARIO, Daemon, device, pod, write_kubeconfig
from nvml_stand_in.stand_in import GPU_IS_LOST, HANG, LIB_RM_VERSION_MISMATCH, NOT_SUPPORTED, UNKNOWN, Busy, Mig, Process

from exporter.clock import SystemClock
from exporter.simulation import SimulatedNode, load_scenario
from exporter.simulation.node import Entry, Removal, Step
from exporter.sources import podresources_pb2 as messages

TOTAL = 81559 * MIB
HALF_PID, SMALL_PID, WHOLE_PID, LATE_PID = 41001, 41002, 41003, 41004
WHOLE = {"uid": "4f0c2a57-6e0f-4b0b-9d1d-2f7f8d4f6a11", "container_id": "a7" * 32}
LATE = {"uid": "9d7d3c1e-52f4-4a0c-8a51-0e8f7f2f9c33", "container_id": "b9" * 32}
GROUP_LABELS = {"runai-gpu-group": SCENARIO["pods"][0]["metadata"]["labels"]["runai-gpu-group"]}
WHOLE_DEVICES = [{"resource_name": "nvidia.com/gpu", "device_ids": [OTHER_GPU]}]

NODE = {
    **SCENARIO,
    "gpus": [{"uuid": GPU}, {"uuid": OTHER_GPU}],
    "pods": [*SCENARIO["pods"], pod("team-c", "whole", WHOLE["uid"], WHOLE["container_id"])],
    "pod_resources": [
        *SCENARIO["pod_resources"],
        {"namespace": "team-c", "name": "whole", "containers": [{"name": "main", "devices": WHOLE_DEVICES}]},
    ],
    "allocatable": WHOLE_DEVICES,
    "processes": [
        {"pid": HALF_PID, "container": "team-a/half/main"},
        {"pid": SMALL_PID, "container": "team-b/small/main"},
        {"pid": WHOLE_PID, "container": "team-c/whole/main"},
    ],
}


def sample(name, **labels):
    return f"fgpu_{name}", tuple(sorted(labels.items()))


def of_pod(name, pod_name, gpu_uuid=GPU):
    namespace = {"half": "team-a", "small": "team-b", "whole": "team-c", "late": "team-d"}[pod_name]
    return sample(name, namespace=namespace, pod=pod_name, gpu_uuid=gpu_uuid)


def source_up(source):
    return sample("source_up", source=source)


def gpu_up(gpu_uuid):
    return sample("gpu_up", gpu_uuid=gpu_uuid)


def unattributed(reason, gpu_uuid=GPU):
    return sample("gpu_unattributed_memory_bytes", gpu_uuid=gpu_uuid, reason=reason)


USE_OF_FIRST = {of_pod("pod_memory_used_bytes", "half"): 30 * GIB, of_pod("pod_memory_used_bytes", "small"): 1500 * MIB}
USE = {**USE_OF_FIRST, of_pod("pod_memory_used_bytes", "whole", OTHER_GPU): 10 * GIB}
ANNOTATED_LIMITS = {of_pod("pod_memory_limit_bytes", "half"): HALF, of_pod("pod_memory_limit_bytes", "small"): 2000 * MIB}
LIMITS = {**ANNOTATED_LIMITS, of_pod("pod_memory_limit_bytes", "whole", OTHER_GPU): TOTAL}
SOURCES = {source_up(source): 1.0 for source in ("nvml", "procfs", "kubelet", "kubernetes")}
GPUS = {gpu_up(GPU): 1.0, gpu_up(OTHER_GPU): 1.0}
EVERYTHING = {**USE, **LIMITS, **SOURCES, **GPUS}
NO_USE = dict.fromkeys(USE)
LATE_USE = {of_pod("pod_memory_used_bytes", "late"): GIB}


def devices(*more, first=None, other=None):
    """The two GPUs, whose processes hold what EVERYTHING says; more processes on the first; the rest of what a device says."""
    held = (Process(pid=HALF_PID, memory=30 * GIB), Process(pid=SMALL_PID, memory=1500 * MIB))
    return (
        device(*held, *more, samples=[Busy(pid=HALF_PID, sm=40)], **(first or {})),
        device(Process(pid=WHOLE_PID, memory=10 * GIB), uuid=OTHER_GPU, **(other or {})),
    )


def wait_until(daemon, expected, *, seconds=20.0):
    """Scrape until what is expected is there (None: absent), and answer how long that took. No scrape may say what was never true.

    `daemon.truth` is what a test knows better than USE and LIMITS; None: it changes.
    """
    began = time.monotonic()
    truth = {**USE, **LIMITS, **daemon.truth}
    while True:
        asked = time.monotonic()
        found = daemon.metrics()
        took = time.monotonic() - asked
        assert took < 1.0, "a scrape waited"
        wrong = {key: found[key] for key, value in truth.items() if value is not None and found.get(key, value) != value}
        assert wrong == {}
        missing = {key: found.get(key) for key, value in expected.items() if found.get(key) != value}
        if not missing:
            return time.monotonic() - began
        if time.monotonic() - began > seconds:
            daemon.stop()
            pytest.fail(f"after {seconds} s there is {missing}, expected {expected}; the log: {''.join(daemon.log[-40:])}")
        time.sleep(0.05)


def wait_until_told(daemon, key, seconds=10.0):
    deadline = time.monotonic() + seconds
    while key not in daemon.metrics():
        assert time.monotonic() < deadline, key
        time.sleep(0.1)


def shows(daemon, expected):
    found = daemon.metrics()
    assert {key: found.get(key) for key in expected} == expected


def change(node, **step):
    node._act(Step(**step), starts_anew=False)


def break_source(node, **sources):
    change(node, sources=sources)


def add_late_pod(node, stand_in, *, container_id=LATE["container_id"], **metadata):
    """Another pod of the group arrives, with a process that holds memory."""
    found = pod("team-d", "late", LATE["uid"], container_id, labels=GROUP_LABELS, annotations={"gpu-memory": "3000"}, **metadata)
    process = Entry(LATE_PID, {"container": "team-d/late/main"}, 1)
    change(node, pods=(Entry("team-d/late", found, 1),), processes=(process,))
    stand_in.write(*devices(Process(pid=LATE_PID, memory=GIB)))


@pytest.fixture
def node(tmp_path):
    """A kubelet, an API server and a /proc, as NODE says."""
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(NODE))
    with SimulatedNode(load_scenario(file), SystemClock()) as node:
        node.advance_to(0.0)
        yield node


@pytest.fixture
def gate(node):
    """What stands before the API server."""
    gate = ApiGate(node.kubernetes_url)
    yield gate
    gate.close()


@pytest.fixture
def launch(node, gate, nvml_library, stand_in, tmp_path):
    """Start the daemon, on the driver as it is then; it is stopped in the end."""
    token_file = tmp_path / "token"
    token_file.write_text("first")
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", gate.url, tokenFile=str(token_file))
    daemons = []

    def start_one(*arguments, library=None, patience="", environment=None):
        flags = ["--node-name", "gpu-node-1", "--kubelet-socket", str(node.kubelet_socket), "--kubeconfig", str(kubeconfig)]
        flags += ["--proc-path", str(node.proc_root), "--sample-interval-seconds", "0.5", "--breach-hold-seconds", "1", *arguments]
        program = f"import sys; from exporter.__main__ import Patience, main; sys.exit(main(sys.argv[1:], Patience({patience})))"
        folder = library if library is not None else nvml_library().parent
        variables = {"LD_LIBRARY_PATH": str(folder), "NO_PROXY": "*", **stand_in.environment, **(environment or {})}
        daemons.append(Daemon(flags, variables, program=("-c", program) if patience else ("-m", "exporter")))
        daemons[-1].truth = {}
        return daemons[-1].wait_until_started()

    start_one.token_file = token_file
    yield start_one
    stand_in.write()  # what hangs in the driver goes on
    for daemon in daemons:
        daemon.stop()


@pytest.fixture
def daemon(launch, stand_in):
    """The daemon on a node that is well."""
    stand_in.write(*devices())
    daemon = launch()
    wait_until(daemon, EVERYTHING)
    return daemon


@pytest.fixture
def endure(record_property):
    """Answer a function that takes a daemon through one fault and notes what came of it."""

    def course(daemon, *, fault, still, breaks, mends=None, noticed=None, served=None, whole=EVERYTHING):
        """`noticed`: what a scrape shows when the fault is noticed; None: nothing. `served`: what it shows for as long as it lasts.

        `mends` of None: it mends itself, and is timed from its beginning.
        """
        record_property("fault", fault)
        record_property("still", still)
        breaks()
        began = time.monotonic()
        if noticed is not None:
            record_property("noticed_seconds", f"{wait_until(daemon, {**noticed, **(served or {})}):.1f}")
        deadline = time.monotonic() + 0.6
        while time.monotonic() < deadline:
            wait_until(daemon, {}, seconds=0)
            shows(daemon, served or {})
            time.sleep(0.1)
        if mends is not None:
            mends()
            began = time.monotonic()
        wait_until(daemon, whole, seconds=30.0)
        record_property("whole_seconds", f"{time.monotonic() - began:.1f}")
        assert daemon.get("/healthz")[0] == 200

    return course


# --- the kubelet ---


class OtherKubelet:
    """A kubelet that answers what it is told, on the socket of the one before."""

    def __init__(self, socket, listed, allocatable=b""):
        self._server = grpc.server(ThreadPoolExecutor(2))
        answers = {"List": listed, "GetAllocatableResources": allocatable}
        handlers = {name: grpc.unary_unary_rpc_method_handler(lambda *_, answer=answer: answer) for name, answer in answers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers),))
        socket.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{socket}")
        self._server.start()

    def stop(self):
        self._server.stop(None).wait()


def listed_pod(namespace, name, *device_ids):
    ids = [messages.ContainerDevices(resource_name="nvidia.com/gpu", device_ids=[device_id]) for device_id in device_ids]
    return messages.PodResources(namespace=namespace, name=name, containers=[messages.ContainerResources(name="main", devices=ids)])


@pytest.fixture
def other_kubelet(node):
    """Start a kubelet in the place of the node's; answer a function that brings the node's back."""
    started = []

    def start(listed, allocatable=b""):
        break_source(node, kubelet="down")
        started.append(OtherKubelet(node.kubelet_socket, listed, allocatable))

    def stop():
        started.pop().stop()
        break_source(node, kubelet="up")

    start.stop = stop
    yield start
    for kubelet in started:
        kubelet.stop()


KUBELET_DOWN = {source_up("kubelet"): 0.0}


def test_a_kubelet_whose_socket_is_removed_is_remembered(daemon, node, endure):
    endure(
        daemon,
        fault="the kubelet stops and its socket is removed",
        still="use, limits, allocations as last heard",
        breaks=lambda: break_source(node, kubelet="down"),
        noticed=KUBELET_DOWN,
        served={**USE, **LIMITS, **GPUS},
        mends=lambda: break_source(node, kubelet="up"),
    )


def test_a_socket_that_is_deleted_under_a_running_kubelet_is_remembered(daemon, node, endure):
    aside = node.kubelet_socket.with_suffix(".aside")
    endure(
        daemon,
        fault="the kubelet's socket is deleted while the kubelet runs",
        still="use, limits, allocations as last heard",
        breaks=lambda: node.kubelet_socket.rename(aside),
        noticed=KUBELET_DOWN,
        served={**USE, **LIMITS, **GPUS},
        mends=lambda: aside.rename(node.kubelet_socket),
    )


def test_a_kubelet_that_restarts_is_asked_again_on_its_new_socket(daemon, node, endure):
    endure(
        daemon,
        fault="the kubelet restarts and makes its socket anew",
        still="everything",
        breaks=lambda: break_source(node, kubelet="restart"),
        served={**USE, **LIMITS, **GPUS},
        mends=lambda: break_source(node, kubelet="restart"),
    )


def test_another_kubelet_on_the_same_path_is_believed(daemon, other_kubelet, endure):
    answer = messages.ListPodResourcesResponse(
        pod_resources=[listed_pod("team-a", "half"), listed_pod("team-b", "small", OTHER_GPU), listed_pod("team-c", "whole", OTHER_GPU)]
    )
    endure(
        daemon,
        fault="another kubelet answers on the same path, with other allocations",
        still="everything, as the new one says",
        breaks=lambda: other_kubelet(answer.SerializeToString()),
        noticed={sample("gpu_pods", gpu_uuid=OTHER_GPU): 2.0, **SOURCES},
        served=USE,
        mends=other_kubelet.stop,
        whole={**EVERYTHING, sample("gpu_pods", gpu_uuid=OTHER_GPU): 1.0},
    )


@pytest.mark.parametrize(("state", "words"), [("refuse", "refuses (its rate limit)"), ("hang", "hangs")])
def test_a_kubelet_that_does_not_answer_is_remembered(daemon, node, endure, state, words):
    endure(
        daemon,
        fault=f"the kubelet {words}",
        still="use, limits, allocations as last heard",
        breaks=lambda: break_source(node, kubelet=state),
        noticed=KUBELET_DOWN,
        served={**USE, **LIMITS, **GPUS},
        mends=lambda: break_source(node, kubelet="up"),
    )


@pytest.mark.parametrize("mebibytes", [6, 15])
def test_a_large_answer_of_the_kubelet_is_read(launch, stand_in, other_kubelet, endure, mebibytes):
    stand_in.write(*devices())
    daemon = launch("--sample-interval-seconds", "2")
    wait_until(daemon, EVERYTHING)
    filler = [f"GPU-{number:08d}-{'0' * 100}::{number}" for number in range(1000)]
    many = messages.ListPodResourcesResponse(pod_resources=[listed_pod("team-z", "many", *filler)]).SerializeToString()
    few = [listed_pod("team-a", "half"), listed_pod("team-b", "small", OTHER_GPU), listed_pod("team-c", "whole", OTHER_GPU)]
    answer = messages.ListPodResourcesResponse(pod_resources=few).SerializeToString()
    answer += many * ((mebibytes << 20) // len(many))
    assert (mebibytes - 1) << 20 < len(answer) <= mebibytes << 20
    endure(
        daemon,
        fault=f"the kubelet's answer grows to {mebibytes} MiB",
        still="everything",
        breaks=lambda: other_kubelet(answer),
        noticed={sample("gpu_pods", gpu_uuid=OTHER_GPU): 2.0, **SOURCES},
        served={**USE, **GPUS},
        mends=other_kubelet.stop,
        whole={**EVERYTHING, sample("gpu_pods", gpu_uuid=OTHER_GPU): 1.0},
    )


def test_garbage_from_the_kubelet_is_no_allocation(daemon, other_kubelet, endure):
    endure(
        daemon,
        fault="the kubelet answers garbage",
        still="use, limits, allocations as last heard",
        breaks=lambda: other_kubelet(b"\xff\xfe<html>504</html>"),
        noticed=KUBELET_DOWN,
        served={**USE, **LIMITS, **GPUS},
        mends=other_kubelet.stop,
    )


# --- the Kubernetes API ---

KUBERNETES_DOWN = {source_up("kubernetes"): 0.0}


@pytest.fixture
def late(node, stand_in):
    """Answer a function with which another pod arrives, and how it goes."""

    def arrive():
        add_late_pod(node, stand_in)

    def leave():
        stand_in.write(*devices())
        change(node, remove=Removal(pods=(("team-d/late", 1),), processes=((LATE_PID, 1),)))

    arrive.leave = leave
    return arrive


def test_an_api_server_that_is_down_costs_only_who_is_new(daemon, node, late, endure):
    def breaks():
        break_source(node, kubernetes="down")
        late()

    endure(
        daemon,
        fault="the API server is down; a pod starts meanwhile",
        still="use and limits of the pods that were known; the new pod's memory as unknown_container",
        breaks=breaks,
        noticed={**KUBERNETES_DOWN, unattributed("unknown_container"): GIB},
        served={**USE, **LIMITS, **GPUS},
        mends=lambda: break_source(node, kubernetes="up"),
        whole={**EVERYTHING, **LATE_USE, unattributed("unknown_container"): 0.0},
    )


def test_an_api_server_that_hangs_costs_only_who_is_new(daemon, node, late, endure):
    def breaks():
        break_source(node, kubernetes="hang")
        late()

    endure(
        daemon,
        fault="the API server falls silent; a pod starts meanwhile",
        still="use and limits of the pods that were known; the new pod's memory as unknown_container",
        breaks=breaks,
        noticed={unattributed("unknown_container"): GIB},
        served={**USE, **LIMITS, **GPUS},
        mends=lambda: break_source(node, kubernetes="up"),
        whole={**EVERYTHING, **LATE_USE, unattributed("unknown_container"): 0.0},
    )


def test_a_slow_api_server_delays_only_who_is_new(launch, stand_in, gate, late, endure):
    gate.delay_seconds = 1.0
    stand_in.write(*devices())
    daemon = launch()
    wait_until(daemon, EVERYTHING)

    def breaks():
        gate.end_watches()
        late()

    endure(
        daemon,
        fault="the API server takes a second for every answer; a pod starts meanwhile",
        still="use and limits of the pods that were known; the new pod's memory as unknown_container",
        breaks=breaks,
        noticed={unattributed("unknown_container"): GIB},
        served={**USE, **LIMITS, **GPUS},
        mends=lambda: setattr(gate, "delay_seconds", 0.0),
        whole={**EVERYTHING, **LATE_USE, unattributed("unknown_container"): 0.0},
    )


def test_a_token_that_was_rotated_is_read_anew(launch, stand_in, gate, endure):
    gate.token = "first"  # noqa: S105 - of a test
    stand_in.write(*devices())
    daemon = launch()
    wait_until(daemon, EVERYTHING)

    def breaks():
        gate.token = "second"  # noqa: S105 - of a test
        gate.end_watches()

    endure(
        daemon,
        fault="the API server refuses the token (401) until the rotated one is read",
        still="use and limits of the pods that were known",
        breaks=breaks,
        noticed=KUBERNETES_DOWN,
        served={**USE, **LIMITS, **GPUS},
        mends=lambda: launch.token_file.write_text("second"),
    )


def test_nodes_that_may_not_be_read_do_not_cost_the_pods(daemon, gate, late, endure):
    def breaks():
        gate.forbidden = ("/api/v1/nodes",)
        gate.end_watches()
        wait_until(daemon, KUBERNETES_DOWN)
        late()

    endure(
        daemon,
        fault="the API server forbids the Node object (403); a pod starts meanwhile",
        still="use and limits of all pods, the new one too",
        breaks=breaks,
        noticed={**KUBERNETES_DOWN, **LATE_USE},
        served={**USE, **LIMITS, **GPUS},
        mends=lambda: setattr(gate, "forbidden", ()),
        whole={**EVERYTHING, **LATE_USE},
    )


def test_a_version_that_expired_is_listed_anew_when_the_watch_says_so(daemon, node, late, endure):
    def breaks():
        break_source(node, kubernetes="gone")
        late()

    endure(
        daemon,
        fault="410 Gone as an event of the watch; a pod starts meanwhile",
        still="everything",
        breaks=breaks,
        noticed=LATE_USE,
        served={**USE, **LIMITS, **GPUS},
        mends=late.leave,
    )


def test_a_version_that_expired_is_listed_anew_when_the_response_says_so(daemon, gate, late, endure):
    def breaks():
        gate.watches_refused = 2
        gate.end_watches()
        late()

    endure(
        daemon,
        fault="410 Gone as the status of the response; a pod starts meanwhile",
        still="everything",
        breaks=breaks,
        noticed=LATE_USE,
        served={**USE, **LIMITS, **GPUS},
        mends=late.leave,
    )
    assert gate.watches_refused == 0


def test_a_connection_that_is_dead_without_knowing_is_given_up(launch, stand_in, gate, late, endure):
    stand_in.write(*devices())
    daemon = launch(patience="api_silence_seconds=3.0")
    wait_until(daemon, EVERYTHING)

    def breaks():
        gate.fall_silent()
        late()

    endure(
        daemon,
        fault="half-open connections to the API server (given up after 3 s here, 75 s on a node); a pod starts meanwhile",
        still="use and limits of the pods that were known; the new pod's memory as unknown_container until then",
        breaks=breaks,
        noticed={unattributed("unknown_container"): GIB},
        whole={**EVERYTHING, **LATE_USE, unattributed("unknown_container"): 0.0},
    )


def test_watches_that_end_every_second_lose_nothing(daemon, gate, late, endure):
    def breaks():
        gate.watch_seconds = 1.0
        gate.end_watches()
        late()

    before = len(gate.requests)
    endure(
        daemon,
        fault="every watch ends after a second; a pod starts meanwhile",
        still="everything",
        breaks=breaks,
        noticed=LATE_USE,
        served={**USE, **LIMITS, **GPUS},
        mends=late.leave,
    )
    assert len(gate.requests) - before < 60, "the API server is asked without pause"


# --- the driver ---

NVML_DOWN = {source_up("nvml"): 0.0, **NO_USE}


def test_a_library_that_arrives_late_is_found(launch, nvml_library, stand_in, tmp_path, endure):
    stand_in.write(*devices())
    folder = tmp_path / "lib"
    folder.mkdir()
    daemon = launch(library=folder)
    endure(
        daemon,
        fault="there is no driver library; it arrives later",
        still="limits that annotations give in bytes",
        breaks=lambda: None,
        noticed=NVML_DOWN,
        served={**NO_USE, of_pod("pod_memory_limit_bytes", "small"): 2000 * MIB},
        mends=lambda: shutil.copy(nvml_library(), folder),
    )


def test_a_driver_that_is_unloaded_is_taken_again(daemon, stand_in, endure):
    endure(
        daemon,
        fault="the kernel module is unloaded and loaded again",
        still="limits; no use",
        breaks=stand_in.unload_driver,
        noticed=NVML_DOWN,
        served={**NO_USE, **ANNOTATED_LIMITS},
        mends=lambda: stand_in.write(*devices()),
    )


def test_a_library_that_no_longer_fits_the_driver_ends_the_process_with_status_3(daemon, launch, stand_in, record_property):
    record_property("fault", "the driver was updated: the loaded library no longer fits")
    record_property("still", "nothing: the process ends with status 3 and says why; the new one loads the new library")
    began = time.monotonic()
    stand_in.write(calls=dict.fromkeys(["nvmlInitWithFlags", "nvmlInit_v2", "*"], LIB_RM_VERSION_MISMATCH))
    assert daemon.process.wait(timeout=20) == 3
    record_property("noticed_seconds", f"{time.monotonic() - began:.1f}")
    daemon.stop()
    assert "state=fatal" in "".join(daemon.log)
    assert "a new container gets the new one" in "".join(daemon.log)
    began = time.monotonic()
    stand_in.write(*devices())
    wait_until(launch(), EVERYTHING)
    record_property("whole_seconds", f"{time.monotonic() - began:.1f}")


def test_a_lost_gpu_costs_itself(daemon, stand_in, endure):
    endure(
        daemon,
        fault="a GPU is lost",
        still="the other GPU; all limits",
        breaks=lambda: stand_in.write(*devices(other={"calls": {"*": GPU_IS_LOST}})),
        noticed={gpu_up(OTHER_GPU): 0.0, of_pod("pod_memory_used_bytes", "whole", OTHER_GPU): None},
        served={**USE_OF_FIRST, **LIMITS, **SOURCES},
        mends=lambda: stand_in.write(*devices()),
    )


def test_a_gpu_that_hangs_costs_itself_and_no_time(daemon, stand_in, endure):
    endure(
        daemon,
        fault="every call for a GPU hangs",
        still="the other GPU; all limits",
        breaks=lambda: stand_in.write(*devices(other={"calls": {"*": HANG}})),
        noticed={gpu_up(OTHER_GPU): 0.0, of_pod("pod_memory_used_bytes", "whole", OTHER_GPU): None},
        served={**USE_OF_FIRST, **LIMITS, **SOURCES},
        mends=lambda: stand_in.write(*devices()),
    )


def test_gpus_that_all_hang_cost_the_use_and_nothing_else(daemon, stand_in, endure):
    hanging = {"calls": {"*": HANG}}
    endure(
        daemon,
        fault="every call for every GPU hangs",
        still="limits",
        breaks=lambda: stand_in.write(*devices(first=hanging, other=hanging)),
        noticed={gpu_up(GPU): 0.0, gpu_up(OTHER_GPU): 0.0, **NO_USE},
        served={**NO_USE, **LIMITS},
        mends=lambda: stand_in.write(*devices()),
    )


def test_a_driver_that_hangs_as_a_whole_costs_the_use_and_nothing_else(daemon, stand_in, endure):
    hanging = {"calls": {"*": HANG}}
    endure(
        daemon,
        fault="every call of the driver hangs, those about the library too",
        still="limits",
        breaks=lambda: stand_in.write(*devices(first=hanging, other=hanging), calls={"*": HANG}),
        noticed=NO_USE,
        served={**NO_USE, **LIMITS},
        mends=lambda: stand_in.write(*devices()),
    )


UNKNOWN_EVERYWHERE = {"calls": {"*": UNKNOWN}}


def test_a_driver_that_answers_unknown_is_initialised_anew(daemon, stand_in, endure):
    stand_in.forget_calls()
    endure(
        daemon,
        fault="every GPU answers with the driver's unknown error",
        still="limits",
        breaks=lambda: stand_in.write(*devices(first=UNKNOWN_EVERYWHERE, other=UNKNOWN_EVERYWHERE)),
        noticed={gpu_up(GPU): 0.0, gpu_up(OTHER_GPU): 0.0, **NO_USE},
        served={**NO_USE, **LIMITS},
        mends=lambda: stand_in.write(*devices()),
    )
    assert len(stand_in.calls("nvmlInitWithFlags")) >= 1
    assert len(stand_in.calls("nvmlInitWithFlags")) == len(stand_in.calls("nvmlShutdown"))


def test_a_driver_that_answers_unknown_for_long_ends_the_process_with_status_3(launch, stand_in, record_property):
    record_property("fault", "every GPU answers with the unknown error and goes on (for 2 s here, 300 s on a node)")
    record_property("still", "limits until then; the process ends with status 3, and a new container has its devices again")
    stand_in.write(*devices())
    daemon = launch(patience="unknown_error_seconds=2.0")
    wait_until(daemon, EVERYTHING)
    began = time.monotonic()
    stand_in.write(*devices(first=UNKNOWN_EVERYWHERE, other=UNKNOWN_EVERYWHERE))
    wait_until(daemon, {gpu_up(GPU): 0.0, **NO_USE, **LIMITS})
    record_property("noticed_seconds", f"{time.monotonic() - began:.1f}")
    assert daemon.process.wait(timeout=20) == 3
    daemon.stop()
    assert "unknown error" in "".join(daemon.log)
    assert stand_in.open_initialisations() == 0
    began = time.monotonic()
    stand_in.write(*devices())
    wait_until(launch(), EVERYTHING)
    record_property("whole_seconds", f"{time.monotonic() - began:.1f}")


def test_a_gpu_that_vanishes_and_comes_back_is_as_before(daemon, stand_in, endure):
    endure(
        daemon,
        fault="a GPU vanishes from the driver's list, and comes back",
        still="the other GPU; all limits",
        breaks=lambda: stand_in.write(devices()[0]),
        noticed={gpu_up(OTHER_GPU): None, of_pod("pod_memory_used_bytes", "whole", OTHER_GPU): None},
        served={**USE_OF_FIRST, **LIMITS, **SOURCES},
        mends=lambda: stand_in.write(*devices()),
    )


def test_a_function_that_the_driver_lacks_costs_what_it_gives(daemon, stand_in, endure):
    utilization = of_pod("pod_sm_utilization_ratio", "half")
    lacking = dict.fromkeys(["nvmlDeviceGetProcessesUtilizationInfo", "nvmlDeviceGetProcessUtilization"], NOT_SUPPORTED)
    wait_until_told(daemon, utilization)
    endure(
        daemon,
        fault="the driver no longer has per-process utilization",
        still="everything else",
        breaks=lambda: stand_in.write(*devices(first={"calls": lacking})),
        noticed={utilization: None},
        served=EVERYTHING,
        mends=lambda: stand_in.write(*devices()),
    )


MIG = Mig(uuid="MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10", gpu_instance=1)
SMALLER = {"name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "memory_total": 9 * GIB}
MIG_AGAIN = Mig(uuid="MIG-41d7c0a8-2e93-5c64-b7f5-e90a3b6d8c21", gpu_instance=2, **SMALLER)


def test_a_gpu_that_is_divided_anew_while_the_exporter_runs_shows_its_new_devices(daemon, stand_in, endure):
    def divided(*migs):
        return devices()[0], device(uuid=OTHER_GPU, migs=migs)

    daemon.truth = {of_pod("pod_memory_used_bytes", "whole", OTHER_GPU): None}

    def breaks():
        stand_in.write(*divided(MIG))
        wait_until(daemon, {gpu_up(MIG.uuid): 1.0, sample("gpu_memory_total_bytes", gpu_uuid=MIG.uuid): 40 * GIB})
        stand_in.write(*divided(MIG_AGAIN))

    endure(
        daemon,
        fault="a GPU is divided into MIG devices, and then into others",
        still="the other GPU; all limits",
        breaks=breaks,
        noticed={gpu_up(MIG.uuid): None, gpu_up(MIG_AGAIN.uuid): 1.0, sample("gpu_memory_total_bytes", gpu_uuid=MIG_AGAIN.uuid): 9 * GIB},
        served={**USE_OF_FIRST, **LIMITS, **SOURCES},
        mends=lambda: stand_in.write(*devices()),
        whole={**EVERYTHING, gpu_up(MIG_AGAIN.uuid): None},
    )


def test_the_driver_is_let_go_of_while_a_mig_configuration_is_pending(daemon, node, stand_in, endure):
    def say(state):
        change(node, machine={"labels": {"nvidia.com/mig.config.state": state}})

    assert stand_in.open_initialisations() == 1

    def mends():
        assert stand_in.open_initialisations() == 0
        say("success")

    endure(
        daemon,
        fault="a MIG configuration is pending (no fault: the driver is let go of so that it can happen)",
        still="limits",
        breaks=lambda: say("pending"),
        noticed=NVML_DOWN,
        served={**NO_USE, **ANNOTATED_LIMITS},
        mends=mends,
    )
    assert stand_in.open_initialisations() == 1
    assert sample("source_errors_total", source="nvml") in daemon.metrics()
    assert daemon.value("fgpu_source_errors_total", source="nvml") == 0.0


# --- processes ---


def test_a_process_that_is_gone_has_no_owner_and_is_not_lost(daemon, node, endure):
    everything_but = {key: value for key, value in EVERYTHING.items() if key != of_pod("pod_memory_used_bytes", "small")}

    daemon.truth = {of_pod("pod_memory_used_bytes", "small"): None}

    def breaks():
        change(node, processes=(Entry(SMALL_PID, {"state": "gone"}, 1),))

    def mends():
        change(node, processes=(Entry(SMALL_PID, {"state": "S"}, 1),))

    endure(
        daemon,
        fault="a process ends between the driver's list and /proc",
        still="everything else; its memory as process_gone",
        breaks=breaks,
        noticed={unattributed("process_gone"): 1500 * MIB, of_pod("pod_memory_used_bytes", "small"): 0.0},
        served=everything_but,
        mends=mends,
        whole={**EVERYTHING, unattributed("process_gone"): 0.0},
    )


def test_outside_of_the_hosts_pid_namespace_nothing_is_attributed(daemon, node, endure):
    endure(
        daemon,
        fault="the exporter is not in the host's PID namespace",
        still="limits, the driver's numbers for each GPU",
        breaks=lambda: change(node, machine={"host_pid": False}),
        noticed={source_up("procfs"): 0.0, **NO_USE},
        served={**NO_USE, **LIMITS, **GPUS},
        mends=lambda: change(node, machine={"host_pid": True}),
    )


def test_a_contract_that_cannot_be_read_costs_that_claim(daemon, node, late, endure):
    late()
    wait_until(daemon, {**EVERYTHING, **LATE_USE})
    limit = of_pod("pod_memory_limit_bytes", "late")
    error = sample("claim_errors", namespace="team-e", pod="unreadable", system="kai")
    unreadable = pod("team-e", "unreadable", "5e0c4b8a-7a44-4d0e-8a53-6b8d0f4c9b77", "d4" * 32, labels=GROUP_LABELS)
    unreadable["metadata"]["annotations"] = {"gpu-memory": "lots"}
    endure(
        daemon,
        fault="a pod arrives whose contract cannot be read",
        still="everything else",
        breaks=lambda: change(node, pods=(Entry("team-e/unreadable", unreadable, 1),)),
        noticed={error: 1.0},
        served={**EVERYTHING, **LATE_USE, limit: 3000 * MIB},
        mends=lambda: change(node, remove=Removal(pods=(("team-e/unreadable", 1),))),
        whole={**EVERYTHING, **LATE_USE, error: None},
    )


# --- the exporter itself ---


def test_a_sampler_that_hangs_fails_the_health_check_and_serves_nothing_old(daemon, node, record_property):
    record_property("fault", "the sampler itself hangs (a read of /proc that does not return)")
    record_property("still", "the exporter's own series; /healthz answers 503, so that the kubelet restarts it")
    folder = (node.proc_root / str(SMALL_PID)).resolve()
    good = (folder / "stat").read_bytes()
    (folder / "stat").unlink()
    os.mkfifo(folder / "stat")
    began = time.monotonic()
    while daemon.get("/healthz")[0] == 200:
        assert time.monotonic() - began < 10
        time.sleep(0.05)
    record_property("noticed_seconds", f"{time.monotonic() - began:.1f}")
    shows(daemon, {**NO_USE, **dict.fromkeys(LIMITS), gpu_up(GPU): None})
    began = time.monotonic()
    fifo = folder / "stat"
    fifo.rename(folder / "aside")
    (folder / "stat").write_bytes(good)
    (folder / "aside").write_bytes(good)  # the read that hung has its answer
    wait_until(daemon, EVERYTHING)
    record_property("whole_seconds", f"{time.monotonic() - began:.1f}")
    assert daemon.get("/healthz")[0] == 200


def test_a_daemon_without_free_descriptors_comes_back_when_there_are_some(daemon, record_property):
    record_property("fault", "no file descriptor is free")
    record_property("still", "what needs none; unknown is absent")
    pid, truth = daemon.process.pid, {**USE, **LIMITS}
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The connection that is open goes on; a new one would need a descriptor.
    with daemon.connected() as metrics:
        metrics()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
        began = time.monotonic()
        while (found := metrics())[source_up("procfs")] != 0.0 or found[source_up("kubelet")] != 0.0:
            assert {key: found[key] for key in truth if key in found and found[key] != truth[key]} == {}
            assert time.monotonic() - began < 20
            time.sleep(0.1)
        record_property("noticed_seconds", f"{time.monotonic() - began:.1f}")
        assert {key: found.get(key) for key in NO_USE} == NO_USE
        assert {key: found.get(key) for key in {**LIMITS, **GPUS}} == {**LIMITS, **GPUS}
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
    record_property("whole_seconds", f"{wait_until(daemon, EVERYTHING):.1f}")


@pytest.fixture(scope="session")
def clock_shim(tmp_path_factory):
    """A library that sets the wall clock of the program into which it is loaded."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) for the library that sets a program's clock")
    library = tmp_path_factory.mktemp("clock") / "clock_shim.so"
    source = Path(__file__).parent / "clock_shim" / "clock_shim.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize(("seconds", "words"), [(3600, "forward"), (-3600, "back")])
def test_a_clock_that_jumps_makes_no_work(launch, stand_in, clock_shim, tmp_path, record_property, seconds, words):
    record_property("fault", f"the wall clock is set {words} by an hour")
    record_property("still", "everything but one or two samples of utilization, which are unknown; counters never go down or leap")
    offset = tmp_path / "offset"
    offset.write_text("0")
    stand_in.write(*devices())
    daemon = launch("--utilization-window-seconds", "2", environment={"LD_PRELOAD": str(clock_shim), "CLOCK_SHIM_FILE": str(offset)})
    wait_until(daemon, EVERYTHING)
    busy, utilization = of_pod("pod_sm_busy_seconds_total", "half"), of_pod("pod_sm_utilization_ratio", "half")

    def settle():
        began = time.monotonic()
        while (found := daemon.metrics().get(utilization)) is None or abs(found - 0.4) > 0.08:
            assert time.monotonic() - began < 20, found
            time.sleep(0.1)
        return time.monotonic() - began

    settle()
    before, began = daemon.metrics()[busy], time.monotonic()
    new = offset.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(offset)
    last, wrong_until = before, began
    while time.monotonic() - began < 3:
        wait_until(daemon, {}, seconds=0)
        found = daemon.metrics()
        now = found.get(busy, last)
        assert last <= now <= before + 0.4 * (time.monotonic() - began) + 0.8
        assert found.get(utilization, 0.0) <= 0.6
        if abs(found.get(utilization, 0.0) - 0.4) > 0.1:
            wrong_until = time.monotonic()
        last = now
        time.sleep(0.1)
    record_property("whole_seconds", f"{wrong_until - began:.1f}")
    settle()
    wait_until(daemon, EVERYTHING)


# --- the end ---


def hang_everything(node, stand_in):
    hanging = {"calls": {"*": HANG}}
    stand_in.write(*devices(first=hanging, other=hanging))


ENDS = {
    "the kubelet hangs": lambda node, stand_in: break_source(node, kubelet="hang"),
    "the kubelet is down": lambda node, stand_in: break_source(node, kubelet="down"),
    "the API server hangs": lambda node, stand_in: break_source(node, kubernetes="hang"),
    "the API server is down": lambda node, stand_in: break_source(node, kubernetes="down"),
    "kubelet and API server hang": lambda node, stand_in: break_source(node, kubelet="hang", kubernetes="hang"),
    "all GPUs hang": hang_everything,
    "the driver answers unknown": lambda node, stand_in: stand_in.write(*devices(first=UNKNOWN_EVERYWHERE, other=UNKNOWN_EVERYWHERE)),
    "a MIG configuration is pending": lambda node, stand_in: change(node, machine={"labels": {"nvidia.com/mig.config.state": "pending"}}),
    "the driver is unloaded": lambda node, stand_in: stand_in.unload_driver(),
}


@pytest.mark.parametrize("words", ENDS)
def test_it_ends_in_time_and_cleanly_while(daemon, node, stand_in, words, record_property):
    record_property("fault", f"SIGTERM while {words}")
    record_property("still", "nothing: exit status 0, the driver shut down once for each time that it was taken")
    ENDS[words](node, stand_in)
    time.sleep(0.8)
    seconds = daemon.stop()
    record_property("noticed_seconds", f"{seconds:.1f}")
    assert seconds < 2.0
    assert daemon.process.returncode == 0
    assert "Traceback" not in "".join(daemon.log)
    if words == "the driver is unloaded":
        assert len(stand_in.calls("nvmlShutdown")) == 1  # later initialisations did not work
    else:
        assert stand_in.open_initialisations() == 0
        assert len(stand_in.calls("nvmlShutdown")) == len(stand_in.calls("nvmlInitWithFlags"))
