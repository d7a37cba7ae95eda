"""What the driver says, read by the real pynvml from a C library that stands in for libnvidia-ml.so.1."""

import ctypes
import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pynvml
import pytest
from nvml_stand_in.stand_in import (
    ARGUMENT_VERSION_MISMATCH,
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GIB,
    GPU_IS_LOST,
    HANG,
    INVALID_ARGUMENT,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    TIMEOUT,
    UNINITIALIZED,
    UNKNOWN,
    Busy,
    Device,
    Mig,
    Process,
    Sample,
    delay,
    insufficient,
)

from exporter.snapshot import Gpu, GpuProcess, GpuReading, ProcessBusy
from exporter.sources import FatalSourceError, SourceError
from exporter.sources.nvml import NvmlSource
from exporter.sources.nvml_device import parse_mig_profile

A = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
B = "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"
C = "GPU-4f0b8c15-8d3e-4b57-a9c2-1e6d70f2a3b8"
MIG_1 = "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"
MIG_2 = "MIG-41d7c0a8-2e93-5c64-b7f5-e90a3b6d8c21"

# Microseconds of a driver's clock, which is no clock that the tests read.
T = 5_000_000_000
SECOND = 1_000_000

NEWER = "nvmlDeviceGetProcessesUtilizationInfo"
OLDER = "nvmlDeviceGetProcessUtilization"
LISTS = [
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
]


class HandClock:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.seconds = 1000.0

    def time(self):
        return 1_800_000_000.0 + self.seconds

    def monotonic(self):
        return self.seconds

    def wait(self, event, timeout_seconds):
        return event.wait(timeout_seconds)


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def open_source(monkeypatch, nvml_library, stand_in, clock):
    """Answer a function that makes a source over a library that lacks the given symbols.

    At the end whatever hangs is healed, the sources are closed, and every nvmlInit must have had its nvmlShutdown.
    """
    for name, value in stand_in.environment.items():
        monkeypatch.setenv(name, value)
    sources = []

    def make(*without, **arguments):
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(nvml_library(*without))))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        sources.append(NvmlSource(clock=clock, **{"device_deadline_seconds": 5.0, **arguments}))
        return sources[-1]

    yield make
    stand_in.write()
    wait_for_threads()
    for source in sources:
        source.close()
    assert stand_in.open_initialisations() == 0
    assert stand_in.held_samples() == 0


@pytest.fixture
def source(open_source):
    return open_source()


def nvml_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("nvml-")]


def wait_for_threads(*names):
    """Wait until these are the only threads: one whose answer is there may live a moment longer."""
    patience = time.monotonic() + 5
    while (now := sorted(thread.name for thread in nvml_threads())) != sorted(names) and time.monotonic() < patience:
        time.sleep(0.005)
    assert now == sorted(names)


def gpu_of(reading, uuid=A):
    return next(gpu for gpu in reading.gpus if gpu.gpu.gpu_uuid == uuid)


def seconds_of(call):
    began = time.monotonic()
    call()
    return time.monotonic() - began


# --- a GPU that is well ---


def test_a_gpu_is_read_with_all_its_facts(source, stand_in):
    stand_in.write(
        Device(
            uuid=A,
            minor=3,
            bus="00000000:41:00.0",
            memory_total=85899345920,
            memory_reserved=671088640,
            memory_used=10737418240,
            utilization=45,
            processes=(Process(pid=4242, memory=10 * GIB),),
        )
    )
    reading = source.read()
    assert reading.driver_version == "580.65.06"
    assert reading.gpus_unidentified == 0
    assert reading.dropped_samples == {}
    assert reading.gpus == (
        GpuReading(
            gpu=Gpu(
                gpu_uuid=A,
                index=0,
                minor=3,
                model="NVIDIA A100-SXM4-80GB",
                pci_bus_id="00000000:41:00.0",
                memory_total_bytes=85899345920,
            ),
            up=True,
            memory_used_bytes=10737418240,
            memory_reserved_bytes=671088640,
            utilization_ratio=0.45,
            processes=(GpuProcess(pid=4242, memory_used_bytes=10 * GIB, kinds=frozenset({"compute"})),),
            busy=(),
        ),
    )


def test_a_node_without_gpus_is_no_error(source, stand_in):
    stand_in.write()
    assert source.read().gpus == ()


def test_gpus_stand_in_the_drivers_order(source, stand_in):
    stand_in.write(Device(uuid=B), Device(uuid=A))
    assert [(gpu.gpu.gpu_uuid, gpu.gpu.index) for gpu in source.read().gpus] == [(B, 0), (A, 1)]


def test_a_gpu_that_appears_is_in_the_next_reading_and_one_that_goes_is_not(source, stand_in):
    stand_in.write(Device(uuid=A))
    source.read()
    stand_in.write(Device(uuid=A), Device(uuid=B))
    assert [gpu.gpu.gpu_uuid for gpu in source.read().gpus] == [A, B]
    stand_in.write(Device(uuid=B))
    assert [(gpu.gpu.gpu_uuid, gpu.gpu.index) for gpu in source.read().gpus] == [(B, 0)]


def test_the_calls_of_a_reading_are_a_function_of_the_gpus_and_not_of_their_processes(source, stand_in):
    def calls_of_a_reading(processes):
        stand_in.write(Device(uuid=A, processes=processes), Device(uuid=B, processes=processes))
        stand_in.forget_calls()
        source.read()
        return sorted(call[0] for call in stand_in.calls())

    source_is_warm = calls_of_a_reading((Process(pid=1),))
    assert len(source_is_warm) > 0
    few = calls_of_a_reading((Process(pid=1),))
    many = calls_of_a_reading(tuple(Process(pid=pid) for pid in range(1, 60)))
    assert few == many
    assert few.count("nvmlDeviceGetCount_v2") == 1
    assert few.count("nvmlDeviceGetHandleByIndex_v2") == 2
    assert few.count("nvmlDeviceGetUUID") == 2
    assert "nvmlDeviceGetName" not in few
    assert "nvmlInitWithFlags" not in few
    # 1 for the library; for each GPU handle, uuid, memory, rates, samples, number of MIG devices, and three lists, of which the one that
    # is not empty takes a question for its size more.
    assert len(few) == 1 + 2 * (6 + 3 + 1)


# --- memory ---


def test_used_is_without_what_the_driver_reserves(source, stand_in):
    stand_in.write(Device(uuid=A, memory_total=80 * GIB, memory_reserved=GIB, memory_used=3 * GIB))
    gpu = source.read().gpus[0]
    assert (gpu.memory_used_bytes, gpu.memory_reserved_bytes) == (3 * GIB, GIB)


@pytest.mark.parametrize("error", [NOT_SUPPORTED, ARGUMENT_VERSION_MISMATCH, FUNCTION_NOT_FOUND, INVALID_ARGUMENT])
def test_a_driver_without_the_newer_memory_function_is_asked_the_older_one(source, stand_in, error):
    device = Device(uuid=A, memory_total=80 * GIB, memory_reserved=GIB, memory_used=3 * GIB, calls={"nvmlDeviceGetMemoryInfo_v2": error})
    stand_in.write(device)
    gpu = source.read().gpus[0]
    assert (gpu.gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.memory_reserved_bytes) == (80 * GIB, 4 * GIB, None)


def test_a_library_without_the_newer_memory_function_is_asked_the_older_one(open_source, stand_in):
    source = open_source("nvmlDeviceGetMemoryInfo_v2")
    stand_in.write(Device(uuid=A, memory_total=80 * GIB, memory_reserved=GIB, memory_used=3 * GIB))
    gpu = source.read().gpus[0]
    assert (gpu.gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.memory_reserved_bytes) == (80 * GIB, 4 * GIB, None)


def test_unified_memory_has_no_total_and_still_processes_with_memory(source, stand_in):
    stand_in.write(Device(uuid=A, memory_total=None, processes=(Process(pid=7, memory=200 * GIB),)))
    gpu = source.read().gpus[0]
    assert gpu.up
    assert (gpu.gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.memory_reserved_bytes) == (None, None, None)
    assert [process.memory_used_bytes for process in gpu.processes] == [200 * GIB]


# --- process lists ---


def test_a_process_in_several_lists_is_one_process_with_its_memory_once(source, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7, memory=3 * GIB, lists=("compute", "mps", "graphics")),)))
    assert source.read().gpus[0].processes == (
        GpuProcess(pid=7, memory_used_bytes=3 * GIB, kinds=frozenset({"compute", "mps", "graphics"})),
    )


