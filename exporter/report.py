"""One moment of the node, made of usage, claims and breaches: the only place where the stages meet. Pure.

`build()` takes a snapshot and what was remembered, and answers a report and what is to be remembered. It does no I/O and reads no clock.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from exporter.activity import NO_ACTIVITY, Activity, add_busy, add_memory
from exporter.breach import Breach, Verdict
from exporter.claims import Grant, Granter
from exporter.claims.claim import Claim, Node
from exporter.claims.dra import held_devices
from exporter.claims.kai import GpuGroup, gpu_groups, queue
from exporter.claims.pins import Pins
from exporter.judge import ContainerBreaches, ContainerKey, Judge, PodBreaches, Resource
from exporter.limits import NO_CONTAINER_LIMITS, NO_SHARE, ContainerLimits, GpuShare, PodLimits, build_gpu_shares, build_pod_limits
from exporter.regions import NOT_COUNTED, CoreCount, build_core_counts
from exporter.snapshot import (
    Container,
    Gpu,
    GpuReading,
    KubernetesReading,
    NvmlReading,
    Pod,
    SliceDevice,
    Snapshot,
    UnreadableFile,
)
from exporter.usage import (
    IDLE,
    BusySeconds,
    GpuUsage,
    Identity,
    Owner,
    Owners,
    Unattributed,
    Use,
    build_gpu_usage,
    build_identities,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the operator set: windows, holds and whom to believe."""

    utilization_window_seconds: float = 15.0
    compute_window_seconds: float = 60.0
    breach_hold_seconds: float = 10.0
    kai_reservation_namespaces: frozenset[str] = frozenset({"kai-resource-reservation", "runai-reservation"})
    system_namespaces: frozenset[str] = frozenset()
    """Pods of these are never flagged as unallocated. The reservation namespaces are among them, named or not."""
    max_series: int = 20_000
    """Series about the node; a report that would have more is left without some of its pods."""

    @property
    def longest_window_seconds(self) -> float:
        """How much of the past any mean looks at."""
        return max(self.utilization_window_seconds, self.compute_window_seconds)


# --- what a report says ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerReport:
    """One container on one GPU."""

    namespace: str
    pod: str
    container: str
    gpu_uuid: str
    pod_uid: str
    container_id: str | None
    memory_used_bytes: int | None
    memory_used_peak_bytes: int | None
    processes: int | None
    limits: ContainerLimits
    sm_utilization_ratio: float | None
    sm_utilization_mean_ratio: float | None
    """Over --compute-window-seconds, at most 1: what a compute limit is held to. None until the window is full."""
    busy_total: BusySeconds | None
    breaches: Mapping[Resource, Breach]
    """Only in the dimensions in which it has a limit."""
    hami_core: CoreCount = NOT_COUNTED
    """What HAMi-core itself says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodReport:
    """One pod on one GPU."""

    namespace: str
    pod: str
    gpu_uuid: str
    pod_uid: str
    memory_used_bytes: int | None
    limits: PodLimits
    sm_utilization_ratio: float | None
    sm_utilization_mean_ratio: float | None
    """Over --compute-window-seconds, at most 1: what a compute limit is held to. None until the window is full."""
    sm_busy_seconds_total: float | None
    breaches: Mapping[Resource, Breach]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimReport:
    """A claim, and whose it is."""

    namespace: str
    pod: str
    pod_uid: str
    claim: Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class PodInfo:
    """Facts about a pod that has to do with GPUs."""

    namespace: str
    pod: str
    pod_uid: str
    queue: str
    owner_kind: str
    owner_name: str
    scheduler: str
    role: str
    """`workload`, or `system`: a part of a sharing system, or of a namespace that is never flagged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """One GPU: a device or a MIG device."""

    gpu: Gpu
    reading: GpuReading | None
    """None while the driver as a whole is away."""
    memory_allocated_bytes: int | None
    """None, like the two below, while no pod was ever read, or not for so long that it is forgotten."""
    compute_allocated_ratio: float | None
    pods: int | None
    unattributed_bytes: Mapping[Unattributed, int] | None
    """By every reason; None while attribution is impossible."""
    processes_memory_hidden: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimErrorReport:
    """Contracts of one system on one pod that cannot be read now."""

    namespace: str
    pod: str
    system: str
    errors: tuple[str, ...]


