"""Writes Kubernetes Events about pods, on a thread of its own, and holds nobody up.

`tell()` is called by the sampler's thread and does no I/O: it puts what is to be told into a queue of bounded size. The thread starts with
the first breach. An API server that does not take an event is asked again a bounded number of times, ever later; where it says that the
service account may not, nothing is asked of that namespace for ten minutes. Whatever is not written is counted.

Protocol: https://kubernetes.io/docs/reference/using-api/api-concepts/, requests as of client-go's recorder, which also does without reading
events: https://pkg.go.dev/k8s.io/client-go/tools/record.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from random import Random
from urllib.parse import quote

import urllib3

from exporter.clock import Clock
from exporter.events import Dropped, PodEvent, Recent, SpamFilter, build_event, encode_event, encode_repeat
from exporter.health import EventsHealth
from exporter.journal import BreachChange
from exporter.judge import Resource
from exporter.sources.kubernetes_api import (
    AttemptError,
    ConflictError,
    Connection,
    ExpiredError,
    ForbiddenError,
    NamespaceTerminatingError,
    NotServedError,
    RejectedError,
    backoff_seconds,
)
from exporter.sources.kubernetes_config import ApiServer
from exporter.sources.kubernetes_objects import Json

_log = logging.getLogger(__name__)

MOST_QUEUED = 1000
"""As many as client-go keeps. Beyond it the oldest goes."""
ATTEMPTS = 8
FORBIDDEN_SECONDS = 600.0
# Ten a second, whatever happens on the node.
PAUSE_SECONDS = 0.1

_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 10.0
_JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"


class EventWriter:
    """Tells pods' owners of breaches. `api` makes a client, again and again until it can; `jitter` spreads attempts over time."""

    def __init__(self, *, api: Callable[[], ApiServer], node_name: str, clock: Clock, jitter: Random) -> None:
        self._connection = Connection(api, urllib3.Timeout(connect=_CONNECT_SECONDS, read=_ANSWER_SECONDS))
        self._node_name = node_name
        self._clock = clock
        self._jitter = jitter
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        # Guards the three below.
        self._lock = threading.Lock()
        self._queue: deque[PodEvent] = deque()
        self._written_total = 0
        self._dropped_total: Counter[Dropped] = Counter()
        # Of the thread that calls `tell`.
        self._filter = SpamFilter()
        # Of the thread that writes.
        self._counts: Recent[str, int] = Recent()
        self._told: Recent[tuple[str, str, Resource], float] = Recent()
        self._forbidden_until: Recent[str, float] = Recent()
        self._failure: str | None = None

    # --- the sampler's side ---

    def tell(self, changes: Iterable[BreachChange]) -> None:
        """Take breaches that began and ended, to be told as soon as the API server takes them."""
        for change in changes:
            event = build_event(change)
            if self._filter.is_told(event):
                continue
            dropped = self._filter.admit(event)
            if dropped is not None:
                self._drop(dropped)
                continue
            with self._lock:
                self._queue.append(event)
                if is_full := len(self._queue) > MOST_QUEUED:
                    self._queue.popleft()
            if is_full:
                self._drop(Dropped.QUEUE_FULL)
            self._start()
        self._wake.set()

    def health(self) -> EventsHealth:
        """Answer how many events were written, and how many were not, by every reason."""
        with self._lock:
            return EventsHealth(
                written_total=self._written_total, dropped_total={reason.value: self._dropped_total[reason] for reason in Dropped}
            )

    def close(self) -> None:
        """Stop writing at once: what is queued is not told. A thread that still waits for an answer ends with the process."""
        self._stop.set()
        self._wake.set()
        self._connection.interrupt()
        if self._thread is not None:
            self._thread.join(0.2)

    def _start(self) -> None:
        """Start the thread, or a new one where an unforeseen error has ended it."""
        if not self._stop.is_set() and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="event-writer", daemon=True)
            self._thread.start()

    # --- the thread ---

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                event = self._queue.popleft() if self._queue else None
                if event is None:
                    self._wake.clear()
            if event is None:
                self._wake.wait()
                continue
            dropped = self._deliver(event)
            if dropped is not None:
                self._drop(dropped)

    def _deliver(self, event: PodEvent) -> Dropped | None:
        """Write an event; answer why it is not written."""
        if not event.begun and self._told.pop(event.breach) != event.since_seconds:
            return Dropped.BEGIN_UNTOLD
        forbidden_until = self._forbidden_until.get(event.namespace)
        if forbidden_until is not None and self._clock.monotonic() < forbidden_until:
            return Dropped.FORBIDDEN
        for attempt in range(1, ATTEMPTS + 1):
            dropped, wait_seconds = self._attempt(event, attempt)
            if not self._stop.is_set():
                self._clock.wait(self._stop, wait_seconds)
            if dropped is not Dropped.UNREACHABLE or self._stop.is_set():
                return dropped
        return Dropped.UNREACHABLE

    def _attempt(self, event: PodEvent, attempt: int) -> tuple[Dropped | None, float]:
        """Try to write an event; answer why it is not written, and for how long to leave the API server alone."""
        try:
            count = self._send(event)
        except (NotServedError, NamespaceTerminatingError) as error:
            _log.debug("events=gone namespace=%s pod=%s reason=%r", event.namespace, event.pod, str(error))
            return Dropped.GONE, PAUSE_SECONDS
        except ForbiddenError as error:
            self._forbid(event.namespace, str(error))
            return Dropped.FORBIDDEN, PAUSE_SECONDS
        except (RejectedError, ConflictError, ExpiredError) as error:
            self._note_failure(str(error))
            return Dropped.REFUSED, PAUSE_SECONDS
        except AttemptError as error:
            self._note_failure(str(error))
            return Dropped.UNREACHABLE, max(backoff_seconds(attempt) * self._jitter.uniform(0.5, 1), error.retry_after_seconds)
        self._counts.put(event.name, count)
        if event.begun:
            self._told.put(event.breach, event.since_seconds)
        self._note_success(event.namespace)
        return None, PAUSE_SECONDS

    def _send(self, event: PodEvent) -> int:
        """Write an event; answer how often it has happened now."""
        count = self._counts.get(event.name)
        if count is not None:
            try:
                return _count(self._patch(event, count + 1))
            except NotServedError:
                self._counts.pop(event.name)  # The API server keeps events for an hour, usually.
        try:
            return _count(self._connection.write("POST", _path(event.namespace), _JSON, encode_event(event, self._node_name)))
        except ConflictError:
            # It stands from before a restart, or the answer to its making was lost: whether this is the same breach is not known, so it is
            # told anew and not counted.
            return _count(self._patch(event, None))

    def _patch(self, event: PodEvent, count: int | None) -> Json:
        path = f"{_path(event.namespace)}/{quote(event.name, safe='')}"
        return self._connection.write("PATCH", path, _MERGE_PATCH, encode_repeat(event, count))

    # --- what becomes of them ---

    def _forbid(self, namespace: str, reason: str) -> None:
        if not self._forbidden_until:
            _log.warning(
                "events=forbidden namespace=%s reason=%r hint=%r",
                namespace,
                reason,
                "grant this service account the verbs create and patch on events, or leave --kubernetes-events off; "
                f"no event is written there for {FORBIDDEN_SECONDS:.0f} s",
            )
        self._forbidden_until.put(namespace, self._clock.monotonic() + FORBIDDEN_SECONDS)

    def _note_success(self, namespace: str) -> None:
        with self._lock:
            self._written_total += 1
        if self._forbidden_until.pop(namespace) is not None and not self._forbidden_until:
            _log.info("events=allowed namespace=%s", namespace)
        if self._failure is not None:
            _log.info("events=written")
            self._failure = None

    def _note_failure(self, reason: str) -> None:
        if self._failure is None and not self._stop.is_set():
            _log.warning("events=failing reason=%r", reason)
        self._failure = reason

    def _drop(self, reason: Dropped) -> None:
        with self._lock:
            self._dropped_total[reason] += 1


def _path(namespace: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/events"


def _count(written: Json) -> int:
    count = written.get("count")
    return count if isinstance(count, int) and count > 0 else 1
