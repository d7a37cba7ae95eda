"""What the words for unknown and unattributed things mean, as parts of sentences."""

from collections.abc import Mapping

from exporter.explain.process import UnknownUse
from exporter.health import Health
from exporter.report import Missing
from exporter.usage import Unattributed

UNATTRIBUTED: Mapping[Unattributed, str] = {
    Unattributed.HOST_PROCESS: "processes of the host, whose cgroup names no pod",
    Unattributed.PROCESS_GONE: "processes that had ended when /proc was read",
    Unattributed.UNKNOWN_CONTAINER: "processes of pods or containers that are not known here (yet)",
    Unattributed.MPS_SERVER: "the MPS server, which works for its clients",
    Unattributed.EXPORTER: "this exporter itself",
    Unattributed.PARTLY_HIDDEN: "processes of containers of which the driver hides another process",
}

_MISSING: Mapping[Missing, str] = {
    Missing.NOT_PLACED: "its contract names no GPU yet",
    Missing.UNREADABLE: "a contract of it cannot be read",
    Missing.KUBELET_UNKNOWN: "what the kubelet handed out is not known{}",
    Missing.KUBERNETES_UNKNOWN: "what the Kubernetes API says of pods is not known{}",
}
_MISSING_SOURCES = {Missing.KUBELET_UNKNOWN: "kubelet", Missing.KUBERNETES_UNKNOWN: "kubernetes"}

_UNKNOWN_USE: Mapping[UnknownUse, str] = {
    UnknownUse.DRIVER_DOWN: "the driver cannot be read{}",
    UnknownUse.PROCFS_DOWN: "without the host's /proc no process has an owner{}",
    UnknownUse.GPU_NOT_LISTED: "the driver does not list this GPU",
    UnknownUse.GPU_DOWN: "the driver answers with an error for this GPU, or not at all",
    UnknownUse.PROCESSES_UNREADABLE: "the driver's process lists of this GPU cannot be read or believed",
    UnknownUse.MEMORY_HIDDEN: "the driver hides the memory of a process",
}
_UNKNOWN_SOURCES = {UnknownUse.DRIVER_DOWN: "nvml", UnknownUse.PROCFS_DOWN: "procfs"}


def missing(reason: Missing, health: Health) -> str:
    """Answer why there may be limits that are not known."""
    return _MISSING[reason].format(because(_MISSING_SOURCES.get(reason), health))


def unknown_use(reason: UnknownUse, health: Health) -> str:
    """Answer why it is not known who uses a GPU, or how much."""
    return _UNKNOWN_USE[reason].format(because(_UNKNOWN_SOURCES.get(reason), health))


def down(source: str, health: Health) -> str | None:
    """Answer why a source is down; None where it is up."""
    return next((each.reason or "no reason told" for each in health.sources if each.source == source and not each.up), None)


def because(source: str | None, health: Health) -> str:
    """Answer why a source is down, in parentheses; nothing where it is up."""
    reason = down(source, health) if source else None
    return f" ({reason.rstrip('.')})" if reason else ""
