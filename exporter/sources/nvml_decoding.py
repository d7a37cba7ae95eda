"""pynvml's structures of utilization samples, turned into values.

There are hundreds in each answer, and pynvml's structures run a function of Python for each field that is read. So each is unpacked from
its memory at once, by where its class has each field.
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
_LETTERS = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""The struct module's, for unsigned integers by their bytes."""


def decode_samples(structures: Sequence[Structure]) -> list[Sample]:
    """Answer the samples in structures of one class: nvmlProcessUtilizationSample_t or nvmlProcessUtilizationInfo_v1_t of nvml.h."""
    if not structures:
        return []
    unpack, pick = _layout(cast(Hashable, type(structures[0])))
    return list(map(_make, map(pick, map(unpack, structures))))


_make = cast(Callable[[Iterable[int]], Sample], partial(tuple.__new__, Sample))  # Sample(*values) takes three times as long


@cache
def _layout(structure: Structure) -> tuple[Callable[[Structure], Iterable[int]], Callable[[Iterable[int]], Iterable[int]]]:
    """Answer what takes a sample's values out of a structure of this class, and what puts them into the order of Sample's."""
    places = sorted((getattr(structure, name).offset, getattr(structure, name).size, name) for name in _FIELDS)
    letters, end = "=", 0
    for offset, size, _ in places:
        letters += f"{offset - end}x{_LETTERS[size]}"
        end = offset + size
    unpack: Callable[[Structure], Iterable[int]] = struct.Struct(letters).unpack_from
    names = [name for _, _, name in places]
    pick: Any = itemgetter(*map(names.index, _FIELDS))
    return unpack, pick
