"""Asks a running exporter over HTTP, for the commands: its node and its explanations, as the JSON that they are.

Whatever stands in the way (a wrong URL, a refused connection, a password, another version, no report) is a ClientError whose text is one
sentence for a person: what was wrong, where, what to do.
"""

import argparse
import contextlib
import json
from base64 import b64encode
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationParseError,
    NameResolutionError,
    NewConnectionError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.util import Url, parse_url

from exporter.node_json import API_VERSION

DEFAULT_URL = "http://localhost:9844"

Json = dict[str, Any]

_MAX_ANSWER_BYTES = 64 << 20
_MAX_SHOWN_CHARACTERS = 1000
_OK, _BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _TOO_MANY, _UNAVAILABLE = 200, 400, 401, 403, 404, 429, 503


class ClientError(Exception):
    """The exporter cannot be asked, or has no answer. The text is one sentence for a person."""


class NoReportError(ClientError):
    """The exporter answers, and has no report that can be believed: none yet, or none for three intervals."""

    def __init__(self, text: str, node: Json) -> None:
        super().__init__(text)
        self.node = node
        """What it says all the same: its version and how its sources are doing."""


class ExporterClient:
    """Asks one exporter. May be kept and asked again and again: the connection stays open."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        user: str | None = None,
        password: str = "",
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        key_file: Path | None = None,
        timeout_seconds: float = 5.0,
    ) -> None:
        """`user` and `password` may stand in the URL too; `cert_file` and `key_file` are for exporters that want a client's certificate.

        Raises ClientError for a URL or file that cannot be used.
        """
        parsed = _parse_base(url)
        self.url = str(parsed._replace(auth=None))
        """Where the exporter is, without the password."""
        if user is None and parsed.auth:
            user, _, password = (unquote(part) for part in parsed.auth.partition(":"))
        self._headers = {"Accept": "application/json", "Accept-Encoding": "gzip"}
        if user is not None:
            self._headers["Authorization"] = "Basic " + b64encode(f"{user}:{password}".encode()).decode()
        for path in (ca_file, cert_file, key_file):
            if path is not None and not path.is_file():
                raise ClientError(f"{path} is no file that can be read")
        self._pool = urllib3.PoolManager(
            timeout=timeout_seconds,
            retries=False,
            ca_certs=str(ca_file) if ca_file else None,
            cert_file=str(cert_file) if cert_file else None,
            key_file=str(key_file) if key_file else None,
        )

    def node(self) -> Json:
        """Answer what /api/v1/node says. Raises ClientError, and NoReportError while there is no report that can be believed."""
        status, answer = self._get("/api/v1/node")
        if answer is None or status != _OK:
            raise self._refusal(status, answer)
        self._check_version(answer)
        if not isinstance(answer.get("gpus"), list) or not isinstance(answer.get("pods"), list):
            raise NoReportError(self._no_report(answer), answer)
        return answer

    def explain(self, *, pod: str | None = None, gpu: str | None = None) -> Json:
        """Answer what /api/v1/explain says of a pod, `NAMESPACE/POD`, or of a GPU, its uuid. Raises ClientError."""
        status, answer = self._get("/api/v1/explain", {name: value for name, value in (("pod", pod), ("gpu", gpu)) if value is not None})
        if answer is not None and status in (_BAD_REQUEST, _NOT_FOUND, _UNAVAILABLE) and isinstance(answer.get("error"), str):
            raise ClientError(printable(answer["error"]))
        if status == _NOT_FOUND:
            version = self.node().get("version")  # says itself where this is no exporter
            raise ClientError(
                f"the exporter at {self.url} is of version {printable(str(version))}, which cannot explain: use a newer one there"
            )
        if answer is None or status != _OK:
            raise self._refusal(status, answer)
        self._check_version(answer)
        if not isinstance(answer.get("summary"), str) or not isinstance(answer.get("sections"), list):
            raise self._refusal(status, answer)
        return answer

    def _get(self, path: str, fields: dict[str, str] | None = None) -> tuple[int, Json | None]:
        """Answer the status and the JSON object, None where there is none."""
        try:
            response = self._pool.request(
                "GET", self.url + path, fields=fields, headers=self._headers, redirect=False, preload_content=False
            )
            with contextlib.closing(response):  # a connection that was read to its end is kept all the same
                body = response.read(_MAX_ANSWER_BYTES, decode_content=True)
        except HTTPError as error:
            raise ClientError(self._why_unreachable(error)) from error
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        return response.status, answer if isinstance(answer, dict) else None

    def _check_version(self, answer: Json) -> None:
        version = answer.get("api_version")
        if version is None:
            raise self._refusal(_OK, None)
        if version != API_VERSION:
            raise ClientError(
                f"the exporter at {self.url} answers in version {printable(str(version))} and this program reads {API_VERSION}: "
                "use the program of the exporter's own version"
            )

    def _no_report(self, node: Json) -> str:
        sources = node.get("sources")
        down = [
            f"{source.get('source')}: {source.get('reason')}"
            for source in (sources if isinstance(sources, list) else [])
            if isinstance(source, dict) and not source.get("up")
        ]
        why = printable("; ".join(down)) if down else "its last sample is older than three intervals"
        return f"the exporter at {self.url} has no report that can be believed ({why}): ask again in a moment, or read its log"

    def _refusal(self, status: int, answer: Json | None) -> ClientError:
        if status == _UNAUTHORIZED:
            return ClientError(
                f"the exporter at {self.url} wants a user and password (--user, --password-file), or refuses those it was given"
            )
        if status == _FORBIDDEN:
            return ClientError(f"the exporter at {self.url} wants a certificate of the client that it allows (--cert-file, --key-file)")
        if status == _TOO_MANY:
            return ClientError(f"the exporter at {self.url} is asked more often than it allows: ask again in a moment")
        said = "answers HTTP" if answer is None else "answers JSON of another kind with HTTP"
        return ClientError(f"what listens at {self.url} is no fgpu-exporter ({said} {status}): say where one is with --url")

    def _why_unreachable(self, error: HTTPError) -> str:
        if isinstance(error, NameResolutionError):
            return f"no address is known for the host of {self.url}: say where an exporter is with --url"
        if isinstance(error, SSLError):
            return f"no TLS connection to {self.url} ({printable(str(error))}): use --ca-file, or http:// where it has none"
        if isinstance(error, NewConnectionError):  # which urllib3 counts among the time-outs
            return f"no connection to {self.url}: start an exporter there, forward its port, or say where one is with --url"
        if isinstance(error, ConnectTimeoutError | ReadTimeoutError):
            return f"{self.url} did not answer in time: is it the exporter's address, and is the exporter alive?"
        return f"no HTTP answer from {self.url} ({printable(str(error))}): use http:// or https:// as the exporter does"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which exporter is asked, and how."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where the exporter is (default: {DEFAULT_URL})")
    parser.add_argument("--user", help="user of an exporter that wants a password")
    parser.add_argument("--password-file", type=Path, metavar="FILE", help="file with that user's password")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="PEM file with the authority that signed the exporter's certificate")
    parser.add_argument("--cert-file", type=Path, metavar="FILE", help="PEM file with the client's certificate")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="PEM file with its key")


def client_of(arguments: argparse.Namespace) -> ExporterClient:
    """Answer the client that the flags of `add_arguments` ask for. Raises ClientError."""
    password = ""
    if arguments.password_file is not None:
        try:
            password = arguments.password_file.read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ClientError(f"{arguments.password_file} is no password file that can be read ({error})") from error
    return ExporterClient(
        arguments.url,
        user=arguments.user,
        password=password,
        ca_file=arguments.ca_file,
        cert_file=arguments.cert_file,
        key_file=arguments.key_file,
    )


def printable(text: str, characters: int = _MAX_SHOWN_CHARACTERS) -> str:
    """Answer text from elsewhere as it can stand in one line on a terminal: what moves the cursor or colours is escaped, length is cut."""
    safe = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text[:characters])
    return safe + ("..." if len(text) > characters else "")


def _parse_base(text: str) -> Url:
    """Answer the URL under which the paths stand. Raises ClientError."""
    try:
        url = parse_url(text.strip() if "://" in text else f"http://{text.strip()}")
    except LocationParseError as error:
        raise ClientError(f"{printable(_without_password(text))!r} is no URL like {DEFAULT_URL}") from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ClientError(f"{printable(_without_password(text))!r} is no URL like {DEFAULT_URL}")
    path = (url.path or "").rstrip("/").removesuffix("/metrics")
    return url._replace(path=path or None)


def _without_password(text: str) -> str:
    head, at, tail = text.rpartition("@")
    return f"...@{tail}" if at and head else text
