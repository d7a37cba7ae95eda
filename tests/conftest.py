"""What tests of several rooms share."""

import sys
from pathlib import Path

import pytest

# Tests are no packages; this makes the folders beside this file importable, as nvml_stand_in.stand_in.
sys.path.insert(0, str(Path(__file__).parent))

from nvml_stand_in.stand_in import StandIn, compile_stand_in, reason_not_to_compile


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory):
    """Answer a function that compiles a stand-in for libnvidia-ml.so.1 that lacks the given symbols, and answers its path."""
    if reason := reason_not_to_compile():
        pytest.skip(reason)
    compiled = {}

    def compile_once(*without):
        key = frozenset(without)
        if key not in compiled:
            compiled[key] = compile_stand_in(tmp_path_factory.mktemp("nvml"), sorted(key))
        return compiled[key]

    return compile_once


@pytest.fixture
def stand_in(tmp_path):
    """Answer a node for the stand-in library; until it is written, the driver is not loaded."""
    return StandIn(tmp_path)
