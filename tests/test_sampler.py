"""The loop: what a failing source costs, when it is tried again, what is remembered and for how long."""

import itertools
import threading
from dataclasses import replace

import pytest

from exporter.endpoints import build_routes
from exporter.node_json import About
from exporter.report import Rules
from exporter.sampler import Sampler, Sources
from exporter.server import Request
from exporter.snapshot import (
    Container,
    HostfilesReading,
    KubeletReading,
    KubernetesReading,
    NodeFacts,
    NvmlReading,
    Pod,
    PodAllocation,
    PodPhase,
    ProcessFacts,
    ProcfsReading,
)
from exporter.sources import FatalSourceError, SourceError
from exporter.text_format import Format


class ManualClock:
    """Time that a test moves."""

    def __init__(self):
        self.now = 0.0

    def time(self):
        return 1000.0 + self.now

    def monotonic(self):
        return self.now

    def wait(self, event, timeout_seconds):
        self.now += timeout_seconds
        return event.is_set()


class NodeError(SourceError):
    """The Node object cannot be read, and the pods can."""


class Source:
    """A source of the outside: it answers, or raises what it is told to."""

    def __init__(self, answer):
        self.answer = answer
        self.error = None
        self.reads = 0
        self.releases = 0
        self.can_be_released = True

    def read(self, *_arguments):
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.answer

    def release(self):
        self.releases += 1
        return self.can_be_released

    def last_reading(self):
        return self.answer

    def pods_are_current(self):
        return self.error is None or isinstance(self.error, NodeError)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def node():
    pod = Pod(uid="uid", namespace="team-a", name="half")
    return Sources(
        nvml=Source(NvmlReading(driver_version="1", gpus=())),
        procfs=Source(ProcfsReading(own_pid=1, processes={})),
        kubelet=Source(KubeletReading(pods=(PodAllocation("team-a", "half"),), allocatable=())),
        kubernetes=Source(KubernetesReading(pods={"uid": pod}, node=NodeFacts(name="n"))),
    )


def sampler_of(sources, clock, *, config_facts=None, kind=Sampler):
    return kind(
        sources=sources,
        clock=clock,
        rules=Rules(),
        sample_interval_seconds=5.0,
        identity_ttl_seconds=600.0,
        config_facts=config_facts or {},
    )


@pytest.fixture
def sampler(node, clock):
    return sampler_of(node, clock)


def health(sampler):
    return {source.source: source for source in sampler.exposition.health.sources}


def tick(sampler, clock, times=1):
    for _ in range(times):
        clock.now += 5.0
        sampler.sample()


def test_a_source_that_fails_costs_itself_and_says_so(sampler, node):
    node.kubelet.error = SourceError("no socket at /x: mount its folder")
    sampler.sample()
    assert {name: source.up for name, source in health(sampler).items()} == {
        "nvml": True,
        "procfs": True,
        "kubelet": False,
        "kubernetes": True,
    }
    assert health(sampler)["kubelet"].reason == "no socket at /x: mount its folder"
    assert health(sampler)["kubelet"].errors_total == 1
    assert sampler.exposition.report is not None


def test_an_error_that_no_one_foresaw_costs_its_source_only(sampler, node):
    node.procfs.error = ZeroDivisionError("surprise")
    sampler.sample()
    assert health(sampler)["procfs"].reason == "unexpected ZeroDivisionError: surprise"
    assert health(sampler)["nvml"].up


def test_a_failing_source_is_tried_again_ever_later_and_at_most_30_seconds_later(sampler, node, clock):
    node.nvml.error = SourceError("no driver")
    attempts = []
    for _ in range(40):
        before = node.nvml.reads
        sampler.sample()
        if node.nvml.reads > before:
            attempts.append(clock.now)
        clock.now += 5.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert gaps[:4] == [5.0, 10.0, 20.0, 30.0]
    assert max(gaps) == 30.0


def test_a_source_that_is_back_is_up_at_once_and_backs_off_anew(sampler, node, clock):
    node.nvml.error = SourceError("no driver")
    tick(sampler, clock, 3)
    node.nvml.error = None
    tick(sampler, clock, 6)
    assert health(sampler)["nvml"].up
    assert health(sampler)["nvml"].last_success_timestamp_seconds == 1000.0 + clock.now


