import http.client
import json
import logging
import re
import socket
import ssl
import struct
import threading
import time
from base64 import b64encode
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import bcrypt
import pytest
import trustme
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from exporter.server import Limits, Request, Response, Server, ServerError

METRICS = b"".join(b'fgpu_container_memory_used_bytes{pod="train-%d"} 1024\n' % i for i in range(6000))
LOOPBACK = "127.0.0.1"
QUICK = Limits(handshake_seconds=0.3, request_seconds=0.3, response_seconds=0.3)


def echo(request: Request) -> Response:
    facts = [request.path, request.query, request.accept, request.accept_encoding]
    return Response(200, "application/json", json.dumps(facts).encode(), (("Vary", "Accept"),))


def fail(request: Request) -> Response:
    raise RuntimeError(request.query)


ROUTES = {
    "/metrics": lambda _: Response(200, "text/plain; version=0.0.4; charset=utf-8", METRICS),
    "/healthz": lambda _: Response(200, "text/plain; charset=utf-8", b"ok\n"),
    "/readyz": lambda _: Response(503, "text/plain; charset=utf-8", b"no sample yet\n"),
    "/echo": echo,
    "/fail": fail,
}


@pytest.fixture
def serve():
    with ExitStack() as stack:

        def start(**settings):
            server = Server(**{"address": LOOPBACK, "port": 0, "routes": ROUTES, "reload_seconds": 0.02, **settings})
            server.start()
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def server(serve):
    return serve()


def get(port, path, headers=None, *, method="GET", host=LOOPBACK, body=None, tls=None):
    connection = (
        http.client.HTTPSConnection(host, port, timeout=5, context=tls) if tls else http.client.HTTPConnection(host, port, timeout=5)
    )
    with_headers = {"Connection": "close", **(headers or {})}
    try:
        connection.request(method, path, body, with_headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def scrape_ms(port, **options):
    started = time.perf_counter()
    status, _, body = get(port, "/metrics", **options)
    assert (status, body) == (200, METRICS)
    return (time.perf_counter() - started) * 1000


@contextmanager
def connected(port, data=b""):
    with socket.create_connection((LOOPBACK, port), timeout=5) as client:
        client.sendall(data)
        yield client


def read_to_end(client):
    received = bytearray()
    with suppress(ConnectionError):
        while part := client.recv(65536):
            received += part
    return bytes(received)


def seconds_until_closed(client, drip=b"", limit=3.0):
    """How long the server keeps a connection on which one byte comes every 50 ms, or none."""
    started = time.perf_counter()
    client.settimeout(0.05)
    while time.perf_counter() - started < limit:
        try:
            if drip:
                client.sendall(drip)
            if not client.recv(65536):
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    return time.perf_counter() - started


# --- what is answered ---


def test_a_path_is_answered_by_its_function(server):
    status, headers, body = get(server.port, "/metrics")
    assert (status, body) == (200, METRICS)
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert headers["Content-Length"] == str(len(METRICS))
    assert get(server.port, "/readyz")[::2] == (503, b"no sample yet\n")


def test_a_function_is_told_path_query_and_what_the_client_accepts(server):
    headers = {"Accept": "application/openmetrics-text;q=0.5", "Accept-Encoding": "gzip"}
    _, answered, body = get(server.port, "/echo?a=%31&b", headers)
    assert json.loads(body) == ["/echo", "a=%31&b", "application/openmetrics-text;q=0.5", "gzip"]
    assert answered["Vary"] == "Accept"


def test_a_whole_url_is_taken_as_its_path(server):
    with connected(server.port, b"GET http://node:9844/echo?x HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n") as client:
        assert b'["/echo", "x", "", ""]' in read_to_end(client)


@pytest.mark.parametrize("path", ["/nope", "/metrics/", "//metrics", "/../metrics", "/metrics/..", "/%2e%2e/etc/passwd", "/METRICS"])
def test_any_other_path_is_404(server, path):
    assert get(server.port, path)[::2] == (404, b"404 not found\n")


def test_head_has_the_headers_of_get_and_no_body(server):
    status, headers, body = get(server.port, "/metrics", method="HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(len(METRICS)), b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/nope"])
