"""The client of the commands, against a real HTTP server: whatever stands in the way is one sentence that says what to do."""

import json
import socket
from contextlib import ExitStack

import bcrypt
import pytest
import trustme

from exporter.commands.client import ClientError, ExporterClient, NoReportError, printable
from exporter.health import Health, SourceHealth
from exporter.node_json import About, build_node, render_json
from exporter.report import Report
from exporter.server import Response, Server

LOOPBACK = "127.0.0.1"
ABOUT = About(node="worker-1", simulated=False, sample_interval_seconds=5.0, utilization_window_seconds=15.0, compute_window_seconds=60.0)
NODE = build_node(ABOUT, Health(), Report(time_seconds=0.0, monotonic_seconds=0.0))


def answer(value, status=200):
    return lambda _: Response(status, "application/json", render_json(value))


@pytest.fixture
def serve():
    with ExitStack() as stack:

        def start(routes, web_config=None):
            server = Server(address=LOOPBACK, port=0, routes=routes, web_config=web_config)
            server.start()
            stack.callback(server.close)
            return f"{LOOPBACK}:{server.port}"

        yield start


def refusal(ask):
    with pytest.raises(ClientError) as caught:
        ask()
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


def test_it_answers_the_json_of_the_node(serve):
    client = ExporterClient(serve({"/api/v1/node": answer(NODE)}))
    assert client.node() == NODE
    assert client.node() == NODE, "a second time over the same connection"


@pytest.mark.parametrize("form", ["http://{}", "{}", "http://{}/", "http://{}/metrics", " http://{} "])
def test_a_url_may_be_written_as_people_write_it(serve, form):
    assert ExporterClient(form.format(serve({"/api/v1/node": answer(NODE)}))).node() == NODE


@pytest.mark.parametrize(
    "url", ["", "ftp://node-1", "http://", "http://a b", "http://node-1:99999", "http://node-1?x=1", "http://u:secret@"]
)
def test_what_is_no_url_is_said_and_no_password_is_repeated(url):
    text = refusal(lambda: ExporterClient(url))
    assert "is no URL like http://localhost:9844" in text
    assert "secret" not in text


def test_a_port_on_which_nothing_listens_is_said():
    with socket.socket() as held:
        held.bind((LOOPBACK, 0))
        url = f"http://{LOOPBACK}:{held.getsockname()[1]}"
        assert refusal(ExporterClient(url).node) == (
            f"no connection to {url}: start an exporter there, forward its port, or say where one is with --url"
        )


def test_a_host_that_has_no_address_is_said():
    assert "no address is known for the host of http://nowhere.invalid" in refusal(ExporterClient("http://nowhere.invalid").node)


def test_an_exporter_that_does_not_answer_in_time_is_said():
    with socket.create_server((LOOPBACK, 0)) as silent:
        client = ExporterClient(f"http://{LOOPBACK}:{silent.getsockname()[1]}", timeout_seconds=0.2)
        assert "did not answer in time" in refusal(client.node)


@pytest.mark.parametrize(
    "routes",
    [
        {},
        {"/api/v1/node": lambda _: Response(200, "text/html", b"<html>")},
        {"/api/v1/node": answer({"status": "success"})},
        {"/api/v1/node": lambda _: Response(200, "application/json", b"[1]")},
        {"/api/v1/node": lambda _: Response(302, "text/plain", b"", (("Location", "http://192.0.2.1/"),))},
    ],
    ids=["nothing there", "a page", "another JSON", "a list", "a redirect"],
)
def test_what_is_no_exporter_is_said(serve, routes):
    assert "is no fgpu-exporter" in refusal(ExporterClient(serve(routes)).node)


def test_an_exporter_of_another_api_version_is_said(serve):
    client = ExporterClient(serve({"/api/v1/node": answer({**NODE, "api_version": "v2"})}))
    assert "answers in version v2 and this program reads v1" in refusal(client.node)


def test_an_exporter_that_cannot_explain_yet_is_said(serve):
    client = ExporterClient(serve({"/api/v1/node": answer({**NODE, "version": "0.0.9"})}))
    assert "is of version 0.0.9, which cannot explain" in refusal(lambda: client.explain(pod="team-a/train"))


