# ruff: noqa: N802, N803, N815
# The names are pynvml's.
"""pynvml for a simulated node: its functions, structures and exceptions, answering from the node's state.

What the driver measures over time (process utilization) is made as simulated time passes, so that it is there when it is asked for, in
whatever thread. Everything else answers the present state. Names that are not defined here are pynvml's own; an NVML function that is
not is one that this driver lacks.

https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

import inspect
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import pynvml as untyped_pynvml

from exporter.simulation.node import Gpu, GpuUse, MigDevice, NodeState, Withheld, numbered

pynvml: Any = untyped_pynvml

DRIVER_VERSION = "580.65.06"

_SAMPLES_PER_SECOND = 6
_RING_SECONDS = 10
_MICROSECONDS = 1_000_000
_NO_INSTANCE = 0xFFFFFFFF
_MAX_MIG_DEVICES = 7
_MAX_PERCENT = 100

_FAULTS = {
    "lost": pynvml.NVML_ERROR_GPU_IS_LOST,
    "unknown": pynvml.NVML_ERROR_UNKNOWN,
    "no_permission": pynvml.NVML_ERROR_NO_PERMISSION,
}
# source state -> what nvmlInit says, and what a call says in a process that had NVML open before.
_OUTAGES = {
    "down": (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_UNINITIALIZED),
    "not_loaded": (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
    "version_mismatch": (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
}


@dataclass(frozen=True, slots=True)
class Handle:
    """What stands for a device in calls; nobody looks inside."""

    uuid: str


@dataclass(frozen=True, slots=True)
class _Listed:
    """An entry of a device's process lists."""

    pid: int
    use: GpuUse
    mig: MigDevice | None

    @property
    def memory_bytes(self) -> int:
        return self.use.memory_bytes if isinstance(self.use.memory_bytes, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """A GPU or MIG device at present."""

    gpu: Gpu
    index: int
    mig: MigDevice | None
    processes: tuple[_Listed, ...]
    """Of a GPU, those of its MIG devices too."""

    @property
    def measures_time(self) -> bool:
        """Whether the driver tells shares of time: of no MIG device, and of no GPU that is divided into these."""
        return self.mig is None and not self.gpu.mig


@dataclass(frozen=True, slots=True)
class _Sample:
    """A process's shares of the time since the sample before, in percent."""

    number: int
    pid: int
    use: GpuUse


class SimulatedNvml:
    """What stands in for the module pynvml. Its NVML functions may be called by any thread."""

    def __init__(self, epoch_seconds: float) -> None:
        """Take the time of the driver's clock at the start of the scenario."""
        self._epoch_microseconds = round(epoch_seconds * _MICROSECONDS)
        # Guards all below, and is notified when a call that hangs may go on.
        self._changed = threading.Condition()
        self._state = NodeState()
        self._devices: Mapping[str, _Device] = {}
        self._samples: dict[str, deque[_Sample]] = {}
        self._last_sample = 0
        self._references = 0
        self._is_closed = False
        self._hung: set[threading.Thread] = set()
        self._released: set[threading.Thread] = set()

    # --- the simulation's side ---

    def advance_to(self, seconds: float) -> None:
        """Let time pass: the driver samples the processes as they are."""
        with self._changed:
            newest = int(seconds * _SAMPLES_PER_SECOND + 1e-6)
            oldest_kept = newest - _RING_SECONDS * _SAMPLES_PER_SECOND
            for uuid, device in self._devices.items():
                busy = [entry for entry in device.processes if _is_busy(entry.use)] if _is_sampled(device) else []
                ring = self._samples.setdefault(uuid, deque())
                if busy:
                    for number in range(max(self._last_sample, oldest_kept) + 1, newest + 1):
                        ring.extend(_Sample(number, entry.pid, entry.use) for entry in busy)
                while ring and ring[0].number <= oldest_kept:
                    ring.popleft()
            self._last_sample = newest

    def update(self, state: NodeState) -> None:
        """Take a new state of the node, from now on."""
        with self._changed:
            self._state = state
            self._devices = _list_devices(state)
            if state.sources.nvml != "up":
                self._references = 0
            self._release()

    def close(self) -> None:
        """End every call that hangs."""
        with self._changed:
            self._is_closed = True
            self._release()

    def is_settled(self) -> bool:
        """Answer whether no thread is on its way out of a call that hung."""
        with self._changed:
            self._released = {thread for thread in self._released if thread.is_alive()} - self._hung
            return not self._released

    def _release(self) -> None:
        self._released |= self._hung
        self._hung = set()
        self._changed.notify_all()

    # --- pynvml's side ---

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - pynvml has no types
        known = getattr(pynvml, name)
        if name.startswith("nvml") and inspect.isfunction(known):
            return _missing_function
        return known

    def nvmlInit(self) -> None:
        """Initialise NVML."""
        self.nvmlInitWithFlags(0)

    def nvmlInitWithFlags(self, flags: int) -> None:  # noqa: ARG002 - pynvml's signature
        """Initialise NVML."""
        with self._changed:
            if outage := _OUTAGES.get(self._state.sources.nvml):
                raise pynvml.NVMLError(outage[0])
            self._references += 1

    def nvmlShutdown(self) -> None:
        """Shut NVML down."""
        with self._changed:
            self._check_library()
            self._references -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        """Answer the driver's version."""
        with self._changed:
            self._check_library()
            return DRIVER_VERSION

    def nvmlDeviceGetCount(self) -> int:
        """Answer the number of GPUs."""
        with self._changed:
            self._check_library()
            return len(self._state.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        """Answer the handle of the GPU with this index."""
        with self._changed:
            self._check_library()
            gpus = numbered(self._state.gpus)
            if not 0 <= index < len(gpus):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            # Not by the scenario's own index: a GPU that was removed must not leave a hole through which others vanish.
            gpu = gpus[index][0]
            _check_fault(gpu)
            return Handle(gpu.uuid)

    def nvmlDeviceGetHandleByUUID(self, uuid: str | bytes) -> Handle:
        """Answer the handle of a GPU or MIG device."""
        wanted = uuid.decode() if isinstance(uuid, bytes) else uuid
        with self._changed:
            self._check_library()
            if wanted not in self._devices:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            _check_fault(self._devices[wanted].gpu)
            return Handle(wanted)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        """Answer the uuid."""
        self._device(handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        """Answer the model, of a MIG device with its profile."""
        device = self._device(handle)
        return f"{device.gpu.model} MIG {device.mig.profile}" if device.mig else device.gpu.model

    def nvmlDeviceGetMinorNumber(self, handle: Handle) -> int:
        """Answer N of /dev/nvidiaN."""
        device = self._gpu_device(handle)
        return device.index if device.gpu.minor is None else device.gpu.minor

    def nvmlDeviceGetIndex(self, handle: Handle) -> int:
        """Answer the NVML index."""
        return self._gpu_device(handle).index

    def nvmlDeviceGetPciInfo_v3(self, handle: Handle) -> Any:  # noqa: ANN401 - pynvml's structure
        """Answer the PCI address."""
        device = self._gpu_device(handle)
        bus = (0x07 + 8 * device.index) % 256
        info = pynvml.nvmlPciInfo_t()
        info.busId = f"00000000:{bus:02X}:00.0".encode()
        info.busIdLegacy = f"0000:{bus:02X}:00.0".encode()
        info.bus = bus
        return info

    nvmlDeviceGetPciInfo = nvmlDeviceGetPciInfo_v3

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any:  # noqa: ANN401 - pynvml's structure
        """Answer the memory of a device."""
        device = self._device(handle)
        total = device.mig.memory_total_bytes if device.mig else device.gpu.memory_total_bytes
        if isinstance(total, Withheld):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        said = None if device.mig else device.gpu.memory_used_bytes
        used = sum(entry.memory_bytes for entry in device.processes) if said is None else said
        reserved = 0 if device.mig else device.gpu.memory_reserved_bytes
        if version is None:
            memory = pynvml.c_nvmlMemory_t()
            memory.used = used + reserved
        else:
            memory = pynvml.c_nvmlMemory_v2_t()
            memory.version = version
            memory.reserved = reserved
            memory.used = used
        memory.total = total
        memory.free = max(0, total - used - reserved)
        return memory

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:  # noqa: ANN401 - pynvml's structure
        """Answer how busy the whole GPU is."""
        device = self._device(handle)
        said = None if device.mig else device.gpu.utilization_percent
        if said is None and not device.measures_time:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        uses = [entry.use for entry in device.processes]
        rates = pynvml.c_nvmlUtilization_t()
        rates.gpu = min(_MAX_PERCENT, sum(use.sm_percent for use in uses)) if said is None else said
        rates.memory = min(_MAX_PERCENT, sum(use.memory_bandwidth_percent for use in uses))
        return rates

    # --- processes ---

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Answer the processes with a compute context."""
        return self._list_processes(handle, "compute")

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Answer the processes with a graphics context."""
        return self._list_processes(handle, "graphics")

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Answer the clients of the MPS server."""
        return self._list_processes(handle, "mps")

    nvmlDeviceGetComputeRunningProcesses = nvmlDeviceGetComputeRunningProcesses_v3
    nvmlDeviceGetGraphicsRunningProcesses = nvmlDeviceGetGraphicsRunningProcesses_v3
    nvmlDeviceGetMPSComputeRunningProcesses = nvmlDeviceGetMPSComputeRunningProcesses_v3

    def _list_processes(self, handle: Handle, kind: str) -> list[Any]:
        return [
            pynvml.nvmlFriendlyObject(
                {
                    "pid": entry.pid,
                    "usedGpuMemory": entry.use.memory_bytes if isinstance(entry.use.memory_bytes, int) else None,
                    "gpuInstanceId": entry.mig.gpu_instance_id if entry.mig else _NO_INSTANCE,
                    "computeInstanceId": entry.mig.compute_instance_id if entry.mig else _NO_INSTANCE,
                }
            )
            for entry in self._device(handle).processes
            if kind in entry.use.kinds
        ]

    def nvmlDeviceGetProcessUtilization(self, handle: Handle, timeStamp: int) -> list[Any]:
        """Answer the samples newer than a time stamp."""
        return [_fill(pynvml.c_nvmlProcessUtilizationSample_t(), stamp, sample) for stamp, sample in self._newer(handle, timeStamp)]

    def nvmlDeviceGetProcessesUtilizationInfo(self, handle: Handle, timeStamp: int) -> list[Any]:
        """Answer the samples newer than a time stamp, in the newer structure."""
        return [_fill(pynvml.c_nvmlProcessUtilizationInfo_v1_t(), stamp, sample) for stamp, sample in self._newer(handle, timeStamp)]

    def _newer(self, handle: Handle, last_seen: int) -> list[tuple[int, _Sample]]:
        device = self._device(handle)
        if not device.measures_time:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        with self._changed:
            stamped = ((self._stamp(sample), sample) for sample in self._samples.get(handle.uuid, ()))
            newer = [(stamp, sample) for stamp, sample in stamped if stamp > last_seen]
        if not newer:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return newer

    def _stamp(self, sample: _Sample) -> int:
        return self._epoch_microseconds + sample.number * _MICROSECONDS // _SAMPLES_PER_SECOND

    # --- MIG ---

    def nvmlDeviceIsMigDeviceHandle(self, handle: Handle) -> Any:  # noqa: ANN401 - pynvml's structure
        """Answer whether the handle is that of a MIG device."""
        return pynvml.c_uint(self._device(handle).mig is not None)

    def nvmlDeviceGetMigMode(self, handle: Handle) -> list[int]:
        """Answer the present and the pending MIG mode."""
        mode = pynvml.NVML_DEVICE_MIG_ENABLE if self._gpu_device(handle).gpu.mig else pynvml.NVML_DEVICE_MIG_DISABLE
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int:
        """Answer how many MIG devices there can be."""
        device = self._device(handle)
        return max(_MAX_MIG_DEVICES, len(device.gpu.mig)) if device.mig is None else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int) -> Handle:
        """Answer the handle of a MIG device; NOT_FOUND is an empty slot."""
        gpu = self._gpu_device(handle).gpu
        if index >= max(_MAX_MIG_DEVICES, len(gpu.mig)):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if index >= len(gpu.mig):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return Handle(tuple(gpu.mig)[index])

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Handle) -> Handle:
        """Answer the handle of a MIG device's GPU."""
        return Handle(self._mig_device(handle)[0].uuid)

    def nvmlDeviceGetGpuInstanceId(self, handle: Handle) -> int:
        """Answer the GPU instance of a MIG device."""
        return self._mig_device(handle)[1].gpu_instance_id

    def nvmlDeviceGetComputeInstanceId(self, handle: Handle) -> int:
        """Answer the compute instance of a MIG device."""
        return self._mig_device(handle)[1].compute_instance_id

    # --- what every call does first ---

    def _check_library(self) -> None:
        if outage := _OUTAGES.get(self._state.sources.nvml):
            raise pynvml.NVMLError(outage[1])
        if self._references <= 0 or self._is_closed:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _device(self, handle: Handle) -> _Device:
        """Answer the device of a handle, as soon as it does not hang."""
        with self._changed:
            while True:
                self._check_library()
                device = self._devices.get(handle.uuid)
                if device is None:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
                _check_fault(device.gpu)
                if device.gpu.fault != "hang":
                    return device
                self._hung.add(threading.current_thread())
                self._changed.wait()

    def _gpu_device(self, handle: Handle) -> _Device:
        device = self._device(handle)
        if device.mig is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return device

    def _mig_device(self, handle: Handle) -> tuple[Gpu, MigDevice]:
        device = self._device(handle)
        if device.mig is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return device.gpu, device.mig


def _missing_function(*arguments: object) -> NoReturn:  # noqa: ARG001 - of whatever function it stands for
    raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def _check_fault(gpu: Gpu) -> None:
    if (code := _FAULTS.get(gpu.fault)) is not None:
        raise pynvml.NVMLError(code)


def _list_devices(state: NodeState) -> Mapping[str, _Device]:
    uses: dict[str, list[tuple[int, GpuUse]]] = {}
    for process in state.processes.values():
        for use in process.gpus.values():
            uses.setdefault(use.gpu, []).append((process.pid, use))

    def listed(uuid: str, mig: MigDevice | None) -> Iterator[_Listed]:
        yield from (_Listed(pid, use, mig) for pid, use in uses.get(uuid, ()))

    devices = {}
    for gpu, index in numbered(state.gpus):
        processes = [*listed(gpu.uuid, None)]
        for mig in gpu.mig.values():
            own = tuple(listed(mig.uuid, mig))
            processes += own
            devices[mig.uuid] = _Device(gpu=gpu, index=index, mig=mig, processes=own)
        devices[gpu.uuid] = _Device(gpu=gpu, index=index, mig=None, processes=tuple(processes))
    return devices


def _is_sampled(device: _Device) -> bool:
    return device.measures_time and device.gpu.fault != "lost"


def _is_busy(use: GpuUse) -> bool:
    return bool(use.sm_percent or use.memory_bandwidth_percent or use.encoder_percent or use.decoder_percent)


def _fill(structure: Any, stamp: int, sample: _Sample) -> Any:  # noqa: ANN401 - pynvml has no types
    structure.pid = sample.pid
    structure.timeStamp = stamp
    structure.smUtil = sample.use.sm_percent
    structure.memUtil = sample.use.memory_bandwidth_percent
    structure.encUtil = sample.use.encoder_percent
    structure.decUtil = sample.use.decoder_percent
    return structure
