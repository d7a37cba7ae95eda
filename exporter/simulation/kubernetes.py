"""The Kubernetes API of a simulated node: an HTTP server on loopback that answers list, get and watch as an API server does.

Events are the one thing that can be written: made by POST and changed by a merge patch. The oldest go when there are too many.

https://kubernetes.io/docs/reference/using-api/api-concepts/ - seen on 1.36: a version that is gone is an ERROR event within a response
that is 200, one that has not been reached a 504, items of a list have no kind.
"""

import hashlib
import json
import socket
import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from exporter.clock import Clock
from exporter.simulation.document import Json
from exporter.simulation.node import Machine, NodeState, merge_object

_HOST = "127.0.0.1"
_FIRST_VERSION = 1000
_CREATED = "2026-01-01T00:00:00Z"
_CHANGES_KEPT = 1024
_EVENTS_KEPT = 1000
_MAX_BODY_BYTES = 1 << 20
_BOOKMARK_SECONDS = 60.0
# A client gives up a silent watch and an unanswered request after so long. On a simulated clock its own time-outs would take as long in
# truth, so the connection is cut for it.
_SILENCE_SECONDS = 60.0
_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of object that is served."""

    name: str
    path: str
    kind: str
    api_version: str
    fields: tuple[str, ...]
    """What field selectors may name."""


_KINDS = (
    _Kind(
        "pods", "/api/v1/pods", "Pod", "v1", ("metadata.name", "metadata.namespace", "spec.nodeName", "spec.schedulerName", "status.phase")
    ),
    _Kind("nodes", "/api/v1/nodes", "Node", "v1", ("metadata.name",)),
    _Kind(
        "resourceslices",
        "/apis/resource.k8s.io/v1/resourceslices",
        "ResourceSlice",
        "resource.k8s.io/v1",
        ("metadata.name", "spec.nodeName", "spec.driver"),
    ),
    _Kind(
        "resourceclaims",
        "/apis/resource.k8s.io/v1/resourceclaims",
        "ResourceClaim",
        "resource.k8s.io/v1",
        ("metadata.name", "metadata.namespace"),
    ),
    _Kind(
        "events",
        "/api/v1/events",
        "Event",
        "v1",
        (
            *("metadata.name", "metadata.namespace", "reason", "type"),
            *("involvedObject.kind", "involvedObject.name", "involvedObject.namespace", "involvedObject.uid"),
        ),
    ),
)


def _discovery() -> Mapping[str, Json]:
    """Answer what kubectl asks first: which kinds there are, by the path of each version of the API."""
    versions: dict[str, list[Json]] = {}
    for kind in _KINDS:
        is_namespaced = "metadata.namespace" in kind.fields
        resource = {"name": kind.name, "singularName": kind.kind.lower(), "namespaced": is_namespaced, "kind": kind.kind}
        versions.setdefault(kind.api_version, []).append({**resource, "verbs": ["get", "list", "watch"]})
    groups = [
        {"name": version.partition("/")[0], "versions": [{"groupVersion": version, "version": version.partition("/")[2]}]}
        for version in versions
        if "/" in version
    ]
    lists = {
        f"/apis/{version}" if "/" in version else f"/api/{version}": {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": resources,
        }
        for version, resources in versions.items()
    }
    return {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        **lists,
    }


_DISCOVERY = _discovery()


@dataclass(frozen=True, slots=True)
class _Object:
    """An object in one version, encoded."""

    source: Json
    uid: str
    fields: Mapping[str, str]
    listed: str
    """As an item of a list."""
    whole: str
    """With kind and apiVersion."""


@dataclass(frozen=True, slots=True)
class _Change:
    """What happened to an object, and the version that the collection had then."""

    version: int
    before: _Object | None
    after: _Object | None


@dataclass(slots=True)
class _Collection:
    """All objects of one kind, and what happened to them since `oldest`."""

    kind: _Kind
    objects: dict[str, _Object] = field(default_factory=dict)
    changes: list[_Change] = field(default_factory=list)
    oldest: int = _FIRST_VERSION


@dataclass(frozen=True, slots=True)
class _Selector:
    """The terms of a field selector: (field, value, whether it must be equal)."""

    terms: tuple[tuple[str, str, bool], ...] = ()

    def matches(self, candidate: _Object | None) -> bool:
        return candidate is not None and all((candidate.fields[name] == value) is equal for name, value, equal in self.terms)


class _End(Enum):
    """Why a watch ends."""

    TIME = auto()
    EXPIRED = auto()
    CUT = auto()


@dataclass(slots=True, eq=False)
class _Watch:
    """An open watch."""

    collection: _Collection
    selector: _Selector
    connection: socket.socket
    wants_bookmarks: bool
    cursor: int
    """Up to which version changes were written."""
    goal: int
    """Up to which version there is something to write."""
    ends_at_seconds: float
    bookmark_at_seconds: float
    sent: int | None = None
    """The version that the client has when it has read all that was sent."""
    end: _End | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Hung:
    """A request that is not answered."""

    path: str
    connection: socket.socket
    cut_at_seconds: float


class _RefusedError(Exception):
    """A request that is answered with a Status object."""

    def __init__(self, code: HTTPStatus, reason: str, message: str, details: Json | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = _status(code, reason, message, details)


class SimulatedApi:
    """Serves `url`. What the simulation calls belongs to one thread; each request has a thread of its own."""

    def __init__(self, clock: Clock, *, real_time: bool) -> None:
        """Reserve a port. In real time a server that hangs is silent for ever; else connections are cut after a while.

        The clock is the one that clients wait on: what they ask next has its time from there, too.
        """
        self._reserved = _bind(0)
        self._port = self._reserved.getsockname()[1]
        self.url = f"http://{_HOST}:{self._port}"
        self._clock = clock
        self._real_time = real_time
        # Guards all below; notified when there is something to do for the threads of requests.
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._collections = {kind.name: _Collection(kind) for kind in _KINDS}
        self._watches: set[_Watch] = set()
        self._hung: set[_Hung] = set()
        self._state = NodeState()
        self._version = _FIRST_VERSION
        self._hangs_since_seconds: float | None = None

    # --- the simulation's side ---

    def update(self, state: NodeState) -> None:
        """Take a new state of the node: write the changes to its objects, and be as the source is now."""
        with self._changed:
            before, self._state = self._state, state
            self._put("pods", state.pods, before.pods)
            if state.machine is not before.machine:
                self._put("nodes", {state.machine.name: _node_object(state.machine)}, {})
            self._put("resourceslices", _by_name(state.resource_slices), _by_name(before.resource_slices))
            self._put("resourceclaims", _by_name(state.resource_claims), _by_name(before.resource_claims))
            for watch in self._watches:
                watch.goal = self._version
            if state.sources.kubernetes_expirations != before.sources.kubernetes_expirations:
                self._expire()
            self._be(state.sources.kubernetes)
            self._changed.notify_all()

    def act_on_time(self) -> None:
        """Do what the time has come for: watches end, connections that are silent for too long are cut."""
        with self._changed:
            seconds = self._clock.monotonic()
            if self._hangs_since_seconds is None:
                for watch in self._watches:
                    if watch.ends_at_seconds <= seconds:
                        watch.end = watch.end or _End.TIME
                    elif watch.bookmark_at_seconds <= seconds:
                        self._version += 1
                        watch.goal = self._version
            elif not self._real_time:
                if self._hangs_since_seconds + _SILENCE_SECONDS <= seconds:
                    self._cut(watch.connection for watch in self._watches)
                self._cut(hung.connection for hung in self._hung if hung.cut_at_seconds <= seconds)
            self._changed.notify_all()

    def next_deadline(self) -> float | None:
        """Answer when time alone will next change anything, by the clock."""
        with self._changed:
            now = self._clock.monotonic()
            if self._hangs_since_seconds is None:
                times = [time for watch in self._watches for time in (watch.ends_at_seconds, watch.bookmark_at_seconds)]
            else:
                times = [hung.cut_at_seconds for hung in self._hung]
                times += [self._hangs_since_seconds + _SILENCE_SECONDS] if self._watches else []
            return min((time for time in times if now < time < float("inf")), default=None)

    def is_settled(self, name: str, processed_version: str | None) -> bool:
        """Answer whether a client that watches this kind of object has nothing left to read or to wait for.

        That is so when the watch has been sent everything and the client has taken all of it in, or when its request hangs.
        """
        with self._changed:
            if self._hangs_since_seconds is not None and any(hung.path == self._collections[name].kind.path for hung in self._hung):
                return True
            return any(
                watch.end is None
                and watch.sent is not None
                and (watch.sent >= watch.goal or self._hangs_since_seconds is not None)
                and processed_version == str(watch.sent)
                for watch in self._watches
                if watch.collection.kind.name == name
            )

    def close(self) -> None:
        """Stop serving."""
        with self._changed:
            self._be("down")
            self._changed.notify_all()
        self._reserved.close()

    # --- the objects ---

    def _put(self, name: str, objects: Mapping[str, Json], before: Mapping[str, Json]) -> None:
        if objects is before:
            return
        collection = self._collections[name]
        for key, known in list(collection.objects.items()):
            wanted = objects.get(key)
            # An object under the same name with another uid is another object.
            if wanted is None or _uid(wanted, key) != known.uid:
                self._version += 1
                gone = _encode(collection.kind, key, known.source, self._version)
                collection.changes.append(_Change(self._version, gone, None))
                del collection.objects[key]
        for key, wanted in objects.items():
            previous = collection.objects.get(key)
            if previous is not None and (previous.source is wanted or previous.source == wanted):
                continue
            self._version += 1
            new = _encode(collection.kind, key, wanted, self._version)
            collection.changes.append(_Change(self._version, previous, new))
            collection.objects[key] = new
        self._forget_changes(collection)

    def _forget_changes(self, collection: _Collection) -> None:
        if len(collection.changes) > _CHANGES_KEPT:
            # A real server, too, remembers only so much: who asks for less than this is told that it has expired.
            forgotten = len(collection.changes) - _CHANGES_KEPT // 2
            collection.oldest = max(collection.oldest, collection.changes[forgotten - 1].version)
            del collection.changes[:forgotten]

    def _expire(self) -> None:
        self._version += 1
        for collection in self._collections.values():
            collection.changes.clear()
            collection.oldest = self._version
        for watch in self._watches:
            watch.end = _End.EXPIRED

    # --- up and down ---

    def _be(self, source: str) -> None:
        if source == "hang" and self._hangs_since_seconds is None:
            self._hangs_since_seconds = self._clock.monotonic()
        elif source != "hang":
            self._hangs_since_seconds = None
        if source == "down":
            self._stop_listening()
            self._cut(list(self._connections))
            return
        if source == "unauthorized":
            for watch in self._watches:
                watch.end = watch.end or _End.TIME
        self._start_listening()

    def _start_listening(self) -> None:
        if self._listener is None:
            self._listener = _bind(self._port)
            self._listener.listen()
            threading.Thread(target=self._accept, args=(self._listener,), name="simulated-api", daemon=True).start()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            with self._changed:
                if self._listener is not listener:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._converse, args=(connection, address), name="simulated-api-request", daemon=True).start()

    def _converse(self, connection: socket.socket, address: Any) -> None:  # noqa: ANN401 - as the socket module has it
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server: Any = self  # the base class wants to keep what it belongs to, whatever that is
            _Requests(connection, address, server)
        except OSError:
            pass  # it was cut
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _cut(self, connections: Iterable[socket.socket]) -> None:
        cut = set(connections)
        for watch in self._watches:
            if watch.connection in cut:
                watch.end = _End.CUT
        self._hung = {hung for hung in self._hung if hung.connection not in cut}
        for connection in cut:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the client was first

    # --- requests ---

    def wait_until_answered(self, path: str, connection: socket.socket) -> None:
        """Return when the server answers requests. Raises ConnectionError where the connection was cut meanwhile."""
        with self._changed:
            if self._hangs_since_seconds is not None:
                hung = _Hung(path, connection, self._clock.monotonic() + _ANSWER_SECONDS)
                self._hung.add(hung)
                self._changed.wait_for(lambda: hung not in self._hung or self._hangs_since_seconds is None)
                if hung not in self._hung:
                    raise ConnectionAbortedError("cut")
                self._hung.discard(hung)
            if self._state.sources.kubernetes == "unauthorized":
                raise _RefusedError(HTTPStatus.UNAUTHORIZED, "Unauthorized", "Unauthorized")

    def list_objects(self, kind: _Kind, query: Mapping[str, str]) -> str:
        """Answer a list."""
        selector = _parse_selector(kind, query)
        with self._changed:
            self._check_version(query)
            items = ",".join(candidate.listed for candidate in self._collections[kind.name].objects.values() if selector.matches(candidate))
            head = json.dumps(
                {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": {"resourceVersion": str(self._version)}}
            )
            return f'{head[:-1]}, "items": [{items}]}}\n'

    def get_object(self, kind: _Kind, key: str) -> str:
        """Answer one object."""
        with self._changed:
            found = self._collections[kind.name].objects.get(key)
        if found is None:
            object_name = key.rpartition("/")[2]
            group = kind.api_version.rpartition("/")[0]
            raise _RefusedError(
                HTTPStatus.NOT_FOUND,
                "NotFound",
                f'{kind.name}{"." if group else ""}{group} "{object_name}" not found',
                {"name": object_name, "kind": kind.name},
            )
        return f"{found.whole}\n"

    def create_event(self, namespace: str, sent: Json) -> str:
        """Make an event; answer it."""
        name, about = _name(sent), sent.get("involvedObject")
        if not name or not isinstance(about, Mapping) or about.get("namespace") != namespace:
            raise _RefusedError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "Invalid",
                f'Event "{namespace}/{name}" is invalid: involvedObject.namespace: Invalid value: does not match event.namespace',
            )
        with self._changed:
            key = f"{namespace}/{name}"
            events = self._collections["events"].objects
            if key in events:
                raise _RefusedError(
                    HTTPStatus.CONFLICT, "AlreadyExists", f'events "{name}" already exists', {"name": name, "kind": "events"}
                )
            created = self._write_event(key, {**sent, "metadata": {**sent["metadata"], "namespace": namespace}})
            if len(events) > _EVENTS_KEPT:
                del events[next(iter(events))]
            return created

    def patch_event(self, key: str, patch: Json) -> str:
        """Change an event by a merge patch; answer it."""
        with self._changed:
            known = self._collections["events"].objects.get(key)
            if known is None:
                name = key.rpartition("/")[2]
                raise _RefusedError(HTTPStatus.NOT_FOUND, "NotFound", f'events "{name}" not found', {"name": name, "kind": "events"})
            return self._write_event(key, merge_object(known.source, patch))

    def _write_event(self, key: str, source: Json) -> str:
        collection = self._collections["events"]
        self._version += 1
        written = _encode(collection.kind, key, source, self._version)
        collection.changes.append(_Change(self._version, collection.objects.get(key), written))
        collection.objects[key] = written
        self._forget_changes(collection)
        for watch in self._watches:
            if watch.collection is collection:
                watch.goal = self._version
        self._changed.notify_all()
        return f"{written.whole}\n"

    def open_watch(self, kind: _Kind, query: Mapping[str, str], connection: socket.socket) -> _Watch:
        """Answer a watch that has begun."""
        selector = _parse_selector(kind, query)
        with self._changed:
            collection = self._collections[kind.name]
            cursor = self._check_version(query) or 0
            # The version of the first bookmark is newer than that of any list, so that its arrival can be seen.
            self._version += 1
            watch = _Watch(
                collection=collection,
                selector=selector,
                connection=connection,
                wants_bookmarks=query.get("allowWatchBookmarks") in ("true", "1"),
                cursor=cursor,
                goal=self._version,
                ends_at_seconds=self._clock.monotonic() + float(query.get("timeoutSeconds") or "inf"),
                bookmark_at_seconds=self._clock.monotonic() + _BOOKMARK_SECONDS,
                end=_End.EXPIRED if 0 < cursor < collection.oldest else None,
            )
            self._watches.add(watch)
            return watch

    def next_events(self, watch: _Watch) -> str | None:
        """Wait for something to send on a watch and answer it, as lines; None where the watch has ended."""
        with self._changed:
            self._changed.wait_for(lambda: watch.end or (watch.cursor < watch.goal and self._hangs_since_seconds is None))
            if watch.end is _End.CUT:
                raise ConnectionAbortedError("cut")
            if watch.end is _End.EXPIRED or (watch.end is None and 0 < watch.cursor < watch.collection.oldest):
                watch.end = _End.TIME
                return _event("ERROR", _status(HTTPStatus.GONE, "Expired", f"too old resource version: {watch.cursor} ({self._version})"))
            if watch.end is not None:
                return None
            if watch.cursor == 0:  # from no version on: what is there comes first, as if it were new
                present = watch.collection.objects.values()
                lines = [_event("ADDED", found.whole) for found in present if watch.selector.matches(found)]
            else:
                changes = [change for change in watch.collection.changes if change.version > watch.cursor]
                lines = [line for change in changes if (line := _change_event(change, watch.selector))]
            watch.cursor = self._version
            watch.bookmark_at_seconds = self._clock.monotonic() + _BOOKMARK_SECONDS
            if watch.wants_bookmarks:
                lines.append(_event("BOOKMARK", _bookmark(watch.collection.kind, watch.cursor)))
            return "".join(lines)

    def note_sent(self, watch: _Watch, version: int) -> None:
        """Note that everything up to a version has been sent on a watch."""
        with self._changed:
            watch.sent = version

    def close_watch(self, watch: _Watch) -> None:
        """Forget a watch."""
        with self._changed:
            self._watches.discard(watch)

    def _check_version(self, query: Mapping[str, str]) -> int | None:
        asked = query.get("resourceVersion", "")
        if not asked:
            return None
        if not asked.isdecimal():
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "BadRequest", f"invalid resource version {asked!r}")
        if int(asked) > self._version:
            raise _RefusedError(
                HTTPStatus.GATEWAY_TIMEOUT,
                "Timeout",
                f"Timeout: Too large resource version: {asked}, current: {self._version}",
                {
                    "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
                    "retryAfterSeconds": 1,
                },
            )
        return int(asked)


class _Requests(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "SimulatedApi"
    server: Any

    def do_GET(self) -> None:
        """Answer a list, one object or a watch."""
        api: SimulatedApi = self.server
        split = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(split.query, keep_blank_values=True).items()}
        try:
            api.wait_until_answered(split.path, self.connection)
            if (discovered := _DISCOVERY.get(split.path)) is not None:
                self._answer(HTTPStatus.OK, json.dumps(discovered))
                return
            kind, namespace, key = _route(split.path)
            if namespace is not None:
                query["fieldSelector"] = ",".join(filter(None, (query.get("fieldSelector"), f"metadata.namespace={namespace}")))
            if key is not None:
                self._answer(HTTPStatus.OK, api.get_object(kind, key))
            elif query.get("watch") in ("true", "1"):
                self._watch(api, kind, query)
            else:
                self._answer(HTTPStatus.OK, api.list_objects(kind, query))
        except _RefusedError as refused:
            self._answer(refused.code, f"{refused.status}\n")

    def do_POST(self) -> None:
        """Make an event."""
        self._write(HTTPStatus.CREATED)

    def do_PATCH(self) -> None:
        """Change an event."""
        self._write(HTTPStatus.OK)

    def _write(self, code: HTTPStatus) -> None:
        api: SimulatedApi = self.server
        try:
            sent = self._read_body()
            api.wait_until_answered(self.path, self.connection)
            match self.path.removeprefix("/api/v1/namespaces/").split("/"):
                case [namespace, "events"] if code is HTTPStatus.CREATED:
                    self._answer(code, api.create_event(namespace, sent))
                case [namespace, "events", name] if code is HTTPStatus.OK:
                    self._answer(code, api.patch_event(f"{namespace}/{name}", sent))
                case _:
                    raise _RefusedError(  # noqa: TRY301 - one answer to all refusals
                        HTTPStatus.METHOD_NOT_ALLOWED, "MethodNotAllowed", "only events are written to the simulated API server"
                    )
        except _RefusedError as refused:
            self._answer(refused.code, f"{refused.status}\n")

    def _read_body(self) -> Json:
        try:
            length = int(self.headers.get("Content-Length", "0"))
            body = json.loads(self.rfile.read(min(length, _MAX_BODY_BYTES)))
        except ValueError as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "BadRequest", f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "BadRequest", "the body is not an object")
        return body

    def _watch(self, api: SimulatedApi, kind: _Kind, query: Mapping[str, str]) -> None:
        watch = api.open_watch(kind, query, self.connection)
        try:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while (lines := api.next_events(watch)) is not None:
                version = watch.cursor
                chunk = lines.encode()
                if chunk:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                api.note_sent(watch, version)
            self.wfile.write(b"0\r\n\r\n")
        finally:
            api.close_watch(watch)

    def _answer(self, code: HTTPStatus, body: str) -> None:
        encoded = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing: the clients do."""