def test_allocations_are_remembered_for_the_ttl_and_then_forgotten(sampler, node, clock):
    sampler.sample()
    node.kubelet.error = SourceError("no socket")
    tick(sampler, clock, 120)
    assert sampler._memory.listed_by_kubelet == {("team-a", "half")}
    snapshot = sampler._read()
    assert snapshot.kubelet is node.kubelet.answer
    assert not snapshot.kubelet_is_current
    tick(sampler, clock)
    assert sampler._read().kubelet is None


def test_pods_are_remembered_for_the_ttl_and_then_forgotten(sampler, node, clock):
    sampler.sample()
    node.kubernetes.error = SourceError("no answer")
    tick(sampler, clock, 120)
    assert sampler._read().kubernetes is node.kubernetes.answer
    tick(sampler, clock)
    assert sampler._read().kubernetes is None


def test_a_node_object_that_cannot_be_read_does_not_cost_the_pods(sampler, node, clock):
    node.kubernetes.error = NodeError("nodes: forbidden")
    tick(sampler, clock, 200)
    assert sampler._read().kubernetes is node.kubernetes.answer
    assert not health(sampler)["kubernetes"].up


def test_a_measurement_is_never_remembered(sampler, node, clock):
    sampler.sample()
    node.nvml.error = SourceError("no driver")
    tick(sampler, clock)
    assert sampler._read().nvml is None


def say_mig_state(node, state):
    facts = NodeFacts(name="n", labels={"nvidia.com/mig.config.state": state})
    node.kubernetes.answer = KubernetesReading(pods=node.kubernetes.answer.pods, node=facts)


def test_the_driver_is_let_go_of_while_a_mig_configuration_is_pending_and_taken_at_once_after_it(sampler, node, clock):
    sampler.sample()
    say_mig_state(node, "pending")
    tick(sampler, clock, 20)
    assert (node.nvml.reads, node.nvml.releases) == (1, 20)
    assert not health(sampler)["nvml"].up
    assert health(sampler)["nvml"].errors_total == 0
    assert health(sampler)["nvml"].reason == "left alone while the node's label nvidia.com/mig.config.state says pending"
    assert sampler.exposition.report is not None
    say_mig_state(node, "success")
    tick(sampler, clock)
    assert (node.nvml.reads, node.nvml.releases) == (2, 20)
    assert health(sampler)["nvml"].up


def test_a_driver_that_cannot_be_let_go_of_is_said(sampler, node):
    say_mig_state(node, "pending")
    node.nvml.can_be_released = False
    sampler.sample()
    assert health(sampler)["nvml"].reason == (
        "to be left alone while the node's label nvidia.com/mig.config.state says pending, but a call does not return"
    )


def test_an_error_while_the_driver_is_let_go_of_costs_the_driver_only(sampler, node, clock):
    def release():
        raise RuntimeError("can't start new thread")

    say_mig_state(node, "pending")
    node.nvml.release = release
    tick(sampler, clock)
    assert health(sampler)["nvml"].reason == "unexpected RuntimeError: can't start new thread"
    assert health(sampler)["kubelet"].up


@pytest.mark.parametrize("state", ["success", "failed", "rebooting", ""])
def test_no_other_mig_state_costs_the_driver(sampler, node, state):
    say_mig_state(node, state)
    sampler.sample()
    assert (node.nvml.reads, node.nvml.releases) == (1, 0)


def test_a_pending_mig_configuration_that_nobody_confirms_is_not_believed_for_ever(sampler, node, clock):
    sampler.sample()
    say_mig_state(node, "pending")
    tick(sampler, clock)
    node.kubernetes.error = SourceError("no answer")
    tick(sampler, clock, 120)
    assert node.nvml.reads == 1
    tick(sampler, clock)
    assert node.nvml.reads == 2


def test_a_fatal_error_ends_the_loop(sampler, node):
    node.nvml.error = FatalSourceError("library and driver do not fit")
    with pytest.raises(FatalSourceError):
        sampler.run(threading.Event())


