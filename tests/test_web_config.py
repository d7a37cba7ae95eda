import logging
import ssl
import subprocess
import warnings
from pathlib import Path

import pytest
import trustme
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.web_config import RateLimit, WebConfig, WebConfigError, WebConfigFile, parse_web_config

HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"


@pytest.fixture(scope="session")
def pems():
    """Files by name: an authority, a certificate of it and the key, another key, an encrypted key."""
    authority = trustme.CA()
    leaf, other = authority.issue_cert("localhost"), authority.issue_cert("localhost", key_type=trustme.KeyType.RSA)
    encrypted = subprocess.run(
        ["openssl", "pkey", "-aes256", "-passout", "pass:locked"], input=leaf.private_key_pem.bytes(), capture_output=True, check=True
    ).stdout
    return {
        "server.crt": b"".join(pem.bytes() for pem in leaf.cert_chain_pems),
        "server.key": leaf.private_key_pem.bytes(),
        "rsa.crt": b"".join(pem.bytes() for pem in other.cert_chain_pems),
        "rsa.key": other.private_key_pem.bytes(),
        "locked.key": encrypted,
        "clients.crt": authority.cert_pem.bytes(),
        "empty": b"",
        "garbage.crt": b"-----BEGIN CERTIFICATE-----\nbm90IGEgY2VydGlmaWNhdGU=\n-----END CERTIFICATE-----\n",
    }


@pytest.fixture
def parse(pems):
    def read(path):
        if path.name not in pems:
            raise FileNotFoundError(2, "No such file or directory")
        return pems[path.name]

    return lambda text: parse_web_config(text, Path("/etc/web"), read)


def tls(text=""):
    return "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n" + text


# --- what is understood ---


@pytest.mark.parametrize(
    "text",
    ["", "# nothing\n", "{}", "tls_server_config:\nbasic_auth_users:\n", "http_server_config: {http2: false}", "rate_limit: {interval: 0}"],
)
def test_nothing_asked_is_plain_http_for_everyone(parse, text):
    assert parse(text) == WebConfig()


def test_users_headers_and_rate_are_taken_over(parse):
    text = f"""
basic_auth_users:
  alice: {HASH}
  "123": {HASH.replace("$2y$10", "$2a$04")}
http_server_config:
  http2: true
  headers:
    X-Frame-Options: sameorigin
    X-XSS-Protection: "0"
    Content-Security-Policy: default-src 'none'
    Strict-Transport-Security: ""
rate_limit:
  interval: 1m0.5s
  burst: 20
"""
    config = parse(text)
    assert config.users == {"alice": HASH.encode(), "123": HASH.replace("$2y$10", "$2a$04").encode()}
    assert config.headers == (
        ("X-Frame-Options", "sameorigin"),
        ("X-XSS-Protection", "0"),
        ("Content-Security-Policy", "default-src 'none'"),
    )
    assert config.rate_limit == RateLimit(interval_seconds=60.5, burst=20)


