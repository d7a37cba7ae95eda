"""Requests to the Kubernetes API server, and what an answer that is no success means. Each connection belongs to one thread."""

import json
import logging
from collections.abc import Callable, Generator, Mapping
from http import HTTPStatus
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

from exporter import __version__
from exporter.sources import SourceError
from exporter.sources.kubernetes_config import ApiServer
from exporter.sources.kubernetes_objects import Json

_log = logging.getLogger(__name__)

_MAX_BACKOFF_SECONDS = 30.0
_MAX_RETRY_AFTER_SECONDS = 300.0

_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 26
_MAX_ERROR_BYTES = 1 << 16


class AttemptError(Exception):
    """A request failed. The text says why; the server may have said when to come back."""

    def __init__(self, reason: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_seconds = min(retry_after_seconds, _MAX_RETRY_AFTER_SECONDS)


class NotServedError(AttemptError):
    """The server does not know this kind of object in this version, or what is written to is not there."""


class ForbiddenError(AttemptError):
    """The credentials do not suffice."""


class NamespaceTerminatingError(AttemptError):
    """Nothing new may be made in a namespace that is going away."""


class ConflictError(AttemptError):
    """An object of this name is there already."""


class RejectedError(AttemptError):
    """What was sent is not acceptable, and will not be when it is sent again."""


class ExpiredError(Exception):
    """The server no longer has the version asked for: list anew."""


class UndecodableError(Exception):
    """The server sent what is not an event: where it would go on is unknown."""


class Connection:
    """Requests to the API server. Belongs to one thread, `interrupt` apart."""

    def __init__(self, api: Callable[[], ApiServer], timeout: urllib3.Timeout) -> None:
        self._api = api
        self._timeout = timeout
        self._server: ApiServer | None = None
        self._response: BaseHTTPResponse | None = None
        self._interrupted = False

    def get(self, path: str, query: Mapping[str, str]) -> BaseHTTPResponse:
        """Answer a response whose body has not been read. Raises AttemptError, or ExpiredError for a version that is gone."""
        return self._request("GET", path, {}, fields=query)

    def write(self, method: str, path: str, content_type: str, body: Json) -> Json:
        """Send an object or a patch, and answer the object as the server has it then. Raises as `get` does."""
        encoded = json.dumps(body, separators=(",", ":")).encode()
        response = self._request(method, path, {"Content-Type": content_type}, body=encoded)
        try:
            return decode_object(self.read_body(response))
        except UndecodableError as error:
            raise AttemptError(f"an answer cannot be decoded: {error}") from error

    def _request(self, method: str, path: str, headers: Mapping[str, str], **content: Any) -> BaseHTTPResponse:  # noqa: ANN401 - urllib3's
        try:
            server = self._server = self._server or self._api()
            credentials = server.credentials()
        except SourceError as error:
            raise AttemptError(str(error)) from error
        try:
            response: BaseHTTPResponse = server.pool.request(
                method,
                server.host + path,
                headers={"User-Agent": f"fgpu-exporter/{__version__}", "Accept": "application/json", **headers, **credentials},
                timeout=self._timeout,
                retries=False,
                redirect=False,
                preload_content=False,
                **content,
            )
        except HTTPError as error:
            raise AttemptError(f"{server.host} does not answer ({_cause(error)})") from error
        self._response = response
        if self._interrupted:
            response.close()
            raise AttemptError("no longer wanted")
        if response.status == HTTPStatus.UNAUTHORIZED:
            self._server = None  # the next one reads rotated credentials
        if response.status not in (HTTPStatus.OK, HTTPStatus.CREATED):
            raise refusal(response.status, self._read_refusal(response), response.headers.get("Retry-After"))
        return response

    def read_body(self, response: BaseHTTPResponse) -> bytes:
        """Answer the whole body. Raises AttemptError where it breaks off."""
        try:
            return response.read()
        except (HTTPError, OSError) as error:
            raise AttemptError(f"the answer broke off ({_cause(error)})") from error

    def read_lines(self, response: BaseHTTPResponse) -> Generator[bytes]:
        """Answer the lines of the body as they come. A body that breaks off or falls silent ends; a torn last line is left out."""
        rest = b""
        try:
            while chunk := response.read1(_READ_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
                if len(rest) > _MAX_LINE_BYTES:
                    raise UndecodableError(f"an event of more than {_MAX_LINE_BYTES >> 20} MiB")
        except (HTTPError, OSError, ValueError) as error:  # ValueError: closed by `interrupt`
            _log.debug("state=ended reason=%r", _cause(error))
        finally:
            response.close()

    def interrupt(self) -> None:
        """End the read that blocks in another thread, and any later one."""
        self._interrupted = True
        if (response := self._response) is not None:
            try:
                response.shutdown()
            except (RuntimeError, ValueError, OSError) as error:
                _log.debug("state=closed reason=%r", str(error))

    def _read_refusal(self, response: BaseHTTPResponse) -> Json:
        try:
            return decode_object(response.read(_MAX_ERROR_BYTES))
        except (HTTPError, OSError, UndecodableError):
            return {}
        finally:
            response.close()


def backoff_seconds(attempts: int) -> float:
    """Answer how long to wait after so many attempts that failed: 1 s at first, twice as long each time, up to 30 s."""
    return min(2.0 ** min(attempts - 1, 16), _MAX_BACKOFF_SECONDS)


def decode_object(text: bytes) -> Json:
    """Answer a JSON object. Raises UndecodableError."""
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UndecodableError(f"{error}, in {text[:60]!r}") from error
    if not isinstance(decoded, dict):
        raise UndecodableError(f"not a JSON object: {text[:60]!r}")
    return decoded


def refusal(status: int, answer: Json, retry_after: str | None) -> Exception:
    """Answer the error for a status, sent as the response's or in an ERROR event within a response that is 200."""
    message = str(answer.get("message") or "no reason given")[:300]
    details = answer.get("details")
    retry_after_seconds = _seconds(retry_after) or _seconds(details.get("retryAfterSeconds") if isinstance(details, Mapping) else None)
    match status:
        case HTTPStatus.GONE:
            return ExpiredError(message)
        case HTTPStatus.FORBIDDEN if _has_cause(details, "NamespaceTerminating"):
            return NamespaceTerminatingError(message)
        case HTTPStatus.FORBIDDEN:
            return ForbiddenError(message)
        case HTTPStatus.NOT_FOUND:
            return NotServedError(f"the API server does not serve this resource (404 {message})")
        case HTTPStatus.UNAUTHORIZED:
            return AttemptError(
                f"the API server refuses the credentials (401 {message}); they are read anew for each attempt: "
                "if this stays, the service account or the kubeconfig is not of this cluster, or no longer"
            )
        case HTTPStatus.CONFLICT:
            return ConflictError(f"the API server answered 409 ({message})")
        case HTTPStatus.BAD_REQUEST | HTTPStatus.REQUEST_ENTITY_TOO_LARGE | HTTPStatus.UNPROCESSABLE_ENTITY:
            return RejectedError(f"the API server answered {status} ({message})")
        case _:
            return AttemptError(f"the API server answered {status} ({message})", retry_after_seconds)


def _has_cause(details: object, reason: str) -> bool:
    causes = details.get("causes") if isinstance(details, Mapping) else None
    return isinstance(causes, list) and any(isinstance(cause, Mapping) and cause.get("reason") == reason for cause in causes)


def _seconds(value: object) -> float:
    # Retry-After may also be a date; the API server sends a number.
    if isinstance(value, str):
        return float(value) if value.isascii() and value.isdigit() else 0.0
    return float(value) if isinstance(value, int) and value > 0 else 0.0


def _cause(error: Exception) -> str:
    # urllib3 puts the address of an object into the text of some errors; the cause is the same each time.
    return str(error.__cause__ or "") or str(error)