def test_it_was_whole_once_every_source_was_up(sampler, node, clock):
    node.kubernetes.error = SourceError("not yet")
    sampler.sample()
    assert not sampler.was_whole
    node.kubernetes.error = None
    tick(sampler, clock)
    assert sampler.was_whole
    node.kubernetes.error = SourceError("gone")
    tick(sampler, clock)
    assert sampler.was_whole


def test_a_report_is_stale_after_three_intervals(sampler, clock):
    assert sampler.is_stale()
    sampler.sample()
    clock.now += 15.0
    assert not sampler.is_stale()
    clock.now += 0.1
    assert sampler.is_stale()
    assert sampler.is_late()


def test_a_report_that_comes_while_one_asks_is_answered_in_place_of_the_stale_one(node, clock):
    class SamplesMeanwhile(Sampler):
        def is_stale(self):
            self.sample()
            return super().is_stale()

    sampler = sampler_of(node, clock, kind=SamplesMeanwhile)
    sampler.sample()
    clock.now += 100.0
    about = About(node="n", simulated=False, sample_interval_seconds=5.0, utilization_window_seconds=15.0, compute_window_seconds=60.0)
    routes = build_routes(sampler, about)
    assert b"fgpu_last_sample_timestamp_seconds 1100.0\n" in routes["/metrics"](Request("/metrics")).body
    clock.now += 100.0
    assert b'"last_sample_timestamp_seconds":1200.0,"last_sample_age_seconds":0,' in routes["/api/v1/node"](Request("/api/v1/node")).body


def test_a_young_sampler_is_not_late(sampler, clock):
    assert not sampler.is_late()
    clock.now += 15.1
    assert sampler.is_late()


def test_a_late_sample_shifts_the_beat_and_is_not_made_up_for(node, clock):
    times = []

    class Slow(Source):
        def read(self):
            times.append(clock.now)
            clock.now += 12.0 if len(times) == 2 else 0.0
            if len(times) == 5:
                stop.set()
            return self.answer

    stop = threading.Event()
    sources = Sources(nvml=Slow(node.nvml.answer), procfs=node.procfs, kubelet=node.kubelet, kubernetes=node.kubernetes)
    sampler_of(sources, clock).run(stop)
    assert times == [0.0, 5.0, 17.0, 22.0, 27.0]


def test_until_every_source_has_answered_the_start_samples_often_but_not_for_long(node, clock):
    times = []

    class Counted(Source):
        def read(self):
            times.append(clock.now)
            node.kubernetes.error = None if len(times) > after else SourceError("not read yet")
            if len(times) > after + 3:
                stop.set()
            return self.answer

    def run():
        sources = Sources(nvml=Counted(node.nvml.answer), procfs=node.procfs, kubelet=node.kubelet, kubernetes=node.kubernetes)
        times.clear()
        clock.now = 0.0
        sampler_of(sources, clock).run(stop)

    after, stop = 2, threading.Event()
    run()
    assert times == [0.0, 0.25, 0.5, 5.5, 10.5, 15.5]
    after, stop = 30, threading.Event()
    run()
    assert times[:3] == [0.0, 0.25, 0.5]
    assert [time for time in times if time >= 5.0][:3] == [5.0, 10.0, 15.0]


def test_what_a_scrape_asked_for_is_rendered_before_the_next_report_is_published(sampler, clock):
    tick(sampler, clock)
    assert not sampler.exposition.demand()
    sampler.exposition.render(Format.OPENMETRICS, compressed=True)
    tick(sampler, clock, 26)
    assert list(sampler.exposition.demand()) == [(Format.OPENMETRICS, True)]
    prepared = sampler.exposition._rendered[Format.OPENMETRICS, True]
    assert sampler.exposition.render(Format.OPENMETRICS, compressed=True) is prepared
    tick(sampler, clock, 27)
    assert not sampler.exposition.demand()
    assert not sampler.exposition._rendered


