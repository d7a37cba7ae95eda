"""The loop: what a failing source costs, when it is tried again, what is remembered and for how long."""

import itertools
import threading

import pytest

from exporter.report import Rules
from exporter.sampler import Sampler, Sources
from exporter.snapshot import KubeletReading, KubernetesReading, NodeFacts, NvmlReading, Pod, PodAllocation, ProcfsReading
from exporter.sources import FatalSourceError, SourceError


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

    def read(self, *_arguments):
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.answer

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


@pytest.fixture
def sampler(node, clock):
    return Sampler(sources=node, clock=clock, rules=Rules(), sample_interval_seconds=5.0, identity_ttl_seconds=600.0, config_facts={})


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
    Sampler(sources=sources, clock=clock, rules=Rules(), sample_interval_seconds=5.0, identity_ttl_seconds=600.0, config_facts={}).run(stop)
    assert times == [0.0, 5.0, 17.0, 22.0, 27.0]


def test_what_was_published_never_changes(sampler, clock):
    first = sampler.sample()
    before = (first.report, first.health)
    tick(sampler, clock, 3)
    assert (first.report, first.health) == before
    assert sampler.exposition is not first
