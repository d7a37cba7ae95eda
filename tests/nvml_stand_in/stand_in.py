"""A node for the stand-in of libnvidia-ml: what its file says, written as values. See nvml_stand_in.c."""

import importlib.util
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml_stand_in.c")
GIB = 2**30

# nvmlReturn_t
UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 1, 2, 3, 4, 6
DRIVER_NOT_LOADED, TIMEOUT, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST = 9, 10, 12, 13, 15
RESET_REQUIRED, LIB_RM_VERSION_MISMATCH, ARGUMENT_VERSION_MISMATCH, UNKNOWN = 16, 18, 25, 999

HANG = "hang"


def insufficient(times):
    """The next answers say INSUFFICIENT_SIZE."""
    return f"insufficient {times}"


def delay(milliseconds):
    return f"delay {milliseconds}"


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process in NVML's lists. Memory of None is hidden. `instance` is (gpu instance, compute instance)."""

    pid: int
    memory: int | None = GIB
    lists: tuple[str, ...] = ("compute",)
    instance: tuple[int, int] | None = None

    def lines(self, instance=None):
        gpu_instance, compute_instance = self.instance or instance or (-1, -1)
        memory = -1 if self.memory is None else self.memory
        return [f"process {name} {self.pid} {memory} {gpu_instance} {compute_instance}" for name in self.lists]


@dataclass(frozen=True)
class Sample:
    """One utilization sample; percent, and a stamp in microseconds."""

    pid: int
    stamp: int
    sm: int
    memory: int = 0
    encoder: int = 0
    decoder: int = 0

    def line(self):
        return f"sample {self.pid} {self.stamp} {self.sm} {self.memory} {self.encoder} {self.decoder}"


@dataclass(frozen=True)
class Busy:
    """A process that has a sample every 1/6 s of the wall clock."""

    pid: int
    sm: int
    memory: int = 0
    encoder: int = 0
    decoder: int = 0

    def line(self):
        return f"busy {self.pid} {self.sm} {self.memory} {self.encoder} {self.decoder}"


@dataclass(frozen=True, kw_only=True)
class Mig:
    """A MIG device. `calls` maps a symbol, or `*`, to an error code, HANG, insufficient() or delay()."""

    uuid: str
    gpu_instance: int
    compute_instance: int = 0
    slot: int = 0
    name: str = "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    memory_total: int | None = 40 * GIB
    memory_reserved: int = 0
    memory_used: int | None = None
    gpm_counters: tuple[float, float] = (0, 0)
    """Busy and total, as they stand in a GPM sample of its GPU instance."""
    processes: tuple[Process, ...] = ()
    calls: Mapping[str, int | str] = field(default_factory=dict)

    def lines(self):
        instance = (self.gpu_instance, self.compute_instance)
        return [
            f"mig {self.uuid} {self.slot} {self.gpu_instance} {self.compute_instance}",
            *_common_lines(self),
            f"counters {self.gpm_counters[0]:g} {self.gpm_counters[1]:g}",
            *(line for process in self.processes for line in process.lines(instance)),
        ]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU. Its lists repeat the processes of its MIG devices with their instances, as a driver's do."""

    uuid: str
    minor: int = 0
    name: str = "NVIDIA A100-SXM4-80GB"
    bus: str = "00000000:07:00.0"
    memory_total: int | None = 80 * GIB
    memory_reserved: int = 0
    memory_used: int | None = None
    utilization: int = 0
    processes: tuple[Process, ...] = ()
    samples: tuple[Sample | Busy, ...] = ()
    samples_from_the_start: bool = False
    samples_empty_success: bool = False
    record_size: int | None = None
    migs: tuple[Mig, ...] = ()
    mig_slots: int | None = None
    has_gpm: bool = False
    calls: Mapping[str, int | str] = field(default_factory=dict)

    def lines(self):
        slots = self.mig_slots if self.mig_slots is not None else 7 if self.migs else 0
        lines = [f"device {self.uuid}", *_common_lines(self), f"minor {self.minor}", f"bus {self.bus}", f"slots {slots}"]
        lines += [f"utilization {self.utilization}"]
        lines += [line for process in self.processes for line in process.lines()]
        for mig in self.migs:
            lines += [line for process in mig.processes for line in process.lines((mig.gpu_instance, mig.compute_instance))]
        lines += [sample.line() for sample in self.samples]
        lines += ["samples from-the-start"] if self.samples_from_the_start else []
        lines += ["samples empty-success"] if self.samples_empty_success else []
        lines += ["gpm"] if self.has_gpm else []
        lines += [f"records {self.record_size}"] if self.record_size is not None else []
        return lines + [line for mig in self.migs for line in mig.lines()]


