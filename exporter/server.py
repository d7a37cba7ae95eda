"""HTTP: answers the paths it was given, over plain TCP or TLS, on a thread of its own.

One event loop serves all connections: a client that is slow, silent or hostile costs a little memory until its time is over, and no other
client waits for it. What a client may cost is in `Limits`. Tornado parses requests and writes responses
(https://www.tornadoweb.org/en/stable/http.html); what is here decides which connections there are, and what they are answered.
"""

import asyncio
import errno
import logging
import os
import socket
import ssl
import threading
from asyncio import Future, TimerHandle
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

from tornado.http1connection import HTTP1ConnectionParameters, HTTP1ServerConnection
from tornado.httputil import (
    HTTPConnection,
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerConnectionDelegate,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.iostream import IOStream, SSLIOStream

from exporter.access import Access, Verdict
from exporter.web_config import WebConfig, WebConfigError, WebConfigFile

_log = logging.getLogger(__name__)
# Tornado tells of each malformed request and failed handshake: anyone could fill the log.
logging.getLogger("tornado.general").setLevel(logging.ERROR)

_TEXT = "text/plain; charset=utf-8"
_METHODS = ("GET", "HEAD")
_BACKLOG = 1024
_MAX_READ_BUFFER_BYTES = 1 << 20
_ACCEPT_PAUSE_SECONDS = 0.5
_DRAIN_STEP_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for."""

    path: str
    query: str = ""
    """What follows the question mark, as it was sent."""
    accept: str = ""
    accept_encoding: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """What is answered."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client may cost."""

    connections: int = 128
    """At once. One more, and the one that has been quiet longest is closed."""
    handshake_seconds: float = 5.0
    """For the TLS handshake."""
    request_seconds: float = 10.0
    """Until the headers of a request, the first or the next, are complete; and then for a body that nobody asked for."""
    response_seconds: float = 10.0
    """Until a client has taken the response."""
    header_bytes: int = 16384
    body_bytes: int = 65536


Routes = Mapping[str, Callable[[Request], Response]]


class ServerError(Exception):
    """The server cannot start. The text is one line for a person."""


class Server:
    """Serves `routes` by path, to GET and HEAD.

    The functions of routes are called on the HTTP thread, one at a time: they must not wait.
    """

    def __init__(
        self,
        *,
        address: str,
        port: int,
        routes: Routes,
        web_config: Path | None = None,
        open_paths: Iterable[str] = ("/healthz", "/readyz"),
        limits: Limits | None = None,
        reload_seconds: float = 1.0,
    ) -> None:
        """`port` 0 lets the system choose. `open_paths` need no password or client certificate: a kubelet's probes have neither.

        `reload_seconds` is how often the web configuration is looked at for changes.
        """
        self.port = port
        """The TCP port; once started, the one that it listens on."""
        self._address = address.removeprefix("[").removesuffix("]")
        self._routes = routes
        self._web_config_path = web_config
        self._open_paths = frozenset(open_paths)
        self._limits = limits or Limits()
        self._reload_seconds = reload_seconds
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: _Service | None = None

    def start(self) -> None:
        """Listen and serve; answers when connections are taken. Raises ServerError."""
        try:
            web_config = WebConfigFile(self._web_config_path) if self._web_config_path else None
        except WebConfigError as error:
            raise ServerError(str(error)) from error
        listener = _listen(self._address, self.port)
        self.port = listener.getsockname()[1]
        serving = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listener, web_config, serving), name="http", daemon=True)
        self._thread.start()
        serving.wait()
        tls = "on" if web_config and web_config.config.tls else "off"
        _log.info("http=listening address=%s port=%d tls=%s", self._address, self.port, tls)

    def close(self, timeout_seconds: float = 0.5) -> None:
        """Stop listening, give answers in progress up to this long, close every connection."""
        if self._thread is None or self._loop is None or self._service is None:
            return
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._service.stop, timeout_seconds)
        # A function of a route that hangs must not keep the process alive.
        self._thread.join(timeout_seconds + 0.3)
        self._thread = None

    def _run(self, listener: socket.socket, web_config: WebConfigFile | None, serving: threading.Event) -> None:
        try:
            asyncio.run(self._serve(listener, web_config, serving))
        finally:
            serving.set()

    async def _serve(self, listener: socket.socket, web_config: WebConfigFile | None, serving: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._service = _Service(self._routes, self._open_paths, web_config, self._limits)
        serving.set()
        await self._service.run(listener, self._reload_seconds)


def _listen(address: str, port: int) -> socket.socket:
    if address == "::" and not socket.has_dualstack_ipv6():
        # A kernel without IPv6.
        address = "0.0.0.0"  # noqa: S104 - what the caller asked for, as far as there is
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][0]
    except (socket.gaierror, UnicodeError) as error:
        raise ServerError(f"cannot listen on {address!r}: not an IP address") from error
    try:
        listener = socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=address == "::")
    except OSError as error:
        hint = _LISTEN_HINTS.get(error.errno or 0, "")
        raise ServerError(f"cannot listen on {address} port {port}: {os.strerror(error.errno or 0)}{hint}") from error
    listener.settimeout(0)
    return listener


