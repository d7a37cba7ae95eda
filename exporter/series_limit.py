"""How many series a node may give: whole pods are left out of a report that would exceed it. Pure.

A pod's author decides how many containers it has and, under some sharing systems, how many GPUs are named for it, so that one pod could
make thousands of series. Rather than drown the monitoring of the whole cluster, pods are then left out with all of their series, and the
report says how many. Those in breach are the last to go; of the others first those with the least memory in use for each of their series,
so that a pod gains nothing by having many. What is not about a pod (GPUs, groups, the exporter itself) always stays, and sums for a GPU
still count everyone. A GPU that the driver does not list is there because a pod's contract names it, and goes with its pods.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from exporter.judge import Resource
from exporter.metrics import (
    CLAIM,
    CLAIM_ERROR,
    CONTAINER,
    CONTAINER_LIMIT,
    GPU,
    NODE_METRICS,
    POD,
    POD_INFO,
    POD_LIMIT,
    UNATTRIBUTED,
)
from exporter.report import ClaimErrorReport, ClaimReport, ContainerReport, PodInfo, PodReport, Report
from exporter.snapshot import UnreadableFile
from exporter.usage import Unattributed

PodName = tuple[str, str]
"""Namespace and name."""

_Row = TypeVar("_Row", ContainerReport, PodReport, PodInfo, ClaimReport, ClaimErrorReport)

_POD_LABELS = ("namespace", "pod")
_GPU_LABELS = ("gpu_uuid",)


def cut_to_size(report: Report, max_series: int) -> Report:
    """Answer the report with no more series about the node than that, if need be without some of its pods."""
    if _most_series(report) <= max_series:
        return report
    counts = _count_series(report)
    if counts.total() <= max_series:
        return report
    sizes = _sizes(report, counts)
    room = max_series - counts.others
    kept = set()
    for pod in sorted(sizes, key=_rank(report, sizes)):
        if sizes[pod] <= room:
            kept.add(pod)
            room -= sizes[pod]

    def stay(rows: tuple[_Row, ...]) -> tuple[_Row, ...]:
        return tuple(row for row in rows if (row.namespace, row.pod) in kept)

    pods = stay(report.pods)
    held = {row.gpu_uuid for row in pods}
    cut = replace(
        report,
        containers=stay(report.containers),
        pods=pods,
        pod_infos=stay(report.pod_infos),
        claims=stay(report.claims),
        claim_errors=stay(report.claim_errors),
        gpus=tuple(row for row in report.gpus if row.reading is not None or row.gpu.gpu_uuid in held),
    )
    return replace(cut, pods_over_limit=len(sizes) - len(kept), series_over_limit=counts.total() - _count_series(cut).total())


@dataclass(frozen=True, slots=True)
class _Counts:
    of_pods: Counter[PodName]
    of_unlisted_gpus: Counter[str]
    """Of GPUs that the driver does not list: they are there because a pod's contract names them, and go with it."""
    others: int

    def total(self) -> int:
        return self.of_pods.total() + self.of_unlisted_gpus.total() + self.others


def _most_series(report: Report) -> int:
    """Answer a number of series that the report cannot exceed, without a look at any of them: most nodes are far below every limit."""
    items: Mapping[tuple[str, ...], int] = {
        CONTAINER_LIMIT.labels: len(report.containers) * len(Resource),
        CONTAINER.labels: len(report.containers),
        POD_LIMIT.labels: len(report.pods) * len(Resource),
        POD.labels: len(report.pods),
        CLAIM.labels: len(report.claims),
        CLAIM_ERROR.labels: len(report.claim_errors),
        POD_INFO.labels: len(report.pod_infos),
        UNATTRIBUTED.labels: len(report.gpus) * len(Unattributed),
        GPU.labels: len(report.gpus),
    }
    longest_first = sorted(items, key=len, reverse=True)
    # Facts have their entity's labels and more; what is about no entity has few series.
    rest = len(report.gpu_groups) + len(report.dropped_samples_total) + len(UnreadableFile)
    return sum(next((items[labels] for labels in longest_first if row.labels[: len(labels)] == labels), rest) for row in NODE_METRICS)


def _count_series(report: Report) -> _Counts:
    unlisted = {row.gpu.gpu_uuid for row in report.gpus if row.reading is None}
    of_pods: Counter[PodName] = Counter()
    of_unlisted_gpus: Counter[str] = Counter()
    others = 0
    for row in NODE_METRICS:
        is_of_pod, is_of_gpu = row.labels[: len(_POD_LABELS)] == _POD_LABELS, row.labels[:1] == _GPU_LABELS
        for labels, number in row.samples(report):
            if number is None:
                continue
            if is_of_pod:
                of_pods[labels[0], labels[1]] += 1
            elif is_of_gpu and labels[0] in unlisted:
                of_unlisted_gpus[labels[0]] += 1
            else:
                others += 1
    return _Counts(of_pods, of_unlisted_gpus, others)


def _sizes(report: Report, counts: _Counts) -> Counter[PodName]:
    """Answer the series that each pod stands for; a GPU that several pods name counts for each of them."""
    sizes = counts.of_pods.copy()
    for row in report.pods:
        sizes[row.namespace, row.pod] += counts.of_unlisted_gpus[row.gpu_uuid]
    return sizes


def _rank(report: Report, sizes: Counter[PodName]) -> Callable[[PodName], tuple[bool, float, PodName]]:
    used_bytes: dict[PodName, int] = defaultdict(int)
    in_breach = set()
    for row in report.pods:
        used_bytes[row.namespace, row.pod] += row.memory_used_bytes or 0
        if any(breach.is_on for breach in row.breaches.values()):
            in_breach.add((row.namespace, row.pod))
    return lambda pod: (pod not in in_breach, -used_bytes[pod] / sizes[pod], pod)
