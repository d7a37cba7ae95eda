"""Kubernetes Events against a real HTTP API server, and through the whole program."""

import contextlib
import json
import logging
import random
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from api_gate import ApiGate
from live import GIB, GPU, UIDS, device, write_kubeconfig
from nvml_stand_in.stand_in import Process

from exporter import simulated
from exporter.breach import Breach, State, Verdict
from exporter.clock import SystemClock
from exporter.config import ConfigError, parse_config
from exporter.event_writer import ATTEMPTS, FORBIDDEN_SECONDS, MOST_QUEUED, PAUSE_SECONDS, EventWriter
from exporter.health import EventsHealth
from exporter.journal import BreachChange
from exporter.judge import Resource
from exporter.limits import PodLimits
from exporter.report import PodReport
from exporter.simulation import SimulatedNode, load_scenario
from exporter.sources.kubernetes_config import find_api_server

KUBECTL = Path(__file__).parents[1] / ".tools/kubectl"
NOBODY_MAY = (403, "Forbidden", 'events is forbidden: User "x" cannot create resource "events" in API group "" in the namespace "team-a"')
NAMESPACE_ENDS = (
    403,
    "Forbidden",
    "unable to create new content in namespace team-a because it is being terminated",
    {"causes": [{"reason": "NamespaceTerminating", "message": "namespace team-a is being terminated", "field": "metadata.namespace"}]},
)
NO_NAMESPACE = (404, "NotFound", 'namespaces "team-a" not found')
UNAVAILABLE = (503, "ServiceUnavailable", "etcd is away")
TOO_MANY = (429, "TooManyRequests", "too many requests", {"retryAfterSeconds": 7})
INVALID = (422, "Invalid", "the message is too long")


class FastClock:
    """Real time in which nobody waits longer than a moment, and in which a test can skip time; it remembers how long they wanted to."""

    def __init__(self):
        self.waits = []
        self.skipped = 0.0

    def time(self):
        return time.time()

    def monotonic(self):
        return time.monotonic() + self.skipped

    def wait(self, event, timeout_seconds):
        self.waits.append(timeout_seconds)
        return event.wait(min(timeout_seconds, 0.001))


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    return pytest.fail("did not happen in time")


def change(pod="train-0", *, begun=True, since_seconds=1.0, namespace="team-a", monotonic_seconds=0.0, used=3, resource=Resource.MEMORY):
    state, verdict = (State.EXCEEDED, Verdict.ABOVE) if begun else (State.WITHIN, Verdict.BELOW)
    row = PodReport(
        namespace=namespace,
        pod=pod,
        gpu_uuid="GPU-0",
        pod_uid=f"uid-of-{pod}",
        memory_used_bytes=used * GIB,
        limits=PodLimits(memory_bytes=2 * GIB),
        sm_utilization_ratio=None,
        sm_utilization_mean_ratio=None,
        sm_busy_seconds_total=None,
        breaches={resource: Breach(state=state, verdict=verdict, since_seconds=since_seconds)},
    )
    return BreachChange(
        time_seconds=1000.0 + since_seconds,
        monotonic_seconds=monotonic_seconds,
        pod=row,
        containers=(),
        resource=resource,
        begun=begun,
        since_seconds=since_seconds,
    )


ended = partial(change, begun=False, used=1)


@pytest.fixture
def gate(node):
    """What stands before the API server."""
    with contextlib.closing(ApiGate(node.kubernetes_url)) as gate:
        yield gate


@pytest.fixture
def clock():
    return FastClock()


@pytest.fixture
def make_writer(gate, clock):
    """Make a writer; it is closed in the end."""
    with ExitStack() as stack:

        def make(api=None, clock=clock):
            writer = EventWriter(
                api=api or (lambda: find_api_server(host=gate.url)),
                node_name="gpu-node-1",
                clock=clock,
                jitter=random.Random(1),  # noqa: S311 - the same in each run
            )
            stack.callback(writer.close)
            return writer

        yield make