class Missing(StrEnum):
    """Why there may be limits of a pod that are not known."""

    NOT_PLACED = "not_placed"
    """A sound contract waits for its GPU."""
    UNREADABLE = "unreadable"
    """A contract cannot be read and never could."""
    KUBELET_UNKNOWN = "kubelet_unknown"
    """What the kubelet handed out is not known: it was not read, or too long ago."""
    KUBERNETES_UNKNOWN = "kubernetes_unknown"
    """Likewise the pods."""


def missing_limits(grant: Grant, snapshot: Snapshot) -> tuple[Missing, ...]:
    """Answer why there may be limits of a pod that are not known; nothing where all are."""
    reasons = []
    if grant.not_placed:
        reasons.append(Missing.NOT_PLACED)
    if grant.unreadable:
        reasons.append(Missing.UNREADABLE)
    if snapshot.kubelet is None:
        reasons.append(Missing.KUBELET_UNKNOWN)
    if snapshot.kubernetes is None:
        reasons.append(Missing.KUBERNETES_UNKNOWN)
    return tuple(reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a report was made from, so that it can be asked why it says what it says."""

    snapshot: Snapshot
    rules: Rules = field(default_factory=Rules)
    identities: Mapping[int, Identity] = field(default_factory=dict)
    """Whose each process is; a process that is gone has none."""
    usage: Mapping[str, GpuUsage] = field(default_factory=dict)
    """By GPU; a GPU whose processes are not known has none."""
    grants: Mapping[str, Grant] = field(default_factory=dict)
    """By pod UID."""
    pod_activity: Mapping[tuple[str, str], Activity] = field(default_factory=dict)
    """By pod UID and GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that the exporter says of the node at one moment. Sorted, so that equal nodes give equal reports."""

    time_seconds: float
    monotonic_seconds: float
    driver_version: str | None = None
    containers: tuple[ContainerReport, ...] = ()
    pods: tuple[PodReport, ...] = ()
    pod_infos: tuple[PodInfo, ...] = ()
    claims: tuple[ClaimReport, ...] = ()
    claim_errors: tuple[ClaimErrorReport, ...] = ()
    gpus: tuple[GpuReport, ...] = ()
    gpus_unidentified: int | None = None
    gpu_groups: tuple[GpuGroup, ...] = ()
    dropped_samples_total: Mapping[str, int] = field(default_factory=dict)
    hostfiles_unreadable: Mapping[UnreadableFile, int] | None = None
    """By every reason; None where host files are not read."""
    pods_over_limit: int = 0
    """Pods left out because there would be too many series."""
    series_over_limit: int = 0
    """The series that those pods would have had."""
    evidence: Evidence | None = field(default=None, compare=False, repr=False)
    """Values that were made anyway, and kept as long as the report is."""


# --- what is remembered between reports ---


@dataclass(frozen=True, slots=True)
class GrantInput:
    """What a pod's grant follows from, beside the pod and the node."""

    pins: Pins
    gpus_used_by_container: Mapping[str, frozenset[str]]
    region_limits: Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a pod was given, and what the report says of that alone."""

    follows_from: GrantInput
    grant: Grant
    pins: Pins
    shares: Mapping[str, GpuShare]
    """By GPU."""
    claims: tuple[ClaimReport, ...]
    claim_errors: tuple[ClaimErrorReport, ...]
    info: PodInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The grants of a report and all that they followed from: a grant is made once, and anew only when that changes."""

    node: Node
    believed_before: frozenset[str]
    believed: frozenset[str]
    by_pod: Mapping[str, Given]
    """By UID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What has to be known of the past. All of it goes with the pod, container or GPU that it is about."""

    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    """Every GPU that the driver ever listed in this process's life."""
    busy_read_at: Mapping[str, float] = field(default_factory=dict)
    """GPU -> monotonic time of its last reading."""
    identities: Mapping[int, Identity] = field(default_factory=dict)
    container_activity: Mapping[tuple[ContainerKey, str], Activity] = field(default_factory=dict)
    pod_activity: Mapping[tuple[str, str], Activity] = field(default_factory=dict)
    container_breaches: ContainerBreaches = field(default_factory=dict)
    pod_breaches: PodBreaches = field(default_factory=dict)
    granted: Granted | None = None
    pins: Mapping[str, Pins] = field(default_factory=dict)
    """By pod UID."""
    believed: frozenset[str] = frozenset()
    """UIDs of pods whose device ids of the kubelet are placement, whatever their annotations come to say."""
    held_slice_devices: tuple[SliceDevice, ...] = ()
    """Devices of ResourceSlices that someone holds: the slices go when their driver stops, the devices do not."""
    region_limits: Mapping[tuple[Owner, str], int] = field(default_factory=dict)
    """The memory limit that a region of HAMi-core last told for a container on a GPU: it stands while no process of it runs."""
    listed_by_kubelet: frozenset[tuple[str, str]] = frozenset()
    """Pods that the kubelet named when it last answered."""
    dropped_samples_total: Mapping[str, int] = field(default_factory=dict)


NOTHING_REMEMBERED = Memory()

_NO_PODS = KubernetesReading(pods={}, node=None)
_DROP_REASONS = ("bad_pid", "bad_timestamp", "bad_utilization", "scrambled_list", "unknown_pid")


def build(snapshot: Snapshot, memory: Memory, rules: Rules) -> tuple[Report, Memory]:
    """Answer the report of this snapshot, and what is to be remembered for the next one."""
    return _Build(snapshot, memory, rules).run()


class _Build:
    """The stages of one report in their order. It lives for one call."""

    def __init__(self, snapshot: Snapshot, memory: Memory, rules: Rules) -> None:
        self.snapshot = snapshot
        self.memory = memory
        self.rules = rules
        self.now = snapshot.monotonic_seconds
        self.system_namespaces = rules.system_namespaces | rules.kai_reservation_namespaces
        kubernetes = snapshot.kubernetes or _NO_PODS
        self.pods = tuple(sorted(kubernetes.pods.values(), key=lambda pod: (pod.namespace, pod.name, pod.uid)))
        self.readings = {reading.gpu.gpu_uuid: reading for reading in snapshot.nvml.gpus} if snapshot.nvml else {}
        self.gpus: dict[str, Gpu] = {**memory.gpus, **{uuid: reading.gpu for uuid, reading in self.readings.items()}}
        self.node = self._node(kubernetes)
        self.identities: dict[int, Identity] = {}
        self.usage: dict[str, GpuUsage] = {}
        self.used_by_pod: dict[str, dict[str, set[str]]] = {}
        self.busy_by_pod: dict[tuple[str, str], BusySeconds] = {}
        self.known_gpus: dict[str, set[str]] = defaultdict(set)
        for uid, uuid in memory.pod_activity:
            self.known_gpus[uid].add(uuid)
        self.core_counts: dict[tuple[Owner, str], CoreCount] = {}
        self.region_limits: dict[tuple[Owner, str], int] = {}
        self.given: dict[str, Given] = {}
        self.pins: dict[str, Pins] = {}
        self.believed: frozenset[str] = frozenset()
        self.granted: Granted | None = None
        self.container_activity: dict[tuple[ContainerKey, str], Activity] = {}
        self.pod_activity: dict[tuple[str, str], Activity] = {}
        self.judge = Judge(
            time_seconds=snapshot.time_seconds,
            monotonic_seconds=snapshot.monotonic_seconds,
            hold_seconds=rules.breach_hold_seconds,
            container_breaches=memory.container_breaches,
            pod_breaches=memory.pod_breaches,
        )

    def _node(self, kubernetes: KubernetesReading) -> Node:
        kubelet = self.snapshot.kubelet
        present = {(device.driver_name, device.pool_name, device.device_name): device for device in kubernetes.slice_devices or ()}
        remembered = {(device.driver_name, device.pool_name, device.device_name): device for device in self.memory.held_slice_devices}
        return Node(
            facts=kubernetes.node,
            gpus=self.gpus,
            pods=self.pods,
            allocations={(pod.namespace, pod.name): pod for pod in kubelet.pods} if kubelet else {},
            allocatable=(kubelet.allocatable or ()) if kubelet else (),
            slice_devices=tuple((remembered | present).values()),
            resource_claims=kubernetes.resource_claims or (),
            kai_reservation_namespaces=self.rules.kai_reservation_namespaces,
            system_namespaces=self.system_namespaces,
        )

    def run(self) -> tuple[Report, Memory]:
        self._build_usage()
        self._build_core_counts()
        self._build_grants()
        containers, pods = [], []
        for pod in self.pods:
            of_containers, of_gpus = self._report_pod(pod)
            containers += of_containers
            pods += of_gpus
        report = self._report(containers, pods)
        return report, self._remember(report.dropped_samples_total)

    # --- usage ---

    def _build_usage(self) -> None:
        nvml, procfs = self.snapshot.nvml, self.snapshot.procfs
        if procfs is None:
            return
        pids = nvml.pids if nvml else frozenset[int]()
        owners = Owners(self.pods, self.system_namespaces)
        self.identities = build_identities(pids, procfs, owners, self.memory.identities)
        for uuid, reading in self.readings.items():
            usage = build_gpu_usage(reading, procfs, self.identities, self.memory.identities)
            if usage is None:
                continue
            self.usage[uuid] = usage
            for owner in usage.by_owner:
                self.used_by_pod.setdefault(owner.pod_uid, {}).setdefault(owner.container, set()).add(uuid)
            for owner, busy in (usage.busy_by_owner or {}).items():
                self.busy_by_pod[owner.pod_uid, uuid] = self.busy_by_pod.get((owner.pod_uid, uuid), IDLE) + busy

    # --- what HAMi-core counts ---

    def _build_core_counts(self) -> None:
        hostfiles, procfs = self.snapshot.hostfiles, self.snapshot.procfs
        if hostfiles is not None and procfs is not None:
            alive = {pid: identity.owner for pid, identity in self.identities.items() if pid in procfs.processes}
            counts = build_core_counts(hostfiles.regions, alive)
            # Where the driver does not tell a GPU's processes, no one knows which of the region's are alive.
            self.core_counts = {key: count if key[1] in self.usage else NOT_COUNTED for key, count in counts.items()}
        if not self.core_counts and not self.memory.region_limits:
            return  # Most nodes read no host files.
        present = {
            Owner(pod.uid, container.name, container.container_id or "")
            for pod in self.pods
            for container in pod.containers
            if container.holds_claims
        }
        self.region_limits = {key: limit for key, limit in self.memory.region_limits.items() if key[0] in present}
        for key, count in self.core_counts.items():
            if count.memory_limit_bytes is not None:
                self.region_limits[key] = count.memory_limit_bytes

    # --- claims ---

    def _build_grants(self) -> None:
        region_limits: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
        for (owner, uuid), limit in self.region_limits.items():
            region_limits[owner.pod_uid][owner.container, uuid] = limit
        before = self.memory.granted
        if before is not None and (before.node != self.node or before.believed_before != self.memory.believed):
            before = None
        granter = None if before else Granter(self.node, self.memory.believed)
        for pod in self.pods:
            follows_from = GrantInput(
                self.memory.pins.get(pod.uid, {}),
                {container: frozenset(uuids) for container, uuids in self.used_by_pod.get(pod.uid, {}).items()},
                region_limits.get(pod.uid, {}),
            )
            given = before.by_pod.get(pod.uid) if before else None
            if given is None or given.follows_from != follows_from:
                granter = granter or Granter(self.node, self.memory.believed)
                given = self._give(pod, granter, follows_from)
            self.given[pod.uid] = given
            if given.pins:
                self.pins[pod.uid] = given.pins
        self.believed = granter.believed if granter else before.believed if before else frozenset()
        self.granted = Granted(node=self.node, believed_before=self.memory.believed, believed=self.believed, by_pod=self.given)

    def _give(self, pod: Pod, granter: Granter, follows_from: GrantInput) -> Given:
        grant, pins = granter.grant(pod, follows_from.pins, follows_from.gpus_used_by_container, follows_from.region_limits)
        return Given(
            follows_from=follows_from,
            grant=grant,
            pins=pins,
            shares=build_gpu_shares(grant.claims, grant.allocations),
            claims=tuple(
                ClaimReport(namespace=pod.namespace, pod=pod.name, pod_uid=pod.uid, claim=claim)
                for claim in sorted(grant.claims, key=lambda claim: (claim.gpu_uuid, claim.container, claim.system, claim.scope))
            ),
            claim_errors=tuple(
                ClaimErrorReport(namespace=pod.namespace, pod=pod.name, system=system, errors=errors)
                for system, errors in sorted(grant.errors.items())
            ),
            info=PodInfo(
                namespace=pod.namespace,
                pod=pod.name,
                pod_uid=pod.uid,
                queue=queue(pod) or "",
                owner_kind=pod.owner_kind or "",
                owner_name=pod.owner_name or "",
                scheduler=pod.scheduler_name or "",
                role="system" if grant.plumbing or pod.namespace in self.system_namespaces else "workload",
            ),
        )

    # --- one pod ---

    def _report_pod(self, pod: Pod) -> tuple[list[ContainerReport], list[PodReport]]:
        given = self.given[pod.uid]
        containers, pods = [], []
        for uuid in sorted(self._gpus_of(pod, given)):
            share = given.shares.get(uuid, NO_SHARE)
            of_gpu = self._report_containers(pod, given.grant, share, uuid)
            containers += of_gpu
            pods.append(self._report_pod_on_gpu(pod, given.grant, share, uuid, of_gpu))
        return containers, pods

    def _gpus_of(self, pod: Pod, given: Given) -> set[str]:
        gpus = set(given.shares).union(*self.used_by_pod.get(pod.uid, {}).values())
        # A GPU that the pod used before: its counters stand as long as the pod does.
        return gpus if pod.ended else gpus | self.known_gpus.get(pod.uid, set())

    def _report_containers(self, pod: Pod, grant: Grant, share: GpuShare, uuid: str) -> list[ContainerReport]:
        reports = []
        usage = self.usage.get(uuid)
        for container in self._containers_on(pod, uuid, share.holders):
            owner = Owner(pod.uid, container.name, container.container_id or "")
            use = usage.by_owner.get(owner) if usage else None
            activity = self._advance_container(pod, container, owner, uuid, use)
            if use is None and container.name not in share.holders:
                continue
            limits = share.container_limits.get(container.name, NO_CONTAINER_LIMITS)
            if use is None and usage is not None:
                use = Use()
            tells = self._busy_on(uuid) is not None
            compute_mean_ratio = self._compute_mean(activity, uuid)
            breaches: Mapping[Resource, Breach] = {}
            if self._is_judged(pod, grant):
                breaches = self.judge.judge_container(
                    ContainerKey(pod.uid, container.name, container.container_id),
                    uuid,
                    limits,
                    use=use,
                    compute_mean_ratio=compute_mean_ratio,
                    limits_may_be_missing=self._limits_may_be_missing(grant),
                )
            reports.append(
                ContainerReport(
                    namespace=pod.namespace,
                    pod=pod.name,
                    container=container.name,
                    gpu_uuid=uuid,
                    pod_uid=pod.uid,
                    container_id=container.container_id,
                    memory_used_bytes=use.memory_used_bytes if use else None,
                    memory_used_peak_bytes=activity.memory_used_peak_bytes if use and use.memory_used_bytes is not None else None,
                    processes=use.processes if use else None,
                    limits=limits,
                    sm_utilization_ratio=self._utilization(activity) if tells else None,
                    sm_utilization_mean_ratio=compute_mean_ratio,
                    busy_total=activity.busy_total if tells else None,
                    breaches=breaches,
                    hami_core=self.core_counts.get((owner, uuid), NOT_COUNTED),
                )
            )
        return reports

    def _containers_on(self, pod: Pod, uuid: str, holders: frozenset[str]) -> list[Container]:
        """Answer the containers that can have anything on a GPU. An author may write thousands of containers and GPUs that never are."""
        is_listed = uuid in self.gpus
        if not is_listed and not holders:
            return []
        return [each for each in pod.containers if each.name in holders or (is_listed and each.container_id is not None)]

    def _advance_container(self, pod: Pod, container: Container, owner: Owner, uuid: str, use: Use | None) -> Activity:
        key = (ContainerKey(pod.uid, container.name, container.container_id), uuid)
        activity = self.memory.container_activity.get(key, NO_ACTIVITY)
        usage = self.usage.get(uuid)
        if usage is not None:
            activity = add_memory(activity, use.memory_used_bytes if use else 0)
        busy = self._busy_on(uuid)
        if busy is not None:
            activity = self._add_busy(activity, uuid, busy.get(owner, IDLE))
        self.container_activity[key] = activity
        return activity

    def _busy_on(self, uuid: str) -> Mapping[Owner, BusySeconds] | None:
        """Answer who kept this GPU busy; None while that cannot be known."""
        usage = self.usage.get(uuid)
        return None if usage is None else usage.busy_by_owner

    def _add_busy(self, activity: Activity, uuid: str, busy: BusySeconds) -> Activity:
        return add_busy(
            activity,
            busy,
            start_seconds=self.memory.busy_read_at.get(uuid),
            end_seconds=self.now,
            keep_seconds=self.rules.longest_window_seconds,
        )

    def _utilization(self, activity: Activity) -> float | None:
        mean = activity.mean_sm_ratio(self.now, self.rules.utilization_window_seconds)
        return None if mean is None else min(mean, 1.0)

    def _report_pod_on_gpu(
        self,
        pod: Pod,
        grant: Grant,
        share: GpuShare,
        uuid: str,
        containers: list[ContainerReport],
    ) -> PodReport:
        usage = self.usage.get(uuid)
        limits = build_pod_limits(share.pod_claims, (container.limits for container in containers))
        activity = self.memory.pod_activity.get((pod.uid, uuid), NO_ACTIVITY)
        tells = self._busy_on(uuid) is not None
        if tells:
            activity = self._add_busy(activity, uuid, self.busy_by_pod.get((pod.uid, uuid), IDLE))
        self.pod_activity[pod.uid, uuid] = activity
        used = [container.memory_used_bytes for container in containers]
        is_there = bool(containers or share.pod_claims or self._is_allocated(grant, uuid))
        memory_used_bytes = None
        if usage is not None and is_there and None not in used:
            memory_used_bytes = sum(value for value in used if value is not None)
        compute_mean_ratio = self._compute_mean(activity, uuid)
        breaches: Mapping[Resource, Breach] = {}
        if self._is_judged(pod, grant):
            breaches = self.judge.judge_pod(
                pod.uid,
                uuid,
                limits,
                memory_used_bytes=memory_used_bytes,
                compute_mean_ratio=compute_mean_ratio,
                of_containers=(container.breaches for container in containers),
                unallocated=None if pod.namespace in self.system_namespaces else self._unallocated_verdict(pod, grant, uuid),
                limits_may_be_missing=self._limits_may_be_missing(grant),
            )
        return PodReport(
            namespace=pod.namespace,
            pod=pod.name,
            gpu_uuid=uuid,
            pod_uid=pod.uid,
            memory_used_bytes=memory_used_bytes,
            limits=limits,
            sm_utilization_ratio=self._utilization(activity) if tells and is_there else None,
            sm_utilization_mean_ratio=compute_mean_ratio if is_there else None,
            sm_busy_seconds_total=activity.busy_total.sm if tells and activity.busy_total else None,
            breaches=breaches,
        )

    # --- breaches ---

    def _is_judged(self, pod: Pod, grant: Grant) -> bool:
        return not (pod.ended or grant.plumbing)

    def _limits_may_be_missing(self, grant: Grant) -> bool:
        return bool(missing_limits(grant, self.snapshot))

    def _compute_mean(self, activity: Activity, uuid: str) -> float | None:
        if self._busy_on(uuid) is None:
            return None
        mean = activity.full_window_sm_ratio(self.now, self.rules.compute_window_seconds)
        # Sampling noise can carry the mean above 1, and no one can take more than the whole GPU.
        return None if mean is None else min(mean, 1.0)

    def _is_allocated(self, grant: Grant, uuid: str) -> bool:
        gpu = self.gpus.get(uuid)
        parent = gpu.parent_gpu_uuid if gpu else None
        return any(allocation.gpu_uuid in (uuid, parent) for allocation in grant.allocations)

    def _unallocated_verdict(self, pod: Pod, grant: Grant, uuid: str) -> Verdict:
        usage = self.usage.get(uuid)
        if self._is_allocated(grant, uuid):
            return Verdict.BELOW
        if usage is None or self._limits_may_be_missing(grant):
            return Verdict.UNKNOWN
        if not any(uuid in uuids for uuids in self.used_by_pod.get(pod.uid, {}).values()):
            return Verdict.BELOW
        # Through an outage the kubelet's last word says nothing of a pod that started since.
        named = (pod.namespace, pod.name) in self.memory.listed_by_kubelet
        return Verdict.ABOVE if self.snapshot.kubelet_is_current or named else Verdict.UNKNOWN

    # --- the node ---

    def _report(self, containers: list[ContainerReport], pods: list[PodReport]) -> Report:
        nvml = self.snapshot.nvml
        shown = {pod.pod_uid for pod in pods} | {uid for uid, given in self.given.items() if given.grant.plumbing}
        return Report(
            time_seconds=self.snapshot.time_seconds,
            monotonic_seconds=self.now,
            driver_version=nvml.driver_version if nvml else None,
            containers=tuple(containers),
            pods=tuple(pods),
            pod_infos=tuple(given.info for uid, given in self.given.items() if uid in shown),
            claims=tuple(claim for given in self.given.values() for claim in given.claims),
            claim_errors=tuple(error for given in self.given.values() for error in given.claim_errors),
            gpus=self._report_gpus(pods),
            gpus_unidentified=nvml.gpus_unidentified if nvml else None,
            gpu_groups=gpu_groups(self.node),
            dropped_samples_total=self._dropped_samples_total(nvml),
            hostfiles_unreadable=self._hostfiles_unreadable(),
            evidence=Evidence(
                snapshot=self.snapshot,
                rules=self.rules,
                identities=self.identities,
                usage=self.usage,
                grants={uid: given.grant for uid, given in self.given.items()},
                pod_activity=self.pod_activity,
            ),
        )

    def _report_gpus(self, pods: Iterable[PodReport]) -> tuple[GpuReport, ...]:
        memory: Counter[str] = Counter()
        compute: dict[str, float] = defaultdict(float)
        sharers: Counter[str] = Counter()
        for pod in pods:
            memory[pod.gpu_uuid] += pod.limits.memory_bytes or 0
            compute[pod.gpu_uuid] += pod.limits.compute_ratio or 0.0
            if pod.namespace not in self.system_namespaces:
                sharers[pod.gpu_uuid] += pod.gpu_uuid in self.given[pod.pod_uid].shares
        # Without the driver there are no devices to show, only what was granted on them.
        granted = {uuid for uuid in {*memory, *sharers} if sharers[uuid] or memory[uuid]}
        pods_are_known = self.snapshot.kubernetes is not None
        return tuple(
            GpuReport(
                gpu=self.gpus.get(uuid, Gpu(gpu_uuid=uuid)),
                reading=self.readings.get(uuid),
                memory_allocated_bytes=memory[uuid] if pods_are_known else None,
                compute_allocated_ratio=compute[uuid] if pods_are_known else None,
                pods=sharers[uuid] if pods_are_known else None,
                unattributed_bytes=self._unattributed(uuid),
                processes_memory_hidden=self._hidden(uuid),
            )
            for uuid in sorted({*self.readings} | granted)
        )

    def _unattributed(self, uuid: str) -> dict[Unattributed, int] | None:
        usage = self.usage.get(uuid)
        return None if usage is None else {reason: usage.unattributed_bytes.get(reason, 0) for reason in Unattributed}

    def _hidden(self, uuid: str) -> int | None:
        reading = self.readings.get(uuid)
        if reading is None or reading.processes is None:
            return None
        return sum(process.memory_used_bytes is None for process in reading.processes)

    def _dropped_samples_total(self, nvml: NvmlReading | None) -> dict[str, int]:
        now = nvml.dropped_samples if nvml else {}
        before = self.memory.dropped_samples_total
        return {reason: before.get(reason, 0) + now.get(reason, 0) for reason in sorted({*_DROP_REASONS, *before, *now})}

    def _hostfiles_unreadable(self) -> dict[UnreadableFile, int] | None:
        hostfiles = self.snapshot.hostfiles
        return None if hostfiles is None else {reason: hostfiles.unreadable.get(reason, 0) for reason in UnreadableFile}

    # --- what stays ---

    def _remember(self, dropped_samples_total: Mapping[str, int]) -> Memory:
        kubelet = self.snapshot.kubelet
        memory = self.memory
        listed = memory.listed_by_kubelet
        if kubelet is not None and self.snapshot.kubelet_is_current:
            listed = frozenset((pod.namespace, pod.name) for pod in kubelet.pods)
        granted = {allocation.gpu_uuid for given in self.given.values() for allocation in given.grant.allocations}
        gpus = self.gpus
        if self.snapshot.nvml is not None:
            gpus = {uuid: gpu for uuid, gpu in gpus.items() if uuid in self.readings or uuid in granted}
        read_now = {uuid: self.now for uuid, reading in self.readings.items() if reading.up}
        remembered = replace(
            memory,
            gpus=gpus,
            busy_read_at={uuid: at for uuid, at in {**memory.busy_read_at, **read_now}.items() if uuid in gpus},
            identities=self.identities if self.snapshot.procfs is not None else memory.identities,
            listed_by_kubelet=listed,
            dropped_samples_total=dropped_samples_total,
        )
        if self.snapshot.kubernetes is None:
            return remembered  # Which pods are gone is not known: what is remembered of them waits for that.
        return replace(
            remembered,
            container_activity=self.container_activity,
            pod_activity=self.pod_activity,
            container_breaches=self.judge.container_breaches,
            pod_breaches=self.judge.pod_breaches,
            granted=self.granted,
            pins=self.pins,
            region_limits=self.region_limits,
            believed=self.believed,
            held_slice_devices=held_devices(self.node),
        )
