"""How many series a node may give, and who is left out when there would be more."""

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.breach import Breach, State, Verdict
from exporter.exposition import Exposition
from exporter.health import Health
from exporter.judge import Resource
from exporter.limits import ContainerLimits, PodLimits
from exporter.report import (
    ClaimErrorReport,
    ContainerReport,
    GpuReport,
    PodInfo,
    PodReport,
    Report,
    Rules,
)
from exporter.sampler import Sampler, Sources
from exporter.series_limit import cut_to_size
from exporter.snapshot import (
    Container,
    ContainerAllocation,
    Devices,
    Gpu,
    GpuReading,
    KubeletReading,
    KubernetesReading,
    NodeFacts,
    NvmlReading,
    Pod,
    PodAllocation,
    PodPhase,
    ProcfsReading,
)
from exporter.text_format import Format

GIB = 1 << 30
GPU = GpuReport(
    gpu=Gpu(gpu_uuid="GPU-0"),
    reading=GpuReading(gpu=Gpu(gpu_uuid="GPU-0"), up=True),
    memory_allocated_bytes=0,
    compute_allocated_ratio=0.0,
    pods=0,
    unattributed_bytes=None,
    processes_memory_hidden=None,
)
OF_GPU = 5  # gpu_up, gpu_info, gpu_memory_allocated_bytes, gpu_compute_allocated_ratio, gpu_pods
OF_NODE = 1  # pods_dropped
OF_CONTAINER = 3  # container_memory_used_bytes, container_processes, container_info
OF_POD = 2  # pod_memory_used_bytes, pod_info


def container(pod, name, used_bytes):
    return ContainerReport(
        namespace="team-a",
        pod=pod,
        container=name,
        gpu_uuid="GPU-0",
        pod_uid=pod,
        container_id=None,
        memory_used_bytes=used_bytes,
        memory_used_peak_bytes=None,
        processes=1,
        limits=ContainerLimits(),
        sm_utilization_ratio=None,
        sm_utilization_mean_ratio=None,
        busy_total=None,
        breaches={},
    )


def pod(name, used_bytes, **breaches):
    return PodReport(
        namespace="team-a",
        pod=name,
        gpu_uuid="GPU-0",
        pod_uid=name,
        memory_used_bytes=used_bytes,
        limits=PodLimits(),
        sm_utilization_ratio=None,
        sm_utilization_mean_ratio=None,
        sm_busy_seconds_total=None,
        breaches={Resource(resource): breach for resource, breach in breaches.items()},
    )


def info(name):
    return PodInfo(namespace="team-a", pod=name, pod_uid=name, queue="", owner_kind="", owner_name="", scheduler="", role="workload")


def report(*pods, containers=1, of=None):
    counts = {row.pod: (of or {}).get(row.pod, containers) for row in pods}
    return Report(
        time_seconds=1.0,
        monotonic_seconds=1.0,
        containers=tuple(container(row.pod, f"c{number}", row.memory_used_bytes) for row in pods for number in range(counts[row.pod])),
        pods=pods,
        pod_infos=tuple(info(row.pod) for row in pods),
        gpus=(GPU,),
    )


def shown(report):
    return [row.pod for row in report.pods]


def series(report):
    text = Exposition(report, Health(), {}).render(Format.TEXT, compressed=False).decode()
    own = ("fgpu_container_", "fgpu_pod", "fgpu_gpu", "fgpu_claim", "fgpu_kai", "fgpu_dropped")
    return [line for line in text.splitlines() if line.startswith(own)]


def test_a_report_that_fits_is_left_as_it_is():
    made = report(pod("a", 1), pod("b", 2))
    assert cut_to_size(made, 2 * (OF_CONTAINER + OF_POD) + OF_GPU + OF_NODE) is made


def test_one_series_too_many_costs_the_pod_that_uses_least_all_of_its_series():
    made = report(pod("a", 1 * GIB), pod("b", 3 * GIB), pod("c", 2 * GIB))
    cut = cut_to_size(made, 3 * (OF_CONTAINER + OF_POD) + OF_GPU + OF_NODE - 1)
    assert shown(cut) == ["b", "c"]
    assert {row.pod for row in (*cut.containers, *cut.pod_infos)} == {"b", "c"}
    assert (cut.pods_over_limit, cut.series_over_limit) == (1, OF_CONTAINER + OF_POD)
    assert [line for line in series(cut) if 'pod="a"' in line] == []


def test_the_exposition_says_what_was_left_out():
    cut = cut_to_size(report(pod("a", 1), pod("b", 2)), OF_CONTAINER + OF_POD + OF_GPU + OF_NODE)
    text = Exposition(cut, Health(), {}).render(Format.TEXT, compressed=False).decode()
    assert "fgpu_pods_dropped 1.0" in text
    assert f'fgpu_series_dropped{{reason="over_limit"}} {OF_CONTAINER + OF_POD}.0' in text


def test_gpus_stay_even_when_they_alone_are_too_many():
    cut = cut_to_size(report(pod("a", 1)), 1)
    assert shown(cut) == []
    assert cut.gpus == (GPU,)
    assert cut.pods_over_limit == 1


