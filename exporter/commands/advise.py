"""`fgpu-exporter advise`: which GPU share each workload needs, by what a Prometheus remembers, beside the share that it asks.

What is remembered is read by `pod_history`, the arithmetic is `exporter.advice`; here are the flags, and how the answer is shown.
docs/advise.md explains it.
"""

import argparse
import contextlib
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

from exporter.advice import MIB, Advice, Terms, build_advice
from exporter.commands.client import printable
from exporter.commands.pod_history import Window, read_pod_history
from exporter.commands.prometheus_api import PLAIN, AddressError, Prometheus, PrometheusError, read_http_config
from exporter.duration import parse_duration, show_duration

NOTE = (
    "Use is not need: PyTorch keeps memory that it no longer uses, and JAX, TensorFlow and vLLM take a set part of the GPU at start. "
    "What happens between two samples is not seen. docs/advise.md says how to read this."
)

_EXIT_NO_ANSWER, _EXIT_USAGE = 1, 2
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MOST_HEADROOM = 10
_STEP_SECONDS = range(1, 3601)


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: a row of the table that the parser and docs/advise.md are made from."""

    name: str
    parse: Callable[[str], Any]
    expected: str
    help: str
    default: str | None = None


def _whole_seconds(text: str) -> int:
    seconds = parse_duration(text)
    if seconds != int(seconds) or seconds < 1:
        raise ValueError(text)
    return int(seconds)


def _step(text: str) -> int:
    if (seconds := _whole_seconds(text)) not in _STEP_SECONDS:
        raise ValueError(text)
    return seconds


def _headroom(text: str) -> Fraction:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or (ratio := Fraction(text)) > _MOST_HEADROOM:
        raise ValueError(text)
    return ratio


def _namespace(text: str) -> str:
    if not _NAMESPACE.fullmatch(text):
        raise ValueError(text)
    return text


def _time(text: str) -> float:
    is_number = re.fullmatch(r"[0-9]{1,10}(\.[0-9]+)?", text)
    moment = datetime.fromtimestamp(float(text), UTC) if is_number else datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


FLAGS: tuple[Flag, ...] = (
    Flag("prometheus-url", str, "a URL", "Where Prometheus, or a server with its API, is; with its path prefix where it has one."),
    Flag("http-config-file", Path, "a file", "How to ask it: basic_auth, authorization and tls_config, in the format that promtool takes."),
    Flag("range", _whole_seconds, "a time like 7d", "How much of the past is looked at.", "7d"),
    Flag("headroom", _headroom, "a number from 0 to 10", "Room above the peak, as a part of the peak.", "0.2"),
    Flag("min-history", _whole_seconds, "a time like 24h", "A workload whose use is known for less gets no advice.", "24h"),
    Flag(
        "step",
        _step,
        "a time from 1s to 1h",
        "The range is looked at in steps, by the peak of each. Not shorter than Prometheus scrapes the exporter.",
        "5m",
    ),
    Flag("namespace", _namespace, "a namespace", "Only pods of this namespace; may stand several times."),
    Flag("selector", str, "label matchers", 'Only series with these labels, like cluster="eu",node=~"gpu-.*".'),
    Flag("time", _time, "a time like 2026-12-01T06:00:00Z, or seconds", "The end of the range; without it, now."),
    Flag("timeout", _whole_seconds, "a time like 2m", "How long one query may take.", "2m"),
    Flag("json", lambda _: True, "nothing", "Print JSON."),
)
_REPEATED, _SWITCH = "namespace", "json"


class UsageError(Exception):
    """A flag that cannot be used. The text is one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(arguments: Sequence[str]) -> int:
    """Print the advice; answer the exit status: 0, 2 for a flag that cannot be used, 1 where there is no answer."""
    try:
        given = _parse(arguments)
        file = given["http-config-file"]
        prometheus = Prometheus(given["prometheus-url"], read_http_config(file) if file else PLAIN, given["timeout"])
    except (UsageError, AddressError) as error:
        return _fail(str(error), _EXIT_USAGE)
    window = Window(
        end_seconds=time.time() if given["time"] is None else given["time"],
        range_seconds=given["range"],
        step_seconds=given["step"],
        selector=given["selector"] or "",
        namespaces=given["namespace"],
    )
    terms = Terms(headroom_ratio=given["headroom"], min_history_seconds=given["min-history"], step_seconds=given["step"])
    try:
        with contextlib.closing(prometheus):
            history = read_pod_history(prometheus, window)
    except PrometheusError as error:
        return _fail(str(error), _EXIT_NO_ANSWER)
    rows = build_advice(history.uses, history.pods, history.devices, terms)
    if not rows:
        return _fail("only pods of the sharing systems themselves are on GPUs there: there is no workload to advise on", _EXIT_NO_ANSWER)
    render = render_json if given["json"] else render_table
    sys.stdout.write(render(rows, window, terms))
    return 0


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"fgpu-exporter advise: {message}\n")
    return status


