"""What HAMi-core counts: the shared regions that the library keeps, one for each container, in files of the host.

Called by the sampler's thread. A file that cannot be read (torn, of an unknown layout, put there by someone hostile) costs itself: it is
counted by reason and logged once. Only a host file system that is not there at all is a `SourceError`. Nothing is listed or opened but
what the node's containers and processes lead to; nothing is ever written, mapped or locked; no link is followed where a container may
write; and a name that is no regular file is never opened, because opening a pipe or a device can block or do something.

Where regions lie: HAMi and KAI-resource-isolator 1.1.0 and later `/usr/local/vgpu/containers/<pod UID>_<container>/`, Volcano also
`/usr/local/vgpu/vgpu/containers/` and `/tmp/vgpu/containers/`; KAI-resource-isolator 1.0.0 `/tmp/cudevshr.cache` in the container.
Their layout is `shared_region_t` of https://github.com/Project-HAMi/HAMi-core, src/multiprocess/multiprocess_memory_limit.h, and changed
over time. The version in the header does not tell the layouts apart (v2.8.1 says 1.1 as v2.8.0 does); the file's size does.
"""

import logging
import os
import re
import stat
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from exporter.snapshot import FoundRegion, HostfilesReading, Region, RegionSlot, UnreadableFile
from exporter.sources import SourceError

_log = logging.getLogger(__name__)

# --- the layouts ---

