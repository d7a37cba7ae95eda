"""Writes HAMi-core's shared regions as C would: the library's structures, member for member, with offsets that the compiler's rules make.

Run as a program it prints the regions that the cases hold, as `gzip:` of a scenario file takes them.
"""

import base64
import ctypes
import gzip
import sys
from ctypes import c_char, c_int32, c_uint32, c_uint64
from dataclasses import dataclass, replace

MAGIC = 19920718
DEVICES, SLOTS = 16, 1024

SEMAPHORE = c_uint64 * 4  # sem_t of glibc on 64 bits
UUIDS = (c_char * 96) * DEVICES
AMOUNTS = c_uint64 * DEVICES


def structure(name, *fields):
    return type(name, (ctypes.LittleEndianStructure,), {"_fields_": list(fields)})


def parts_of_memory(*more):
    names = ("context_size", "module_size", "data_size", "offset", "total")
    return structure("device_memory_t", *((name, c_uint64) for name in names), *more)


SMALL_MEMORY = parts_of_memory() * DEVICES
LARGE_MEMORY = parts_of_memory(("unused", c_uint64 * 3)) * DEVICES
SMALL_UTIL = structure("device_util_t", ("dec_util", c_uint64), ("enc_util", c_uint64), ("sm_util", c_uint64)) * DEVICES
LARGE_UTIL = (
    structure("device_util_t", ("dec_util", c_uint64), ("enc_util", c_uint64), ("sm_util", c_uint64), ("unused", c_uint64 * 3)) * DEVICES
)

PIDS = (("pid", c_int32), ("hostpid", c_int32))
SLOT_A = structure("slot", *PIDS, ("used", SMALL_MEMORY), ("monitorused", AMOUNTS), ("status", c_int32))
SLOT_B = structure("slot", *PIDS, ("used", SMALL_MEMORY), ("monitorused", AMOUNTS), ("device_util", SMALL_UTIL), ("status", c_int32))
SLOT_C = structure(
    "slot",
    *PIDS,
    ("used", LARGE_MEMORY),
    ("monitorused", AMOUNTS),
    ("device_util", LARGE_UTIL),
    ("status", c_int32),
    ("seqlock", c_uint64),
    ("unused", c_uint64 * 2),
)
SLOT_D = structure(
    "slot",
    *PIDS,
    ("seqlock", c_uint64),
    ("used", LARGE_MEMORY),
    ("monitorused", AMOUNTS),
    ("device_util", LARGE_UTIL),
    ("status", c_int32),
    ("unused", c_uint64 * 2),
)

OLD_HEAD = (("initialized_flag", c_int32), ("sm_init_flag", c_int32), ("owner_pid", c_uint64), ("sem", SEMAPHORE))
HEAD = (
    ("initialized_flag", c_int32),
    ("major_version", c_uint32),
    ("minor_version", c_uint32),
    ("sm_init_flag", c_int32),
    ("owner_pid", c_uint64),
    ("sem", SEMAPHORE),
)
LIMITS = (("device_num", c_uint64), ("uuids", UUIDS), ("limit", AMOUNTS), ("sm_limit", AMOUNTS))
OLD_TAIL = (("proc_num", c_int32), ("utilization_switch", c_int32), ("recent_kernel", c_int32), ("priority", c_int32))
TAIL = (*OLD_TAIL, ("last_kernel_time", c_uint64), ("sem_postinit", SEMAPHORE))

REGIONS = {
    "4paradigm": structure("region", *OLD_HEAD, *LIMITS, ("procs", SLOT_A * SLOTS), *OLD_TAIL),
    "2.4.0": structure("region", *OLD_HEAD, *LIMITS, ("procs", SLOT_B * SLOTS), *OLD_TAIL),
    "2.8.2": structure("region", *HEAD, *LIMITS, ("procs", SLOT_C * SLOTS), *TAIL),
    "2.8.1": structure("region", *HEAD, ("sem_other", SEMAPHORE), *LIMITS, ("procs", SLOT_D * SLOTS), *TAIL),
}
VERSIONS = tuple(REGIONS)


@dataclass(frozen=True)
class Process:
    host_pid: int
    used: tuple = ()
    """Bytes, for each device."""
    status: int = 1
    seqlock: int = 0
    pid: int = 7


