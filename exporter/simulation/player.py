"""The simulated node in motion: acts the steps of a scenario when their time comes, on all that an exporter reads of a node.

On a `SimulatedClock` time moves only when it is told to, from one thing that happens to the next, and after each everything comes to
rest before it goes on: the same scenario gives the same answers every time. On any other clock it plays in real time.
"""

import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Protocol, Self

from exporter.clock import Clock, SystemClock
from exporter.simulation.clock import SimulatedClock
from exporter.simulation.kubelet import SimulatedKubelet
from exporter.simulation.kubernetes import SimulatedApi
from exporter.simulation.node import NodeState, Sources, Step, apply
from exporter.simulation.nvml import SimulatedNvml
from exporter.simulation.proc import SimulatedProc
from exporter.simulation.scenario import Scenario

_log = logging.getLogger(__name__)

# What takes so long in truth is broken, not slow.
_REST_SECONDS = 20.0
_LOOK_SECONDS = 0.0005
_TICK_SECONDS = 0.2


class WatchClient(Protocol):
    """A client of the Kubernetes API with a thread for each kind of object that it watches."""

    def watch_threads(self) -> Mapping[str, threading.Thread]:
        """Answer the threads that were started, by the plural name of what they watch."""
        ...

    def processed_version(self) -> Mapping[str, str]:
        """Answer the resourceVersion up to which each thread has taken in what it was sent."""
        ...


class SimulatedNode:
    """A node that plays a scenario until it is closed. Belongs to one thread, `close` apart; what it serves may be read by any.

    `nvml` stands in for the module pynvml, `kubelet_socket`, `kubernetes_url`, `proc_root` and `host_root` are where the rest is found,
    and `has_host_files` says whether anything ever lies below the latter.
    """

    def __init__(self, scenario: Scenario, clock: Clock, *, repeat: bool = False) -> None:
        """Take what is to be played, and the clock of whoever reads. With `repeat` the scenario starts anew when its last step is over."""
        self.name = scenario.node_name
        self._scenario = scenario
        self._clock = clock
        self._simulated_clock = clock if isinstance(clock, SimulatedClock) else None
        self._clients: list[WatchClient] = []
        self._state = NodeState()
        # Held while the node changes, so that it is not closed in the middle of that.
        self._changing = threading.Lock()
        self._is_closed = False
        self._steps = self._unroll(repeat=repeat and scenario.duration_seconds > 0)
        self._next: tuple[float, Step, bool] | None = next(self._steps)
        real_time = self._simulated_clock is None
        self._folder = Path(tempfile.mkdtemp(prefix="fgpu-"))
        self.kubelet_socket = self._folder / "kubelet.sock"
        self.nvml = SimulatedNvml(clock.time())
        self._kubelet = SimulatedKubelet(self.kubelet_socket, real_time=real_time)
        self._api = SimulatedApi(clock, real_time=real_time)
        self.kubernetes_url = self._api.url
        self._proc = SimulatedProc(self._folder, {entry.key for step in scenario.steps for entry in step.processes})
        self.proc_root = self._proc.root
        self.host_root = self._proc.host_root
        self.has_host_files = any(step.files for step in scenario.steps)
        self._act_steps(0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving and remove all files."""
        with self._changing:
            if self._is_closed:
                return
            self._is_closed = True
            self.nvml.close()
            self._api.close()
            self._kubelet.close()
            shutil.rmtree(self._folder)

    def add_client(self, client: WatchClient) -> None:
        """Have `advance_to` and `settle` wait for a client's threads, too."""
        self._clients.append(client)

    def advance_to(self, seconds: float) -> None:
        """Play up to so many seconds after the start, the steps at that very moment included."""
        with self._changing:
            if self._is_closed:
                return
            while (moment := self._next_moment(seconds)) is not None:
                self._let_pass(moment)
                self._act_steps(moment)
                self.settle()
            self._let_pass(seconds)

    def settle(self) -> None:
        """On a simulated clock, wait until no thread of a client has anything left to do before time moves on."""
        if self._simulated_clock is None:
            return
        truth = SystemClock()
        never = threading.Event()
        give_up_at = truth.monotonic() + _REST_SECONDS
        while busy := self._find_busy(self._simulated_clock):
            if truth.monotonic() > give_up_at:
                _log.warning("state=restless waiting_for=%s", busy)
                return
            truth.wait(never, _LOOK_SECONDS)

    def play(self, stop: threading.Event) -> None:
        """Play in real time until told to stop."""
        started = self._clock.monotonic()
        while not self._clock.wait(stop, _TICK_SECONDS):
            self.advance_to(self._clock.monotonic() - started)

    # --- steps ---

    def _unroll(self, *, repeat: bool) -> Iterator[tuple[float, Step, bool]]:
        """Answer the steps, when each is to be acted, and whether the node starts anew with it."""
        for cycle in count() if repeat else range(1):
            for position, step in enumerate(self._scenario.steps):
                yield cycle * self._scenario.duration_seconds + step.at_seconds, step, position == 0

    def _act_steps(self, now: float) -> None:
        while self._next is not None and self._next[0] <= now:
            _, step, starts_anew = self._next
            self._act(step, starts_anew=starts_anew)
            self._next = next(self._steps, None)

    def _act(self, step: Step, *, starts_anew: bool) -> None:
        before = self._state
        if starts_anew:
            counters = Sources(
                kubelet_restarts=before.sources.kubelet_restarts, kubernetes_expirations=before.sources.kubernetes_expirations
            )
            before = NodeState(sources=counters)
        self._state = apply(before, step)
        # From the driver up: whoever sees a process can find out whose it is.
        self._api.update(self._state)
        self._kubelet.update(self._state)
        self._proc.update(self._state)
        self.nvml.update(self._state)

    # --- time ---

    def _next_moment(self, limit: float) -> float | None:
        """Answer when something happens next, up to the limit."""
        moments = [self._next[0]] if self._next is not None else []
        if self._simulated_clock is not None:
            deadlines = (self._simulated_clock.next_deadline(), self._api.next_deadline())
            moments += [deadline for deadline in deadlines if deadline is not None]
        return min((moment for moment in moments if moment <= limit), default=None)

    def _let_pass(self, moment: float) -> None:
        self.nvml.advance_to(moment)
        if self._simulated_clock is not None:
            self._simulated_clock.advance_to(moment)
        # Now only: whose connection is cut waits from this moment on, and not from the one before.
        self._api.act_on_time()
        self.settle()

    def _find_busy(self, clock: SimulatedClock) -> str | None:
        if not self.nvml.is_settled():
            return "a call of NVML"
        for client in self._clients:
            for name, thread in client.watch_threads().items():
                if thread.is_alive() and not clock.is_waiting(thread):
                    version = client.processed_version().get(name)
                    if not self._api.is_settled(name, version):
                        return f"the watch of {name}"
        return None