def test_a_process_in_the_mps_list_alone_is_listed(source, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7, memory=GIB, lists=("mps",)),)))
    assert source.read().gpus[0].processes == (GpuProcess(pid=7, memory_used_bytes=GIB, kinds=frozenset({"mps"})),)


def test_memory_that_the_driver_hides_is_unknown_and_not_0(source, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7, memory=None), Process(pid=8, memory=0))))
    assert [(process.pid, process.memory_used_bytes) for process in source.read().gpus[0].processes] == [(7, None), (8, 0)]


def test_memory_hidden_in_one_list_and_told_in_another_is_known(source, stand_in):
    stand_in.write(
        Device(uuid=A, processes=(Process(pid=7, memory=None), Process(pid=7, memory=GIB, lists=("mps",)))),
        Device(uuid=B, processes=(Process(pid=7, memory=GIB), Process(pid=7, memory=None, lists=("mps",)))),
    )
    reading = source.read()
    assert [process.memory_used_bytes for process in gpu_of(reading, A).processes] == [GIB]
    assert [process.memory_used_bytes for process in gpu_of(reading, B).processes] == [GIB]


def test_of_two_numbers_for_one_process_the_larger_is_its_memory(source, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7, memory=GIB), Process(pid=7, memory=2 * GIB, lists=("mps",)))))
    assert [process.memory_used_bytes for process in source.read().gpus[0].processes] == [2 * GIB]


def test_a_library_with_the_second_version_of_the_lists_is_read(open_source, stand_in):
    source = open_source(*LISTS)
    stand_in.write(Device(uuid=A, processes=(Process(pid=7, memory=GIB, lists=("compute", "graphics", "mps")),)))
    assert source.read().gpus[0].processes == (GpuProcess(pid=7, memory_used_bytes=GIB, kinds=frozenset({"compute", "graphics", "mps"})),)


def test_a_library_without_any_mps_list_still_lists_the_others(open_source, stand_in):
    source = open_source("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2")
    stand_in.write(Device(uuid=A, processes=(Process(pid=7, memory=GIB, lists=("compute", "mps")),)))
    assert source.read().gpus[0].processes == (GpuProcess(pid=7, memory_used_bytes=GIB, kinds=frozenset({"compute"})),)


@pytest.mark.parametrize("function", LISTS)
def test_a_list_that_grows_between_two_calls_is_asked_for_again(source, stand_in, function):
    kinds = ("compute", "graphics", "mps")
    stand_in.write(Device(uuid=A, processes=(Process(pid=7, lists=kinds),), calls={function: insufficient(3)}))
    assert source.read().gpus[0].processes == (GpuProcess(pid=7, memory_used_bytes=GIB, kinds=frozenset(kinds)),)


def test_a_list_that_grows_without_end_is_unknown_this_time(source, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7),), calls={LISTS[0]: insufficient(4)}))
    assert source.read().gpus[0].processes is None
    assert source.read().gpus[0].processes is not None


@pytest.mark.parametrize("function", LISTS)
@pytest.mark.parametrize("error", [NO_PERMISSION, UNKNOWN])
def test_a_list_that_is_refused_leaves_the_processes_unknown_and_the_gpu_up(source, stand_in, function, error):
    processes = (Process(pid=7, lists=("compute", "graphics", "mps")),)
    stand_in.write(Device(uuid=A, utilization=45, memory_used=GIB, processes=processes, calls={function: error}))
    gpu = source.read().gpus[0]
    assert (gpu.up, gpu.processes, gpu.memory_used_bytes, gpu.utilization_ratio) == (True, None, GIB, 0.45)


@pytest.mark.parametrize("function", LISTS[1:])
@pytest.mark.parametrize("error", [NOT_SUPPORTED, INVALID_ARGUMENT])
def test_a_device_without_graphics_or_mps_has_no_such_processes(source, stand_in, function, error):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7),), calls={function: error}))
    assert [process.pid for process in source.read().gpus[0].processes] == [7]


def test_a_device_without_a_compute_list_has_unknown_processes(source, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7, lists=("graphics",)),), calls={LISTS[0]: NOT_SUPPORTED}))
    assert source.read().gpus[0].processes is None


# --- lists that cannot be believed ---


def test_a_list_with_records_of_another_size_is_dropped_whole_and_counted(source, stand_in):
    processes = (Process(pid=41001, memory=10 * GIB), Process(pid=41002, memory=5 * GIB))
    stand_in.write(Device(uuid=A, record_size=32, processes=processes), Device(uuid=B, processes=(Process(pid=7),)))
    reading = source.read()
    assert gpu_of(reading, A).up
    assert gpu_of(reading, A).processes is None
    assert reading.dropped_samples == {"scrambled_list": 1}
    assert [process.pid for process in gpu_of(reading, B).processes] == [7]


def test_a_single_record_of_another_size_is_read_right(source, stand_in):
    stand_in.write(Device(uuid=A, record_size=32, processes=(Process(pid=41001, memory=10 * GIB),)))
    reading = source.read()
    assert [(process.pid, process.memory_used_bytes) for process in reading.gpus[0].processes] == [(41001, 10 * GIB)]
    assert reading.dropped_samples == {}


@pytest.mark.parametrize("pid", [0, 40000, 4294967295])
def test_a_list_with_a_pid_that_cannot_be_is_dropped_whole(open_source, stand_in, pid):
    source = open_source(pid_max=32768)
    stand_in.write(Device(uuid=A, processes=(Process(pid=7), Process(pid=pid))))
    reading = source.read()
    assert reading.gpus[0].processes is None
    assert reading.dropped_samples == {"scrambled_list": 1}


def test_the_highest_pid_of_the_system_is_believed(open_source, stand_in):
    source = open_source(pid_max=32768)
    stand_in.write(Device(uuid=A, processes=(Process(pid=32768),)))
    assert [process.pid for process in source.read().gpus[0].processes] == [32768]


def test_a_list_with_more_memory_than_the_gpu_has_is_dropped_whole(source, stand_in):
    stand_in.write(Device(uuid=A, memory_total=80 * GIB, processes=(Process(pid=7), Process(pid=8, memory=80 * GIB + 1))))
    reading = source.read()
    assert reading.gpus[0].processes is None
    assert reading.dropped_samples == {"scrambled_list": 1}


def test_a_process_that_fills_the_gpu_is_believed(source, stand_in):
    stand_in.write(Device(uuid=A, memory_total=80 * GIB, processes=(Process(pid=8, memory=80 * GIB),)))
    assert [process.memory_used_bytes for process in source.read().gpus[0].processes] == [80 * GIB]


def test_each_scrambled_list_counts_of_its_reading_only(source, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=0, lists=("compute", "mps")),)))
    assert source.read().dropped_samples == {"scrambled_list": 2}
    stand_in.write(Device(uuid=A, processes=(Process(pid=7),)))
    reading = source.read()
    assert reading.dropped_samples == {}
    assert [process.pid for process in reading.gpus[0].processes] == [7]


def test_a_scrambled_list_is_said_once(source, stand_in, caplog):
    stand_in.write(Device(uuid=A, processes=(Process(pid=0),)))
    for _ in range(3):
        source.read()
    assert sum("state=scrambled" in record.getMessage() for record in caplog.records) == 1


# --- functions that the driver lacks, and errors of the device ---


@pytest.mark.parametrize("error", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN, FUNCTION_NOT_FOUND])
def test_an_error_of_the_rates_costs_the_rates(source, stand_in, error):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7),), calls={"nvmlDeviceGetUtilizationRates": error}))
    gpu = source.read().gpus[0]
    assert (gpu.up, gpu.utilization_ratio, len(gpu.processes), gpu.busy) == (True, None, 1, ())


@pytest.mark.parametrize(
    ("function", "fact"),
    [("nvmlDeviceGetName", "model"), ("nvmlDeviceGetMinorNumber", "minor"), ("nvmlDeviceGetPciInfo_v3", "pci_bus_id")],
)
def test_an_error_of_a_fact_costs_that_fact_until_it_is_told(source, stand_in, function, fact):
    whole = Device(uuid=A, minor=2)
    stand_in.write(replace(whole, calls={function: NOT_SUPPORTED}))
    gpu = source.read().gpus[0]
    assert gpu.up
    assert getattr(gpu.gpu, fact) is None
    stand_in.write(whole)
    assert getattr(source.read().gpus[0].gpu, fact) is not None