def write_region(version, *, gpus=(), limits=(), processes=(), magic=MAGIC, device_num=None, proc_num=None):
    """Answer the bytes of a region's file: the region and one byte more."""
    region = REGIONS[version]()
    region.initialized_flag = magic
    region.device_num = len(gpus) if device_num is None else device_num
    region.proc_num = len(processes) if proc_num is None else proc_num
    region.owner_pid = 7
    if hasattr(region, "major_version"):
        region.major_version, region.minor_version = 1, 1 if version == "2.8.1" else 2
        region.last_kernel_time = 1767225600
    for index, uuid in enumerate(gpus):
        region.uuids[index].value = uuid.encode()
    for index, limit in enumerate(limits):
        region.limit[index] = limit
        region.sm_limit[index] = 100
    for slot, process in zip(region.procs, processes, strict=False):
        slot.pid, slot.hostpid, slot.status = process.pid, process.host_pid, process.status
        if hasattr(slot, "seqlock"):
            slot.seqlock = process.seqlock
        for index, used in enumerate(process.used):
            # All parts are told apart from the total, so that reading the wrong one shows.
            slot.used[index].context_size, slot.used[index].data_size, slot.used[index].offset = 1, 2, 3
            slot.used[index].total = used
            slot.monitorused[index] = 4
    return bytes(region) + b"\0"


def encode(region):
    """Answer a region as `gzip:` of a scenario file takes it."""
    return base64.b64encode(gzip.compress(region, mtime=0)).decode()


# --- the regions that the cases hold: case -> path -> region, in the order of its timeline ---

GIB = 1 << 30
MIB = 1 << 20
A = "GPU-3e1ebc05-ab25-4c40-9348-335be3599522"
B = "GPU-a8d1c6b4-02f7-4a6e-8f0d-7c3b5e914d26"
TRAIN = "9d0b6a3e-54c1-4a57-8d8f-2b1f3c6e7a11"
SERVE = "c2f4e8d1-7b36-4f0a-9a65-0e8d7c5b4a22"

_OWN = {"gpus": (A,), "limits": (8192 * MIB,) * DEVICES}
_SLOTS = (Process(41400, (5 * GIB,)), Process(41499, (3 * GIB,)), Process(41498, (GIB,), status=0))


def case_regions():
    """Answer every region that a case holds, by case and path."""
    train = f"/usr/local/vgpu/containers/{TRAIN}_main"
    serve = f"/usr/local/vgpu/containers/{SERVE}_server"
    volcano = "/tmp/vgpu/containers"  # noqa: S108 - where Volcano's device plugin puts them
    tight = {"gpus": (A,), "processes": (Process(41400, (5 * GIB,)),)}
    kai = {"gpus": (A,), "processes": (Process(41400, (3 * GIB,)),)}
    both = {"gpus": (A, B), "limits": (8192 * MIB, 4096 * MIB)}
    return {
        "hami/region-counts-living-processes": {
            f"{train}/0b6d2c1e-8a0f-4e11-9a39-5d2f60b7c001.cache": [write_region("2.8.2", processes=_SLOTS, **_OWN)],
            f"{serve}/0b6d2c1e-8a0f-4e11-9a39-5d2f60b7c002.cache": [
                write_region("2.8.1", processes=(replace(_SLOTS[0], host_pid=41401, used=(2 * GIB,), status=2),), **_OWN)
            ],
        },
        "hami/region-is-tighter": {
            f"{train}/0b6d2c1e-8a0f-4e11-9a39-5d2f60b7c001.cache": [
                write_region("2.8.2", limits=(4096 * MIB,), **tight),
                write_region("2.8.2", limits=(65536 * MIB,), **tight),
            ],
        },
        "kai/region-in-the-container": {
            "/proc/41400/root/tmp/cudevshr.cache": [write_region("2.8.2", limits=(65536 * MIB,) * DEVICES, **kai)],
            f"{serve}/usage.cache": [
                write_region("2.8.2", gpus=(A,), limits=(3072 * MIB,) * DEVICES, processes=(Process(41401, (GIB,)),)),
            ],
        },
        "volcano/region-with-another-name": {
            f"{volcano}/{TRAIN}_log/0b6d2c1e-8a0f-4e11-9a39-5d2f60b7c001.cache": [
                write_region("2.4.0", processes=(Process(41400, (5 * GIB, GIB)),), **both)
            ],
            f"/usr/local/vgpu/vgpu/containers/{SERVE}_server/0b6d2c1e-8a0f-4e11-9a39-5d2f60b7c002.cache": [
                write_region("4paradigm", processes=(Process(41401, (2 * GIB, GIB)),), **both)
            ],
        },
    }


if __name__ == "__main__":
    for case, paths in case_regions().items():
        for path, regions in paths.items():
            for region in regions:
                sys.stdout.write(f"{case} {path}: {{gzip: {encode(region)}}}\n")
