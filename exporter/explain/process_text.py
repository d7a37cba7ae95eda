"""A process of a GPU in one sentence: its PID, its memory, its lists, its cgroup and so its container."""

from collections.abc import Iterable, Mapping

from exporter.explain import words
from exporter.explain.process import ProcessEvidence, known_bytes
from exporter.snapshot import CgroupRef, Pod
from exporter.usage import Unattributed

_SHORT_ID_CHARACTERS = 12


def held_memory(processes: Iterable[ProcessEvidence]) -> str:
    """Answer what processes hold together: `2.0 GiB`, `at least 2.0 GiB`, or an amount that the driver hides."""
    processes = tuple(processes)
    hidden = sum(process.memory_used_bytes is None for process in processes)
    if not hidden:
        return words.memory(known_bytes(processes))
    return "an amount that the driver hides" if hidden == len(processes) else f"at least {words.memory(known_bytes(processes))}"


def describe_process(process: ProcessEvidence, whose: str) -> str:
    """Answer the evidence of one process; `whose` says what the cgroup means, as the end of the sentence."""
    holds = (
        "holds memory that the driver hides" if process.memory_used_bytes is None else f"holds {words.memory(process.memory_used_bytes)}"
    )
    lists = words.join(list(process.lists)) or "no"
    name = f"PID {process.pid}" + (f" ({process.comm})" if process.comm else "")
    said = f"{name} {holds}, by NVML's {lists} {'list' if len(process.lists) == 1 else 'lists'}; {_cgroup(process)}{whose}"
    if process.counted_as is Unattributed.PARTLY_HIDDEN and process.memory_used_bytes is not None:
        return f"{said}; it is counted as partly_hidden, because the driver hides the memory of another process of that container."
    return f"{said}."


def _cgroup(process: ProcessEvidence) -> str:
    if not process.cgroup:
        return ""
    places = " inside ".join(describe_place(ref) for ref in reversed(process.cgroup))
    return f"its cgroup names {places}, "


def describe_place(ref: CgroupRef) -> str:
    """Answer a place in a cgroup path."""
    container = f"container {ref.container_id[:_SHORT_ID_CHARACTERS]}" if ref.container_id else ""
    pod = f"pod {ref.pod_uid}" if ref.pod_uid else ""
    return " of ".join(part for part in (container, pod) if part)


def why_unattributed(process: ProcessEvidence, pods: Mapping[str, Pod]) -> str:
    """Answer why a process has no container, as the end of its sentence. `pods` are those known here, by UID."""
    match process.owner:
        case Unattributed.HOST_PROCESS:
            return "its cgroup names no pod, so it is a process of the host (host_process)"
        case Unattributed.PROCESS_GONE:
            return "it had ended when /proc was read, so whose it was cannot be proven (process_gone)"
        case Unattributed.MPS_SERVER:
            return "it is an MPS server, which works for its clients (mps_server)"
        case Unattributed.EXPORTER:
            return "it is this exporter itself (exporter)"
        case _:
            return f"{_unknown_place(process, pods)} (unknown_container)"


def _unknown_place(process: ProcessEvidence, pods: Mapping[str, Pod]) -> str:
    known = [pods[ref.pod_uid] for ref in process.cgroup if ref.pod_uid is not None and ref.pod_uid in pods]
    if not known:
        return "and no pod of that UID with such a container is known on this node (yet)"
    pod = known[0]
    return f"and the status of pod {pod.namespace}/{pod.name} names no such container (yet)"
