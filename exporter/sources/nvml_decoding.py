"""pynvml's structures of utilization samples, turned into values.

There are hundreds in each answer, and pynvml's structures run a function of Python for each field that is read. So each is unpacked from
its memory at once, by the layout that its class declares.
"""

import struct
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any, TypeAlias, cast

from exporter.sources.nvml_samples import Sample

# ctypes structures, made at run time.
Structure: TypeAlias = Any

_FIELDS = ("pid", "timeStamp", "smUtil", "memUtil", "encUtil", "decUtil")
"""A sample's, in the order of Sample's."""


def decode_samples(structures: Sequence[Structure]) -> list[Sample]:
    """Answer the samples in structures of one class: nvmlProcessUtilizationSample_t or nvmlProcessUtilizationInfo_v1_t of nvml.h."""
    if not structures:
        return []
    unpack, pick = _layout(cast(Hashable, type(structures[0])))
    return list(map(_make, map(pick, map(unpack, structures))))


_make = cast(Callable[[Iterable[int]], Sample], partial(tuple.__new__, Sample))  # Sample(*values) takes three times as long


@cache
def _layout(structure: Structure) -> tuple[Callable[[Structure], Iterable[int]], Callable[[Iterable[int]], Iterable[int]]]:
    """Answer what takes all values out of a structure of this class, and what picks those of a sample among them."""
    fields = structure._fields_
    names = [name for name, _ in fields]
    # Native sizes and alignment, as ctypes lays a structure out.
    unpack: Callable[[Structure], Iterable[int]] = struct.Struct("@" + "".join(kind._type_ for _, kind in fields)).unpack_from
    pick: Any = itemgetter(*(names.index(name) for name in _FIELDS))
    return unpack, pick