def test_a_function_that_is_not_supported_is_logged_once(source, stand_in, caplog):
    caplog.set_level(logging.INFO)
    stand_in.write(Device(uuid=A, calls={"nvmlDeviceGetUtilizationRates": NOT_SUPPORTED}))
    for _ in range(3):
        source.read()
    stand_in.write(Device(uuid=A))
    source.read()
    lines = [record.getMessage() for record in caplog.records if "nvmlDeviceGetUtilizationRates" in record.getMessage()]
    assert lines == [
        f"gpu_uuid={A} function=nvmlDeviceGetUtilizationRates state=unavailable reason='Not Supported'",
        f"gpu_uuid={A} function=nvmlDeviceGetUtilizationRates state=available",
    ]


DOWN_BY_ANY_FUNCTION = [GPU_IS_LOST, RESET_REQUIRED, TIMEOUT]
DOWN_BY_AN_ESSENTIAL_FUNCTION = [*DOWN_BY_ANY_FUNCTION, UNKNOWN, NO_PERMISSION]
ESSENTIAL = ["*", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo_v2"]
OTHER = ["nvmlDeviceGetUtilizationRates", *LISTS, NEWER, "nvmlDeviceGetMaxMigDeviceCount"]


@pytest.mark.parametrize(
    ("function", "error"),
    [(function, error) for function in ESSENTIAL for error in DOWN_BY_AN_ESSENTIAL_FUNCTION]
    + [(function, error) for function in OTHER for error in DOWN_BY_ANY_FUNCTION],
)
def test_an_error_of_a_gpu_costs_that_gpu_and_its_facts_are_remembered(source, stand_in, function, error):
    well, other = Device(uuid=A, minor=4, memory_used=GIB), Device(uuid=B, processes=(Process(pid=7),))
    stand_in.write(well, other)
    before = source.read()
    stand_in.write(replace(well, calls={function: error}), other)
    reading = source.read()
    assert gpu_of(reading, A) == GpuReading(gpu=gpu_of(before, A).gpu, up=False)
    assert gpu_of(reading, A).gpu.minor == 4
    assert gpu_of(reading, B).up
    assert [process.pid for process in gpu_of(reading, B).processes] == [7]
    assert reading.gpus_unidentified == 0
    stand_in.write(well, other)
    assert gpu_of(source.read(), A).memory_used_bytes == GIB


@pytest.mark.parametrize("function", ["*", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"])
@pytest.mark.parametrize("error", [GPU_IS_LOST, NO_PERMISSION, UNKNOWN])
def test_a_device_that_never_gave_a_uuid_is_counted(source, stand_in, function, error):
    stand_in.write(Device(uuid=A, calls={function: error}), Device(uuid=B))
    reading = source.read()
    assert [gpu.gpu.gpu_uuid for gpu in reading.gpus] == [B]
    assert reading.gpus_unidentified == 1


def test_a_device_that_gave_nothing_but_its_uuid_is_down_under_its_uuid(source, stand_in):
    stand_in.write(Device(uuid=A, calls={"nvmlDeviceGetMemoryInfo_v2": UNKNOWN}), Device(uuid=B))
    reading = source.read()
    assert gpu_of(reading, A) == GpuReading(gpu=Gpu(gpu_uuid=A, index=0), up=False)
    assert reading.gpus_unidentified == 0


def test_a_device_that_fails_in_the_place_of_another_is_not_taken_for_it(source, stand_in):
    stand_in.write(Device(uuid=A), Device(uuid=B))
    source.read()
    stand_in.write(Device(uuid="GPU-new", calls={"*": GPU_IS_LOST}), Device(uuid=A))
    reading = source.read()
    assert [(gpu.gpu.gpu_uuid, gpu.gpu.index, gpu.up) for gpu in reading.gpus] == [(A, 1, True)]
    assert reading.gpus_unidentified == 1


def test_a_lost_gpu_is_logged_when_it_is_lost_and_when_it_is_back(source, stand_in, caplog):
    caplog.set_level(logging.INFO)
    lost = Device(uuid=A, calls={"*": GPU_IS_LOST})
    for devices in [(Device(uuid=A),), (lost,), (lost,), (lost,), (Device(uuid=A),), (Device(uuid=A),)]:
        stand_in.write(*devices, Device(uuid=B))
        source.read()
    lines = [record.getMessage() for record in caplog.records if "state=" in record.getMessage()]
    assert lines == [f"gpu_uuid={A} state=down reason='GPU is lost'", f"gpu_uuid={A} state=up"]


# --- MIG ---


def mig_gpu(**changes):
    migs = (
        Mig(
            uuid=MIG_1,
            slot=0,
            gpu_instance=1,
            memory_total=40192 * 2**20,
            memory_reserved=GIB,
            processes=(Process(pid=51001, memory=12 * GIB),),
        ),
        Mig(
            uuid=MIG_2,
            slot=2,
            gpu_instance=9,
            name="NVIDIA A100-SXM4-80GB MIG 1g.10gb",
            memory_total=9728 * 2**20,
            processes=(Process(pid=51002, memory=GIB), Process(pid=51003, memory=GIB, lists=("compute", "mps"))),
        ),
    )
    return replace(Device(uuid=A, minor=5, memory_total=80 * GIB, memory_used=14 * GIB, utilization=45, migs=migs), **changes)


def test_mig_devices_are_gpus_with_a_parent(source, stand_in):
    stand_in.write(mig_gpu())
    parent, first, second = source.read().gpus
    assert parent.gpu.gpu_uuid == A
    assert first.gpu == Gpu(
        gpu_uuid=MIG_1,
        index=0,
        minor=5,
        model="NVIDIA A100-SXM4-80GB",
        pci_bus_id="00000000:07:00.0",
        parent_gpu_uuid=A,
        mig_profile="3g.40gb",
        gpu_instance_id=1,
        compute_instance_id=0,
        memory_total_bytes=40192 * 2**20,
    )
    assert (first.up, first.memory_used_bytes, first.memory_reserved_bytes) == (True, 12 * GIB, GIB)
    assert (second.gpu.gpu_uuid, second.gpu.index, second.gpu.mig_profile, second.gpu.gpu_instance_id) == (MIG_2, 2, "1g.10gb", 9)


def test_a_process_of_a_mig_device_is_not_counted_on_the_parent_too(source, stand_in):
    stand_in.write(mig_gpu())
    parent, first, second = source.read().gpus
    assert parent.processes == ()
    assert [process.pid for process in first.processes] == [51001]
    assert [(process.pid, process.memory_used_bytes) for process in second.processes] == [(51002, GIB), (51003, GIB)]


def test_a_process_of_a_mig_parent_that_names_no_instance_is_the_parents(source, stand_in):
    stand_in.write(mig_gpu(processes=(Process(pid=99, memory=GIB),)))
    assert [process.pid for process in source.read().gpus[0].processes] == [99]


def test_the_time_of_mig_devices_and_their_parent_is_unknown_and_not_0(source, stand_in):
    stand_in.write(mig_gpu())
    for reading in (source.read(), source.read()):
        assert [(gpu.up, gpu.busy, gpu.utilization_ratio) for gpu in reading.gpus] == [(True, None, None)] * 3


def test_a_mig_parent_whose_lists_are_forbidden_is_up_and_its_mig_devices_are_read(source, stand_in):
    stand_in.write(mig_gpu(calls=dict.fromkeys(LISTS, NO_PERMISSION)))
    parent, first, second = source.read().gpus
    assert (parent.up, parent.processes) == (True, None)
    assert [len(first.processes), len(second.processes)] == [1, 2]


def test_mig_devices_that_share_a_gpu_instance_keep_their_own_processes(source, stand_in):
    both = (Process(pid=1, instance=(1, 0)), Process(pid=2, instance=(1, 1)))
    migs = (
        Mig(uuid=MIG_1, slot=0, gpu_instance=1, compute_instance=0, processes=both),
        Mig(uuid=MIG_2, slot=1, gpu_instance=1, compute_instance=1, processes=both),
    )
    stand_in.write(Device(uuid=A, migs=migs))
    parent, first, second = source.read().gpus
    assert parent.processes == ()
    assert [process.pid for process in first.processes] == [1]
    assert [process.pid for process in second.processes] == [2]


def test_an_error_of_a_mig_device_costs_that_mig_device(source, stand_in):
    well = mig_gpu()
    stand_in.write(well)
    before = source.read().gpus[2]
    broken = replace(well.migs[1], calls={"nvmlDeviceGetMemoryInfo_v2": UNKNOWN})
    stand_in.write(replace(well, migs=(well.migs[0], broken)))
    parent, first, second = source.read().gpus
    assert (parent.up, first.up) == (True, True)
    assert second == GpuReading(gpu=before.gpu, up=False)


def test_a_mig_device_without_a_uuid_is_counted(source, stand_in):
    well = mig_gpu()
    broken = replace(well.migs[1], calls={"nvmlDeviceGetUUID": UNKNOWN})
    stand_in.write(replace(well, migs=(well.migs[0], broken)))
    reading = source.read()
    assert [gpu.gpu.gpu_uuid for gpu in reading.gpus] == [A, MIG_1]
    assert reading.gpus_unidentified == 1


def test_a_lost_parent_takes_its_mig_devices_down_with_it(source, stand_in):
    stand_in.write(mig_gpu(), Device(uuid=B))
    before = source.read()
    stand_in.write(mig_gpu(calls={"*": GPU_IS_LOST}), Device(uuid=B))
    reading = source.read()
    assert reading.gpus[:3] == tuple(GpuReading(gpu=gpu.gpu, up=False) for gpu in before.gpus[:3])
    assert reading.gpus[3].up


def test_mig_devices_that_are_made_anew_show_at_the_next_reading(source, stand_in):
    stand_in.write(Device(uuid=A))
    assert [gpu.gpu.gpu_uuid for gpu in source.read().gpus] == [A]
    stand_in.write(mig_gpu())
    assert [gpu.gpu.gpu_uuid for gpu in source.read().gpus] == [A, MIG_1, MIG_2]
    # Instances of another size with the ids, and so the uuid, of the earlier ones.
    other = replace(mig_gpu().migs[0], name="NVIDIA A100-SXM4-80GB MIG 4g.40gb", memory_total=39 * GIB)
    stand_in.write(mig_gpu(migs=(other,)))
    reading = source.read()
    assert [gpu.gpu.gpu_uuid for gpu in reading.gpus] == [A, MIG_1]
    assert (reading.gpus[1].gpu.mig_profile, reading.gpus[1].gpu.memory_total_bytes) == ("4g.40gb", 39 * GIB)


# --- GPM: how busy GPU instances are ---


def gpm_gpu(first, second=(0, 0), **changes):
    """A Hopper's MIG devices with the counters of their GPU instances."""
    well = mig_gpu(has_gpm=True)
    return replace(well, migs=(replace(well.migs[0], gpm_counters=first), replace(well.migs[1], gpm_counters=second)), **changes)


def sm_utilizations(reading):
    return [gpu.sm_utilization_ratio for gpu in reading.gpus]


def test_how_busy_a_gpu_instance_was_is_the_mean_between_two_readings_and_of_no_other_instance(source, stand_in):
    stand_in.write(gpm_gpu((100, 1000), (5, 1000)))
    assert sm_utilizations(source.read()) == [None, None, None]
    stand_in.write(gpm_gpu((350, 2000), (5, 2000)))
    assert sm_utilizations(source.read()) == [None, 0.25, 0.0]
    stand_in.write(gpm_gpu((1350, 3000), (505, 3000)))
    assert sm_utilizations(source.read()) == [None, 1.0, 0.5]


def test_gpm_is_asked_of_the_parent_by_the_gpu_instance(source, stand_in):
    stand_in.write(gpm_gpu((0, 0)))
    source.read()
    assert stand_in.calls("nvmlGpmMigSampleGet") == [("nvmlGpmMigSampleGet", A, "1"), ("nvmlGpmMigSampleGet", A, "9")]


def test_gpm_samples_are_freed_but_for_the_latest_of_each_mig_device(source, stand_in):
    for number in range(6):
        stand_in.write(gpm_gpu((number, number + 1), (0, number + 1)))
        source.read()
        assert stand_in.held_samples() == 2
    source.close()
    assert stand_in.held_samples() == 0
    assert len(stand_in.calls("nvmlGpmSampleFree")) == 12


def test_a_gpu_without_gpm_says_so_once_and_is_not_asked_for_samples(source, stand_in, caplog):
    caplog.set_level(logging.INFO)
    stand_in.write(mig_gpu())
    assert [sm_utilizations(source.read()) for _ in range(3)] == [[None, None, None]] * 3
    assert [record.getMessage() for record in caplog.records if "Gpm" in record.getMessage()] == [
        f"gpu_uuid={A} function=nvmlGpmQueryDeviceSupport state=unavailable reason='this GPU has no GPM: Hopper and later have'"
    ]
    assert stand_in.calls("nvmlGpmSampleAlloc") == []


def test_a_library_without_gpm_costs_its_numbers_only(open_source, stand_in):
    source = open_source("nvmlGpmQueryDeviceSupport")
    stand_in.write(gpm_gpu((0, 0)))
    reading = source.read()
    assert sm_utilizations(reading) == [None, None, None]
    assert all(gpu.up for gpu in reading.gpus)


def test_a_gpu_without_mig_devices_is_not_asked_for_gpm(source, stand_in):
    stand_in.write(Device(uuid=A, has_gpm=True))
    assert sm_utilizations(source.read()) == [None]
    assert stand_in.calls("nvmlGpmQueryDeviceSupport") == []


def test_a_gpm_sample_that_is_refused_costs_its_number_and_the_next_pair_gives_one_again(source, stand_in):
    stand_in.write(gpm_gpu((100, 1000), (0, 1000)))
    source.read()
    stand_in.write(gpm_gpu((200, 2000), (0, 2000), calls={"nvmlGpmMigSampleGet": NO_PERMISSION}))
    reading = source.read()
    assert sm_utilizations(reading) == [None, None, None]
    assert all(gpu.up for gpu in reading.gpus)
    stand_in.write(gpm_gpu((300, 3000), (0, 3000)))
    assert sm_utilizations(source.read()) == [None, None, None]
    stand_in.write(gpm_gpu((400, 4000), (500, 4000)))
    assert sm_utilizations(source.read()) == [None, 0.1, 0.5]


def test_a_gpm_sample_from_before_an_outage_is_no_beginning_of_a_mean(source, stand_in):
    stand_in.write(gpm_gpu((100, 1000), (0, 1000)))
    source.read()
    stand_in.write(gpm_gpu((100, 1000), (0, 1000), calls={"*": GPU_IS_LOST}))
    assert not any(gpu.up for gpu in source.read().gpus)
    stand_in.write(gpm_gpu((200, 2000), (0, 2000)))
    assert sm_utilizations(source.read()) == [None, None, None]
    stand_in.write(gpm_gpu((600, 3000), (0, 3000)))
    assert sm_utilizations(source.read()) == [None, 0.4, 0.0]


@pytest.mark.parametrize("counters", [(50, 2000), (3000, 2000), (100, 1000)], ids=["below 0", "above 100 percent", "no number"])
def test_a_gpm_utilization_that_cannot_be_is_dropped(source, stand_in, counters):
    stand_in.write(gpm_gpu((100, 1000), (0, 1000)))
    source.read()
    stand_in.write(gpm_gpu(counters, (0, 2000)))
    reading = source.read()
    assert sm_utilizations(reading) == [None, None, 0.0]
    assert reading.dropped_samples == {"bad_utilization": 1}


def test_a_gpm_metric_that_is_an_error_of_its_own_is_unknown(source, stand_in, caplog):
    caplog.set_level(logging.INFO)
    stand_in.write(gpm_gpu((0, 0), (0, 0)))
    source.read()
    stand_in.write(gpm_gpu((-1, -1), (1, 4)))
    assert sm_utilizations(source.read()) == [None, None, 0.25]
    assert f"gpu_uuid={MIG_1} function=nvmlGpmMetricsGet state=unavailable" in caplog.text


def test_gpm_samples_are_freed_before_the_library_is_shut_down_and_not_used_after(source, stand_in):
    stand_in.write(gpm_gpu((100, 1000), (0, 1000)))
    source.read()
    stand_in.forget_calls()
    assert source.release()
    assert [call[0] for call in stand_in.calls()] == ["nvmlGpmSampleFree", "nvmlGpmSampleFree", "nvmlShutdown"]
    stand_in.write(gpm_gpu((300, 2000), (0, 2000)))
    assert sm_utilizations(source.read()) == [None, None, None]
    stand_in.write(gpm_gpu((400, 3000), (0, 3000)))
    assert sm_utilizations(source.read()) == [None, 0.1, 0.0]


def test_the_gpm_sample_of_a_call_that_returns_too_late_is_freed(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE)
    stand_in.write(gpm_gpu((0, 0), calls={"nvmlDeviceGetMPSComputeRunningProcesses_v3": HANG}))
    source.read()
    assert stand_in.held_samples() == 2
    stand_in.write(mig_gpu())
    wait_for_threads()
    source.read()
    assert stand_in.held_samples() == 0


def test_the_uuid_of_a_mig_device_of_an_old_driver_is_taken_as_it_is(source, stand_in):
    uuid = f"MIG-{A}/7/0"
    stand_in.write(Device(uuid=A, migs=(Mig(uuid=uuid, gpu_instance=7, name="A100-SXM4-40GB MIG 1g.5gb"),)))
    gpu = source.read().gpus[1].gpu
    assert (gpu.gpu_uuid, gpu.parent_gpu_uuid, gpu.mig_profile, gpu.gpu_instance_id) == (uuid, A, "1g.5gb", 7)


def test_a_library_that_knows_nothing_of_mig_reads_its_gpus(open_source, stand_in):
    source = open_source("nvmlDeviceGetMaxMigDeviceCount")
    stand_in.write(Device(uuid=A, processes=(Process(pid=7),)))
    gpu = source.read().gpus[0]
    assert (gpu.up, gpu.busy, len(gpu.processes)) == (True, (), 1)


def test_a_gpu_that_could_have_mig_devices_and_has_none_keeps_its_processes_and_their_time(source, stand_in):
    stand_in.write(Device(uuid=A, mig_slots=7, processes=(Process(pid=7, instance=(0, 0)),)))
    gpu = source.read().gpus[0]
    assert ([process.pid for process in gpu.processes], gpu.busy) == ([7], ())


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "3g.40gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", "1c.3g.40gb"),
        ("NVIDIA A30 MIG 1g.6gb+me", "1g.6gb+me"),
        ("NVIDIA A100-SXM4-80GB", None),
        ("", None),
    ],
)
def test_the_profile_of_a_mig_device_stands_in_its_name(name, profile):
    assert parse_mig_profile(name) == profile


