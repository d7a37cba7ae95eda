"""What the NVIDIA driver says of one device and its MIG devices, through NVML (https://docs.nvidia.com/deploy/nvml-api/).

Called by a thread that may be lost with it, because a call that blocks in the driver cannot be cancelled. A reading takes what was
remembered and answers what is to be remembered: it changes nothing, so that the answer of a call that returned too late can be thrown away.

How it fails: what an error costs stands in the tables below. The answer of a device that is down says why.

Calls for each device: handle, uuid, memory, rates, samples (two at most, and one more per idle minute), three lists and the number of its
MIG devices; for each MIG device handle, uuid, two ids, name, memory and three lists,
and where the driver has GPM a sample and what it comes to. Name, PCI bus and minor number are asked for once.
A list that grows between pynvml's question for its size and the one for its entries is asked for again, three times at most.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, TypeAlias

from exporter.snapshot import Gpu, GpuProcess, GpuReading
from exporter.sources.nvml_decoding import decode_samples
from exporter.sources.nvml_gpm import GpmSample, ask_for_sm_utilization, hold_sample, parse_ratio
from exporter.sources.nvml_samples import Moment, Sample, SampleMemory, Step, is_doubtful, is_outdated, prime, reconsider, step

# pynvml has no types: its handles and structures are ctypes, made at run time. A look-alike may stand in for it.
Library: TypeAlias = Any
Handle: TypeAlias = Any
Untyped: TypeAlias = Any


class Code(IntEnum):
    """The errors of NVML that mean something here (nvml.h, nvmlReturn_t)."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


# What an error costs. These: what the function gives, because the driver, its library or the hardware has no such function.
LACKING = frozenset({Code.INVALID_ARGUMENT, Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND, Code.ARGUMENT_VERSION_MISMATCH, Code.DEPRECATED})
# These: the GPU, whichever function says it.
GPU_DOWN = frozenset({Code.TIMEOUT, Code.IRQ_ISSUE, Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.GPU_NOT_FOUND})
# These: everything, until the library is initialised anew.
LIBRARY_DOWN = frozenset({Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIBRARY_NOT_FOUND})
# This: everything, until a new process loads the library that fits the driver.
PROCESS_DOWN = frozenset({Code.LIB_RM_VERSION_MISMATCH})
# Any other (NO_PERMISSION, UNKNOWN, ...): the GPU where its handle, uuid or memory says it, which every GPU has; else what the function
# gives. A function that always fails with UNKNOWN must not take a healthy GPU down.
_MORE_THAN_THE_FUNCTION = GPU_DOWN | LIBRARY_DOWN | PROCESS_DOWN