def test_without_a_report_the_sources_that_are_down_are_said():
    health = Health(sources=(SourceHealth(source="nvml", up=False, reason="the driver is not loaded\x1b[2J"),))
    with ExitStack() as stack:
        server = Server(address=LOOPBACK, port=0, routes={"/api/v1/node": answer(build_node(ABOUT, health, None))})
        server.start()
        stack.callback(server.close)
        with pytest.raises(NoReportError) as caught:
            ExporterClient(f"{LOOPBACK}:{server.port}").node()
    assert "(nvml: the driver is not loaded\\x1b[2J)" in str(caught.value)
    assert caught.value.node["node"] == "worker-1"


def test_an_explanation_is_asked_for_by_name_and_a_hostile_one_stays_a_name(serve):
    asked = []

    def explain(request):
        asked.append(request.query)
        return Response(404, "application/json", json.dumps({"error": "no pod of that name\n\x1b[31m"}).encode())

    client = ExporterClient(serve({"/api/v1/explain": explain}))
    assert refusal(lambda: client.explain(pod="a/b&gpu=c#?\n")) == "no pod of that name\\n\\x1b[31m"
    assert asked == ["pod=a%2Fb%26gpu%3Dc%23%3F%0A"]


def test_a_password_is_sent_and_a_wrong_one_is_said(serve, tmp_path):
    config = tmp_path / "web.yaml"
    config.write_text(f"basic_auth_users:\n  ann: {bcrypt.hashpw('s@crét'.encode(), bcrypt.gensalt(4)).decode()}\n")
    url = serve({"/api/v1/node": answer(NODE)}, config)
    assert ExporterClient(url, user="ann", password="s@crét").node() == NODE  # noqa: S106 - of this test
    assert ExporterClient(f"http://ann:s%40cr%C3%A9t@{url}").node() == NODE
    for client in (ExporterClient(url), ExporterClient(f"http://ann:wrong@{url}")):
        text = refusal(client.node)
        assert "wants a user and password (--user, --password-file)" in text
        assert "wrong" not in text


def test_tls_is_verified_with_the_authority_that_is_given(serve, tmp_path):
    authority = trustme.CA()
    authority.issue_cert(LOOPBACK).private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    config = tmp_path / "web.yaml"
    config.write_text("tls_server_config:\n  cert_file: server.pem\n  key_file: server.pem\n")
    url = serve({"/api/v1/node": answer(NODE)}, config)
    assert ExporterClient(f"https://{url}", ca_file=tmp_path / "ca.pem").node() == NODE
    assert "no TLS connection" in refusal(ExporterClient(f"https://{url}").node)
    assert "use http:// or https:// as the exporter does" in refusal(ExporterClient(f"http://{url}").node)


def test_a_client_certificate_is_shown_to_an_exporter_that_wants_one(serve, tmp_path):
    authority = trustme.CA()
    authority.issue_cert(LOOPBACK).private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.issue_cert("ann@example.org").private_key_and_cert_chain_pem.write_to_path(tmp_path / "ann.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    config = tmp_path / "web.yaml"
    config.write_text(
        "tls_server_config:\n  cert_file: server.pem\n  key_file: server.pem\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
    )
    url = f"https://{serve({'/api/v1/node': answer(NODE)}, config)}"
    files = {"ca_file": tmp_path / "ca.pem", "cert_file": tmp_path / "ann.pem", "key_file": tmp_path / "ann.pem"}
    assert ExporterClient(url, **files).node() == NODE
    assert "wants a certificate of the client" in refusal(ExporterClient(url, ca_file=tmp_path / "ca.pem").node)


def test_a_file_that_is_not_there_or_is_no_certificate_is_said(tmp_path):
    assert "is no file that can be read" in refusal(lambda: ExporterClient(ca_file=tmp_path / "missing.pem"))
    (tmp_path / "bad.pem").write_text("no certificate")
    client = ExporterClient("https://localhost:1", ca_file=tmp_path / "bad.pem")
    with pytest.raises(ClientError):
        client.node()


def test_text_from_elsewhere_cannot_move_the_cursor():
    assert printable("a\x1b[2J\r\nb\u202e") == "a\\x1b[2J\\r\\nb\\u202e"
    assert printable("x" * 1001) == "x" * 1000 + "..."
