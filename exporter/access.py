"""Who may ask: client certificates, passwords, and how often.

Called by the HTTP thread only. A password is hashed at most once: what was found out about it is remembered under a keyed digest, so that a
scrape costs no bcrypt. Wrong ones are checked one at a time with rests between, so that guessing costs a quarter of one CPU at most.
"""

import asyncio
import base64
import binascii
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import bcrypt

from exporter.web_config import RateLimit, WebConfig

_MAX_REFUSED_REMEMBERED = 256
_MAX_CHECKS_WAITING = 32
# One guesser does not keep others from being checked.
_MAX_CHECKS_WAITING_OF_ADDRESS = 4
_RESTS_AFTER_REFUSAL = 3
# bcrypt sees no more of a password (and refuses to cut it, from version 5).
_MAX_PASSWORD_BYTES = 72


class Verdict(Enum):
    """Whether a request may pass."""

    ALLOWED = "allowed"
    TOO_OFTEN = "too often"
    """More requests than the rate allows."""
    NO_CERTIFICATE = "no certificate"
    """No client certificate, or none of those that are allowed."""
    NO_PASSWORD = "no password"  # noqa: S105 - a verdict
    """No password, or a wrong one."""
    TOO_MANY_PASSWORDS = "too many passwords"
    """Too many passwords wait to be checked; this one was not."""


class Access:
    """Judges requests by one web configuration."""

    def __init__(self, config: WebConfig) -> None:
        self._config = config
        self._bucket = _TokenBucket(config.rate_limit) if config.rate_limit else None
        self._passwords = _Passwords(config.users) if config.users else None

    async def judge(self, *, authorization: str, certificate: Mapping[str, Any] | None, address: str) -> Verdict:
        """Answer whether a request may pass, by its Authorization header, verified client certificate and the client's address."""
        if self._bucket is not None and not self._bucket.take():
            return Verdict.TOO_OFTEN
        if self._config.needs_client_certificate and not self._is_allowed(certificate):
            return Verdict.NO_CERTIFICATE
        if self._passwords is not None:
            return await self._passwords.judge(authorization, address)
        return Verdict.ALLOWED

    def _is_allowed(self, certificate: Mapping[str, Any] | None) -> bool:
        if not certificate:
            return False
        allowed = self._config.client_allowed_sans
        return allowed is None or any(name in allowed for _, name in certificate.get("subjectAltName", ()))


class _TokenBucket:
    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._tokens = float(limit.burst)
        self._filled_seconds = asyncio.get_running_loop().time()

    def take(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._tokens = min(self._limit.burst, self._tokens + (now - self._filled_seconds) / self._limit.interval_seconds)
        self._filled_seconds = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(frozen=True, slots=True)
class _Check:
    address: str
    task: asyncio.Task[bool]


class _Passwords:
    def __init__(self, users: Mapping[str, bytes]) -> None:
        self._users = users
        # An unknown user takes as long as a known one, so that names cannot be guessed by the clock.
        self._decoy_hash = next(iter(users.values()))
        self._digest_key = secrets.token_bytes(32)
        self._accepted: set[bytes] = set()
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._turn = asyncio.Lock()
        self._checks: dict[bytes, _Check] = {}

    async def judge(self, authorization: str, address: str) -> Verdict:
        credentials = _parse_basic(authorization)
        if credentials is None or len(credentials[1]) > _MAX_PASSWORD_BYTES:
            return Verdict.NO_PASSWORD
        user, password = credentials
        digest = self._digest(user, password)
        if digest in self._accepted:
            return Verdict.ALLOWED
        if digest in self._refused:
            return Verdict.NO_PASSWORD
        check = self._checks.get(digest)
        if check is None:
            waiting_of_address = sum(other.address == address for other in self._checks.values())
            if len(self._checks) >= _MAX_CHECKS_WAITING or waiting_of_address >= _MAX_CHECKS_WAITING_OF_ADDRESS:
                return Verdict.TOO_MANY_PASSWORDS
            check = self._checks[digest] = _Check(address, asyncio.create_task(self._check(digest, user, password)))
        # A client that goes away does not take the answer with it: the next scrape finds it.
        return Verdict.ALLOWED if await asyncio.shield(check.task) else Verdict.NO_PASSWORD

    def _digest(self, user: str, password: bytes) -> bytes:
        name = hashlib.sha256(user.encode()).digest()
        return hashlib.blake2b(name + password, key=self._digest_key).digest()

    async def _check(self, digest: bytes, user: str, password: bytes) -> bool:
        try:
            async with self._turn:
                return await self._check_now(digest, user, password)
        finally:
            del self._checks[digest]

    async def _check_now(self, digest: bytes, user: str, password: bytes) -> bool:
        loop = asyncio.get_running_loop()
        started = loop.time()
        matches = await loop.run_in_executor(None, bcrypt.checkpw, password, self._users.get(user, self._decoy_hash))
        if matches and user in self._users:
            self._accepted.add(digest)
            return True
        self._refused[digest] = None
        if len(self._refused) > _MAX_REFUSED_REMEMBERED:
            self._refused.popitem(last=False)
        await asyncio.sleep(_RESTS_AFTER_REFUSAL * (loop.time() - started))
        return False


def _parse_basic(authorization: str) -> tuple[str, bytes] | None:
    """Answer user and password of a Basic authorization (https://www.rfc-editor.org/rfc/rfc7617), or None."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None
