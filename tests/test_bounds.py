"""Nothing that is remembered grows without bound, whatever comes and goes on the node."""

import json
from dataclasses import fields, replace

import pytest

from exporter.report import NOTHING_REMEMBERED, Rules, build
from exporter.snapshot import (
    CgroupRef,
    Container,
    ContainerAllocation,
    ContainerState,
    Devices,
    Gpu,
    GpuProcess,
    GpuReading,
    KubeletReading,
    KubernetesReading,
    NodeFacts,
    NvmlReading,
    Pod,
    PodAllocation,
    PodPhase,
    ProcessBusy,
    ProcessFacts,
    ProcfsReading,
    Snapshot,
)
from exporter.sources.nvml_samples import Moment, Sample, prime, step
from exporter.sources.procfs import ProcfsSource

GIB = 1 << 30
RULES = Rules()


def uuid(number):
    return f"GPU-{number:08x}"


def pod(number, annotations=None):
    return Pod(
        uid=f"uid-{number}",
        namespace="team-a",
        name=f"pod-{number}",
        phase=PodPhase.RUNNING,
        annotations=annotations or {},
        containers=(
            Container(
                name="main",
                container_id=f"{number:064x}",
                state=ContainerState.RUNNING,
                resource_limits={"volcano.sh/vgpu-number": "1"},  # without it Volcano's annotation says nothing
            ),
        ),
    )


def snapshot(at, pods, gpu_uuids, pids):
    """A moment in which each pod was given the first GPU and has one of the processes, on all GPUs."""
    owners = dict(zip(pids, pods, strict=False))
    processes = tuple(GpuProcess(pid=pid, memory_used_bytes=GIB) for pid in pids)
    busy = tuple(ProcessBusy(pid=pid, sm_seconds=1, memory_bandwidth_seconds=0, encoder_seconds=0, decoder_seconds=0) for pid in pids)
    devices = (ContainerAllocation("main", (Devices("nvidia.com/gpu", gpu_uuids[:1]),)),)
    return Snapshot(
        time_seconds=1000.0 + at,
        monotonic_seconds=at,
        nvml=NvmlReading(
            driver_version="1",
            gpus=tuple(GpuReading(gpu=Gpu(gpu_uuid=uuid), up=True, processes=processes, busy=busy) for uuid in gpu_uuids),
            dropped_samples={"bad_pid": 1},
        ),
        procfs=ProcfsReading(
            own_pid=1,
            processes={
                pid: ProcessFacts(
                    pid=pid, start_time_ticks=int(at), comm="x", cgroup=(CgroupRef(owner.uid, owner.containers[0].container_id),)
                )
                for pid, owner in owners.items()
            },
        ),
        kubelet=KubeletReading(pods=tuple(PodAllocation(each.namespace, each.name, devices) for each in pods), allocatable=()),
        kubelet_is_current=True,
        kubernetes=KubernetesReading(pods={each.uid: each for each in pods}, node=NodeFacts(name="n")),
        kubernetes_is_current=True,
    )


def sizes(memory):
    return {field.name: len(getattr(memory, field.name)) for field in fields(memory) if field.name != "granted"} | {
        "granted": len(memory.granted.by_pod) if memory.granted else 0
    }


def kept_intervals(memory):
    activities = (*memory.container_activity.values(), *memory.pod_activity.values())
    return max((len(activity.intervals) for activity in activities), default=0)


def test_ten_thousand_containers_that_come_and_go_leave_nothing_behind():
    memory = NOTHING_REMEMBERED
    largest = {}
    for tick in range(200):
        numbers = range(tick * 50, tick * 50 + 50)
        pods = [pod(number) for number in numbers]
        _, memory = build(snapshot(5.0 * tick, pods, (uuid(0), uuid(1)), [10_000 + number for number in numbers]), memory, RULES)
        largest = {name: max(size, largest.get(name, 0)) for name, size in sizes(memory).items()}
    # 50 pods on 2 GPUs, judged in at most 3 dimensions.
    assert max(largest.values()) <= 50 * 2 * 3
    _, memory = build(snapshot(2000.0, [], (uuid(0),), []), memory, RULES)
    assert sum(sizes(memory).values()) == len({"gpus", "busy_read_at"}) + len(memory.dropped_samples_total)


