"""Times as people write them."""

import pytest

from exporter.duration import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("20s", 20), ("90", 90), ("1m30s", 90), ("2h", 7200), ("1.5s", 1.5), ("1h1m1s", 3661), ("5m", 300)]
)
def test_a_time_is_so_many_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 s", "20 seconds", "1:30", "1m30", "30s1m", "500ms", "1e3s", "9999999999999s"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - its text is the caller's own
        parse_duration(text)