def test_a_pod_of_very_many_containers_does_not_drive_out_the_others():
    greedy = pod("greedy", 60 * GIB)
    others = [pod(f"other-{number}", GIB) for number in range(20)]
    cut = cut_to_size(report(greedy, *others, of={"greedy": 1000}), 1000)
    assert shown(cut) == [row.pod for row in others]


def test_gpus_that_only_contracts_name_go_with_their_pods():
    invented = [replace(GPU, reading=None, gpu=Gpu(gpu_uuid=f"GPU-{number}")) for number in range(1, 500)]
    liar = [replace(pod("liar", 0), gpu_uuid=row.gpu.gpu_uuid) for row in invented]
    made = replace(report(pod("honest", GIB)), gpus=(GPU, *invented))
    made = replace(made, pods=(*made.pods, *liar), pod_infos=(*made.pod_infos, info("liar")))
    cut = cut_to_size(made, 100)
    assert {row.pod for row in cut.pods} == {"honest"}
    assert cut.gpus == (GPU,)
    assert len(series(cut)) + cut.series_over_limit == len(series(made))


def test_a_pod_in_breach_is_the_last_to_go():
    exceeded = Breach(state=State.EXCEEDED, verdict=Verdict.ABOVE, since_seconds=1.0)
    made = report(pod("big", 9 * GIB), pod("small", 1, unallocated=exceeded))
    cut = cut_to_size(made, OF_GPU + OF_NODE + OF_CONTAINER + OF_POD + 4)
    assert shown(cut) == ["small"]


def test_unreadable_contracts_go_with_their_pod():
    error = ClaimErrorReport(namespace="team-a", pod="a", system="kai", errors=("x",))
    made = Report(time_seconds=1.0, monotonic_seconds=1.0, claim_errors=(error,), gpus=(GPU,))
    assert cut_to_size(made, OF_GPU + OF_NODE + 1).claim_errors == (error,)
    assert cut_to_size(made, OF_GPU + OF_NODE).claim_errors == ()


@given(
    st.lists(st.tuples(st.integers(0, 40), st.one_of(st.none(), st.integers(0, 80 * GIB))), max_size=12),
    st.integers(OF_GPU + OF_NODE, 400),
)
def test_there_are_never_more_series_than_the_limit_and_what_is_missing_is_counted(pods, max_series):
    made = report(
        *(pod(f"p{number}", used) for number, (_, used) in enumerate(pods)),
        of={f"p{number}": count for number, (count, _) in enumerate(pods)},
    )
    cut = cut_to_size(made, max_series)
    assert len(series(cut)) <= max_series
    assert len(series(cut)) + cut.series_over_limit == len(series(made))
    assert len(cut.pod_infos) + cut.pods_over_limit == len(made.pod_infos)


# --- in the running program ---


class Answers:
    """A source that always says the same, until it is told something else."""

    def __init__(self, answer):
        self.answer = answer

    def read(self, *_arguments):
        return self.answer

    def last_reading(self):
        return self.answer

    def pods_are_current(self):
        return True


class StandingClock:
    def time(self):
        return 1000.0

    def monotonic(self):
        return 0.0


def kubernetes(containers):
    made = Pod(
        uid="uid",
        namespace="team-a",
        name="many",
        phase=PodPhase.RUNNING,
        containers=tuple(Container(name=f"c{number}") for number in range(containers)),
    )
    return KubernetesReading(pods={"uid": made}, node=NodeFacts(name="n"))


@pytest.fixture
def sources():
    allocation = PodAllocation(
        "team-a",
        "many",
        tuple(ContainerAllocation(f"c{number}", (Devices("nvidia.com/gpu", ("GPU-0",)),)) for number in range(100)),
    )
    gpu = GpuReading(gpu=Gpu(gpu_uuid="GPU-0", memory_total_bytes=80 * GIB), up=True, processes=())
    return Sources(
        nvml=Answers(NvmlReading(driver_version="1", gpus=(gpu,))),
        procfs=Answers(ProcfsReading(own_pid=1, processes={})),
        kubelet=Answers(KubeletReading(pods=(allocation,), allocatable=())),
        kubernetes=Answers(kubernetes(100)),
    )


def test_a_change_is_logged_once_and_so_is_its_end(sources, caplog):
    caplog.set_level(logging.INFO, logger="exporter.sampler")
    sampler = Sampler(
        sources=sources,
        clock=StandingClock(),
        rules=Rules(max_series=100),
        sample_interval_seconds=5.0,
        identity_ttl_seconds=600.0,
        config_facts={},
    )

    def said():
        return [record.getMessage() for record in caplog.records if record.getMessage().startswith("series=")]

    sampler.sample()
    assert sampler.exposition.report.pods_over_limit == 1
    sampler.sample()
    assert len(said()) == 1
    assert said()[0].startswith("series=over_limit max_series=100 pods_left_out=1 series_left_out=")
    sources.kubernetes.answer = kubernetes(2)
    sampler.sample()
    sampler.sample()
    assert said()[1:] == ["series=within_limit max_series=100"]
    assert sampler.exposition.report.pods_over_limit == 0
