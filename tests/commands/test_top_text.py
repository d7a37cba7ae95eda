"""The cells of fgpu-top: amounts, times, names and bars."""

import pytest
from rich.cells import cell_len

from exporter.commands.top_rows import NONE, UNKNOWN, Amount
from exporter.commands.top_text import UNICODE, bar, bytes_text, count_text, cut, duration_text, percent_text, short_uuid

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (Amount(0), "0"),
        (Amount(1), "<1Mi"),
        (Amount(410 * MIB), "410Mi"),
        (Amount(999 * MIB), "999Mi"),
        (Amount(1000 * MIB), "1.0Gi"),
        (Amount(29.4 * GIB), "29.4Gi"),
        (Amount(99.94 * GIB), "99.9Gi"),
        (Amount(99.96 * GIB), "100Gi"),
        (Amount(1440 * GIB), "1440Gi"),
        (UNKNOWN, "?"),
        (NONE, "-"),
        (Amount(3 * GIB, whole=False), ">=3.0Gi"),
    ],
)
def test_memory_is_told_in_kubernetes_units(amount, expected):
    assert bytes_text(amount) == expected


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (Amount(0.0), "0"),
        (Amount(0.004), "<1"),
        (Amount(0.005), "<1"),
        (Amount(0.01), "1"),
        (Amount(0.436), "44"),
        (Amount(1.0), "100"),
        (UNKNOWN, "?"),
        (NONE, "-"),
    ],
)
def test_a_little_time_is_not_told_as_none(amount, expected):
    assert percent_text(amount) == expected


def test_a_count_that_lacks_a_part_says_so():
    assert (count_text(Amount(2)), count_text(Amount(2, whole=False)), count_text(UNKNOWN)) == ("2", ">=2", "?")


@pytest.mark.parametrize(
    ("seconds", "exact", "expected"),
    [
        (-3, True, "0s"),
        (0, True, "0s"),
        (59.9, True, "59s"),
        (60, True, "1m00s"),
        (100, True, "1m40s"),
        (100, False, "1m"),
        (3725, True, "1h02m"),
        (3725, False, "1h"),
        (90000, True, "1d01h"),
    ],
)
def test_a_time_is_told_in_two_units_or_one(seconds, exact, expected):
    assert duration_text(seconds, exact=exact) == expected


@pytest.mark.parametrize(
    ("text", "width", "keep_end", "expected"),
    [
        ("ranker-5d8f7c9b4-7hm2n", 22, True, "ranker-5d8f7c9b4-7hm2n"),
        ("ranker-5d8f7c9b4-7hm2n", 12, True, "ranker…7hm2n"),
        ("ranker-5d8f7c9b4-7hm2n", 12, False, "ranker-5d8f…"),
        ("推論サーバー", 6, True, "推…ー"),
        ("推論サーバー", 7, True, "推…ー"),
        ("ab", 1, True, "…"),
        ("ab", 0, True, ""),
    ],
)
def test_a_name_is_cut_in_the_middle_by_cells_and_not_by_letters(text, width, keep_end, expected):
    assert cut(text, width, "…", keep_end=keep_end) == expected
    assert cell_len(expected) <= width


@pytest.mark.parametrize(
    ("used", "limit", "total", "expected"),
    [
        (Amount(0), Amount(10), Amount(80), "······"),
        (Amount(1), Amount(1000), Amount(80), "▌·····"),
        (Amount(5), Amount(10), Amount(80), "███···"),
        (Amount(9.99), Amount(10), Amount(80), "█████▌"),
        (Amount(10), Amount(10), Amount(80), "██████"),
        (Amount(11), Amount(10), Amount(80), "█████│"),
        (Amount(20), Amount(10), Amount(80), "███│██"),
        (Amount(5), Amount(0), Amount(80), "│█████"),
        (Amount(40), NONE, Amount(80), "░░░···"),
        (Amount(40), UNKNOWN, Amount(80), "░░░···"),
        (Amount(0), NONE, Amount(80), "······"),
        (Amount(40), NONE, UNKNOWN, ""),
        (Amount(0), Amount(0), Amount(80), ""),
        (UNKNOWN, Amount(10), Amount(80), "?"),
    ],
)
def test_a_bar_is_of_the_limit_and_in_another_shade_of_the_gpu(used, limit, total, expected):
    assert bar(used, limit, total, 6, UNICODE) == expected


def test_a_uuid_is_told_by_its_first_part():
    assert [short_uuid(uuid) for uuid in ("GPU-1fbd2f3c-c156", "MIG-8bf7200f-1574", "MIG-GPU-5a1e7c0e-3b0d/2/0")] == [
        "1fbd2f3c",
        "8bf7200f",
        "5a1e7c0e",
    ]