def test_other_methods_are_405_and_told_what_is_allowed(server, method, path):
    status, headers, _ = get(server.port, path, method=method, body=b"x" * 100)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_a_function_that_raises_costs_a_500_and_one_log_record_until_it_is_well_again(serve, caplog):
    caplog.set_level(logging.INFO)
    routes = {"/metrics": lambda request: fail(request) if request.query else Response(200, "text/plain", b"well\n")}
    server = serve(routes=routes)
    for _ in range(3):
        assert get(server.port, "/metrics?broken")[::2] == (500, b"500 this went wrong; the log says why\n")
    assert get(server.port, "/metrics")[::2] == (200, b"well\n")
    assert get(server.port, "/metrics?broken")[0] == 500
    assert [record.message for record in caplog.records if "path=" in record.message] == [
        "path=/metrics state=failing",
        "path=/metrics state=ok",
        "path=/metrics state=failing",
    ]


def test_one_connection_serves_one_request_after_another(server):
    connection = http.client.HTTPConnection(LOOPBACK, server.port, timeout=5)
    for _ in range(5):
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b"ok\n"
        sock = connection.sock
    assert connection.sock is sock is not None
    connection.close()


def test_requests_sent_at_once_are_answered_in_their_order(server):
    requests = b"".join(b"GET /echo?%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(50))
    with connected(server.port, requests + b"GET /echo?last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as client:
        answers = re.findall(rb'"/echo", "(\w+)"', read_to_end(client))
    assert answers == [b"%d" % i for i in range(50)] + [b"last"]


# --- where it listens ---


def test_port_0_is_a_free_port_that_can_be_asked_for(serve):
    first, second = serve(), serve()
    assert 0 < first.port != second.port > 0


def test_a_port_that_is_taken_is_named(server):
    with pytest.raises(
        ServerError, match=rf"^cannot listen on 127.0.0.1 port {server.port}: Address already in use; another program listens there$"
    ):
        Server(address=LOOPBACK, port=server.port, routes=ROUTES).start()


@pytest.mark.parametrize("address", ["localhost", "10.0.0.256", "gpu-node", "", "a" * 300, "ü"])
def test_what_is_no_ip_address_is_named(address):
    with pytest.raises(ServerError, match=r"^cannot listen on .*: not an IP address$"):
        Server(address=address, port=0, routes=ROUTES).start()


def test_an_address_of_another_host_is_named():
    # 192.0.2.0/24 is for documentation: no host has it.
    with pytest.raises(ServerError, match=r"^cannot listen on 192.0.2.1 port 0: .*; no interface of this host has that address$"):
        Server(address="192.0.2.1", port=0, routes=ROUTES).start()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize("address", ["::", "[::]"])
def test_every_address_means_ipv4_and_ipv6(serve, address):
    port = serve(address=address).port
    assert scrape_ms(port, host="127.0.0.1")
    assert scrape_ms(port, host="::1")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_one_ipv6_address_is_that_one(serve):
    port = serve(address="[::1]").port
    assert scrape_ms(port, host="::1")
    with pytest.raises(ConnectionRefusedError):
        get(port, "/metrics", host="127.0.0.1")


def test_every_address_is_ipv4_where_the_kernel_has_no_ipv6(serve, monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert scrape_ms(serve(address="::").port)


# --- how it ends ---


def test_closing_is_quick_whatever_connections_are_open(serve):
    server = serve()
    with ExitStack() as stack:
        for data in (b"", b"GET /met", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50):
            stack.enter_context(connected(server.port, data))
        time.sleep(0.1)
        started = time.perf_counter()
        server.close(timeout_seconds=0.2)
        assert time.perf_counter() - started < 0.6
        with pytest.raises(ConnectionRefusedError):
            get(server.port, "/healthz")


def test_closing_gives_the_answer_in_progress(serve):
    large = b"x" * 20_000_000
    server = serve(routes={"/metrics": lambda _: Response(200, "text/plain", large)})
    with connected(server.port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") as client:
        assert client.recv(1) == b"H"
        closing = threading.Thread(target=server.close, args=(5.0,))
        closing.start()
        assert len(read_to_end(client)) > len(large)
        closing.join()


def test_closing_twice_or_before_the_start_does_nothing(serve):
    Server(address=LOOPBACK, port=0, routes=ROUTES).close()
    server = serve()
    server.close()
    server.close()


def test_a_port_can_be_taken_again_at_once(serve):
    first = serve()
    scrape_ms(first.port)
    first.close()
    assert scrape_ms(serve(port=first.port).port)


# --- who may not disturb ---


def test_a_scrape_passes_beside_500_silent_connections(serve):
    server = serve()
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(connected(server.port))
        assert scrape_ms(server.port) < 500
        assert len(server._service._connections) <= Limits().connections


def test_one_connection_too_many_ends_the_one_that_is_quiet_longest(serve):
    server = serve(limits=Limits(connections=3))
    with connected(server.port) as first, connected(server.port) as second, connected(server.port) as third:
        first.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        with first.makefile("rb") as answer:
            assert b"ok\n" in answer
        with connected(server.port) as fourth:
            assert second.recv(1) == b""
            for client in (first, third, fourth):
                client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert read_to_end(client).endswith(b"ok\n")


@pytest.mark.parametrize(
    ("sent", "drip"),
    [
        (b"", b""),
        (b"", b"G"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"y"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n", b""),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n", b"z"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nz\r\n"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b""),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /he", b"a"),
    ],
    ids=["silence", "slow line", "slow header", "no body", "slow body", "slow chunks", "silence after a request", "slow second request"],
)
def test_a_request_that_does_not_become_whole_is_cut_off_in_time(serve, sent, drip):
    server = serve(limits=QUICK)
    with connected(server.port, sent) as client:
        assert scrape_ms(server.port) < 500
        assert 0.2 < seconds_until_closed(client, drip) < 1.5


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 100_000 + b"\r\n",
    ],
    ids=["announced body", "announced chunk", "header", "path", "headers"],
)
def test_what_is_too_large_is_refused_before_it_is_read(serve, sent):
    server = serve()
    with connected(server.port) as client:
        started = time.perf_counter()
        try:
            client.sendall(sent)
            answer = read_to_end(client)
        except ConnectionError:
            answer = b""
        assert time.perf_counter() - started < 2
        assert answer in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert scrape_ms(server.port) < 500


def test_an_endless_body_is_cut_off(serve):
    server = serve()
    with connected(server.port, b"POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n") as client:
        with pytest.raises(ConnectionError):
            client.sendall((b"400\r\n" + b"z" * 1024 + b"\r\n") * 100_000)
        assert scrape_ms(server.port) < 500


def test_a_client_that_does_not_take_its_answers_is_cut_off_in_time(serve):
    server = serve(limits=QUICK)
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(server.port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)) for _ in range(20)]
        assert scrape_ms(server.port) < 500
        time.sleep(1.0)
        assert not server._service._connections
        assert all(len(read_to_end(client)) < 100 * len(METRICS) for client in clients)