def make_parser() -> argparse.ArgumentParser:
    """Answer the parser of the flags."""
    parser = _Parser(
        prog="fgpu-exporter advise",
        description="Which GPU share each workload needs, by its peak of memory that Prometheus remembers, beside what it asks.",
        allow_abbrev=False,
        usage="%(prog)s --prometheus-url URL [flags]",
    )
    for flag in FLAGS:
        default = f" Default: {flag.default}." if flag.default else ""
        if flag.name == _SWITCH:
            parser.add_argument(f"--{flag.name}", action="store_const", const="true", help=flag.help)
        else:
            action = "append" if flag.name == _REPEATED else "store"
            metavar = flag.name.rpartition("-")[2].upper()
            parser.add_argument(f"--{flag.name}", action=action, metavar=metavar, help=f"{flag.help} Expects {flag.expected}.{default}")
    return parser


def _parse(arguments: Sequence[str]) -> dict[str, Any]:
    texts = vars(make_parser().parse_args(list(arguments)))
    values: dict[str, Any] = {}
    for flag in FLAGS:
        text = texts[flag.name.replace("-", "_")]
        if flag.name == _REPEATED:
            values[flag.name] = tuple(_value(flag, each) for each in text or ())
        else:
            values[flag.name] = _value(flag, flag.default if text is None else text)
    if values["prometheus-url"] is None:
        raise UsageError("--prometheus-url: not given; where is the Prometheus that scrapes the exporters?")
    if values["min-history"] > values["range"]:
        raise UsageError(
            f"--min-history {show_duration(values['min-history'])} is longer than --range {show_duration(values['range'])}: "
            "nothing could ever be advised; give a longer range, or ask for less history"
        )
    if values["step"] > values["range"]:
        raise UsageError(f"--step {show_duration(values['step'])} is longer than --range {show_duration(values['range'])}")
    return values


