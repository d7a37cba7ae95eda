"""A day on a simulated node, with pods that come and go and one fault of each kind an hour: shows that no number is ever wrong.

    python bench/day.py [TICKS]

17,280 ticks of 5 s are a day, on a simulated clock. At every tick the report is held to the node's own truth:

- each pod's used bytes are the sum of its own processes, or are not told;
- on each GPU the containers' bytes and the unattributed ones are together what the driver lists;
- no counter goes down;
- the sampler published a report of this very moment.

Between two faults everything must be told again. Prints a line an hour, and fails at the first number that is wrong.
"""

import gc
import logging
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

from exporter.config import parse_config
from exporter.report import Report
from exporter.sampler import Sampler
from exporter.simulated import wire
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario
from exporter.simulation.node import Entry, NodeState, Removal, Step

INTERVAL_SECONDS = 5.0
TICKS_OF_DAY = 17_280
TICKS_OF_HOUR = 720
# A fault lasts ten ticks; after thirty more, which is longer than any back-off, all must be well. Eighteen such spans are an hour.
FAULT_TICKS, SPAN_TICKS = 10, 40
PODS_AT_MOST = 24
PIDS = range(40_001, 40_101)
MIB = 1 << 20

GPUS = ("GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22", "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417")
GROUPS = ("3f6f0b5e-8d0e-4d5b-9f0e-2a4d5c1b7a10", "8c0ee6a4-6a0f-4d1c-8d6a-51c1b5c0f0aa")


class WrongNumberError(Exception):
    """The exporter said what is not true."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What breaks, and what mends it."""

    name: str
    breaks: Mapping[str, Any]
    mends: Mapping[str, Any]


def _source(**states: str) -> Fault:
    (source, state) = next(iter(states.items()))
    return Fault(f"{source} {state}", {"sources": states}, {"sources": {source: "up"}})


def _gpus(fault: str, *uuids: str) -> Fault:
    def entries(said: str) -> Mapping[str, Any]:
        return {"gpus": tuple(Entry(uuid, {"fault": said}, 1) for uuid in uuids)}

    return Fault(f"{len(uuids)} gpu {fault}", entries(fault), entries("none"))


def _label(key: str, broken: str, mended: str) -> Fault:
    return Fault(f"label {key} {broken}", {"machine": {"labels": {key: broken}}}, {"machine": {"labels": {key: mended}}})


FAULTS = (
    _source(kubelet="down"),
    _source(kubelet="refuse"),
    _source(kubelet="denied"),
    _source(kubelet="hang"),
    _source(kubelet="restart"),
    _source(kubernetes="down"),
    _source(kubernetes="unauthorized"),
    _source(kubernetes="gone"),
    _source(kubernetes="hang"),
    _source(nvml="down"),
    _source(nvml="not_loaded"),
    _gpus("lost", GPUS[1]),
    _gpus("hang", GPUS[1]),
    _gpus("hang", *GPUS),
    _gpus("unknown", *GPUS),
    Fault("gpu removed", {"remove": Removal(gpus=((GPUS[1], 1),))}, {"gpus": (Entry(GPUS[1], {}, 1),)}),
    Fault("host pid namespace", {"machine": {"host_pid": False}}, {"machine": {"host_pid": True}}),
    _label("nvidia.com/mig.config.state", "pending", "success"),
)


