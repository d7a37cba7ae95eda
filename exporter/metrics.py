"""The metrics: a table. A metric is a row; label names are written once for each entity.

A row answers, from one report (or from the exporter's own health), label values and a number; None gives no sample. What an operator can
write into a label (a pod's name, a group) is made safe here and nowhere else.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from exporter import __version__
from exporter.breach import Breach
from exporter.health import SAMPLE_DURATION_BUCKETS_SECONDS, Health, SourceHealth
from exporter.judge import Resource
from exporter.report import (
    ClaimErrorReport,
    ClaimReport,
    ContainerReport,
    GpuReport,
    PodInfo,
    PodReport,
    Report,
)
from exporter.text_format import Family, Kind, Labels

PREFIX = "fgpu_"
MAX_LABEL_CHARACTERS = 256
"""Longer label values are cut. Kubernetes names have at most 253 characters and label values 63."""

Sample = tuple[Labels, float | None]
_Items = tuple[list[tuple[Labels, Any]], list[Any]]
Subject = TypeVar("Subject")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Generic[Subject]):
    """A row: what it is called, what it means, and how its samples follow from the subject."""

    name: str
    """Without the prefix; of a counter with `_total`."""
    kind: Kind
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Subject], Iterable[Sample]]
    each: "tuple[Entity[Subject, Any], Callable[[Any], float | None]] | None" = None
    """Where every sample is the number of one item of an entity: that entity, and the number."""


@dataclass(frozen=True, slots=True)
class Entity(Generic[Subject, Item]):
    """A kind of thing that metrics are about: its label names, where its items are, and their label values."""

    labels: tuple[str, ...]
    items: Callable[[Subject], Iterable[Item]]
    values: Callable[[Item], tuple[str, ...]]

    def gauge(self, name: str, text: str, number: Callable[[Item], float | None]) -> Metric[Subject]:
        """Answer the row of a gauge about each item."""
        return self._row(name, "gauge", text, number)

    def counter(self, name: str, text: str, number: Callable[[Item], float | None]) -> Metric[Subject]:
        """Answer the row of a counter about each item."""
        return self._row(name, "counter", text, number)

    def info(self, name: str, text: str, labels: tuple[str, ...], values: Callable[[Item], tuple[str, ...]]) -> Metric[Subject]:
        """Answer the row of facts about each item, as further labels of a 1."""

        def samples(subject: Subject) -> Iterator[Sample]:
            for item in self.items(subject):
                yield (*self.values(item), *values(item)), 1.0

        return Metric(name=name, kind="gauge", help=text, labels=(*self.labels, *labels), samples=samples)

    def _row(self, name: str, kind: Kind, text: str, number: Callable[[Item], float | None]) -> Metric[Subject]:
        def samples(subject: Subject) -> Iterator[Sample]:
            for item in self.items(subject):
                yield self.values(item), number(item)

        return Metric(name=name, kind=kind, help=text, labels=self.labels, samples=samples, each=(self, number))


# --- the entities ---

CONTAINER: Entity[Report, ContainerReport] = Entity(
    ("namespace", "pod", "container", "gpu_uuid"),
    lambda report: report.containers,
    lambda row: (row.namespace, row.pod, row.container, row.gpu_uuid),
)

POD: Entity[Report, PodReport] = Entity(
    ("namespace", "pod", "gpu_uuid"),
    lambda report: report.pods,
    lambda row: (row.namespace, row.pod, row.gpu_uuid),
)

CONTAINER_LIMIT: Entity[Report, tuple[ContainerReport, Resource, Breach]] = Entity(
    (*CONTAINER.labels, "resource"),
    lambda report: ((row, resource, breach) for row in report.containers for resource, breach in row.breaches.items()),
    lambda item: (*CONTAINER.values(item[0]), item[1].value),
)

POD_LIMIT: Entity[Report, tuple[PodReport, Resource, Breach]] = Entity(
    (*POD.labels, "resource"),
    lambda report: ((row, resource, breach) for row in report.pods for resource, breach in row.breaches.items()),
    lambda item: (*POD.values(item[0]), item[1].value),
)

CLAIM: Entity[Report, ClaimReport] = Entity(
    (*CONTAINER.labels, "system", "scope"),
    lambda report: report.claims,
    lambda row: (row.namespace, row.pod, row.claim.container, row.claim.gpu_uuid, row.claim.system, row.claim.scope.value),
)

CLAIM_ERROR: Entity[Report, ClaimErrorReport] = Entity(
    ("namespace", "pod", "system"),
    lambda report: report.claim_errors,
    lambda row: (row.namespace, row.pod, row.system),
)

POD_INFO: Entity[Report, PodInfo] = Entity(
    ("namespace", "pod"),
    lambda report: report.pod_infos,
    lambda row: (row.namespace, row.pod),
)

GPU: Entity[Report, GpuReport] = Entity(("gpu_uuid",), lambda report: report.gpus, lambda row: (row.gpu.gpu_uuid,))

UNATTRIBUTED: Entity[Report, tuple[GpuReport, str, int]] = Entity(
    ("gpu_uuid", "reason"),
    lambda report: ((row, reason.value, amount) for row in report.gpus for reason, amount in (row.unattributed_bytes or {}).items()),
    lambda item: (item[0].gpu.gpu_uuid, item[1]),
)

NODE: Entity[Report, Report] = Entity((), lambda report: (report,), lambda _: ())

SOURCE: Entity[Health, SourceHealth] = Entity(("source",), lambda health: health.sources, lambda row: (row.source,))

EXPORTER: Entity[Health, Health] = Entity((), lambda health: (health,), lambda _: ())


def _gpu_info(report: Report) -> Iterator[Sample]:
    by_uuid = {row.gpu.gpu_uuid: row.gpu for row in report.gpus}
    for row in report.gpus:
        if row.reading is None:
            continue
        gpu = row.gpu
        device = by_uuid.get(gpu.parent_gpu_uuid, gpu) if gpu.parent_gpu_uuid else gpu
        facts = (device.index, gpu.minor, gpu.model, gpu.pci_bus_id, gpu.parent_gpu_uuid, gpu.mig_profile, report.driver_version)
        yield (gpu.gpu_uuid, *("" if fact is None else str(fact) for fact in facts)), 1.0


def _container_info(row: ContainerReport) -> tuple[str, ...]:
    claim = row.limits.governing
    if claim is None:
        return row.pod_uid, row.container_id or "", "", "false", "0"
    return row.pod_uid, row.container_id or "", claim.system, str(claim.enforced).lower(), str(claim.shares)


def _sample_duration(health: Health) -> Iterator[Sample]:
    cumulative = 0
    for bound, count in zip((*SAMPLE_DURATION_BUCKETS_SECONDS, float("inf")), health.sample_duration.counts, strict=True):
        cumulative += count
        yield ("+Inf" if bound == float("inf") else str(bound),), cumulative


# --- the table ---

NODE_METRICS: tuple[Metric[Report], ...] = (
    CONTAINER.gauge(
        "container_memory_used_bytes",
        "GPU memory of the container's processes on this GPU; 0 for a container with a claim or an allocation and no process.",
        lambda row: row.memory_used_bytes,
    ),
    CONTAINER.gauge(
        "container_memory_used_peak_bytes",
        "Highest container_memory_used_bytes since the container started, or since the exporter did.",
        lambda row: row.memory_used_peak_bytes,
    ),
    CONTAINER.gauge(
        "container_memory_limit_bytes",
        "The tightest memory claim of the container on this GPU; absent without one.",
        lambda row: row.limits.memory_bytes,
    ),
    CONTAINER.gauge(
        "container_compute_limit_ratio",
        "The tightest compute claim of the container on this GPU; absent without one.",
        lambda row: row.limits.compute_ratio,
    ),
    CONTAINER.gauge(
        "container_sm_utilization_ratio",
        "Mean share of time in which the container's kernels ran, over the last --utilization-window-seconds; absent on MIG devices.",
        lambda row: row.sm_utilization_ratio,
    ),
    CONTAINER.counter(
        "container_sm_busy_seconds_total",
        "Time in which the container's kernels ran; its rate() is the mean utilization over any range.",
        lambda row: row.busy_total.sm if row.busy_total else None,
    ),
    CONTAINER.counter(
        "container_memory_bandwidth_busy_seconds_total",
        "Time in which the container read or wrote GPU memory.",
        lambda row: row.busy_total.memory_bandwidth if row.busy_total else None,
    ),
    CONTAINER.counter(
        "container_encoder_busy_seconds_total",
        "Time in which the container's video encoding ran.",
        lambda row: row.busy_total.encoder if row.busy_total else None,
    ),
    CONTAINER.counter(
        "container_decoder_busy_seconds_total",
        "Time in which the container's video decoding ran.",
        lambda row: row.busy_total.decoder if row.busy_total else None,
    ),
    CONTAINER.gauge("container_processes", "Processes of the container on this GPU.", lambda row: row.processes),
    CONTAINER.gauge(
        "container_hami_core_memory_used_bytes",
        "Memory that HAMi-core itself counts for the container's living processes: what went through the library, without CUDA contexts, "
        "so less than the driver says. Needs --host-path.",
        lambda row: row.hami_core.memory_used_bytes,
    ),
    CONTAINER.gauge(
        "container_hami_core_memory_limit_bytes",
        "The limit that HAMi-core itself works with; absent with several GPUs of unequal limits, whose order it does not tell.",
        lambda row: row.hami_core.memory_limit_bytes,
    ),
    CONTAINER_LIMIT.gauge(
        "container_limit_exceeded",
        "1 while the container has been above its own limit for longer than the hold, else 0; absent while use or limit is unknown.",
        lambda item: item[2].exceeded,
    ),
    CONTAINER.info(
        "container_info",
        "Which sharing system governs the container's limit, whether something on the node enforces it, and how many shares it holds.",
        ("pod_uid", "container_id", "system", "enforced", "shares"),
        _container_info,
    ),
    POD.gauge(
        "pod_memory_used_bytes",
        "GPU memory of all containers of the pod on this GPU, those without a claim included.",
        lambda row: row.memory_used_bytes,
    ),
    POD.gauge(
        "pod_memory_limit_bytes",
        "The pod's tightest own memory claim on this GPU, else the sum of its containers' limits.",
        lambda row: row.limits.memory_bytes,
    ),
    POD.gauge(
        "pod_compute_limit_ratio",
        "The pod's tightest own compute claim on this GPU, else the sum of its containers' limits.",
        lambda row: row.limits.compute_ratio,
    ),
    POD.gauge(
        "pod_sm_utilization_ratio",
        "Mean share of time in which the pod's kernels ran, over the last --utilization-window-seconds.",
        lambda row: row.sm_utilization_ratio,
    ),
    POD.counter(
        "pod_sm_busy_seconds_total",
        "Time in which the pod's kernels ran; it does not fall when one of its containers restarts.",
        lambda row: row.sm_busy_seconds_total,
    ),
    POD_LIMIT.gauge(
        "pod_limit_exceeded",
        "1 while any limit of the pod on this GPU is exceeded (memory, compute) or it uses a GPU that no one gave it (unallocated), "
        "for longer than the hold; else 0; absent while unknown.",
        lambda item: item[2].exceeded,
    ),
    POD_LIMIT.counter(
        "pod_limit_exceeded_seconds_total",
        "Time spent with pod_limit_exceeded at 1.",
        lambda item: item[2].exceeded_seconds_total,
    ),
    POD_LIMIT.counter(
        "pod_limit_breaches_total",
        "How often pod_limit_exceeded has become 1.",
        lambda item: item[2].breaches_total,
    ),
    POD_LIMIT.gauge(
        "pod_limit_exceeded_since_timestamp_seconds",
        "When the present breach began: the first sample above the limit; absent outside a breach.",
        lambda item: item[2].since_seconds if item[2].exceeded else None,
    ),
    POD_INFO.info(
        "pod_info",
        "Facts about a pod that has to do with GPUs, to join with; role is workload or system.",
        ("pod_uid", "queue", "owner_kind", "owner_name", "scheduler", "role"),
        lambda row: (
            row.pod_uid,
            row.queue,
            row.owner_kind,
            row.owner_name,
            row.scheduler,
            row.role,
        ),
    ),
    CLAIM.gauge(
        "claim_memory_bytes",
        "Memory that a sharing system grants on this GPU, as that system states it; container is empty for a claim of the pod.",
        lambda row: row.claim.memory_bytes,
    ),
    CLAIM.gauge(
        "claim_compute_ratio",
        "Share of compute that a sharing system grants on this GPU, as that system states it.",
        lambda row: row.claim.compute_ratio,
    ),
    CLAIM_ERROR.gauge(
        "claim_errors",
        "Contracts of the pod that were found and cannot be read now; absent without any.",
        lambda row: len(row.errors),
    ),
    GPU.gauge(
        "gpu_up",
        "0 while the driver answers with an error for this GPU, or not at all.",
        lambda row: row.reading.up if row.reading else None,
    ),
    GPU.gauge(
        "gpu_memory_total_bytes",
        "Memory of the GPU; absent where the driver does not tell it (unified memory).",
        lambda row: row.gpu.memory_total_bytes if row.reading else None,
    ),
    GPU.gauge(
        "gpu_memory_used_bytes",
        "Memory in use as the driver counts it, without what it reserves for itself.",
        lambda row: row.reading.memory_used_bytes if row.reading else None,
    ),
    GPU.gauge(
        "gpu_memory_reserved_bytes",
        "Memory that the driver and the firmware reserve.",
        lambda row: row.reading.memory_reserved_bytes if row.reading else None,
    ),
    GPU.gauge(
        "gpu_utilization_ratio",
        "Share of time in which any kernel ran on the GPU, as the driver says.",
        lambda row: row.reading.utilization_ratio if row.reading else None,
    ),
    GPU.gauge(
        "gpu_sm_utilization_ratio",
        "Mean share of multiprocessors that were busy since the previous sample, of a MIG device's whole GPU instance (Hopper and later). "
        "It is never put on a container, which may share the instance.",
        lambda row: row.reading.sm_utilization_ratio if row.reading else None,
    ),
    GPU.gauge(
        "gpu_memory_allocated_bytes",
        "Sum of the pods' memory limits on this GPU; absent while the pods are not known.",
        lambda row: row.memory_allocated_bytes,
    ),
    GPU.gauge(
        "gpu_compute_allocated_ratio",
        "Sum of the pods' compute limits on this GPU; absent while the pods are not known.",
        lambda row: row.compute_allocated_ratio,
    ),
    GPU.gauge(
        "gpu_pods",
        "Pods that have a claim or an allocation on this GPU, system pods left out; absent while the pods are not known.",
        lambda row: row.pods,
    ),
    UNATTRIBUTED.gauge(
        "gpu_unattributed_memory_bytes",
        "Memory of processes that belong to no container that can be shown, by reason.",
        lambda item: item[2],
    ),
    GPU.gauge(
        "gpu_processes_memory_hidden",
        "Processes on this GPU whose memory the driver hides.",
        lambda row: row.processes_memory_hidden,
    ),
    Metric(
        name="gpu_info",
        kind="gauge",
        help="Facts about a GPU. A MIG device is a GPU with a parent.",
        labels=("gpu_uuid", "gpu", "minor", "model", "pci_bus_id", "parent_gpu_uuid", "mig_profile", "driver_version"),
        samples=_gpu_info,
    ),
    NODE.gauge(
        "gpus_unidentified",
        "Devices that the driver counts and that do not even give a uuid.",
        lambda report: report.gpus_unidentified,
    ),
    NODE.gauge(
        "pods_dropped",
        "Pods left out with all of their series because there would be more series than --max-series.",
        lambda report: report.pods_over_limit,
    ),
    Metric(
        name="kai_gpu_group_info",
        kind="gauge",
        help="KAI's GPU groups and the reservation pods that hold their GPUs: the join to whole-device series that carry that pod's name.",
        labels=("group", "gpu_uuid", "reservation_namespace", "reservation_pod"),
        samples=lambda report: (
            ((group.group, group.gpu_uuid, group.reservation_namespace, group.reservation_pod), 1.0) for group in report.gpu_groups
        ),
    ),
    Metric(
        name="dropped_samples_total",
        kind="counter",
        help="Things that the driver said and that cannot be true, by reason.",
        labels=("reason",),
        samples=lambda report: (((reason,), count) for reason, count in report.dropped_samples_total.items()),
    ),
    Metric(
        name="hostfiles_unreadable",
        kind="gauge",
        help="Files of HAMi-core that are there and give nothing, by reason; absent without --host-path.",
        labels=("reason",),
        samples=lambda report: (((reason.value,), count) for reason, count in (report.hostfiles_unreadable or {}).items()),
    ),
)

EXPORTER_METRICS: tuple[Metric[Health], ...] = (
    SOURCE.gauge("source_up", "1 while the source's last reading succeeded.", lambda row: row.up),
    SOURCE.gauge("source_read_duration_seconds", "How long the last reading took.", lambda row: row.read_duration_seconds),
    SOURCE.counter("source_errors_total", "Readings that failed.", lambda row: row.errors_total),
    SOURCE.gauge(
        "source_last_success_timestamp_seconds",
        "When the source was last read with success; absent before.",
        lambda row: row.last_success_timestamp_seconds,
    ),
    EXPORTER.gauge(
        "last_sample_timestamp_seconds",
        "When the node was last sampled.",
        lambda health: health.last_sample_timestamp_seconds,
    ),
    EXPORTER.counter("samples_total", "How often the node was sampled.", lambda health: health.samples_total),
    Metric(
        name="sample_duration_seconds",
        kind="histogram",
        help="How long it takes to sample the node.",
        labels=("le",),
        samples=_sample_duration,
    ),
    EXPORTER.counter(
        "events_written_total",
        "Kubernetes Events written or brought up to date; absent without --kubernetes-events.",
        lambda health: health.events.written_total if health.events else None,
    ),
    Metric(
        name="events_dropped_total",
        kind="counter",
        help="Kubernetes Events that were not written, by reason; absent without --kubernetes-events.",
        labels=("reason",),
        samples=lambda health: (((reason,), count) for reason, count in (health.events.dropped_total if health.events else {}).items()),
    ),
    Metric(
        name="build_info",
        kind="gauge",
        help="The exporter's version.",
        labels=("version",),
        samples=lambda _: (((__version__,), 1.0),),
    ),
)


def build_families(report: Report | None, health: Health, config_facts: dict[str, str]) -> Iterator[Family]:
    """Answer the metric families of the exporter and, where there is one, of the report. Equal input gives equal output."""
    yield from _Families(report, health, config_facts).build()


class _Families:
    """The families of one exposition in their order. It lives for one call."""

    def __init__(self, report: Report | None, health: Health, config_facts: dict[str, str]) -> None:
        self._report = report
        self._health = health
        self._config_facts = config_facts
        self._safe: dict[Labels, Labels] = {}
        self._items: dict[int, _Items] = {}
        self._repeated = 0

    def build(self) -> Iterator[Family]:
        if self._report is not None:
            for row in NODE_METRICS:
                yield from self._family(row, self._report)
        for own_row in EXPORTER_METRICS:
            yield from self._family(own_row, self._health)
        config_row: Metric[None] = Metric(
            name="config_info",
            kind="gauge",
            help="The flags that shape the numbers.",
            labels=tuple(self._config_facts),
            samples=lambda _: ((tuple(self._config_facts.values()), 1.0),),
        )
        yield from self._family(config_row, None)
        dropped = {"repeated": self._repeated, "over_limit": self._report.series_over_limit if self._report else 0}
        dropped_row: Metric[None] = Metric(
            name="series_dropped",
            kind="gauge",
            help="Series left out of this exposition: another has the same labels (repeated), or there are too many (over_limit).",
            labels=("reason",),
            samples=lambda _: (((reason,), count) for reason, count in dropped.items()),
        )
        yield from self._family(dropped_row, None)

    def _family(self, row: Metric[Subject], subject: Subject) -> Iterator[Family]:
        samples = self._samples(row, subject)
        if not samples:
            return
        yield Family(
            name=PREFIX + row.name,
            kind=row.kind,
            help=row.help,
            labels=row.labels,
            samples=samples,
            sum=self._health.sample_duration.sum_seconds if row.kind == "histogram" else None,
        )

    def _samples(self, row: Metric[Subject], subject: Subject) -> tuple[tuple[Labels, float], ...]:
        if row.each is not None:
            entity, number_of = row.each
            items, repeated = self._sorted_items(entity, subject)
            self._repeated += sum(number_of(item) is not None for item in repeated)
            return tuple((labels, float(number)) for labels, item in items if (number := number_of(item)) is not None)
        values: dict[Labels, float] = {}
        for labels, number in row.samples(subject):
            if number is None:
                continue
            safe = self._made_safe(labels)
            if safe in values:
                self._repeated += 1
            else:
                values[safe] = float(number)
        return tuple(values.items()) if row.kind == "histogram" else tuple(sorted(values.items()))

    def _sorted_items(self, entity: Entity[Subject, Any], subject: Subject) -> _Items:
        """Answer an entity's items in the order of their labels, for all of its rows, and those whose labels another one has.

        Of these the first stands in every row: a metric of one beside a metric of the other would be of neither.
        """
        known = self._items.get(id(entity))
        if known is None:
            by_labels: dict[Labels, Any] = {}
            repeated = []
            for item in entity.items(subject):
                labels = self._made_safe(entity.values(item))
                if labels in by_labels:
                    repeated.append(item)
                else:
                    by_labels[labels] = item
            known = self._items[id(entity)] = [(labels, by_labels[labels]) for labels in sorted(by_labels)], repeated
        return known

    def _made_safe(self, labels: Labels) -> Labels:
        safe = self._safe.get(labels)
        if safe is None:
            safe = self._safe[labels] = tuple(_safe(label) for label in labels)
        return safe


def _safe(label: str) -> str:
    """Answer a label value that can be written as UTF-8 and has a sane length."""
    if label.isascii() and len(label) <= MAX_LABEL_CHARACTERS:
        return label
    return label[:MAX_LABEL_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
