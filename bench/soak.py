"""Ticks with pods that come and go: shows that memory, threads and file descriptors stay flat.

    python bench/soak.py [TICKS] [NEW_PODS_A_TICK]

Plays a simulated node on a simulated clock. At each tick some pods with a GPU process arrive and those of the tick before leave, through
the real kubelet, API and /proc clients. Prints a line every tenth of the way and, last, the growth between the first tenth and the end.
"""

import gc
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from exporter.config import parse_config
from exporter.simulated import wire
from exporter.simulation import DEMO, SimulatedClock, SimulatedNode, load_scenario
from exporter.simulation.node import Entry, Removal, Step
from exporter.text_format import Format

GPU = "GPU-e27b441d-a61d-4b3b-885b-75543d05a587"
INTERVAL_SECONDS = 5.0


def resident_kib() -> int:
    """Answer this process's resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmRSS")


def make_step(tick: int, pods: int) -> Step:
    """Answer the arrival of this tick's pods and the leaving of the last one's."""
    names = [f"team-{number % 7}/pod-{tick}-{number}" for number in range(pods)]
    gone = [f"team-{number % 7}/pod-{tick - 1}-{number}" for number in range(pods)] if tick else []
    objects, processes = [], []
    for number, name in enumerate(names):
        namespace, _, pod = name.partition("/")
        uid = f"{tick:08x}-{number:04x}-4000-8000-000000000000"
        container_id = f"{tick:032x}{number:032x}"
        body = {
            "metadata": {"namespace": namespace, "name": pod, "uid": uid, "annotations": {"gpu-memory": "2000"}},
            "spec": {"nodeName": "gpu-node-7", "containers": [{"name": "main"}]},
            "status": {
                "phase": "Running",
                "containerStatuses": [{"name": "main", "containerID": f"containerd://{container_id}", "state": {"running": {}}}],
            },
        }
        objects.append(Entry(name, body, 1))
        pid = 100_000 + (tick % 2) * 1000 + number
        use = Entry(GPU, {"gpu": GPU, "memory_bytes": 1 << 30, "sm_percent": 5}, 1)
        processes.append(Entry(pid, {"pid": pid, "container": f"{name}/main", "start_time_ticks": 100 + tick, "gpus": (use,)}, 1))
    removal = Removal(
        pods=tuple((name, 1) for name in gone),
        processes=tuple((100_000 + ((tick - 1) % 2) * 1000 + number, 1) for number in range(len(gone))),
    )
    return Step(at_seconds=tick * INTERVAL_SECONDS, pods=tuple(objects), processes=tuple(processes), remove=removal)


def main() -> None:
    """Play and print."""
    ticks = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    pods = int(sys.argv[2]) if len(sys.argv) > 2 else 10  # noqa: PLR2004 - the second argument
    config = parse_config(["--demo", "--once"], {})
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(DEMO), clock))
        sampler = wire(config, node, clock, stack)
        rows = []
        for tick in range(ticks):
            node.advance_to(tick * INTERVAL_SECONDS)
            node._act(make_step(tick, pods), starts_anew=False)  # noqa: SLF001 - steps that no file could hold
            node.settle()
            exposition = sampler.sample()
            if tick % 3 == 0:
                exposition.render(Format.TEXT, compressed=True)
            if (tick + 1) % max(ticks // 10, 1) == 0:
                gc.collect()
                rows.append((tick + 1, resident_kib(), threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))))
                print("tick={} resident_kib={} threads={} descriptors={}".format(*rows[-1]), flush=True)  # noqa: T201 - the result
        first, last = rows[0], rows[-1]
        print(  # noqa: T201 - the result
            f"pods={ticks * pods} growth: resident_kib={last[1] - first[1]} threads={last[2] - first[2]} descriptors={last[3] - first[3]}"
        )


if __name__ == "__main__":
    main()
