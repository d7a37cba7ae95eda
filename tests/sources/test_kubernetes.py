"""Pods kept up to date by list and watch, against a real HTTP server that can do what API servers do."""

import contextlib
import json
import logging
import queue
import random
import socket
import ssl
import threading
import time
from collections import defaultdict, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
import trustme
import urllib3

from exporter.snapshot import ContainerState
from exporter.sources import SourceError, kubernetes_config
from exporter.sources.kubernetes import KubernetesSource
from exporter.sources.kubernetes_api import AttemptError, Connection
from exporter.sources.kubernetes_config import find_api_server

CAPTURES = Path(__file__).parents[1] / "captures"
NODE = "node-a"
PODS, NODES = "/api/v1/pods", "/api/v1/nodes"
SLICES, CLAIMS = (f"/apis/resource.k8s.io/v1/{name}" for name in ("resourceslices", "resourceclaims"))
UID = "829163fb-69a9-45b0-b803-19c68823341{}"


def capture(name):
    return (CAPTURES / name).read_bytes()


def pod(n, version, **labels):
    return {
        "metadata": {"uid": UID.format(n), "namespace": "team-a", "name": f"pod-{n}", "labels": labels, "resourceVersion": str(version)},
        "spec": {"nodeName": NODE, "containers": [{"name": "main"}]},
    }


def event(kind, changed):
    return json.dumps({"type": kind, "object": changed}).encode() + b"\n"


def bookmark(version):
    return event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})


def listed(version, *items):
    return json.dumps({"metadata": {"resourceVersion": str(version)}, "items": items}).encode()


END = object()
HANG = object()