def _common_lines(device):
    lines = [f"name {device.name}"]
    if device.memory_total is not None:
        used = device.memory_used
        if used is None:
            used = sum(process.memory or 0 for process in device.processes)
        lines.append(f"memory {device.memory_total} {device.memory_reserved} {used}")
    return lines + _call_lines(device.calls)


def _call_lines(calls):
    return [f"call {function} error {rule}" if isinstance(rule, int) else f"call {function} {rule}" for function, rule in calls.items()]


class StandIn:
    """The file that a stand-in library reads, and the log of calls that it writes."""

    def __init__(self, folder):
        self.file = Path(folder) / "node"
        self.log = Path(folder) / "calls"
        self._forgotten = 0

    @property
    def environment(self):
        """What a process must have in its environment, beside LD_LIBRARY_PATH."""
        return {"NVML_STAND_IN_FILE": str(self.file), "NVML_STAND_IN_LOG": str(self.log)}

    def write(self, *devices, driver="580.65.06", calls=None):
        """Say what the node is from now on."""
        lines = [f"driver {driver}", *_call_lines(calls or {}), *(line for device in devices for line in device.lines())]
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.file)

    def unload_driver(self):
        self.file.unlink(missing_ok=True)

    def calls(self, function=None):
        """The calls since the beginning or the last forget_calls, each a tuple of the function and what it was asked about."""
        calls = self._lines()[self._forgotten :]
        return [call for call in calls if call[0] not in ("initialised", "samples") and function in (None, call[0])]

    def forget_calls(self):
        self._forgotten = len(self._lines())

    def open_initialisations(self):
        """How many successful nvmlInit have had no nvmlShutdown."""
        return self._latest("initialised")

    def held_samples(self):
        """How many GPM samples were made and not freed."""
        return self._latest("samples")

    def _latest(self, count):
        return next((int(line[1]) for line in reversed(self._lines()) if line[0] == count), 0)

    def _lines(self):
        return [tuple(line.split()) for line in self.log.read_text().splitlines()] if self.log.exists() else []


def find_header():
    """The folder of NVIDIA's nvml.h, from the package nvidia-nvml-dev; None where it is not installed."""
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package else None
    return next((path.parent for folder in folders or () for path in Path(folder).rglob("nvml.h")), None)


def reason_not_to_compile():
    """Why there can be no stand-in here; None where there can."""
    if shutil.which("cc") is None:
        return "no C compiler (cc) to compile the stand-in of libnvidia-ml with"
    if find_header() is None:
        return "no nvml.h to compile the stand-in of libnvidia-ml with: the package nvidia-nvml-dev is not installed"
    return None


def compile_stand_in(folder, without=()):
    """Compile libnvidia-ml.so.1 into the folder, without these symbols; answer its path."""
    library = Path(folder) / "libnvidia-ml.so.1"
    defines = [f"-DWITHOUT_{symbol}" for symbol in without]
    options = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libnvidia-ml.so.1", f"-I{find_header()}"]
    subprocess.run(["cc", *options, *defines, "-o", library, SOURCE], check=True)
    return library
