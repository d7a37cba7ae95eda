"""What the keys of the live view mean: bytes of a terminal to keys, a key and a state to the next state. Pure."""

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from exporter.commands.top_rows import By, Choice, Sort

_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_SCROLL = {"\x1b[A": -1, "\x1bOA": -1, "k": -1, "\x1b[B": 1, "\x1bOB": 1, "j": 1}
_PAGE = {"\x1b[5~": -1, "\x1b[6~": 1, " ": 1}
_HOME, _END = frozenset({"\x1b[H", "\x1bOH", "\x1b[1~"}), frozenset({"\x1b[F", "\x1bOF", "\x1b[4~"})
_ENTER, _ESCAPE, _BACKSPACE, _CLEAR = frozenset("\r\n"), "\x1b", frozenset("\x7f\x08"), "\x15"
_MOST_CHARACTERS = 100

_Member = TypeVar("_Member", Sort, By)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the person at the keyboard has set."""

    choice: Choice
    containers: bool = True
    first: int = 0
    """Number of the row at the top."""
    typing: bool = False
    """Whether keys are letters of the filter."""
    leaving: bool = False
    """Whether the person wants to leave."""


class Keyboard:
    """Takes keys out of what a terminal sends; a character may come in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def keys(self, sent: bytes) -> Iterator[str]:
        """Answer a character, or the sequence that a key like an arrow sends, for each key."""
        return (match[0] for match in _KEY.finditer(self._decoder.decode(sent)))


def press(state: State, key: str, *, rows: int, room: int) -> State:
    """Answer what the key makes of the state, where so many rows are there and so many are shown."""
    if state.typing:
        return _type(state, key)
    last = max(0, rows - room)
    if (step := _SCROLL.get(key) or room * _PAGE.get(key, 0)) != 0:
        return replace(state, first=max(0, min(last, state.first + step)))
    if key in _HOME or key in _END:
        return replace(state, first=0 if key in _HOME else last)
    change = _CHANGES.get(key)
    return change(state) if change else state


_CHANGES: Mapping[str, Callable[[State], State]] = {
    "q": lambda state: replace(state, leaving=True),
    "s": lambda state: replace(state, choice=replace(state.choice, sort=_next(state.choice.sort)), first=0),
    "g": lambda state: replace(state, choice=replace(state.choice, by=_next(state.choice.by)), first=0),
    "c": lambda state: replace(state, containers=not state.containers),
    "/": lambda state: replace(state, typing=True),
    _ESCAPE: lambda state: replace(state, choice=replace(state.choice, filter=""), first=0),
}


def _type(state: State, key: str) -> State:
    text = state.choice.filter
    if key in _ENTER:
        return replace(state, typing=False)
    if key == _ESCAPE:
        return replace(state, typing=False, choice=replace(state.choice, filter=""), first=0)
    if key in _BACKSPACE:
        text = text[:-1]
    elif key == _CLEAR:
        text = ""
    elif len(key) == 1 and key.isprintable() and len(text) < _MOST_CHARACTERS:
        text += key
    return replace(state, choice=replace(state.choice, filter=text), first=0)


def _next(member: _Member) -> _Member:
    members = list(type(member))
    return members[(members.index(member) + 1) % len(members)]
