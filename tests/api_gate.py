"""What stands before an API server: passes requests on, and fails as load balancers, proxies and servers do."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


def status(code, reason, message, details=None):
    more = {} if details is None else {"details": details}
    answer = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason, "code": code, **more}
    return json.dumps(answer)


class ApiGate:
    """Serves `url` on behalf of the server at another url. Its attributes may be set at any time."""

    def __init__(self, upstream_url):
        self.upstream = urlsplit(upstream_url).netloc
        self.delay_seconds = 0.0
        """Before every answer."""
        self.token = None
        """Who has another one is refused with 401."""
        self.forbidden = ()
        """Paths that are refused with 403."""
        self.watch_seconds = None
        """Every watch ends after so long."""
        self.watches_refused = 0
        """So many watches are answered 410 as the status of the response."""
        self.requests = []
        self.writes = []
        """(when, method, path, body) of all that was to be written, refused or not."""
        self.writes_refused = deque()
        """The next writes are refused so: (code, reason, message, details)."""
        self.writes_always_refused = None
        """Every write is."""
        self.writes_hang = False
        """No write is answered."""
        self._open = set()
        self._silent = set()
        self._lock = threading.Lock()
        self.closing = threading.Event()
        gate = self

        class Handler(_Handler):
            pass

        Handler.gate = gate
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="api-gate", daemon=True).start()

    def fall_silent(self):
        """From now on nothing comes through the connections that are open, and nobody is told. New ones are none the worse."""
        with self._lock:
            self._silent |= self._open

    def is_silent(self, connection):
        with self._lock:
            return connection in self._silent

    def end_watches(self):
        """End all watches that are open."""
        with self._lock:
            opened = list(self._open)
        for connection in opened:
            connection.end()

    def close(self):
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self.end_watches()

    @contextlib.contextmanager
    def opened(self, connection):
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)


class _Upstream(http.client.HTTPConnection):
    def end(self):
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    __hash__ = object.__hash__


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    gate: ApiGate

    def do_GET(self):
        gate = self.gate
        split = urlsplit(self.path)
        is_watch = "watch" in parse_qs(split.query)
        gate.requests.append(self.path)
        threading.Event().wait(gate.delay_seconds)
        if gate.token is not None and self.headers.get("Authorization") != f"Bearer {gate.token}":
            self._refuse(401, "Unauthorized", "Unauthorized")
        elif split.path in gate.forbidden:
            self._refuse(403, "Forbidden", f"{split.path} is forbidden")
        elif is_watch and gate.watches_refused > 0:
            gate.watches_refused -= 1
            self._refuse(410, "Expired", "too old resource version")
        else:
            self._pass(is_watch=is_watch)

    def do_POST(self):
        self._pass_write("POST")

    def do_PATCH(self):
        self._pass_write("PATCH")

    def _pass_write(self, method):
        gate = self.gate
        body = self.rfile.read(int(self.headers["Content-Length"]))
        gate.writes.append((time.monotonic(), method, self.path, json.loads(body)))
        if gate.writes_hang:
            gate.closing.wait(30)
            self.close_connection = True
            return
        threading.Event().wait(gate.delay_seconds)
        if gate.token is not None and self.headers.get("Authorization") != f"Bearer {gate.token}":
            self._refuse(401, "Unauthorized", "Unauthorized")
        elif gate.writes_refused:
            self._refuse(*gate.writes_refused.popleft())
        elif gate.writes_always_refused is not None:
            self._refuse(*gate.writes_always_refused)
        else:
            with contextlib.closing(http.client.HTTPConnection(gate.upstream, timeout=60)) as upstream:
                upstream.request(method, self.path, body, {"Content-Type": self.headers["Content-Type"]})
                answer = upstream.getresponse()
                self._answer(answer.status, answer.read())

    def _pass(self, *, is_watch):
        upstream = _Upstream(self.gate.upstream, timeout=60)
        timer = None
        try:
            with contextlib.closing(upstream), self.gate.opened(upstream):
                upstream.request("GET", self.path)
                answer = upstream.getresponse()
                if is_watch and self.gate.watch_seconds is not None:
                    timer = threading.Timer(self.gate.watch_seconds, upstream.end)
                    timer.daemon = True
                    timer.start()
                self._relay(upstream, answer)
        except OSError:
            self.close_connection = True  # as a proxy whose server went away
        finally:
            if timer is not None:
                timer.cancel()

    def _relay(self, upstream, answer):
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(http.client.HTTPException):
            while chunk := answer.read1(1 << 16):
                if not self.gate.is_silent(upstream):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        if self.gate.is_silent(upstream):
            threading.Event().wait(30)
        self.wfile.write(b"0\r\n\r\n")

    def _refuse(self, code, reason, message, details=None):
        self._answer(code, status(code, reason, message, details).encode())

    def _answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *arguments):  # noqa: A002 - the base class's name
        pass