_MAGIC = 19920718
_MOST_DEVICES = 16
_MOST_SLOTS = 1024
_UUID_BYTES = 96
_TOTAL = 32  # of a slot's memory on one device: after context, module, data and offset
_EXITED, _RUNNING, _SUSPENDED = 0, 1, 2
_MAX_BYTES = (1 << 63) - 1
_UUID = re.compile(rb"[!-~]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where things stand in a region, in bytes from its start, or from the start of a slot. Little-endian."""

    file_bytes: int
    """The region and one byte more."""
    device_num: int
    uuids: int
    limits: int
    slots: int
    slot_bytes: int
    proc_num: int
    used: int
    used_bytes: int
    """Of one device."""
    status: int
    seqlock: int | None


LAYOUTS: tuple[Layout, ...] = (
    # 4paradigm's
    Layout(
        file_bytes=804681,
        device_num=48,
        uuids=56,
        limits=1592,
        slots=1848,
        slot_bytes=784,
        proc_num=804664,
        used=8,
        used_bytes=40,
        status=776,
        seqlock=None,
    ),
    # HAMi up to 2.4.0
    Layout(
        file_bytes=1197897,
        device_num=48,
        uuids=56,
        limits=1592,
        slots=1848,
        slot_bytes=1168,
        proc_num=1197880,
        used=8,
        used_bytes=40,
        status=1160,
        seqlock=None,
    ),
    # HAMi 2.4.1 to 2.8.0, where the seqlock is a zero that nothing uses, and 2.8.2 and later
    Layout(
        file_bytes=2008953,
        device_num=56,
        uuids=64,
        limits=1600,
        slots=1856,
        slot_bytes=1960,
        proc_num=2008896,
        used=8,
        used_bytes=64,
        status=1928,
        seqlock=1936,
    ),
    # HAMi 2.8.1 alone
    Layout(
        file_bytes=2008985,
        device_num=88,
        uuids=96,
        limits=1632,
        slots=1888,
        slot_bytes=1960,
        proc_num=2008928,
        used=16,
        used_bytes=64,
        status=1936,
        seqlock=8,
    ),
)
_LAYOUTS_BY_SIZE = {layout.file_bytes: layout for layout in LAYOUTS}

_INT32 = struct.Struct("<i")
_UINT64 = struct.Struct("<Q")


class RegionError(ValueError):
    """A region that cannot be read."""

    def __init__(self, reason: UnreadableFile, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def parse_region(data: bytes | bytearray) -> Region | None:
    """Answer what a region says, or None while the library has not finished setting it up. Raises RegionError."""
    if not data:
        return None
    layout = _LAYOUTS_BY_SIZE.get(len(data))
    if layout is None:
        raise RegionError(UnreadableFile.UNKNOWN_LAYOUT, "the size is that of no known layout")
    (magic,) = _INT32.unpack_from(data)
    if magic == 0:
        return None  # The library writes it last.
    if magic != _MAGIC:
        raise RegionError(UnreadableFile.WRONG_MAGIC, f"it starts with {magic}")
    (devices,) = _UINT64.unpack_from(data, layout.device_num)
    (slots,) = _INT32.unpack_from(data, layout.proc_num)
    if devices > _MOST_DEVICES or not 0 <= slots <= _MOST_SLOTS:
        raise RegionError(UnreadableFile.IMPOSSIBLE_VALUE, f"it has {devices} devices and {slots} processes")
    gpu_uuids = tuple(_parse_uuid(data, layout.uuids + index * _UUID_BYTES) for index in range(devices))
    named = [uuid for uuid in gpu_uuids if uuid is not None]
    if len(set(named)) != len(named):
        raise RegionError(UnreadableFile.IMPOSSIBLE_VALUE, "two of its devices have one uuid")
    limits = (_parse_amount(data, layout.limits + index * _UINT64.size) for index in range(devices))
    parsed = (_parse_slot(data, layout, layout.slots + index * layout.slot_bytes, devices) for index in range(slots))
    return Region(
        gpu_uuids=gpu_uuids,
        memory_limit_bytes=tuple(limit or None for limit in limits),
        slots=tuple(slot for slot in parsed if slot is not None),
    )


def _parse_slot(data: bytes | bytearray, layout: Layout, start: int, devices: int) -> RegionSlot | None:
    (status,) = _INT32.unpack_from(data, start + layout.status)
    if status == _EXITED:
        return None
    if status not in (_RUNNING, _SUSPENDED):
        raise RegionError(UnreadableFile.IMPOSSIBLE_VALUE, f"a process has the status {status}")
    (host_pid,) = _INT32.unpack_from(data, start + 4)
    used = None
    # An odd count says that a writer is in the middle of it, or died there.
    if layout.seqlock is None or _UINT64.unpack_from(data, start + layout.seqlock)[0] % 2 == 0:
        totals = start + layout.used + _TOTAL
        used = tuple(_parse_amount(data, totals + index * layout.used_bytes) for index in range(devices))
    return RegionSlot(host_pid if host_pid > 0 else None, used)


def _parse_amount(data: bytes | bytearray, start: int) -> int:
    (amount,) = _UINT64.unpack_from(data, start)
    if amount > _MAX_BYTES:
        # The library subtracts without looking; below 0 it goes on from 2^64.
        raise RegionError(UnreadableFile.IMPOSSIBLE_VALUE, f"{amount} is no amount of memory")
    return int(amount)


def _parse_uuid(data: bytes | bytearray, start: int) -> str | None:
    text, end, _ = data[start : start + _UUID_BYTES].partition(b"\0")
    if not text:
        return None
    if not end or not _UUID.fullmatch(text):
        raise RegionError(UnreadableFile.IMPOSSIBLE_VALUE, "a device has no readable uuid")
    return text.decode("ascii")


# --- which file systems a container's files may lie on ---

# Opening a file on a network or user-space file system can wait for its server for ever, and a container may mount one on its /tmp.
_LOCAL_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"})
_MAX_MOUNTINFO_BYTES = 1 << 20


def parse_is_local(mountinfo: str, path: str) -> bool:
    """Answer whether all that leads to a path lies on file systems of this machine, by a /proc/PID/mountinfo text (proc(5))."""
    types: dict[str, str] = {}
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if dash and len(fields) > 4:  # noqa: PLR2004 - the fifth field is the mount point
            types[fields[4]] = after.split(" ")[0]  # A later mount hides an earlier one.
    on_the_way = [kind for point, kind in types.items() if point in ("/", path) or path.startswith(point + "/")]
    return "/" in types and all(kind in _LOCAL_FILE_SYSTEMS for kind in on_the_way)


# --- reading ---

_FOLDERS = (
    # The first part is the system's own and may be a link (/usr/local is one on some distributions); the rest is written by containers.
    ("usr/local", ("vgpu", "containers")),
    ("usr/local", ("vgpu", "vgpu", "containers")),
    ("tmp", ("vgpu", "containers")),
)
_SUFFIX = ".cache"
_IN_CONTAINER = ("tmp", "cudevshr.cache")
_MOST_NAMES = 64
_MOST_FILES = 8

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_FileId = tuple[int, int]
"""Device and inode."""


class HostfilesSource:
    """Reads regions below `host_root`, where the host's file system is mounted, and in the file systems of processes in `proc_root`."""

    def __init__(self, *, host_root: Path, proc_root: Path) -> None:
        self._host_root = host_root
        self._proc_root = proc_root
        self._logged: frozenset[tuple[str, str]] = frozenset()

    def read(self, containers: Iterable[tuple[str, str]], pids: Iterable[int]) -> HostfilesReading:
        """Answer the regions of these containers, (pod UID, name), and of these processes. Raises SourceError without a host root."""
        sweep = _Sweep()
        names = [(uid, container) for uid, container in containers if uid and container and "/" not in uid + container]
        try:
            with _opened(str(self._host_root), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) as root:
                for parent, below in _FOLDERS:
                    sweep.read_folder(root, parent, below, names)
        except OSError as error:
            raise SourceError(
                f"{self._host_root} cannot be read ({error.strerror}): mount the host's file system there, or leave out --host-path"
            ) from error
        for pid in sorted(pids):
            sweep.read_container_of(self._proc_root, pid)
        self._log_changes(sweep)
        return HostfilesReading(regions=tuple(sweep.regions()), unreadable=dict(sweep.unreadable))

    def _log_changes(self, sweep: "_Sweep") -> None:
        for (place, reason), size in sweep.complaints.items():
            if (place, reason) not in self._logged:
                _log.warning("file=%s state=unreadable reason=%s size_bytes=%s", place, reason, "unknown" if size is None else size)
        self._logged = frozenset(sweep.complaints)


class _Sweep:
    """One reading in the making."""

    def __init__(self) -> None:
        self.unreadable: Counter[UnreadableFile] = Counter()
        self.complaints: dict[tuple[str, str], int | None] = {}
        """(Where, reason) -> size of the file. By folder, so that names that change do not fill a log."""
        self._regions: dict[_FileId, Region] = {}
        self._seen: set[_FileId] = set()
        self._containers: dict[_FileId, set[tuple[str, str]]] = defaultdict(set)
        self._pids: dict[_FileId, set[int]] = defaultdict(set)

    def regions(self) -> Iterator[FoundRegion]:
        """Answer what was found: a file that is seen through several names once."""
        for file_id, region in self._regions.items():
            yield FoundRegion(region, frozenset(self._containers[file_id]), frozenset(self._pids[file_id]))

    def read_folder(self, root: int, parent: str, below: tuple[str, ...], names: Iterable[tuple[str, str]]) -> None:
        """Read the regions of containers in one of the folders that hold them; a folder that is not there holds none."""
        place = "/".join(("", parent, *below))
        try:
            with _opened(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, root) as start, _descended(start, below) as folder:
                for uid, container in names:
                    self._read_folder_of(folder, place, uid, container)
        except FileNotFoundError:
            return
        except OSError as error:
            self._complain(place, _reason(error))

    def _read_folder_of(self, folder: int, place: str, uid: str, container: str) -> None:
        name = f"{uid}_{container}"
        place = f"{place}/{name}"
        try:
            with _opened(name, _FOLDER_FLAGS, folder) as own:
                with os.scandir(own) as entries:
                    listed = [entry.name for entry in islice(entries, _MOST_NAMES + 1)]
                files = sorted(each for each in listed if each.endswith(_SUFFIX))
                if len(listed) > _MOST_NAMES or len(files) > _MOST_FILES:
                    self._complain(place, UnreadableFile.TOO_MANY_FILES)
                    return
                for each in files:
                    if file_id := self._read_file(own, each, place):
                        self._containers[file_id].add((uid, container))
        except FileNotFoundError:
            return
        except OSError as error:
            self._complain(place, _reason(error))

    def read_container_of(self, proc_root: Path, pid: int) -> None:
        """Read the region in the file system of a process; a process that is gone, or whose files are closed to us, has none."""
        place = f"{proc_root}/{pid}/root/{'/'.join(_IN_CONTAINER)}"
        folder, name = _IN_CONTAINER
        try:
            if not _is_local(proc_root, pid):
                return
            # The link `root` leads into the process's mounts, which no path could; below it nothing is followed, because an absolute
            # link of the container's would lead into this process's own files.
            with (
                _opened(f"{proc_root}/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) as root,
                _opened(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, root) as own,
            ):
                if file_id := self._read_file(own, name, place):
                    self._pids[file_id].add(pid)
        except OSError:
            return  # Nothing was found there: nothing is unreadable.

    def _read_file(self, folder: int, name: str, place: str) -> _FileId | None:
        """Read a file unless it was read before; answer its id, or None where there is nothing to be read."""
        size = None
        try:
            with _opened(name, _LOOK_FLAGS, folder) as found:
                facts = os.fstat(found)
                file_id, size = (facts.st_dev, facts.st_ino), facts.st_size
                if file_id not in self._seen:
                    self._seen.add(file_id)
                    region = _read_region(found, facts)
                    if region is not None:
                        self._regions[file_id] = region
                return file_id
        except FileNotFoundError:
            return None
        except RegionError as error:
            self._complain(place, error.reason, size)
        except OSError as error:
            self._complain(place, _reason(error), size)
        return None

    def _complain(self, place: str, reason: UnreadableFile, size: int | None = None) -> None:
        self.unreadable[reason] += 1
        self.complaints.setdefault((place, reason.value), size)


def _read_region(found: int, facts: os.stat_result) -> Region | None:
    if not stat.S_ISREG(facts.st_mode):
        raise RegionError(UnreadableFile.NOT_A_FILE, "no regular file")
    if facts.st_size == 0:
        return None
    layout = _LAYOUTS_BY_SIZE.get(facts.st_size)
    if layout is None:
        raise RegionError(UnreadableFile.UNKNOWN_LAYOUT, "the size is that of no known layout")
    # The very file that was looked at, whatever its name leads to by now.
    with _opened(f"/proc/self/fd/{found}", _READ_FLAGS) as file:
        return parse_region(_read_bytes(file, layout))


def _read_bytes(file: int, layout: Layout) -> bytearray:
    """Answer a file's bytes, with zeros for the slots that are not taken: most of 2 MB that need not be read."""
    data = bytearray(layout.file_bytes)
    view = memoryview(data)

    def fill(start: int, end: int) -> None:
        if os.preadv(file, [view[start:end]], start) != end - start:
            raise RegionError(UnreadableFile.UNKNOWN_LAYOUT, "it was cut off while it was read")

    fill(0, layout.slots)
    fill(layout.proc_num, layout.file_bytes)
    taken = min(max(_INT32.unpack_from(data, layout.proc_num)[0], 0), _MOST_SLOTS)
    if taken:
        fill(layout.slots, layout.slots + taken * layout.slot_bytes)
    return data


def _is_local(proc_root: Path, pid: int) -> bool:
    try:
        with (proc_root / str(pid) / "mountinfo").open("rb") as file:
            text = file.read(_MAX_MOUNTINFO_BYTES + 1)
    except FileNotFoundError:
        return True  # A process that is gone has no root either.
    return len(text) <= _MAX_MOUNTINFO_BYTES and parse_is_local(text.decode("utf-8", "replace"), "/" + "/".join(_IN_CONTAINER))


def _reason(error: OSError) -> UnreadableFile:
    if isinstance(error, PermissionError):
        return UnreadableFile.NOT_PERMITTED
    if isinstance(error, NotADirectoryError):
        return UnreadableFile.NOT_A_FILE
    return UnreadableFile.IO_ERROR


@contextmanager
def _opened(path: str, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _descended(folder: int, names: tuple[str, ...]) -> Iterator[int]:
    first, *rest = names
    with _opened(first, _FOLDER_FLAGS, folder) as below:
        if not rest:
            yield below
            return
        with _descended(below, tuple(rest)) as deepest:
            yield deepest