class ApiServer:
    """Lists what `lists` holds; a watch sends what is put into `events` of its path until END. `scripts` come first, an answer each."""

    def __init__(self, port=0):
        self.lists = {
            PODS: listed(10, pod(1, 9)),
            NODES: listed(10, json.loads(capture("node.json"))),
        }
        self.events = defaultdict(queue.Queue)
        self.scripts = defaultdict(deque)
        self.requests = []
        self.token = None
        self.sockets = set()
        self.closing = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            api = self

            def setup(self):
                super().setup()
                self.api.sockets.add(self.connection)

            def finish(self):
                self.api.sockets.discard(self.connection)
                super().finish()

            def do_GET(self):
                with contextlib.suppress(OSError):
                    self.api.answer(self)

            def log_message(self, *arguments):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = True

        self.http = Server(("127.0.0.1", port), Handler)
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def answer(self, request):
        url = urlsplit(request.path)
        query = dict(parse_qsl(url.query))
        verb = "watch" if query.get("watch") else "list"
        self.requests.append((verb, url.path, query))
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            self.send(request, 401, capture("unauthorized.json"))
        elif self.scripts[verb, url.path]:
            self.scripts[verb, url.path].popleft()(self, request)
        elif verb == "watch":
            self.stream(request, url.path)
        elif url.path in self.lists:
            self.send(request, 200, self.lists[url.path])
        else:
            self.send(request, 404, b'{"message": "the server could not find the requested resource", "code": 404}')

    def send(self, request, status, body, **headers):
        request.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(key.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    def stream(self, request, path):
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        while not self.closing.is_set():
            try:
                data = self.events[path].get(timeout=0.02)
            except queue.Empty:
                if self.is_gone(request):
                    return
                continue
            if data is END:
                request.wfile.write(b"0\r\n\r\n")
                return
            if data is HANG:
                self.closing.wait(5)
                return
            request.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def is_gone(self, request):
        """A client that has left must not eat the events of the next one."""
        try:
            return request.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False

    def accepts(self, token):
        self.token = token

    def script(self, verb, path, *answers):
        self.scripts[verb, path].extend(answers)

    def watches(self, path=PODS):
        return [query for verb, at, query in self.requests if (verb, at) == ("watch", path)]

    def count(self, verb, path=PODS):
        return sum((one, at) == (verb, path) for one, at, _ in self.requests)

    def stop(self):
        self.closing.set()
        self.http.shutdown()
        for connection in list(self.sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.http.server_close()
        self.thread.join()


def status(code, body, **headers):
    return lambda server, request: server.send(request, code, body, **headers)


def watch_once(*lines):
    """A watch that sends these and ends."""

    def answer(server, request):
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        for line in lines:
            request.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        request.wfile.write(b"0\r\n\r\n")

    return answer


def silence(server, _request):
    server.closing.wait(5)


class FastClock:
    """Real time, in which nobody waits longer than a moment; it remembers how long they wanted to."""

    def __init__(self):
        self.waits = []

    def time(self):
        return time.time()

    def monotonic(self):
        return time.monotonic()

    def wait(self, happened, timeout_seconds):
        self.waits.append(timeout_seconds)
        return happened.wait(min(timeout_seconds, 0.02))


def eventually(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError("did not happen in time")


def attempt(source):
    try:
        return source.read()
    except SourceError:
        return None


def failure(source):
    try:
        source.read()
    except SourceError as error:
        return str(error)
    return None


@pytest.fixture
def server():
    running = ApiServer()
    yield running
    running.stop()


@pytest.fixture
def clock():
    return FastClock()


@pytest.fixture
def watch(server, clock):
    """Start a source and wait for its first reading."""
    started = []

    def start(*, wait=True, api=None, **options):
        source = KubernetesSource(
            api=api or (lambda: find_api_server(host=server.url)),
            node_name=NODE,
            clock=clock,
            jitter=random.Random(1),  # noqa: S311 - the same in each run
            **options,
        )
        started.append(source)
        source.start()
        if wait:
            eventually(lambda: attempt(source))
        return source

    yield start
    for source in started:
        source.close()


def names(source):
    return sorted(found.name for found in source.read().pods.values())


# --- following ---


def test_the_captured_list_and_watch_end_with_what_the_last_events_left(server, watch):
    server.lists[PODS] = capture("pods-list.json")
    source = watch()
    assert source.processed_version()["pods"] == "554"
    server.events[PODS].put(capture("watch.jsonl"))
    eventually(lambda: source.processed_version()["pods"] == "526")
    assert names(source) == [
        "crasher",
        "done",
        "gpu-reservation-76e2d625ef0b9e16",
        "half-gpu",
        "memory-gpu",
        "mig-sidecar",
        "node-agent-node-a",
        "sliced-two",
    ]
    pods = {found.name: found for found in source.read().pods.values()}
    assert pods["half-gpu"].annotations["note"] == "edited"
    crasher = pods["crasher"].containers[0]
    assert crasher.state is ContainerState.WAITING
    assert crasher.container_id == "7972222b25eeb5623587d4e7f8dcd66f69fcc697ae93ab81471e9b070d64dba9"
    node = source.read().node
    assert node.name == NODE
    assert source.read().slice_devices is None
    assert source.read().resource_claims is None


def test_requests_ask_for_this_node_only_and_go_on_from_the_list(server, watch):
    watch()
    requests = {(verb, path): query for verb, path, query in server.requests}
    assert requests["list", PODS] == {"fieldSelector": "spec.nodeName=node-a", "resourceVersion": "0"}
    assert requests["list", NODES] == {"fieldSelector": "metadata.name=node-a", "resourceVersion": "0"}
    seconds = requests["watch", PODS].pop("timeoutSeconds")
    assert 300 <= int(seconds) <= 600
    assert requests["watch", PODS] == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "10",
        "fieldSelector": "spec.nodeName=node-a",
    }


def test_pods_come_change_and_go(server, watch):
    source = watch()
    server.events[PODS].put(event("ADDED", pod(2, 11)) + event("MODIFIED", pod(1, 12, team="blue")))
    eventually(lambda: source.processed_version()["pods"] == "12")
    assert {found.name: dict(found.labels) for found in source.read().pods.values()} == {"pod-1": {"team": "blue"}, "pod-2": {}}
    server.events[PODS].put(event("DELETED", pod(1, 13)))
    eventually(lambda: source.processed_version()["pods"] == "13")
    assert names(source) == ["pod-2"]


def test_a_reading_never_changes_after_it_was_given(server, watch):
    source = watch()
    before = source.read()
    server.events[PODS].put(event("ADDED", pod(2, 11)))
    eventually(lambda: source.processed_version()["pods"] == "11")
    assert list(before.pods) == [UID.format(1)]
    with pytest.raises(TypeError):
        before.pods["x"] = None


def test_an_event_that_comes_in_pieces_is_read_when_it_is_whole(server, watch):
    source = watch()
    text = event("ADDED", pod(2, 11))
    for position in range(0, len(text), 50):
        server.events[PODS].put(text[position : position + 50])
    eventually(lambda: source.processed_version()["pods"] == "11")
    assert names(source) == ["pod-1", "pod-2"]


def test_events_of_a_server_without_chunks_are_read_as_they_come(server, watch):
    def answer(server, request):
        request.send_response(200)
        request.send_header("Connection", "close")
        request.end_headers()
        request.wfile.write(event("ADDED", pod(2, 11)))
        request.close_connection = True
        server.closing.wait(5)

    server.script("watch", PODS, answer)
    source = watch()
    eventually(lambda: source.processed_version()["pods"] == "11")
    assert names(source) == ["pod-1", "pod-2"]


def test_pods_of_other_nodes_are_ignored_whatever_the_server_sends(server, watch):
    elsewhere = pod(3, 12)
    elsewhere["spec"]["nodeName"] = "node-b"
    nowhere = pod(1, 13)
    del nowhere["spec"]["nodeName"]
    server.lists[PODS] = listed(10, pod(1, 9), pod(2, 9), elsewhere)
    source = watch()
    assert names(source) == ["pod-1", "pod-2"]
    server.events[PODS].put(event("ADDED", elsewhere) + event("MODIFIED", nowhere))
    eventually(lambda: source.processed_version()["pods"] == "13")
    assert names(source) == ["pod-2"]


def test_unknown_events_are_ignored_and_bookmarks_move_on(server, watch):
    source = watch()
    server.events[PODS].put(event("SOMETHING", pod(2, 98)) + bookmark(99))
    eventually(lambda: source.processed_version()["pods"] == "99")
    server.events[PODS].put(END)
    eventually(lambda: len(server.watches()) == 2)
    assert server.watches()[1]["resourceVersion"] == "99"
    assert names(source) == ["pod-1"]


def test_a_malformed_pod_costs_that_pod_only_and_is_logged_once(server, watch, caplog):
    nameless = pod(2, 9)
    del nameless["metadata"]["uid"]
    server.lists[PODS] = listed(10, nameless, None, "x", [], pod(1, 9))
    source = watch()
    assert names(source) == ["pod-1"]
    assert source.malformed_objects() == {"pods": 4, "nodes": 0}
    server.events[PODS].put(event("MODIFIED", nameless) * 3 + event("ADDED", pod(3, 14)))
    eventually(lambda: source.processed_version()["pods"] == "14")
    assert names(source) == ["pod-1", "pod-3"]
    assert source.malformed_objects()["pods"] == 7
    assert [record.getMessage() for record in caplog.records if "'pod-2'" in record.getMessage()] == [
        "resource=pods state=malformed object={'uid': None, 'namespace': 'team-a', 'name': 'pod-2'} reason='a Pod without uid'"
    ]


def test_thousands_of_malformed_pods_are_all_counted_and_no_more_than_a_thousand_are_remembered_and_logged(server, watch, caplog):
    def nameless(number):
        return {"metadata": {"namespace": "team-a", "name": f"pod-{number}"}, "spec": {"nodeName": NODE}}

    long = {"metadata": {"namespace": "x" * 10_000}}
    server.lists[PODS] = listed(10, long, *(nameless(number) for number in range(1499)), pod(1, 9))
    source = watch()
    assert names(source) == ["pod-1"]
    assert source.malformed_objects()["pods"] == 1500
    server.events[PODS].put(b"".join(event("ADDED", nameless(number)) for number in range(1500, 1600)) + event("ADDED", pod(3, 14)))
    eventually(lambda: source.processed_version()["pods"] == "14")
    assert source.malformed_objects()["pods"] == 1600
    told = [record.getMessage() for record in caplog.records if "state=malformed" in record.getMessage()]
    assert len(told) == 1000
    assert max(map(len, told)) < 500
    assert sum("'pod-998'" in line for line in told) == 1
    assert not any("'pod-999'" in line for line in told)


# --- versions that are gone ---


@pytest.mark.parametrize(
    "gone",
    [status(410, b'{"kind": "Status", "code": 410, "message": "too old"}'), watch_once(capture("watch-expired.json"))],
    ids=["as a status", "as an event"],
)
def test_an_expired_version_is_listed_anew(server, watch, gone, caplog):
    caplog.set_level(logging.INFO)
    source = watch()
    server.lists[PODS] = listed(50, pod(2, 40))
    server.script("watch", PODS, gone)
    server.events[PODS].put(END)
    eventually(lambda: source.processed_version()["pods"] == "50")
    eventually(lambda: len(server.watches()) == 3)
    assert names(source) == ["pod-2"]
    assert server.watches()[2]["resourceVersion"] == "50"
    assert server.count("list") == 2
    assert sum("state=expired" in record.getMessage() for record in caplog.records) == 1


def test_a_list_that_expires_at_once_again_is_asked_for_the_newest_version(server, watch):
    server.script("watch", PODS, *[watch_once(capture("watch-expired.json"))] * 2)
    watch(wait=False)
    eventually(lambda: len(server.watches()) == 3)
    assert [query.get("resourceVersion") for verb, path, query in server.requests if (verb, path) == ("list", PODS)] == ["0", "0", None]


def test_a_relist_never_shows_an_empty_world(server, watch):
    server.lists[PODS] = listed(10, *(pod(n, 9) for n in range(10)))
    source = watch()
    seen, stop = set(), threading.Event()

    def hammer():
        while not stop.is_set():
            reading = source.last_reading()
            seen.add((len(reading.pods), reading.node is None))
            time.sleep(0.0001)

    readers = [threading.Thread(target=hammer) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(10):
        lists = server.count("list")
        server.script("watch", PODS, watch_once(capture("watch-expired.json")))
        server.events[PODS].put(END)
        eventually(lambda before=lists: server.count("list") > before)
    stop.set()
    for reader in readers:
        reader.join()
    assert seen == {(10, False)}


def test_pods_stay_known_while_the_new_list_does_not_come(server, watch):
    source = watch(read_timeout_seconds=0.2)
    server.script("list", PODS, silence, status(500, b"{}"))
    server.script("watch", PODS, status(410, b"{}"))
    server.events[PODS].put(END)
    eventually(lambda: failure(source))
    assert list(source.last_reading().pods) == [UID.format(1)]
    eventually(lambda: attempt(source))


# --- connections ---


def test_a_watch_that_ends_goes_on_where_it_was_without_a_list(server, watch):
    source = watch()
    for version in (11, 12, 13):
        server.events[PODS].put(event("ADDED", pod(version - 9, version)))
        server.events[PODS].put(END)
    eventually(lambda: source.processed_version()["pods"] == "13")
    eventually(lambda: len(server.watches()) == 4)
    assert [query["resourceVersion"] for query in server.watches()] == ["10", "11", "12", "13"]
    assert server.count("list") == 1
    assert names(source) == ["pod-1", "pod-2", "pod-3", "pod-4"]


def test_watches_that_end_at_once_are_not_asked_for_without_pause(server, clock, watch):
    server.script("watch", PODS, *[watch_once()] * 5)
    source = watch()
    eventually(lambda: len(server.watches()) == 6)
    assert clock.waits.count(1.0) == 5
    assert names(source) == ["pod-1"]


def test_a_half_open_connection_ends_by_the_read_timeout(server, watch):
    source = watch(read_timeout_seconds=0.3)
    server.events[PODS].put(HANG)
    eventually(lambda: len(server.watches()) >= 2)
    server.events[PODS].put(event("ADDED", pod(2, 11)))
    eventually(lambda: source.processed_version()["pods"] == "11")
    assert names(source) == ["pod-1", "pod-2"]


def test_a_server_that_accepts_and_never_answers_is_told_and_what_was_known_stays(server, watch):
    source = watch(read_timeout_seconds=0.2)
    server.script("watch", PODS, *[silence] * 2)
    server.script("list", PODS, *[silence] * 2)
    server.events[PODS].put(END)
    text = eventually(lambda: failure(source))
    assert text == f"pods: {server.url} does not answer (timed out)"
    assert list(source.last_reading().pods) == [UID.format(1)]
    eventually(lambda: attempt(source))


def test_a_torn_event_costs_a_reconnect_and_nothing_else(server, watch):
    source = watch()
    whole = event("ADDED", pod(2, 11))
    server.events[PODS].put(whole + event("ADDED", pod(3, 12))[:60])
    server.events[PODS].put(END)
    server.events[PODS].put(event("ADDED", pod(3, 12)))
    eventually(lambda: source.processed_version()["pods"] == "12")
    assert [query["resourceVersion"] for query in server.watches()] == ["10", "11"]
    assert server.count("list") == 1
    assert names(source) == ["pod-1", "pod-2", "pod-3"]


@pytest.mark.parametrize(
    "line",
    [
        b"{\n",
        b"\xff\xfe\xfd\n",
        b"7\n",
        b'{"type": "ADDED"}\n',
        b'{"type": "ADDED", "object": []}\n',
        b"[" * 100_000 + b"\n",
        b"9" * 5000 + b"\n",
    ],
    ids=["half", "no text", "a number", "no object", "a list", "too deep", "too long a number"],
)
def test_a_line_that_is_no_event_costs_a_list(server, watch, line):
    source = watch()
    server.lists[PODS] = listed(20, pod(1, 9), pod(2, 15))
    server.events[PODS].put(line)
    eventually(lambda: source.processed_version()["pods"] == "20")
    eventually(lambda: attempt(source))
    assert names(source) == ["pod-1", "pod-2"]


def test_a_server_that_is_killed_and_comes_back_on_its_port_is_followed_again(server, watch, caplog):
    caplog.set_level(logging.INFO)
    source = watch()
    server.stop()
    text = eventually(lambda: failure(source))
    assert "does not answer ([Errno 111] Connection refused)" in text
    eventually(lambda: failure(source).startswith("pods: ") and "nodes: " in failure(source))
    assert list(source.last_reading().pods) == [UID.format(1)]
    lost = [record for record in caplog.records if "state=lost" in record.getMessage()]
    again = ApiServer(server.port)
    again.lists[PODS] = listed(30, pod(5, 25))
    try:
        eventually(lambda: attempt(source))
        eventually(again.watches)
        again.script("watch", PODS, status(410, b"{}"))
        again.events[PODS].put(END)
        eventually(lambda: names(source) == ["pod-5"])
        assert len(lost) == 2
        source.close()
    finally:
        again.stop()


def test_back_off_grows_to_half_a_minute_and_no_further(watch, clock):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    source = watch(wait=False, api=lambda: find_api_server(host=f"http://127.0.0.1:{port}"))
    eventually(lambda: len(clock.waits) > 24)
    assert source.last_reading() is None
    assert "Connection refused" in failure(source)
    source.close()
    assert all(wait <= 30 for wait in clock.waits)
    assert max(clock.waits) > 15
    assert all(0.5 <= wait <= 1 for wait in clock.waits[:2])


# --- refusals ---


def test_a_rotated_token_is_read_again(server, watch):
    token = {"now": "one"}

    def api():
        known = token["now"]
        return kubernetes_config.ApiServer(
            host=server.url, pool=urllib3.PoolManager(), credentials=lambda: {"Authorization": f"Bearer {known}"}
        )

    server.accepts("one")
    source = watch(api=api)
    server.accepts("two")
    server.events[PODS].put(END)
    text = eventually(lambda: failure(source))
    assert "pods: the API server refuses the credentials (401 Unauthorized)" in text
    assert list(source.last_reading().pods) == [UID.format(1)]
    token["now"] = "two"
    eventually(lambda: attempt(source))


def test_the_token_is_asked_for_at_each_request(server, watch):
    tokens = iter(range(1000))

    def credentials():
        next(tokens)
        return {"Authorization": f"Bearer {server.token}"}

    def api():
        return kubernetes_config.ApiServer(host=server.url, pool=urllib3.PoolManager(), credentials=credentials)

    server.accepts("one")
    source = watch(api=api)
    server.accepts("two")
    server.events[PODS].put(END)
    eventually(lambda: len(server.watches()) == 2)
    assert names(source) == ["pod-1"]
    assert next(tokens) >= 5


def test_a_missing_right_on_nodes_is_named_and_pods_stay_known(server, watch):
    server.script("list", NODES, *[status(403, capture("forbidden.json"))] * 3)
    source = watch(wait=False)
    text = eventually(lambda: (found := failure(source)) and found.startswith("nodes: may") and found)
    assert text.startswith(
        "nodes: may not list nodes: grant this service account the verbs list and watch on them "
        '(nodes "node-a" is forbidden: User "system:serviceaccount:ml:exporter" cannot get resource "nodes"'
    )
    assert list(source.last_reading().pods) == [UID.format(1)]
    assert source.last_reading().node is None
    eventually(lambda: attempt(source))
    assert source.read().node.name == NODE


def test_a_missing_right_to_watch_is_named(server, watch):
    server.script("watch", PODS, *[status(403, b'{"message": "cannot watch"}')] * 3)
    source = watch(wait=False)
    eventually(lambda: "pods: may not watch pods: grant" in (failure(source) or ""))
    eventually(lambda: attempt(source))


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (status(504, capture("list-too-large.json")), 1.0),
        (status(429, b"{}", Retry_After="7"), 7.0),
        (status(429, b"{}", Retry_After="999999"), 300.0),
        (status(503, b"<html>", Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"), 0.5),
    ],
    ids=["504 with retryAfterSeconds", "429", "429 with an absurd Retry-After", "503 with a date"],
)
def test_a_server_that_says_when_to_come_back_is_not_asked_before(server, watch, clock, answer, seconds):
    server.script("list", PODS, answer)
    source = watch()
    assert names(source) == ["pod-1"]
    assert any(seconds <= wait <= max(seconds, 1) for wait in clock.waits)


def test_a_version_that_the_server_never_reaches_is_given_up(server, watch):
    source = watch()
    server.lists[PODS] = listed(3, pod(2, 2))
    server.script("watch", PODS, *[status(504, capture("list-too-large.json"))] * 3)
    server.events[PODS].put(END)
    eventually(lambda: source.processed_version()["pods"] == "3")
    eventually(lambda: attempt(source))
    assert names(source) == ["pod-2"]


def test_an_error_event_says_what_the_server_said(server, watch):
    source = watch()
    server.script("watch", PODS, *[status(500, b'{"message": "etcd is unwell"}')] * 2)
    server.events[PODS].put(event("ERROR", {"kind": "Status", "code": 500, "message": "etcd is unwell"}))
    eventually(lambda: failure(source) == "pods: the API server answered 500 (etcd is unwell)")
    eventually(lambda: attempt(source))


def test_a_list_without_a_version_is_watched_from_the_start(server, watch):
    server.lists[PODS] = capture("dra/1-exclusive/pods.json")
    source = watch()
    assert json.loads(server.lists[PODS])["metadata"]["resourceVersion"] == ""
    assert names(source) == ["exclusive"]
    assert "resourceVersion" not in server.watches()[0]


@pytest.mark.parametrize("body", [b"{}", b"[]", b"", b"<html>"])
def test_an_answer_that_is_no_list_is_not_an_empty_node(server, watch, body):
    server.script("list", PODS, *[status(200, body)] * 2)
    source = watch(wait=False)
    eventually(lambda: "pods: an" in (failure(source) or "") or "pods: the answer" in (failure(source) or ""))
    eventually(lambda: attempt(source))
    assert names(source) == ["pod-1"]


def test_a_node_name_that_the_cluster_does_not_know_is_told(server, watch):
    server.lists = {PODS: listed(10), NODES: listed(10)}
    source = watch(wait=False)
    text = eventually(lambda: (found := failure(source)) and "--node-name" in found and found)
    assert text == "the cluster has no Node node-a and no pod on it: is that the name of this node (--node-name)?"


# --- life ---


def test_closing_ends_reads_that_block_within_a_second(server, watch):
    before = threading.active_count()
    source = watch()
    started = time.monotonic()
    source.close()
    assert time.monotonic() - started < 1
    eventually(lambda: not any(thread.is_alive() for thread in source.watch_threads().values()))
    assert threading.active_count() <= before + 4  # the server's own


def test_closing_does_not_wait_for_a_server_that_does_not_answer(server, watch):
    server.script("list", PODS, silence)
    server.script("list", NODES, silence)
    source = watch(wait=False)
    eventually(lambda: len(server.requests) == 2)
    started = time.monotonic()
    source.close()
    assert time.monotonic() - started < 1


def test_nothing_is_read_before_the_first_list(server, watch):
    server.script("list", PODS, silence)
    source = watch(wait=False)
    with pytest.raises(SourceError, match="pods: not read yet"):
        source.read()
    assert source.last_reading() is None


def test_credentials_may_come_late(server, watch):
    attempts = []

    def api():
        attempts.append(1)
        if len(attempts) < 5:
            raise SourceError("the token is not there yet")
        return find_api_server(host=server.url)

    source = watch(wait=False, api=api)
    eventually(lambda: "the token is not there yet" in (failure(source) or ""))
    eventually(lambda: attempt(source))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_an_unforeseen_error_ends_is_started_again_by_the_next_read(server, watch):
    attempts = []

    def api():
        attempts.append(1)
        if len(attempts) <= 2:
            raise ZeroDivisionError
        return find_api_server(host=server.url)

    source = watch(wait=False, api=api)
    eventually(lambda: attempt(source))
    assert names(source) == ["pod-1"]


# --- dynamic resource allocation ---


def dra(server, case):
    for path, name in ((PODS, "pods"), (SLICES, "resourceslices"), (CLAIMS, "resourceclaims")):
        server.lists[path] = listed(10, *json.loads(capture(f"dra/{case}/{name}.json"))["items"])


def test_slices_and_claims_are_read_where_that_is_asked_for(server, watch):
    dra(server, "5-per-request")
    source = watch(dra=True)
    reading = eventually(lambda: (found := attempt(source)) and found.slice_devices and found.resource_claims and found)
    uuids = {device.device_name: device.gpu_uuid for device in reading.slice_devices}
    assert uuids["gpu-0"] == "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
    assert [(claim.namespace, claim.name) for claim in reading.resource_claims] == [("dra", "per-request-both-gjql5")]
    eventually(lambda: server.watches(SLICES))
    assert [query.get("fieldSelector") for verb, path, query in server.requests if path == SLICES] == ["spec.nodeName=node-a"] * 2
    assert set(source.processed_version()) == {"pods", "nodes", "resourceslices", "resourceclaims"}


def test_a_claim_comes_with_its_allocation_and_goes_with_it(server, watch):
    dra(server, "1-exclusive")
    claim = json.loads(server.lists[CLAIMS])["items"][0]
    server.lists[CLAIMS] = listed(10)
    source = watch(dra=True)
    eventually(lambda: source.processed_version().get("resourceclaims") == "10")
    server.events[CLAIMS].put(event("ADDED", claim))
    eventually(lambda: source.read().resource_claims)
    del claim["status"]
    server.events[CLAIMS].put(event("MODIFIED", claim))
    eventually(lambda: source.read().resource_claims == ())


def test_an_older_version_of_the_api_is_found(server, watch):
    dra(server, "1-exclusive")
    server.lists["/apis/resource.k8s.io/v1beta1/resourceslices"] = server.lists.pop(SLICES)
    source = watch(dra=True)
    assert eventually(lambda: source.read().slice_devices)
    eventually(lambda: server.watches("/apis/resource.k8s.io/v1beta1/resourceslices"))


def test_pods_are_read_without_the_right_to_read_claims(server, watch, caplog):
    dra(server, "1-exclusive")
    server.script("list", CLAIMS, *[status(403, b'{"message": "no"}')] * 1000)
    source = watch(dra=True)
    eventually(lambda: server.count("list", CLAIMS) > 3)
    reading = eventually(lambda: (found := attempt(source)) and found.slice_devices and found)
    assert reading.resource_claims is None
    assert reading.pods
    lost = [record.getMessage() for record in caplog.records if "resource=resourceclaims state=lost" in record.getMessage()]
    reason = "may not list resourceclaims: grant this service account the verbs list and watch on them (no)"
    assert lost == [f"resource=resourceclaims state=lost reason={reason!r}"]


def test_a_cluster_without_dynamic_resources_is_asked_seldom(server, watch, clock):
    source = watch(dra=True)
    eventually(lambda: server.count("list", SLICES) > 5)
    assert source.read().slice_devices is None
    assert max(clock.waits) > 8


# --- configuration ---


def test_a_kubeconfig_is_read(tmp_path):
    path = tmp_path / "config"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.1:6443", "insecure-skip-tls-verify": True}}],
                "users": [{"name": "u", "user": {"token": "secret"}}],
            }
        )
    )
    found = find_api_server(kubeconfig=path)
    assert found.host == "https://192.0.2.1:6443"
    assert found.credentials() == {"authorization": "Bearer secret"}


