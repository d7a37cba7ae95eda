"""A Prometheus is asked over HTTP, and what goes wrong is one sentence that says what to do."""

import base64
import contextlib
import json
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
import trustme

from exporter.commands.prometheus_api import PLAIN, AddressError, Prometheus, PrometheusError, Sample, read_http_config

VECTOR = {
    "status": "success",
    "data": {
        "resultType": "vector",
        "result": [
            {"metric": {"namespace": "team-a", "pod": "train-0"}, "value": [1767312000, "10485760000"]},
            {"metric": {"namespace": "team-a", "pod": "train-1"}, "value": [1767312000, "NaN"]},
        ],
    },
}


class Server:
    """An HTTP server that answers every request in one way and remembers what it was asked."""

    def __init__(self, status, body, headers, tls, seconds):
        self.asked = asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self)
                time.sleep(seconds)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                # Who asked may have gone meanwhile.
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def stop(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def serve():
    """Start a server; it is stopped in the end."""
    started = []

    def start(answer=VECTOR, *, status=200, headers=(), tls=None, seconds=0.0):
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        started.append(Server(status, body, dict(headers), tls, seconds))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def ask(url, config=PLAIN, *, timeout_seconds=5.0):
    with contextlib.closing(Prometheus(url, config, timeout_seconds)) as prometheus:
        return prometheus.query("up == 1", 1767312000.0)


def failure(url, config=PLAIN, **more):
    """Answer the sentence."""
    with pytest.raises(PrometheusError) as caught:
        ask(url, config, **more)
    text = str(caught.value)
    assert "\n" not in text
    return text


def refusal(tmp_path, text):
    (tmp_path / "http.yml").write_text(text)
    with pytest.raises(AddressError) as caught:
        read_http_config(tmp_path / "http.yml")
    return str(caught.value)


# --- what is asked, and the answer ---


def test_an_expression_is_asked_for_one_moment_and_its_series_are_answered(serve):
    server = serve()
    assert ask(f"http://127.0.0.1:{server.port}") == (Sample({"namespace": "team-a", "pod": "train-0"}, 10485760000.0),)
    (asked,) = server.asked
    assert urlsplit(asked.path).path == "/api/v1/query"
    assert parse_qs(urlsplit(asked.path).query) == {"query": ["up == 1"], "time": ["1767312000.000"], "timeout": ["5s"]}
    assert "Authorization" not in asked.headers


@pytest.mark.parametrize(("given", "path"), [("/prom", "/prom/api/v1/query"), ("/prom/", "/prom/api/v1/query"), ("/", "/api/v1/query")])
def test_a_path_prefix_is_kept(serve, given, path):
    server = serve()
    ask(f"http://127.0.0.1:{server.port}{given}")
    assert urlsplit(server.asked[0].path).path == path


def test_an_address_without_a_scheme_is_http(serve):
    server = serve()
    assert ask(f"127.0.0.1:{server.port}")


@pytest.mark.parametrize("url", ["ftp://prometheus", "http://", "http://prometheus/?a=b", "http://prometheus/graph#x", "http://[::1"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(AddressError, match=r"--prometheus-url: a URL like http://prometheus:9090 is expected"):
        Prometheus(url, PLAIN, 5.0)


# --- who asks ---


def test_user_and_password_may_stand_in_the_url_and_are_said_to_no_one_else(serve):
    server = serve(b"no", status=500)
    text = failure(f"http://maria:p%40ss@127.0.0.1:{server.port}/prom")
    assert base64.b64decode(server.asked[0].headers["Authorization"].removeprefix("Basic ")) == b"maria:p@ss"
    assert "maria" not in text
    assert f"http://127.0.0.1:{server.port}/prom" in text


def test_basic_auth_of_a_file(serve, tmp_path):
    (tmp_path / "password").write_text("s3cret\n")
    (tmp_path / "http.yml").write_text("basic_auth: {username: maria, password_file: password}")
    server = serve()
    ask(f"http://127.0.0.1:{server.port}", read_http_config(tmp_path / "http.yml"))
    assert base64.b64decode(server.asked[0].headers["Authorization"].removeprefix("Basic ")) == b"maria:s3cret"


@pytest.mark.parametrize(
    ("said", "header"),
    [
        ("authorization: {credentials_file: token}", "Bearer eyJhbGci"),
        ("authorization: {type: Token, credentials: abc}", "Token abc"),
    ],
)
def test_a_token_of_a_file(serve, tmp_path, said, header):
    (tmp_path / "token").write_text("eyJhbGci\n")
    (tmp_path / "http.yml").write_text(said)
    server = serve()
    ask(f"http://127.0.0.1:{server.port}", read_http_config(tmp_path / "http.yml"))
    assert server.asked[0].headers["Authorization"] == header


def test_a_token_does_not_follow_to_another_host(serve, tmp_path):
    (tmp_path / "http.yml").write_text("authorization: {credentials: abc}")
    target = serve()
    server = serve(b"", status=302, headers={"Location": f"http://localhost:{target.port}/api/v1/query"})
    ask(f"http://127.0.0.1:{server.port}", read_http_config(tmp_path / "http.yml"))
    assert server.asked[0].headers["Authorization"] == "Bearer abc"
    assert "Authorization" not in target.asked[0].headers


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture
def tls(authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("prometheus.example", "127.0.0.1").configure_cert(context)
    return context


def test_a_ca_file_makes_a_certificate_good(serve, tmp_path, authority, tls):
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    (tmp_path / "http.yml").write_text("tls_config: {ca_file: ca.pem}")
    server = serve(tls=tls)
    assert ask(f"https://127.0.0.1:{server.port}", read_http_config(tmp_path / "http.yml"))
    text = failure(f"https://127.0.0.1:{server.port}")
    assert "TLS failed" in text
    assert "--http-config-file takes a tls_config with ca_file" in text


def test_a_server_name_is_what_the_certificate_has_to_say(serve, tmp_path, authority, tls):
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    server = serve(tls=tls)
    (tmp_path / "http.yml").write_text("tls_config: {ca_file: ca.pem, server_name: prometheus.example}")
    assert ask(f"https://127.0.0.1:{server.port}", read_http_config(tmp_path / "http.yml"))
    (tmp_path / "http.yml").write_text("tls_config: {ca_file: ca.pem, server_name: other.example}")
    assert "TLS failed" in failure(f"https://127.0.0.1:{server.port}", read_http_config(tmp_path / "http.yml"))


def test_verification_can_be_left_out(serve, tmp_path, tls):
    (tmp_path / "http.yml").write_text("tls_config: {insecure_skip_verify: true}")
    server = serve(tls=tls)
    assert ask(f"https://127.0.0.1:{server.port}", read_http_config(tmp_path / "http.yml"))


def test_a_client_certificate_is_shown(serve, tmp_path, authority, tls):
    authority.configure_trust(tls)
    tls.verify_mode = ssl.CERT_REQUIRED
    own = authority.issue_cert("maria.example")
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    (tmp_path / "own.pem").write_bytes(b"".join(each.bytes() for each in own.cert_chain_pems))
    (tmp_path / "own.key").write_bytes(own.private_key_pem.bytes())
    (tmp_path / "http.yml").write_text("tls_config: {ca_file: ca.pem, cert_file: own.pem, key_file: own.key}")
    server = serve(tls=tls)
    assert ask(f"https://127.0.0.1:{server.port}", read_http_config(tmp_path / "http.yml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("basic_auth: [", "not YAML"),
        ("- a", "the file: expected a mapping with basic_auth, authorization, tls_config"),
        ("basic_auths: {}", "the file: the key basic_auths is not known here"),
        (
            "basic_auth: {user: maria}",
            "basic_auth: the key user is not known here; expected username, username_file, password, password_file",
        ),
        ("basic_auth: maria", "basic_auth: expected a mapping"),
        ("{basic_auth: {username: a}, authorization: {credentials: b}}", "one of them, not both"),
        ("authorization: {credentials_file: nowhere}", "No such file or directory ("),
        ('authorization: {credentials: "a\\nX-Injected: b"}', "credentials of one line"),
        ("tls_config: {ca_file: nowhere.pem}", "No such file or directory"),
        ("tls_config: {ca_file: http.yml}", "http.yml: "),
        ("tls_config: {cert_file: own.pem}", "cert_file and key_file go together"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_with_the_key(tmp_path, text, said):
    sentence = refusal(tmp_path, text)
    assert sentence.startswith(f"--http-config-file {tmp_path / 'http.yml'}: ")
    assert said in sentence
    assert "\n" not in sentence


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(AddressError, match=r"--http-config-file .*nowhere.yml: No such file or directory$"):
        read_http_config(tmp_path / "nowhere.yml")


def test_an_empty_file_asks_for_nothing(tmp_path):
    (tmp_path / "http.yml").write_text("")
    assert read_http_config(tmp_path / "http.yml") == PLAIN


# --- what goes wrong ---


def test_no_one_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = failure(f"http://127.0.0.1:{port}")
    assert text == f"cannot ask http://127.0.0.1:{port}: Connection refused; is --prometheus-url right?"


def test_a_name_that_is_none():
    text = failure("http://no-such-host.invalid:9090")
    assert text == "cannot ask http://no-such-host.invalid:9090: its name is not known here; is --prometheus-url right?"


def test_what_speaks_no_http_is_no_prometheus():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def speak():
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(b"220 mail ready\r\n")
            connection.close()

        thread = threading.Thread(target=speak)
        thread.start()
        text = failure(f"http://127.0.0.1:{port}")
        thread.join()
    assert text.startswith(f"cannot ask http://127.0.0.1:{port}: ")


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"<html>Grafana</html>", 200),
        (b"404 page not found", 404),
        (b"[" * 100_000, 200),
        (["a"], 200),
        ({"status": "ok"}, 200),
        (b"", 502),
    ],
)
def test_another_server_is_no_prometheus(serve, answer, status):
    server = serve(answer, status=status)
    text = failure(f"http://127.0.0.1:{server.port}")
    assert f"does not answer as a Prometheus does (HTTP {status})" in text
    assert "path prefix" in text


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"resultType": "matrix", "result": []},
        {"resultType": "vector", "result": [{"metric": {}}]},
        {"resultType": "vector", "result": [{"metric": {}, "value": [0, "many"]}]},
        {"resultType": "vector", "result": [{"metric": 3, "value": [0, "1"]}]},
    ],
)
def test_an_answer_of_another_form_is_no_prometheus(serve, data):
    server = serve({"status": "success", "data": data})
    assert "is it a Prometheus?" in failure(f"http://127.0.0.1:{server.port}")


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_wants_to_know_who_asks(serve, status):
    server = serve(b"Unauthorized", status=status)
    text = failure(f"http://127.0.0.1:{server.port}")
    assert f"refuses with HTTP {status}: --http-config-file takes what it wants" in text


@pytest.mark.parametrize(
    ("status", "kind", "error", "said"),
    [
        (503, "timeout", "query timed out in expression evaluation", "gave up on a query: ask for less at once"),
        (
            422,
            "execution",
            "query processing would load too many samples into memory in query execution",
            "ask for less at once (--namespace",
        ),
        (400, "bad_data", '1:5: parse error: unexpected "="', "is --selector a list of label matchers? It says: 1:5: parse error"),
        (422, "execution", "found duplicate series", "failed on a query: found duplicate series"),
        (500, "internal", "head:\ncorrupt \x1b[31m", "failed on a query: head: corrupt \\x1b[31m"),
    ],
)
def test_a_query_that_fails_is_said_with_what_to_do(serve, status, kind, error, said):
    server = serve({"status": "error", "errorType": kind, "error": error}, status=status)
    assert said in failure(f"http://127.0.0.1:{server.port}")


def test_an_answer_in_part_is_none(serve):
    server = serve(VECTOR | {"warnings": ["No StoreAPIs matched for this query"]})
    text = failure(f"http://127.0.0.1:{server.port}")
    assert "may have answered in part only" in text
    assert text.endswith("No StoreAPIs matched for this query")


def test_what_prometheus_only_remarks_is_no_reason_to_refuse(serve):
    server = serve(VECTOR | {"infos": ["PromQL info: metric might not be a counter"], "warnings": []})
    assert ask(f"http://127.0.0.1:{server.port}")


def test_an_answer_that_takes_too_long(serve):
    server = serve(seconds=0.6)
    text = failure(f"http://127.0.0.1:{server.port}", timeout_seconds=0.2)
    assert "did not answer within 0.2 s: ask for less at once" in text
    assert "wait longer (--timeout)" in text


def test_a_server_that_redirects_without_end(serve):
    server = serve(b"", status=302, headers={"Location": "/again"})
    assert "it redirects without end" in failure(f"http://127.0.0.1:{server.port}")
