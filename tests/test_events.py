"""What a pod's owner is told of breaches, and how often."""

import re

import kubernetes_validate
import pytest

from exporter.breach import Breach, State, Verdict
from exporter.events import BURST, Dropped, Recent, SpamFilter, build_event, encode_event, encode_repeat
from exporter.journal import BreachChange, breach_changes
from exporter.judge import Resource
from exporter.limits import NO_CONTAINER_LIMITS, ContainerLimits, PodLimits
from exporter.report import ContainerReport, PodReport, Report

GIB = 1 << 30
GPU = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
SINCE = 1796098205.0  # 2026-12-01T04:10:05Z
NOW = 1796098220.0
ABOVE = Breach(state=State.EXCEEDED, verdict=Verdict.ABOVE, since_seconds=SINCE, breaches_total=1)
BELOW = Breach(state=State.WITHIN, verdict=Verdict.BELOW, breaches_total=1)
NO_LIMIT = Breach(state=State.WITHIN, verdict=Verdict.NO_LIMIT, breaches_total=1)


def container(name="main", breaches=None, limits=NO_CONTAINER_LIMITS, **more):
    values = {
        "namespace": "team-a",
        "pod": "train-0",
        "container": name,
        "gpu_uuid": GPU,
        "pod_uid": "uid",
        "container_id": "a" * 64,
        "memory_used_bytes": None,
        "memory_used_peak_bytes": None,
        "processes": 1,
        "limits": limits,
        "sm_utilization_ratio": None,
        "sm_utilization_mean_ratio": None,
        "busy_total": None,
        "breaches": breaches or {},
    }
    return ContainerReport(**(values | more))


def pod(**more):
    values = {
        "namespace": "team-a",
        "pod": "train-0",
        "gpu_uuid": GPU,
        "pod_uid": "uid",
        "memory_used_bytes": None,
        "limits": PodLimits(),
        "sm_utilization_ratio": None,
        "sm_utilization_mean_ratio": None,
        "sm_busy_seconds_total": None,
        "breaches": {},
    }
    return PodReport(**(values | more))


def change(resource=Resource.MEMORY, breach=ABOVE, *, containers=(), monotonic_seconds=0.0, since_seconds=SINCE, **of_pod):
    return BreachChange(
        time_seconds=NOW,
        monotonic_seconds=monotonic_seconds,
        pod=pod(breaches={resource: breach}, **of_pod),
        containers=containers,
        resource=resource,
        begun=breach.is_on,
        since_seconds=since_seconds,
    )


def memory(used, limit, **more):
    return change(memory_used_bytes=int(used * GIB), limits=PodLimits(memory_bytes=int(limit * GIB)), **more)


def compute(mean, limit, **more):
    return change(Resource.COMPUTE, sm_utilization_mean_ratio=mean, limits=PodLimits(compute_ratio=limit), **more)


def said(told):
    event = build_event(told)
    return event.type, event.reason, event.message


# --- words ---


@pytest.mark.parametrize(
    ("told", "reason", "message"),
    [
        (memory(45.2, 40), "GPUMemoryLimitExceeded", f"Uses 45.2 GiB of a 40.0 GiB share of GPU {GPU} since 2026-12-01T04:10:05Z"),
        (
            memory(40.03, 40),
            "GPUMemoryLimitExceeded",
            f"Uses 40.03 GiB of a 40.00 GiB share of GPU {GPU} since 2026-12-01T04:10:05Z",
        ),
        (
            compute(0.62, 0.5),
            "GPUComputeLimitExceeded",
            f"Keeps GPU {GPU} busy 62% of the time, of a 50% share, since 2026-12-01T04:10:05Z",
        ),
        (
            compute(0.504, 0.5),
            "GPUComputeLimitExceeded",
            f"Keeps GPU {GPU} busy 50.4% of the time, of a 50.0% share, since 2026-12-01T04:10:05Z",
        ),
        (
            change(Resource.UNALLOCATED, memory_used_bytes=3 * GIB),
            "GPUNotAllocated",
            f"Uses 3.0 GiB of GPU {GPU}, which it was not given, since 2026-12-01T04:10:05Z",
        ),
        (
            change(Resource.UNALLOCATED, memory_used_bytes=10 << 20),
            "GPUNotAllocated",
            f"Uses 0.01 GiB of GPU {GPU}, which it was not given, since 2026-12-01T04:10:05Z",
        ),
        (
            change(Resource.UNALLOCATED),
            "GPUNotAllocated",
            f"Uses GPU {GPU}, which it was not given, since 2026-12-01T04:10:05Z",
        ),
        (change(), "GPUMemoryLimitExceeded", f"Uses more than its share of the memory of GPU {GPU} since 2026-12-01T04:10:05Z"),
        (
            change(Resource.COMPUTE),
            "GPUComputeLimitExceeded",
            f"Uses more than its share of the time of GPU {GPU} since 2026-12-01T04:10:05Z",
        ),
    ],
    ids=["memory", "a little more", "compute", "a little busier", "unallocated", "a little", "no memory known", "no number", "no mean"],
)
def test_a_breach_that_begins_is_a_warning_with_its_numbers(told, reason, message):
    assert said(told) == ("Warning", reason, message)