@pytest.mark.parametrize("text", [None, "", "[", "{}", "a: [1", "clusters: 7"])
def test_a_kubeconfig_that_cannot_be_used_is_one_clear_error(tmp_path, text):
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SourceError, match=rf"kubeconfig {path} cannot be used"):
        find_api_server(kubeconfig=path)


def test_outside_a_cluster_the_error_names_the_flag(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SourceError, match="outside a cluster set --kubeconfig"):
        find_api_server()


@pytest.fixture
def service_account(monkeypatch, tmp_path, certificate_authority):
    (tmp_path / "token").write_text("of-the-pod\n")
    certificate_authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.7")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr("exporter.sources.kubernetes_config.SERVICE_ACCOUNT", tmp_path)
    return tmp_path


@pytest.fixture
def certificate_authority():
    return trustme.CA()


def test_inside_a_cluster_the_service_account_is_used(service_account):
    found = find_api_server()
    assert found.host == "https://192.0.2.7:443"
    assert found.credentials() == {"Authorization": "Bearer of-the-pod"}
    (service_account / "token").write_text("of-the-pod-rotated")
    assert found.credentials() == {"Authorization": "Bearer of-the-pod-rotated"}


def test_inside_a_cluster_a_token_that_no_request_can_carry_is_refused_until_it_is_one(service_account):
    found = find_api_server()
    (service_account / "token").write_text("of\nthe-pod")
    with pytest.raises(SourceError, match="is no token"):
        found.credentials()
    (service_account / "token").write_text("of-the-pod")
    assert found.credentials() == {"Authorization": "Bearer of-the-pod"}


