"""The stages together: literal snapshots in, reports out."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.claims import Grant
from exporter.claims.kai import GpuGroup
from exporter.judge import Resource
from exporter.limits import NO_CONTAINER_LIMITS, PodLimits
from exporter.regions import NOT_COUNTED, CoreCount
from exporter.report import NOTHING_REMEMBERED, Missing, PodInfo, Rules, build, missing_limits
from exporter.snapshot import (
    CgroupRef,
    ClaimResult,
    Container,
    ContainerAllocation,
    ContainerState,
    Devices,
    EnvVar,
    FoundRegion,
    Gpu,
    GpuProcess,
    GpuReading,
    HostfilesReading,
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
    Region,
    RegionSlot,
    ResourceClaim,
    SliceDevice,
    Snapshot,
    UnreadableFile,
)
from exporter.usage import BusySeconds, Unattributed

MIB, GIB = 1 << 20, 1 << 30
GPU_0, GPU_1 = "GPU-00000000-0000-0000-0000-000000000000", "GPU-11111111-1111-1111-1111-111111111111"
GROUP = "3f6f0b5e-8d0e-4d5b-9f0e-2a4d5c1b7a10"
NODE = NodeFacts(name="gpu-node-1", labels={"nvidia.com/gpu.memory": "81559"})
RULES = Rules(system_namespaces=frozenset({"kube-system"}))
TOTAL = 81559 * MIB
HALF = 40750 * MIB


def container_id(uid, name="main"):
    return (uid + name).encode().hex().ljust(64, "0")[:64]


def pod(name, *, containers=("main",), **more):
    uid = more.pop("uid", f"uid-{name}")
    defaults = {"namespace": "team-a", "phase": PodPhase.RUNNING}
    return Pod(
        uid=uid,
        name=name,
        containers=tuple(
            Container(name=container, container_id=container_id(uid, container), state=ContainerState.RUNNING) for container in containers
        ),
        **(defaults | more),
    )


def kai_pod(name, *, fraction="0.5", **more):
    return pod(name, annotations={"gpu-fraction": fraction}, labels={"runai-gpu-group": GROUP}, **more)


RESERVATION = pod(
    "gpu-reservation",
    namespace="kai-resource-reservation",
    labels={"app": "kai-resource-reservation", "runai-gpu-group": GROUP},
    annotations={"run.ai/reserve_for_gpu_index": GPU_0},
)


def gpu(uuid=GPU_0, processes=(), *, busy=(), up=True, total=TOTAL):
    """A GPU with (pid, bytes) processes; busy is (pid, SM seconds)."""
    return GpuReading(
        gpu=Gpu(gpu_uuid=uuid, memory_total_bytes=total),
        up=up,
        processes=tuple(GpuProcess(pid=pid, memory_used_bytes=memory) for pid, memory in processes) if up else None,
        busy=tuple(
            ProcessBusy(pid=pid, sm_seconds=seconds, memory_bandwidth_seconds=0.0, encoder_seconds=0.0, decoder_seconds=0.0)
            for pid, seconds in busy
        )
        if up and busy is not None
        else None,
    )


def snapshot(pods, gpus, owners=None, *, at=0.0, devices=None, **more):
    """A moment: owners is PID -> (pod, container); devices is pod -> device ids of its first container."""
    facts = {
        pid: ProcessFacts(pid=pid, start_time_ticks=1, comm="python", cgroup=(CgroupRef(owner.uid, container_id(owner.uid, name)),))
        for pid, (owner, name) in (owners or {}).items()
    }
    allocations = tuple(
        PodAllocation(each.namespace, each.name, (ContainerAllocation(each.containers[0].name, (Devices("nvidia.com/gpu", tuple(ids)),)),))
        for each, ids in (devices or [])
    )
    defaults = {
        "nvml": NvmlReading(driver_version="575.1", gpus=tuple(gpus)),
        "procfs": ProcfsReading(own_pid=1, processes=facts),
        "kubelet": KubeletReading(pods=allocations, allocatable=()),
        "kubelet_is_current": True,
        "kubernetes": KubernetesReading(pods={each.uid: each for each in pods}, node=NODE),
        "kubernetes_is_current": True,
    }
    return Snapshot(time_seconds=1000.0 + at, monotonic_seconds=at, **(defaults | more))


def play(snapshots, *, rules=RULES):
    reports, memory = [], NOTHING_REMEMBERED
    for each in snapshots:
        report, memory = build(each, memory, rules)
        reports.append(report)
    return reports, memory


def pod_row(report, name, uuid=GPU_0):
    return next(row for row in report.pods if (row.pod, row.gpu_uuid) == (name, uuid))


def flag(report, name, resource, uuid=GPU_0):
    breach = pod_row(report, name, uuid).breaches.get(resource)
    return breach.exceeded if breach else None


def ticks(pods, gpus, owners, *, count, start=0, **more):
    return [snapshot(pods, gpus, owners, at=5.0 * (start + number), **more) for number in range(count)]


def test_a_fraction_pod_above_its_fraction_is_in_breach_after_the_hold():
    half = kai_pod("half")
    reports, _ = play(ticks([half, RESERVATION], [gpu(processes=[(10, HALF + 1)])], {10: (half, "main")}, count=3))
    assert [flag(report, "half", Resource.MEMORY) for report in reports] == [False, False, True]


def test_use_equal_to_the_limit_is_within_it():
    half = kai_pod("half")
    reports, _ = play(ticks([half, RESERVATION], [gpu(processes=[(10, HALF)])], {10: (half, "main")}, count=4))
    assert flag(reports[-1], "half", Resource.MEMORY) is False


def test_an_idle_grant_is_zero_from_the_first_sample():
    reports, _ = play([snapshot([kai_pod("half"), RESERVATION], [gpu()])])
    row = reports[0].containers[0]
    assert (row.memory_used_bytes, row.processes, row.limits.memory_bytes) == (0, 0, HALF)


def test_a_reservation_pod_has_no_rows_and_is_a_system_pod():
    reports, _ = play([snapshot([kai_pod("half"), RESERVATION], [gpu()], devices=[(RESERVATION, [GPU_0])])])
    assert {row.pod for row in reports[0].pods} == {"half"}
    assert {info.pod: info.role for info in reports[0].pod_infos} == {"half": "workload", "gpu-reservation": "system"}


def test_a_pod_that_no_one_gave_the_gpu_is_flagged_and_one_of_a_system_namespace_is_not():
    sneaky, monitor = pod("sneaky"), pod("monitor", namespace="kube-system")
    owners = {10: (sneaky, "main"), 11: (monitor, "main")}
    reports, _ = play(ticks([sneaky, monitor], [gpu(processes=[(10, 1), (11, 1)])], owners, count=3))
    assert flag(reports[-1], "sneaky", Resource.UNALLOCATED) is True
    assert Resource.UNALLOCATED not in pod_row(reports[-1], "monitor").breaches


def test_a_breach_without_allocation_ends_after_the_process_and_its_counters_stay():
    sneaky = pod("sneaky")
    using = ticks([sneaky], [gpu(processes=[(10, 1)])], {10: (sneaky, "main")}, count=4)
    gone = ticks([sneaky], [gpu()], {}, count=3, start=4)
    reports, _ = play(using + gone)
    assert [flag(report, "sneaky", Resource.UNALLOCATED) for report in reports[3:]] == [True, True, True, False]
    assert pod_row(reports[-1], "sneaky").breaches[Resource.UNALLOCATED].breaches_total == 1
    assert pod_row(reports[-1], "sneaky").memory_used_bytes is None
    assert reports[-1].containers == ()


@pytest.mark.parametrize("missing", ["kubelet", "kubernetes"])
def test_no_one_is_unallocated_while_allocations_or_pods_were_never_read(missing):
    sneaky = pod("sneaky")
    more = {missing: None, f"{missing}_is_current": False}
    reports, _ = play(ticks([sneaky], [gpu(processes=[(10, 1)])], {10: (sneaky, "main")}, count=4, **more))
    assert not [row for row in reports[-1].pods if row.breaches.get(Resource.UNALLOCATED) and row.breaches[Resource.UNALLOCATED].exceeded]


def test_through_a_kubelet_outage_a_new_pod_is_not_called_unallocated():
    old, new = pod("old"), pod("new")
    before = snapshot([old], [gpu()], devices=[(old, [GPU_0])])
    owners = {10: (new, "main")}
    during = ticks([old, new], [gpu(processes=[(10, 1)])], owners, count=4, start=1, devices=[(old, [GPU_0])], kubelet_is_current=False)
    reports, _ = play([before, *during])
    assert flag(reports[-1], "new", Resource.UNALLOCATED) is None


def test_use_above_a_readable_limit_is_a_breach_whatever_else_is_unreadable():
    half = replace(kai_pod("half"), annotations={"gpu-fraction": "0.5", "hami.io/vgpu-devices-allocated": "garbage"})
    above = ticks([half, RESERVATION], [gpu(processes=[(10, HALF + 1)])], {10: (half, "main")}, count=3)
    below = ticks([half, RESERVATION], [gpu(processes=[(10, 1)])], {10: (half, "main")}, count=3)
    assert flag(play(above)[0][-1], "half", Resource.MEMORY) is True
    assert flag(play(below)[0][-1], "half", Resource.MEMORY) is None


def test_an_annotation_loosened_after_binding_loosens_nothing():
    half = kai_pod("half")
    looser = replace(half, annotations={"gpu-fraction": "0.9"})
    reports, _ = play([snapshot([each, RESERVATION], [gpu()], at=5.0 * number) for number, each in enumerate([half, looser, looser])])
    assert [report.containers[0].limits.memory_bytes for report in reports] == [HALF] * 3
    assert [len(report.claim_errors) for report in reports] == [0, 1, 1]


def test_an_annotation_tightened_after_binding_applies_and_cannot_be_taken_back():
    half = kai_pod("half")
    tighter = replace(half, annotations={"gpu-fraction": "0.25"})
    reports, _ = play([snapshot([each, RESERVATION], [gpu()], at=5.0 * number) for number, each in enumerate([half, tighter, half])])
    assert [report.containers[0].limits.memory_bytes for report in reports] == [HALF, 20375 * MIB, 20375 * MIB]
    assert len(reports[-1].claim_errors) == 1


def test_an_annotation_removed_or_made_unreadable_loosens_nothing():
    half = kai_pod("half")
    for edited in ({}, {"gpu-fraction": "all of it"}, {"gpu-fraction": "0.5", "gpu-memory": "99999"}):
        reports, _ = play(
            [snapshot([half, RESERVATION], [gpu()]), snapshot([replace(half, annotations=edited), RESERVATION], [gpu()], at=5.0)]
        )
        assert reports[-1].containers[0].limits.memory_bytes == HALF
        assert [error.system for error in reports[-1].claim_errors] == ["kai"]


@pytest.mark.parametrize("edited", ["0.9", "all of it"], ids=["looser", "unreadable"])
def test_an_edit_that_changes_nothing_lets_a_breach_end(edited):
    half = kai_pod("half")
    later = replace(half, annotations={"gpu-fraction": edited})
    above, below = [gpu(processes=[(10, HALF + 1)])], [gpu(processes=[(10, 1)])]
    owners = {10: (half, "main")}
    reports, _ = play(
        [
            *ticks([half, RESERVATION], above, owners, count=3),
            *ticks([later, RESERVATION], above, owners, count=1, start=3),
            *ticks([later, RESERVATION], below, owners, count=3, start=4),
        ]
    )
    assert [flag(report, "half", Resource.MEMORY) for report in reports[2:]] == [True, True, True, True, False]
    assert len(reports[-1].claim_errors) == 1


def test_a_pod_that_limits_itself_on_a_gpu_that_no_one_gave_it_counts_among_the_pods_of_that_gpu():
    (main,) = pod("taker").containers
    taker = replace(pod("taker"), containers=(replace(main, env=(EnvVar(name="GPU_MEMORY_LIMIT", value=str(GIB)),)),))
    reports, _ = play([snapshot([taker], [gpu(processes=[(10, 1)])], {10: (taker, "main")})])
    assert [(row.pods, row.memory_allocated_bytes) for row in reports[-1].gpus] == [(1, GIB)]


@pytest.mark.parametrize(
    "annotations",
    [
        {"hami.io/vgpu-devices-allocated": f"{GPU_0},NVIDIA,80000,0:;"},
        {"hami.io/vgpu-devices-allocated": "garbage"},
        {"hami.io/vgpu-devices-allocated": f"{GPU_0},NVIDIA,80000,0:;", "hami.io/bind-phase": "allocating"},
        {"scheduling.koordinator.sh/device-allocated": "{"},
        {"volcano.sh/vgpu-ids-new": f"{GPU_0},NVIDIA,80000,0:"},
        {"ALIYUN_COM_GPU_MEM_IDX": "0"},
    ],
    ids=["HAMi", "HAMi unreadable", "HAMi allocating", "Koordinator", "Volcano", "Aliyun"],
)
def test_an_annotation_that_comes_later_does_not_hide_what_the_kubelet_said(annotations):
    sliced = pod("sliced")
    ids = KubeletReading(pods=(), allocatable=(Devices("nvidia.com/gpu", tuple(f"{GPU_0}::{number}" for number in range(4))),))
    devices = [(sliced, [f"{GPU_0}::0"])]
    world = ([gpu(processes=[(10, 30 * GIB)])], {10: (sliced, "main")})
    before = snapshot([sliced], *world, devices=devices)
    kubelet = replace(before.kubelet, allocatable=ids.allocatable)
    edited = replace(sliced, annotations=annotations)
    later = ticks([edited], *world, count=4, start=1, kubelet=kubelet)
    reports, _ = play([replace(before, kubelet=kubelet), *later])
    assert reports[-1].containers[0].limits.memory_bytes == 20389 * MIB
    assert flag(reports[-1], "sliced", Resource.MEMORY) is True


def test_a_new_pod_of_the_same_name_is_judged_by_its_own_words():
    first, second = kai_pod("half", uid="uid-1"), kai_pod("half", uid="uid-2", fraction="0.9")
    reports, memory = play([snapshot([first, RESERVATION], [gpu()]), snapshot([second, RESERVATION], [gpu()], at=5.0)])
    assert reports[-1].containers[0].limits.memory_bytes == int(0.9 * 81500) * MIB
    assert reports[-1].claim_errors == ()
    assert set(memory.pins) == {"uid-2"}


def test_a_driver_outage_freezes_a_breach_and_hides_no_limit():
    half = kai_pod("half")
    world = ([half, RESERVATION], [gpu(processes=[(10, HALF + 1)])], {10: (half, "main")})
    reports, _ = play([*ticks(*world, count=3), *ticks(*world, count=3, start=3, nvml=None), *ticks(*world, count=1, start=6)])
    assert [flag(report, "half", Resource.MEMORY) for report in reports] == [False, False, True, None, None, None, True]
    assert reports[4].containers[0].memory_used_bytes is None
    assert reports[4].containers[0].limits.memory_bytes == HALF
    assert pod_row(reports[-1], "half").breaches[Resource.MEMORY].breaches_total == 1


def test_counters_go_on_after_a_driver_outage():
    half = kai_pod("half")
    world = ([half, RESERVATION], [gpu(processes=[(10, 1)], busy=[(10, 2.0)])], {10: (half, "main")})
    reports, _ = play([*ticks(*world, count=2), *ticks(*world, count=1, start=2, nvml=None), *ticks(*world, count=1, start=3)])
    totals = [row.busy_total.sm if row.busy_total else None for report in reports for row in report.containers]
    assert totals == [2.0, 4.0, None, 6.0]


def test_a_restarted_container_starts_anew_and_its_pod_goes_on():
    half = kai_pod("half")
    again = replace(half, containers=(replace(half.containers[0], container_id="f" * 64),))
    first = snapshot([half, RESERVATION], [gpu(processes=[(10, 9)], busy=[(10, 2.0)])], {10: (half, "main")})
    second = snapshot([again, RESERVATION], [gpu()], {}, at=5.0)
    reports, _ = play([first, second])
    assert (reports[0].containers[0].memory_used_peak_bytes, reports[1].containers[0].memory_used_peak_bytes) == (9, 0)
    assert reports[1].containers[0].busy_total.sm == 0.0
    assert pod_row(reports[1], "half").sm_busy_seconds_total == 2.0


def test_a_finished_pod_with_a_live_process_shows_its_use_and_raises_no_flag():
    done = kai_pod("done", phase=PodPhase.SUCCEEDED)
    reports, _ = play(ticks([done, RESERVATION], [gpu(processes=[(10, TOTAL)])], {10: (done, "main")}, count=4))
    row = pod_row(reports[-1], "done")
    assert (row.memory_used_bytes, row.limits.memory_bytes, row.breaches) == (TOTAL, None, {})


def test_a_lost_gpu_keeps_its_grants_and_the_others_their_numbers():
    one, other = pod("one"), pod("other")
    devices = [(one, [GPU_0]), (other, [GPU_1])]
    gpus = [gpu(GPU_0, up=False), gpu(GPU_1, [(10, 5)])]
    reports, _ = play([snapshot([one, other], gpus, {10: (other, "main")}, devices=devices)])
    assert pod_row(reports[0], "one").memory_used_bytes is None
    assert pod_row(reports[0], "one").limits.memory_bytes == TOTAL
    assert pod_row(reports[0], "other", GPU_1).memory_used_bytes == 5


def test_a_whole_gpus_time_is_never_above_its_limit_however_the_samples_fall():
    whole = pod("whole")
    world = ([whole], [gpu(processes=[(10, 1)], busy=[(10, 5.2)])], {10: (whole, "main")})
    reports, _ = play(ticks(*world, count=20, devices=[(whole, [GPU_0])]))
    assert flag(reports[-1], "whole", Resource.COMPUTE) is False
    assert pod_row(reports[-1], "whole").sm_utilization_ratio == 1.0


def test_a_gpus_grants_are_the_sum_over_its_pods_and_system_pods_are_no_sharers():
    half, quarter = kai_pod("half"), kai_pod("quarter", fraction="0.25")
    agent = pod("agent", namespace="kube-system")
    pods = [half, quarter, pod("stranger"), RESERVATION, agent]
    world = snapshot(pods, [gpu(), gpu(GPU_1)], {10: (pods[2], "main")}, devices=[(agent, [GPU_1])])
    report = play([world])[0][0]
    first, second = report.gpus
    assert (first.memory_allocated_bytes, first.compute_allocated_ratio, first.pods) == (HALF + HALF // 2, 0.75, 2)
    assert (second.memory_allocated_bytes, second.compute_allocated_ratio, second.pods) == (TOTAL, 1.0, 0)


def test_what_the_driver_does_not_list_is_shown_only_where_it_was_granted():
    half = kai_pod("half")
    before = snapshot([half, RESERVATION], [gpu(), gpu(GPU_1)])
    away = snapshot([half, RESERVATION], [], at=5.0, nvml=None)
    reports, memory = play([before, away])
    assert [row.gpu.gpu_uuid for row in reports[1].gpus] == [GPU_0]
    assert (reports[1].gpus[0].reading, reports[1].gpus[0].processes_memory_hidden, reports[1].gpus[0].memory_allocated_bytes) == (
        None,
        None,
        HALF,
    )
    assert set(memory.gpus) == {GPU_0, GPU_1}
    _, memory = build(snapshot([half, RESERVATION], [], at=10.0), memory, RULES)
    assert set(memory.gpus) == {GPU_0}


# --- all of a report ---


def full_node(at):
    """A container under KAI with two processes, a pod that Koordinator limits as a whole, one whose contract is unreadable."""
    half = kai_pod("half", containers=("main", "side"), owner_kind="ReplicaSet", owner_name="half-7d9", scheduler_name="kai-scheduler")
    half = replace(half, labels={**half.labels, "kai.scheduler/queue": "research"})
    whole = {"gpu": [{"id": GPU_1, "resources": {"koordinator.sh/gpu-memory": "10Gi", "koordinator.sh/gpu-core": "50"}}]}
    shared = pod("shared", annotations={"scheduling.koordinator.sh/device-allocated": json.dumps(whole)})
    broken = pod("broken", namespace="team-b", annotations={"gpu-fraction": "half"})
    owners = {10: (half, "main"), 11: (half, "main"), 20: (shared, "main")}
    moment = snapshot(
        [half, shared, broken, RESERVATION],
        [
            gpu(GPU_0, [(10, 7 * GIB), (11, 3 * GIB), (12, 5 * GIB)], busy=[(10, 2.0), (11, 0.5)]),
            gpu(GPU_1, [(20, 11 * GIB), (21, None)], busy=[(20, 1.0)]),
        ],
        owners,
        at=at,
    )
    host = ProcessFacts(pid=12, start_time_ticks=1, comm="Xorg", cgroup=())
    procfs = replace(moment.procfs, processes={**moment.procfs.processes, 12: host, 21: replace(host, pid=21)})
    return replace(moment, procfs=procfs, nvml=replace(moment.nvml, gpus_unidentified=1))


@pytest.fixture
def full():
    """The last report and the last moment of two minutes: every window is full and every hold is over."""
    moments = [full_node(5.0 * number) for number in range(25)]
    return play(moments)[0][-1], moments[-1]


def test_a_report_is_of_its_moment(full):
    report, moment = full
    assert (report.time_seconds, report.monotonic_seconds) == (1120.0, 120.0)
    assert (report.driver_version, report.gpus_unidentified) == ("575.1", 1)
    assert report.gpu_groups == (GpuGroup(GROUP, GPU_0, "kai-resource-reservation", "gpu-reservation"),)
    assert report.evidence.snapshot is moment
    assert report.evidence.rules is RULES
    assert set(report.evidence.pod_activity) == {("uid-half", GPU_0), ("uid-shared", GPU_1)}
    assert set(report.evidence.grants) == {"uid-half", "uid-shared", "uid-broken", "uid-gpu-reservation"}
    assert set(report.evidence.identities) == {10, 11, 12, 20, 21}
    assert set(report.evidence.usage) == {GPU_0, GPU_1}


def test_a_containers_row_says_who_it_is_and_what_it_uses(full):
    rows = {(row.pod, row.container): row for row in full[0].containers}
    # A container without a grant and without a process has no row: `side` is not given the fraction.
    assert set(rows) == {("half", "main"), ("shared", "main")}
    main = rows["half", "main"]
    assert (main.namespace, main.gpu_uuid, main.pod_uid) == ("team-a", GPU_0, "uid-half")
    assert main.container_id == container_id("uid-half", "main")
    assert (main.memory_used_bytes, main.memory_used_peak_bytes, main.processes) == (10 * GIB, 10 * GIB, 2)
    assert (main.limits.memory_bytes, main.limits.compute_ratio) == (HALF, 0.5)
    assert (main.sm_utilization_ratio, main.sm_utilization_mean_ratio) == (0.5, 0.5)
    assert main.busy_total == BusySeconds(sm=25 * 2.5)
    assert {resource: breach.exceeded for resource, breach in main.breaches.items()} == {Resource.MEMORY: False, Resource.COMPUTE: False}


def test_a_container_that_only_uses_a_gpu_of_its_pod_has_a_row_without_limits(full):
    row = next(row for row in full[0].containers if row.pod == "shared")
    assert (row.memory_used_bytes, row.limits, row.breaches) == (11 * GIB, NO_CONTAINER_LIMITS, {})
    assert (row.sm_utilization_ratio, row.sm_utilization_mean_ratio) == (pytest.approx(0.2), pytest.approx(0.2))


def test_a_pods_row_adds_its_containers_up_and_has_the_limits_of_the_pod(full):
    rows = {row.pod: row for row in full[0].pods}
    assert set(rows) == {"half", "shared"}
    half, shared = rows["half"], rows["shared"]
    assert (half.namespace, half.gpu_uuid, half.pod_uid) == ("team-a", GPU_0, "uid-half")
    assert (half.memory_used_bytes, half.limits) == (10 * GIB, PodLimits(memory_bytes=HALF, compute_ratio=0.5))
    assert (half.sm_utilization_ratio, half.sm_utilization_mean_ratio) == (0.5, 0.5)
    assert half.sm_busy_seconds_total == 25 * 2.5
    assert shared.limits == PodLimits(memory_bytes=10 * GIB, compute_ratio=0.5)
    assert {resource: breach.exceeded for resource, breach in shared.breaches.items()} == {
        Resource.MEMORY: True,
        Resource.COMPUTE: False,
        Resource.UNALLOCATED: False,
    }
    # Above from the first moment: the breach began then, and counts from when the hold was over.
    breach = shared.breaches[Resource.MEMORY]
    assert (breach.since_seconds, breach.exceeded_seconds_total, breach.breaches_total) == (1000.0, 110.0, 1)


def test_a_claim_and_a_contract_that_cannot_be_read_are_told_with_whose_they_are(full):
    report, _ = full
    told = [
        (each.namespace, each.pod, each.pod_uid, each.claim.system, each.claim.gpu_uuid, each.claim.container, each.claim.memory_bytes)
        for each in report.claims
    ]
    assert told == [
        ("team-a", "half", "uid-half", "kai", GPU_0, "main", HALF),
        ("team-a", "shared", "uid-shared", "koordinator", GPU_1, "", 10 * GIB),
    ]
    (error,) = report.claim_errors
    assert (error.namespace, error.pod, error.system) == ("team-b", "broken", "kai")
    assert error.errors[0].startswith("gpu-fraction: ")


def test_facts_about_a_pod_are_told_with_whose_they_are(full):
    infos = {info.pod: info for info in full[0].pod_infos}
    assert set(infos) == {"half", "shared", "gpu-reservation"}
    assert infos["half"] == PodInfo(
        namespace="team-a",
        pod="half",
        pod_uid="uid-half",
        queue="research",
        owner_kind="ReplicaSet",
        owner_name="half-7d9",
        scheduler="kai-scheduler",
        role="workload",
    )


def test_a_gpus_row_has_what_the_driver_says_what_was_granted_and_what_has_no_owner(full):
    first, second = full[0].gpus
    assert (first.gpu.gpu_uuid, first.gpu.memory_total_bytes, first.reading.gpu.gpu_uuid) == (GPU_0, TOTAL, GPU_0)
    assert (first.memory_allocated_bytes, first.compute_allocated_ratio, first.pods) == (HALF, 0.5, 1)
    assert {reason: used for reason, used in first.unattributed_bytes.items() if used} == {Unattributed.HOST_PROCESS: 5 * GIB}
    assert (first.processes_memory_hidden, second.processes_memory_hidden) == (0, 1)
    assert second.reading.gpu.gpu_uuid == GPU_1


def test_a_limit_of_a_container_that_is_taken_away_beside_another_ones_holds():
    def limited(**annotations):
        containers = tuple(
            Container(
                name=name,
                container_id=container_id("uid-two", name),
                state=ContainerState.RUNNING,
                env=(EnvVar(name="GPU_MEMORY_LIMIT", field_path=f"metadata.annotations['{name}']"),),
            )
            for name in ("main", "side")
        )
        return replace(pod("two", annotations=annotations), containers=containers)

    both, one = limited(main=str(GIB), side=str(GIB)), limited(side=str(GIB))
    moments = [
        snapshot(
            [each],
            [gpu(processes=[(10, 2 * GIB)])],
            {10: (each, "main"), 11: (each, "side")},
            at=5.0 * number,
            kubelet=KubeletReading(
                pods=(
                    PodAllocation(
                        "team-a",
                        "two",
                        tuple(ContainerAllocation(name, (Devices("nvidia.com/gpu", (GPU_0,)),)) for name in ("main", "side")),
                    ),
                ),
                allocatable=(),
            ),
        )
        for number, each in enumerate([both, both, one, one])
    ]
    reports, _ = play(moments)
    assert [flag(report, "two", Resource.MEMORY) for report in reports] == [False, False, True, True]
    assert [row.limits.memory_bytes for row in reports[-1].containers] == [GIB, GIB]
    assert [error.system for error in reports[-1].claim_errors] == ["container_env"]


# --- what a report remembers ---


def test_a_container_above_its_limit_is_in_breach_after_the_hold_and_no_other_one_is():
    half = kai_pod("half", containers=("main", "side"))
    owners = {10: (half, "main"), 11: (half, "side")}
    reports, _ = play(ticks([half, RESERVATION], [gpu(processes=[(10, HALF + 1), (11, 1)])], owners, count=4))
    exceeded = [
        {row.container: {key: breach.exceeded for key, breach in row.breaches.items()} for row in report.containers} for report in reports
    ]
    assert [each["main"][Resource.MEMORY] for each in exceeded] == [False, False, True, True]
    assert [each["side"] for each in exceeded] == [{}] * 4
    assert next(row for row in reports[-1].containers if row.container == "main").breaches[Resource.MEMORY].since_seconds == 1000.0


def test_the_time_of_a_process_that_ended_between_two_readings_is_its_containers():
    half = kai_pod("half")
    before = snapshot([half, RESERVATION], [gpu(processes=[(10, 1)], busy=[(10, 1.0)])], {10: (half, "main")})
    after = snapshot([half, RESERVATION], [gpu(busy=[(10, 0.5)])], {}, at=5.0)
    reports, _ = play([before, after])
    assert [report.containers[0].busy_total.sm for report in reports] == [1.0, 1.5]


def test_the_time_of_a_pid_that_changed_hands_is_no_ones_even_through_an_outage_of_proc():
    first, second = kai_pod("first"), kai_pod("second")
    pods = [first, second, RESERVATION]
    before = snapshot(pods, [gpu(processes=[(10, 1)], busy=[(10, 1.0)])], {10: (first, "main")})
    blind = snapshot(pods, [gpu(processes=[(10, 1)], busy=[(10, 1.0)])], at=5.0, procfs=None)
    after = snapshot(pods, [gpu(processes=[(10, 1)], busy=[(10, 1.0)])], {10: (second, "main")}, at=10.0)
    again = {pid: replace(facts, start_time_ticks=2) for pid, facts in after.procfs.processes.items()}
    reports, _ = play([before, blind, replace(after, procfs=replace(after.procfs, processes=again))])
    assert {row.pod: row.busy_total.sm for row in reports[-1].containers} == {"first": 1.0, "second": 0.0}


def test_a_pod_that_the_kubelet_named_before_its_outage_is_flagged_through_it():
    known = pod("known")
    before = snapshot([known], [gpu()], devices=[(known, [])])
    during = ticks([known], [gpu(processes=[(10, 1)])], {10: (known, "main")}, count=4, start=1, kubelet_is_current=False)
    silent = [replace(each, kubelet=KubeletReading(pods=(), allocatable=())) for each in during]
    assert flag(play([before, *during])[0][-1], "known", Resource.UNALLOCATED) is True
    # What the kubelet is remembered to have said may have been cut to nothing: what it named counts.
    assert flag(play([before, *silent])[0][-1], "known", Resource.UNALLOCATED) is True


def test_a_grant_without_an_amount_has_rows_on_its_gpu_alone():
    sliced = pod("sliced", containers=("main", "side"))
    reports, _ = play([snapshot([sliced], [gpu(GPU_0), gpu(GPU_1)], devices=[(sliced, [f"{GPU_0}::0"])])])
    assert [(row.container, row.gpu_uuid, row.memory_used_bytes, row.limits) for row in reports[0].containers] == [
        ("main", GPU_0, 0, NO_CONTAINER_LIMITS)
    ]
    assert [(row.gpu_uuid, row.memory_used_bytes) for row in reports[0].pods] == [(GPU_0, 0)]
    assert [(each.memory_allocated_bytes, each.compute_allocated_ratio, each.pods) for each in reports[0].gpus] == [
        (0, 0.0, 1),
        (0, 0.0, 0),
    ]


def test_a_grant_without_an_amount_on_a_gpu_that_the_driver_does_not_tell_is_shown():
    sliced = pod("sliced")
    before = snapshot([sliced], [gpu()], devices=[(sliced, [f"{GPU_0}::0"])])
    reports, _ = play([before, replace(before, monotonic_seconds=5.0, nvml=None)])
    assert [(each.gpu.gpu_uuid, each.gpu.memory_total_bytes, each.reading, each.pods) for each in reports[-1].gpus] == [
        (GPU_0, TOTAL, None, 1)
    ]
    assert (reports[-1].driver_version, reports[-1].gpus_unidentified) == (None, None)
    assert reports[-1].gpus[0].unattributed_bytes is None
    assert reports[-1].gpus[0].processes_memory_hidden is None


def test_a_claim_on_a_gpu_that_was_never_listed_is_shown_with_its_uuid_alone():
    shared = pod("shared", annotations={"hami.io/vgpu-devices-allocated": f"{GPU_1},NVIDIA,1024,10:;"})
    reports, _ = play([snapshot([shared], [gpu(GPU_0)])])
    assert [(each.gpu, each.reading is None, each.memory_allocated_bytes) for each in reports[0].gpus] == [
        (Gpu(gpu_uuid=GPU_0, memory_total_bytes=TOTAL), False, 0),
        (Gpu(gpu_uuid=GPU_1), True, GIB),
    ]


def test_a_finished_pod_has_no_row_on_a_gpu_that_it_no_longer_uses():
    done = pod("done")
    using = snapshot([done], [gpu(processes=[(10, 1)])], {10: (done, "main")})
    ended = snapshot([replace(done, phase=PodPhase.SUCCEEDED)], [gpu()], at=5.0)
    reports, _ = play([using, ended])
    assert [[row.pod for row in report.pods] for report in reports] == [["done"], []]


def test_an_mps_server_is_no_pods_in_a_system_namespace_and_its_pods_anywhere_else():
    trusted, tenant = pod("mps", namespace="kube-system"), pod("mps", namespace="team-a", uid="uid-tenant")
    moment = snapshot([trusted, tenant], [gpu(processes=[(10, 3), (11, 4)])], {10: (trusted, "main"), 11: (tenant, "main")})
    named = {pid: replace(facts, comm="nvidia-cuda-mps") for pid, facts in moment.procfs.processes.items()}
    reports, _ = play([replace(moment, procfs=replace(moment.procfs, processes=named))])
    assert reports[0].gpus[0].unattributed_bytes[Unattributed.MPS_SERVER] == 3
    assert [(row.namespace, row.memory_used_bytes) for row in reports[0].containers] == [("team-a", 4)]


def test_reservation_pods_are_believed_in_the_namespaces_that_the_operator_named():
    half = kai_pod("half")
    elsewhere = replace(RESERVATION, namespace="our-reservations")
    rules = replace(RULES, kai_reservation_namespaces=frozenset({"our-reservations"}))
    named = play([snapshot([half, elsewhere], [gpu()])], rules=rules)[0][0]
    assert [row.limits.memory_bytes for row in named.containers] == [HALF]
    assert play([snapshot([half, elsewhere], [gpu()])])[0][0].containers == ()


DEVICE = {"driver_name": "gpu.nvidia.com", "pool_name": "gpu-node-1", "device_name": "gpu-5"}


def test_a_claim_of_a_driver_whose_slices_are_gone_keeps_its_gpu():
    claimed = pod("claimed")
    claimed = replace(claimed, containers=(replace(claimed.containers[0], claim_requests=(("gpu", None),)),), resource_claims={"gpu": "c"})
    resource_claim = ResourceClaim(
        uid="c", namespace="team-a", name="c", results=(ClaimResult(request="gpu", **DEVICE),), reserved_for_pod_uids=("uid-claimed",)
    )
    moment = snapshot([claimed], [gpu(GPU_0)])

    def kubernetes(*slices):
        return replace(moment.kubernetes, slice_devices=slices, resource_claims=(resource_claim,))

    there = replace(moment, kubernetes=kubernetes(SliceDevice(**DEVICE, gpu_uuid=GPU_0)))
    gone = [replace(moment, monotonic_seconds=5.0 * number, kubernetes=kubernetes()) for number in (1, 2)]
    reports, memory = play([there, *gone])
    assert [[(row.gpu_uuid, row.limits.memory_bytes) for row in report.containers] for report in reports] == [[(GPU_0, TOTAL)]] * 3
    assert memory.held_slice_devices == (SliceDevice(**DEVICE, gpu_uuid=GPU_0),)
    # Without having seen the slice no one knows which GPU it is.
    assert play(gone)[0][-1].containers == ()


# --- whose a breach is, and when nothing is said ---


def limited_pod(name, *uuids, **more):
    """A pod that HAMi gave 1 GiB on each of the GPUs."""
    segment = "".join(f"{uuid},NVIDIA,1024,0:" for uuid in uuids)
    return pod(name, annotations={"hami.io/vgpu-devices-allocated": f"{segment};"}, **more)


def container_flag(report, name, resource, uuid=GPU_0):
    breach = next(row for row in report.containers if (row.pod, row.gpu_uuid) == (name, uuid)).breaches.get(resource)
    return breach.exceeded if breach else None


def test_a_breach_is_of_one_pod_and_one_gpu():
    greedy, modest = limited_pod("greedy", GPU_0, GPU_1), limited_pod("modest", GPU_0, GPU_1)
    owners = {10: (greedy, "main"), 20: (modest, "main")}
    gpus = [gpu(GPU_0, [(10, 2 * GIB), (20, 1)]), gpu(GPU_1, [(10, 1), (20, 1)])]
    report = play(ticks([greedy, modest], gpus, owners, count=4))[0][-1]
    for told in (flag, container_flag):
        assert {(name, uuid): told(report, name, Resource.MEMORY, uuid) for name in ("greedy", "modest") for uuid in (GPU_0, GPU_1)} == {
            ("greedy", GPU_0): True,
            ("greedy", GPU_1): False,
            ("modest", GPU_0): False,
            ("modest", GPU_1): False,
        }


def test_a_restarted_container_has_to_be_above_for_the_hold_again_and_its_pod_has_not():
    first = limited_pod("greedy", GPU_0)
    restarted = replace(first, containers=(replace(first.containers[0], container_id="9" * 64),))
    before = ticks([first], [gpu(processes=[(10, 2 * GIB)])], {10: (first, "main")}, count=4)
    after = ticks([restarted], [gpu(processes=[(11, 2 * GIB)])], {11: (first, "main")}, count=3, start=4)
    moved = [
        replace(
            each, procfs=replace(each.procfs, processes={11: replace(each.procfs.processes[11], cgroup=(CgroupRef(first.uid, "9" * 64),))})
        )
        for each in after
    ]
    reports, _ = play([*before, *moved])
    assert [container_flag(report, "greedy", Resource.MEMORY) for report in reports[3:]] == [True, False, False, True]
    assert [flag(report, "greedy", Resource.MEMORY) for report in reports[3:]] == [True] * 4


def test_below_a_limit_nothing_is_said_of_a_container_or_pod_while_another_contract_is_unreadable():
    by_container = replace(kai_pod("one"), annotations={"gpu-fraction": "0.5", "hami.io/vgpu-devices-allocated": "garbage"})
    whole = json.dumps({"gpu": [{"id": GPU_0, "resources": {"koordinator.sh/gpu-memory": "10Gi"}}]})
    by_pod = pod("two", annotations={"scheduling.koordinator.sh/device-allocated": whole, "hami.io/vgpu-devices-allocated": "garbage"})
    owners = {10: (by_container, "main"), 20: (by_pod, "main")}
    report = play(ticks([by_container, by_pod, RESERVATION], [gpu(processes=[(10, 1), (20, 1)])], owners, count=3))[0][-1]
    assert container_flag(report, "one", Resource.MEMORY) is None
    assert flag(report, "two", Resource.MEMORY) is None


def test_a_container_with_a_process_that_the_driver_hides_has_neither_use_nor_peak():
    half = kai_pod("half")
    seen = snapshot([half, RESERVATION], [gpu(processes=[(10, 5)])], {10: (half, "main")})
    hidden = snapshot([half, RESERVATION], [gpu(processes=[(10, None), (11, 3)])], {10: (half, "main"), 11: (half, "main")}, at=5.0)
    reports, _ = play([seen, hidden])
    assert [(row.memory_used_bytes, row.memory_used_peak_bytes, row.processes) for report in reports for row in report.containers] == [
        (5, 5, 1),
        (None, None, 2),
    ]
    assert pod_row(reports[-1], "half").memory_used_bytes is None
    assert reports[-1].gpus[0].processes_memory_hidden == 1


def test_while_the_driver_tells_no_time_there_is_no_utilization_and_no_counter():
    half = kai_pod("half")
    world = ([half, RESERVATION], {10: (half, "main")})
    told = [snapshot(world[0], [gpu(processes=[(10, 1)], busy=[(10, 1.0)])], world[1], at=5.0 * number) for number in range(3)]
    silent = snapshot(world[0], [gpu(processes=[(10, 1)], busy=None)], world[1], at=15.0)
    reports, _ = play([*told, silent])
    assert [
        (row.sm_utilization_ratio, row.busy_total.sm if row.busy_total else None, of_pod.sm_utilization_ratio, of_pod.sm_busy_seconds_total)
        for row, of_pod in ((report.containers[0], pod_row(report, "half")) for report in reports[2:])
    ] == [(0.2, 3.0, 0.2, 3.0), (None, None, None, None)]


def test_a_pod_that_no_longer_has_to_do_with_a_gpu_keeps_its_counter_there_and_nothing_else():
    sneaky = pod("sneaky")
    using = ticks([sneaky], [gpu(processes=[(10, 1)], busy=[(10, 1.0)])], {10: (sneaky, "main")}, count=13)
    gone = ticks([sneaky], [gpu(busy=[])], {}, count=1, start=13)
    row = pod_row(play([*using, *gone])[0][-1], "sneaky")
    assert (row.memory_used_bytes, row.sm_utilization_ratio, row.sm_utilization_mean_ratio) == (None, None, None)
    assert row.sm_busy_seconds_total == 13.0


def test_a_pod_that_was_given_a_gpu_as_a_whole_uses_none_of_it_before_its_first_process():
    whole = json.dumps({"gpu": [{"id": GPU_0, "resources": {"koordinator.sh/gpu-memory": "10Gi"}}]})
    shared = pod("shared", annotations={"scheduling.koordinator.sh/device-allocated": whole})
    report = play([snapshot([shared], [gpu(), gpu(GPU_1)])])[0][0]
    assert [(row.gpu_uuid, row.memory_used_bytes, row.limits.memory_bytes) for row in report.pods] == [(GPU_0, 0, 10 * GIB)]
    assert report.containers == ()


def test_use_of_what_no_one_gave_is_unknown_while_the_driver_is_away():
    sneaky = pod("sneaky")
    before = ticks([sneaky], [gpu(processes=[(10, 1)])], {10: (sneaky, "main")}, count=4)
    away = ticks([sneaky], [], {10: (sneaky, "main")}, count=2, start=4, nvml=None)
    reports, _ = play([*before, *away])
    assert [flag(report, "sneaky", Resource.UNALLOCATED) for report in reports[3:]] == [True, None, None]


@pytest.mark.parametrize(
    ("grant", "missing", "reasons"),
    [
        (Grant(), None, ()),
        (Grant(not_placed=True), None, (Missing.NOT_PLACED,)),
        (Grant(unreadable=True), None, (Missing.UNREADABLE,)),
        (Grant(), "kubelet", (Missing.KUBELET_UNKNOWN,)),
        (Grant(), "kubernetes", (Missing.KUBERNETES_UNKNOWN,)),
    ],
)
def test_why_limits_may_be_missing_has_a_name(grant, missing, reasons):
    moment = snapshot([], [gpu()], **({missing: None} if missing else {}))
    assert missing_limits(grant, moment) == reasons


def test_a_pods_time_is_that_of_all_its_containers_and_only_its_own():
    two, other = pod("two", containers=("main", "side")), pod("other")
    owners = {10: (two, "main"), 11: (two, "side"), 20: (other, "main")}
    gpus = [gpu(GPU_0, [(10, 1), (11, 1), (20, 1)], busy=[(10, 1.0), (11, 0.5), (20, 2.0)]), gpu(GPU_1, [(10, 1)], busy=[(10, 0.25)])]
    report = play(ticks([two, other], gpus, owners, count=2))[0][-1]
    assert {(row.pod, row.gpu_uuid): row.sm_busy_seconds_total for row in report.pods} == {
        ("two", GPU_0): 3.0,
        ("two", GPU_1): 0.5,
        ("other", GPU_0): 4.0,
    }


def test_a_container_has_rows_on_its_own_gpus_and_not_on_its_neighbours():
    annotation = {"hami.io/vgpu-devices-allocated": f"{GPU_0},NVIDIA,1024,0:;{GPU_1},NVIDIA,2048,0:;"}
    report = play([snapshot([pod("two", annotations=annotation, containers=("main", "side"))], [gpu(GPU_0), gpu(GPU_1)])])[0][0]
    assert [(row.container, row.gpu_uuid, row.limits.memory_bytes) for row in report.containers] == [
        ("main", GPU_0, GIB),
        ("side", GPU_1, 2 * GIB),
    ]


def test_what_is_not_judged_has_no_breach_at_all():
    done = limited_pod("done", GPU_0, phase=PodPhase.SUCCEEDED)
    report = play([snapshot([done], [gpu(processes=[(10, 2 * GIB)])], {10: (done, "main")})])[0][0]
    assert [row.breaches for row in (*report.containers, *report.pods)] == [{}, {}]


def test_facts_about_a_pod_are_its_own_or_empty():
    owned = kai_pod("owned", owner_kind="Job", owner_name="train", scheduler_name="kai-scheduler")
    queued = replace(owned, labels={**owned.labels, "kai.scheduler/queue": "gold"})
    agent = pod("agent", namespace="kube-system")
    report = play([snapshot([queued, RESERVATION, agent], [gpu()], {10: (agent, "main")}, devices=[(agent, [GPU_0])])])[0][0]
    facts = {row.pod: (row.queue, row.owner_kind, row.owner_name, row.scheduler, row.role) for row in report.pod_infos}
    assert facts == {
        "owned": ("gold", "Job", "train", "kai-scheduler", "workload"),
        "agent": ("", "", "", "", "system"),
        "gpu-reservation": ("", "", "", "", "system"),
    }


def test_what_the_driver_said_untruly_adds_up():
    def reading(count):
        return NvmlReading(driver_version="1", gpus=(gpu(),), dropped_samples={"bad_pid": count})

    moments = [snapshot([], [], at=5.0 * number, nvml=nvml) for number, nvml in enumerate([reading(2), None, reading(3)])]
    totals = [report.dropped_samples_total["bad_pid"] for report in play(moments)[0]]
    assert totals == [2, 2, 5]


def test_a_grant_on_a_gpu_covers_its_mig_devices():
    mig = GpuReading(
        gpu=Gpu(gpu_uuid="MIG-1", parent_gpu_uuid=GPU_0, memory_total_bytes=10 * GIB),
        up=True,
        processes=(GpuProcess(pid=10, memory_used_bytes=GIB),),
    )
    whole, stranger = pod("whole"), pod("stranger")
    owners = {10: (whole, "main"), 11: (stranger, "main")}
    strangers = replace(
        mig, gpu=replace(mig.gpu, gpu_uuid="MIG-2", parent_gpu_uuid=GPU_1), processes=(GpuProcess(pid=11, memory_used_bytes=1),)
    )
    reports, _ = play(ticks([whole, stranger], [gpu(), gpu(GPU_1), mig, strangers], owners, count=4, devices=[(whole, [GPU_0])]))
    assert flag(reports[-1], "whole", Resource.UNALLOCATED, "MIG-1") is False
    assert flag(reports[-1], "stranger", Resource.UNALLOCATED, "MIG-2") is True


def test_nothing_is_remembered_of_pods_that_are_gone():
    memory = NOTHING_REMEMBERED
    for number in range(50):
        half = kai_pod(f"pod-{number}", fraction="0.001")
        each = snapshot([half, RESERVATION], [gpu(processes=[(10, GIB)], busy=[(10, 5.0)])], {10: (half, "main")}, at=5.0 * number)
        _, memory = build(each, memory, RULES)
    sizes = [len(getattr(memory, name)) for name in ("container_activity", "pod_activity", "container_breaches", "pod_breaches", "pins")]
    assert max(sizes) <= 3


# --- HAMi-core's regions ---


def hami_pod(name, mib=8192):
    return pod(name, annotations={"hami.io/vgpu-devices-allocated": f"{GPU_0},NVIDIA,{mib},0:;"})


def region(owner, pid, *, used=3 * GIB, limit=4 * GIB, container="main"):
    written = Region(gpu_uuids=(GPU_0,), memory_limit_bytes=(limit,), slots=(RegionSlot(pid, (used,)),))
    return HostfilesReading(regions=(FoundRegion(written, frozenset({(owner.uid, container)})),))


def limit_of(report, name):
    return next(row.limits.memory_bytes for row in report.containers if row.pod == name)


def test_what_hami_core_counts_stands_beside_what_the_driver_says():
    train = hami_pod("train")
    reports, _ = play([snapshot([train], [gpu(processes=[(10, 5 * GIB)])], {10: (train, "main")}, hostfiles=region(train, 10))])
    (row,) = reports[0].containers
    assert (row.memory_used_bytes, row.hami_core) == (5 * GIB, CoreCount(memory_used_bytes=3 * GIB, memory_limit_bytes=4 * GIB))


def test_a_region_tightens_a_limit_until_it_says_otherwise_and_never_loosens_one():
    train = hami_pod("train")
    running = ([train], [gpu(processes=[(10, GIB)])], {10: (train, "main")})
    reports, memory = play(
        [
            snapshot(*running, at=0.0, hostfiles=region(train, 10)),
            snapshot(*running, at=5.0, hostfiles=None),
            snapshot([train], [gpu()], at=10.0, hostfiles=region(train, 10)),
            snapshot(*running, at=15.0, hostfiles=region(train, 10, limit=64 * GIB)),
        ]
    )
    assert [limit_of(report, "train") for report in reports] == [4 * GIB, 4 * GIB, 4 * GIB, 8 * GIB]
    assert build(snapshot([], [gpu()], at=20.0), memory, RULES)[1].region_limits == {}


def test_a_region_gives_no_gpu():
    taker = pod("taker")
    running = ([taker], [gpu(processes=[(10, GIB)])], {10: (taker, "main")})
    reports, _ = play(ticks(*running, count=4, hostfiles=region(taker, 10), devices=[(pod("else"), [GPU_1])]))
    assert limit_of(reports[-1], "taker") == 4 * GIB
    assert flag(reports[-1], "taker", Resource.UNALLOCATED) is True
    elsewhere = replace(region(taker, 10).regions[0].region, gpu_uuids=(GPU_1,))
    named = HostfilesReading(regions=(FoundRegion(elsewhere, frozenset({(taker.uid, "main")})),))
    reports, _ = play(ticks(*running, count=2, hostfiles=named))
    assert {row.gpu_uuid for row in reports[-1].pods} == {GPU_0}


def test_where_a_gpus_processes_are_unknown_nothing_is_said_of_the_regions():
    train = hami_pod("train")
    world = ([train], [gpu(GPU_0, up=False), gpu(GPU_1, [(10, 5)])], {10: (train, "main")})
    reports, _ = play([snapshot(*world, hostfiles=region(train, 10))])
    assert {row.hami_core for row in reports[0].containers} == {NOT_COUNTED}
    reports, _ = play([snapshot(*world, hostfiles=region(train, 10), procfs=None)])
    assert {row.hami_core for row in reports[0].containers} == {NOT_COUNTED}


def test_unreadable_files_are_counted_by_every_reason_and_not_at_all_where_none_are_read():
    torn = HostfilesReading(unreadable={UnreadableFile.UNKNOWN_LAYOUT: 2})
    reports, _ = play([snapshot([], [], hostfiles=torn), snapshot([], [])])
    assert reports[0].hostfiles_unreadable == {reason: 2 if reason == "unknown_layout" else 0 for reason in UnreadableFile}
    assert reports[1].hostfiles_unreadable is None


@st.composite
def nodes(draw):
    """A node with some GPUs, pods of several kinds, and processes of anyone on any GPU."""
    pods = [RESERVATION]
    devices = []
    for number in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["kai", "whole", "none", "ended"]))
        containers = draw(st.sampled_from([("main",), ("main", "side")]))
        if kind == "kai":
            pods.append(kai_pod(f"pod-{number}", fraction=draw(st.sampled_from(["0.1", "0.5", "x"])), containers=containers))
        else:
            phase = PodPhase.FAILED if kind == "ended" else PodPhase.RUNNING
            pods.append(pod(f"pod-{number}", containers=containers, phase=phase))
            if kind == "whole":
                devices.append((pods[-1], [draw(st.sampled_from([GPU_0, GPU_1]))]))
    owners = {
        pid: (owner, draw(st.sampled_from([container.name for container in owner.containers])))
        for pid in range(10, 20)
        if (owner := draw(st.none() | st.sampled_from(pods))) is not None
    }
    memory = st.none() | st.integers(0, 200 * GIB)
    gpus = [
        gpu(uuid, draw(st.dictionaries(st.integers(10, 22), memory, max_size=8)).items(), up=draw(st.sampled_from([True, True, False])))
        for uuid in (GPU_0, GPU_1)
    ]
    return pods, gpus, owners, devices


@settings(max_examples=150, deadline=None)
@given(st.lists(nodes(), min_size=1, max_size=4))
def test_on_every_gpu_containers_and_unattributed_add_up_to_the_processes(worlds):
    memory = NOTHING_REMEMBERED
    for number, (pods, gpus, owners, devices) in enumerate(worlds):
        report, memory = build(snapshot(pods, gpus, owners, at=5.0 * number, devices=devices), memory, RULES)
        for reading in gpus:
            uuid = reading.gpu.gpu_uuid
            row = next(row for row in report.gpus if row.gpu.gpu_uuid == uuid)
            if not reading.up:
                assert row.unattributed_bytes is None
                assert all(each.memory_used_bytes is None for each in report.containers if each.gpu_uuid == uuid)
                continue
            of_containers = sum(each.memory_used_bytes or 0 for each in report.containers if each.gpu_uuid == uuid)
            of_processes = sum(process.memory_used_bytes or 0 for process in reading.processes)
            assert of_containers + sum(row.unattributed_bytes.values()) == of_processes


@settings(max_examples=60, deadline=None)
@given(nodes(), st.integers(0, 1 << 30))
def test_the_order_of_lists_changes_nothing(world, seed):
    pods, gpus, owners, devices = world
    shuffle = random.Random(seed)  # noqa: S311 - a shuffle that hypothesis can repeat

    def shuffled(items):
        return shuffle.sample(list(items), len(items))

    mixed = [replace(each, processes=tuple(shuffled(each.processes)) if each.processes else each.processes) for each in shuffled(gpus)]
    one = build(snapshot(pods, gpus, owners, devices=devices), NOTHING_REMEMBERED, RULES)
    other = build(snapshot(shuffled(pods), mixed, owners, devices=shuffled(devices)), NOTHING_REMEMBERED, RULES)
    assert one[0] == replace(other[0], gpus=one[0].gpus)
    assert [row.memory_allocated_bytes for row in one[0].gpus] == [row.memory_allocated_bytes for row in other[0].gpus]


# --- grants are kept ---


def grants_of(*snapshots):
    return [report.evidence.grants for report in play(snapshots)[0]]


def test_a_grant_is_made_once_while_nothing_that_it_follows_from_changes():
    half, other = kai_pod("half"), kai_pod("other", fraction="0.25")
    same = ticks([half, other, RESERVATION], [gpu(processes=[(10, GIB)])], {10: (half, "main")}, count=4)
    first, second, third, fourth = grants_of(*same)
    # The first one pins the author's words, which the second is held to.
    assert second[half.uid] is not first[half.uid]
    assert all(fourth[uid] is third[uid] is second[uid] for uid in (half.uid, other.uid, RESERVATION.uid))


def test_a_pod_that_changes_is_granted_anew():
    half = kai_pod("half")
    before = ticks([half, RESERVATION], [gpu()], {}, count=3)
    edited = replace(half, annotations={"gpu-fraction": "0.25"})
    grants = grants_of(*before, snapshot([edited, RESERVATION], [gpu()], at=15.0))
    assert {claim.compute_ratio for claim in grants[-2][half.uid].claims} == {0.5}
    assert {claim.compute_ratio for claim in grants[-1][half.uid].claims} == {0.25}


def test_a_node_that_changes_grants_everyone_anew():
    half = kai_pod("half")
    before = ticks([half, RESERVATION], [gpu()], {}, count=3)
    smaller = KubernetesReading(
        pods={each.uid: each for each in (half, RESERVATION)}, node=NodeFacts(name="n", labels={"nvidia.com/gpu.memory": "40000"})
    )
    grants = grants_of(*before, snapshot([half, RESERVATION], [gpu()], at=15.0, kubernetes=smaller))
    assert [claim.memory_bytes for claim in grants[-1][half.uid].claims] == [20000 * MIB]


def test_a_pod_that_begins_to_use_another_gpu_is_granted_anew_and_its_neighbours_are_not():
    limited = pod("limited", containers=("main",))
    limited = replace(limited, containers=(replace(limited.containers[0], env=(EnvVar(name="CUDA_DEVICE_MEMORY_LIMIT", value="1024m"),)),))
    half = kai_pod("half")
    before = ticks([half, limited, RESERVATION], [gpu(), gpu(GPU_1)], {}, count=3)
    on_gpu = snapshot([half, limited, RESERVATION], [gpu(), gpu(GPU_1, [(20, GIB)])], {20: (limited, "main")}, at=15.0)
    grants = grants_of(*before, on_gpu)
    assert not grants[-2][limited.uid].claims
    assert [(claim.gpu_uuid, claim.memory_bytes) for claim in grants[-1][limited.uid].claims] == [(GPU_1, 1024 * MIB)]
    assert grants[-1][half.uid] is grants[-2][half.uid]


def test_device_ids_that_were_believed_stay_believed_through_reports_that_make_no_grant_anew():
    slot = pod("slot")
    devices = [(slot, [GPU_0])]
    before = ticks([slot], [gpu()], {}, count=4, devices=devices)
    edited = replace(slot, annotations={"hami.io/vgpu-node": "n", "hami.io/vgpu-devices-allocated": "x"})
    grants = grants_of(*before, snapshot([edited], [gpu()], at=20.0, devices=devices))
    assert {allocation.gpu_uuid for allocation in grants[-1][slot.uid].allocations} == {GPU_0}


def test_the_daemon_of_mps_is_plumbing_in_the_namespaces_that_the_operator_named():
    daemon = pod("mps-daemon", containers=("mps-control-daemon-ctr",), namespace="kube-system")
    lookalike = pod("look-alike", containers=("mps-control-daemon-ctr",), namespace="team-a")
    grants = grants_of(snapshot([daemon, lookalike], [gpu()]))[0]
    assert (grants[daemon.uid].plumbing, grants[lookalike.uid].plumbing) == (True, False)


def test_a_pod_that_was_handed_a_whole_gpu_and_uses_nothing_of_it_uses_0_there():
    whole = pod("whole", annotations={"volcano.sh/gpu-index": "1"})
    whole = replace(whole, containers=(replace(whole.containers[0], resource_limits={"volcano.sh/gpu-number": "1"}),))

    def listed(uuid, minor):
        reading = gpu(uuid)
        return replace(reading, gpu=replace(reading.gpu, minor=minor))

    report = play([snapshot([whole], [listed(GPU_0, 0), listed(GPU_1, 1)])])[0][0]
    assert [(row.gpu_uuid, row.memory_used_bytes) for row in report.pods] == [(GPU_1, 0)]
    assert report.containers == ()


def test_while_the_pods_are_not_known_what_was_given_is_not_known_and_not_0():
    row = play([snapshot([], [gpu(processes=[(10, GIB)])], kubernetes=None, kubernetes_is_current=False)])[0][0].gpus[0]
    assert (row.memory_allocated_bytes, row.compute_allocated_ratio, row.pods) == (None, None, None)
    row = play([snapshot([], [gpu()])])[0][0].gpus[0]
    assert (row.memory_allocated_bytes, row.compute_allocated_ratio, row.pods) == (0, 0.0, 0)
