"""Times as people write them: `20s`, `1m30s`, `2h`, `7d`, `2w`, or a bare number of seconds."""

import re

_DURATION = re.compile(r"(?:([0-9]+)w)?(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+(?:\.[0-9]+)?)s)?")
_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_MAX_DURATION_SECONDS = 10.0**9


def parse_duration(text: str) -> float:
    """Answer the seconds of `20s`, `1m30s`, `2h`, `7d`, `2w` or a bare number of seconds. Raises ValueError."""
    match = _DURATION.fullmatch(f"{text}s" if _SECONDS.fullmatch(text) else text)
    if match is None or not text:
        raise ValueError(text)
    weeks, days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    total = ((weeks * 7 + days) * 24 + hours) * 3600 + minutes * 60 + seconds
    if total > _MAX_DURATION_SECONDS:
        raise ValueError(text)
    return total


def show_duration(seconds: float) -> str:
    """Answer a time as people write it, in its two largest units: `45m`, `26h`, `6d23h`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:  # noqa: PLR2004 - two days
        return "".join(f"{number}{unit}" for number, unit in ((hours // 24, "d"), (hours % 24, "h")) if number)
    if not (hours or minutes):
        return f"{seconds:g}s"
    return "".join(f"{number}{unit}" for number, unit in ((hours, "h"), (minutes, "m"), (0 if hours else rest, "s")) if number)