def _bind(port: int) -> socket.socket:
    # A second socket that is bound and does not listen keeps the port while nobody listens on it: connections are refused.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((_HOST, port))
    return bound


def _route(path: str) -> tuple[_Kind, str | None, str | None]:
    """Answer the kind that a path names, the namespace where it names one, and the key of the object where it names one."""
    for kind in _KINDS:
        if path == kind.path:
            return kind, None, None
        root, _, plural = kind.path.rpartition("/")
        if path.startswith(f"{kind.path}/"):
            return kind, None, path.removeprefix(f"{kind.path}/")
        if path.startswith(f"{root}/namespaces/"):
            match path.removeprefix(f"{root}/namespaces/").split("/"):
                case [namespace, named] if named == plural:
                    return kind, namespace, None
                case [namespace, named, name] if named == plural:
                    return kind, namespace, f"{namespace}/{name}"
    if path.startswith("/api/v1/"):
        plural = path.removeprefix("/api/v1/").partition("/")[0]
        raise _RefusedError(
            HTTPStatus.FORBIDDEN,
            "Forbidden",
            f'{plural} is forbidden: User "system:serviceaccount:simulation:exporter" cannot list resource "{plural}" in API group "" '
            "at the cluster scope",
            {"kind": plural},
        )
    raise _RefusedError(HTTPStatus.NOT_FOUND, "NotFound", "the server could not find the requested resource", {})