def test_containers_that_restart_for_ever_leave_nothing_behind():
    memory = NOTHING_REMEMBERED
    for tick in range(300):
        one = pod(1)
        restarted = replace(one, containers=(replace(one.containers[0], container_id=f"{tick:064x}"),))
        _, memory = build(snapshot(5.0 * tick, [restarted], (uuid(0),), [10_000 + tick]), memory, RULES)
    assert max(sizes(memory).values()) <= 5  # the reasons of dropped samples
    assert kept_intervals(memory) <= RULES.longest_window_seconds / 5 + 1


def test_gpus_that_are_made_anew_for_ever_leave_nothing_behind():
    memory = NOTHING_REMEMBERED
    for tick in range(300):
        _, memory = build(snapshot(5.0 * tick, [pod(tick)], (uuid(2 * tick), uuid(2 * tick + 1)), [10_000]), memory, RULES)
    assert max(sizes(memory).values()) <= 6


def tuples(uuids):
    return "".join(f"{uuid},NVIDIA,1024,10:" for uuid in uuids) + ";"


def devices(uuids):
    return json.dumps({"gpu": [{"id": uuid, "resources": {"koordinator.sh/gpu-memory": "1Gi"}} for uuid in uuids]})


# Contracts in which a pod's author can name any GPU.
NAMING = {
    "hami.io/vgpu-devices-allocated": tuples,
    "volcano.sh/vgpu-ids-new": tuples,
    "scheduling.koordinator.sh/device-allocated": devices,
}
MOST_UNLISTED = 16


@pytest.mark.parametrize(("key", "write"), NAMING.items(), ids=NAMING)
def test_an_annotation_that_names_other_gpus_at_each_moment_is_remembered_once(key, write):
    memory = NOTHING_REMEMBERED
    for tick in range(25):
        liar = pod(1, {key: write([uuid(100 * tick + number) for number in range(1, MOST_UNLISTED + 1)])})
        report, memory = build(snapshot(5.0 * tick, [liar], (uuid(0),), [10_000]), memory, RULES)
    # The GPUs of its first word and the one that it uses.
    assert max(sizes(memory).values()) <= (MOST_UNLISTED + 1) * 3
    assert len(report.gpus) == MOST_UNLISTED + 1


@pytest.mark.parametrize(("key", "write"), NAMING.items(), ids=NAMING)
def test_more_gpus_than_a_node_has_are_one_error_unless_the_driver_lists_them(key, write):
    named = [uuid(number) for number in range(MOST_UNLISTED + 1)]
    liar = pod(1, {key: write(named)})
    moment = snapshot(0.0, [liar], (uuid(500),), [10_000])
    report, _ = build(moment, NOTHING_REMEMBERED, RULES)
    assert report.claims == ()
    assert [error.errors for error in report.claim_errors] == [("names 17 GPUs that the driver does not list; up to 16 are believed",)]
    # With one of them listed, the others are no more than may be believed. With the driver away, none of them is.
    one_listed, _ = build(replace(moment, nvml=snapshot(0.0, [], (named[0],), []).nvml), NOTHING_REMEMBERED, RULES)
    assert len(one_listed.claims) == MOST_UNLISTED + 1
    assert build(replace(moment, nvml=None), NOTHING_REMEMBERED, RULES)[0].claims == ()


@pytest.mark.parametrize("gpus", [MOST_UNLISTED, 256], ids=["as many as are believed", "as many as an annotation may name"])
def test_hundreds_of_pods_that_each_invent_gpus_cost_no_more_than_those_that_are_believed(gpus):
    def liar(number):
        # No two of them and no two systems agree on one.
        named = {key: write([f"GPU-{number}-{key}-{each}" for each in range(gpus)]) for key, write in NAMING.items()}
        return pod(number, named)

    pods, memory = [liar(number) for number in range(250)], NOTHING_REMEMBERED
    for tick in range(2):
        report, memory = build(snapshot(5.0 * tick, pods, (uuid(0),), range(10_000, 10_250)), memory, RULES)
    believed = len(NAMING) * MOST_UNLISTED if gpus == MOST_UNLISTED else 0
    assert len(report.claims) == 250 * believed
    assert len(report.pods) == 250 * (believed + 1)
    assert sizes(memory)["pod_activity"] == 250 * (believed + 1)
    assert max(sizes(memory).values()) <= 250 * (believed + 1) * 3


