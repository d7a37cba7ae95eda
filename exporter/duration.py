"""Times as people write them: `20s`, `1m30s`, `2h`, or a bare number of seconds."""

import re

_DURATION = re.compile(r"(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+(?:\.[0-9]+)?)s)?")
_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_MAX_DURATION_SECONDS = 10.0**9


def parse_duration(text: str) -> float:
    """Answer the seconds of `20s`, `1m30s`, `2h` or a bare number of seconds. Raises ValueError."""
    match = _DURATION.fullmatch(f"{text}s" if _SECONDS.fullmatch(text) else text)
    if match is None or not text:
        raise ValueError(text)
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    total = hours * 3600 + minutes * 60 + seconds
    if total > _MAX_DURATION_SECONDS:
        raise ValueError(text)
    return total
