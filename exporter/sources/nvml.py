"""What the NVIDIA driver says of the node's GPUs, through NVML (https://docs.nvidia.com/deploy/nvml-api/) by nvidia-ml-py.

Called by the sampler's thread, which no driver call can hold up: a call that blocks in the driver cannot be cancelled, so none is made on
that thread. A daemon thread reads the library (initialise, count) and then each device, one after another. A reading that lasts keeps its
thread to itself: another one takes over the rest. What has not ended by the deadline is left alone: it is not waited for again, nothing
else is asked of that device, and its late answer is thrown away with everything that it would have changed. So a measurement is never
stale and no sample is lost.

How it fails: an error of a device costs that device, an error of a function what that function gives (nvml_device.py has the table).
`SourceError` where the library or the driver is not there or does not answer; the next reading tries again. `FatalSourceError` where only
a new process can help.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, TypeVar

import pynvml

from exporter.clock import Clock
from exporter.snapshot import Gpu, GpuReading, NvmlReading
from exporter.sources import FatalSourceError, SourceError
from exporter.sources.nvml_device import LIBRARY_DOWN, PROCESS_DOWN, Answer, Code, DeviceReader, Failure, Library, Remembered, text
from exporter.sources.nvml_samples import Moment

_log = logging.getLogger(__name__)

Value = TypeVar("Value")

_ADVICE: Mapping[int, str] = {
    Code.LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not there. Is the driver installed on this node, and does the container get it "
    "(runtimeClassName: nvidia, NVIDIA_VISIBLE_DEVICES=all, NVIDIA_DRIVER_CAPABILITIES=utility)?",
    Code.DRIVER_NOT_LOADED: "the NVIDIA kernel module is not loaded on this node.",
    Code.NO_PERMISSION: "the container needs access to /dev/nvidiactl and /dev/nvidia0, 1, ...",
    Code.UNKNOWN: "a container whose access to /dev/nvidia* was revoked sees this; a new one has it again.",
}

_CLOSE_DEADLINE_SECONDS = 1.0
# So many calls may last and still all the others are made before the deadline. No node has as many devices.
_HANDOVERS = 64
_BROKE_OFF = Failure(Code.SUCCESS, "its reading broke off; the error stands above")
_HANGS = Failure(Code.TIMEOUT, "a call of the driver does not return")
_NOT_REACHED = Failure(Code.TIMEOUT, "was not asked, because too many calls of the driver do not return")


@dataclass(frozen=True, slots=True)
class _Node:
    """What the library says."""

    devices: int
    driver_version: str | None


class _Call(Generic[Value]):
    """Work for some thread."""

    def __init__(self, name: str, work: Callable[[], Value]) -> None:
        self.name = name
        self.has_begun = False
        self.has_ended = False
        self.answer: Value | None = None
        """None: the work has not ended, or it ended by an exception, which its thread has reported."""
        self._work = work

    @property
    def is_running(self) -> bool:
        """Whether a thread is at it."""
        return self.has_begun and not self.has_ended

    def run(self) -> None:
        """Do the work. Whoever looks at a thread that hangs sees by its name what hangs."""
        threading.current_thread().name = self.name
        self.has_begun = True
        try:
            self.answer = self._work()
        finally:
            del self._work  # with what it holds: a call is kept until the next of its kind
            self.has_ended = True


class _Crew:
    """Makes calls on daemon threads, one after another as long as none of them lasts."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def make(self, calls: Iterable[_Call[_Node | Failure] | _Call[Answer] | _Call[None]], seconds: float) -> None:
        """Return when all of them have ended, or after so many seconds; what has not begun until then never begins.

        Raises RuntimeError where no thread can be started.
        """
        calls = tuple(calls)
        waiting = deque(calls)
        # In real time, whatever the clock: it is real threads that are waited for.
        end = time.monotonic() + seconds
        with self.changed:
            try:
                self._start(waiting)
                while (left := end - time.monotonic()) > 0:
                    ended = sum(call.has_ended for call in calls)
                    if self.changed.wait_for(lambda: all(call.has_ended for call in calls), min(left, seconds / _HANDOVERS)):
                        break
                    if waiting and ended == sum(call.has_ended for call in calls):
                        self._start(waiting)
            finally:
                waiting.clear()

    def _start(self, waiting: "deque[_Call[Any]]") -> None:
        threading.Thread(target=self._work, args=(waiting,), name="nvml", daemon=True).start()

    def _work(self, waiting: "deque[_Call[Any]]") -> None:
        try:
            while (call := self._take(waiting)) is not None:
                call.run()
        finally:
            with self.changed:
                if waiting:  # the call broke off by an exception, which ends this thread
                    self._start(waiting)
                self.changed.notify_all()

    def _take(self, waiting: "deque[_Call[Any]]") -> "_Call[Any] | None":
        with self.changed:
            return waiting.popleft() if waiting else None


