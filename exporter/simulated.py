"""The program on a simulated node: in real time as a daemon, or played to one moment on a simulated clock (`--once`).

The exporter's own sources talk to the simulated node exactly as to a real one: a gRPC kubelet, an HTTP API, a tree like /proc, and an
object with the driver's functions.
"""

import logging
import threading
from contextlib import ExitStack
from random import Random

from exporter.clock import Clock, SystemClock
from exporter.config import Config, ConfigError
from exporter.daemon import make_sampler, make_teller, print_exposition, serve
from exporter.sampler import Sampler, Sources
from exporter.simulation import DEMO, ScenarioError, SimulatedClock, SimulatedNode, load_scenario
from exporter.sources.hostfiles import HostfilesSource
from exporter.sources.kubelet import KubeletSource
from exporter.sources.kubernetes import KubernetesSource
from exporter.sources.kubernetes_config import ApiServer, find_api_server
from exporter.sources.nvml import NvmlSource
from exporter.sources.procfs import ProcfsSource

_log = logging.getLogger(__name__)

DEFAULT_AT_SECONDS = 30.0


def run(config: Config, stack: ExitStack) -> int:
    """Run on the simulated node that the flags name; answer the exit status. Raises ConfigError for a file that cannot be used."""
    try:
        scenario = load_scenario(config.scenario or DEMO)
    except ScenarioError as error:
        raise ConfigError(str(error)) from error
    if config.once:
        at_seconds = DEFAULT_AT_SECONDS if config.at_seconds is None else config.at_seconds
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(scenario, clock))
        sampler = wire(config, node, clock, stack)
        for number in range(int(at_seconds // config.sample_interval_seconds) + 1):
            sample_at(node, sampler, number * config.sample_interval_seconds)
        print_exposition(sampler.exposition)
        return 0
    system_clock = SystemClock()
    node = stack.enter_context(SimulatedNode(scenario, system_clock, repeat=config.demo))
    _log.info("state=simulating kubernetes_api=%s", node.kubernetes_url)
    sampler = wire(config, node, system_clock, stack)
    stop = threading.Event()
    stack.callback(stop.set)
    threading.Thread(target=node.play, args=(stop,), name="simulation", daemon=True).start()
    return serve(config, sampler, config.node_name or node.name, stack)


def sample_at(node: SimulatedNode, sampler: Sampler, seconds: float) -> None:
    """Let the timeline act up to this moment, and sample when the watches have seen what changed."""
    node.advance_to(seconds)
    node.settle()
    sampler.sample()


def wire(config: Config, node: SimulatedNode, clock: Clock, stack: ExitStack) -> Sampler:
    """Answer a sampler whose sources read the simulated node."""
    nvml = NvmlSource(library=node.nvml, clock=clock)
    stack.callback(nvml.close)
    node_name = config.node_name or node.name

    def api() -> ApiServer:
        return find_api_server(host=node.kubernetes_url)

    kubernetes = KubernetesSource(
        api=api,
        node_name=node_name,
        clock=clock,
        jitter=Random(0),  # noqa: S311 - the same run gives the same bytes
        dra=True,
    )
    stack.callback(kubernetes.close)
    kubernetes.start()
    node.add_client(kubernetes)
    sources = Sources(
        nvml=nvml,
        procfs=ProcfsSource(node.proc_root),
        kubelet=KubeletSource(socket=node.kubelet_socket),
        kubernetes=kubernetes,
        hostfiles=HostfilesSource(host_root=node.host_root, proc_root=node.host_root / "proc") if node.has_host_files else None,
    )
    return make_sampler(config, sources, clock, make_teller(config, api, node_name, clock, stack))