def _value(flag: Flag, text: str | None) -> Any:  # noqa: ANN401 - as the row says
    if text is None:
        return None
    try:
        return flag.parse(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--{flag.name}: {printable(text[:80])!r} is not {flag.expected}") from error


# --- what is shown ---


def render_json(rows: Sequence[Advice], window: Window, terms: Terms) -> str:
    """Answer the advice for scripts, in the words of the metrics. An amount that is not known is null."""
    document = {
        "time_seconds": window.end_seconds,
        "range_seconds": window.range_seconds,
        "step_seconds": window.step_seconds,
        "headroom_ratio": float(terms.headroom_ratio),
        "min_history_seconds": terms.min_history_seconds,
        "memory_freed_bytes": _freed(rows),
        "workloads": [
            {
                "cluster": row.workload.cluster,
                "namespace": row.workload.namespace,
                "owner_kind": row.workload.owner_kind,
                "owner_name": row.workload.owner_name,
                "model": row.device.model,
                "mig_profile": row.device.mig_profile,
                "gpu_memory_total_bytes": row.device.memory_total_bytes,
                "systems": row.systems,
                "pods": row.pods,
                "history_seconds": row.history_seconds,
                "memory_used_p99_bytes": row.memory_used_p99_bytes,
                "memory_used_peak_bytes": row.memory_used_max_bytes,
                "memory_limit_bytes": row.memory_limit_bytes,
                "memory_limit_ratio": row.memory_limit_ratio,
                "advised_memory_bytes": row.advised_memory_bytes,
                "advised_memory_ratio": row.advised_memory_ratio,
                "memory_freed_bytes": row.memory_freed_bytes,
                "notes": row.notes,
            }
            for row in rows
        ],
        "note": NOTE,
    }
    return json.dumps(document, indent=2) + "\n"


def render_table(rows: Sequence[Advice], window: Window, terms: Terms) -> str:
    """Answer the advice for a person: a line for each workload, what there is to say of it below, and sums."""
    until = datetime.fromtimestamp(window.end_seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    title = (
        f"{show_duration(window.range_seconds)} until {until}, headroom {float(terms.headroom_ratio):g}. "
        "MiB for each pod and GPU; FREED by all pods that run now."
    )
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = [*textwrap.wrap(title, _TEXT_WIDTH), "", _aligned(_HEAD, widths)]
    for row, line in zip(rows, cells[1:], strict=True):
        lines.append(_aligned(line, widths))
        about = "; ".join([f"{row.workload.owner_kind} on {_gpu(row)}", *row.notes])
        lines += textwrap.wrap(printable(about), _TEXT_WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([*lines, "", *_sums(rows), "", *textwrap.wrap(NOTE, _TEXT_WIDTH)]) + "\n"


_HEAD = ("WORKLOAD", "PODS", "ASKS", "MIB", "P99 PEAK", "NEEDS", "MIB", "FREED")
_TEXT_WIDTH = 80


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = zip(cells, widths, strict=True)
    return "  ".join([name[0].ljust(name[1]), *(cell.rjust(width) for cell, width in numbers)])


def _cells(row: Advice) -> tuple[str, ...]:
    workload = row.workload
    return (
        printable("/".join(name for name in (workload.cluster, workload.namespace, workload.owner_name) if name)),
        str(row.pods),
        _ratio(row.memory_limit_ratio),
        _mib(row.memory_limit_bytes),
        _mib(row.memory_used_p99_bytes),
        _ratio(row.advised_memory_ratio),
        _mib(row.advised_memory_bytes),
        _mib(row.memory_freed_bytes),
    )


def _gpu(row: Advice) -> str:
    device = row.device
    total = "of unknown size" if device.memory_total_bytes is None else f"{device.memory_total_bytes // MIB} MiB"
    return " ".join(part for part in (device.model.removeprefix("NVIDIA ") or "a GPU", device.mig_profile, total) if part)


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _mib(amount_bytes: int | None) -> str:
    return "-" if amount_bytes is None else f"{amount_bytes / MIB:.0f}"


def _freed(rows: Iterable[Advice]) -> int:
    return sum(row.memory_freed_bytes or 0 for row in rows)


def _sums(rows: Sequence[Advice]) -> Iterator[str]:
    known = [row for row in rows if row.memory_freed_bytes is not None]
    namespaces = sorted({row.workload.namespace for row in known})
    for namespace in namespaces if len(namespaces) > 1 else ():
        yield f"{printable(namespace)}: {_mib(_freed(row for row in known if row.workload.namespace == namespace))} MiB"
    more = [row for row in known if (row.memory_freed_bytes or 0) < 0]
    parts = f" ({_mib(_freed(known) - _freed(more))} freed, {_mib(-_freed(more))} more needed)" if more else ""
    yield f"Together: {_mib(_freed(known))} MiB would be freed{parts}."