# --- process utilization ---


def test_a_first_reading_with_samples_says_nothing_of_the_time_before(source, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7),), samples=(Sample(7, T, 90),)))
    assert source.read().gpus[0].busy is None


def test_a_first_reading_without_samples_is_idle(source, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7),)))
    assert source.read().gpus[0].busy == ()


def test_a_success_without_samples_is_idle_too(source, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7),), samples_empty_success=True))
    assert source.read().gpus[0].busy == ()
    assert source.read().gpus[0].busy == ()


def test_each_reading_gives_the_seconds_since_the_one_before(source, stand_in, clock):
    device = Device(uuid=A, processes=(Process(pid=7),), samples=(Sample(7, T, 90),))
    stand_in.write(device)
    source.read()
    clock.seconds += 5
    # Four samples that lie half a second apart: 2 s of 40 %.
    samples = tuple(Sample(7, T + step * SECOND // 2, 40, memory=20, encoder=10, decoder=5) for step in (1, 2, 3, 4))
    stand_in.write(replace(device, samples=(*device.samples, *samples)))
    assert source.read().gpus[0].busy == (
        ProcessBusy(
            pid=7,
            sm_seconds=pytest.approx(0.8),
            memory_bandwidth_seconds=pytest.approx(0.4),
            encoder_seconds=pytest.approx(0.2),
            decoder_seconds=pytest.approx(0.1),
        ),
    )
    clock.seconds += 5
    assert source.read().gpus[0].busy == ()


@pytest.mark.parametrize("without", [NEWER, OLDER])
def test_either_function_alone_tells_the_time(open_source, stand_in, clock, without):
    source = open_source(without)
    device = Device(uuid=A, processes=(Process(pid=7),), samples=(Sample(7, T, 90),))
    stand_in.write(device)
    assert source.read().gpus[0].busy is None
    clock.seconds += 2
    stand_in.write(replace(device, samples=(Sample(7, T + SECOND, 50),)))
    assert [entry.sm_seconds for entry in source.read().gpus[0].busy] == [pytest.approx(0.5)]


@pytest.mark.parametrize("error", [FUNCTION_NOT_FOUND, NOT_SUPPORTED, ARGUMENT_VERSION_MISMATCH])
def test_the_older_function_is_asked_where_the_newer_one_does_not_serve_and_then_alone(source, stand_in, clock, caplog, error):
    caplog.set_level(logging.INFO)
    device = Device(uuid=A, processes=(Process(pid=7),), samples=(Sample(7, T, 90),), calls={NEWER: error})
    stand_in.write(device)
    assert source.read().gpus[0].busy is None
    assert len(stand_in.calls(NEWER)) == 1
    clock.seconds += 2
    stand_in.write(replace(device, samples=(Sample(7, T + SECOND, 50),)))
    assert [entry.sm_seconds for entry in source.read().gpus[0].busy] == [pytest.approx(0.5)]
    assert len(stand_in.calls(NEWER)) == 1
    assert "state=unavailable" not in caplog.text


def test_a_gpu_whose_newer_function_alone_serves_is_asked_that(source, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7),), calls={OLDER: NOT_SUPPORTED}))
    assert source.read().gpus[0].busy == ()
    assert stand_in.calls(OLDER) == []


