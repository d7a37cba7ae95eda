"""The file trees of a simulated node: its /proc, and the host files that an exporter may read.

proc(5). A process is a folder that is replaced as a whole, so that a PID that goes to another process is never half of each.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path

from exporter.simulation.node import NodeState, Process

_HOST_NAMESPACE = "pid:[4026531836]"  # include/linux/proc_ns.h: the first PID namespace has this inode
_CONTAINER_NAMESPACE = "pid:[4026532741]"
_MAX_PID = 4194304
_MAX_COMM_BYTES = 15
_OWN_COMMAND = "fgpu-exporter"

_SYSTEMD = Process(pid=1, command="systemd", cgroup="0::/init.scope\n", start_time_ticks=1)
_KTHREADD = Process(pid=2, command="kthreadd", cgroup="0::/\n", start_time_ticks=1)


class SimulatedProc:
    """Keeps `root` as /proc is on the node, and `host_root` as its other files. Belongs to one thread."""

    def __init__(self, folder: Path, all_pids: Iterable[int]) -> None:
        """Take an empty folder, and every PID that the node will ever have: the exporter gets another."""
        self.root = folder / "proc"
        self.host_root = folder / "host"
        self._versions = folder / "processes"
        for path in (self.root, self.host_root, self._versions):
            path.mkdir()
        self._own_pid = next(pid for pid in count(1000) if pid not in set(all_pids))
        self._numbers = count()
        self._written: Mapping[int, Process] = {}
        self._files: Mapping[str, bytes] = {}
        self._host_pid: bool | None = None

    def update(self, state: NodeState) -> None:
        """Take a new state of the node."""
        if state.machine.host_pid is not self._host_pid:
            self._host_pid = state.machine.host_pid
            for pid in self._written:
                self._remove(pid)
            self._written = {}
            self._write_self()
        processes = self._visible(state)
        for pid in self._written.keys() - processes.keys():
            self._remove(pid)
        for pid, process in processes.items():
            if self._written.get(pid) != process:
                self._write(process)
        self._written = processes
        if state.files is not self._files:
            self._write_files(state.files)

    def _visible(self, state: NodeState) -> Mapping[int, Process]:
        if not state.machine.host_pid:
            # A container of its own sees itself, as PID 1, and nobody else.
            return {1: Process(pid=1, command=_OWN_COMMAND, cgroup="0::/\n", start_time_ticks=5000)}
        own = Process(pid=self._own_pid, command=_OWN_COMMAND, cgroup="0::/\n", start_time_ticks=5000)
        there = {pid: process for pid, process in state.processes.items() if 0 < pid <= _MAX_PID and process.state != "gone"}
        return {1: _SYSTEMD, 2: _KTHREADD, own.pid: own, **there}

    def _write_self(self) -> None:
        _link(self.root / "self", str(self._own_pid if self._host_pid else 1))

    def _write(self, process: Process) -> None:
        folder = self._versions / f"{process.pid}.{next(self._numbers)}"
        (folder / "ns").mkdir(parents=True)
        comm = process.command.encode()[:_MAX_COMM_BYTES]
        (folder / "comm").write_bytes(comm + b"\n")
        (folder / "stat").write_bytes(render_stat(process))
        (folder / "cgroup").write_text(process.cgroup)
        (folder / "ns" / "pid").symlink_to(_HOST_NAMESPACE if self._host_pid else _CONTAINER_NAMESPACE)
        path = self.root / str(process.pid)
        before = path.resolve() if path.is_symlink() else None
        _link(path, str(folder))
        if before is not None:
            shutil.rmtree(before)

    def _remove(self, pid: int) -> None:
        path = self.root / str(pid)
        folder = path.resolve()
        path.unlink()
        shutil.rmtree(folder)

    def _write_files(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            if self._files.get(name) == content:
                continue
            path = self.host_root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            new = self._versions / f"file.{next(self._numbers)}"
            new.write_bytes(content)
            new.replace(path)
        self._files = files


def render_stat(process: Process) -> bytes:
    """Answer the line of /proc/PID/stat: 52 fields, the second of which may hold spaces and parentheses."""
    comm = process.command.encode()[:_MAX_COMM_BYTES]
    parent = 0 if process.pid in (1, 2) else 1
    before = f"{process.state} {parent} {process.pid} {process.pid} 0 -1 4194560 894 0 1 0 120 35 0 0 20 0 8 0"
    after = (
        "12884901888 137000 18446744073709551615 4198400 4688961 140725981719328 0 0 0 0 0 16386 1 0 0 17 1 0 0 0 0 0 4851416 4874864 "
        "372748288 140725981724643 140725981724650 140725981724650 140725981724657 0"
    )
    return b"%d (%s) %s %d %s\n" % (process.pid, comm, before.encode(), process.start_time_ticks, after.encode())


def _link(path: Path, target: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.symlink_to(target)
    os.replace(new, path)  # noqa: PTH105 - Path.replace would do the same; the name says that it is the system's atomic rename
