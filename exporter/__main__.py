"""The program: flags, the sources of this node, exit codes. Its first argument may be a command for a person instead (`exporter.commands`).

Exit status: 0 after SIGTERM, SIGINT or --once; 2 for a flag or file that cannot be used; 3 when only a new process can help (the driver's
library in this container no longer fits the driver, say).
"""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from exporter import commands
from exporter.clock import Clock, SystemClock
from exporter.commands import COMMANDS
from exporter.config import Config, ConfigError, fail, parse_config, unknown_variables
from exporter.daemon import make_sampler, make_teller, print_exposition, serve
from exporter.sampler import KubernetesReader, Sources
from exporter.server import ServerError
from exporter.sources import FatalSourceError
from exporter.sources.hostfiles import HostfilesSource
from exporter.sources.kubelet import KubeletSource
from exporter.sources.kubelet_pods import FallbackPodsSource, KubeletPodsSource
from exporter.sources.kubernetes import KubernetesSource
from exporter.sources.kubernetes_config import find_api_server
from exporter.sources.nvml import NvmlSource
from exporter.sources.procfs import ProcfsSource

_log = logging.getLogger("exporter")

EXIT_FATAL_SOURCE = 3

# A report is not served when it is older than three intervals. With these shares one sample lasts 1.4 intervals at most, whatever hangs,
# so that the report before it is served until the next one is there.
_DEVICE_DEADLINE_INTERVALS = 0.6
_KUBELET_DEADLINE_INTERVALS = 0.4
# Where the kubelet tells the pods too, by a call of its own: 1.8 intervals.
_PODS_DEADLINE_INTERVALS = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long others are waited for. Whoever embeds the program may be less patient; a node has no reason to."""

    device_seconds: float = 3.0
    kubelet_seconds: float = 2.0
    api_silence_seconds: float = 75.0
    """An API server sends a bookmark each minute: a watch that is silent for longer is dead."""
    unknown_error_seconds: float = 300.0
    """For so long may the driver answer nothing but its unknown error, before a new process is to try."""


def main(arguments: Sequence[str] | None = None, patience: Patience = Patience()) -> int:
    """Run the program; answer its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        return commands.run(arguments[0], arguments[1:])
    try:
        config = parse_config(arguments, os.environ)
    except ConfigError as error:
        return fail(str(error))
    # Whoever asks for one exposition reads it on a terminal.
    level = "warning" if config.once and config.log_level == "info" else config.log_level
    logging.basicConfig(
        level=level.upper(),
        format="ts=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
        stream=sys.stderr,
    )
    for name in unknown_variables(os.environ):
        _log.warning("variable=%s state=ignored reason='no flag has this name'", name)
    with ExitStack() as stack:
        try:
            if config.scenario or config.demo:
                # The simulator is code that no node runs: a node does not pay for loading it.
                from exporter import simulated  # noqa: PLC0415

                return simulated.run(config, stack)
            return run(config, stack, patience)
        except ConfigError as error:
            return fail(str(error))
        except ServerError as error:
            return fail(f"{error} (flags --listen-address, --port, --web-config-file)")
        except FatalSourceError as error:
            _log.critical("state=fatal reason=%r", str(error))
            return EXIT_FATAL_SOURCE


def run(config: Config, stack: ExitStack, patience: Patience) -> int:
    """Run on this node; answer the exit status."""
    clock = SystemClock()
    nvml = NvmlSource(
        clock=clock,
        device_deadline_seconds=min(patience.device_seconds, _DEVICE_DEADLINE_INTERVALS * config.sample_interval_seconds),
        pid_max=_read_pid_max(config.proc_path),
        give_up_seconds=patience.unknown_error_seconds,
    )
    stack.callback(nvml.close)
    sources = Sources(
        nvml=nvml,
        procfs=ProcfsSource(config.proc_path),
        kubelet=KubeletSource(
            socket=config.kubelet_socket,
            deadline_seconds=min(patience.kubelet_seconds, _KUBELET_DEADLINE_INTERVALS * config.sample_interval_seconds),
        ),
        kubernetes=_pod_source(config, clock, patience, stack),
        hostfiles=HostfilesSource(host_root=config.host_path, proc_root=config.proc_path) if config.host_path else None,
    )
    teller = make_teller(config, lambda: find_api_server(kubeconfig=config.kubeconfig), config.node_name or "", clock, stack)
    sampler = make_sampler(config, sources, clock, teller)
    if config.once:
        sampler.sample()
        # A share of time needs two readings.
        clock.wait(threading.Event(), config.sample_interval_seconds)
        print_exposition(sampler.sample())
        return 0
    return serve(config, sampler, config.node_name or "", stack)


def _pod_source(config: Config, clock: Clock, patience: Patience, stack: ExitStack) -> KubernetesReader:
    kubelet = KubeletPodsSource(
        socket=config.kubelet_pods_socket,
        deadline_seconds=min(patience.kubelet_seconds, _PODS_DEADLINE_INTERVALS * config.sample_interval_seconds),
    )
    if config.pod_source == "kubelet":
        return kubelet
    kubernetes = KubernetesSource(
        api=lambda: find_api_server(kubeconfig=config.kubeconfig),
        node_name=config.node_name or "",
        clock=clock,
        jitter=Random(),  # noqa: S311 - spreads load, guards nothing
        dra=config.dra,
        read_timeout_seconds=patience.api_silence_seconds,
    )
    stack.callback(kubernetes.close)  # its threads start with the first sample, once it is certain that the program can run
    return FallbackPodsSource(kubernetes=kubernetes, kubelet=kubelet) if config.pod_source == "auto" else kubernetes


def _read_pid_max(proc_path: Path) -> int:
    most_that_linux_allows = 4194304
    try:
        return int((proc_path / "sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return most_that_linux_allows


if __name__ == "__main__":
    sys.exit(main())
