"""Asks a Prometheus over its HTTP API: instant queries, and what went wrong in one sentence.

How it is reached stands in the URL (`https://user:password@host/prefix`) or in a file of the form that Prometheus itself and promtool
(`--http.config.file`) take.

API: https://prometheus.io/docs/prometheus/latest/querying/api/ (v1). File: `basic_auth`, `authorization` and `tls_config` of
https://prometheus.io/docs/prometheus/latest/configuration/configuration/#http_config
"""

import json
import math
import ssl
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import urllib3
import yaml
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    InsecureRequestWarning,
    LocationParseError,
    MaxRetryError,
    NameResolutionError,
    NewConnectionError,
    ReadTimeoutError,
    ResponseError,
    SSLError,
)

from exporter import __version__
from exporter.commands.client import printable

_CONNECT_SECONDS = 10.0
_MOST_REDIRECTS = 3
_UNAUTHORIZED, _FORBIDDEN, _MULTIPLE_CHOICES = 401, 403, 300

_HTTP_KEYS = {
    "basic_auth": ("username", "username_file", "password", "password_file"),
    "authorization": ("type", "credentials", "credentials_file"),
    "tls_config": ("ca_file", "cert_file", "key_file", "server_name", "insecure_skip_verify"),
}
_NO_URL = "--prometheus-url: a URL like http://prometheus:9090 is expected, without ? and #"
_ASK_LESS = "ask for less at once (--namespace, a shorter --range, a longer --step)"


class PrometheusError(Exception):
    """No answer that can be used. The text is one sentence: what was wrong, and what to do."""


class AddressError(Exception):
    """A URL or file that says how to reach Prometheus and cannot be used. The text is one line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of an answer."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """How a server is asked."""

    headers: Mapping[str, str]
    tls: ssl.SSLContext | None = None
    """None: the system's certificate authorities."""
    server_name: str | None = None
    """The name that the server's certificate is to have, where that is not the URL's."""


PLAIN = HttpConfig(headers={})