@pytest.mark.parametrize("error", [NOT_SUPPORTED, UNKNOWN, NO_PERMISSION])
def test_where_neither_function_serves_the_time_is_unknown(source, stand_in, error):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7),), calls={NEWER: error, OLDER: error}))
    for _ in range(2):
        gpu = source.read().gpus[0]
        assert (gpu.up, gpu.busy, len(gpu.processes)) == (True, None, 1)


@pytest.mark.parametrize("function", [NEWER, OLDER])
def test_samples_that_grow_between_two_calls_are_asked_for_again(open_source, stand_in, clock, function):
    source = open_source(*({NEWER, OLDER} - {function}))
    device = Device(uuid=A, processes=(Process(pid=7),), samples=(Sample(7, T, 90),))
    stand_in.write(device)
    source.read()
    clock.seconds += 2
    stand_in.write(replace(device, samples=(Sample(7, T + SECOND, 50),), calls={function: insufficient(3)}))
    assert [entry.sm_seconds for entry in source.read().gpus[0].busy] == [pytest.approx(0.5)]


def test_each_gpu_is_asked_for_what_is_newer_than_its_own_newest_sample(source, stand_in, clock):
    processes = (Process(pid=7), Process(pid=8))
    stand_in.write(
        Device(uuid=A, processes=processes, samples=(Sample(8, T + 3, 1), Sample(7, T + 1, 1))),
        Device(uuid=B, processes=processes, samples=(Sample(7, T + 2, 1),)),
    )
    source.read()
    stand_in.forget_calls()
    clock.seconds += 5
    source.read()
    assert sorted(stand_in.calls(NEWER)) == [(NEWER, A, str(T + 3), "size"), (NEWER, B, str(T + 2), "size")]


def test_samples_that_were_seen_already_are_not_counted_again(source, stand_in, clock):
    device = Device(uuid=A, processes=(Process(pid=7),), samples_from_the_start=True)
    stand_in.write(replace(device, samples=(Sample(7, T, 90), Sample(7, T + SECOND, 90))))
    source.read()
    clock.seconds += 5
    stand_in.write(replace(device, samples=(Sample(7, T, 90), Sample(7, T + SECOND, 90), Sample(7, T + 2 * SECOND, 50))))
    reading = source.read()
    assert [entry.sm_seconds for entry in reading.gpus[0].busy] == [pytest.approx(0.5)]
    assert reading.dropped_samples == {}


def test_a_sample_weighs_the_time_since_the_same_processs_previous_one(source, stand_in, clock):
    processes = (Process(pid=7), Process(pid=8))
    stand_in.write(Device(uuid=A, processes=processes, samples=(Sample(7, T, 1), Sample(8, T + 2 * SECOND, 1))))
    source.read()
    clock.seconds += 5
    samples = (Sample(7, T + 4 * SECOND, 50), Sample(8, T + 3 * SECOND, 50))
    stand_in.write(Device(uuid=A, processes=processes, samples=samples))
    busy = {entry.pid: entry.sm_seconds for entry in source.read().gpus[0].busy}
    assert busy == {7: pytest.approx(2.0), 8: pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (Sample(0, T + SECOND, 50), "bad_pid"),
        (Sample(4294967295, T + SECOND, 50), "bad_pid"),
        (Sample(7, 0, 50), "bad_timestamp"),
        (Sample(7, T + 3600 * SECOND, 50), "bad_timestamp"),
        (Sample(7, 2**63, 50), "bad_timestamp"),
        (Sample(7, T + SECOND, 101), "bad_utilization"),
        (Sample(7, T + SECOND, 50, encoder=4_000_000_000), "bad_utilization"),
        (Sample(9, T + SECOND, 50), "unknown_pid"),
    ],
)
def test_a_sample_that_cannot_be_true_is_dropped_and_counted_and_the_others_stay(source, stand_in, clock, sample, reason):
    device = Device(uuid=A, processes=(Process(pid=7), Process(pid=8)), samples=(Sample(8, T, 1),))
    stand_in.write(device)
    source.read()
    clock.seconds += 5
    stand_in.write(replace(device, samples=(sample, Sample(8, T + 2 * SECOND, 50))))
    reading = source.read()
    assert reading.dropped_samples == {reason: 1}
    assert [(entry.pid, entry.sm_seconds) for entry in reading.gpus[0].busy] == [(8, pytest.approx(1.0))]
    # It does not hide what comes after it, either.
    clock.seconds += 5
    stand_in.write(replace(device, samples=(Sample(8, T + 7 * SECOND, 50),)))
    reading = source.read()
    assert reading.dropped_samples == {}
    assert [entry.sm_seconds for entry in reading.gpus[0].busy] == [pytest.approx(2.5)]