@pytest.fixture
def writer(make_writer):
    return make_writer()


def events(node, selector=""):
    with urllib.request.urlopen(f"{node.kubernetes_url}/api/v1/events?fieldSelector={selector}", timeout=10) as answer:  # noqa: S310 - loopback
        return json.load(answer)["items"]


def told(node):
    return [(each["reason"], each["count"]) for each in events(node)]


def dropped(writer):
    return {reason: count for reason, count in writer.health().dropped_total.items() if count}


def wait_for(writer, written, **dropped_totals):
    eventually(lambda: writer.health().written_total == written and dropped(writer) == dropped_totals)


# --- what is written ---


def test_a_breach_makes_one_event_and_its_end_another(writer, node, gate):
    writer.tell([change()])
    writer.tell([ended()])
    wait_for(writer, 2)
    begin, end = events(node, "involvedObject.name=train-0,involvedObject.namespace=team-a,involvedObject.uid=uid-of-train-0")
    assert (begin["type"], begin["reason"], begin["count"]) == ("Warning", "GPUMemoryLimitExceeded", 1)
    assert begin["message"] == "Uses 3.0 GiB of a 2.0 GiB share of GPU GPU-0 since 1970-01-01T00:00:01Z"
    assert (begin["metadata"]["namespace"], begin["source"]) == ("team-a", {"component": "fgpu-exporter", "host": "gpu-node-1"})
    assert (end["type"], end["reason"], end["count"]) == ("Normal", "GPUMemoryWithinLimit", 1)
    assert [(method, path) for _, method, path, _ in gate.writes] == [("POST", "/api/v1/namespaces/team-a/events")] * 2


def test_a_repeat_updates_the_earlier_event(writer, node, gate):
    for number in range(1, 4):
        writer.tell([change(since_seconds=float(number), used=2 + number), ended(since_seconds=float(number))])
    wait_for(writer, 6)
    assert told(node) == [("GPUMemoryLimitExceeded", 3), ("GPUMemoryWithinLimit", 3)]
    begin = events(node)[0]
    assert (begin["firstTimestamp"], begin["lastTimestamp"]) == ("1970-01-01T00:16:41Z", "1970-01-01T00:16:43Z")
    assert begin["message"].startswith("Uses 5.0 GiB of a 2.0 GiB share")
    assert [method for _, method, _, _ in gate.writes] == ["POST", "POST", "PATCH", "PATCH", "PATCH", "PATCH"]


def test_a_repeat_after_the_api_server_forgot_the_event_makes_a_new_one(writer, node, gate):
    writer.tell([change(since_seconds=1.0)])
    wait_for(writer, 1)
    gate.writes_refused.append((404, "NotFound", "events not found"))
    node._api._collections["events"].objects.clear()
    writer.tell([change(since_seconds=2.0)])
    wait_for(writer, 2)
    assert [method for _, method, _, _ in gate.writes] == ["POST", "PATCH", "POST"]
    assert told(node) == [("GPUMemoryLimitExceeded", 1)]


def test_after_a_restart_the_earlier_event_is_told_anew_and_not_counted_again(make_writer, node):
    first = make_writer()
    first.tell([change(since_seconds=1.0), ended(since_seconds=1.0), change(since_seconds=2.0)])
    wait_for(first, 3)
    first.close()
    second = make_writer()
    second.tell([change(since_seconds=50.0, used=7)])
    wait_for(second, 1)
    begin = events(node, "reason=GPUMemoryLimitExceeded")[0]
    assert (begin["count"], begin["lastTimestamp"]) == (2, "1970-01-01T00:17:30Z")
    assert begin["message"] == "Uses 7.0 GiB of a 2.0 GiB share of GPU GPU-0 since 1970-01-01T00:00:50Z"
    second.tell([ended(since_seconds=50.0), change(since_seconds=60.0)])
    wait_for(second, 3)
    assert told(node) == [("GPUMemoryLimitExceeded", 3), ("GPUMemoryWithinLimit", 1)]