@pytest.mark.parametrize(
    ("scrape_after", "prepared_after"),
    [
        ([1], [1]),
        ([3], [3]),
        ([3, 3, 2, 3], [2, 3]),  # a scrape that comes about when a sample does
        ([1, 2], [1, 2]),  # two servers that scrape every third sample
        ([12], [11, 12]),
    ],
)
def test_only_the_reports_are_rendered_beforehand_that_a_scrape_is_expected_of(sampler, clock, scrape_after, prepared_after):
    tick(sampler, clock)
    prepared = set()
    for scrape in range(13):
        samples = scrape_after[scrape % len(scrape_after)]
        sampler.exposition.render(Format.TEXT, compressed=True)
        for sample in range(1, samples + 1):
            tick(sampler, clock)
            if sampler.exposition._rendered and scrape > 4:
                prepared.add(sample)
        assert scrape < 4 or (Format.TEXT, True) in sampler.exposition._rendered
    assert prepared == set(prepared_after)


class Facts(dict):
    """Facts of the configuration, which each rendering reads, and what happens meanwhile."""

    meanwhile = staticmethod(lambda: None)

    def values(self):
        self.meanwhile()
        return super().values()


def test_a_scrape_that_comes_while_the_next_report_is_rendered_is_not_forgotten(node, clock):
    facts = Facts(flag="value")
    sampler = sampler_of(node, clock, config_facts=facts)
    before = sampler.sample()
    before.render(Format.TEXT, compressed=False)

    def scrape():
        facts.meanwhile = lambda: None
        before.render(Format.OPENMETRICS, compressed=True)

    facts.meanwhile = scrape
    tick(sampler, clock)
    assert set(sampler.exposition.demand()) == {(Format.TEXT, False), (Format.OPENMETRICS, True)}


def test_host_files_are_read_of_the_pods_and_processes_that_are_known_and_are_a_source_like_any_other(node, clock):
    asked = []

    class Files(Source):
        def read(self, containers, pids):
            asked.append((list(containers), list(pids)))
            return super().read()

    containers = (Container(name="main"), Container(name="log"))
    pods = {
        "u1": Pod(uid="u1", namespace="a", name="b", containers=containers),
        "u2": Pod(uid="u2", namespace="a", name="done", containers=containers, phase=PodPhase.SUCCEEDED),
    }
    node.kubernetes.answer = KubernetesReading(pods=pods, node=None)
    node.procfs.answer = ProcfsReading(own_pid=1, processes={41: ProcessFacts(pid=41, start_time_ticks=1, comm="x", cgroup=())})
    files = Files(HostfilesReading())
    sampler = sampler_of(replace(node, hostfiles=files), clock)
    sampler.sample()
    assert health(sampler)["hostfiles"].up
    node.procfs.error = SourceError("not in the host's PID namespace")
    files.error = SourceError("no folder")
    tick(sampler, clock)
    assert (health(sampler)["hostfiles"].up, health(sampler)["hostfiles"].reason) == (False, "no folder")
    assert asked == [([("u1", "main"), ("u1", "log")], [41]), ([("u1", "main"), ("u1", "log")], [])]


def test_nothing_is_said_of_host_files_that_are_not_to_be_read(sampler):
    sampler.sample()
    assert "hostfiles" not in health(sampler)


def test_what_was_published_never_changes(sampler, clock):
    first = sampler.sample()
    before = (first.report, first.health)
    tick(sampler, clock, 3)
    assert (first.report, first.health) == before
    assert sampler.exposition is not first


def test_what_cannot_be_rendered_costs_the_scrape_and_not_the_samples(node, clock):
    sampler = sampler_of(node, clock, config_facts={"a_flag": 5})
    with pytest.raises(AttributeError):
        sampler.sample().render(Format.TEXT, compressed=False)
    tick(sampler, clock, 2)
    assert sampler.exposition.report.monotonic_seconds == 10.0


def test_a_report_that_cannot_be_built_leaves_the_last_one_and_the_health_goes_on(sampler, node, clock):
    sampler.sample()
    last = sampler.exposition.report
    node.nvml.answer = "not a reading"
    tick(sampler, clock)
    assert sampler.exposition.report is last
    assert sampler.exposition.health.samples_total == 2
    tick(sampler, clock, 3)
    assert sampler.is_stale()