def test_a_process_that_ended_since_the_last_reading_keeps_its_last_seconds(source, stand_in, clock):
    device = Device(uuid=A, processes=(Process(pid=7),), samples=(Sample(7, T, 1),))
    stand_in.write(device)
    source.read()
    clock.seconds += 5
    stand_in.write(replace(device, processes=(), samples=(Sample(7, T + 2 * SECOND, 50),)))
    reading = source.read()
    assert [(entry.pid, entry.sm_seconds) for entry in reading.gpus[0].busy] == [(7, pytest.approx(1.0))]
    assert reading.dropped_samples == {}


def test_a_utilization_above_100_percent_of_a_gpu_is_unknown_and_counted(source, stand_in):
    stand_in.write(Device(uuid=A, utilization=101), Device(uuid=B, utilization=100))
    reading = source.read()
    assert [gpu.utilization_ratio for gpu in reading.gpus] == [None, 1.0]
    assert reading.dropped_samples == {"bad_utilization": 1}


def test_after_a_long_outage_the_time_is_unknown_for_one_reading(source, stand_in, clock):
    device = Device(uuid=A, processes=(Process(pid=7),), samples=(Sample(7, T, 1),))
    stand_in.write(device, Device(uuid=B))
    source.read()
    stand_in.write(replace(device, calls={"*": GPU_IS_LOST}), Device(uuid=B))
    for _ in range(3):
        clock.seconds += 5
        source.read()
    clock.seconds += 5
    stand_in.write(replace(device, samples=(Sample(7, T + 19 * SECOND, 90),)), Device(uuid=B))
    assert gpu_of(source.read()).busy is None
    clock.seconds += 5
    stand_in.write(replace(device, samples=(Sample(7, T + 21 * SECOND, 50),)), Device(uuid=B))
    assert [entry.sm_seconds for entry in gpu_of(source.read()).busy] == [pytest.approx(1.0)]


def test_a_stamp_that_was_wrong_silences_a_gpu_for_a_minute_at_most(source, stand_in, clock):
    device = Device(uuid=A, processes=(Process(pid=7),))
    stand_in.write(replace(device, samples=(Sample(7, T + 1000 * SECOND, 1),)))
    source.read()
    stamp = T
    heard = []
    for _ in range(20):
        clock.seconds += 5
        stamp += 5 * SECOND
        stand_in.write(replace(device, samples=(Sample(7, stamp, 40),)))
        heard.append(bool(source.read().gpus[0].busy))
    assert heard == [False] * 12 + [True] * 8


def test_a_look_at_all_samples_that_fails_costs_nothing(source, stand_in, clock):
    device = Device(uuid=A, processes=(Process(pid=7),), samples=(Sample(7, T, 1),))
    stand_in.write(device)
    source.read()
    stand_in.write(replace(device, calls={NEWER: insufficient(4)}))
    clock.seconds += 61
    stand_in.forget_calls()
    gpu = source.read().gpus[0]
    assert (gpu.up, gpu.busy) == (True, ())
    assert len([call for call in stand_in.calls(NEWER) if call[2:] == ("0",)]) == 4


# --- calls that hang ---


DEADLINE = 0.8
LITTLE_MORE = 2.0


def test_a_gpu_that_hangs_occupies_one_thread_and_delays_one_reading(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE)
    well, other = Device(uuid=A, minor=4), Device(uuid=B, processes=(Process(pid=7),))
    stand_in.write(well, other)
    before = source.read()
    stand_in.write(replace(well, calls={"nvmlDeviceGetMemoryInfo_v2": HANG}), other)

    began = time.monotonic()
    reading = source.read()
    assert DEADLINE <= time.monotonic() - began < DEADLINE + LITTLE_MORE
    assert gpu_of(reading, A) == GpuReading(gpu=gpu_of(before, A).gpu, up=False)
    assert [process.pid for process in gpu_of(reading, B).processes] == [7]

    for _ in range(5):
        began = time.monotonic()
        reading = source.read()
        assert time.monotonic() - began < DEADLINE
        assert not gpu_of(reading, A).up
        assert gpu_of(reading, B).up
    wait_for_threads("nvml-device-0")

    stand_in.write(well, other)
    wait_for_threads()
    assert gpu_of(source.read(), A).up


@pytest.mark.parametrize(
    "function", ["*", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetUtilizationRates", *LISTS, NEWER]
)
def test_whichever_function_hangs_the_other_gpu_is_read_in_time(open_source, stand_in, function):
    source = open_source(device_deadline_seconds=DEADLINE)
    stand_in.write(Device(uuid=A, calls={function: HANG}), Device(uuid=B))
    reading = source.read()
    assert [gpu.gpu.gpu_uuid for gpu in reading.gpus if gpu.up] == [B]
    assert reading.gpus_unidentified == 1
    assert seconds_of(source.read) < DEADLINE


def test_all_gpus_are_waited_for_together(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE)
    stand_in.write(*(Device(uuid=f"GPU-{number}", calls={"*": HANG}) for number in range(8)))
    assert seconds_of(source.read) < DEADLINE + LITTLE_MORE
    wait_for_threads(*(f"nvml-device-{number}" for number in range(8)))


def test_gpus_that_are_slow_are_read_beside_each_other(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE)
    slow = {"nvmlDeviceGetMemoryInfo_v2": delay(300)}
    stand_in.write(*(Device(uuid=f"GPU-{number}", calls=slow) for number in range(8)))
    began = time.monotonic()
    assert all(gpu.up for gpu in source.read().gpus)
    assert time.monotonic() - began < DEADLINE
    wait_for_threads()


def test_gpus_that_are_well_share_a_thread(open_source, stand_in):
    source = open_source(device_deadline_seconds=60.0)  # no other takes over within a second
    stand_in.write(*(Device(uuid=f"GPU-{number}") for number in range(8)))
    source.read()
    stand_in.write(*(Device(uuid=f"GPU-{number}", calls={"nvmlDeviceGetMemoryInfo_v2": delay(50)}) for number in range(8)))
    assert 8 * 0.05 <= seconds_of(source.read) < 8 * 0.05 + LITTLE_MORE


def test_a_gpu_that_was_not_asked_because_too_many_hang_is_asked_again(open_source, stand_in, caplog):
    source = open_source(device_deadline_seconds=DEADLINE)
    well = [Device(uuid=f"GPU-{number}") for number in range(100)]
    stand_in.write(*well)
    source.read()
    stand_in.write(*(replace(each, calls={"*": HANG}) for each in well))
    assert not any(gpu.up for gpu in source.read().gpus)
    hanging = len(nvml_threads())
    assert 8 < hanging < 100
    assert "was not asked, because too many calls of the driver do not return" in caplog.text
    stand_in.write(*well)
    wait_for_threads()
    assert all(gpu.up for gpu in source.read().gpus)


def test_where_no_other_thread_can_take_over_what_has_not_begun_never_begins(open_source, stand_in, monkeypatch):
    source = open_source(device_deadline_seconds=DEADLINE)
    stand_in.write(Device(uuid=A), Device(uuid=B))
    source.read()
    stand_in.write(Device(uuid=A, calls={"*": HANG}), Device(uuid=B))
    start, started = threading.Thread.start, []

    def start_one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_one)
        with pytest.raises(RuntimeError, match="thread"):
            source.read()
    stand_in.forget_calls()
    stand_in.write(Device(uuid=A), Device(uuid=B))
    wait_for_threads()
    assert not [call for call in stand_in.calls() if B in call]
    assert all(gpu.up for gpu in source.read().gpus)


