"""Explanations of literal moments: each kind of breach, each unknown and each reason, and who is asked about."""

from dataclasses import replace

import pytest

from exporter.claims.claim import Claim, Derivation, Phrase, Scope
from exporter.explain import words
from exporter.explain.answer import NoReportError, explain_gpu, explain_pod
from exporter.explain.target import NotFoundError
from exporter.health import Health, SourceHealth
from exporter.node_json import About, render_json
from exporter.report import NOTHING_REMEMBERED, Rules, build
from exporter.series_limit import cut_to_size
from exporter.snapshot import (
    CgroupRef,
    Container,
    ContainerAllocation,
    ContainerState,
    Devices,
    EnvVar,
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

MIB, GIB = 1 << 20, 1 << 30
GPU = "GPU-00000000-0000-0000-0000-000000000000"
MIG = "MIG-11111111-1111-1111-1111-111111111111"
MAIN, SIDE = "a" * 64, "b" * 64
NOON = 1_764_590_400.0  # 2025-12-01 12:00:00 UTC
ABOUT = About(node="worker-1", simulated=False, sample_interval_seconds=5.0, utilization_window_seconds=15.0, compute_window_seconds=60.0)
HEALTHY = Health(sources=tuple(SourceHealth(source=name, up=True) for name in ("nvml", "procfs", "kubelet", "kubernetes")))
TRAIN = Pod(
    uid="uid-train",
    namespace="team-a",
    name="train",
    phase=PodPhase.RUNNING,
    annotations={"hami.io/vgpu-devices-allocated": f"{GPU},NVIDIA,10240,50:;"},
    containers=(Container(name="main", container_id=MAIN, state=ContainerState.RUNNING),),
)
PLAIN = replace(TRAIN, uid="uid-plain", name="plain", annotations={}, containers=(replace(TRAIN.containers[0], container_id=SIDE),))
IN_MAIN = (CgroupRef(TRAIN.uid, MAIN),)
IN_SIDE = (CgroupRef(PLAIN.uid, SIDE),)


def moment(at=0.0, *, processes=(), cgroups=None, busy=None, pods=(TRAIN, PLAIN), **more):
    """A snapshot; processes are (pid, bytes), cgroups PID -> cgroup, with those in no entry gone; busy is PID -> SM seconds."""
    reading = GpuReading(
        gpu=Gpu(gpu_uuid=GPU, memory_total_bytes=80 * GIB),
        up=True,
        memory_used_bytes=sum(used or 0 for _, used in processes) + 500 * MIB,
        processes=tuple(GpuProcess(pid=pid, memory_used_bytes=used) for pid, used in processes),
        busy=None if busy is None else tuple(busy_of(pid, seconds) for pid, seconds in busy.items()),
    )
    facts = {
        pid: ProcessFacts(pid=pid, start_time_ticks=1, comm="python", cgroup=cgroup)
        for pid, cgroup in ({pid: IN_MAIN for pid, _ in processes} if cgroups is None else cgroups).items()
    }
    whole = {
        "nvml": NvmlReading(driver_version="575.1", gpus=(reading,)),
        "procfs": ProcfsReading(own_pid=99, processes=facts),
        "kubelet": KubeletReading(pods=(), allocatable=()),
        "kubelet_is_current": True,
        "kubernetes": KubernetesReading(pods={pod.uid: pod for pod in pods}, node=NodeFacts(name="worker-1")),
        "kubernetes_is_current": True,
    }
    return Snapshot(time_seconds=NOON + at, monotonic_seconds=at, **(whole | more))


def busy_of(pid, seconds):
    return ProcessBusy(pid=pid, sm_seconds=seconds, memory_bandwidth_seconds=0.0, encoder_seconds=0.0, decoder_seconds=0.0)


def report_of(*moments, rules=None):
    memory = NOTHING_REMEMBERED
    for each in moments:
        report, memory = build(each, memory, rules or Rules())
    return report


def answer(health, report, query):
    kind, _, name = query.partition("=")
    return {"pod": explain_pod, "gpu": explain_gpu}[kind](ABOUT, health, report, name)


def explain(report, query="pod=team-a/train", health=HEALTHY):
    explanation = answer(health, report, query)
    render_json(explanation)
    return explanation


def summary(*moments, query="pod=team-a/train", health=HEALTHY):
    return explain(report_of(*moments), query, health)["summary"]


def sentences(explanation, title):
    return next((section["sentences"] for section in explanation["sections"] if section["title"].startswith(title)), [])


def down(source, reason):
    return Health(sources=tuple(replace(each, up=False, reason=reason) if each.source == source else each for each in HEALTHY.sources))


# --- breaches ---


def test_a_pod_over_its_memory_limit():
    above = [moment(at, processes=[(7, 12 * GIB)]) for at in (0.0, 5.0, 10.0)]
    assert (
        summary(*above)
        == f"team-a/train is over its memory limit on {GPU}: it uses 12.0 GiB of 10.0 GiB since 2025-12-01 12:00:00 UTC (10 s)."
    )


def test_a_pod_that_is_above_for_less_than_the_hold():
    above = [moment(at, processes=[(7, 12 * GIB)]) for at in (0.0, 5.0)]
    assert summary(*above) == (
        f"team-a/train is above its memory limit on {GPU}: it uses 12.0 GiB of 10.0 GiB since 2025-12-01 12:00:00 UTC (5 s); "
        "it counts as over after 10 s."
    )


def test_a_breach_that_is_about_to_end():
    looks = [moment(at, processes=[(7, 12 * GIB)]) for at in (0.0, 10.0)] + [moment(at, processes=[(7, 4 * GIB)]) for at in (15.0, 20.0)]
    assert summary(*looks) == (
        f"team-a/train is over its memory limit on {GPU}: now it uses 4.0 GiB of 10.0 GiB, and it was above since 2025-12-01 12:00:00 UTC "
        "(20 s); it has been below for 5 s of the 10 s that end a breach."
    )


def test_a_breach_that_is_frozen_by_hidden_memory():
    looks = [moment(at, processes=[(7, 12 * GIB)]) for at in (0.0, 10.0)] + [moment(15.0, processes=[(7, None)])]
    assert summary(*looks) == (
        f"team-a/train was over its memory limit on {GPU} since 2025-12-01 12:00:00 UTC (15 s); whether that goes on cannot be known: "
        "the driver hides the memory of a process."
    )


def test_numbers_that_look_alike_are_told_apart():
    above = [moment(at, processes=[(7, 10 * GIB + 1)]) for at in (0.0, 10.0)]
    assert "it uses 10737418241 of 10737418240 bytes since" in summary(*above)


def test_a_container_over_its_own_limit_in_a_pod_that_is_not():
    two = replace(
        TRAIN,
        annotations={"hami.io/vgpu-devices-allocated": f"{GPU},NVIDIA,10240,0:;{GPU},NVIDIA,20480,0:;"},
        containers=(*TRAIN.containers, Container(name="side", container_id=SIDE, state=ContainerState.RUNNING)),
    )
    above = [moment(at, processes=[(7, 12 * GIB)], pods=(two,)) for at in (0.0, 10.0)]
    assert "over its memory limit" in summary(*above)
    assert ": its container main uses 12.0 GiB of 10.0 GiB since" in summary(*above)


def test_a_process_over_what_each_may_have():
    labels = {"nvidia.com/gpu.sharing-strategy": "mps", "nvidia.com/gpu.replicas": "4"}
    ids = tuple(f"{GPU}::{number}" for number in (0, 1))
    more = {
        "kubelet": KubeletReading(
            pods=(PodAllocation("team-a", "plain", (ContainerAllocation("main", (Devices("nvidia.com/gpu", ids),)),)),), allocatable=()
        ),
        "kubernetes": KubernetesReading(pods={PLAIN.uid: PLAIN}, node=NodeFacts(name="worker-1", labels=labels)),
    }
    above = [moment(at, processes=[(7, 25 * GIB), (8, GIB)], cgroups={7: IN_SIDE, 8: IN_SIDE}, **more) for at in (0.0, 10.0)]
    explanation = explain(report_of(*above), "pod=plain")
    assert (
        f"is over its memory limit on {GPU}: its process 7 (python) uses 25.0 GiB of 20.0 GiB, "
        "which each process of container main may have, since"
    ) in explanation["summary"]
    assert explanation["pod"]["gpus"][0]["limits"][0]["above"] == [
        {"scope": "process", "container": "main", "pid": 7, "used": 25 * GIB, "limit": 20 * GIB}
    ]


def test_a_pod_over_its_compute_limit():
    looks = [moment(at, processes=[(7, GIB)], busy={7: 4.0}) for at in range(0, 65, 5)]
    assert (
        f"team-a/train is over its compute limit on {GPU}: its kernels ran in 80 % of the time over the last 60 s, and may in 50 %, since"
    ) in summary(*looks)


def test_a_pod_that_uses_a_gpu_which_no_one_gave_it():
    looks = [moment(at, processes=[(7, 3 * GIB), (8, GIB)], cgroups={7: IN_SIDE, 8: IN_SIDE}) for at in (0.0, 10.0)]
    explanation = explain(report_of(*looks), "pod=team-a/plain")
    assert explanation["summary"] == (
        f"team-a/plain uses {GPU}, which no one gave it (unallocated): 2 processes of it hold 4.0 GiB there, "
        "since 2025-12-01 12:00:00 UTC (10 s)."
    )
    assert "No one gave it this GPU" in sentences(explanation, "Given")[0]
    assert summary(*looks[:1], query="pod=plain").endswith("it is flagged after 10 s.")


def test_a_pod_in_two_breaches_has_both_in_the_first_sentence():
    looks = [moment(at, processes=[(7, 12 * GIB)], busy={7: 4.0}) for at in range(0, 65, 5)]
    assert "over its memory limit" in summary(*looks)
    assert "; it is over its compute limit" in summary(*looks)


# --- contracts ---


def test_a_contract_that_cannot_be_read():
    broken = replace(TRAIN, annotations={"hami.io/vgpu-devices-allocated": f"{GPU},NVIDIA,lots,50:;"})
    told = summary(moment(pods=(broken,)))
    assert told.startswith("team-a/train has a hami contract that cannot be read: hami.io/vgpu-devices-allocated: memory: 'lots' is no")


def test_a_contract_that_names_no_gpu_yet():
    waiting = replace(TRAIN, annotations={"gpu-fraction": "0.5"}, labels={"runai-gpu-group": "g"})
    assert summary(moment(pods=(waiting,))) == "team-a/train waits for its GPU: its contract can be read and names no GPU yet."


def test_a_pod_within_its_limit():
    assert summary(moment(processes=[(7, 4 * GIB)])) == f"team-a/train is within its memory limit on {GPU}: it uses 4.0 GiB of 10.0 GiB."


def test_a_pod_that_was_handed_a_gpu_without_an_amount():
    given = PodAllocation("team-a", "plain", (ContainerAllocation("main", (Devices("nvidia.com/gpu", (f"{GPU}::0",)),)),))
    told = explain(report_of(moment(kubelet=KubeletReading(pods=(given,), allocatable=()))), "pod=plain")
    assert told["summary"] == f"team-a/plain has no limit on {GPU}: it uses 0 bytes, and it was handed the GPU without an amount."
    assert sentences(told, "Given") == [
        (
            f"Container main was handed this GPU, by the kubelet's device id '{GPU}::0', and no amount goes with it: "
            "not known, because neither the kubelet nor a label of the node tells into how many shares the GPU is cut."
        ),
    ]


def test_the_arithmetic_of_a_claim_is_shown():
    told = explain(report_of(moment(processes=[(7, 4 * GIB)])))
    assert sentences(told, "Given") == [
        (
            "hami grants container main 10.0 GiB of memory and 50 % of compute (something on the node enforces it), read from: "
            f"annotation hami.io/vgpu-devices-allocated, entry of container 'main' for GPU '{GPU}'."
        ),
        "10.0 GiB of memory = 10240 MiB (the third field).",
        "50 % of compute = 50 / 100 (the fourth field, percent).",
    ]
    assert sentences(told, "Use") == [
        "Container main uses 4.0 GiB, which is the memory of its one process there.",
        (
            f"PID 7 (python) holds 4.0 GiB, by NVML's compute list; its cgroup names container {MAIN[:12]} of pod uid-train, "
            "which is container main of team-a/train."
        ),
    ]


def test_a_claim_whose_place_another_takes_is_told_as_such():
    annotations = {"gpu-fraction": "0.5"}
    env = (EnvVar(name="CUDA_DEVICE_MEMORY_LIMIT", config_map_key="limit"),)
    container = replace(TRAIN.containers[0], env=env, volume_mounts=("/etc/ld.so.preload", "/usr/local/vgpu"))
    half = replace(TRAIN, annotations=annotations, labels={"runai-gpu-group": "g"}, containers=(container,))
    reservation = Pod(
        uid="uid-r",
        namespace="kai-resource-reservation",
        name="r",
        labels={"runai-gpu-group": "g"},
        annotations={"run.ai/reserve_for_gpu_index": GPU},
    )
    node = NodeFacts(name="worker-1", labels={"nvidia.com/gpu.memory": "81559"})
    pods = {half.uid: half, reservation.uid: reservation}
    told = explain(report_of(moment(kubernetes=KubernetesReading(pods=pods, node=node))))
    assert sentences(told, "Limits")[:3] == [
        "The memory limit of container main is 39.8 GiB: hami_core's claim.",
        "The compute limit of container main is 50 %: kai's claim.",
        "kai's claim of memory does not count there: hami_core's takes its place.",
    ]
    assert "Reservation pod kai-resource-reservation/r stands for group 'g', and tells that it holds this GPU." in sentences(told, "Given")
    by_system = {claim["system"]: claim for claim in told["pod"]["gpus"][0]["claims"]}
    assert by_system["hami_core"]["memory_rule"].startswith("floor(81559 x 0.5) MiB (")
    assert by_system["kai"]["memory_rule"].startswith("floor(0.5 x 81500) MiB (")
    assert (by_system["hami_core"]["is_memory_limit"], by_system["kai"]["is_memory_limit"]) == (True, False)


def test_the_tightest_of_several_claims_is_told():
    env = (EnvVar(name="GPU_MEMORY_LIMIT", value=str(8 * GIB)),)
    limited = replace(TRAIN, containers=(replace(TRAIN.containers[0], env=env),))
    told = explain(report_of(moment(processes=[(7, 4 * GIB)], pods=(limited,))))
    assert told["summary"].endswith("it uses 4.0 GiB of 8.0 GiB.")
    assert "The memory limit of container main is 8.0 GiB: the tightest of 2 claims, container_env's." in sentences(told, "Limits")
    assert "8.0 GiB of memory = 8589934592 bytes (GPU_MEMORY_LIMIT)." in sentences(told, "Given")


def test_what_an_author_wrote_is_quoted_and_cut_in_a_phrase():
    assert str(Phrase("annotation {}: {}", ("x" * 100, "{0}\n\x1b"))) == f"annotation '{'x' * 80}'...: '{{0}}\\n\\x1b'"
    derivation = Derivation(contract=Phrase("{} {} {}", (0.57, 81559.0, 1 << 60)))
    assert str(derivation.contract) == "0.57 81559 1152921504606846976"


def test_claims_that_were_read_from_different_places_are_equal():
    claim = Claim(system="kai", gpu_uuid=GPU, container="main", scope=Scope.CONTAINER, enforced=False)
    assert replace(claim, derivation=Derivation(contract=Phrase("an annotation"))) == claim


# --- what is not known ---


@pytest.mark.parametrize(
    ("more", "health", "why"),
    [
        ({"nvml": None}, down("nvml", "the driver is not loaded."), "the driver cannot be read (the driver is not loaded)"),
        ({"procfs": None}, down("procfs", "no hostPID"), "without the host's /proc no process has an owner (no hostPID)"),
        ({"nvml": NvmlReading(driver_version=None, gpus=())}, HEALTHY, "the driver does not list this GPU"),
        (
            {"nvml": NvmlReading(driver_version=None, gpus=(GpuReading(gpu=Gpu(gpu_uuid=GPU), up=False),))},
            HEALTHY,
            "the driver answers with an error for this GPU, or not at all",
        ),
        (
            {"nvml": NvmlReading(driver_version=None, gpus=(GpuReading(gpu=Gpu(gpu_uuid=GPU), up=True),))},
            HEALTHY,
            "the driver's process lists of this GPU cannot be read or believed",
        ),
    ],
)
def test_use_that_is_not_known_is_told_with_the_cause(more, health, why):
    report = report_of(moment(**more))
    told = explain(report, health=health)
    assert told["summary"] == f"team-a/train is not judged by its memory limit on {GPU} now: {why}."
    assert f"What it uses of {GPU}: {why}." in sentences(told, "Not known")
    assert told["pod"]["gpus"][0]["memory_used_bytes"] is None
    assert answer(health, report, f"gpu={GPU}")["summary"] == f"Who uses {GPU} is not known: {why}."


def test_memory_that_the_driver_hides():
    told = explain(report_of(moment(processes=[(7, None), (8, GIB)])))
    assert told["summary"].endswith("now: the driver hides the memory of a process.")
    assert told["pod"]["gpus"][0]["use_unknown"] == "memory_hidden"
    assert [process["reason"] for process in told["pod"]["gpus"][0]["containers"][0]["processes"]] == ["partly_hidden"] * 2


def test_hidden_memory_leaves_open_how_much_is_used_and_not_whether_a_pod_has_a_right_to_the_gpu():
    waiting = replace(PLAIN, annotations={"gpu-fraction": "0.5"}, labels={"runai-gpu-group": "g"})
    told = explain(report_of(moment(processes=[(7, None)], cgroups={7: IN_SIDE}, pods=(waiting,))), "pod=plain")
    assert told["summary"] == (
        f"team-a/plain may have no right to {GPU}, which cannot be told now: there may be limits that are not known, "
        "because its contract names no GPU yet."
    )


def test_limits_that_may_be_missing_because_the_kubelet_was_never_read():
    told = explain(report_of(moment(processes=[(7, GIB)], kubelet=None, kubelet_is_current=False)), health=down("kubelet", "no socket"))
    why = "what the kubelet handed out is not known (no socket)"
    assert told["summary"] == (
        f"team-a/train is not judged by its memory limit on {GPU} now: there may be limits that are not known, because {why}."
    )
    assert told["pod"]["limits_unknown"] == ["kubelet_unknown"]
    assert f"Whether there are further limits: {why}." in sentences(told, "Not known")


def test_a_pod_that_is_newer_than_the_kubelets_last_word():
    told = summary(
        moment(processes=[(7, GIB)], cgroups={7: IN_SIDE}, kubelet_is_current=False), query="pod=plain", health=down("kubelet", "hangs")
    )
    assert (
        told == f"team-a/plain may have no right to {GPU}, which cannot be told now: the kubelet's last word is older than the pod (hangs)."
    )


def test_a_window_that_is_not_full_yet():
    looks = [moment(at, processes=[(7, GIB)], busy={7: 4.0}) for at in (0.0, 5.0, 10.0)]
    assert sentences(explain(report_of(*looks)), "Not known") == [
        f"Whether it is over its compute limit on {GPU}: compute is judged by the mean over 60 s, of which 10 s are known so far."
    ]


def test_busy_time_that_the_driver_does_not_tell_of_mig_devices():
    mig = GpuReading(gpu=Gpu(gpu_uuid=MIG, parent_gpu_uuid=GPU, memory_total_bytes=10 * GIB), up=True, processes=())
    given = PodAllocation("team-a", "plain", (ContainerAllocation("main", (Devices("nvidia.com/mig-1g.10gb", (MIG,)),)),))
    told = explain(
        report_of(moment(nvml=NvmlReading(driver_version=None, gpus=(mig,)), kubelet=KubeletReading(pods=(given,), allocatable=()))),
        "pod=plain",
    )
    assert told["summary"] == f"team-a/plain is within its memory limit on {MIG}: it uses 0 bytes of 10.0 GiB."
    why = "the driver tells no busy time of processes on MIG devices"
    assert sentences(told, "Not known") == [f"Whether it is over its compute limit on {MIG}: {why}."]


def test_a_pod_without_a_gpu_and_what_of_that_is_not_known():
    assert summary(moment(), query="pod=plain") == (
        "team-a/plain has nothing to do with a GPU: no sharing system claims anything for it, and the driver lists no process of it."
    )
    assert summary(moment(nvml=None), query="pod=plain", health=down("nvml", "gone")) == (
        "team-a/plain has nothing to do with a GPU as far as is known; what is not known: the driver cannot be read (gone)."
    )


def test_a_pod_that_has_ended_and_left_a_process():
    ended = replace(PLAIN, phase=PodPhase.SUCCEEDED)
    assert summary(moment(processes=[(7, GIB)], cgroups={7: IN_SIDE}, pods=(ended,)), query="pod=plain") == (
        f"team-a/plain has ended (Succeeded), so it holds no claim and is not flagged; processes of it still hold 1.0 GiB on {GPU}."
    )


def test_a_pod_that_is_left_out_for_its_series():
    report = cut_to_size(report_of(moment(processes=[(7, GIB)])), 1)
    told = explain(report)
    assert told["summary"] == (
        "team-a/train is left out of the metrics, with all of its series, because there would be more than --max-series."
    )
    assert told["pod"]["left_out"]
    assert told["pod"]["gpus"][0]["containers"][0]["processes"][0]["pid"] == 7


# --- GPUs ---


def test_each_reason_for_which_memory_has_no_container_is_told_with_its_cause():
    lost = (CgroupRef("uid-of-no-pod", "c" * 64),)
    other = (CgroupRef(TRAIN.uid, "d" * 64),)
    cgroups = {1: (), 3: lost, 4: other, 99: (), 7: IN_MAIN, 8: IN_SIDE, 9: IN_SIDE}
    processes = [(1, GIB), (2, GIB), (3, 2 * GIB), (4, GIB), (99, 3 * MIB), (7, 4 * GIB), (8, None), (9, 5 * GIB)]
    told = explain(report_of(moment(processes=processes, cgroups=cgroups)), f"gpu={GPU}")
    assert told["summary"] == (
        f"On {GPU} 8 processes hold at least 14.0 GiB: 4.0 GiB by 1 pod, an amount that the driver hides by 1 pod, 1.0 GiB by processes "
        "of the host, whose cgroup names no pod (host_process), 1.0 GiB by processes that had ended when /proc was read (process_gone), "
        "3.0 GiB by processes of pods or containers that are not known here (yet) (unknown_container), "
        "3.0 MiB by this exporter itself (exporter) and "
        "5.0 GiB by processes of containers of which the driver hides another process (partly_hidden)."
    )
    ownerless = "\n".join(sentences(told, "In no container"))
    for cause in (
        "PID 1 (python) holds 1.0 GiB, by NVML's compute list; its cgroup names no pod, so it is a process of the host (host_process).",
        "PID 2 holds 1.0 GiB, by NVML's compute list; it had ended when /proc was read, so whose it was cannot be proven (process_gone).",
        "of pod uid-of-no-pod, and no pod of that UID with such a container is known on this node (yet) (unknown_container).",
        "of pod uid-train, and the status of pod team-a/train names no such container (yet) (unknown_container).",
        "it is this exporter itself (exporter).",
        "it is counted as partly_hidden, because the driver hides the memory of another process of that container.",
    ):
        assert cause in ownerless
    assert "The memory of PID 8, which the driver hides." in sentences(told, "Not known")
    assert sentences(told, "As the driver counts")[1].startswith("That is 500.0 MiB more than its process lists tell")
    assert told["gpu"]["processes_memory_bytes"] == sum(used or 0 for _, used in processes)


def test_an_mps_server_is_told():
    facts = {7: ProcessFacts(pid=7, start_time_ticks=1, comm="nvidia-cuda-mps", cgroup=())}
    told = explain(report_of(moment(processes=[(7, GIB)], procfs=ProcfsReading(own_pid=99, processes=facts))), f"gpu={GPU}")
    assert told["summary"].endswith("1.0 GiB by the MPS server, which works for its clients (mps_server).")


def test_limits_that_are_together_more_than_the_gpu_are_told():
    greedy = replace(TRAIN, annotations={"hami.io/vgpu-devices-allocated": f"{GPU},NVIDIA,102400,50:;"})
    told = explain(report_of(moment(pods=(greedy,))), f"gpu={GPU.lower()}")
    assert told["summary"] == f"No process uses {GPU}."
    assert sentences(told, "Given")[-1] == "Together the limits are 100.0 GiB of the GPU's 80.0 GiB, which is more than there is."


# --- who is asked about ---


def refused(query, report=None):
    with pytest.raises(NotFoundError) as caught:
        answer(HEALTHY, report or report_of(moment()), query)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pod_that_is_not_here_is_told_with_the_names_nearest_to_it():
    known = "node worker-1 has 2 pods, 1 of them with GPUs"
    assert refused("pod=team-a/trian") == f"no pod 'team-a/trian' is known here: {known}; did you mean team-a/train, team-a/plain?"
    assert refused("pod=team-b/train") == f"no pod 'team-b/train' is known here: {known}; did you mean team-a/train, team-a/plain?"
    assert refused("pod=zzz/qqq") == f"no pod 'zzz/qqq' is known here: {known}; is it on another node?"


def test_a_name_that_two_namespaces_have_is_asked_back():
    other = replace(PLAIN, uid="uid-2", namespace="team-b", name="train")
    report = report_of(moment(pods=(TRAIN, other)))
    assert refused("pod=train", report) == "2 pods of node worker-1 are called 'train': name one as team-a/train, team-b/train"
    assert explain(report, "pod=team-b/train")["pod"]["pod_uid"] == "uid-2"


def test_of_two_pods_of_one_name_the_one_that_has_not_ended_is_explained():
    old = replace(TRAIN, uid="uid-old", phase=PodPhase.FAILED)
    assert explain(report_of(moment(pods=(old, TRAIN))))["pod"]["pod_uid"] == "uid-train"


def test_a_gpu_that_is_not_here_is_told():
    assert refused("gpu=GPU-1") == f"no GPU 'GPU-1' is known here: node worker-1 has 1; did you mean {GPU}?"
    assert "no GPU of node worker-1 is known now" in refused("gpu=GPU-1", report_of(moment(nvml=None, pods=())))


def test_pods_that_were_never_read_are_told():
    text = refused("pod=team-a/train", report_of(moment(kubernetes=None, kubernetes_is_current=False)))
    assert text == "no pod of node worker-1 is known yet: the pods were not read, or too long ago"


@pytest.mark.parametrize("name", ["\0\n\x1b[2J", "<script>", "\udcff", "\u202e", "a" * 5000, "../../etc", "{0}", "'\"", "/", "a/b/c"])
def test_a_hostile_name_is_no_pod_and_cannot_break_the_sentence(name):
    for kind in ("pod", "gpu"):
        text = refused(f"{kind}={name}")
        assert text.isprintable()
        assert len(text) < 400


def test_many_pods_with_long_names_that_are_alike_cost_little():
    pods = tuple(replace(PLAIN, uid=f"uid-{number}", name="x" * 240 + str(number)) for number in range(300))
    assert "no pod" in refused("pod=team-a/" + "x" * 239 + "y", report_of(moment(pods=pods)))


def test_without_a_report_it_is_told_what_is_down():
    with pytest.raises(NoReportError) as caught:
        answer(down("nvml", "not loaded"), None, "pod=a/b")
    assert "no report that can be believed now (nvml: not loaded)" in str(caught.value)


# --- words ---


@pytest.mark.parametrize(
    ("amount", "said"),
    [(0, "0 bytes"), (1, "1 bytes"), (2048, "2.0 KiB"), (512 * MIB, "512.0 MiB"), (45 * GIB + 200 * MIB, "45.2 GiB")],
)
def test_an_amount_of_memory_is_told_in_its_unit(amount, said):
    assert words.memory(amount) == said


def test_lists_times_and_spans_are_told_as_people_do():
    assert [words.join(list("abc"[:length])) for length in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert words.moment(NOON) == "2025-12-01 12:00:00 UTC"
    assert [words.span(seconds) for seconds in (-1, 5, 119, 420, 18000, 300000)] == ["0 s", "5 s", "119 s", "7 min", "5 h", "3 days"]
    assert [words.share(ratio) for ratio in (0, 0.5, 1, 0.3333)] == ["0 %", "50 %", "100 %", "33.3 %"]


def test_what_the_driver_hides_is_an_amount_and_never_0():
    report = report_of(moment(processes=[(7, None), (1, None)], cgroups={7: IN_MAIN, 1: ()}))
    assert explain(report, f"gpu={GPU}")["summary"] == (
        f"On {GPU} 2 processes hold an amount that the driver hides: an amount that the driver hides by 1 pod and "
        "an amount that the driver hides by processes of the host, whose cgroup names no pod (host_process)."
    )


def test_a_share_is_never_told_as_none_that_is_some():
    assert (words.share(0.0001), words.share(0.5), words.share(0.0)) == ("0.01 %", "50 %", "0 %")


def test_the_beginning_of_a_uuid_is_enough_where_it_is_the_only_one():
    report = report_of(moment())
    assert explain(report, f"gpu={GPU[:8]}")["gpu"]["gpu_uuid"] == GPU


def test_a_pod_is_found_by_the_beginning_of_its_name_among_those_that_are_meant():
    with pytest.raises(NotFoundError, match=f"did you mean {TRAIN.namespace}/{TRAIN.name}"):
        explain(report_of(moment()), f"pod={TRAIN.name[:2]}")
