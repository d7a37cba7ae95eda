"""The web configuration file that Prometheus exporters share: TLS, client certificates, basic authentication, headers, a rate of requests.

`WebConfigFile` is read when it is made and again by `reload()`, by one thread. A file that cannot be used raises `WebConfigError` at first;
later the last good one stays in force until the file is whole again.

Format: https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md. Where this differs is in
docs/web-config.md.
"""

import hashlib
import logging
import os
import re
import ssl
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

_log = logging.getLogger(__name__)

_BCRYPT_HASH = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}")
# Each step doubles the time of a check: 16 takes seconds.
_BCRYPT_COSTS = range(4, 17)

_TLS_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}

# Go's names (https://pkg.go.dev/crypto/tls#CipherSuites) as OpenSSL's.
_CIPHER_SUITES = {
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
# Go has these in the same list; there as here TLS 1.3 uses all of them, whatever the list says.
_TLS13_CIPHER_SUITES = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_DEFAULT_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
# What else a client of TLS 1.0 and 1.1 needs: suites with SHA-1, and OpenSSL 3 takes SHA-1 at level 0 only.
_DEFAULT_OLD_CIPHERS = f"{_DEFAULT_CIPHERS}:ECDHE+AES"
_OLD_SECURITY_LEVEL = ":@SECLEVEL=0"

_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}

# A value of None is any text.
_HEADERS: Mapping[str, tuple[str, ...] | None] = {
    "Content-Security-Policy": None,
    "Strict-Transport-Security": None,
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": None,
}

_DURATION_UNITS_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})(ns|us|µs|ms|s|m|h)")

_Table = dict[str, Any]
_Read = Callable[[Path], bytes]


class WebConfigError(Exception):
    """A web configuration that cannot be used. The text is one line: which file, which key, what stood there, what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """One request in each interval, and bursts of some more."""

    interval_seconds: float
    burst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """What a web configuration asks for. The default asks for nothing: plain HTTP, for everyone."""

    tls: ssl.SSLContext | None = None
    """For connections from now on, or None for plain HTTP. A client without a certificate passes the handshake; see the next field."""
    needs_client_certificate: bool = False
    """Whether a request needs a certificate on its connection. The handshake has verified each one that was given."""
    client_allowed_sans: frozenset[str] | None = None
    """One of these must be among the certificate's subject alternative names, where given."""
    users: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    """bcrypt hashes by user; empty where no password is asked for."""
    headers: tuple[tuple[str, str], ...] = ()
    """Added to every response."""
    rate_limit: RateLimit | None = None


class WebConfigFile:
    """A web configuration and the files it names, read again when their content changes. Belongs to one thread."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises WebConfigError."""
        self._path = path
        self._seen: dict[Path, bytes | None] = {}
        self._problem: str | None = None
        self.config = self._load()
        """What the file says; while it is broken, what it said before."""

    def reload(self) -> bool:
        """Read the file again if it, or a file it names, has changed; answer whether there is a new configuration."""
        if all(_digest(path) == digest for path, digest in self._seen.items()):
            return False
        try:
            config = self._load()
            _refuse_to_open(self.config, config)
        except WebConfigError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.warning("web_config=%s state=broken reason=%r kept=previous", self._path, self._problem)
            return False
        self._problem = None
        self.config = config
        _log.info("web_config=%s state=reloaded", self._path)
        return True

    def _load(self) -> WebConfig:
        seen: dict[Path, bytes | None] = {}

        def read(path: Path) -> bytes:
            seen[path] = None
            content = path.read_bytes()
            seen[path] = hashlib.sha256(content).digest()
            return content

        try:
            return parse_web_config(_read_text(read, self._path), self._path.parent, read)
        except OSError as error:
            raise WebConfigError(f"web configuration {self._path}: {error.strerror}") from error
        except WebConfigError as error:
            raise WebConfigError(f"web configuration {self._path}: {error}") from error
        finally:
            self._seen = seen


def _digest(path: Path) -> bytes | None:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return None


def _read_text(read: _Read, path: Path) -> str:
    try:
        return read(path).decode()
    except UnicodeDecodeError as error:
        raise WebConfigError("not UTF-8 text") from error