def test_the_count_and_the_gpus_are_waited_for_together(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE * 2)
    stand_in.write(Device(uuid=A), Device(uuid=B))
    source.read()
    stand_in.write(Device(uuid=A, calls={"*": HANG}), Device(uuid=B), calls={"nvmlDeviceGetCount_v2": HANG})
    assert seconds_of(source.read) < 2 * DEADLINE * 2
    wait_for_threads("nvml-device-0", "nvml-library")


def test_a_hanging_count_leaves_the_known_gpus_readable(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE)
    stand_in.write(Device(uuid=A))
    source.read()
    stand_in.write(Device(uuid=A, processes=(Process(pid=7),)), calls={"nvmlDeviceGetCount_v2": HANG})
    for _ in range(3):
        assert [process.pid for process in source.read().gpus[0].processes] == [7]
    wait_for_threads("nvml-library")
    assert seconds_of(source.read) < DEADLINE
    stand_in.write(Device(uuid=A), Device(uuid=B))
    wait_for_threads()
    source.read()
    assert len(source.read().gpus) == 2


def test_a_hanging_initialisation_is_an_error_that_delays_one_reading_and_heals(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE)
    stand_in.write(Device(uuid=A), calls={"nvmlInitWithFlags": HANG})
    with pytest.raises(SourceError, match="initialisation"):
        source.read()
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(SourceError, match="initialisation"):
            source.read()
    assert time.monotonic() - began < DEADLINE
    wait_for_threads("nvml-library")
    stand_in.write(Device(uuid=A))
    wait_for_threads()
    assert source.read().gpus[0].up
    assert len(stand_in.calls("nvmlInitWithFlags")) == 1


def test_what_a_late_call_answers_is_thrown_away_and_none_of_its_samples_is_lost(open_source, stand_in, clock):
    source = open_source(device_deadline_seconds=DEADLINE)
    device = Device(uuid=A, processes=(Process(pid=7),), samples=(Sample(7, T, 1),))
    stand_in.write(device, Device(uuid=B))
    source.read()
    clock.seconds += 4
    device = replace(device, samples=(Sample(7, T + SECOND, 50), Sample(7, T + 2 * SECOND, 50)))
    stand_in.write(replace(device, calls={LISTS[2]: delay(1500)}), Device(uuid=B))
    assert not gpu_of(source.read()).up
    wait_for_threads()
    clock.seconds += 4
    stand_in.write(replace(device, samples=(*device.samples, Sample(7, T + 3 * SECOND, 50))), Device(uuid=B))
    assert [entry.sm_seconds for entry in gpu_of(source.read()).busy] == [pytest.approx(1.5)]


def test_a_late_answer_is_no_answer_to_a_later_reading_either(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE)
    stand_in.write(Device(uuid=A), Device(uuid=B), Device(uuid=C))
    source.read()
    late, later = (delay(int(DEADLINE * milliseconds)) for milliseconds in (1500, 2500))
    stand_in.write(Device(uuid=A, calls={LISTS[2]: later}), Device(uuid=B, calls={LISTS[2]: late}), Device(uuid=C))
    assert [gpu.up for gpu in source.read().gpus] == [False, False, True]
    # While C is waited for, B's call ends, so that B is asked anew; while B is waited for, A's ends.
    hangs = {"nvmlDeviceGetHandleByIndex_v2": HANG}
    stand_in.write(Device(uuid=A), Device(uuid=B, calls=hangs), Device(uuid=C, calls=hangs))
    reading = source.read()
    wait_for_threads("nvml-device-1", "nvml-device-2")
    assert [gpu.up for gpu in reading.gpus] == [False, False, False]
    assert [gpu.up for gpu in source.read().gpus] == [True, False, False]


def test_closing_is_quick_while_a_gpu_hangs(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE)
    stand_in.write(Device(uuid=A, calls={"*": HANG}), Device(uuid=B))
    source.read()
    assert seconds_of(source.close) < DEADLINE
    assert len(stand_in.calls("nvmlShutdown")) == 1


def test_closing_is_quick_while_the_shutdown_itself_hangs(open_source, stand_in):
    source = open_source()
    stand_in.write(Device(uuid=A))
    source.read()
    stand_in.write(Device(uuid=A), calls={"nvmlShutdown": HANG})
    assert seconds_of(source.close) < 1.9
    source.close()
    assert len(stand_in.calls("nvmlShutdown")) == 1


def test_an_initialisation_that_ends_after_the_source_was_closed_is_shut_down(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE)
    stand_in.write(Device(uuid=A), calls={"nvmlInitWithFlags": HANG})
    with pytest.raises(SourceError):
        source.read()
    source.close()
    assert stand_in.calls("nvmlShutdown") == []
    stand_in.write(Device(uuid=A))
    wait_for_threads()
    assert len(stand_in.calls("nvmlShutdown")) == 1


# --- the library ---


def test_nvml_is_initialised_once_and_shut_down_once(source, stand_in):
    stand_in.write(Device(uuid=A))
    for _ in range(3):
        source.read()
    assert len(stand_in.calls("nvmlInitWithFlags")) == 1
    source.close()
    source.close()
    assert len(stand_in.calls("nvmlShutdown")) == 1
    with pytest.raises(SourceError, match="shut down"):
        source.read()


def test_a_driver_that_is_let_go_of_is_shut_down_once_and_taken_again_by_the_next_reading(source, stand_in):
    stand_in.write(Device(uuid=A))
    source.read()
    assert source.release()
    assert source.release()
    assert len(stand_in.calls("nvmlShutdown")) == 1
    assert stand_in.open_initialisations() == 0
    assert gpu_of(source.read()).up
    assert len(stand_in.calls("nvmlInitWithFlags")) == 2
    source.close()
    assert len(stand_in.calls("nvmlShutdown")) == 2


def test_a_driver_that_was_never_taken_is_let_go_of(source, stand_in):
    stand_in.write(Device(uuid=A))
    assert source.release()
    assert stand_in.calls() == []


def test_a_driver_with_a_call_that_does_not_return_is_not_let_go_of_until_it_does(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE)
    stand_in.write(Device(uuid=A, calls={"*": HANG}))
    source.read()
    assert not source.release()
    assert stand_in.calls("nvmlShutdown") == []
    stand_in.write(Device(uuid=A))
    wait_for_threads()
    assert source.release()
    assert stand_in.open_initialisations() == 0


def test_a_shutdown_that_does_not_return_is_not_begun_twice_and_the_driver_is_taken_after_it(open_source, stand_in):
    source = open_source(device_deadline_seconds=DEADLINE)
    stand_in.write(Device(uuid=A))
    source.read()
    stand_in.write(Device(uuid=A), calls={"nvmlShutdown": HANG})
    assert not source.release()
    assert not source.release()
    assert len(stand_in.calls("nvmlShutdown")) == 1
    with pytest.raises(SourceError):
        source.read()
    stand_in.write(Device(uuid=A))
    wait_for_threads()
    with pytest.raises(SourceError, match="let go of"):
        source.read()
    assert gpu_of(source.read()).up


def test_what_was_never_initialised_is_not_shut_down(source, stand_in):
    with pytest.raises(SourceError):
        source.read()
    source.close()
    assert stand_in.calls("nvmlShutdown") == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (DRIVER_NOT_LOADED, "NVML: Driver Not Loaded: the NVIDIA kernel module is not loaded"),
        (NO_PERMISSION, "NVML: Insufficient Permissions: the container needs access to /dev/nvidiactl"),
        (UNKNOWN, "NVML: Unknown Error: a container whose access"),
        (UNINITIALIZED, "NVML: Uninitialized"),
        (INVALID_ARGUMENT, "NVML: Invalid Argument"),
        (27, "NVML: Error 27 of the stand-in"),
    ],
)
def test_an_initialisation_that_fails_is_an_error_until_it_works(source, stand_in, error, text):
    stand_in.write(Device(uuid=A), calls={"nvmlInitWithFlags": error})
    for _ in range(2):
        with pytest.raises(SourceError, match=text) as raised:
            source.read()
        assert not isinstance(raised.value, FatalSourceError)
    stand_in.write(Device(uuid=A))
    assert source.read().gpus[0].up


def test_a_library_that_is_not_there_is_an_error_until_it_comes(open_source, stand_in, monkeypatch, nvml_library):
    source = open_source()
    library = nvml_library()
    found = []
    monkeypatch.setattr(pynvml, "nvmlLib", None)

    def load(name):
        assert name == "libnvidia-ml.so.1"
        if not found:
            raise OSError(f"{name}: cannot open shared object file")
        return ctypes.CDLL(found[0])

    monkeypatch.setattr(pynvml, "CDLL", load)
    stand_in.write(Device(uuid=A))
    with pytest.raises(SourceError, match=r"libnvidia-ml.so.1 is not there.*runtimeClassName"):
        source.read()
    found.append(str(library))
    assert source.read().gpus[0].up