class Prometheus:
    """A Prometheus, or another server with its API. One request at a time."""

    def __init__(self, url: str, config: HttpConfig, timeout_seconds: float) -> None:
        """Take the address. Raises AddressError for one that is none."""
        self.url, headers = _parse_url(url)
        self._headers = {"Accept": "application/json", "User-Agent": f"fgpu-exporter/{__version__}", **headers, **config.headers}
        self._timeout_seconds = timeout_seconds
        tls: dict[str, Any] = {"ssl_context": config.tls or ssl.create_default_context()}
        if config.server_name:
            tls["server_hostname"] = config.server_name
        self._pool = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=min(_CONNECT_SECONDS, timeout_seconds), read=timeout_seconds),
            retries=urllib3.Retry(connect=0, read=0, other=0, status=0, redirect=_MOST_REDIRECTS),
            **tls,
        )

    def close(self) -> None:
        """Close its connections."""
        self._pool.clear()

    def query(self, expression: str, time_seconds: float) -> tuple[Sample, ...]:
        """Answer the series of an expression at a moment. Raises PrometheusError."""
        fields = {"query": expression, "time": f"{time_seconds:.3f}", "timeout": f"{math.ceil(self._timeout_seconds)}s"}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", InsecureRequestWarning)  # whoever wrote insecure_skip_verify knows
                response = self._pool.request("GET", f"{self.url}/api/v1/query", fields=fields, headers=self._headers)
        except HTTPError as error:
            raise PrometheusError(self._unreachable(error)) from error
        if response.status in (_UNAUTHORIZED, _FORBIDDEN):
            raise PrometheusError(
                f"{self.url} refuses with HTTP {response.status}: --http-config-file takes what it wants, basic_auth or authorization"
            )
        document = _decode(response.data)
        if document is None or document.get("status") not in ("success", "error"):
            raise PrometheusError(
                f"{self.url} does not answer as a Prometheus does (HTTP {response.status}): "
                "--prometheus-url takes the address of Prometheus's own API, with its path prefix where it has one"
            )
        if document["status"] == "error" or response.status >= _MULTIPLE_CHOICES:
            raise PrometheusError(self._failed(document))
        if partly := document.get("warnings"):
            # Thanos and its kin answer with what they have when a part of them is away.
            first = partly[0] if isinstance(partly, list) else partly
            raise PrometheusError(f"{self.url} may have answered in part only, try again when it is whole: {_one_line(first)}")
        try:
            return _samples(document["data"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PrometheusError(f"{self.url} answers in a form that is not Prometheus's: is it a Prometheus?") from error

    def _unreachable(self, error: HTTPError) -> str:
        reason: BaseException | None = error.reason if isinstance(error, MaxRetryError) else error
        match reason:
            case NameResolutionError():
                why = "its name is not known here"
            case NewConnectionError():  # which urllib3 counts among the time-outs
                why = getattr(reason.__cause__, "strerror", None) or _one_line(reason)
            case ConnectTimeoutError():
                why = "it does not take the connection"
            case ReadTimeoutError():
                return f"{self.url} did not answer within {self._timeout_seconds:g} s: {_ASK_LESS} or wait longer (--timeout)"
            case SSLError():
                why = f"TLS failed, {_one_line(reason)}; --http-config-file takes a tls_config with ca_file"
            case ResponseError():
                why = "it redirects without end"
            case _:
                why = _one_line(reason)
        return f"cannot ask {self.url}: {why}; is --prometheus-url right?"

    def _failed(self, document: Mapping[str, Any]) -> str:
        kind, text = document.get("errorType"), _one_line(document.get("error", "it does not say why"))
        if kind in ("timeout", "canceled"):
            return f"{self.url} gave up on a query: {_ASK_LESS}; it says: {text}"
        if "too many samples" in text or "too many chunks" in text:
            return f"{self.url} holds more than it may read for one query: {_ASK_LESS}; it says: {text}"
        if kind == "bad_data":
            return f"{self.url} cannot read a query: is --selector a list of label matchers? It says: {text}"
        return f"{self.url} failed on a query: {text}"


def _samples(data: Mapping[str, Any]) -> tuple[Sample, ...]:
    if data["resultType"] != "vector":
        raise ValueError(data["resultType"])
    return tuple(Sample(dict(row["metric"]), value) for row in data["result"] if math.isfinite(value := float(row["value"][1])))


def _decode(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _one_line(said: object) -> str:
    return printable(" ".join(str(said).split()))


def _parse_url(text: str) -> tuple[str, dict[str, str]]:
    try:
        url = urllib3.util.parse_url(text if "://" in text else f"http://{text}")
    except LocationParseError as error:
        raise AddressError(_NO_URL) from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise AddressError(_NO_URL)
    headers = dict(urllib3.util.make_headers(basic_auth=unquote(url.auth))) if url.auth else {}
    return url._replace(auth=None, path=(url.path or "").rstrip("/") or None).url, headers


# --- the file ---


def read_http_config(path: Path) -> HttpConfig:
    """Answer what a file says of how to ask; the paths in it start from its folder. Raises AddressError."""
    try:
        document = yaml.safe_load(path.read_text())
        return _http_config({} if document is None else document, path.parent)
    except (OSError, ssl.SSLError) as error:
        named = f" ({error.filename})" if isinstance(error, OSError) and error.filename not in (None, str(path)) else ""
        raise AddressError(f"--http-config-file {path}: {error.strerror or _one_line(error)}{named}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise AddressError(f"--http-config-file {path}: not YAML: {_one_line(error)}") from error
    except ValueError as error:
        raise AddressError(f"--http-config-file {path}: {error}") from error


def _http_config(document: object, folder: Path) -> HttpConfig:
    tables = _table("the file", document, tuple(_HTTP_KEYS))
    parts = {name: _table(name, tables.get(name) or {}, keys) for name, keys in _HTTP_KEYS.items()}
    basic, authorization, tls = parts["basic_auth"], parts["authorization"], parts["tls_config"]
    if basic and authorization:
        raise ValueError("basic_auth and authorization: one of them, not both")
    headers: dict[str, str] = {}
    if basic:
        user, password = _secret(basic, "username", folder), _secret(basic, "password", folder)
        headers |= urllib3.util.make_headers(basic_auth=f"{user}:{password}")
    if authorization:
        headers["authorization"] = f"{authorization.get('type', 'Bearer')} {_secret(authorization, 'credentials', folder)}"
    if any("\n" in value or "\r" in value or not value.isascii() for value in headers.values()):
        raise ValueError("authorization: credentials of one line of ASCII are expected")
    server_name = tls.get("server_name")
    return HttpConfig(headers=headers, tls=_tls(tls, folder) if tls else None, server_name=str(server_name) if server_name else None)


def _table(name: str, value: object, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected a mapping with {', '.join(keys)}")
    if unknown := [key for key in value if key not in keys]:
        raise ValueError(f"{name}: the key {_one_line(unknown[0])} is not known here; expected {', '.join(keys)}")
    return value


def _secret(table: Mapping[str, Any], key: str, folder: Path) -> str:
    if f"{key}_file" in table:
        return (folder / str(table[f"{key}_file"])).read_text().strip()
    return str(table.get(key) or "")


def _tls(table: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / str(table["ca_file"])) if "ca_file" in table else None)
    if "cert_file" in table or "key_file" in table:
        if "cert_file" not in table or "key_file" not in table:
            raise ValueError("tls_config: cert_file and key_file go together")
        context.load_cert_chain(str(folder / str(table["cert_file"])), str(folder / str(table["key_file"])))
    if table.get("insecure_skip_verify") is True:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