def test_a_pod_that_was_left_out_of_some_reports_comes_back_with_the_breach_that_was_told(writer, gate):
    writer.tell([change(since_seconds=1.0)])
    writer.tell([change(since_seconds=1.0)])
    writer.tell([ended(since_seconds=1.0)])
    wait_for(writer, 2)
    assert len(gate.writes) == 2


@pytest.mark.skipif(not KUBECTL.exists(), reason="kubectl is not in .tools: `make kubernetes-tools`")
def test_kubectl_describes_the_pod_with_its_events(writer, node, tmp_path):
    def happened(*, begun, since_seconds):
        told = change("small", namespace="team-b", begun=begun, since_seconds=since_seconds, used=3 if begun else 1)
        return replace(told, pod=replace(told.pod, pod_uid=UIDS["small"]), time_seconds=time.time() - 100 + since_seconds)

    writer.tell([happened(begun=begun, since_seconds=since) for since in (10.0, 40.0) for begun in (True, False)])
    wait_for(writer, 4)
    done = subprocess.run(
        [KUBECTL, "--server", node.kubernetes_url, "--cache-dir", tmp_path / "cache", "-n", "team-b", "describe", "pod", "small"],
        env={"HOME": str(tmp_path), "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    begin, end = done.stdout.partition("\nEvents:\n")[2].splitlines()[2:]
    age_and_from = r"\d+s \(x2 over \d+s\)  fgpu-exporter"
    assert re.fullmatch(rf"  Warning  GPUMemoryLimitExceeded  {age_and_from}  Uses 3.0 GiB of a 2.0 GiB share of GPU GPU-0 since .*", begin)
    assert re.fullmatch(rf"  Normal   GPUMemoryWithinLimit    {age_and_from}  Is within its share of the memory of GPU GPU-0 again.*", end)


# --- what the API server says to it ---


def test_who_may_not_is_told_so_once_and_tries_again_after_ten_minutes(writer, node, gate, clock, caplog):
    caplog.set_level(logging.INFO)
    gate.writes_always_refused = NOBODY_MAY
    for number in range(20):
        writer.tell([change(f"train-{number}", namespace=f"team-{number % 2}")])
    wait_for(writer, 0, forbidden=20)
    assert len(gate.writes) == 2  # one in each namespace
    clock.skipped += FORBIDDEN_SECONDS - 5.0
    writer.tell([change("later")])
    wait_for(writer, 0, forbidden=21)
    clock.skipped += 10.0
    writer.tell([change("train-20", namespace="team-0")])
    wait_for(writer, 0, forbidden=22)
    assert len(gate.writes) == 4
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "events=forbidden" in line
    assert "create and patch on events" in line
    assert 'cannot create resource "events"' in line
    gate.writes_always_refused = None
    clock.skipped += FORBIDDEN_SECONDS + 5.0
    writer.tell([change(f"train-{number}", namespace=namespace) for number, namespace in ((30, "team-0"), (31, "team-1"), (32, "team-a"))])
    wait_for(writer, 3, forbidden=22)
    assert len(events(node)) == 3
    assert [record.getMessage() for record in caplog.records][-1] == "events=allowed namespace=team-a"


def test_the_end_of_a_breach_whose_begin_could_not_be_told_is_not_told(writer, node, gate):
    gate.writes_refused.append(INVALID)
    writer.tell([change(since_seconds=1.0), ended(since_seconds=1.0)])
    wait_for(writer, 0, refused=1, begin_untold=1)
    writer.tell([change(since_seconds=2.0), ended(since_seconds=2.0)])
    wait_for(writer, 2, refused=1, begin_untold=1)
    assert told(node) == [("GPUMemoryLimitExceeded", 1), ("GPUMemoryWithinLimit", 1)]


@pytest.mark.parametrize("answer", [NAMESPACE_ENDS, NO_NAMESPACE], ids=["ending", "gone"])
def test_a_namespace_that_is_gone_is_no_missing_permission_and_costs_its_event_only(writer, gate, answer, caplog):
    gate.writes_refused.append(answer)
    writer.tell([change("train-0"), change("train-1")])
    wait_for(writer, 1, gone=1)
    assert len(gate.writes) == 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_api_server_that_is_busy_is_asked_again_when_it_says(writer, node, gate, clock):
    gate.writes_refused.extend([UNAVAILABLE, TOO_MANY])
    writer.tell([change()])
    wait_for(writer, 1)
    assert told(node) == [("GPUMemoryLimitExceeded", 1)]
    assert 0.5 <= clock.waits[0] <= 1.0
    assert clock.waits[1] == 7.0


def test_an_api_server_that_stays_away_costs_a_bounded_number_of_attempts(writer, gate, clock, caplog):
    caplog.set_level(logging.INFO)
    gate.writes_always_refused = UNAVAILABLE
    writer.tell([change("train-0")])
    wait_for(writer, 0, unreachable=1)
    assert len(gate.writes) == ATTEMPTS
    assert sum(clock.waits) < 180
    assert max(clock.waits) <= 30.0
    gate.writes_always_refused = None
    writer.tell([change("train-1")])
    wait_for(writer, 1, unreachable=1)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["events=failing", "events=written"]


def test_an_answer_that_was_lost_makes_no_second_event(writer, node, gate):
    writer.tell([change()])
    wait_for(writer, 1)
    writer._counts.pop(next(iter(writer._counts._values)))  # as if the first answer had never come
    gate.writes.clear()
    writer.tell([change(since_seconds=2.0)])
    wait_for(writer, 2)
    assert [method for _, method, _, _ in gate.writes] == ["POST", "PATCH"]
    assert told(node) == [("GPUMemoryLimitExceeded", 1)]


def test_a_token_that_was_rotated_is_read_anew(make_writer, node, gate, tmp_path):
    token = tmp_path / "token"
    token.write_text("first")
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", gate.url, tokenFile=str(token))
    writer = make_writer(api=lambda: find_api_server(kubeconfig=kubeconfig))
    gate.token = "first"  # noqa: S105 - of a test
    writer.tell([change()])
    wait_for(writer, 1)
    gate.token = "second"  # noqa: S105 - of a test
    token.write_text("second")
    writer.tell([ended()])
    wait_for(writer, 2)
    assert [method for _, method, _, _ in gate.writes] == ["POST"] * 3
    assert told(node) == [("GPUMemoryLimitExceeded", 1), ("GPUMemoryWithinLimit", 1)]


# --- how much, how fast ---


def test_a_storm_holds_nobody_up_and_is_told_at_a_bounded_rate(make_writer, gate, node):
    gate.delay_seconds = 0.02
    writer = make_writer(clock=SystemClock())
    started = time.monotonic()
    writer.tell([change(f"train-{number}") for number in range(200)])
    assert time.monotonic() - started < 0.25
    time.sleep(1.0)
    writer.close()
    assert 3 <= len(gate.writes) <= 11
    gaps = [later[0] - earlier[0] for earlier, later in zip(gate.writes, gate.writes[1:], strict=False)]
    assert min(gaps) > PAUSE_SECONDS


def test_all_of_a_storm_is_told_in_the_end(writer, node, gate, clock):
    writer.tell([change(f"train-{number}") for number in range(200)])
    wait_for(writer, 200)
    assert len(events(node)) == 200
    assert clock.waits == [PAUSE_SECONDS] * 200


def test_more_than_the_queue_holds_is_counted_and_the_newest_are_told(writer, node, gate):
    gate.writes_hang = True
    writer.tell([change("first")])
    eventually(lambda: gate.writes)
    writer.tell([change(f"train-{number}") for number in range(MOST_QUEUED + 30)])
    assert dropped(writer) == {"queue_full": 30}


def test_a_pod_that_comes_and_goes_is_told_of_no_more_than_its_share_and_the_rest_is_counted(writer, node):
    for number in range(100):
        writer.tell([change(since_seconds=float(number), monotonic_seconds=float(number))])
        writer.tell([ended(since_seconds=float(number), monotonic_seconds=float(number))])
    wait_for(writer, 24, rate_limited=88, begin_untold=88)
    assert told(node) == [("GPUMemoryLimitExceeded", 12), ("GPUMemoryWithinLimit", 12)]


def test_nothing_is_asked_and_no_thread_runs_before_the_first_breach(writer, gate):
    writer.tell([])
    time.sleep(0.1)
    assert gate.requests == gate.writes == []
    assert writer._thread is None


def test_it_ends_at_once_while_the_api_server_hangs(make_writer, gate):
    gate.writes_hang = True
    writer = make_writer(clock=SystemClock())
    writer.tell([change()])
    eventually(lambda: gate.writes)
    started = time.monotonic()
    writer.close()
    assert time.monotonic() - started < 0.5


# --- the whole program ---


@pytest.fixture
def watch(start, gate, tmp_path):
    """Start the daemon behind the gate."""
    kubeconfig = write_kubeconfig(tmp_path / "gated", gate.url)
    return lambda *flags: start("--kubeconfig", str(kubeconfig), *flags)


def use(stand_in, workload, gib):
    stand_in.write(device(Process(pid=workload.pid, memory=gib * GIB)))


def test_an_owner_reads_of_a_breach_when_it_begins_and_when_it_ends(watch, node, stand_in, workloads):
    small = workloads("small")
    use(stand_in, small, 3)
    daemon = watch("--kubernetes-events")
    daemon.wait_for(1.0, "fgpu_events_written_total")
    use(stand_in, small, 1)
    daemon.wait_for(2.0, "fgpu_events_written_total")
    begin, end = events(node, f"involvedObject.name=small,involvedObject.uid={UIDS['small']}")
    assert (begin["reason"], begin["metadata"]["namespace"]) == ("GPUMemoryLimitExceeded", "team-b")
    since = begin["message"].removeprefix(f"Uses 3.0 GiB of a 2.0 GiB share of GPU {GPU} since ")
    assert end["message"] == f"Is within its share of the memory of GPU {GPU} again (1.0 of 2.0 GiB), which it had exceeded since {since}"
    use(stand_in, small, 4)
    daemon.wait_for(3.0, "fgpu_events_written_total")
    assert told(node) == [("GPUMemoryLimitExceeded", 2), ("GPUMemoryWithinLimit", 1)]
    assert sum(daemon.value("fgpu_events_dropped_total")) == 0.0


def test_without_the_flag_nothing_is_ever_written(watch, node, gate, stand_in, workloads):
    use(stand_in, workloads("small"), 3)
    daemon = watch()
    daemon.wait_for(1.0, "fgpu_pod_limit_exceeded", pod="small", resource="memory")
    time.sleep(1.0)
    assert gate.writes == []
    assert not [name for name, _ in daemon.metrics() if name.startswith("fgpu_events")]


def test_what_writes_events_is_not_even_loaded_without_the_flag():
    program = "import sys, exporter.__main__; sys.exit('exporter.event_writer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_api_server_that_hangs_holds_up_neither_samples_nor_the_end(watch, gate, stand_in, workloads):
    gate.writes_hang = True
    use(stand_in, workloads("small"), 3)
    daemon = watch("--kubernetes-events")
    daemon.wait_for(1.0, "fgpu_pod_limit_exceeded", pod="small", resource="memory")
    eventually(lambda: gate.writes)
    samples = daemon.value("fgpu_samples_total")
    time.sleep(2.0)
    assert daemon.value("fgpu_samples_total") >= samples + 3
    assert daemon.stop() < 2.0
    assert daemon.process.returncode == 0


def test_a_missing_permission_is_one_line_and_one_request(watch, gate, stand_in, workloads):
    gate.writes_always_refused = NOBODY_MAY
    small = workloads("small")
    use(stand_in, small, 3)
    daemon = watch("--kubernetes-events", "--breach-hold-seconds", "0")
    daemon.wait_for(1.0, "fgpu_events_dropped_total", reason="forbidden")
    use(stand_in, small, 1)
    daemon.wait_for(1.0, "fgpu_events_dropped_total", reason="begin_untold")
    use(stand_in, small, 3)
    daemon.wait_for(2.0, "fgpu_events_dropped_total", reason="forbidden")
    assert daemon.value("fgpu_source_up", source="kubernetes") == 1.0
    daemon.stop()
    assert len(gate.writes) == 1
    assert len([line for line in daemon.log if "events=forbidden" in line]) == 1


UNALLOCATED = {
    "node": {"name": "gpu-node-1"},
    "gpus": [{"uuid": GPU}],
    "pods": [
        {
            "metadata": {"namespace": "research", "name": "scratch", "uid": UIDS["half"]},
            "spec": {"nodeName": "gpu-node-1", "containers": [{"name": "main"}]},
            "status": {
                "phase": "Running",
                "containerStatuses": [{"name": "main", "containerID": f"containerd://{'a' * 64}", "state": {"running": {}}}],
            },
        }
    ],
    "pod_resources": [{"namespace": "research", "name": "scratch", "containers": [{"name": "main"}]}],
    "processes": [{"pid": 4242, "container": "research/scratch/main", "gpus": [{"gpu": GPU, "memory": "3Gi"}]}],
}


@pytest.fixture
def simulate(tmp_path):
    """Answer a simulated node with a breach, and a sampler of it."""
    with ExitStack() as stack:

        def simulate_one(*flags):
            file = tmp_path / "unallocated.yaml"
            file.write_text(yaml.safe_dump(UNALLOCATED))
            config = parse_config(["--scenario", str(file), "--breach-hold-seconds", "0", *flags], {})
            node = stack.enter_context(SimulatedNode(load_scenario(file), SystemClock()))
            return node, simulated.wire(config, node, SystemClock(), stack)

        yield simulate_one


def test_the_simulated_node_takes_events(simulate):
    node, sampler = simulate("--kubernetes-events")
    eventually(lambda: sampler.sample() and events(node))
    (event,) = events(node, f"involvedObject.uid={UIDS['half']}")
    assert (event["reason"], event["source"]["host"]) == ("GPUNotAllocated", "gpu-node-1")
    assert event["message"].startswith(f"Uses 3.0 GiB of GPU {GPU}, which it was not given, since ")
    assert sampler.sample().health.events.written_total == 1


class BrokenTeller:
    """Fails as nobody foresaw."""

    def tell(self, _changes):
        raise ZeroDivisionError("surprise")

    def health(self):
        return EventsHealth()


def test_what_goes_wrong_in_telling_costs_no_sample(simulate, caplog):
    _, sampler = simulate()
    sampler._teller = BrokenTeller()
    eventually(lambda: [row for row in sampler.sample().report.pods if row.breaches[Resource.UNALLOCATED].exceeded])
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "source=events state=down reason='unexpected ZeroDivisionError: surprise'"
    ]


def test_once_tells_nobody(tmp_path):
    config = parse_config(["--demo", "--once", "--at", "140s", "--kubernetes-events"], {})
    with ExitStack() as stack:
        clock = SystemClock()
        node = stack.enter_context(SimulatedNode(load_scenario(simulated.DEMO), clock))
        sampler = simulated.wire(config, node, clock, stack)
        assert sampler.sample().health.events is None


def test_events_need_the_api_server():
    with pytest.raises(ConfigError, match="--kubernetes-events and --pod-source kubelet"):
        parse_config(["--node-name", "n", "--kubernetes-events", "--pod-source", "kubelet"], {})