@pytest.mark.parametrize(
    ("told", "reason", "message"),
    [
        (
            memory(30.1, 40, breach=BELOW),
            "GPUMemoryWithinLimit",
            f"Is within its share of the memory of GPU {GPU} again (30.1 of 40.0 GiB), which it had exceeded since 2026-12-01T04:10:05Z",
        ),
        (
            compute(0.32, 0.5, breach=BELOW),
            "GPUComputeWithinLimit",
            f"Is within its share of the time of GPU {GPU} again (32% of 50%), which it had exceeded since 2026-12-01T04:10:05Z",
        ),
        (
            change(Resource.UNALLOCATED, BELOW),
            "GPUUnallocatedUseEnded",
            f"No longer uses GPU {GPU} without having been given it, as it had since 2026-12-01T04:10:05Z",
        ),
        (
            change(breach=NO_LIMIT, memory_used_bytes=GIB),
            "GPUMemoryWithinLimit",
            f"No longer has a share of the memory of GPU {GPU} to keep to; it had exceeded one since 2026-12-01T04:10:05Z",
        ),
    ],
    ids=["memory", "compute", "unallocated", "its limit was taken away"],
)
def test_the_end_of_a_breach_is_normal_and_says_what_was(told, reason, message):
    assert said(told) == ("Normal", reason, message)


def test_a_container_above_its_own_limit_is_named_and_the_pod_is_not_said_to_use_more_than_its_own():
    over = container("trainer", {Resource.MEMORY: ABOVE}, ContainerLimits(container_memory_bytes=20 * GIB), memory_used_bytes=25 * GIB)
    other = container("logger", {Resource.MEMORY: BELOW}, ContainerLimits(container_memory_bytes=20 * GIB), memory_used_bytes=GIB)
    assert said(memory(26, 40, containers=(other, over)))[2] == (
        f"Container trainer uses 25.0 GiB of a 20.0 GiB share of GPU {GPU} since 2026-12-01T04:10:05Z"
    )


def test_a_process_above_the_limit_of_each_process_is_told_as_such():
    over = container("server", {Resource.MEMORY: ABOVE}, ContainerLimits(process_memory_bytes=10 * GIB), memory_used_bytes=19 * GIB)
    assert said(change(containers=(over,), memory_used_bytes=19 * GIB))[2] == (
        f"A process of container server uses more than its 10.0 GiB of GPU {GPU} since 2026-12-01T04:10:05Z"
    )


def test_a_container_busier_than_its_own_limit_is_named():
    over = container(limits=ContainerLimits(container_compute_ratio=0.25), sm_utilization_mean_ratio=0.3)
    assert said(compute(0.3, 0.5, containers=(over,)))[2] == (
        f"Container main keeps GPU {GPU} busy 30% of the time, of a 25% share, since 2026-12-01T04:10:05Z"
    )


def test_nothing_but_letters_that_a_name_may_have_reaches_the_message():
    over = container(
        "x\nEvents: <none>\u202e" + "y" * 9999,
        {Resource.MEMORY: ABOVE},
        ContainerLimits(container_memory_bytes=GIB),
        memory_used_bytes=2 * GIB,
    )
    message = said(change(containers=(over,), gpu_uuid="GPU-0\x00%s`"))[2]
    assert message.startswith("Container x?Events:".replace(":", "?"))
    assert re.fullmatch(r"[ -~]{1,700}", message)
    assert "GPU GPU-0??s? since" in message


# --- the object ---


def test_the_event_is_about_the_pod_by_its_uid_and_valid():
    event = encode_event(build_event(memory(45.2, 40)), "gpu-node-1")
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event["metadata"]["name"], "namespace": "team-a"},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "team-a", "name": "train-0", "uid": "uid"},
        "type": "Warning",
        "reason": "GPUMemoryLimitExceeded",
        "message": f"Uses 45.2 GiB of a 40.0 GiB share of GPU {GPU} since 2026-12-01T04:10:05Z",
        "source": {"component": "fgpu-exporter", "host": "gpu-node-1"},
        "reportingComponent": "fgpu-exporter",
        "reportingInstance": "gpu-node-1",
        "firstTimestamp": "2026-12-01T04:10:20Z",
        "lastTimestamp": "2026-12-01T04:10:20Z",
        "count": 1,
    }
    for version in ("1.26", "1.37"):
        kubernetes_validate.validate(event, version, strict=True)