def _parse_selector(kind: _Kind, query: Mapping[str, str]) -> _Selector:
    if query.get("labelSelector"):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "BadRequest", "label selectors are not simulated")
    terms = []
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        name, operator, value = term.partition("!=") if "!=" in term else term.partition("=")
        if not operator or name not in kind.fields:
            raise _RefusedError(
                HTTPStatus.BAD_REQUEST,
                "BadRequest",
                f'Unable to find "{kind.api_version}, Resource={kind.name}" that match label selector "", field selector "{term}": '
                f"field label not supported: {name}",
            )
        terms.append((name, value.removeprefix("="), operator == "="))
    return _Selector(tuple(terms))


def _status(code: HTTPStatus, reason: str, message: str, details: Json | None = None) -> str:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "reason": reason}
    return json.dumps({**status, **({} if details is None else {"details": details}), "code": int(code)}, separators=(",", ":"))


def _name(sent: Json) -> str:
    metadata = sent.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else ""


def _event(event_type: str, encoded: str) -> str:
    return f'{{"type":"{event_type}","object":{encoded}}}\n'


def _change_event(change: _Change, selector: _Selector) -> str | None:
    """Answer what a change is to a watch with a selector: an object that ceases to match is deleted to it."""
    was, now = selector.matches(change.before), selector.matches(change.after)
    if now and change.after is not None:
        return _event("MODIFIED" if was else "ADDED", change.after.whole)
    if was and change.before is not None:
        return _event("DELETED", (change.after or change.before).whole)
    return None


