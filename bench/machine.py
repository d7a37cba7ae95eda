"""What a benchmark runs on: the stand-in driver library, real processes in real cgroups, a kubelet and an API server, and an exporter.

All of it is of one process's own making and gone when the `ExitStack` closes. Linux and root: making cgroups takes that.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from live import HIERARCHIES
from nodes import GPU_MEMORY_MIB, GPUS, MIB, NODE_NAME, Plan, gpu_uuid, mig_uuid
from nvml_stand_in.stand_in import Busy, Device, Mig, Process, StandIn, compile_stand_in

BENCH = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Machine:
    """A node that is set up."""

    folder: Path
    stand_in: StandIn
    library: Path
    flags: tuple[str, ...]
    """What tells the exporter where the kubelet and the API server are."""
    environment: Mapping[str, str]
    servers: "Servers"


class Servers:
    """The kubelet and the API server, in their process."""

    def __init__(self, scenario: Path, folder: Path) -> None:
        command = [sys.executable, str(BENCH / "servers.py"), str(scenario), str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own
        self.where = self._read()
        """`kubelet_socket` and `kubernetes_port`."""

    def calls(self) -> dict[str, int]:
        """Answer how often each was asked so far."""
        cast(IO[str], self._process.stdin).write("\n")
        cast(IO[str], self._process.stdin).flush()
        return self._read()

    def stop(self) -> None:
        """End them."""
        self._process.communicate(timeout=20)

    def _read(self) -> Any:  # noqa: ANN401 - JSON
        return json.loads(cast(IO[str], self._process.stdout).readline())


def set_up(plan: Plan, stack: ExitStack) -> Machine:
    """Answer a machine with this node on it; the stack takes it away again."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fgpu-bench-")))
    library = compile_stand_in(folder)
    stack.callback(_remove_cgroups, plan)
    pids = _start_processes(plan, stack)
    stand_in = StandIn(folder)
    stand_in.write(*_devices(plan, pids))
    scenario = folder / "scenario.yaml"
    scenario.write_text(yaml.safe_dump(plan.scenario))
    servers = Servers(scenario, folder)
    stack.callback(servers.stop)
    (folder / "token").write_text("of-this-pod")
    return Machine(
        folder=folder,
        stand_in=stand_in,
        library=library,
        flags=("--node-name", NODE_NAME, "--kubelet-socket", servers.where["kubelet_socket"]),
        environment={
            "LD_LIBRARY_PATH": str(library.parent),
            "NVML_STAND_IN_FILE": str(stand_in.file),
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(servers.where["kubernetes_port"]),
            "SERVICE_ACCOUNT": str(folder),
        },
        servers=servers,
    )


def _start_processes(plan: Plan, stack: ExitStack) -> list[int]:
    hierarchy = next((path for path in HIERARCHIES if os.access(path / "cgroup.procs", os.W_OK)), None)
    if hierarchy is None:
        raise SystemExit("no cgroup hierarchy can be written here: run as root, outside of an unprivileged container")
    pids = []
    for client in plan.clients:
        process = subprocess.Popen(["/bin/sleep", "100000"])
        stack.callback(_end, process)
        cgroup = hierarchy / "kubepods" / f"pod{client.pod_uid}" / client.container_id
        cgroup.mkdir(parents=True, exist_ok=True)
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        pids.append(process.pid)
    return pids


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def _remove_cgroups(plan: Plan) -> None:
    """Remove the cgroups of the plan's containers, once their processes have ended."""
    for hierarchy in HIERARCHIES:
        for client in plan.clients:
            folder = hierarchy / "kubepods" / f"pod{client.pod_uid}" / client.container_id
            with suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()
        with suppress(OSError):
            (hierarchy / "kubepods").rmdir()


def _devices(plan: Plan, pids: Sequence[int]) -> list[Device]:
    processes: dict[tuple[int, int | None], list[Process]] = defaultdict(list)
    samples: dict[int, list[Busy]] = defaultdict(list)
    for client, pid in zip(plan.clients, pids, strict=True):
        processes[client.gpu, client.mig].append(Process(pid=pid, memory=client.memory_bytes))
        if client.mig is None:
            samples[client.gpu].append(Busy(pid=pid, sm=client.sm_percent, memory=1))
    devices = []
    for index in range(GPUS):
        migs = plan.scenario["gpus"][index].get("mig", ())
        devices.append(
            Device(
                uuid=gpu_uuid(index),
                minor=index,
                bus=f"00000000:{index + 1:02x}:00.0",
                memory_total=GPU_MEMORY_MIB * MIB,
                utilization=40,
                processes=tuple(processes[index, None]),
                samples=tuple(samples[index]),
                migs=tuple(
                    Mig(uuid=mig_uuid(index, slot), gpu_instance=slot + 7, slot=slot, processes=tuple(processes[index, slot]))
                    for slot in range(len(migs))
                ),
            )
        )
    return devices


class Program:
    """A program that is measured: its resident memory, its processor time, its answers."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.started_seconds = time.monotonic()
        with log.open("w") as output:
            self.process = subprocess.Popen(  # noqa: S603 - our own
                command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
            )

    def port(self, pattern: str, seconds: float = 20.0) -> int:
        """Answer the port that it says it listens on, which the pattern's group is."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if match := re.search(pattern, self.log.read_text()):
                return int(match[1])
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise SystemExit(f"the program did not start: {self.log.read_text()[-2000:]}")

    def memory_kib(self) -> dict[str, int]:
        """Answer its resident memory, and the part that no file backs."""
        fields = {}
        for line in Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("Rss", "Private_Dirty", "Anonymous"):
                fields[name] = int(rest.split()[0])
        return fields

    def cpu_seconds(self) -> float:
        """Answer the processor time that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


STARTED = r"state=started .*port=(\d+)"
"""What the exporter's log says of its port."""


def exporter_under(tool: Sequence[str], on: Machine, environment: Mapping[str, str], flags: Sequence[str]) -> Program:
    """Answer the exporter, starting on this machine as the script of a tool."""
    command = [sys.executable, *tool, str(BENCH / "in_pod.py"), "--port", "0", "--listen-address", "127.0.0.1", *on.flags, *flags]
    return Program(command, {**on.environment, **environment}, on.folder / "exporter.log")


def start_exporter(on: Machine, stack: ExitStack, *flags: str, **environment: str) -> tuple[Program, int]:
    """Answer the exporter, running on this machine, and its port."""
    program = exporter_under((), on, environment, flags)
    stack.callback(program.stop)
    return program, program.port(STARTED)


def description() -> dict[str, Any]:
    """Answer what machine this is."""
    cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    memory = int(Path("/proc/meminfo").read_text().split()[1]) // 1024
    return {"processor": cpu, "cores": os.cpu_count(), "memory_mib": memory, "python": sys.version.split()[0], "kernel": os.uname().release}