def test_a_repeat_changes_the_count_the_time_and_the_message_alone():
    event = build_event(memory(45.2, 40))
    assert encode_repeat(event, 2) == {"message": event.message, "lastTimestamp": "2026-12-01T04:10:20Z", "count": 2}
    assert encode_repeat(event, None) == {"message": event.message, "lastTimestamp": "2026-12-01T04:10:20Z"}


def test_the_same_on_the_same_gpu_has_the_same_name_and_nothing_else_has():
    names = [
        build_event(told).name
        for told in (
            memory(45.2, 40),
            memory(30, 40, breach=BELOW),
            compute(0.6, 0.5),
            memory(45.2, 40, gpu_uuid="GPU-1"),
            memory(45.2, 40, pod_uid="another"),
        )
    ]
    assert len(set(names)) == 5
    assert build_event(memory(50, 40, since_seconds=SINCE + 100)).name == names[0]
    assert all(re.fullmatch(r"train-0\.[0-9a-f]{16}", name) for name in names)


def test_the_name_of_an_event_is_no_longer_than_a_name_may_be():
    name = build_event(memory(45.2, 40, pod="p" * 235 + "." + "q" * 17)).name
    assert re.fullmatch(r"p{235}\.[0-9a-f]{16}", name)


# --- how often ---


def breach(number, *, begun=True, at_seconds=0.0):
    return build_event(change(breach=ABOVE if begun else BELOW, monotonic_seconds=at_seconds, since_seconds=float(number)))


def test_each_breach_that_is_told_is_told_to_its_end_and_no_more_than_the_burst_at_once():
    spam = SpamFilter()
    answers = []
    for number in range(15):
        answers += [spam.admit(breach(number)), spam.admit(breach(number, begun=False))]
    assert answers == [None] * 24 + [Dropped.RATE_LIMITED, Dropped.BEGIN_UNTOLD] * 3
    assert answers.count(None) <= BURST


def test_after_ten_minutes_one_more_breach_is_told():
    spam = SpamFilter()
    for number in range(12):
        spam.admit(breach(number))
    assert spam.admit(breach(12, at_seconds=299.0)) is Dropped.RATE_LIMITED
    assert spam.admit(breach(13, at_seconds=300.0)) is None
    assert spam.admit(breach(14, at_seconds=301.0)) is Dropped.RATE_LIMITED
    assert spam.admit(breach(15, at_seconds=901.0)) is None


def test_one_pod_costs_another_nothing():
    spam = SpamFilter()
    for number in range(20):
        spam.admit(breach(number))
    assert spam.admit(build_event(memory(45.2, 40, pod_uid="another"))) is None


def test_a_breach_that_was_told_is_known_as_long_as_it_lasts():
    spam = SpamFilter()
    assert not spam.is_told(breach(1))
    spam.admit(breach(1))
    assert spam.is_told(breach(1))
    assert not spam.is_told(breach(2))
    spam.admit(breach(1, begun=False))
    assert not spam.is_told(breach(1))


def test_what_is_remembered_has_a_bound_and_what_was_used_last_stays():
    recent = Recent(most=2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1
    recent.put("c", 3)
    assert (recent.get("a"), recent.get("b"), recent.get("c"), len(recent)) == (1, None, 3, 2)


# --- what is a change ---


def report(*pods, containers=()):
    return Report(time_seconds=NOW, monotonic_seconds=7.0, pods=pods, containers=containers)


def test_a_change_carries_the_pod_its_containers_on_that_gpu_and_since_when():
    on = pod(breaches={Resource.MEMORY: ABOVE})
    mine = container()
    (told,) = breach_changes(None, report(on, containers=(mine, container(gpu_uuid="GPU-1"), container(pod_uid="another"))))
    assert (told.pod, told.containers, told.begun, told.since_seconds) == (on, (mine,), True, SINCE)
    assert (told.time_seconds, told.monotonic_seconds) == (NOW, 7.0)


def test_the_end_of_a_breach_says_since_when_it_was():
    (told,) = breach_changes(report(pod(breaches={Resource.MEMORY: ABOVE})), report(pod(breaches={Resource.MEMORY: BELOW})))
    assert (told.begun, told.since_seconds) == (False, SINCE)


@pytest.mark.parametrize(
    "after",
    [report(), report(pod(breaches={})), report(pod(gpu_uuid="GPU-1", breaches={Resource.MEMORY: BELOW}))],
    ids=["the pod is gone", "the pod has ended", "the GPU is gone"],
)
def test_what_is_gone_ends_no_breach(after):
    assert list(breach_changes(report(pod(breaches={Resource.MEMORY: ABOVE})), after)) == []
