"""Which pods are on this node: list and watch of the Kubernetes API, kept up to date by threads of its own.

One thread for each kind of object; each publishes a whole mapping by replacing one reference. `read()` is called by the sampler's thread
and does no I/O: it answers the newest mappings, or raises `SourceError` while the watch of pods or of the Node object is broken. What was
known before stays readable by `last_reading()`.

Protocol: https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes. The kubernetes package's own Watch
is not used (a KeyError on an expired version, in 37.0).
"""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from random import Random
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import urllib3
from urllib3.response import BaseHTTPResponse

from exporter.clock import Clock
from exporter.snapshot import KubernetesReading
from exporter.sources import SourceError
from exporter.sources.kubernetes_api import (
    AttemptError,
    Connection,
    ExpiredError,
    ForbiddenError,
    NotServedError,
    UndecodableError,
    backoff_seconds,
    decode_object,
    refusal,
)
from exporter.sources.kubernetes_config import ApiServer
from exporter.sources.kubernetes_objects import (
    Json,
    current_devices,
    may_be_used_on,
    parse_claim,
    parse_node,
    parse_pod,
    parse_slice,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MIN_WATCH_SECONDS = 1.0
_WATCH_SECONDS = (300, 600)
_FAILURES_BEFORE_RELIST = 3
_MAX_UIDS_LOGGED = 1000

_DRA_VERSIONS = ("v1", "v1beta2", "v1beta1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resource(Generic[T]):
    """A kind of object to watch, and how objects become facts."""

    name: str
    paths: tuple[str, ...]
    """One for each version of the API, the newest first."""
    parse: Callable[[Json], T]
    key: Callable[[T], str]
    is_ours: Callable[[Json], bool]
    field_selector: str | None = None


class _Watch(Generic[T]):
    """One kind of object: listed, then watched, for ever, by one thread. Attributes without underscore may be read by any thread."""

    def __init__(self, resource: _Resource[T], connection: Connection, clock: Clock, jitter: Random, stop: threading.Event) -> None:
        self.resource = resource
        self.objects: Mapping[str, T] | None = None
        """What the server said last, never changed but replaced; None: never listed."""
        self.failure: str | None = "not read yet"
        """Why what is known may be old; None: a watch is open."""
        self.processed_version: str | None = None
        """resourceVersion of the last list, event or bookmark that `objects` holds."""
        self.malformed_total = 0
        self._connection = connection
        self._clock = clock
        self._jitter = jitter
        self._stop = stop
        self._thread: threading.Thread | None = None
        self._path_index = 0
        self._resume_from: str | None = None
        self._failures = 0
        self._expirations = 0
        self._uids_logged: set[str] = set()

    @property
    def thread(self) -> threading.Thread | None:
        """Answer the thread that was started last."""
        return self._thread

    def start(self) -> None:
        """Start the thread, or a new one where an unforeseen error has ended it."""
        if not self._stop.is_set() and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name=f"watch-{self.resource.name}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End a read that blocks."""
        self._connection.interrupt()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the thread's end."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        self._resume_from = None
        try:
            while not self._stop.is_set():
                self._wait(self._advance())
        finally:
            if not self._stop.is_set():
                self.failure = "the watch ended by an error that was not foreseen; the log has it"

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            self._clock.wait(self._stop, seconds)

    def _advance(self) -> float:
        """List where that is due, then watch until it ends. Answer how many seconds to wait before the next attempt."""
        try:
            if self._resume_from is None:
                self._list()
            return self._follow()
        except ExpiredError as expired:
            if self._expirations == 0:
                _log.info("resource=%s state=expired resource_version=%s reason=%r", self.resource.name, self._resume_from, str(expired))
            self._resume_from = None
            self._expirations += 1
            return self._jitter.uniform(0, backoff_seconds(self._expirations))
        except UndecodableError as error:
            self._resume_from = None
            return self._fail(f"an answer cannot be decoded: {error}", 0)
        except NotServedError as error:
            self._resume_from = None
            self._path_index = (self._path_index + 1) % len(self.resource.paths)
            return self._fail(str(error), 0) if self._path_index == 0 else 0
        except AttemptError as error:
            return self._fail(str(error), error.retry_after_seconds)

    def _fail(self, reason: str, retry_after_seconds: float) -> float:
        if self._stop.is_set():
            return 0
        if self.failure != reason:
            _log.warning("resource=%s state=lost reason=%r", self.resource.name, reason)
        self.failure = reason
        self._failures += 1
        if self._failures % _FAILURES_BEFORE_RELIST == 0:
            # A version that this server never reaches (another replica's, or from before a restored backup) must not be asked for ever.
            self._resume_from = None
        return max(backoff_seconds(self._failures) * self._jitter.uniform(0.5, 1), retry_after_seconds)

    def _get(self, verb: str, query: Mapping[str, str]) -> BaseHTTPResponse:
        selector = {"fieldSelector": self.resource.field_selector} if self.resource.field_selector else {}
        try:
            return self._connection.get(self.resource.paths[self._path_index], {**selector, **query})
        except ForbiddenError as error:
            raise AttemptError(
                f"may not {verb} {self.resource.name}: grant this service account the verbs list and watch on them ({error})"
            ) from error

    def _list(self) -> None:
        # Version 0 is answered from the server's memory. Where that is behind, so that its version has expired again, ask for the newest.
        newest = self._expirations > 1
        response = self._get("list", {} if newest else {"resourceVersion": "0"})
        answer = decode_object(self._connection.read_body(response))
        if "items" not in answer:
            raise AttemptError("the answer to a list has no items: is this an API server?")
        items = answer["items"]
        objects: dict[str, T] = {}
        for item in items if isinstance(items, list) else ():
            if (entry := self._parse(item)) is not None and self.resource.is_ours(item):
                objects[entry[0]] = entry[1]
        self.objects = MappingProxyType(objects)
        self.processed_version = self._resume_from = _version(answer) or ""  # without a version a watch starts with what exists

    def _follow(self) -> float:
        started = self._clock.monotonic()
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._resume_from or "",
            "timeoutSeconds": str(self._jitter.randint(*_WATCH_SECONDS)),
        }
        response = self._get("watch", query)
        if self.failure is not None:
            _log.info(
                "resource=%s state=connected objects=%d resource_version=%s",
                self.resource.name,
                len(self.objects or ()),
                self._resume_from,
            )
        self.failure = None
        with closing(self._connection.read_lines(response)) as lines:
            for line in lines:
                self._apply(decode_object(line))
                self._failures = self._expirations = 0
                if self._stop.is_set():
                    return 0
        self._failures = 0
        # A server, or a proxy before it, that ends every watch at once must not be asked without pause.
        return _MIN_WATCH_SECONDS if self._clock.monotonic() - started < _MIN_WATCH_SECONDS else 0

    def _apply(self, event: Json) -> None:
        changed = event.get("object")
        if not isinstance(changed, Mapping):
            raise UndecodableError("an event without an object")
        match event.get("type"):
            case "ADDED" | "MODIFIED":
                self._put(changed, keep=self.resource.is_ours(changed))
            case "DELETED":
                self._put(changed, keep=False)
            case "BOOKMARK":
                pass
            case "ERROR":
                code = changed.get("code")
                raise refusal(code if isinstance(code, int) else HTTPStatus.INTERNAL_SERVER_ERROR, changed, None)
            case _:
                return
        if (version := _version(changed)) is not None:
            self.processed_version = self._resume_from = version

    def _put(self, changed: Json, *, keep: bool) -> None:
        entry = self._parse(changed)
        if entry is None:
            return
        key, facts = entry
        objects = dict(self.objects or {})
        if keep:
            objects[key] = facts
        elif objects.pop(key, None) is None:
            return
        self.objects = MappingProxyType(objects)

    def _parse(self, candidate: object) -> tuple[str, T] | None:
        try:
            if not isinstance(candidate, Mapping):
                raise ValueError("not an object")  # noqa: TRY301 - one name for all that is malformed
            facts = self.resource.parse(candidate)
        except ValueError as error:
            self._count_malformed(candidate, str(error))
            return None
        return self.resource.key(facts), facts

    def _count_malformed(self, candidate: object, reason: str) -> None:
        self.malformed_total += 1
        metadata = candidate.get("metadata") if isinstance(candidate, Mapping) else None
        identity = repr({key: metadata.get(key) for key in ("uid", "namespace", "name")} if isinstance(metadata, Mapping) else None)[:300]
        if identity not in self._uids_logged and len(self._uids_logged) < _MAX_UIDS_LOGGED:
            self._uids_logged.add(identity)
            _log.warning("resource=%s state=malformed object=%s reason=%r", self.resource.name, identity, reason)


class KubernetesSource:
    """Watches the pods of a node and its Node object; with `dra` also its ResourceSlices and the cluster's ResourceClaims.

    `api` makes a client for each thread, again and again until it can (credentials may come late). `jitter` spreads requests over time. An
    API server sends a bookmark each minute, so that silence for `read_timeout_seconds` means a connection that is dead without knowing.
    """

    def __init__(
        self,
        *,
        api: Callable[[], ApiServer],
        node_name: str,
        clock: Clock,
        jitter: Random,
        dra: bool = False,
        connect_timeout_seconds: float = 5.0,
        read_timeout_seconds: float = 75.0,
    ) -> None:
        self._node_name = node_name
        self._stop = threading.Event()
        timeout = urllib3.Timeout(connect=connect_timeout_seconds, read=read_timeout_seconds)

        def watch(resource: _Resource[T]) -> _Watch[T]:
            # Threads do not share random numbers, so that a simulated run does not depend on which thread is faster.
            own_jitter = Random(jitter.getrandbits(64))  # noqa: S311 - spreads load, guards nothing
            return _Watch(resource, Connection(api, timeout), clock, own_jitter, self._stop)

        def is_here(node_object: Json) -> bool:
            spec = node_object.get("spec")
            return isinstance(spec, Mapping) and spec.get("nodeName") == node_name

        def is_own_node(node_object: Json) -> bool:
            metadata = node_object.get("metadata")
            return isinstance(metadata, Mapping) and metadata.get("name") == node_name

        self._pods = watch(
            _Resource(
                name="pods",
                paths=("/api/v1/pods",),
                field_selector=f"spec.nodeName={node_name}",
                parse=parse_pod,
                key=lambda pod: pod.uid,
                is_ours=is_here,
            )
        )
        self._nodes = watch(
            _Resource(
                name="nodes",
                paths=("/api/v1/nodes",),
                field_selector=f"metadata.name={node_name}",
                parse=parse_node,
                key=lambda node: node.name,
                is_ours=is_own_node,
            )
        )
        self._slices = watch(
            _Resource(
                name="resourceslices",
                paths=tuple(f"/apis/resource.k8s.io/{version}/resourceslices" for version in _DRA_VERSIONS),
                field_selector=f"spec.nodeName={node_name}",
                parse=parse_slice,
                key=lambda resource_slice: resource_slice.name,
                is_ours=is_here,
            )
        )
        self._claims = watch(
            _Resource(
                name="resourceclaims",
                paths=tuple(f"/apis/resource.k8s.io/{version}/resourceclaims" for version in _DRA_VERSIONS),
                parse=parse_claim,
                key=lambda claim: f"{claim.namespace}/{claim.name}",
                is_ours=lambda claim: may_be_used_on(claim, node_name),
            )
        )
        self._watches: tuple[_Watch[Any], ...] = (self._pods, self._nodes, *((self._slices, self._claims) if dra else ()))

    def start(self) -> None:
        """Start watching."""
        for watch in self._watches:
            watch.start()

    def close(self) -> None:
        """Stop watching, within a second. A thread that still waits for an answer ends with the process."""
        self._stop.set()
        for watch in self._watches:
            watch.close()
        for watch in self._watches:
            watch.join(0.8 / len(self._watches))

    def read(self) -> KubernetesReading:
        """Answer what the watches left. Raises SourceError while the one of pods or of the Node object is broken, or nothing was read yet.

        A broken watch of ResourceSlices or ResourceClaims is no error: what was known of them stays.
        """
        self.start()
        failures = [f"{watch.resource.name}: {watch.failure}" for watch in (self._pods, self._nodes) if watch.failure is not None]
        reading = self.last_reading()
        if failures or reading is None:
            raise SourceError("; ".join(failures))
        if reading.node is None and not reading.pods:
            raise SourceError(f"the cluster has no Node {self._node_name} and no pod on it: is that the name of this node (--node-name)?")
        return reading

    def last_reading(self) -> KubernetesReading | None:
        """Answer what the watches left, however long ago; None: the pods were never read."""
        pods = self._pods.objects
        if pods is None:
            return None
        nodes, slices, claims = self._nodes.objects, self._slices.objects, self._claims.objects
        return KubernetesReading(
            pods=pods,
            node=next(iter(nodes.values()), None) if nodes else None,
            slice_devices=None if slices is None else current_devices(slices.values()),
            resource_claims=None if claims is None else tuple(claims[key] for key in sorted(claims)),
        )

    def pods_are_current(self) -> bool:
        """Answer whether the watch of pods works, whatever the one of the Node object does."""
        return self._pods.objects is not None and self._pods.failure is None

    def processed_version(self) -> dict[str, str]:
        """Answer, for each kind of object that was listed, the resourceVersion up to which readings hold everything."""
        return {watch.resource.name: version for watch in self._watches if (version := watch.processed_version) is not None}

    def watch_threads(self) -> dict[str, threading.Thread]:
        """Answer, for each kind of object, the thread that watches it, where one was started."""
        return {watch.resource.name: watch.thread for watch in self._watches if watch.thread is not None}

    def malformed_objects(self) -> dict[str, int]:
        """Answer, for each kind of object, how often one came that does not even say which it is."""
        return {watch.resource.name: watch.malformed_total for watch in self._watches}


def _version(answer: Json) -> str | None:
    metadata = answer.get("metadata")
    version = metadata.get("resourceVersion") if isinstance(metadata, Mapping) else None
    return version if isinstance(version, str) and version else None
