"""A cell of the table as text: amounts, times, names, bars. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import cell_len

from exporter.commands.top_rows import Amount

MIB, GIB = 1 << 20, 1 << 30
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What pictures are made of."""

    full: str
    half: str
    shade: str
    """In place of `full` where there is no limit and the bar is of the whole GPU."""
    empty: str
    limit: str
    """Where the limit is in a bar that goes beyond it."""
    ellipsis: str
    branch: str


UNICODE = Glyphs(full="█", half="▌", shade="░", empty="·", limit="│", ellipsis="…", branch="└ ")
ASCII = Glyphs(full="#", half="=", shade=":", empty=".", limit="|", ellipsis="~", branch="- ")


def bytes_text(amount: Amount) -> str:
    """Answer `29.4Gi`, in Kubernetes' units; `0` was measured, `?` is unknown, `-` is not there, `>=` lacks an unknown part."""
    return _text(amount, _bytes)


def percent_text(amount: Amount) -> str:
    """Answer a ratio in percent, with the same signs."""
    return _text(amount, _percent)


def count_text(amount: Amount) -> str:
    """Answer a number of things, with the same signs."""
    return _text(amount, lambda value: f"{value:.0f}")


def _text(amount: Amount, show: Callable[[float], str]) -> str:
    if amount.known is None:
        return "-" if amount.whole else "?"
    return show(amount.known) if amount.whole else f">={show(amount.known)}"


def _bytes(value: float) -> str:
    if value == 0:
        return "0"
    if value < MIB:
        return "<1Mi"
    if value < 999.5 * MIB:
        return f"{value / MIB:.0f}Mi"
    return f"{value / GIB:.1f}Gi" if value < 99.95 * GIB else f"{value / GIB:.0f}Gi"


def _percent(value: float) -> str:
    return "<1" if 0 < value < 0.01 else f"{100 * value:.0f}"  # noqa: PLR2004 - 0 is idle


def duration_text(seconds: float, *, exact: bool) -> str:
    """Answer `45s`, and `12m` or, exactly, `12m05s`."""
    whole = max(0, int(seconds))
    for unit, name, part, part_name in ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "m"), (_MINUTE, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name}" + (f"{whole % unit // part:02d}{part_name}" if exact else "")
    return f"{whole}s"


def short_uuid(uuid: str) -> str:
    """Answer the first part of `GPU-1fbd2f3c-...`; of the old form of a MIG device it is its parent's."""
    return uuid.removeprefix("MIG-").removeprefix("GPU-")[:8]


def cut(text: str, width: int, ellipsis: str, *, keep_end: bool = True) -> str:
    """Answer the text in at most so many cells. Beginning and end tell pods of one author apart, so the middle goes."""
    if cell_len(text) <= width:
        return text
    if width < 1:
        return ""
    tail = (width - 1) // 2 if keep_end else 0
    return _take(text, width - 1 - tail) + ellipsis + _take(text[::-1], tail)[::-1]


def _take(text: str, width: int) -> str:
    used = 0
    for number, character in enumerate(text):
        used += cell_len(character)
        if used > width:
            return text[:number]
    return text


def bar(used: Amount, limit: Amount, total: Amount, width: int, glyphs: Glyphs) -> str:
    """Answer a picture of used memory against the limit, or, without one, of the whole GPU in another shade."""
    if used.known is None:
        return "?"
    whole = limit.known if limit.known is not None else total.known
    if whole is None or (whole == 0 and used.known == 0):
        return ""
    if limit.known is not None and used.known > limit.known:
        at = min(width - 1, int(width * limit.known / used.known))
        return glyphs.full * at + glyphs.limit + glyphs.full * (width - 1 - at)
    halves = min(2 * width, round(2 * width * used.known / whole))
    if used.known:
        # Full is only what is full, and empty what is empty.
        halves = max(halves, 1) if used.known >= whole else min(max(halves, 1), 2 * width - 1)
    if limit.known is None:
        return (glyphs.shade * ((halves + 1) // 2)).ljust(width, glyphs.empty)
    return (glyphs.full * (halves // 2) + glyphs.half * (halves % 2)).ljust(width, glyphs.empty)
