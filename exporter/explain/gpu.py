"""How the memory of one GPU adds up: what each container holds, and what belongs to none, by reason."""

from collections.abc import Mapping
from dataclasses import dataclass

from exporter.explain.process import ProcessEvidence, UnknownUse, processes_on, unknown_use
from exporter.report import Evidence, GpuReport, PodReport, Report
from exporter.snapshot import Pod
from exporter.usage import Owner, Unattributed


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerShare:
    """What one container holds of the GPU."""

    namespace: str
    pod: str
    container: str
    memory_used_bytes: int | None
    """None: the driver hides a process of it."""
    processes: tuple[ProcessEvidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEvidence:
    """All that is known of one GPU's memory."""

    report: GpuReport
    containers: tuple[ContainerShare, ...]
    unattributed: Mapping[Unattributed, tuple[ProcessEvidence, ...]]
    """By the reasons that there are; empty as well where it is not known who uses the GPU."""
    limits: tuple[PodReport, ...]
    """The pods that were given or use the GPU."""
    mig_uuids: tuple[str, ...]
    """Its MIG devices, whose processes the driver lists on those."""
    pods: Mapping[str, Pod]
    """Those known on this node, by UID."""
    unknown_use: UnknownUse | None

    @property
    def processes(self) -> tuple[ProcessEvidence, ...]:
        """Answer every process on the GPU once."""
        theirs = {process.pid: process for container in self.containers for process in container.processes}
        ownerless = {process.pid: process for processes in self.unattributed.values() for process in processes}
        return tuple(process for _, process in sorted({**theirs, **ownerless}.items()))


def gather_gpu(report: Report, evidence: Evidence, gpu_uuid: str) -> GpuEvidence:
    """Answer how the memory of one GPU of the report adds up."""
    pods = evidence.snapshot.kubernetes.pods if evidence.snapshot.kubernetes else {}
    of_owner: dict[Owner, list[ProcessEvidence]] = {}
    unattributed: dict[Unattributed, list[ProcessEvidence]] = {}
    for process in processes_on(evidence, gpu_uuid):
        if isinstance(process.owner, Owner):
            of_owner.setdefault(process.owner, []).append(process)
        if process.counted_as is not None and (process.memory_used_bytes is not None or isinstance(process.owner, Unattributed)):
            unattributed.setdefault(process.counted_as, []).append(process)
    usage = evidence.usage.get(gpu_uuid)
    shares = [
        ContainerShare(
            namespace=pods[owner.pod_uid].namespace,
            pod=pods[owner.pod_uid].name,
            container=owner.container,
            memory_used_bytes=usage.by_owner[owner].memory_used_bytes if usage else None,
            processes=tuple(processes),
        )
        for owner, processes in of_owner.items()
    ]
    return GpuEvidence(
        report=next(row for row in report.gpus if row.gpu.gpu_uuid == gpu_uuid),
        containers=tuple(sorted(shares, key=lambda share: (share.namespace, share.pod, share.container))),
        unattributed={reason: tuple(unattributed[reason]) for reason in Unattributed if reason in unattributed},
        limits=tuple(row for row in report.pods if row.gpu_uuid == gpu_uuid),
        mig_uuids=tuple(row.gpu.gpu_uuid for row in report.gpus if row.gpu.parent_gpu_uuid == gpu_uuid),
        pods=pods,
        unknown_use=unknown_use(evidence, gpu_uuid),
    )
