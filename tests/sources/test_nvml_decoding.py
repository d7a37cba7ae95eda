"""pynvml's structures of samples, read from their memory."""

import ctypes

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.sources.nvml_decoding import decode_samples
from exporter.sources.nvml_samples import Sample

unsigned = st.integers(0, 2**32 - 1)
samples = st.lists(st.tuples(unsigned, st.integers(0, 2**64 - 1), unsigned, unsigned, unsigned, unsigned), max_size=5)


class Packed(ctypes.Structure):
    """A layout that no driver has: where fields stand is the class's to say."""

    _pack_ = 1
    _fields_ = (
        ("name", ctypes.c_char * 3),
        ("decUtil", ctypes.c_uint),
        ("timeStamp", ctypes.c_ulonglong),
        ("smUtil", ctypes.c_uint),
        ("flag", ctypes.c_ubyte),
        ("memUtil", ctypes.c_uint),
        ("encUtil", ctypes.c_uint),
        ("pid", ctypes.c_uint),
        ("more", ctypes.c_ulonglong),
    )


class Inherited(Packed):
    """The same with a field more."""

    _fields_ = (("evenMore", ctypes.c_uint),)


STRUCTURES = [pynvml.c_nvmlProcessUtilizationSample_t, pynvml.c_nvmlProcessUtilizationInfo_v1_t, Packed, Inherited]


@pytest.mark.parametrize("structure", STRUCTURES)
@given(samples)
def test_a_sample_has_the_values_of_its_structure(structure, values):
    structures = (structure * len(values))()
    for each, (pid, stamp, sm, memory, encoder, decoder) in zip(structures, values, strict=True):
        each.pid, each.timeStamp = pid, stamp
        each.smUtil, each.memUtil, each.encUtil, each.decUtil = sm, memory, encoder, decoder
    decoded = decode_samples(structures[:])
    assert decoded == values
    assert [(each.pid, each.time_stamp, each.decoder_percent) for each in decoded] == [(row[0], row[1], row[5]) for row in values]
    assert all(isinstance(each, Sample) for each in decoded)
