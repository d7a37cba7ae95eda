"""The two text formats of an exposition. Pure.

Prometheus text 0.0.4 and OpenMetrics 1.0 (https://prometheus.io/docs/instrumenting/exposition_formats/), byte for byte as prometheus_client
writes them, which the tests hold it to. That library makes an object and sorts a mapping for each sample: four times as slow, on a node
whose every sample may be scraped. Here the labels of a pod are written once for all of its metrics.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from prometheus_client.utils import floatToGoString

_FIRST_WITH_EXPONENT = 1e6

Kind = Literal["gauge", "counter", "histogram"]
Labels = tuple[str, ...]


class Format(Enum):
    """A wire format; the value is its content type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric with all of its samples, in their order."""

    name: str
    """Of a counter with `_total`, of a histogram without `_bucket`."""
    kind: Kind
    help: str
    labels: Labels
    """The labels' names."""
    samples: tuple[tuple[Labels, float], ...]
    """The labels' values, which UTF-8 can encode, and the number. Of a histogram its buckets, with `le` as the last label."""
    sum: float | None = None
    """Of a histogram."""


def render_families(families: Iterable[Family], wire_format: Format) -> str:
    """Answer the text of these families, without the end mark of OpenMetrics."""
    return "".join(_lines(families, wire_format))


def _lines(families: Iterable[Family], wire_format: Format) -> Iterator[str]:
    openmetrics = wire_format is Format.OPENMETRICS
    texts: dict[Labels, dict[Labels, str]] = {}
    for family in families:
        title = family.name.removesuffix("_total") if openmetrics and family.kind == "counter" else family.name
        text = _escape_lines(family.help)
        yield f"# HELP {title} {_escape_quotes(text) if openmetrics else text}\n# TYPE {title} {family.kind}\n"
        name = f"{family.name}_bucket" if family.kind == "histogram" else family.name
        known = texts.setdefault(family.labels, {})
        in_order = sorted(range(len(family.labels)), key=family.labels.__getitem__)
        template = "{" + ",".join(f'{family.labels[position]}="%s"' for position in in_order) + "}" if in_order else ""
        for values, number in family.samples:
            labels = known.get(values)
            if labels is None:
                labels = known[values] = template % tuple(_escape_quotes(_escape_lines(values[position])) for position in in_order)
            yield f"{name}{labels} {_number_text(number)}\n"
        if family.sum is not None:
            yield f"{family.name}_count {_number_text(family.samples[-1][1])}\n{family.name}_sum {_number_text(family.sum)}\n"


def _number_text(number: float) -> str:
    # Go writes larger numbers with an exponent than Python does, and infinity in other words.
    if 0 <= number < _FIRST_WITH_EXPONENT:
        return repr(number)
    text: str = floatToGoString(number)  # type: ignore[no-untyped-call]
    return text


def _escape_lines(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape_quotes(text: str) -> str:
    return text.replace('"', r"\"")