def test_inside_a_cluster_the_authority_may_have_words_above_it(service_account):
    authority = service_account / "ca.crt"
    authority.write_text("# Főtanúsítvány\n" + authority.read_text(), "utf-8")
    assert find_api_server().host == "https://192.0.2.7:443"


def test_inside_a_cluster_of_ipv6_the_address_stands_in_brackets(service_account, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert find_api_server().host == "https://[fd00::1]:443"


@pytest.mark.parametrize("file", ["token", "ca.crt"])
@pytest.mark.parametrize("text", [None, "", "\udcff"])
def test_inside_a_cluster_a_file_that_is_missing_or_empty_is_named(service_account, file, text):
    (service_account / file).unlink()
    if text is not None:
        (service_account / file).write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(SourceError, match="the configuration of this pod cannot be used"):
        find_api_server()


def test_inside_a_cluster_only_the_clusters_own_authority_is_believed(service_account, certificate_authority, monkeypatch):
    def answered_by(authority):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(listener.getsockname()[1]))
            listener.settimeout(5)

            def answer_once():
                with contextlib.suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

            thread = threading.Thread(target=answer_once)
            thread.start()
            try:
                return Connection(find_api_server, urllib3.Timeout(5)).get("/", {}).read()
            finally:
                thread.join()

    assert answered_by(certificate_authority) == b"{}"
    with pytest.raises(AttemptError, match="CERTIFICATE_VERIFY_FAILED"):
        answered_by(trustme.CA())


def test_a_proxy_of_the_environment_is_not_used_for_a_given_host(server, watch, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert names(watch()) == ["pod-1"]