def test_a_flood_of_gpus_that_comes_later_takes_nothing_away():
    key = "scheduling.koordinator.sh/device-allocated"
    memory = NOTHING_REMEMBERED
    for tick, count in enumerate((1, 256, 256)):
        greedy = pod(1, {key: devices([uuid(number) for number in range(count)])})
        report, memory = build(snapshot(5.0 * tick, [greedy], (uuid(0),), [10_000]), memory, RULES)
    assert [
        (claim.claim.system, claim.claim.gpu_uuid, claim.claim.memory_bytes) for claim in report.claims if claim.claim.container == ""
    ] == [("koordinator", uuid(0), GIB)]
    assert [error.system for error in report.claim_errors] == ["koordinator"]


@pytest.mark.parametrize("started", [True, False], ids=["running", "never started"])
def test_thousands_of_containers_times_invented_gpus_are_not_remembered(started):
    liar = pod(1, {"scheduling.koordinator.sh/device-allocated": devices([uuid(number) for number in range(MOST_UNLISTED)])})
    containers = tuple(Container(name=f"c{number}", container_id=f"{number:064x}" if started else None) for number in range(2000))
    _, memory = build(snapshot(0.0, [replace(liar, containers=containers)], (uuid(0),), [10_000]), NOTHING_REMEMBERED, RULES)
    assert len(memory.container_activity) == (2000 if started else 0)


def test_an_outage_of_the_api_lets_nothing_grow():
    memory = NOTHING_REMEMBERED
    before = None
    for tick in range(200):
        now = snapshot(5.0 * tick, [pod(number) for number in range(20)], (uuid(0),), range(10_000 + tick * 20, 10_020 + tick * 20))
        if tick > 10:
            now = replace(now, kubernetes=None, kubernetes_is_current=False)
        _, memory = build(now, memory, RULES)
        before = before or (sizes(memory) if tick == 10 else None)
    assert sizes(memory) == before


# --- the sources' own ---


def test_what_is_known_of_processes_goes_with_them(tmp_path):
    def write(pid):
        folder = tmp_path / str(pid)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (x) S " + " ".join(["0"] * 18 + ["77"] + ["0"] * 20))
        (folder / "cgroup").write_text(f"0::/kubepods/pod{pid:032x}/{pid:064x}\n")

    for pid in range(1, 400):
        write(pid)
    (tmp_path / "1" / "stat").write_text("1 (systemd) S " + " ".join(["0"] * 18 + ["7"] + ["0"] * 20))
    (tmp_path / "1" / "cgroup").write_text("0::/init.scope\n")
    (tmp_path / "self").symlink_to("9")
    source = ProcfsSource(tmp_path)
    for start in range(2, 390):
        assert len(source.read(range(start, start + 10)).processes) == 10
        assert len(source._remembered) == 10
    source.read([])
    assert source._remembered == {}


@pytest.mark.parametrize("lists_are_known", [True, False])
def test_what_is_known_of_a_gpus_samples_goes_with_its_processes(lists_are_known):
    moment = Moment(number=0, time_seconds=1000.0, monotonic_seconds=0.0)
    memory = prime([], moment, 1 << 22).memory
    for tick in range(1, 500):
        now = 1000.0 + 5.0 * tick
        moment = Moment(number=tick, time_seconds=now, monotonic_seconds=5.0 * tick)
        pids = range(tick * 10, tick * 10 + 10)
        samples = [
            Sample(
                pid=pid,
                time_stamp=int(now * 1e6) - 1000,
                sm_percent=10,
                memory_bandwidth_percent=0,
                encoder_percent=0,
                decoder_percent=0,
            )
            for pid in pids
        ]
        memory = step(memory, samples, moment, listed_pids=set(pids) if lists_are_known else None, pid_max=1 << 22).memory
        assert len(memory.newest_of_pid) <= (10 if lists_are_known else 40)
