"""The running program: a sampler on its thread, an HTTP server, signals. What it samples is handed in."""

import gc
import logging
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from random import Random

from exporter import __version__
from exporter.clock import Clock
from exporter.config import Config, config_facts
from exporter.endpoints import build_routes
from exporter.exposition import Exposition
from exporter.node_json import About
from exporter.report import Rules
from exporter.sampler import BreachTeller, Sampler, Sources
from exporter.server import Server
from exporter.sources import FatalSourceError
from exporter.sources.kubernetes_config import ApiServer
from exporter.text_format import Format
from exporter.waker import Waker

_log = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005
_COLLECTION_THRESHOLDS = (20_000, 20, 50)
"""A report is some ten thousand objects, without cycles: they go with the report, and a collection would look at them in vain."""


def make_teller(config: Config, api: Callable[[], ApiServer], node_name: str, clock: Clock, stack: ExitStack) -> BreachTeller | None:
    """Answer who tells pods' owners of breaches; None where no one is to. `--once` shows what is, and tells nobody."""
    if not config.kubernetes_events or config.once:
        return None
    # Off by default: who does not want it does not pay for loading it.
    from exporter.event_writer import EventWriter  # noqa: PLC0415

    writer = EventWriter(api=api, node_name=node_name, clock=clock, jitter=Random())  # noqa: S311 - spreads load, guards nothing
    stack.callback(writer.close)
    return writer


def make_sampler(config: Config, sources: Sources, clock: Clock, teller: BreachTeller | None = None) -> Sampler:
    """Answer a sampler of these sources under the rules that the flags set."""
    rules = Rules(
        utilization_window_seconds=config.utilization_window_seconds,
        compute_window_seconds=config.compute_window_seconds,
        breach_hold_seconds=config.breach_hold_seconds,
        kai_reservation_namespaces=frozenset(config.kai_reservation_namespaces),
        system_namespaces=frozenset(config.system_namespaces),
        max_series=config.max_series,
    )
    return Sampler(
        sources=sources,
        clock=clock,
        rules=rules,
        sample_interval_seconds=config.sample_interval_seconds,
        identity_ttl_seconds=config.identity_ttl_seconds,
        config_facts=config_facts(config),
        teller=teller,
    )


def about(config: Config, node_name: str) -> About:
    """Answer what the exporter says of itself to people's tools."""
    return About(
        node=node_name,
        simulated=bool(config.demo or config.scenario),
        sample_interval_seconds=config.sample_interval_seconds,
        utilization_window_seconds=config.utilization_window_seconds,
        compute_window_seconds=config.compute_window_seconds,
    )


def serve(config: Config, sampler: Sampler, node_name: str, stack: ExitStack) -> int:
    """Sample and answer scrapes until a signal says to stop; answer the exit status. What is on the stack ends within 2 s."""
    # For so long may a sample in progress keep a scrape waiting each time that it needs the interpreter.
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # what was loaded stays
    gc.set_threshold(*_COLLECTION_THRESHOLDS)
    stop = threading.Event()
    # Never closed: a signal that comes while the rest ends asks for nothing more.
    waker = Waker((signal.SIGTERM, signal.SIGINT))

    routes = build_routes(sampler, about(config, node_name))
    server = Server(address=config.listen_address, port=config.port, routes=routes, web_config=config.web_config_file)
    server.start()
    stack.callback(server.close)
    _log.info("state=started version=%s address=%s port=%d", __version__, config.listen_address, server.port)
    if (config.demo or config.scenario) and not config.web_config_file:
        _log.info("page=http://localhost:%d/", server.port)  # whoever runs a simulated node sits before it

    fatal: list[FatalSourceError] = []

    def sample() -> None:
        try:
            sampler.run(stop)
        except FatalSourceError as error:
            fatal.append(error)
            waker.wake()

    # A daemon, so that a call of the driver that never returns cannot keep the process from ending.
    threading.Thread(target=sample, name="sampler", daemon=True).start()
    signals: frozenset[int] = frozenset()
    while not (signals or fatal):
        select.select([waker.reader], [], [])
        signals = waker.read()
    if signals:
        _log.info("state=stopping signal=%s", signal.Signals(min(signals)).name)
    stop.set()
    if fatal:
        raise fatal[0]
    return 0


def print_exposition(exposition: Exposition) -> None:
    """Print one exposition to standard output."""
    sys.stdout.buffer.write(exposition.render(Format.TEXT, compressed=False))
    sys.stdout.flush()
