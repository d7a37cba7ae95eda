"""How busy a GPU instance of MIG is, by the driver's GPM: the mean between two samples of its counters. Hopper and later.

NVML's own utilization says nothing of MIG devices. GPM's counters are a GPU instance's, whoever works on it, so what they say belongs to
the GPU and never to one container. https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmFunctions.html
"""

import weakref
from dataclasses import dataclass
from typing import Any, TypeAlias

# pynvml has no types.
Library: TypeAlias = Any
Untyped: TypeAlias = Any

_MAX_PERCENT = 100


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class GpmSample:
    """A sample of one GPU instance's counters, in memory of the library's that is freed when no one holds the sample any more."""

    buffer: Untyped
    gpu_instance_id: int
    read_number: int
    """Of the reading that took it."""


def hold_sample(library: Library, buffer: Untyped, gpu_instance_id: int, read_number: int) -> GpmSample:
    """Answer the sample that lives in a buffer of nvmlGpmSampleAlloc, which is freed with it, on whatever thread lets go of it last."""
    sample = GpmSample(buffer, gpu_instance_id, read_number)
    # Not at the interpreter's end: then the library is shut down.
    weakref.finalize(sample, _free, library, buffer).atexit = False
    return sample


def _free(library: Library, buffer: Untyped) -> None:
    try:
        library.nvmlGpmSampleFree(buffer)
    except library.NVMLError:
        # A library that has been shut down frees nothing more, and the process is about to end.
        return


def ask_for_sm_utilization(library: Library, earlier: GpmSample, later: GpmSample) -> Untyped:
    """Answer what nvmlGpmMetricsGet is to be asked for the mean SM utilization between two samples."""
    request = library.c_nvmlGpmMetricsGet_t()
    request.version = library.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = 1
    request.sample1 = earlier.buffer
    request.sample2 = later.buffer
    request.metrics[0].metricId = library.NVML_GPM_METRIC_SM_UTIL
    return request


def parse_ratio(percent: float) -> float | None:
    """Answer a share of time from 0 to 1; None for what cannot be one (NaN too)."""
    return percent / _MAX_PERCENT if 0 <= percent <= _MAX_PERCENT else None
