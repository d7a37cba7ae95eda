import threading
import time
from random import Random

import pytest

from exporter.clock import SystemClock
from exporter.simulation import DEMO, SimulatedClock, SimulatedNode, load_scenario
from exporter.simulation.clock import START_SECONDS
from exporter.sources import SourceError
from exporter.sources.kubernetes import KubernetesSource
from exporter.sources.kubernetes_config import find_api_server


def waits(clock, event, seconds):
    """Answer a thread that waits on the clock, as soon as it does, and the answers that it got."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(clock.wait(event, seconds)))
    thread.start()
    while not clock.is_waiting(thread):
        time.sleep(0.001)
    return thread, answers


def test_the_clock_starts_with_2026_and_stands_still():
    clock = SimulatedClock()
    assert (clock.time(), clock.monotonic()) == (1767225600.0, 0.0)
    clock.advance_to(12.5)
    clock.advance_to(3)
    assert (clock.time(), clock.monotonic()) == (START_SECONDS + 12.5, 12.5)


def test_a_wait_lasts_until_its_time_has_come():
    clock = SimulatedClock()
    thread, answers = waits(clock, threading.Event(), 10)
    assert clock.next_deadline() == 10
    clock.advance_to(9.9)
    assert clock.is_waiting(thread)
    clock.advance_to(10)
    assert not clock.is_waiting(thread)
    thread.join(5)
    assert answers == [False]
    assert clock.next_deadline() is None


def test_a_wait_ends_when_its_event_is_set():
    clock, event = SimulatedClock(), threading.Event()
    thread, answers = waits(clock, event, 10)
    event.set()
    thread.join(5)
    assert answers == [True]
    assert clock.monotonic() == 0


class Follower:
    """The exporter's watch of a simulated node's pods."""

    def __init__(self, node, clock):
        self.source = KubernetesSource(
            api=lambda: find_api_server(host=node.kubernetes_url),
            node_name=node.name,
            clock=clock,
            jitter=Random(0),  # noqa: S311 - the same run each time
            dra=True,
        )
        self.source.start()
        node.add_client(self.source)
        node.settle()

    def pods(self):
        try:
            return sorted(pod.name for pod in self.source.read().pods.values())
        except SourceError:
            return None


@pytest.fixture
def follow(start):
    """Answer a function from a scenario to its node and a watch of its pods."""
    followers = []

    def follow_text(text):
        clock = SimulatedClock()
        node = start(text, clock)
        followers.append(Follower(node, clock))
        return node, followers[-1]

    yield follow_text
    for follower in followers:
        follower.source.close()


STORY = """
    node: {name: n}
    pods: [{metadata: {name: a}, spec: {nodeName: n}}]
    timeline:
      - {at: 5s, pods: [{metadata: {name: b}, spec: {nodeName: n}}]}
      - {at: 12s, sources: {kubernetes: down}}
      - {at: 14s, remove: {pods: [default/a]}}
      - {at: 40s, sources: {kubernetes: up}}
      - {at: 100s, sources: {kubernetes: gone}, pods: [{metadata: {name: c}, spec: {nodeName: n}}]}
      - {at: 112s, sources: {kubernetes: unauthorized}}
      - {at: 121s, sources: {kubernetes: up}}
      - {at: 200s, sources: {kubernetes: hang}, remove: {pods: [default/b]}}
      - {at: 300s, sources: {kubernetes: up}}
"""


def play(follow, text, until):
    node, follower = follow(text)
    seen = []
    for seconds in range(0, until + 1, 5):
        node.advance_to(seconds)
        seen.append((seconds, follower.pods()))
    return seen


def test_a_watch_has_caught_up_at_every_moment(follow):
    seen = dict(play(follow, STORY, 110))
    assert (seen[0], seen[5], seen[10], seen[15]) == (["a"], ["a", "b"], ["a", "b"], None)
    assert seen[75] == ["b"]
    assert seen[105] == ["b", "c"]


def test_the_same_scenario_is_seen_in_the_same_way_every_time(follow):
    first = play(follow, STORY, 400)
    assert first == play(follow, STORY, 400)
    assert (first[-1], dict(first)[285]) == ((400, ["c"]), None)


def test_twelve_minutes_pass_in_a_moment(follow):
    began = time.process_time()
    play(follow, STORY, 700)
    assert time.process_time() - began < 3


def test_a_step_at_the_very_moment_has_acted(start):
    node = start("""
        node: {name: n}
        timeline: [{at: 10s, processes: [{pid: 7}]}, {at: 0s, processes: [{pid: 8}]}]
    """)
    assert (node.proc_root / "8").exists()
    node.advance_to(9.999)
    assert not (node.proc_root / "7").exists()
    node.advance_to(10)
    assert (node.proc_root / "7").exists()


def test_a_scenario_that_repeats_starts_anew_when_its_last_step_is_over(load):
    scenario = load("""
        node: {name: n}
        gpus: [{uuid: G}]
        processes: [{pid: 7, gpus: [{gpu: G, sm: 10}]}]
        timeline: [{at: 10s, remove: {processes: [7]}, processes: [{pid: 8}]}, {at: 20s}]
    """)
    with SimulatedNode(scenario, SimulatedClock(), repeat=True) as node:
        node.nvml.nvmlInit()
        for seconds, there in [(0, "7"), (10, "8"), (20, "7"), (30, "8"), (215, "8"), (220, "7")]:
            node.advance_to(seconds)
            assert [pid for pid in "78" if (node.proc_root / pid).exists()] == [there]
        node.advance_to(229)
        stamps = [sample.timeStamp for sample in node.nvml.nvmlDeviceGetProcessUtilization(node.nvml.nvmlDeviceGetHandleByIndex(0), 0)]
        assert (len(stamps), max(stamps)) == (54, round((START_SECONDS + 229) * 1e6))


def test_a_node_plays_in_real_time_until_it_is_stopped(start):
    node = start("{node: {name: n}, timeline: [{at: 0.3s, processes: [{pid: 7}]}]}", SystemClock())
    stop = threading.Event()
    player = threading.Thread(target=node.play, args=(stop,))
    player.start()
    give_up_at = time.monotonic() + 10
    while not (node.proc_root / "7").exists() and time.monotonic() < give_up_at:
        time.sleep(0.01)
    stop.set()
    player.join(5)
    assert (node.proc_root / "7").exists()
    assert not player.is_alive()


def test_the_demo_plays_and_its_reservation_pods_have_the_names_that_kai_gives_them(follow):
    node, follower = follow(DEMO.read_text())
    seen = set()
    for seconds in range(0, 301, 15):
        node.advance_to(seconds)
        seen |= set(follower.pods())
    assert {"gpu-reservation-76e521650d1ce2e7", "gpu-reservation-4fc9ae57c1889f5d", "whisper-batch-kx8zl", "scratch"} <= seen
    assert "whisper-batch-kx8zl" not in follower.pods()


def test_every_gpu_group_of_the_demo_has_its_reservation_pod():
    (start, *_) = load_scenario(DEMO).steps
    pods = [entry.said for entry in start.pods]
    reservations = {
        pod["metadata"]["labels"]["runai-gpu-group"]: pod["metadata"]["annotations"]["run.ai/reserve_for_gpu_index"]
        for pod in pods
        if pod["metadata"]["namespace"] == "kai-resource-reservation"
    }
    groups = {pod["metadata"].get("labels", {}).get("runai-gpu-group") for pod in pods} - {None}
    assert groups == reservations.keys()
    assert set(reservations.values()) < {entry.key for entry in start.gpus}