def test_tls_is_1_2_and_1_3_unless_told_otherwise(parse):
    context = parse(tls()).tls
    assert (context.minimum_version, context.maximum_version) == (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    assert context.verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize(
    ("policy", "verify_mode", "needed"),
    [
        ("", ssl.CERT_NONE, False),
        ("  client_auth_type: NoClientCert\n", ssl.CERT_NONE, False),
        ("  client_auth_type: RequestClientCert\n", ssl.CERT_NONE, False),
        ("  client_auth_type: RequestClientCert\n  client_ca_file: clients.crt\n", ssl.CERT_NONE, False),
        ("  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: clients.crt\n", ssl.CERT_OPTIONAL, False),
        ("  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: clients.crt\n", ssl.CERT_OPTIONAL, True),
    ],
)
def test_certificates_of_clients_are_verified_and_needed_as_the_policy_says(parse, policy, verify_mode, needed):
    config = parse(tls(policy))
    assert (config.tls.verify_mode, config.needs_client_certificate) == (verify_mode, needed)


def test_certificates_can_stand_in_the_file_itself(parse, pems):
    document = {
        "tls_server_config": {
            "cert": pems["server.crt"].decode(),
            "key": pems["server.key"].decode(),
            "client_ca": pems["clients.crt"].decode(),
            "client_auth_type": "RequireAndVerifyClientCert",
            "client_allowed_sans": ["prometheus"],
        }
    }
    config = parse(yaml.safe_dump(document))
    assert config.client_allowed_sans == {"prometheus"}
    assert len(config.tls.get_ca_certs()) == 1


# --- what TLS does with it ---


def negotiate(server, pems, **limits):
    """Shake hands in memory; answer version and cipher suite."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cadata=pems["clients.crt"].decode())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        client.minimum_version = limits.get("lowest", ssl.TLSVersion.TLSv1_2)
        client.maximum_version = limits.get("highest", ssl.TLSVersion.TLSv1_3)
    client.set_ciphers(limits.get("ciphers", "ALL:@SECLEVEL=0"))
    if "curve" in limits:
        client.set_ecdh_curve(limits["curve"])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(10):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[0].version(), ends[0].cipher()[0]


def test_only_the_versions_between_lowest_and_highest_are_spoken(parse, pems):
    v10, v11, v12, v13 = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
    only_12 = parse(tls("  max_version: TLS12\n")).tls
    assert negotiate(only_12, pems)[0] == "TLSv1.2"
    with pytest.raises(ssl.SSLError):
        negotiate(only_12, pems, lowest=v13)
    only_13 = parse(tls("  min_version: TLS13\n")).tls
    assert negotiate(only_13, pems)[0] == "TLSv1.3"
    with pytest.raises(ssl.SSLError):
        negotiate(only_13, pems, highest=v12)
    old = parse(tls("  min_version: TLS10\n  max_version: TLS11\n")).tls
    assert negotiate(old, pems, lowest=v10, highest=v10)[0] == "TLSv1"
    assert negotiate(old, pems, lowest=v10, highest=v13)[0] == "TLSv1.1"
    from_11 = parse(tls("  min_version: TLS11\n")).tls
    assert negotiate(from_11, pems)[0] == "TLSv1.3"
    with pytest.raises(ssl.SSLError):
        negotiate(from_11, pems, lowest=v10, highest=v10)
    assert negotiate(from_11, pems, lowest=v11, highest=v11)[0] == "TLSv1.1"


def test_only_the_listed_cipher_suites_are_used_up_to_tls_1_2(parse, pems):
    listed = "  cipher_suites: [TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]\n"
    context = parse(tls(listed)).tls
    v12 = {"highest": ssl.TLSVersion.TLSv1_2}
    assert negotiate(context, pems, **v12) == ("TLSv1.2", "ECDHE-ECDSA-CHACHA20-POLY1305")
    with pytest.raises(ssl.SSLError):
        negotiate(context, pems, ciphers="ECDHE-ECDSA-AES256-GCM-SHA384", **v12)
    assert negotiate(context, pems)[0] == "TLSv1.3"
    theirs = parse(tls(listed + "  prefer_server_cipher_suites: false\n")).tls
    assert (
        negotiate(theirs, pems, ciphers="ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-CHACHA20-POLY1305", **v12)[1]
        == "ECDHE-ECDSA-AES128-GCM-SHA256"
    )


def test_cipher_suites_of_tls_1_3_alone_mean_tls_1_3_alone(parse, pems):
    context = parse(tls("  cipher_suites: [TLS_AES_128_GCM_SHA256]\n")).tls
    assert negotiate(context, pems)[0] == "TLSv1.3"
    with pytest.raises(ssl.SSLError):
        negotiate(context, pems, highest=ssl.TLSVersion.TLSv1_2)


@pytest.mark.parametrize(
    ("name", "curve"), [("CurveP256", "prime256v1"), ("CurveP384", "secp384r1"), ("CurveP521", "secp521r1"), ("X25519", "X25519")]
)
def test_the_curve_is_the_preferred_one(parse, pems, name, curve):
    context = parse(tls(f"  curve_preferences: [{name}]\n")).tls
    assert negotiate(context, pems, curve=curve)
    with pytest.raises(ssl.SSLError):
        negotiate(context, pems, curve="secp384r1" if curve != "secp384r1" else "X25519")


# --- what is refused, and in which words ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "the file: keys with values were expected, not one list"),
        ("a: [", "line 1: not YAML: expected the node content, but found '<stream end>'"),
        (
            "tls_config: {}",
            "the file: 'tls_config' is not known here; known are tls_server_config, http_server_config, basic_auth_users, rate_limit",
        ),
        ("rate_limit: {}\nrate_limit: {}", "rate_limit: stands twice"),
        ("basic_auth_users: [alice]", "basic_auth_users: keys with values were expected, not one list"),
        ("basic_auth_users: {1: x}", "basic_auth_users: the key 1 is not text; put it in quotes"),
        (
            "basic_auth_users: {alice: secret}",
            "basic_auth_users.alice: not a bcrypt hash ($2a$, $2b$ or $2y$); `htpasswd -nBC 10 alice` makes one",
        ),
        (
            "basic_auth_users: {alice: null}",
            "basic_auth_users.alice: not a bcrypt hash ($2a$, $2b$ or $2y$); `htpasswd -nBC 10 alice` makes one",
        ),
        (f"basic_auth_users: {{alice: {HASH.replace('$10$', '$31$')}}}", "basic_auth_users.alice: cost 31 is not from 4 to 16"),
        (f"basic_auth_users: {{'a:b': {HASH}}}", "basic_auth_users: 'a:b' cannot log in: a user has no colon and no control characters"),
        ("http_server_config: {http2: 'yes'}", "http_server_config.http2: 'yes' is neither true nor false"),
        (
            "http_server_config: {headers: {Server: x}}",
            (
                "http_server_config.headers: 'Server' is not known here; known are Content-Security-Policy, "
                "Strict-Transport-Security, X-Content-Type-Options, X-Frame-Options, X-XSS-Protection"
            ),
        ),
        (
            "http_server_config: {headers: {X-Frame-Options: allow}}",
            "http_server_config.headers.X-Frame-Options: 'allow' is none of deny, sameorigin",
        ),
        (
            "http_server_config: {headers: {X-XSS-Protection: 0}}",
            "http_server_config.headers.X-XSS-Protection: not a line of ASCII text (numbers and switches need quotes)",
        ),
        (
            'http_server_config: {headers: {X-XSS-Protection: "0\\r\\nSet-Cookie: a"}}',
            "http_server_config.headers.X-XSS-Protection: not a line of ASCII text (numbers and switches need quotes)",
        ),
        ("rate_limit: {interval: 1, burst: 2}", "rate_limit.interval: 1 is not a duration like 1s or 250ms"),
        ("rate_limit: {interval: 1s x, burst: 2}", "rate_limit.interval: '1s x' is not a duration like 1s or 250ms"),
        ("rate_limit: {interval: 1s}", "rate_limit.burst: 0 is not a number from 1 up; without any, no request passes"),
        ("tls_server_config: {min_version: TLS12}", "tls_server_config: cert_file and key_file are missing"),
        ("tls_server_config: {cert_file: server.crt}", "tls_server_config.key_file: is missing"),
        ("tls_server_config: {key_file: server.key}", "tls_server_config.cert_file: is missing"),
        (
            "tls_server_config: {cert_file: none.crt, key_file: server.key}",
            "tls_server_config.cert_file: /etc/web/none.crt: No such file or directory",
        ),
        ("tls_server_config: {cert_file: [a], key_file: server.key}", "tls_server_config.cert_file: ['a'] is not text"),
        ("tls_server_config: {cert_file: empty, key_file: server.key}", "tls_server_config.cert_file: holds no CERTIFICATE in PEM"),
        ("tls_server_config: {cert_file: server.crt, key_file: server.crt}", "tls_server_config.key_file: holds no PRIVATE KEY in PEM"),
        (
            "tls_server_config: {cert_file: server.crt, cert: x, key_file: server.key}",
            "tls_server_config: cert and cert_file stand both; one is enough",
        ),
        (
            "tls_server_config: {cert_file: rsa.crt, key_file: server.key}",
            "tls_server_config.cert_file and key_file: the certificate and the key do not belong together",
        ),
        (
            "tls_server_config: {cert_file: server.crt, key_file: locked.key}",
            "tls_server_config.key_file: the key is encrypted, and there is no one to ask for its password",
        ),
        (tls("  min_version: TLS9\n"), "tls_server_config.min_version: 'TLS9' is none of TLS10, TLS11, TLS12, TLS13"),
        (
            tls("  min_version: TLS13\n  max_version: TLS12\n"),
            "tls_server_config: min_version, max_version and cipher_suites leave no version of TLS",
        ),
        (
            tls("  max_version: TLS12\n  cipher_suites: [TLS_AES_128_GCM_SHA256]\n"),
            "tls_server_config: min_version, max_version and cipher_suites leave no version of TLS",
        ),
        (
            tls("  cipher_suites: TLS_AES_128_GCM_SHA256\n"),
            "tls_server_config.cipher_suites: a list of texts was expected, not 'TLS_AES_128_GCM_SHA256'",
        ),
        (tls("  prefer_server_cipher_suites: 1\n"), "tls_server_config.prefer_server_cipher_suites: 1 is neither true nor false"),
        (
            tls("  curve_preferences: [P256]\n"),
            "tls_server_config.curve_preferences: 'P256' is none of CurveP256, CurveP384, CurveP521, X25519",
        ),
        (tls("  curve_preferences: [X25519, CurveP256]\n"), "tls_server_config.curve_preferences: Python's TLS takes one curve at most"),
        (
            tls("  client_auth_type: Always\n"),
            (
                "tls_server_config.client_auth_type: 'Always' is none of NoClientCert, RequestClientCert, "
                "RequireAnyClientCert, RequireClientCert, VerifyClientCertIfGiven, RequireAndVerifyClientCert"
            ),
        ),
        (
            tls("  client_auth_type: RequireAnyClientCert\n"),
            (
                "tls_server_config.client_auth_type: RequireAnyClientCert would take any certificate, which "
                "Python's TLS cannot; use RequireAndVerifyClientCert with client_ca_file"
            ),
        ),
        (
            tls("  client_auth_type: RequireAndVerifyClientCert\n"),
            "tls_server_config.client_ca_file: is missing; RequireAndVerifyClientCert needs to know who signs certificates of clients",
        ),
        (tls("  client_ca_file: clients.crt\n"), "tls_server_config.client_ca_file: is of no use with client_auth_type NoClientCert"),
        (tls("  client_allowed_sans: [a]\n"), "tls_server_config.client_allowed_sans: needs client_auth_type RequireAndVerifyClientCert"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_key(parse, text, message):
    with pytest.raises(WebConfigError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_an_unknown_cipher_suite_is_named_with_those_that_are_known(parse):
    with pytest.raises(
        WebConfigError, match=r"^tls_server_config.cipher_suites: 'TLS_RSA_WITH_RC4_128_SHA' is not known here; known are TLS_ECDHE_"
    ):
        parse(tls("  cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]\n"))


@pytest.mark.parametrize("name", ["empty", "server.key", "garbage.crt"])
def test_authorities_that_are_none_are_named(parse, name):
    with pytest.raises(WebConfigError, match=r"^tls_server_config.client_ca_file: holds no certificates in PEM "):
        parse(tls(f"  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: {name}\n"))


def test_a_broken_certificate_is_named(parse):
    with pytest.raises(WebConfigError, match=r"^tls_server_config.cert_file and key_file: not usable "):
        parse("tls_server_config: {cert_file: garbage.crt, key_file: server.key}")


def test_a_wrong_hash_is_not_repeated_in_the_error(parse):
    with pytest.raises(WebConfigError) as caught:
        parse("basic_auth_users: {alice: in-clear-text}")
    assert "in-clear-text" not in str(caught.value)


KEYS = [
    "tls_server_config",
    "http_server_config",
    "basic_auth_users",
    "rate_limit",
    "http2",
    "headers",
    "interval",
    "burst",
    "cert",
    "key",
    "client_ca",
    "client_auth_type",
    "client_allowed_sans",
    "min_version",
    "cipher_suites",
    "curve_preferences",
    "alice",
]
DOCUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.sampled_from([HASH, "TLS12", "RequireAndVerifyClientCert"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.integers() | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(DOCUMENTS.map(yaml.safe_dump) | st.text())
@example("? [a]\n: b")
@example("a: &a [*a]")
@example("? {a: b}\n: c")
@example("<<: [1]")
@example("!!python/object/apply:os.system [id]")
@example("x: !!binary /w==\n")
@example("\x00")
@example("rate_limit: {interval: .inf}")
@example("rate_limit: {interval: " + "9" * 400 + "h, burst: 1}")
@example("basic_auth_users: 2026-13-45")
@example("[" * 2000)
def test_any_text_is_a_web_configuration_or_an_error_in_one_line(text):
    def read(path):
        raise FileNotFoundError(2, "No such file or directory")

    message = ""
    try:
        parse_web_config(text, Path("/etc/web"), read)
    except WebConfigError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1


# --- the file, and its changes ---


@pytest.fixture
def folder(tmp_path, pems):
    for name, content in pems.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def write(path, text):
    path.write_text(text)
    return path


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(WebConfigError) as caught:
        WebConfigFile(tmp_path / "web.yaml")
    assert str(caught.value) == f"web configuration {tmp_path}/web.yaml: No such file or directory"


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "web.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(WebConfigError) as caught:
        WebConfigFile(tmp_path / "web.yaml")
    assert str(caught.value) == f"web configuration {tmp_path}/web.yaml: not UTF-8 text"


def test_nothing_new_is_read_while_nothing_changes(folder):
    file = WebConfigFile(write(folder / "web.yaml", tls()))
    before = file.config
    assert not file.reload()
    (folder / "web.yaml").touch()
    assert not file.reload()
    assert file.config is before


def test_a_change_of_any_file_is_taken_over(folder, pems):
    file = WebConfigFile(write(folder / "web.yaml", tls("  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: clients.crt\n")))
    (folder / "clients.crt").write_bytes(pems["clients.crt"] + trustme.CA().cert_pem.bytes())
    assert file.reload()
    assert len(file.config.tls.get_ca_certs()) == 2
    write(folder / "web.yaml", tls("  min_version: TLS13\n"))
    assert file.reload()
    assert file.config.tls.minimum_version is ssl.TLSVersion.TLSv1_3


def test_a_change_through_a_symbolic_link_is_seen_as_kubernetes_makes_it(folder, pems):
    for version in ("..1", "..2"):
        (folder / version).mkdir()
        (folder / version / "web.yaml").write_text(tls(f"  min_version: TLS1{version[-1]}\n"))
    (folder / "..data").symlink_to("..2")
    (folder / "web.yaml").symlink_to("..data/web.yaml")
    file = WebConfigFile(folder / "web.yaml")
    assert file.config.tls.minimum_version is ssl.TLSVersion.TLSv1_2
    (folder / "..next").symlink_to("..1")
    (folder / "..next").rename(folder / "..data")
    assert file.reload()
    assert file.config.tls.minimum_version is ssl.TLSVersion.TLSv1_1


def test_a_certificate_and_key_that_change_one_after_the_other_are_taken_over_when_both_fit(folder, pems, caplog):
    caplog.set_level(logging.INFO)
    path = write(folder / "web.yaml", tls())
    file = WebConfigFile(path)
    before = file.config
    (folder / "server.crt").write_bytes(pems["rsa.crt"])
    assert not file.reload()
    assert not file.reload()
    assert file.config is before
    (folder / "server.key").write_bytes(pems["rsa.key"])
    assert file.reload()
    reason = f"web configuration {path}: tls_server_config.cert_file and key_file: the certificate and the key do not belong together"
    assert caplog.messages == [f"web_config={path} state=broken reason={reason!r} kept=previous", f"web_config={path} state=reloaded"]


def test_files_that_go_away_and_come_back_are_nothing_new(folder, pems, caplog):
    path = write(folder / "web.yaml", tls())
    file = WebConfigFile(path)
    (folder / "server.key").unlink()
    assert not file.reload()
    assert not file.reload()
    path.unlink()
    assert not file.reload()
    assert len(caplog.messages) == 2
    write(path, tls())
    (folder / "server.key").write_bytes(pems["server.key"])
    assert file.reload()


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (tls(), "", "TLS"),
        (tls("  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: clients.crt\n"), tls(), "client certificates"),
        (f"basic_auth_users: {{alice: {HASH}}}\n", "", "passwords"),
        (f"basic_auth_users: {{alice: {HASH}}}\n", "basic_auth_users:\n", "passwords"),
    ],
)
def test_a_change_that_would_let_everyone_in_takes_a_restart(folder, caplog, before, after, what):
    path = write(folder / "web.yaml", before)
    file = WebConfigFile(path)
    write(path, after)
    assert not file.reload()
    assert f"it no longer asks for {what}; that takes a restart" in caplog.text


def test_a_key_leaves_no_open_file_behind(folder):
    path = write(folder / "web.yaml", tls())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        WebConfigFile(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