class NvmlSource:
    """Reads all GPUs of a node. `read()` belongs to one thread; `close()` may be called by any."""

    def __init__(
        self,
        *,
        library: Library = pynvml,
        clock: Clock,
        device_deadline_seconds: float = 3.0,
        pid_max: int = 4194304,
        give_up_seconds: float = 300.0,
    ) -> None:
        """Take pynvml or a look-alike.

        `pid_max` is /proc/sys/kernel/pid_max. After `give_up_seconds` in which every device that worked before answers with NVML's
        unknown error, `read` raises FatalSourceError.
        """
        self._library = library
        self._clock = clock
        self._deadline_seconds = device_deadline_seconds
        self._pid_max = pid_max
        self._give_up_seconds = give_up_seconds
        self._crew = _Crew()
        self._changed = self._crew.changed
        # Guarded by _changed: whether there is an nvmlInit without its nvmlShutdown, and whether there may be another.
        self._is_open = False
        self._is_closed = False
        # The rest belongs to the reading thread.
        self._node: _Node | None = None
        self._node_call: _Call[_Node | Failure] | None = None
        self._device_calls: dict[int, _Call[Answer]] = {}
        self._uuid_of_index: dict[int, str] = {}
        self._remembered: Mapping[str, Remembered] = {}
        self._read_number = 0
        self._must_initialise_anew = False
        self._has_worked = False
        self._unknown_since_seconds: float | None = None
        self._logged_down: Mapping[str, str] = {}
        self._logged_unidentified = 0

    def read(self) -> NvmlReading:
        """Answer what the driver says of every GPU now, in little more than the deadline at most.

        Raises SourceError when the library or driver is not there or does not answer, FatalSourceError when only a new process can help.
        """
        if self._is_closed:
            raise SourceError("NVML was shut down")
        self._read_number += 1
        moment = Moment(self._read_number, self._clock.monotonic(), self._clock.time())
        node_calls = self._begin_node()
        # The count is hardly ever another than it was: the devices do not wait for it.
        device_calls = self._begin_devices(range(self._node.devices) if self._node is not None else (), moment)
        self._make([*node_calls, *device_calls.values()])
        node = self._take_node(moment)
        more_calls = self._begin_devices((index for index in range(node.devices) if index not in device_calls), moment)
        self._make(more_calls.values())
        device_calls |= more_calls
        answers = {index: self._take_answer(device_calls.get(index)) for index in range(node.devices)}
        self._check_library(answers.values(), moment)
        return self._build_reading(node, answers)

    def release(self) -> bool:
        """Shut NVML down until the next reading, so that others may have the driver to themselves; answer whether it is shut down.

        It is not while a call of the driver does not return. Takes at most the deadline.
        """
        node_hangs = self._node_call is not None and self._node_call.is_running
        if node_hangs or any(call.is_running for call in self._device_calls.values()):
            return False
        with self._changed:
            is_open = self._is_open
        if not is_open:
            return True
        self._node = None
        # The next reading knows from this that it was not the next.
        self._read_number += 1
        self._node_call = _Call("nvml-library", self._release_library)
        self._make([self._node_call])
        if not self._node_call.has_ended:
            return False
        self._node_call = None
        return True

    def close(self) -> None:
        """Shut NVML down, once for each time that it was initialised. Returns within about a second, whatever hangs."""
        with self._changed:
            self._is_closed = True
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._crew.make([_Call("nvml-shutdown", self._shut_down)], _CLOSE_DEADLINE_SECONDS)

    # --- threads ---

    def _make(self, calls: Iterable[_Call[_Node | Failure] | _Call[Answer]]) -> None:
        calls = tuple(calls)
        if calls:
            self._crew.make(calls, self._deadline_seconds)

    def _begin_devices(self, indices: Iterable[int], moment: Moment) -> dict[int, _Call[Answer]]:
        """Answer the calls that read each device at which no earlier call is."""
        begun = {}
        for index in indices:
            earlier = self._device_calls.get(index)
            if earlier is None or not earlier.is_running:
                reader = DeviceReader(self._library, index, self._remembered, moment, self._pid_max)
                begun[index] = self._device_calls[index] = _Call(f"nvml-device-{index}", reader.read)
        return begun

    def _take_answer(self, call: _Call[Answer] | None) -> Answer:
        """Answer what a call of this reading gave; None: an earlier one was still at the device, and may have ended meanwhile."""
        if call is not None and call.answer is not None:
            return call.answer
        if call is None or call.is_running:
            return Answer(uuid=None, failure=_HANGS)
        return Answer(uuid=None, failure=_BROKE_OFF if call.has_ended else _NOT_REACHED)

    # --- the library ---

    def _begin_node(self) -> list[_Call[_Node | Failure]]:
        """Begin to initialise the library where it is to be, and to count; answer the call that is to be waited for."""
        if self._must_initialise_anew:
            if any(call.is_running for call in self._device_calls.values()):
                raise SourceError("NVML cannot be initialised anew, as it has to be, while a call of the driver does not return")
            self._node = None
        if self._node_call is not None and self._node_call.has_begun:
            if self._node is None and self._node_call.is_running:
                raise SourceError("NVML has not answered its initialisation yet: a driver that hangs says so in the kernel log")
            return []
        must_shut_down, self._must_initialise_anew = self._must_initialise_anew, False
        self._node_call = _Call("nvml-library", lambda: self._read_node(must_shut_down=must_shut_down))
        return [self._node_call]

    def _read_node(self, *, must_shut_down: bool) -> _Node | Failure:
        """On the library's thread."""
        try:
            if must_shut_down:
                with self._changed:
                    was_open, self._is_open = self._is_open, False
                if was_open:
                    self._shut_down()
            if not self._is_open:
                self._library.nvmlInit()
                with self._changed:
                    self._is_open = not self._is_closed
                if not self._is_open:
                    self._shut_down()
                    return Failure(Code.UNINITIALIZED, "NVML was shut down")
            return _Node(self._library.nvmlDeviceGetCount(), self._read_driver_version())
        except self._library.NVMLError as error:
            return Failure(error.value, str(error))

    def _release_library(self) -> Failure:
        """On the library's thread."""
        with self._changed:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._shut_down()
        return Failure(Code.UNINITIALIZED, "the driver was let go of")

    def _read_driver_version(self) -> str | None:
        if self._node is not None:
            return self._node.driver_version
        try:
            return text(self._library.nvmlSystemGetDriverVersion())
        except self._library.NVMLError as error:
            _log.warning("function=nvmlSystemGetDriverVersion state=unavailable reason=%r", str(error))
            return None

    def _let_go_of_gpm_samples(self) -> None:
        """Free what is the library's, as long as there is the library. A sample that a call still uses is freed when that call ends."""
        for call in list(self._device_calls.values()):
            if call.has_ended:
                call.answer = None
        self._remembered = {uuid: replace(remembered, gpm_samples={}) for uuid, remembered in self._remembered.items()}

    def _shut_down(self) -> None:
        self._let_go_of_gpm_samples()
        try:
            self._library.nvmlShutdown()
        except self._library.NVMLError as error:
            _log.warning("function=nvmlShutdown reason=%r", str(error))

    def _take_node(self, moment: Moment) -> _Node:
        if self._node_call is None or not self._node_call.has_ended:
            if self._node is None:
                raise SourceError(f"NVML does not answer its initialisation within {self._deadline_seconds:g} s")
            return self._node
        answer = self._node_call.answer or _BROKE_OFF
        self._node_call = None
        if isinstance(answer, Failure):
            self._fail(answer, moment)
        self._node = answer
        return answer

    def _check_library(self, answers: Collection[Answer], moment: Moment) -> None:
        """See to it that the next reading initialises anew where the devices' errors are the library's."""
        failures = [answer.failure for answer in answers if answer.failure is not None]
        for failure in failures:
            if failure.code in LIBRARY_DOWN | PROCESS_DOWN:
                self._fail(failure, moment)
        if failures and len(failures) == len(answers) and all(failure.code == Code.UNKNOWN for failure in failures):
            self._must_initialise_anew = True
            self._endure_unknown(moment)
            return
        self._has_worked = self._has_worked or len(failures) < len(answers)
        self._unknown_since_seconds = None

    def _fail(self, failure: Failure, moment: Moment) -> NoReturn:
        """Raise what the library's failure comes to."""
        self._must_initialise_anew = True
        if failure.code in PROCESS_DOWN:
            raise FatalSourceError(
                f"NVML: {failure.text} The driver was changed while this process held the old library: a new container gets the new one."
            )
        if failure.code == Code.UNKNOWN:
            self._endure_unknown(moment)
        else:
            self._unknown_since_seconds = None
        advice = _ADVICE.get(failure.code)
        raise SourceError(f"NVML: {failure.text}" + (f": {advice}" if advice else ""))

    def _endure_unknown(self, moment: Moment) -> None:
        if not self._has_worked:
            return
        if self._unknown_since_seconds is None:
            self._unknown_since_seconds = moment.monotonic_seconds
        seconds = moment.monotonic_seconds - self._unknown_since_seconds
        if seconds >= self._give_up_seconds:
            raise FatalSourceError(
                f"NVML has answered with its unknown error alone for {seconds:.0f} s, and initialising it anew does not help: "
                "the container's access to /dev/nvidia* was revoked, as a systemd reload does. A new container has it again."
            )

    # --- the reading ---

    def _build_reading(self, node: _Node, answers: Mapping[int, Answer]) -> NvmlReading:
        remembered: dict[str, Remembered] = {}
        readings: dict[int, Sequence[GpuReading]] = {}
        down: dict[str, str] = {}
        for index, answer in answers.items():
            if answer.remembered is not None and answer.uuid is not None and answer.uuid not in remembered:
                self._uuid_of_index[index] = answer.uuid
                remembered[answer.uuid] = answer.remembered
                readings[index] = answer.readings
                self._log_functions(answer.remembered)
                for reading in answer.readings:
                    if not reading.up:
                        down[reading.gpu.gpu_uuid] = answer.remembered.unavailable[reading.gpu.gpu_uuid, "nvmlDeviceGetMemoryInfo"]
        unidentified = sum(answer.unidentified for answer in answers.values())
        for index, answer in answers.items():
            if index in readings:
                continue
            uuid = answer.uuid or self._uuid_of_index.get(index)
            if uuid is None or uuid in remembered or uuid in down:
                unidentified += 1
                continue
            self._uuid_of_index[index] = uuid
            gpus: tuple[Gpu, ...] = (Gpu(gpu_uuid=uuid, index=index),)
            if uuid in self._remembered:
                remembered[uuid] = self._remembered[uuid]
                gpus = remembered[uuid].gpus
            readings[index] = tuple(GpuReading(gpu=gpu, up=False) for gpu in gpus)
            down[uuid] = answer.failure.text if answer.failure is not None else "it has the uuid of another device"
        self._remembered = remembered
        gpus_read = tuple(reading for _, of_index in sorted(readings.items()) for reading in of_index)
        self._log_states(gpus_read, down, unidentified)
        return NvmlReading(
            driver_version=node.driver_version,
            gpus=gpus_read,
            gpus_unidentified=unidentified,
            dropped_samples=dict(sum((Counter(answer.dropped) for answer in answers.values()), Counter[str]())),
        )

    def _log_states(self, readings: Iterable[GpuReading], down: Mapping[str, str], unidentified: int) -> None:
        for uuid, reason in down.items():
            if self._logged_down.get(uuid) != reason:
                _log.warning("gpu_uuid=%s state=down reason=%r", uuid, reason)
        for reading in readings:
            if reading.up and reading.gpu.gpu_uuid in self._logged_down:
                _log.info("gpu_uuid=%s state=up", reading.gpu.gpu_uuid)
        if unidentified != self._logged_unidentified:
            level = logging.WARNING if unidentified else logging.INFO
            _log.log(level, "gpus_unidentified=%d (the driver counts them, and they do not give a uuid)", unidentified)
        self._logged_down, self._logged_unidentified = down, unidentified

    def _log_functions(self, now: Remembered) -> None:
        before = self._remembered.get(now.gpus[0].gpu_uuid) or Remembered(gpus=now.gpus)
        for (uuid, function), reason in now.unavailable.items():
            if before.unavailable.get((uuid, function)) != reason:
                _log.info("gpu_uuid=%s function=%s state=unavailable reason=%r", uuid, function, reason)
        for uuid, function in before.unavailable.keys() - now.unavailable.keys():
            _log.info("gpu_uuid=%s function=%s state=available", uuid, function)
        for uuid in now.scrambled - before.scrambled:
            _log.warning(
                "gpu_uuid=%s state=scrambled: the driver lists processes that cannot be, so none of them is believed. "
                "Drivers 535.43 to 535.86 do this: update the driver",
                uuid,
            )