_LISTEN_HINTS = {
    errno.EADDRINUSE: "; another program listens there",
    errno.EACCES: "; ports below 1024 take a privilege",
    errno.EADDRNOTAVAIL: "; no interface of this host has that address",
}


class _Connection:
    """One connection and its deadline."""

    def __init__(self, stream: IOStream, address: str) -> None:
        self.stream = stream
        self.address = address
        self.certificate: Mapping[str, Any] | None = None
        """The client's, verified."""
        self.is_answering = False
        self.was_answered = False
        self.is_retired = False
        self._deadline: TimerHandle | None = None

    def close_after(self, seconds: float) -> None:
        """Close it unless `keep` is called before."""
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.stream.close)

    def keep(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def retire(self) -> None:
        """Let it end with its next answer, or now if it rests after one."""
        self.is_retired = True
        if self.was_answered and not self.is_answering:
            self.stream.close()


class _Service(HTTPServerConnectionDelegate):
    """What runs on the event loop: takes connections, hands requests to `_Exchange`, reloads the web configuration."""

    def __init__(self, routes: Routes, open_paths: frozenset[str], web_config: WebConfigFile | None, limits: Limits) -> None:
        self.open_paths = open_paths
        self.limits = limits
        self.config = web_config.config if web_config else WebConfig()
        self.access = Access(self.config)
        self._routes = routes
        self._web_config = web_config
        self._parameters = HTTP1ConnectionParameters(
            max_header_size=limits.header_bytes,
            header_timeout=limits.request_seconds,
            max_body_size=limits.body_bytes,
            body_timeout=limits.request_seconds,
        )
        self._connections: dict[_Connection, None] = {}
        """In the order of their last sign of life."""
        self._failing_paths: set[str] = set()
        self._stopped = asyncio.Event()
        self._drain_seconds = 0.0

    async def run(self, listener: socket.socket, reload_seconds: float) -> None:
        """Serve until `stop`."""
        with listener:
            async with asyncio.TaskGroup() as tasks:
                accepting = tasks.create_task(self._accept(listener))
                await self._reload_until_stopped(reload_seconds if self._web_config else None)
                accepting.cancel()
        await self._drain()

    def stop(self, drain_seconds: float) -> None:
        """End `run`, after giving answers in progress that long."""
        self._drain_seconds = drain_seconds
        self._stopped.set()

    def start_request(self, server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        """Tornado: the connection is new, or the last answer has been taken."""
        connection = _connection_of(server_conn)
        if connection.is_answering:
            connection.is_answering = False
            connection.was_answered = True
            connection.keep()
            if connection.is_retired:
                connection.stream.close()
        return _Exchange(self, connection, request_conn)

    def on_close(self, server_conn: object) -> None:
        """Tornado: the connection is no more."""
        self._forget(_connection_of(server_conn))

    def begin_answer(self, connection: _Connection) -> None:
        """Note that there is a request on this connection."""
        connection.is_answering = True
        if connection in self._connections:
            del self._connections[connection]
            self._connections[connection] = None

    def answer(self, request: Request) -> Response:
        """Answer what the path's function answers; 404 without one, 500 if it fails."""
        route = self._routes.get(request.path)
        if route is None:
            return Response(HTTPStatus.NOT_FOUND, _TEXT, b"404 not found\n")
        try:
            response = route(request)
        except Exception:  # noqa: BLE001 - whatever the function of a path raises costs that path only
            if request.path not in self._failing_paths:
                self._failing_paths.add(request.path)
                _log.exception("path=%s state=failing", request.path)
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, b"500 this went wrong; the log says why\n")
        if request.path in self._failing_paths:
            self._failing_paths.remove(request.path)
            _log.info("path=%s state=ok", request.path)
        return response

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        is_exhausted = False
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if not is_exhausted:
                        is_exhausted = True
                        _log.error("http=refusing reason=%r", os.strerror(error.errno))
                    await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            if is_exhausted:
                is_exhausted = False
                _log.info("http=accepting")
            self._open(client, address[0])

    def _open(self, client: socket.socket, address: str) -> None:
        if len(self._connections) >= self.limits.connections:
            quietest = next(iter(self._connections))
            self._forget(quietest)
            quietest.stream.close()
        try:
            stream = _open_stream(client, self.config.tls)
        except OSError:
            # It went away.
            client.close()
            return
        connection = _Connection(stream, address)
        self._connections[connection] = None
        if isinstance(stream, SSLIOStream):
            connection.close_after(self.limits.handshake_seconds)
            stream.wait_for_handshake().add_done_callback(partial(_end_handshake, connection))
        HTTP1ServerConnection(stream, self._parameters, connection).start_serving(self)

    def _forget(self, connection: _Connection) -> None:
        connection.keep()
        self._connections.pop(connection, None)

    async def _reload_until_stopped(self, reload_seconds: float | None) -> None:
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(reload_seconds):
                    await self._stopped.wait()
            except TimeoutError:
                self._reload()

    def _reload(self) -> None:
        if self._web_config is not None and self._web_config.reload():
            self.config = self._web_config.config
            self.access = Access(self.config)
            # They came in by the old one.
            for connection in list(self._connections):
                connection.retire()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_seconds
        for connection in list(self._connections):
            connection.retire()
            if not connection.is_answering:
                connection.stream.close()
        while self._connections and loop.time() < deadline:  # noqa: ASYNC110 - the last moments; an event for each would be more code
            await asyncio.sleep(_DRAIN_STEP_SECONDS)
        for connection in list(self._connections):
            connection.stream.close()


def _connection_of(server_conn: object) -> _Connection:
    return cast(_Connection, cast(HTTP1ServerConnection, server_conn).context)


def _open_stream(client: socket.socket, tls: ssl.SSLContext | None) -> IOStream:
    if tls is None:
        return IOStream(client, max_buffer_size=_MAX_READ_BUFFER_BYTES)
    encrypted = tls.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
    return SSLIOStream(encrypted, ssl_options=tls, max_buffer_size=_MAX_READ_BUFFER_BYTES)


def _end_handshake(connection: _Connection, handshake: "Future[SSLIOStream]") -> None:
    connection.keep()
    error = handshake.exception()
    if error is not None:
        _log.debug("peer=%s handshake=failed reason=%r", connection.address, str(error))
    elif not connection.stream.closed():
        connection.certificate = cast(ssl.SSLSocket, connection.stream.socket).getpeercert()


_REFUSALS = {
    Verdict.TOO_OFTEN: Response(HTTPStatus.TOO_MANY_REQUESTS, _TEXT, b"429 too many requests\n", (("Retry-After", "1"),)),
    Verdict.NO_CERTIFICATE: Response(HTTPStatus.FORBIDDEN, _TEXT, b"403 a client certificate is needed here\n"),
    Verdict.NO_PASSWORD: Response(
        HTTPStatus.UNAUTHORIZED,
        _TEXT,
        b"401 a password is needed here\n",
        (("WWW-Authenticate", 'Basic realm="metrics", charset="UTF-8"'),),
    ),
    Verdict.TOO_MANY_PASSWORDS: Response(
        HTTPStatus.TOO_MANY_REQUESTS, _TEXT, b"429 too many passwords wait to be checked\n", (("Retry-After", "1"),)
    ),
}
_WRONG_METHOD = Response(HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"405 only GET and HEAD are answered\n", (("Allow", ", ".join(_METHODS)),))


class _Exchange(HTTPMessageDelegate):
    """One request and its answer. Tornado calls the methods in the order in which they stand."""

    def __init__(self, service: _Service, connection: _Connection, http: HTTPConnection) -> None:
        self._service = service
        self._connection = connection
        self._http = http

    async def headers_received(self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders) -> None:
        """Judge the request."""
        line = cast(RequestStartLine, start_line)
        self._service.begin_answer(self._connection)
        self._method = line.method
        path, query = _parse_target(line.path)
        self._request = Request(path, query, headers.get("Accept", ""), headers.get("Accept-Encoding", ""))
        self._refusal = None
        if path not in self._service.open_paths:
            verdict = await self._service.access.judge(
                authorization=headers.get("Authorization", ""),
                certificate=self._connection.certificate,
                address=self._connection.address,
            )
            self._refusal = _REFUSALS.get(verdict)

    def finish(self) -> None:
        """Answer it: whatever body it had is over."""
        if self._refusal is not None:
            self._send(self._refusal)
        elif self._method not in _METHODS:
            self._send(_WRONG_METHOD)
        else:
            self._send(self._service.answer(self._request))

    def _send(self, response: Response) -> None:
        headers = HTTPHeaders(
            {"Content-Type": response.content_type, "Content-Length": str(len(response.body)), "Date": formatdate(usegmt=True)}
        )
        for name, value in (*self._service.config.headers, *response.headers):
            headers[name] = value
        if self._connection.is_retired:
            headers["Connection"] = "close"
        self._connection.close_after(self._service.limits.response_seconds)
        status = HTTPStatus(response.status)
        self._http.write_headers(ResponseStartLine("HTTP/1.1", status, status.phrase), headers)
        if self._method != "HEAD":
            # Apart from the headers, so that connections share the bytes of one exposition instead of copying them.
            self._http.write(response.body)
        self._http.finish()


def _parse_target(target: str) -> tuple[str, str]:
    """Answer path and query. A client may also send the whole URL (https://www.rfc-editor.org/rfc/rfc9112#section-3.2.2)."""
    path, _, query = target.partition("?")
    if "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    return path, query
