"""The last fifteen minutes of the node, a point for every step of fifteen seconds: what `/api/v1/history` answers.

A point is the last report of its step. A step without a report, or with one that did not know, is unknown: it stays a gap and is never
filled from its neighbours. The past holds no limits: those stand with their present values. Only the pods of the newest report are told,
so that a pod that is gone takes its past with it.

A History is immutable: the sampler replaces it with each report, and readers take one reference. Pure.
"""

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from exporter.node_json import API_VERSION, Json
from exporter.report import GpuReport, PodReport, Report

LEAST_STEP_SECONDS = 15.0
STEPS = 60
MAX_PODS = 1000
"""Pods on GPUs whose past is kept: one pod on two GPUs counts twice. The default of --max-series shows fewer."""

_UNKNOWN = math.nan  # inside of an array only
_RATIO_DIGITS = 4
# A sample may come late by less than half an interval; a shorter step would then tell of gaps that are none.
_STEP_INTERVALS = 1.5

PodKey = tuple[str, str]
"""Pod UID and GPU."""
Key = TypeVar("Key", str, PodKey)


@dataclass(frozen=True, slots=True)
class Point:
    """What is kept of one report. Two values for each key, in the keys' order."""

    step: int
    """Which step of the monotonic clock."""
    gpu_keys: tuple[str, ...]
    gpu_values: "array[float]"
    """Memory used in bytes, utilization as a ratio."""
    pod_keys: tuple[PodKey, ...]
    pod_values: "array[float]"
    """Memory used in bytes, SM utilization as a ratio."""


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """What there was, the oldest first, and the newest report. Two of them are never compared by what is in them."""

    step_seconds: float = LEAST_STEP_SECONDS
    points: tuple[Point, ...] = ()
    report: Report | None = None

    def add(self, report: Report) -> "History":
        """Answer the history with this report as its newest; it replaces an earlier one of the same step."""
        step = int(report.monotonic_seconds // self.step_seconds)
        kept = tuple(point for point in self.points if step - STEPS < point.step < step)
        point = _point(step, report, self.points[-1] if self.points else None)
        return History(self.step_seconds, (*kept, point), report)

    def steps_since(self, age_seconds: float) -> int:
        """Answer how many steps have passed since the newest report, when it is this old. A next one may still come in the first."""
        return int(age_seconds // self.step_seconds)


def begin_history(sample_interval_seconds: float) -> History:
    """Answer an empty history whose steps are long enough to have a sample each."""
    return History(max(LEAST_STEP_SECONDS, _STEP_INTERVALS * sample_interval_seconds))


def build_history(history: History, steps_since: int = 0) -> Json:
    """Answer the STEPS steps that end so many steps after that of the newest report; unknown is null."""
    report = history.report
    gpus: tuple[GpuReport, ...] = report.gpus if report else ()
    pods: tuple[PodReport, ...] = report.pods if report else ()
    last = history.points[-1].step + steps_since if history.points else 0
    gpu_series, pod_series = _Series[str](last), _Series[PodKey](last)
    for point in history.points:
        gpu_series.add(point.step, point.gpu_keys, point.gpu_values)
        pod_series.add(point.step, point.pod_keys, point.pod_values)
    return {
        "api_version": API_VERSION,
        "step_seconds": history.step_seconds,
        "steps": STEPS,
        "end_timestamp_seconds": report.time_seconds + steps_since * history.step_seconds if report else None,
        "gpus": [_gpu(row, gpu_series) for row in gpus],
        "pods": [_pod(row, pod_series) for row in pods[:MAX_PODS]],
        "pods_left_out": max(0, len(pods) - MAX_PODS),
    }


def _point(step: int, report: Report, before: Point | None) -> Point:
    gpu_keys = tuple(row.gpu.gpu_uuid for row in report.gpus)
    pods = report.pods[:MAX_PODS]
    pod_keys = tuple((row.pod_uid, row.gpu_uuid) for row in pods)
    gpu_values = (
        value
        for row in report.gpus
        for value in ((row.reading.memory_used_bytes, row.reading.utilization_ratio) if row.reading else (None, None))
    )
    pod_values = (value for row in pods for value in (row.memory_used_bytes, row.sm_utilization_ratio))
    return Point(
        step=step,
        # Equal keys are one object: the values are all that a point costs.
        gpu_keys=before.gpu_keys if before and before.gpu_keys == gpu_keys else gpu_keys,
        gpu_values=_pack(gpu_values),
        pod_keys=before.pod_keys if before and before.pod_keys == pod_keys else pod_keys,
        pod_values=_pack(pod_values),
    )


def _pack(values: Iterable[float | None]) -> "array[float]":
    return array("d", (_UNKNOWN if value is None else value for value in values))


class _Series(Generic[Key]):
    """Points turned into a list for each key; lives for one answer."""

    def __init__(self, last_step: int) -> None:
        self._first_step = last_step - STEPS + 1
        self._found: dict[Key, tuple[list[int | None], list[float | None]]] = {}

    def add(self, step: int, keys: Iterable[Key], values: "array[float]") -> None:
        """Enter one point."""
        position = step - self._first_step
        if not 0 <= position < STEPS:
            return
        for number, key in enumerate(keys):
            memory, ratio = values[2 * number], values[2 * number + 1]
            if key not in self._found:
                self._found[key] = ([None] * STEPS, [None] * STEPS)
            memories, ratios = self._found[key]
            memories[position] = None if math.isnan(memory) else int(memory)
            ratios[position] = None if math.isnan(ratio) else round(ratio, _RATIO_DIGITS)

    def of(self, key: Key) -> tuple[list[int | None], list[float | None]]:
        """Answer the two lists of a key."""
        return self._found.get(key, ([None] * STEPS, [None] * STEPS))


def _gpu(row: GpuReport, series: _Series[str]) -> Json:
    memory, utilization = series.of(row.gpu.gpu_uuid)
    return {
        "gpu_uuid": row.gpu.gpu_uuid,
        "memory_total_bytes": row.gpu.memory_total_bytes,
        "memory_used_bytes": memory,
        "utilization_ratio": utilization,
    }


def _pod(row: PodReport, series: _Series[PodKey]) -> Json:
    memory, utilization = series.of((row.pod_uid, row.gpu_uuid))
    return {
        "namespace": row.namespace,
        "pod": row.pod,
        "pod_uid": row.pod_uid,
        "gpu_uuid": row.gpu_uuid,
        "memory_limit_bytes": row.limits.memory_bytes,
        "compute_limit_ratio": row.limits.compute_ratio,
        "memory_used_bytes": memory,
        "sm_utilization_ratio": utilization,
    }