_LISTS = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
)
# The newer one since driver 550. Some devices answer only to one of them.
_SAMPLES = ("nvmlDeviceGetProcessesUtilizationInfo", "nvmlDeviceGetProcessUtilization")
_STATIC = ("nvmlDeviceGetName", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMinorNumber")

# NVML_VALUE_NOT_AVAILABLE, as unsigned long long and as unsigned int.
_NO_BYTES = 2**64 - 1
_NO_ID = 2**32 - 1

_MIG_PROFILE = re.compile(r"\bMIG (\S+)")
_ATTEMPTS = 4
_MAX_PERCENT = 100


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of NVML, as a value. pynvml's own are unhashable, and comparing them with what has no value raises."""

    code: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What is remembered of a device from one reading to the next."""

    gpus: tuple[Gpu, ...]
    """The device, then its MIG devices."""
    pids: frozenset[int] | None = None
    """Those of its lists; None: not known."""
    samples: SampleMemory | None = None
    samples_function: str | None = None
    """Which of the two functions the device answers to."""
    unavailable: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(GPU's uuid, function) -> why it gives nothing."""
    scrambled: frozenset[str] = frozenset()
    """GPUs whose lists cannot be believed."""
    gpm_samples: Mapping[str, GpmSample] = field(default_factory=dict)
    """MIG device's uuid -> the latest sample of its GPU instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of reading one device: `remembered`, or a failure: the device is down."""

    uuid: str | None
    failure: Failure | None = None
    remembered: Remembered | None = None
    readings: tuple[GpuReading, ...] = ()
    unidentified: int = 0
    """MIG devices that do not give their uuid."""
    dropped: Mapping[str, int] = field(default_factory=dict)


def parse_mig_profile(name: str) -> str | None:
    """Answer `3g.40gb` of `NVIDIA A100-SXM4-80GB MIG 3g.40gb`; None where the name has none."""
    match = _MIG_PROFILE.search(name)
    return match[1] if match else None


class DeviceReader:
    """Reads one device, once."""

    def __init__(self, library: Library, index: int, remembered: Mapping[str, Remembered], moment: Moment, pid_max: int) -> None:
        """Take the device's index, what is remembered of all devices (by uuid), and the highest PID that can be."""
        self._library = library
        self._index = index
        self._remembered = remembered
        self._moment = moment
        self._pid_max = pid_max
        self._unavailable: dict[tuple[str, str], str] = {}
        self._scrambled: set[str] = set()
        self._gpm_samples: dict[str, GpmSample] = {}
        self._dropped: Counter[str] = Counter()
        self._unidentified = 0

    def read(self) -> Answer:
        """Answer what the driver says of the device now."""
        uuid = None
        try:
            handle = self._library.nvmlDeviceGetHandleByIndex(self._index)
            uuid = text(self._library.nvmlDeviceGetUUID(handle))
            return self._read_device(uuid, handle)
        except self._library.NVMLError as error:
            return Answer(uuid=uuid, failure=Failure(error.value, str(error)))

    def _read_device(self, uuid: str, handle: Handle) -> Answer:
        before = self._remembered.get(uuid)
        total, used, reserved = self._read_memory(uuid, handle)
        gpu = self._read_gpu(uuid, handle, total)
        migs = self._read_gpm(gpu, handle, self._read_mig_devices(gpu, handle), before)
        utilization_ratio = self._read_utilization(uuid, handle)
        memory = before.samples if before is not None else None
        # The samples before the lists: a process of the one is then in the other, unless it has ended.
        samples, function = (None, None) if migs else self._read_samples(uuid, handle, memory, before)
        processes = self._read_processes(gpu, handle, has_migs=bool(migs))
        pids = None if processes is None else frozenset(process.pid for process in processes)
        busy = None
        if samples is not None and function is not None:
            earlier = before.pids if before is not None else None
            taken = self._step(memory, samples, None if pids is None or earlier is None else pids | earlier)
            self._dropped.update(taken.dropped)
            busy, memory = taken.busy, self._reconsider(taken.memory, function, handle)
        reading = GpuReading(
            gpu=gpu,
            up=True,
            memory_used_bytes=used,
            memory_reserved_bytes=reserved,
            utilization_ratio=utilization_ratio,
            processes=processes,
            busy=busy,
        )
        return Answer(
            uuid=uuid,
            remembered=Remembered(
                gpus=(gpu, *(mig.gpu for mig in migs)),
                pids=pids,
                samples=memory,
                samples_function=function,
                unavailable=self._unavailable,
                scrambled=frozenset(self._scrambled),
                gpm_samples=self._gpm_samples,
            ),
            readings=(reading, *migs),
            unidentified=self._unidentified,
            dropped=dict(self._dropped),
        )

    # --- one function, and what its error costs ---

    def _ask(self, uuid: str, function: str, *arguments: object) -> Untyped:
        """Answer what the function says, or None where its error costs no more than that."""
        try:
            return self._repeat(function, *arguments)
        except self._library.NVMLError as error:
            if error.value in _MORE_THAN_THE_FUNCTION:
                raise
            self._unavailable[uuid, function] = str(error)
            return None

    def _repeat(self, function: str, *arguments: object) -> Untyped:
        """Answer what the function says, asked again where the answer outgrew the room that pynvml made for it."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return getattr(self._library, function)(*arguments)
            except self._library.NVMLError as error:
                if error.value != Code.INSUFFICIENT_SIZE:
                    raise
        return getattr(self._library, function)(*arguments)

    # --- facts of a device ---

    def _read_gpu(self, uuid: str, handle: Handle, total: int | None) -> Gpu:
        known = self._remembered.get(uuid)
        if known is not None and not any((uuid, function) in known.unavailable for function in _STATIC):
            return replace(known.gpus[0], index=self._index, memory_total_bytes=total)
        name, pci, minor = (self._ask(uuid, function, handle) for function in _STATIC)
        return Gpu(
            gpu_uuid=uuid,
            index=self._index,
            minor=minor,
            model=None if name is None else text(name),
            pci_bus_id=None if pci is None else text(pci.busId),
            memory_total_bytes=total,
        )

    def _read_memory(self, uuid: str, handle: Handle) -> tuple[int | None, int | None, int | None]:
        """Answer total, used and reserved bytes. Only the lack of the function is no error: every GPU has memory."""
        try:
            memory = self._library.nvmlDeviceGetMemoryInfo(handle, version=self._library.nvmlMemory_v2)
            return _bytes(memory.total) or None, _bytes(memory.used), _bytes(memory.reserved)
        except self._library.NVMLError as error:
            if error.value not in LACKING:
                raise
        try:
            memory = self._library.nvmlDeviceGetMemoryInfo(handle)
            # Its used includes what the driver reserves, and it does not tell how much that is.
            return _bytes(memory.total) or None, _bytes(memory.used), None
        except self._library.NVMLError as error:
            if error.value not in LACKING:
                raise
            # Unified memory: GB10, Jetson.
            self._unavailable[uuid, "nvmlDeviceGetMemoryInfo"] = str(error)
            return None, None, None

    def _read_utilization(self, uuid: str, handle: Handle) -> float | None:
        rates = self._ask(uuid, "nvmlDeviceGetUtilizationRates", handle)
        if rates is None:
            return None
        if rates.gpu > _MAX_PERCENT:
            self._dropped["bad_utilization"] += 1
            return None
        return float(rates.gpu) / _MAX_PERCENT

    # --- MIG ---

    def _read_mig_devices(self, parent: Gpu, handle: Handle) -> list[GpuReading]:
        try:
            slots = self._library.nvmlDeviceGetMaxMigDeviceCount(handle)
        except self._library.NVMLError as error:
            if error.value in _MORE_THAN_THE_FUNCTION:
                raise
            # Most GPUs have no MIG: nothing worth a word.
            if error.value not in LACKING:
                self._unavailable[parent.gpu_uuid, "nvmlDeviceGetMaxMigDeviceCount"] = str(error)
            return []
        readings = []
        for slot in range(slots):
            try:
                mig_handle = self._library.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
                uuid = text(self._library.nvmlDeviceGetUUID(mig_handle))
            except self._library.NVMLError as error:
                if error.value in _MORE_THAN_THE_FUNCTION:
                    raise
                # NOT_FOUND is an empty slot.
                if error.value not in LACKING | {Code.NOT_FOUND}:
                    self._unidentified += 1
                continue
            readings.append(self._read_mig_device(parent, uuid, slot, mig_handle))
        return readings

    def _read_mig_device(self, parent: Gpu, uuid: str, slot: int, handle: Handle) -> GpuReading:
        name = self._ask(uuid, "nvmlDeviceGetName", handle)
        # Nothing of it is remembered: instances made anew can have the ids, and so the uuid, of earlier ones of another size.
        gpu = Gpu(
            gpu_uuid=uuid,
            index=slot,
            minor=parent.minor,
            model=parent.model,
            pci_bus_id=parent.pci_bus_id,
            parent_gpu_uuid=parent.gpu_uuid,
            mig_profile=None if name is None else parse_mig_profile(text(name)),
            gpu_instance_id=self._ask(uuid, "nvmlDeviceGetGpuInstanceId", handle),
            compute_instance_id=self._ask(uuid, "nvmlDeviceGetComputeInstanceId", handle),
        )
        try:
            total, used, reserved = self._read_memory(uuid, handle)
        except self._library.NVMLError as error:
            if error.value in _MORE_THAN_THE_FUNCTION:
                raise
            self._unavailable[uuid, "nvmlDeviceGetMemoryInfo"] = str(error)
            return GpuReading(gpu=replace(gpu, memory_total_bytes=self._remembered_total(parent, uuid)), up=False)
        gpu = replace(gpu, memory_total_bytes=total)
        # Of a MIG device's processes the driver measures no time, and of the device only what _read_gpm adds.
        return GpuReading(
            gpu=gpu,
            up=True,
            memory_used_bytes=used,
            memory_reserved_bytes=reserved,
            processes=self._read_processes(gpu, handle, has_migs=False),
        )

    def _remembered_total(self, parent: Gpu, uuid: str) -> int | None:
        known = self._remembered.get(parent.gpu_uuid)
        totals = {gpu.gpu_uuid: gpu.memory_total_bytes for gpu in known.gpus} if known is not None else {}
        return totals.get(uuid)

    def _read_gpm(self, parent: Gpu, handle: Handle, migs: list[GpuReading], before: Remembered | None) -> list[GpuReading]:
        """Answer the MIG devices' readings with how busy their GPU instances are, where the driver measures it."""
        if not migs:
            return migs
        support = self._ask(parent.gpu_uuid, "nvmlGpmQueryDeviceSupport", handle)
        if support is None:
            return migs
        if not support.isSupportedDevice:
            self._unavailable[parent.gpu_uuid, "nvmlGpmQueryDeviceSupport"] = "this GPU has no GPM: Hopper and later have"
            return migs
        earlier = before.gpm_samples if before is not None else {}
        return [
            replace(mig, sm_utilization_ratio=self._read_sm_utilization(mig.gpu, handle, earlier.get(mig.gpu.gpu_uuid))) if mig.up else mig
            for mig in migs
        ]

    def _read_sm_utilization(self, gpu: Gpu, parent: Handle, earlier: GpmSample | None) -> float | None:
        uuid, instance, number = gpu.gpu_uuid, gpu.gpu_instance_id, self._moment.number
        if instance is None or (buffer := self._ask(uuid, "nvmlGpmSampleAlloc")) is None:
            return None
        sample = hold_sample(self._library, buffer, instance, number)
        if self._ask(uuid, "nvmlGpmMigSampleGet", parent, instance, buffer) is None:
            return None
        self._gpm_samples[uuid] = sample
        # Between samples that are further apart the GPU may have been reset, or the instance made anew.
        if earlier is None or (earlier.gpu_instance_id, earlier.read_number) != (instance, number - 1):
            return None
        answer = self._ask(uuid, "nvmlGpmMetricsGet", ask_for_sm_utilization(self._library, earlier, sample))
        if answer is None:
            return None
        metric = answer.metrics[0]
        if metric.nvmlReturn != Code.SUCCESS:
            self._unavailable[uuid, "nvmlGpmMetricsGet"] = str(self._library.NVMLError(metric.nvmlReturn))
            return None
        ratio = parse_ratio(metric.value)
        if ratio is None:
            self._dropped["bad_utilization"] += 1
        return ratio

    # --- processes ---

    def _read_processes(self, gpu: Gpu, handle: Handle, *, has_migs: bool) -> tuple[GpuProcess, ...] | None:
        memory: dict[int, int | None] = {}
        kinds: dict[int, set[str]] = {}
        is_known = True
        for kind, function in _LISTS:
            entries = self._read_list(gpu.gpu_uuid, kind, function, handle)
            if entries is None:
                is_known = False
                continue
            if any(self._cannot_be(entry, gpu.memory_total_bytes) for entry in entries):
                self._dropped["scrambled_list"] += 1
                self._scrambled.add(gpu.gpu_uuid)
                is_known = False
                continue
            for entry in entries:
                if not _belongs(entry, gpu, has_migs=has_migs):
                    continue
                # An MPS client stands in two lists, each time with all of its memory.
                told = [value for value in (memory.get(entry.pid), _bytes(entry.usedGpuMemory)) if value is not None]
                memory[entry.pid] = max(told, default=None)
                kinds.setdefault(entry.pid, set()).add(kind)
        if not is_known:
            return None
        return tuple(
            GpuProcess(pid=pid, memory_used_bytes=memory_used_bytes, kinds=frozenset(kinds[pid]))
            for pid, memory_used_bytes in sorted(memory.items())
        )

    def _read_list(self, uuid: str, kind: str, function: str, handle: Handle) -> Sequence[Untyped] | None:
        """Answer the entries of one list; None: not known. A driver that lacks the lists for graphics or MPS has no such processes."""
        try:
            try:
                entries = self._repeat(f"{function}_v3", handle)
            except self._library.NVMLError as error:
                if error.value != Code.FUNCTION_NOT_FOUND:
                    raise
                # An older library.
                entries = self._repeat(f"{function}_v2", handle)
        except self._library.NVMLError as error:
            if error.value in _MORE_THAN_THE_FUNCTION:
                raise
            self._unavailable[uuid, function] = str(error)
            return [] if kind != "compute" and error.value in LACKING else None
        return list(entries)

    def _cannot_be(self, entry: Untyped, total: int | None) -> bool:
        used = _bytes(entry.usedGpuMemory)
        return not 0 < entry.pid <= self._pid_max or (total is not None and used is not None and used > total)

    # --- process utilization ---

    def _read_samples(
        self, uuid: str, handle: Handle, memory: SampleMemory | None, before: Remembered | None
    ) -> tuple[list[Sample] | None, str | None]:
        """Answer the samples since the last reading, and the function that told them. None: none does."""
        last_seen = 0 if memory is None or is_outdated(memory, self._moment) else memory.last_seen
        preferred = before.samples_function if before is not None else None
        refusals = {}
        for function in _SAMPLES if preferred is None else (preferred,):
            try:
                return self._ask_for_samples(function, handle, last_seen), function
            except self._library.NVMLError as error:
                if error.value in _MORE_THAN_THE_FUNCTION:
                    raise
                refusals[uuid, function] = str(error)
                # The older one is asked only for what the newer one lacks.
                if error.value not in LACKING:
                    break
        self._unavailable |= refusals
        return None, None

    def _ask_for_samples(self, function: str, handle: Handle, last_seen: int) -> list[Sample]:
        try:
            samples = self._repeat(function, handle, last_seen)
        except self._library.NVMLError as error:
            # Nobody ran since then. pynvml raises even SUCCESS where the answer has no sample.
            if error.value in (Code.NOT_FOUND, Code.SUCCESS):
                return []
            raise
        return decode_samples(samples)

    def _step(self, memory: SampleMemory | None, samples: Sequence[Sample], listed_pids: frozenset[int] | None) -> Step:
        if memory is None or is_outdated(memory, self._moment):
            return prime(samples, self._moment, self._pid_max)
        return step(memory, samples, self._moment, listed_pids=listed_pids, pid_max=self._pid_max)

    def _reconsider(self, memory: SampleMemory, function: str, handle: Handle) -> SampleMemory:
        if not is_doubtful(memory, self._moment):
            return memory
        try:
            samples = self._ask_for_samples(function, handle, 0)
        except self._library.NVMLError as error:
            if error.value in _MORE_THAN_THE_FUNCTION:
                raise
            return memory
        return reconsider(memory, samples, self._moment, self._pid_max)


def _belongs(entry: Untyped, gpu: Gpu, *, has_migs: bool) -> bool:
    """Whether a list's entry is the GPU's own. A parent's list repeats the processes of its MIG devices, which are asked themselves."""
    if entry.gpuInstanceId in (None, _NO_ID):
        return True
    if gpu.parent_gpu_uuid is None:
        return not has_migs
    own = (gpu.gpu_instance_id, gpu.compute_instance_id)
    return None in own or (entry.gpuInstanceId, entry.computeInstanceId) == own


def _bytes(value: int | None) -> int | None:
    return None if value is None or value == _NO_BYTES else int(value)


def text(value: str | bytes) -> str:
    """Answer text: some versions of pynvml answer bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