def make_pod(namespace: str, name: str, uid: str, container_id: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a running pod with one container."""
    status = {"name": "main", "containerID": f"containerd://{container_id}", "state": {"running": {}}}
    return {
        "metadata": {"namespace": namespace, "name": name, "uid": uid, **metadata},
        "spec": {"nodeName": "gpu-node-1", "schedulerName": "kai-scheduler", "containers": [{"name": "main"}]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


def make_scenario() -> dict[str, Any]:
    """Answer the node at the beginning: two GPUs, and KAI's reservation of each."""
    reservations = [
        make_pod(
            "kai-resource-reservation",
            f"gpu-reservation-{number}",
            f"{number:08x}-0000-4000-8000-00000000aaaa",
            f"{number:064x}",
            {"labels": {"runai-gpu-group": group}, "annotations": {"run.ai/reserve_for_gpu_index": uuid}},
        )
        for number, (group, uuid) in enumerate(zip(GROUPS, GPUS, strict=True), start=1)
    ]
    return {
        "node": {"name": "gpu-node-1", "labels": {"nvidia.com/gpu.memory": "81559"}},
        "gpus": [{"uuid": uuid} for uuid in GPUS],
        "pods": reservations,
    }


class Churn:
    """Pods that come and go: makes a step for each tick. PIDs are few, so that they soon belong to another pod."""

    def __init__(self, random: Random) -> None:
        self.pids: dict[str, list[int]] = {}
        """Pod -> its processes."""
        self._random = random
        self._ends: dict[str, int] = {}

    def step(self, tick: int, gpus: Mapping[str, object]) -> dict[str, Any]:
        """Answer what happens at this tick."""
        gone = [name for name, end in self._ends.items() if end <= tick]
        gone_pids = [pid for name in gone for pid in self.pids.pop(name)]
        for name in gone:
            del self._ends[name]
        pods, processes = [], []
        if self._random.random() < 0.5 and len(self._ends) < PODS_AT_MOST:  # noqa: PLR2004 - every other tick
            number = self._random.randrange(len(GPUS))
            name = f"team-{self._random.randrange(5)}/pod-{tick}"
            self._ends[name] = tick + self._random.randint(4, 120)
            self.pids[name] = self._free_pids(self._random.randint(1, 3), gone_pids)
            pods.append(Entry(name, self._make_pod(tick, name, GROUPS[number]), 1))
            if GPUS[number] in gpus:
                processes += [self._use(tick, name, pid, GPUS[number]) for pid in self.pids[name]]
            else:
                processes += [Entry(pid, {"container": f"{name}/main", "start_time_ticks": 100 + tick}, 1) for pid in self.pids[name]]
        return {
            "pods": tuple(pods),
            "processes": tuple(processes),
            "remove": Removal(pods=tuple((name, 1) for name in gone), processes=tuple((pid, 1) for pid in gone_pids)),
        }

    def grow(self, tick: int, state: NodeState) -> tuple[Entry[int, Mapping[str, Any]], ...]:
        """Answer new memory for one process."""
        pids = [pid for pid, process in state.processes.items() if process.gpus and set(process.gpus) <= set(state.gpus)]
        if not pids or tick % 3:
            return ()
        pid = self._random.choice(pids)
        uuid = next(iter(state.processes[pid].gpus))
        return (Entry(pid, {"gpus": (Entry(uuid, {"gpu": uuid, "memory_bytes": self._bytes()}, 1),)}, 1),)

    def _make_pod(self, tick: int, name: str, group: str) -> dict[str, Any]:
        namespace, _, pod = name.partition("/")
        metadata = {"labels": {"runai-gpu-group": group}, "annotations": {"gpu-memory": "2000"}}
        return make_pod(namespace, pod, f"{tick:08x}-0000-4000-8000-000000000000", f"{tick:032x}{tick:032x}", metadata)

    def _use(self, tick: int, name: str, pid: int, uuid: str) -> Entry[int, Mapping[str, Any]]:
        use = Entry(uuid, {"gpu": uuid, "memory_bytes": self._bytes(), "sm_percent": self._random.randrange(20)}, 1)
        return Entry(pid, {"container": f"{name}/main", "start_time_ticks": 100 + tick, "gpus": (use,)}, 1)

    def _free_pids(self, wanted: int, gone: list[int]) -> list[int]:
        # A PID that ends with this tick is not free before the next one, else the step would contradict itself.
        taken = {pid for pids in self.pids.values() for pid in pids} | set(gone)
        return self._random.sample([pid for pid in PIDS if pid not in taken], wanted)

    def _bytes(self) -> int:
        return self._random.randrange(1, 1500) * MIB


class Judgement:
    """Holds each report to the node's truth."""

    def __init__(self) -> None:
        self.reports = 0
        self.numbers = 0
        """Of pods, that were told and true."""
        self._counters: dict[tuple[object, ...], float] = {}

    def check(self, tick: int, report: Report | None, state: NodeState, pids: Mapping[str, list[int]], *, must_be_whole: bool) -> None:
        """Raise WrongNumberError for the first thing that is not true."""
        if report is None or report.monotonic_seconds != tick * INTERVAL_SECONDS:
            raise WrongNumberError(f"tick {tick}: there is no report of this moment")
        self.reports += 1
        used: Counter[tuple[str, str]] = Counter()
        listed: Counter[str] = Counter()
        for name, own in pids.items():
            for pid in own:
                for uuid, use in state.processes[pid].gpus.items():
                    used[name, uuid] += use.memory_bytes
                    listed[uuid] += use.memory_bytes
        self._check_pods(tick, report, used)
        self._check_gpus(tick, report, listed)
        self._check_counters(tick, report)
        if must_be_whole:
            told = {(f"{pod.namespace}/{pod.pod}", pod.gpu_uuid) for pod in report.pods if pod.memory_used_bytes is not None}
            if missing := {key for key in used if key not in told}:
                raise WrongNumberError(f"tick {tick}: all is well, and these are not told: {sorted(missing)}")

    def _check_pods(self, tick: int, report: Report, used: Mapping[tuple[str, str], int]) -> None:
        for pod in report.pods:
            true = used.get((f"{pod.namespace}/{pod.pod}", pod.gpu_uuid), 0)
            if pod.memory_used_bytes is None:
                continue
            self.numbers += 1
            if pod.memory_used_bytes != true:
                raise WrongNumberError(
                    f"tick {tick}: {pod.namespace}/{pod.pod} uses {true} bytes of {pod.gpu_uuid}, and {pod.memory_used_bytes} are told"
                )

    def _check_gpus(self, tick: int, report: Report, listed: Mapping[str, int]) -> None:
        for gpu in report.gpus:
            uuid = gpu.gpu.gpu_uuid
            if gpu.unattributed_bytes is None:
                continue
            told = sum(container.memory_used_bytes or 0 for container in report.containers if container.gpu_uuid == uuid)
            together = told + sum(gpu.unattributed_bytes.values())
            if together != listed.get(uuid, 0):
                raise WrongNumberError(f"tick {tick}: on {uuid} {together} bytes are told and {listed.get(uuid, 0)} are listed")

    def _check_counters(self, tick: int, report: Report) -> None:
        now: dict[tuple[object, ...], float] = {}
        for container in report.containers:
            if container.busy_total is not None:
                now["busy", container.pod_uid, container.container_id, container.gpu_uuid] = container.busy_total.sm
        for pod in report.pods:
            if pod.sm_busy_seconds_total is not None:
                now["pod busy", pod.pod_uid, pod.gpu_uuid] = pod.sm_busy_seconds_total
            for resource, breach in pod.breaches.items():
                now["exceeded", pod.pod_uid, pod.gpu_uuid, resource] = breach.exceeded_seconds_total
                now["breaches", pod.pod_uid, pod.gpu_uuid, resource] = breach.breaches_total
        for key, value in now.items():
            if value < self._counters.get(key, 0.0):
                raise WrongNumberError(f"tick {tick}: the counter {key} went from {self._counters[key]} down to {value}")
        self._counters.update(now)
        if tick % TICKS_OF_HOUR == 0:
            # Pods live for ten minutes at most: what is absent now does not come back.
            self._counters = now


@dataclass(frozen=True, slots=True)
class Size:
    """What the process takes."""

    resident_kib: int
    threads: int
    descriptors: int


def measure() -> Size:
    """Answer what this process takes now."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return Size(resident, threading.active_count(), len(list(Path("/proc/self/fd").iterdir())))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    ticks: int
    faults: int
    pods: int
    numbers: int
    sizes: tuple[Size, ...]
    """After each span of `measure_every` ticks."""


def play(ticks: int, *, measure_every: int = TICKS_OF_HOUR, say: Callable[[str], object] = lambda _: None) -> Outcome:
    """Play so many ticks. Raises WrongNumberError."""
    config = parse_config(["--demo", "--once"], {})
    churn, judgement, sizes = Churn(Random(7)), Judgement(), []  # noqa: S311 - the same day every time
    faults = pods = 0
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "node.yaml"
        file.write_text(yaml.safe_dump(make_scenario()))
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(file), clock))
        sampler = wire(config, node, clock, stack)
        for tick in range(ticks):
            span, in_span = divmod(tick, SPAN_TICKS)
            fault = FAULTS[span % len(FAULTS)]
            step = churn.step(tick, node._state.gpus)  # noqa: SLF001 - its truth
            pods += len(step["pods"])
            node.advance_to(tick * INTERVAL_SECONDS)
            _act(node, step)
            _act(node, {"processes": churn.grow(tick, node._state)})  # noqa: SLF001 - its truth
            if span > 0 and in_span == 0:
                faults += 1
                _act(node, fault.breaks)
            if span > 0 and in_span == FAULT_TICKS:
                _act(node, fault.mends)
            _sample(node, sampler)
            is_last_of_span = in_span == SPAN_TICKS - 1
            exposition = sampler.exposition
            judgement.check(tick, exposition.report, node._state, churn.pids, must_be_whole=is_last_of_span)  # noqa: SLF001 - its truth
            if is_last_of_span and (down := [source.source for source in exposition.health.sources if not source.up]):
                raise WrongNumberError(f"tick {tick}: {down} should be up again after: {fault.name}")
            if (tick + 1) % measure_every == 0:
                sizes.append(measure())
                say(f"tick={tick + 1} pods={pods} faults={faults} numbers={judgement.numbers} {sizes[-1]}")
    return Outcome(ticks, faults, pods, judgement.numbers, tuple(sizes))


def _act(node: SimulatedNode, step: Mapping[str, Any]) -> None:
    node._act(Step(**step), starts_anew=False)  # noqa: SLF001 - steps that no file could hold
    node.settle()


def _sample(node: SimulatedNode, sampler: Sampler) -> None:
    node.settle()
    sampler.sample()


def main() -> None:
    """Play and print."""
    ticks = int(sys.argv[1]) if len(sys.argv) > 1 else TICKS_OF_DAY
    # Every fault would be told, and is no news here.
    logging.getLogger("exporter").setLevel(logging.CRITICAL)
    began = time.monotonic()
    outcome = play(ticks, say=lambda line: print(line, flush=True))  # noqa: T201 - the result
    first, last = outcome.sizes[0], outcome.sizes[-1]
    print(  # noqa: T201 - the result
        f"ticks={outcome.ticks} faults={outcome.faults} pods={outcome.pods} true_numbers={outcome.numbers} wrong_numbers=0 "
        f"growth since the first hour: resident_kib={last.resident_kib - first.resident_kib} threads={last.threads - first.threads} "
        f"descriptors={last.descriptors - first.descriptors}; took {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
