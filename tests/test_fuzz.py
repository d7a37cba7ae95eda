"""Every fuzz target on its kept corpus, and on a few random bytes: `make fuzz` looks further."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FUZZ = Path(__file__).parents[1] / "fuzz"


def load_targets():
    spec = importlib.util.spec_from_file_location("fuzz_targets", FUZZ / "targets.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TARGETS


TARGETS = load_targets()


def test_every_target_has_a_corpus():
    assert {path.name for path in (FUZZ / "corpus").iterdir()} == set(TARGETS)


@pytest.mark.parametrize(("name", "target"), TARGETS.items(), ids=TARGETS)
def test_the_kept_inputs_break_nothing(name, target):
    inputs = sorted((FUZZ / "corpus" / name).iterdir())
    assert inputs
    for path in inputs:
        target(path.read_bytes())


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_no_bytes_break_a_parser(target):
    @settings(max_examples=40, deadline=None)
    @given(st.binary(max_size=400) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
    def never_breaks(data):
        target(data)

    never_breaks()