def _refuse_to_open(old: WebConfig, new: WebConfig) -> None:
    # A file that is being written looks empty for a moment. Nobody gets in in that moment.
    for name, was, stays in (
        ("TLS", old.tls is not None, new.tls is not None),
        ("client certificates", old.needs_client_certificate, new.needs_client_certificate),
        ("passwords", bool(old.users), bool(new.users)),
    ):
        if was and not stays:
            raise WebConfigError(f"it no longer asks for {name}; that takes a restart")


class _StrictLoader(yaml.SafeLoader):
    """YAML in which no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise WebConfigError(f"{key}: stands twice")
        return super().construct_mapping(node, deep)


def parse_web_config(text: str, folder: Path, read: _Read) -> WebConfig:
    """Answer what a web configuration asks for; `read` answers the content of a file it names. Raises WebConfigError.

    Relative paths start from `folder`.
    """
    try:
        document = yaml.load(text, _StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date like 2026-13-45 is a ValueError, a thousand brackets recurse
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise WebConfigError(f"{where}not YAML: {problem}") from error
    root = _table("the file", document, ("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit"))
    http = _section(root, "http_server_config", ("http2", "headers"))
    _flag(http, "http_server_config", "http2", default=True)
    tls = _parse_tls(_section(root, "tls_server_config", _TLS_KEYS), folder, read)
    return WebConfig(
        tls=tls.context,
        needs_client_certificate=tls.needs_client_certificate,
        client_allowed_sans=tls.client_allowed_sans,
        users=MappingProxyType(dict(_parse_users(root.get("basic_auth_users")))),
        headers=tuple(_parse_headers(http.get("headers"))),
        rate_limit=_parse_rate_limit(_section(root, "rate_limit", ("interval", "burst"))),
    )


# --- TLS ---

_TLS_KEYS = (
    "cert",
    "cert_file",
    "key",
    "key_file",
    "client_ca",
    "client_ca_file",
    "client_auth_type",
    "client_allowed_sans",
    "min_version",
    "max_version",
    "cipher_suites",
    "prefer_server_cipher_suites",
    "curve_preferences",
)
_TLS_ON_KEYS = ("cert", "cert_file", "key", "key_file", "client_ca", "client_ca_file", "client_auth_type")


@dataclass(frozen=True, slots=True)
class _Tls:
    context: ssl.SSLContext | None = None
    needs_client_certificate: bool = False
    client_allowed_sans: frozenset[str] | None = None


def _parse_tls(section: _Table, folder: Path, read: _Read) -> _Tls:
    if not any(section.get(key) for key in _TLS_ON_KEYS):
        if section:
            raise WebConfigError("tls_server_config: cert_file and key_file are missing")
        return _Tls()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    _set_versions_and_ciphers(context, section)
    _set_curve(context, section)
    _load_certificate(context, section, folder, read)
    return _Tls(context, *_set_client_certificates(context, section, folder, read))


def _set_versions_and_ciphers(context: ssl.SSLContext, section: _Table) -> None:
    where = "tls_server_config"
    lowest = _TLS_VERSIONS[_choice(section, where, "min_version", _TLS_VERSIONS, default="TLS12")]
    highest = _TLS_VERSIONS[_choice(section, where, "max_version", _TLS_VERSIONS, default="TLS13")]
    names = _texts(section, where, "cipher_suites")
    for name in names:
        if name not in _CIPHER_SUITES and name not in _TLS13_CIPHER_SUITES:
            raise WebConfigError(f"{where}.cipher_suites: {name!r} is not known here; known are {', '.join(_CIPHER_SUITES)}")
    ciphers = ":".join(_CIPHER_SUITES[name] for name in names if name in _CIPHER_SUITES)
    if names and not ciphers:
        lowest = max(lowest, ssl.TLSVersion.TLSv1_3)
    if lowest > highest:
        raise WebConfigError(f"{where}: min_version, max_version and cipher_suites leave no version of TLS")
    if lowest < ssl.TLSVersion.TLSv1_2:
        ciphers = (ciphers or _DEFAULT_OLD_CIPHERS) + _OLD_SECURITY_LEVEL
    context.set_ciphers(ciphers or _DEFAULT_CIPHERS)
    with warnings.catch_warnings():
        # The operator asked for the old versions; Python warns of each.
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version, context.maximum_version = lowest, highest
    if _flag(section, where, "prefer_server_cipher_suites", default=True):
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE


def _set_curve(context: ssl.SSLContext, section: _Table) -> None:
    names = _texts(section, "tls_server_config", "curve_preferences")
    for name in names:
        if name not in _CURVES:
            raise WebConfigError(f"tls_server_config.curve_preferences: {name!r} is none of {', '.join(_CURVES)}")
    if len(names) > 1:
        raise WebConfigError("tls_server_config.curve_preferences: Python's TLS takes one curve at most")
    if names:
        context.set_ecdh_curve(_CURVES[names[0]])


def _load_certificate(context: ssl.SSLContext, section: _Table, folder: Path, read: _Read) -> None:
    certificate_key, certificate = _pem(section, "cert", folder, read)
    private_key_key, private_key = _pem(section, "key", folder, read)
    for key, pem, kind in ((certificate_key, certificate, b"CERTIFICATE"), (private_key_key, private_key, b"PRIVATE KEY")):
        if pem is None:
            raise WebConfigError(f"tls_server_config.{key}: is missing")
        if kind + b"-----" not in pem:
            raise WebConfigError(f"tls_server_config.{key}: holds no {kind.decode()} in PEM")
    with ExitStack() as stack:
        certificate_path, private_key_path = (stack.enter_context(_as_file(pem or b"")) for pem in (certificate, private_key))

        def refuse_password() -> str:
            raise WebConfigError(f"tls_server_config.{private_key_key}: the key is encrypted, and there is no one to ask for its password")

        try:
            context.load_cert_chain(certificate_path, private_key_path, refuse_password)
        except ssl.SSLError as error:
            do_not_fit = error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
            what = "the certificate and the key do not belong together" if do_not_fit else f"not usable ({error})"
            raise WebConfigError(f"tls_server_config.{certificate_key} and {private_key_key}: {what}") from error


@contextmanager
def _as_file(pem: bytes) -> Iterator[str]:
    # OpenSSL takes certificates and keys of a server as paths only. This one leads to memory.
    with os.fdopen(os.memfd_create("pem"), "wb", buffering=0) as file:
        file.write(pem)
        yield f"/proc/self/fd/{file.fileno()}"


def _set_client_certificates(context: ssl.SSLContext, section: _Table, folder: Path, read: _Read) -> tuple[bool, frozenset[str] | None]:
    where = "tls_server_config"
    policy = _choice(section, where, "client_auth_type", _CLIENT_AUTH_TYPES, default="NoClientCert")
    authorities_key, authorities = _pem(section, "client_ca", folder, read)
    sans = _texts(section, where, "client_allowed_sans")
    verifies = policy in ("VerifyClientCertIfGiven", "RequireAndVerifyClientCert")
    if policy in ("RequireAnyClientCert", "RequireClientCert"):
        raise WebConfigError(
            f"{where}.client_auth_type: {policy} would take any certificate, which Python's TLS cannot; "
            f"use RequireAndVerifyClientCert with client_ca_file"
        )
    if verifies and authorities is None:
        raise WebConfigError(f"{where}.{authorities_key}: is missing; {policy} needs to know who signs certificates of clients")
    if authorities is not None and policy == "NoClientCert":
        raise WebConfigError(f"{where}.{authorities_key}: is of no use with client_auth_type NoClientCert")
    if sans and policy != "RequireAndVerifyClientCert":
        raise WebConfigError(f"{where}.client_allowed_sans: needs client_auth_type RequireAndVerifyClientCert")
    if authorities is not None:
        try:
            context.load_verify_locations(cadata=authorities.decode("ascii", "replace").replace("\ufffd", "?"))
        except (ssl.SSLError, ValueError) as error:
            raise WebConfigError(f"{where}.{authorities_key}: holds no certificates in PEM ({error})") from error
    if verifies:
        # Which path is asked for is only known after the handshake, and those of probes are open: kubelets have no certificate.
        context.verify_mode = ssl.CERT_OPTIONAL
    return policy == "RequireAndVerifyClientCert", frozenset(sans) if sans else None


_CLIENT_AUTH_TYPES = (
    "NoClientCert",
    "RequestClientCert",
    "RequireAnyClientCert",
    "RequireClientCert",
    "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
)


def _pem(section: _Table, name: str, folder: Path, read: _Read) -> tuple[str, bytes | None]:
    """Answer under which key a PEM is (or should be), and the PEM."""
    inline = _text(section, "tls_server_config", name)
    path = _text(section, "tls_server_config", f"{name}_file")
    if inline and path:
        raise WebConfigError(f"tls_server_config: {name} and {name}_file stand both; one is enough")
    if inline:
        return name, inline.encode()
    if not path:
        return f"{name}_file", None
    try:
        return f"{name}_file", read(folder / path)
    except OSError as error:
        raise WebConfigError(f"tls_server_config.{name}_file: {folder / path}: {error.strerror}") from error


# --- the rest ---


def _parse_users(section: object) -> Iterator[tuple[str, bytes]]:
    for user, password_hash in _table("basic_auth_users", section).items():
        if ":" in user or not user.isprintable():
            raise WebConfigError(f"basic_auth_users: {user!r} cannot log in: a user has no colon and no control characters")
        match = _BCRYPT_HASH.fullmatch(password_hash) if isinstance(password_hash, str) else None
        if match is None:
            raise WebConfigError(f"basic_auth_users.{user}: not a bcrypt hash ($2a$, $2b$ or $2y$); `htpasswd -nBC 10 {user}` makes one")
        if int(match[1]) not in _BCRYPT_COSTS:
            raise WebConfigError(f"basic_auth_users.{user}: cost {match[1]} is not from {_BCRYPT_COSTS[0]} to {_BCRYPT_COSTS[-1]}")
        yield user, password_hash.encode()


def _parse_headers(section: object) -> Iterator[tuple[str, str]]:
    for name, value in _table("http_server_config.headers", section, _HEADERS).items():
        if value in (None, ""):
            continue
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise WebConfigError(f"http_server_config.headers.{name}: not a line of ASCII text (numbers and switches need quotes)")
        allowed = _HEADERS[name]
        if allowed is not None and value not in allowed:
            raise WebConfigError(f"http_server_config.headers.{name}: {value!r} is none of {', '.join(allowed)}")
        yield name, value


def _parse_rate_limit(section: _Table) -> RateLimit | None:
    interval, burst = section.get("interval", 0), section.get("burst", 0)
    parts = list(_DURATION_PART.finditer(interval)) if isinstance(interval, str) else []
    if (interval not in (0, "0", None) and not parts) or (parts and "".join(part[0] for part in parts) != interval):
        raise WebConfigError(f"rate_limit.interval: {interval!r} is not a duration like 1s or 250ms")
    interval_seconds = sum(float(part[1]) * _DURATION_UNITS_SECONDS[part[2]] for part in parts)
    if not interval_seconds:
        return None
    if isinstance(burst, bool) or not isinstance(burst, int) or burst < 1:
        raise WebConfigError(f"rate_limit.burst: {burst!r} is not a number from 1 up; without any, no request passes")
    return RateLimit(interval_seconds=interval_seconds, burst=burst)


def _section(parent: _Table, key: str, known: Iterable[str]) -> _Table:
    return _table(key, parent.get(key), known)


def _table(where: str, value: object, known: Iterable[str] | None = None) -> _Table:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WebConfigError(f"{where}: keys with values were expected, not one {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise WebConfigError(f"{where}: the key {key!r} is not text; put it in quotes")
        if known is not None and key not in known:
            raise WebConfigError(f"{where}: {key!r} is not known here; known are {', '.join(known)}")
    return value


def _text(section: _Table, where: str, key: str) -> str:
    value = section.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise WebConfigError(f"{where}.{key}: {value!r:.80} is not text")
    return value


def _texts(section: _Table, where: str, key: str) -> list[str]:
    value = section.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise WebConfigError(f"{where}.{key}: a list of texts was expected, not {value!r:.80}")
    return value


def _flag(section: _Table, where: str, key: str, *, default: bool) -> bool:
    value = section.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise WebConfigError(f"{where}.{key}: {value!r:.80} is neither true nor false")
    return value


def _choice(section: _Table, where: str, key: str, choices: Iterable[str], *, default: str) -> str:
    value = _text(section, where, key) or default
    if value not in choices:
        raise WebConfigError(f"{where}.{key}: {value!r} is none of {', '.join(choices)}")
    return value
