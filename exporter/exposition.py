"""The text that a scrape gets. Each report is rendered at most once for each format and encoding; a scrape copies bytes.

`Exposition` is called by HTTP threads and published by the sampler's; it belongs to one report and is thrown away with it. What a scrape is
expected to ask of it, by the scrapes before, is rendered before it is published: only an unexpected scrape waits for a rendering.
"""

import gzip
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest as generate_text
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from exporter.health import Health
from exporter.metrics import build_families
from exporter.report import Report
from exporter.text_format import Format, render_families

# Level 9 takes ten times as long as level 1 to save a fifth of the bytes.
_GZIP_LEVEL = 1

# Those of two Prometheis, one that scrapes every 15 s and one every minute, among them.
_GAPS = 8
_EARLY = 0.9


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


def compress(body: bytes) -> bytes:
    """Answer the bytes gzipped; equal ones always give equal ones."""
    return gzip.compress(body, _GZIP_LEVEL, mtime=0)


Encoding = tuple[Format, bool]
"""A format, and whether it is gzipped."""


@dataclass(frozen=True, slots=True)
class Demand:
    """When an encoding was last asked for. Times are those of the reports that it was asked of: monotonic seconds."""

    seconds: float
    gaps_seconds: tuple[float, ...] = ()
    """Between the last few reports that it was asked of."""

    def again(self, seconds: float) -> "Demand":
        """Answer the demand after a scrape of a report of this time."""
        if seconds == self.seconds:
            return self
        return Demand(seconds, (*self.gaps_seconds, seconds - self.seconds)[-_GAPS:])

    def is_due(self, seconds: float) -> bool:
        """Answer whether the next scrape may well be of a report of this time: samples and scrapes come a little early or late."""
        return seconds - self.seconds >= _EARLY * min(self.gaps_seconds, default=0.0)


class Exposition:
    """One report, ready to be served in any format."""

    def __init__(self, report: Report | None, health: Health, config_facts: dict[str, str]) -> None:
        self.report = report
        self.health = health
        self._config_facts = config_facts
        self._lock = threading.Lock()
        self._rendered: dict[Encoding, bytes] = {}
        self._demand: dict[Encoding, Demand] = {}
        self._own: Exposition | None = None

    def without_report(self) -> "Exposition":
        """Answer the exporter's own series alone, for when the report is too old to be believed."""
        if self.report is None:
            return self
        with self._lock:
            if self._own is None:
                self._own = Exposition(None, self.health, self._config_facts)
            return self._own

    def prepare(self, before: "Exposition", *, keep_seconds: float) -> None:
        """Render what is expected to be asked of this exposition by what was asked of those before it, in so many seconds."""
        if self.report is None:
            return
        now = self.report.monotonic_seconds

        def recent_demand() -> dict[Encoding, Demand]:
            return {encoding: demand for encoding, demand in before.demand().items() if now - demand.seconds <= keep_seconds}

        try:
            for encoding, demand in recent_demand().items():
                if demand.is_due(now):
                    self._bytes(*encoding)
        finally:
            self._demand = recent_demand()  # once more: what is scraped while this renders is scraped of the one before

    def demand(self) -> Mapping[Encoding, Demand]:
        """Answer what was asked of this exposition and of those before it."""
        with self._lock:
            return dict(self._demand)

    def render(self, wire_format: Format, *, compressed: bool) -> bytes:
        """Answer the exposition's bytes, gzipped if so asked."""
        with self._lock:
            if self.report is not None:
                now, encoding = self.report.monotonic_seconds, (wire_format, compressed)
                self._demand[encoding] = self._demand[encoding].again(now) if encoding in self._demand else Demand(now)
            return self._bytes(wire_format, compressed)

    def _bytes(self, wire_format: Format, compressed: bool) -> bytes:  # noqa: FBT001 - an Encoding
        body = self._rendered.get((wire_format, compressed))
        if body is None:
            body = self._rendered.get((wire_format, False)) or self._render(wire_format)
            if compressed:
                body = compress(body)
            self._rendered[wire_format, compressed] = body
        return body

    def _render(self, wire_format: Format) -> bytes:
        families = build_families(self.report, self.health, self._config_facts)
        return render_families(families, wire_format).encode() + _render_process(wire_format)


def _render_process(wire_format: Format) -> bytes:
    """Answer what there is to say of this process, and the end mark."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    generate = generate_text if wire_format is Format.TEXT else generate_openmetrics
    return bytes(generate(registry))
