"""The text that a scrape gets. Each report is rendered at most once for each format and encoding; a scrape copies bytes.

`Exposition` is called by HTTP threads and published by the sampler's; it belongs to one report and is thrown away with it.
"""

import gzip
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest as generate_text
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from exporter.health import Health
from exporter.metrics import build_families
from exporter.report import Report

# Level 9 takes ten times as long as level 1 to save a fifth of the bytes.
_GZIP_LEVEL = 1


class Format(Enum):
    """A wire format; the value is its content type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def choose_format(accept: str) -> Format:
    """Answer the format that an Accept header asks for: of those we have the one with the highest q, the first among equals."""
    best, best_quality = Format.TEXT, 0.0
    for part in accept.split(","):
        media_type, *parameters = (piece.strip() for piece in part.split(";"))
        wanted = {"application/openmetrics-text": Format.OPENMETRICS, "text/plain": Format.TEXT}.get(media_type.lower())
        quality = _quality(parameters)
        if wanted is not None and quality > best_quality:
            best, best_quality = wanted, quality
    return best


def _quality(parameters: Iterable[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


def accepts_gzip(accept_encoding: str) -> bool:
    """Answer whether an Accept-Encoding header takes gzip."""
    parts = (part.strip().split(";") for part in accept_encoding.split(","))
    return any(name.strip().lower() == "gzip" and _quality(p.strip() for p in parameters) > 0 for name, *parameters in parts)


@dataclass(frozen=True, slots=True)
class _Families:
    """What prometheus_client's renderers call a registry."""

    families: tuple[Family, ...]

    def collect(self) -> Iterator[Family]:
        yield from self.families


class Exposition:
    """One report, ready to be served in any format."""

    def __init__(self, report: Report | None, health: Health, config_facts: dict[str, str]) -> None:
        self.report = report
        self.health = health
        self._config_facts = config_facts
        self._lock = threading.Lock()
        self._rendered: dict[tuple[Format, bool], bytes] = {}
        self._own: Exposition | None = None

    def without_report(self) -> "Exposition":
        """Answer the exporter's own series alone, for when the report is too old to be believed."""
        if self.report is None:
            return self
        with self._lock:
            if self._own is None:
                self._own = Exposition(None, self.health, self._config_facts)
            return self._own

    def render(self, wire_format: Format, *, compressed: bool) -> bytes:
        """Answer the exposition's bytes, gzipped if so asked."""
        with self._lock:
            body = self._rendered.get((wire_format, compressed))
            if body is None:
                body = self._render(wire_format, compressed=compressed)
                self._rendered[wire_format, compressed] = body
            return body

    def _render(self, wire_format: Format, *, compressed: bool) -> bytes:
        body = self._rendered.get((wire_format, False))
        if body is None:
            generate = generate_text if wire_format is Format.TEXT else generate_openmetrics
            body = bytes(generate(_Families(tuple(self._collect()))))
            self._rendered[wire_format, False] = body
        return gzip.compress(body, _GZIP_LEVEL, mtime=0) if compressed else body

    def _collect(self) -> Iterator[Family]:
        yield from build_families(self.report, self.health, self._config_facts)
        yield from ProcessCollector(registry=None).collect()
        yield from PlatformCollector(registry=None).collect()
