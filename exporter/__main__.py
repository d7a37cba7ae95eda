"""The program: flags, the sources of this node, exit codes.

Exit status: 0 after SIGTERM, SIGINT or --once; 2 for a flag or file that cannot be used; 3 when only a new process can help (the driver's
library in this container no longer fits the driver, say).
"""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

from exporter.clock import SystemClock
from exporter.config import Config, ConfigError, fail, parse_config
from exporter.daemon import make_sampler, print_exposition, serve
from exporter.sampler import Sources
from exporter.server import ServerError
from exporter.sources import FatalSourceError
from exporter.sources.kubelet import KubeletSource
from exporter.sources.kubernetes import KubernetesSource, api_client
from exporter.sources.nvml import NvmlSource
from exporter.sources.procfs import ProcfsSource

_log = logging.getLogger("exporter")

EXIT_FATAL_SOURCE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; answer its exit status."""
    try:
        config = parse_config(sys.argv[1:] if arguments is None else arguments, os.environ)
    except ConfigError as error:
        return fail(str(error))
    logging.basicConfig(
        level=config.log_level.upper(),
        format="ts=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
        stream=sys.stderr,
    )
    with ExitStack() as stack:
        try:
            if config.scenario or config.demo:
                # The simulator is code that no node runs: a node does not pay for loading it.
                from exporter import simulated  # noqa: PLC0415

                return simulated.run(config, stack)
            return run(config, stack)
        except (ConfigError, ServerError) as error:
            return fail(str(error))
        except FatalSourceError as error:
            _log.critical("state=fatal reason=%r", str(error))
            return EXIT_FATAL_SOURCE


def run(config: Config, stack: ExitStack) -> int:
    """Run on this node; answer the exit status."""
    clock = SystemClock()
    nvml = NvmlSource(clock=clock, pid_max=_read_pid_max(config.proc_path))
    stack.callback(nvml.close)
    kubernetes = KubernetesSource(
        api=lambda: api_client(kubeconfig=config.kubeconfig),
        node_name=config.node_name or "",
        clock=clock,
        jitter=Random(),  # noqa: S311 - spreads load, guards nothing
        dra=config.dra,
    )
    stack.callback(kubernetes.close)
    kubernetes.start()
    sources = Sources(
        nvml=nvml,
        procfs=ProcfsSource(config.proc_path),
        kubelet=KubeletSource(socket=config.kubelet_socket),
        kubernetes=kubernetes,
    )
    sampler = make_sampler(config, sources, clock)
    if config.once:
        sampler.sample()
        # A share of time needs two readings.
        clock.wait(threading.Event(), config.sample_interval_seconds)
        print_exposition(sampler.sample())
        return 0
    return serve(config, sampler, stack)


def _read_pid_max(proc_path: Path) -> int:
    most_that_linux_allows = 4194304
    try:
        return int((proc_path / "sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return most_that_linux_allows


if __name__ == "__main__":
    sys.exit(main())
