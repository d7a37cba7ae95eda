"""Times as people write them."""

import pytest

from exporter.duration import parse_duration, show_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("20s", 20),
        ("90", 90),
        ("1m30s", 90),
        ("2h", 7200),
        ("1.5s", 1.5),
        ("1h1m1s", 3661),
        ("5m", 300),
        ("7d", 604800),
        ("1w1d1h", 694800),
    ],
)
def test_a_time_is_so_many_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "1 s", "20 seconds", "1:30", "1m30", "30s1m", "500ms", "1h1d", "1d1w", "1e3s", "9999999999999s"]
)
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - its text is the caller's own
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (45, "45s"),
        (90, "1m30s"),
        (3599.5, "59m59s"),
        (3690, "1h1m"),
        (300, "5m"),
        (3600, "1h"),
        (86100, "23h55m"),
        (86400, "24h"),
        (169200, "47h"),
        (172800, "2d"),
        (601200, "6d23h"),
    ],
)
def test_a_time_is_written_in_its_two_largest_units(seconds, text):
    assert show_duration(seconds) == text