def test_clients_that_leave_early_leave_nothing_behind(server, caplog):
    caplog.set_level(logging.INFO)
    reset = struct.pack("ii", 1, 0)
    for data in (b"", b"GET /me", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01") * 25:
        with connected(server.port, data) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    assert scrape_ms(server.port) < 500
    deadline = time.perf_counter() + 2
    while server._service._connections and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert not server._service._connections
    assert not caplog.records


@pytest.fixture(scope="module")
def hardened():
    server = Server(address=LOOPBACK, port=0, routes=ROUTES, limits=QUICK)
    server.start()
    yield server
    server.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(sent=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
@example(sent=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
@example(sent=b"GET / HTTP/9.9\r\n\r\n")
@example(sent=b"GET /metrics\r\n\r\n")
@example(sent=b"GET  HTTP/1.1\r\n\r\n")
@example(sent=b"GET /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n")
@example(sent=b"GET /metrics HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
@example(sent=b"GET /metrics HTTP/1.1\r\n: \r\n\r\n")
@example(sent=b"GET /metrics HTTP/1.1\r\nA\x00: \xff\r\n\r\n")
@example(sent=b"GET http://[ HTTP/1.1\r\nAuthorization: Basic \xff\r\n\r\n")
@given(sent=st.binary(max_size=200).map(lambda noise: noise + b"\r\n\r\n"))
def test_garbage_is_answered_or_dropped_and_not_logged(hardened, caplog, sent):
    with connected(hardened.port, sent) as client:
        answer = read_to_end(client)
    assert not answer or re.match(rb"HTTP/1\.1 (200|400|401|404|405) ", answer)
    assert get(hardened.port, "/healthz")[0] == 200
    assert not caplog.records


# --- TLS ---


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def write_certificate(folder, authority, name="server"):
    leaf = authority.issue_cert("localhost", LOOPBACK)
    (folder / f"{name}.crt").write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
    (folder / f"{name}.key").write_bytes(leaf.private_key_pem.bytes())


def write_web_config(folder, text, authority=None):
    """A web configuration with a certificate of the authority, and its path."""
    if authority is not None:
        write_certificate(folder, authority)
        (folder / "clients.crt").write_bytes(authority.cert_pem.bytes())
        text = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n" + text
    path = folder / "web.yaml"
    path.write_text(text)
    return path


def client_of(authority, *, identity=None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    if identity is not None:
        identity.configure_cert(context)
    return context


def handshake(port, context):
    with socket.create_connection((LOOPBACK, port), timeout=5) as plain, context.wrap_socket(plain, server_hostname="localhost") as client:
        # With TLS 1.3 a client learns by reading that it was refused.
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        if not client.recv(1):
            raise ConnectionResetError
        return client.version(), client.cipher()[0], client.getpeercert()["serialNumber"]


def until(answer, limit_seconds=5.0):
    deadline = time.perf_counter() + limit_seconds
    while not (result := answer()) and time.perf_counter() < deadline:
        time.sleep(0.01)
    return result


def test_with_a_certificate_it_speaks_tls_only(serve, tmp_path, authority):
    server = serve(web_config=write_web_config(tmp_path, "", authority))
    assert scrape_ms(server.port, tls=client_of(authority))
    assert handshake(server.port, client_of(authority))[0] == "TLSv1.3"
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        get(server.port, "/healthz")


def test_tls_clients_that_say_nothing_or_nonsense_disturb_no_scrape_and_are_cut_off(serve, tmp_path, authority):
    limits = Limits(handshake_seconds=0.3, request_seconds=30)
    server = serve(web_config=write_web_config(tmp_path, "", authority), limits=limits)
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(server.port)) for _ in range(60)]
        begun = [stack.enter_context(connected(server.port, b"\x16\x03\x01\x02\x00\x01")) for _ in range(60)]
        assert scrape_ms(server.port, tls=client_of(authority)) < 1000
        assert seconds_until_closed(silent[0]) < 1.5
        assert seconds_until_closed(begun[-1]) < 1.5
    with connected(server.port, b"no TLS at all" * 100) as client:
        assert seconds_until_closed(client) < 0.3


def test_after_the_handshake_a_silent_tls_client_is_cut_off_too(serve, tmp_path, authority):
    server = serve(web_config=write_web_config(tmp_path, "", authority), limits=QUICK)
    with connected(server.port) as plain, client_of(authority).wrap_socket(plain, server_hostname="localhost") as client:
        assert 0.2 < seconds_until_closed(client) < 1.5


def test_probes_need_no_client_certificate_and_everything_else_does(serve, tmp_path, authority):
    text = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: clients.crt\n"
    server = serve(web_config=write_web_config(tmp_path, text, authority))
    stranger, known = client_of(authority), client_of(authority, identity=authority.issue_cert("prometheus"))
    paths = ("/healthz", "/readyz", "/metrics", "/echo", "/nope")
    assert [get(server.port, path, tls=stranger)[0] for path in paths] == [200, 503, 403, 403, 403]
    assert [get(server.port, path, tls=known)[0] for path in paths] == [200, 503, 200, 200, 404]
    forger = client_of(authority, identity=trustme.CA().issue_cert("prometheus"))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        handshake(server.port, forger)


def test_a_client_certificate_must_carry_an_allowed_name(serve, tmp_path, authority):
    text = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: clients.crt\n  client_allowed_sans: [prometheus, 10.1.2.3]\n"
    server = serve(web_config=write_web_config(tmp_path, text, authority))

    def status(*names):
        return get(server.port, "/metrics", tls=client_of(authority, identity=authority.issue_cert(*names)))[0]

    assert [status("prometheus"), status("other", "10.1.2.3"), status("other"), status("prometheus.evil")] == [200, 200, 403, 403]


def test_a_client_certificate_that_is_not_needed_must_still_be_good(serve, tmp_path, authority):
    text = "  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: clients.crt\n"
    server = serve(web_config=write_web_config(tmp_path, text, authority))
    assert scrape_ms(server.port, tls=client_of(authority))
    assert scrape_ms(server.port, tls=client_of(authority, identity=authority.issue_cert("prometheus")))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        handshake(server.port, client_of(authority, identity=trustme.CA().issue_cert("prometheus")))


def test_a_rotated_certificate_is_served_without_a_restart(serve, tmp_path, authority):
    server = serve(web_config=write_web_config(tmp_path, "", authority))
    client = client_of(authority)
    old = handshake(server.port, client)[2]
    write_certificate(tmp_path, authority)
    assert until(lambda: handshake(server.port, client)[2] != old)


def test_a_broken_web_config_keeps_the_old_one_is_logged_once_and_tried_again(serve, tmp_path, authority, caplog):
    caplog.set_level(logging.INFO, "exporter.web_config")
    path = write_web_config(tmp_path, "", authority)
    server = serve(web_config=path)
    client = client_of(authority)
    good, old = path.read_text(), handshake(server.port, client)[2]
    path.write_text(good + "  min_version: TLS9\n")
    assert until(lambda: caplog.records)
    time.sleep(0.2)
    assert handshake(server.port, client)[2] == old
    write_certificate(tmp_path, authority)
    path.write_text(good)
    assert until(lambda: handshake(server.port, client)[2] != old)
    messages = [record.message for record in caplog.records if "TLS9" in record.message]
    assert len(messages) == 1
    assert caplog.records[-1].message == f"web_config={path} state=reloaded"


def test_a_new_web_config_ends_connections_that_came_in_by_the_old_one(serve, tmp_path, authority):
    path = write_web_config(tmp_path, "", authority)
    server = serve(web_config=path)
    with connected(server.port) as plain, client_of(authority).wrap_socket(plain, server_hostname="localhost") as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1)
        path.write_text(path.read_text() + "http_server_config:\n  headers:\n    X-Frame-Options: deny\n")
        assert seconds_until_closed(client) < 2
    assert get(server.port, "/healthz", tls=client_of(authority))[1]["X-Frame-Options"] == "deny"


def test_a_web_config_that_cannot_be_used_is_named_at_the_start(tmp_path):
    path = write_web_config(tmp_path, "tls_config: {}\n")
    with pytest.raises(
        ServerError, match=r"^web configuration .*/web.yaml: the file: 'tls_config' is not known here; known are tls_server_config,"
    ):
        Server(address=LOOPBACK, port=0, routes=ROUTES, web_config=path).start()


# --- passwords, headers, rate ---


def basic(user, password):
    return {"Authorization": "Basic " + b64encode(f"{user}:{password}".encode()).decode()}


def hashed(password, rounds=4):
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(rounds)).decode()


def test_a_password_is_needed_everywhere_but_for_probes(serve, tmp_path):
    server = serve(web_config=write_web_config(tmp_path, f"basic_auth_users:\n  alice: {hashed('secret')}\n"))
    status, headers, _ = get(server.port, "/metrics")
    assert (status, headers["WWW-Authenticate"]) == (401, 'Basic realm="metrics", charset="UTF-8"')
    assert get(server.port, "/metrics", basic("alice", "secret"))[0] == 200
    assert get(server.port, "/metrics", basic("alice", "Secret"))[0] == 401
    assert get(server.port, "/metrics", basic("bob", "secret"))[0] == 401
    assert [get(server.port, path)[0] for path in ("/", "/nope", "/healthz", "/readyz")] == [401, 401, 200, 503]


def test_scrapes_with_a_password_cost_one_bcrypt_in_all(serve, tmp_path):
    # At this cost a check takes some 60 ms.
    server = serve(web_config=write_web_config(tmp_path, f"basic_auth_users:\n  alice: {hashed('secret', rounds=10)}\n"))
    first = scrape_ms(server.port, headers=basic("alice", "secret"))
    later = sorted(scrape_ms(server.port, headers=basic("alice", "secret")) for _ in range(9))
    assert later[4] < first / 3


def test_guessing_passwords_disturbs_neither_scrapes_nor_probes(serve, tmp_path):
    server = serve(web_config=write_web_config(tmp_path, f"basic_auth_users:\n  alice: {hashed('secret', rounds=10)}\n"))
    scrape_ms(server.port, headers=basic("alice", "secret"))
    with ExitStack() as stack:
        for guess in range(40):
            credentials = basic("alice", f"guess-{guess}")["Authorization"].encode()
            request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: " + credentials + b"\r\n\r\n"
            stack.enter_context(connected(server.port, request))
        assert scrape_ms(server.port, headers=basic("alice", "secret")) < 500
        assert get(server.port, "/healthz")[0] == 200
        status, headers, _ = get(server.port, "/metrics", basic("alice", "one too many"))
        assert (status, headers["Retry-After"]) == (429, "1")


def test_users_come_and_go_without_a_restart(serve, tmp_path):
    path = write_web_config(tmp_path, f"basic_auth_users:\n  alice: {hashed('secret')}\n")
    server = serve(web_config=path)
    assert get(server.port, "/metrics", basic("alice", "secret"))[0] == 200
    path.write_text(f"basic_auth_users:\n  bob: {hashed('hidden')}\n")
    assert until(lambda: get(server.port, "/metrics", basic("bob", "hidden"))[0] == 200)
    assert get(server.port, "/metrics", basic("alice", "secret"))[0] == 401


def test_emptying_the_web_config_opens_nothing(serve, tmp_path, caplog):
    path = write_web_config(tmp_path, f"basic_auth_users:\n  alice: {hashed('secret')}\n")
    server = serve(web_config=path)
    path.write_text("")
    assert until(lambda: "it no longer asks for passwords; that takes a restart" in caplog.text)
    assert get(server.port, "/metrics")[0] == 401


def test_headers_of_the_web_config_are_on_every_answer(serve, tmp_path):
    text = "http_server_config:\n  http2: true\n  headers:\n    X-Content-Type-Options: nosniff\n    Strict-Transport-Security: max-age=9\n"
    server = serve(web_config=write_web_config(tmp_path, text))
    for path in ("/metrics", "/nope", "/fail", "/healthz"):
        headers = get(server.port, path)[1]
        assert (headers["X-Content-Type-Options"], headers["Strict-Transport-Security"]) == ("nosniff", "max-age=9")


def test_a_rate_limit_spares_probes(serve, tmp_path):
    server = serve(web_config=write_web_config(tmp_path, "rate_limit:\n  interval: 1h\n  burst: 2\n"))
    assert [get(server.port, "/metrics")[0] for _ in range(4)] == [200, 200, 429, 429]
    assert get(server.port, "/healthz")[0] == 200


def test_relative_paths_start_from_the_folder_of_the_web_config(serve, tmp_path, authority, monkeypatch):
    monkeypatch.chdir(Path("/"))
    assert scrape_ms(serve(web_config=write_web_config(tmp_path, "", authority)).port, tls=client_of(authority))
