"""Where the time and the memory of the exporter go, on both nodes.

    python bench/profile_nodes.py [typical|extreme ...]

Needs py-spy and memray. For each node: build/profiles/NODE-cpu.svg (a flame graph of 30 s with two samples a second), NODE-cpu.txt (the
functions with most time of their own, and with all that they call), NODE-memory.txt (memray's statistics) and NODE-memory.html.
"""

import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import machine
import nodes
from light import ENVIRONMENT, scrape, wait_until_ready

OUTPUT = Path(__file__).parents[1] / "build" / "profiles"
SECONDS = 30
TOP = 25
FAST = ("--sample-interval-seconds", "0.5")


def main() -> None:
    """Profile."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or nodes.SIZES:
        with ExitStack() as stack:
            on = machine.set_up(nodes.plan(nodes.SIZES[name]), stack)
            profile_processor(name, on)
            profile_memory(name, on)


def profile_processor(name: str, on: machine.Machine) -> None:
    """Write where the processor's time goes."""
    with ExitStack() as stack:
        program, port = machine.start_exporter(on, stack, *FAST, **ENVIRONMENT)
        wait_until_ready(port, program)
        scrape(port)
        raw = OUTPUT / f"{name}-cpu.raw"
        spy = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(program.process.pid), "--duration", str(SECONDS)]
        spy += ["--rate", "500", "--nonblocking"]
        for form, output in (("raw", raw), ("flamegraph", OUTPUT / f"{name}-cpu.svg")):
            subprocess.run([*spy, "--format", form, "--output", str(output)], check=True, capture_output=True)  # noqa: S603 - our own
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    for line in raw.read_text().splitlines():
        stack_text, _, count = line.rpartition(" ")
        frames = [re.sub(r":\d+\)$", ")", frame) for frame in stack_text.split(";")]
        own[frames[-1]] += int(count)
        within.update(dict.fromkeys(frames, int(count)))
    total = own.total()
    lines = [f"{name}: {total} looks at what ran, in {SECONDS} s of two samples a second"]
    for title, counter in (("time of their own", own), ("with all that they call", within)):
        lines += ["", title, *(f"{100 * count / total:5.1f} %  {frame}" for frame, count in counter.most_common(TOP))]
    (OUTPUT / f"{name}-cpu.txt").write_text("\n".join(lines) + "\n")
    sys.stdout.write("\n".join(lines) + "\n\n")


def profile_memory(name: str, on: machine.Machine) -> None:
    """Write where the memory goes."""
    capture = OUTPUT / f"{name}-memory.bin"
    capture.unlink(missing_ok=True)
    with ExitStack() as stack:
        program = machine.exporter_under(("-m", "memray", "run", "--quiet", "--output", str(capture)), on, ENVIRONMENT, FAST)
        stack.callback(program.stop)
        port = program.port(machine.STARTED)
        wait_until_ready(port, program)
        for _ in range(20):
            scrape(port)
            time.sleep(0.5)
    for report, output in (("stats", OUTPUT / f"{name}-memory.txt"), ("flamegraph", OUTPUT / f"{name}-memory.html")):
        command = [
            sys.executable,
            "-m",
            "memray",
            report,
            *(["--force", "--output", str(output)] if report == "flamegraph" else []),
            str(capture),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - our own
        if report == "stats":
            output.write_text(done.stdout)
            sys.stdout.write(done.stdout)


if __name__ == "__main__":
    main()