def _bookmark(kind: _Kind, version: int) -> str:
    body: dict[str, Any] = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": {"resourceVersion": str(version)}}
    if kind.name == "pods":  # what a server sends of an empty Pod
        body |= {"spec": {"containers": None}, "status": {}}
    return json.dumps(body, separators=(",", ":"))


def _encode(kind: _Kind, key: str, source: Json, version: int) -> _Object:
    uid = _uid(source, key)
    metadata = {"creationTimestamp": _CREATED, **source["metadata"], "uid": uid, "resourceVersion": str(version)}
    body = {name: value for name, value in source.items() if name not in ("kind", "apiVersion")} | {"metadata": metadata}
    listed = json.dumps(body, separators=(",", ":"))
    return _Object(
        source=source,
        uid=uid,
        fields={name: _field(body, name) for name in kind.fields},
        listed=listed,
        whole=f'{{"kind":"{kind.kind}","apiVersion":"{kind.api_version}",{listed[1:]}',
    )


def _uid(source: Json, key: str) -> str:
    said = source["metadata"].get("uid")
    return str(said) if said else str(uuid.UUID(bytes=hashlib.sha256(key.encode()).digest()[:16], version=4))


def _field(body: Json, name: str) -> str:
    value: object = body
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else ""


def _by_name(objects: Iterable[Json]) -> Mapping[str, Json]:
    keyed = {}
    for entry in objects:
        namespace = entry["metadata"].get("namespace")
        keyed[f"{namespace}/{entry['metadata']['name']}" if namespace else entry["metadata"]["name"]] = entry
    return keyed


def _node_object(machine: Machine) -> Json:
    return {
        "metadata": {"name": machine.name, "labels": machine.labels, "annotations": machine.annotations},
        "spec": {},
        "status": {"allocatable": machine.allocatable, "capacity": machine.allocatable},
    }
