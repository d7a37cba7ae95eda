"""Amounts and times as people read them."""

from datetime import UTC, datetime

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def memory(amount_bytes: int) -> str:
    """Answer an amount of memory: `45.2 GiB`."""
    return _memory(amount_bytes, 1)


def memory_of(used_bytes: int, limit_bytes: int) -> str:
    """Answer use and limit with as many digits as tell them apart: `45.2 GiB of 40.0 GiB`."""
    for digits in (1, 3, 6):
        used, limit = _memory(used_bytes, digits), _memory(limit_bytes, digits)
        if used != limit or used_bytes == limit_bytes:
            return f"{used} of {limit}"
    return f"{used_bytes} of {limit_bytes} bytes"


def _memory(amount_bytes: int, digits: int) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", _KIB)):
        if amount_bytes >= size:
            return f"{amount_bytes / size:.{digits}f} {unit}"
    return f"{amount_bytes} bytes" if amount_bytes else "0 bytes"


def share(ratio: float) -> str:
    """Answer a share: `50 %`; a small one with as many digits as tell it from none."""
    digits = next((digits for digits in (1, 3, 6) if float(f"{100 * ratio:.{digits}f}")), 1)
    return f"{_percent(ratio, digits)} %"


def shares(used_ratio: float, limit_ratio: float) -> tuple[str, str]:
    """Answer use and limit with as many digits as tell them apart: `50.001 %` and `50 %`."""
    for digits in (1, 3, 6):
        used, limit = _percent(used_ratio, digits), _percent(limit_ratio, digits)
        if used != limit or used_ratio == limit_ratio:
            return f"{used} %", f"{limit} %"
    return repr(used_ratio), repr(limit_ratio)


def _percent(ratio: float, digits: int) -> str:
    return f"{100 * ratio:.{digits}f}".rstrip("0").rstrip(".")


def moment(time_seconds: float) -> str:
    """Answer a wall-clock time: `2026-12-01 04:10:05 UTC`."""
    return datetime.fromtimestamp(time_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def span(seconds: float) -> str:
    """Answer how long something has lasted: `35 s`, `7 min`, `5 h`, `3 days`."""
    if seconds < 2 * _MINUTE:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"{seconds / _HOUR:.0f} h"
    return f"{seconds / _DAY:.0f} days"


def count(number: int, one: str, many: str | None = None) -> str:
    """Answer `1 process`, `2 processes`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def join(parts: list[str]) -> str:
    """Answer `a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
