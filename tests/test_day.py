"""A part of the day of bench/day.py: pods that come and go and faults, and no number that is wrong."""

import importlib.util
import logging
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "day.py"


@pytest.fixture
def day(caplog):
    caplog.set_level(logging.CRITICAL, logger="exporter")
    spec = importlib.util.spec_from_file_location("day", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_number_is_wrong_through_the_first_faults_of_a_day(day):
    outcome = day.play(240, measure_every=40)
    assert outcome.faults == 5
    assert outcome.pods > 60
    assert outcome.numbers > 2000
    settled, last = outcome.sizes[2], outcome.sizes[-1]
    assert last.threads <= settled.threads + 1
    assert last.descriptors <= settled.descriptors + 1
    assert last.resident_kib - settled.resident_kib < 32 * 1024
