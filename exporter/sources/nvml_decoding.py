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
    return list(map(_decoder(cast(Hashable, type(structures[0]))), structures)) if structures else []


@cache
def _decoder(structure: Structure) -> Callable[[Structure], Sample]:
    """Answer what makes a sample of a structure of this class."""
    fields = structure._fields_
    # Native sizes and alignment, as ctypes lays a structure out.
    unpack = struct.Struct("@" + "".join(kind._type_ for _, kind in fields)).unpack_from
    names = [name for name, _ in fields]
    pick = itemgetter(*(names.index(name) for name in _FIELDS))
    # Sample(*values) takes three times as long.
    make = cast(Callable[[Iterable[int]], Sample], partial(tuple.__new__, Sample))
    return lambda structure: make(pick(unpack(structure)))
