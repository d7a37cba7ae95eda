"""Which container is a process of: /proc/PID/cgroup and /proc/PID/stat of the processes that NVML lists.

Called by the sampler's thread. A process that is gone is absent from the answer; only being outside of the host's PID namespace is
a `SourceError`: a PID of one namespace must never be looked up in another. Needs no capability: the files are world-readable.

Formats: proc(5) and cgroups(7). How kubelets and runtimes name cgroups: tests/data/cgroup-samples.tsv.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from exporter.snapshot import CgroupRef, ProcessFacts, ProcfsReading
from exporter.sources import SourceError

# include/linux/proc_ns.h, PROC_PID_INIT_INO: the first PID namespace has this inode on every Linux since 3.8.
_FIRST_PID_NAMESPACE = f"pid:[{0xEFFFFFFC}]"

_MAX_STAT_BYTES = 4096
_MAX_CGROUP_BYTES = 1 << 16

_UID = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32}"
_POD_DIRECTORY = re.compile(rf"pod({_UID})")
# Where the kubelet uses the systemd driver and containerd does not, OCI's "slice:prefix:id" becomes one literal component.
_POD_SLICE = re.compile(rf"(?:[\w.-]+-)?kubepods(?:-burstable|-besteffort)?-pod({_UID})\.slice(?::[\w-]+:([0-9a-f]{{64}}))?")
_CONTAINER = re.compile(r"(?:cri-containerd-|crio-|docker-)?([0-9a-f]{64})(?:\.scope)?")


def parse_cgroup(text: str) -> tuple[CgroupRef, ...]:
    """Answer the places in a /proc/PID/cgroup text that may be the process's container, the outermost first.

    More than one only where pods are nested in pods. Which one decides is the core's business, because it depends on the pods that
    this node knows: a tenant can make deeper components in its own cgroup. Empty: no container of Kubernetes.
    """
    of_lines = [_parse_path(line.split(":", 2)[2]) for line in text.splitlines() if line.count(":") >= 2]  # noqa: PLR2004 - hierarchy:controllers:path

    # On a hybrid host either the v1 lines or the v2 line may name the pod; a controller that the runtime left alone names less.
    def wealth(refs: tuple[CgroupRef, ...]) -> tuple[bool, bool]:
        return any(ref.pod_uid for ref in refs), any(ref.container_id for ref in refs)

    return max(of_lines, key=wealth, default=())


def _parse_path(path: str) -> tuple[CgroupRef, ...]:
    components = [part for part in path.removesuffix(" (deleted)").split("/") if part]
    # In a private cgroup namespace paths are relative to the reader and may lose the word kubepods: /../../pod<uid>/<id>.
    relative = bool(components) and components[0] == ".."
    below_kubepods = relative
    refs = []
    for position, component in enumerate(components):
        below = components[position + 1] if position + 1 < len(components) else ""
        if slice_match := _POD_SLICE.fullmatch(component):
            refs.append(CgroupRef(_canonical_uid(slice_match[1]), slice_match[2] or _container_id(below)))
        elif below_kubepods and (match := _POD_DIRECTORY.fullmatch(component)):
            refs.append(CgroupRef(_canonical_uid(match[1]), _container_id(below)))
        below_kubepods = below_kubepods or "kubepods" in component
    if not refs and relative:
        first = next((part for part in components if part != ".."), "")
        if container_id := _container_id(first):
            refs.append(CgroupRef(None, container_id))
    return tuple(refs)


def _canonical_uid(uid: str) -> str:
    return uid.replace("_", "-")


def _container_id(component: str) -> str | None:
    match = _CONTAINER.fullmatch(component)
    return match[1] if match else None


def parse_stat(text: str) -> tuple[str, int]:
    """Answer (comm, start time in clock ticks since boot) of a /proc/PID/stat text; ValueError where it is torn or none.

    The name stands in parentheses and may contain any character, parentheses and spaces included, so the last one ends it.
    """
    before, parenthesis, after = text.rpartition(")")
    fields = after.split()
    start_time_index = 22 - 3  # field 22, counted from the state, which is field 3
    if not parenthesis or "(" not in before or len(fields) <= start_time_index:
        raise ValueError(f"no stat line: {text[:40]!r}")
    return before.partition("(")[2], int(fields[start_time_index])


class ProcfsSource:
    """Reads processes below one /proc. It remembers what it learned of a (PID, start time), never that it learned nothing."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._remembered: dict[int, ProcessFacts] = {}

    def read(self, pids: Iterable[int]) -> ProcfsReading:
        """Answer the facts of these processes; one that is gone is absent. Raises SourceError outside the host's PID namespace."""
        own_pid = self._own_pid()
        if reason := self._reason_for_foreign_namespace(own_pid):
            self._remembered = {}
            raise SourceError(
                f"not in the host's PID namespace: {reason}. No process can be attributed to a pod. "
                "Set hostPID: true in the pod's spec (deploy/daemonset.yaml has it)."
            )
        processes = {pid: facts for pid in pids if (facts := self._read_process(pid)) is not None}
        self._remembered = {pid: facts for pid, facts in processes.items() if any(ref.container_id for ref in facts.cgroup)}
        return ProcfsReading(own_pid=own_pid, processes=processes)

    def _own_pid(self) -> int:
        try:
            return int((self._root / "self").readlink().name)
        except (OSError, ValueError) as error:
            raise SourceError(f"{self._root}/self cannot be read ({error}): is a proc file system mounted there?") from error

    def _reason_for_foreign_namespace(self, own_pid: int) -> str | None:
        own_namespace = self._read_link("self/ns/pid")
        if own_namespace == _FIRST_PID_NAMESPACE:
            return None
        if own_pid == 1:
            return "this process is PID 1"
        # Unreadable for a process without capabilities, and the same namespace by nature where /proc is the container's own.
        first = self._read_link("1/ns/pid")
        if first is not None and own_namespace is not None and first != own_namespace:
            return f"PID 1 is in {first}, this process in {own_namespace}"
        try:
            comm, _ = parse_stat(self._read_stat("1"))
            cgroup = parse_cgroup(self._read_cgroup("1"))
        except (OSError, ValueError) as error:
            return f"{self._root}/1 cannot be read ({error})"
        # With shareProcessNamespace PID 1 is the pod's pause process. A node that is itself a container (kind) has an init there.
        if comm == "pause" or cgroup:
            return f"PID 1 is {comm!r}, a process of a pod"
        return None

    def _read_process(self, pid: int) -> ProcessFacts | None:
        try:
            comm, start_time_ticks = parse_stat(self._read_stat(pid))
            known = self._remembered.get(pid)
            if known is not None and known.start_time_ticks == start_time_ticks and known.comm == comm:
                return known
            cgroup = parse_cgroup(self._read_cgroup(pid))
            # The PID may have been given to another process between the two reads.
            if parse_stat(self._read_stat(pid))[1] != start_time_ticks:
                return None
        except (FileNotFoundError, ProcessLookupError, NotADirectoryError, ValueError):
            return None
        return ProcessFacts(pid=pid, start_time_ticks=start_time_ticks, comm=comm, cgroup=cgroup)

    def _read_stat(self, pid: int | str) -> str:
        # Read of every process at every sample: a file object costs more than the reading of a line that the kernel gives whole.
        descriptor = os.open(f"{self._root}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _MAX_STAT_BYTES).decode("utf-8", "replace")
        finally:
            os.close(descriptor)

    def _read_cgroup(self, pid: int | str) -> str:
        with (self._root / str(pid) / "cgroup").open("rb") as file:
            return file.read(_MAX_CGROUP_BYTES).decode("utf-8", "replace")

    def _read_link(self, name: str) -> str | None:
        try:
            return str((self._root / name).readlink())
        except OSError:
            return None