def test_a_library_too_old_to_be_initialised_is_an_error(open_source, stand_in):
    source = open_source("nvmlInitWithFlags")
    stand_in.write(Device(uuid=A))
    with pytest.raises(SourceError, match="Function Not Found"):
        source.read()


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
def test_a_library_that_does_not_fit_the_driver_is_fatal(source, stand_in, function):
    stand_in.write(Device(uuid=A), calls={function: LIB_RM_VERSION_MISMATCH})
    with pytest.raises(FatalSourceError, match="new container"):
        source.read()


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates"])
def test_a_driver_that_was_changed_under_the_library_is_fatal(source, stand_in, function):
    stand_in.write(Device(uuid=A))
    source.read()
    stand_in.write(Device(uuid=A, calls={function: LIB_RM_VERSION_MISMATCH}))
    with pytest.raises(FatalSourceError, match="new container"):
        source.read()


@pytest.mark.parametrize("error", [UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND])
def test_a_driver_that_goes_away_is_an_error_and_is_initialised_anew_when_it_is_back(source, stand_in, error):
    stand_in.write(Device(uuid=A))
    source.read()
    stand_in.write(Device(uuid=A, calls={"nvmlDeviceGetMemoryInfo_v2": error}))
    with pytest.raises(SourceError):
        source.read()
    stand_in.write(Device(uuid=A))
    assert source.read().gpus[0].up
    assert len(stand_in.calls("nvmlInitWithFlags")) == 2
    assert len(stand_in.calls("nvmlShutdown")) == 1


def test_a_driver_that_is_unloaded_and_loaded_again_is_read_again(source, stand_in):
    stand_in.write(Device(uuid=A))
    source.read()
    stand_in.unload_driver()
    for _ in range(2):
        with pytest.raises(SourceError, match="Driver Not Loaded"):
            source.read()
    stand_in.write(Device(uuid=A))
    assert source.read().gpus[0].up


def test_unknown_errors_of_every_gpu_are_answered_by_a_new_initialisation(source, stand_in):
    stand_in.write(Device(uuid=A), Device(uuid=B))
    source.read()
    stand_in.write(Device(uuid=A, calls={"*": UNKNOWN}), Device(uuid=B, calls={"*": UNKNOWN}))
    reading = source.read()
    assert [gpu.up for gpu in reading.gpus] == [False, False]
    assert len(stand_in.calls("nvmlInitWithFlags")) == 1
    stand_in.write(Device(uuid=A), Device(uuid=B))
    assert [gpu.up for gpu in source.read().gpus] == [True, True]
    assert len(stand_in.calls("nvmlInitWithFlags")) == 2
    assert len(stand_in.calls("nvmlShutdown")) == 1


def test_unknown_errors_of_one_gpu_of_two_are_that_gpus(source, stand_in):
    stand_in.write(Device(uuid=A), Device(uuid=B))
    source.read()
    stand_in.write(Device(uuid=A, calls={"*": UNKNOWN}), Device(uuid=B))
    for _ in range(3):
        assert [gpu.up for gpu in source.read().gpus] == [False, True]
    assert len(stand_in.calls("nvmlInitWithFlags")) == 1


@pytest.mark.parametrize("calls", [{"*": UNKNOWN}, {"nvmlDeviceGetMemoryInfo_v2": UNKNOWN}])
def test_unknown_errors_that_go_on_for_minutes_are_fatal(open_source, stand_in, clock, calls):
    source = open_source(give_up_seconds=300)
    stand_in.write(Device(uuid=A))
    source.read()
    stand_in.write(Device(uuid=A, calls=calls))
    for _ in range(60):
        clock.seconds += 5
        assert not source.read().gpus[0].up
    clock.seconds += 5
    with pytest.raises(FatalSourceError, match="for 300 s"):
        source.read()


def test_an_initialisation_that_fails_with_unknown_errors_for_minutes_is_fatal(open_source, stand_in, clock):
    source = open_source(give_up_seconds=300)
    stand_in.write(Device(uuid=A))
    source.read()
    stand_in.write(Device(uuid=A, calls={"*": UNKNOWN}), calls={"nvmlInitWithFlags": UNKNOWN})
    source.read()
    clock.seconds += 299
    with pytest.raises(SourceError) as raised:
        source.read()
    assert not isinstance(raised.value, FatalSourceError)
    clock.seconds += 1
    with pytest.raises(FatalSourceError):
        source.read()


def test_unknown_errors_that_end_in_between_start_the_minutes_anew(open_source, stand_in, clock):
    source = open_source(give_up_seconds=300)
    stand_in.write(Device(uuid=A))
    source.read()
    for _ in range(3):
        stand_in.write(Device(uuid=A, calls={"*": UNKNOWN}))
        source.read()
        clock.seconds += 250
        source.read()
        stand_in.write(Device(uuid=A))
        assert source.read().gpus[0].up


def test_unknown_errors_of_a_node_that_never_worked_are_never_fatal(open_source, stand_in, clock):
    source = open_source(give_up_seconds=300)
    stand_in.write(Device(uuid=A, calls={"*": UNKNOWN}))
    for _ in range(5):
        assert source.read().gpus_unidentified == 1
        clock.seconds += 250


def test_a_driver_without_a_version_is_read(source, stand_in):
    stand_in.write(Device(uuid=A), calls={"nvmlSystemGetDriverVersion": NOT_SUPPORTED})
    reading = source.read()
    assert (reading.driver_version, reading.gpus[0].up) == (None, True)


# --- a process of its own ---

CHILD = """
import dataclasses, json, time
from exporter.clock import SystemClock
from exporter.sources.nvml import NvmlSource

source = NvmlSource(clock=SystemClock())
first = source.read()
time.sleep(1)
second = source.read()
source.close()
print(json.dumps([
    second.driver_version,
    [[gpu.gpu.gpu_uuid, gpu.up, gpu.memory_used_bytes, [entry.sm_seconds for entry in gpu.busy]] for gpu in second.gpus],
    first.gpus[0].busy,
]))
"""


def test_the_library_is_found_on_the_library_path_by_a_process_of_its_own(nvml_library, stand_in):
    stand_in.write(Device(uuid=A, processes=(Process(pid=7, memory=GIB),), samples=(Busy(7, 60),)))
    environment = {**os.environ, **stand_in.environment, "LD_LIBRARY_PATH": str(nvml_library().parent)}
    ended = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=60, check=True)
    driver_version, gpus, first_busy = json.loads(ended.stdout)
    assert driver_version == "580.65.06"
    assert first_busy is None
    [[uuid, is_up, used, [sm_seconds]]] = gpus
    assert (uuid, is_up, used) == (A, True, GIB)
    assert sm_seconds == pytest.approx(0.6, abs=0.25)
    assert len(stand_in.calls("nvmlInitWithFlags")) == len(stand_in.calls("nvmlShutdown")) == 1


# --- a real GPU ---


# In a process of its own: in this one the name libnvidia-ml.so.1 already stands for the stand-in.
REAL = """
import dataclasses, json, sys, time
from exporter.clock import SystemClock
from exporter.sources import SourceError
from exporter.sources.nvml import NvmlSource

source = NvmlSource(clock=SystemClock())
try:
    readings = [source.read()]
except SourceError as error:
    print(json.dumps(str(error)))
    sys.exit()
for _ in range(2):
    time.sleep(1)
    readings.append(source.read())
source.close()
print(json.dumps([
    [reading.driver_version, dict(reading.dropped_samples), [
        [gpu.up, gpu.gpu.gpu_uuid, gpu.gpu.model, gpu.gpu.memory_total_bytes, gpu.memory_used_bytes] for gpu in reading.gpus
    ]] for reading in readings
]))
"""


@pytest.mark.gpu
def test_a_real_gpu_is_read_and_says_nothing_that_cannot_be_true():
    ended = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=60, check=True)
    readings = json.loads(ended.stdout)
    if isinstance(readings, str):
        pytest.skip(f"no NVIDIA driver to read: {readings}")
    if not readings[0][2]:
        pytest.skip("the NVIDIA driver sees no GPU")
    for driver_version, dropped, gpus in readings:
        assert driver_version
        assert set(dropped) <= {"unknown_pid"}
        for is_up, uuid, model, total, used in gpus:
            assert is_up
            assert uuid.startswith(("GPU-", "MIG-"))
            assert model
            assert total is None or 0 <= used <= total
