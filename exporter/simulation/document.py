"""Strict reading of a YAML file: every value is of the type that its key wants, and every complaint names file, line and key.

A reader is a function from a `Place` to a value. What stands behind a YAML alias is read once for each reader, however often the file
refers to it: a file of a few kilobytes can stand for megabytes.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from exporter.claims.quantity import parse_quantity
from exporter.duration import parse_duration

T = TypeVar("T")
E = TypeVar("E")

Json = Mapping[str, Any]
"""A Kubernetes object as decoded JSON. Never changed, because aliases share it."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML was built with it

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    f"{_TAG}null": "nothing",
    f"{_TAG}bool": "a truth value",
    f"{_TAG}int": "a number",
    f"{_TAG}float": "a number",
    f"{_TAG}timestamp": "a date",
}
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_LONGEST_SHOWN = 40


class ScenarioError(Exception):
    """A scenario file that cannot be used. The text is one line: file, line, key, and what was expected there."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file, and what was read of it already."""

    file: str
    known: dict[tuple[yaml.Node, object], Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """A value in the file, and the way to it."""

    document: Document
    node: yaml.Node
    parent: "Place | None" = None
    step: str = ""
    """What leads here from the parent: `.uuid` or `[3]`."""

    @property
    def line(self) -> int:
        """Answer the line on which the value begins, counted from 1."""
        return int(self.node.start_mark.line) + 1

    @property
    def key(self) -> str:
        """Answer the whole way to the value: `gpus[0].mig[1].uuid`."""
        steps = []
        place: Place | None = self
        while place is not None:
            steps.append(place.step)
            place = place.parent
        return "".join(reversed(steps)).removeprefix(".") or "the file"

    def error(self, text: str) -> ScenarioError:
        """Answer a complaint about this value."""
        return ScenarioError(f"{self.document.file}:{self.line}: {self.key}: {text}")

    def wrong(self, expected: str) -> ScenarioError:
        """Answer the complaint that something else stands here."""
        return self.error(f"expected {expected}, found {_describe(self.node)}")


Reader = Callable[[Place], T]


def open_document(path: Path) -> Place:
    """Answer the whole of a YAML file. Raises ScenarioError where it cannot be read or is no YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no UTF-8 text ({error.reason} at byte {error.start})"
        raise ScenarioError(f"{path}: cannot be read: {reason}") from error
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ScenarioError(f"{path}:{line}: no valid YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ScenarioError(f"{path}:{line}: no valid YAML: {error.reason}") from error
    except RecursionError as error:
        raise ScenarioError(f"{path}:1: no usable YAML: nested too deeply") from error
    if node is None:
        raise ScenarioError(f"{path}:1: the file is empty: expected a mapping with at least the key node")
    return Place(Document(str(path)), node)


def once(read: Reader[T]) -> Reader[T]:
    """Answer a reader that reads each node once."""

    def read_once(place: Place) -> T:
        known = place.document.known
        key = (place.node, read)
        if key not in known:
            known[key] = read(place)
        value: T = known[key]
        return value

    return read_once


# --- collections ---


def read_items(place: Place) -> Iterator[tuple[str, Place]]:
    """Answer the keys and values of a mapping, those that `<<` brings included. A key that stands twice is an error."""
    if not isinstance(place.node, yaml.MappingNode) or place.node.tag != f"{_TAG}map":
        raise place.wrong("a mapping")
    lines: dict[str, int] = {}
    merged: dict[str, Place] = {}
    own: dict[str, Place] = {}
    for key_node, value_node in place.node.value:
        key_place = Place(place.document, key_node, place)
        if key_node.tag == f"{_TAG}merge":
            for key, value in _read_merged(Place(place.document, value_node, place, ".<<")):
                merged.setdefault(key, value)
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            raise key_place.wrong("a key")
        key = key_node.value
        if key in lines:
            raise Place(place.document, key_node, place, f".{key}").error(f"stands here twice, first on line {lines[key]}")
        lines[key] = key_place.line
        own[key] = Place(place.document, value_node, place, f".{key}")
    yield from (merged | own).items()


def _read_merged(place: Place) -> Iterator[tuple[str, Place]]:
    sources = read_places(place) if isinstance(place.node, yaml.SequenceNode) else [place]
    for source in sources:
        if any(source.node is above.node for above in _above(place)):
            raise source.error("refers to itself")
        yield from read_items(source)


def _above(place: Place) -> Iterator[Place]:
    above = place.parent
    while above is not None:
        yield above
        above = above.parent


def read_places(place: Place) -> list[Place]:
    """Answer the items of a list."""
    if not isinstance(place.node, yaml.SequenceNode) or place.node.tag != f"{_TAG}seq":
        raise place.wrong("a list")
    return [Place(place.document, node, place, f"[{index}]") for index, node in enumerate(place.node.value)]


def sequence(item: Reader[T]) -> Reader[tuple[T, ...]]:
    """Answer a reader of lists."""

    def read(place: Place) -> tuple[T, ...]:
        return tuple(item(entry) for entry in read_places(place))

    return once(read)


def mapping_of(value: Reader[T]) -> Reader[Mapping[str, T]]:
    """Answer a reader of mappings with keys of any name."""

    def read(place: Place) -> Mapping[str, T]:
        return {key: value(entry) for key, entry in read_items(place)}

    return once(read)


def record(fields: Mapping[str, tuple[str, Reader[Any]]], *, required: tuple[str, ...] = ()) -> Reader[Mapping[str, Any]]:
    """Answer a reader of mappings whose keys are known: key -> (name of the value, its reader). Values not said are absent."""

    def read(place: Place) -> Mapping[str, Any]:
        said = {}
        for key, entry in read_items(place):
            if key not in fields:
                raise Place(place.document, _key_node(place.node, key) or entry.node, place, f".{key}").error(_unknown_key(key, fields))
            name, reader = fields[key]
            said[name] = reader(entry)
        for key in required:
            if fields[key][0] not in said:
                raise place.error(f"the key {key} is missing")
        return said

    return once(read)


def _key_node(node: yaml.Node, key: str) -> yaml.Node | None:
    return next((key_node for key_node, _ in node.value if key_node.value == key), None)


def _unknown_key(key: str, fields: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(key, fields, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"unknown key; {meant}expected one of {', '.join(fields)}"


# --- values ---


def text(place: Place) -> str:
    """Read a text."""
    node = place.node
    if isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}str":
        return str(node.value)
    quoting = "; put it in quotes" if isinstance(node, yaml.ScalarNode) and node.value else ""
    raise place.error(f"expected text, found {_describe(node)}{quoting}")


def name(place: Place) -> str:
    """Read a text that is not empty."""
    value = text(place)
    if not value.strip():
        raise place.wrong("a name")
    return value


def boolean(place: Place) -> bool:
    """Read true or false."""
    if isinstance(place.node, yaml.ScalarNode) and place.node.tag == f"{_TAG}bool":
        return _TRUTH[place.node.value.lower()]
    raise place.wrong("true or false")


def integer(low: int, high: int, what: str = "a whole number") -> Reader[int]:
    """Answer a reader of whole numbers from `low` to `high`."""

    def read(place: Place) -> int:
        node = place.node
        # Only plain decimals: YAML 1.1 takes 010 for 8 and 1:30 for 90.
        if isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}int" and re.fullmatch(r"[+-]?(0|[1-9][0-9]{0,19})", node.value):
            value = int(node.value)
            if low <= value <= high:
                return value
        raise place.wrong(f"{what} from {low} to {high}")

    return read


def choice(*options: str) -> Reader[str]:
    """Answer a reader of one of some words."""

    def read(place: Place) -> str:
        if isinstance(place.node, yaml.ScalarNode) and place.node.value in options:
            return str(place.node.value)
        raise place.wrong(f"one of {', '.join(options)}")

    return read


def quantity(place: Place) -> int:
    """Read a Kubernetes quantity of bytes."""
    return quantity_or({})(place)


def quantity_or(words: Mapping[str, E]) -> Reader[int | E]:
    """Answer a reader of Kubernetes quantities of bytes, in whose place some words may stand."""
    expected = " or ".join(["a Kubernetes quantity such as 10Gi, 500M or 1024", *words])

    def read(place: Place) -> int | E:
        node = place.node
        if not isinstance(node, yaml.ScalarNode) or node.tag not in {f"{_TAG}str", f"{_TAG}int", f"{_TAG}float"}:
            raise place.wrong(expected)
        if node.value in words:
            return words[node.value]
        try:
            return parse_quantity(node.value)
        except ValueError as error:
            raise place.error(f"expected {expected}, found {_describe(node)}: {error}") from error

    return read


def duration(place: Place) -> float:
    """Read a time from the start, in seconds."""
    try:
        if isinstance(place.node, yaml.ScalarNode):
            return parse_duration(place.node.value)
    except ValueError:
        pass
    raise place.wrong("a time from the start such as 20s, 1m30s or 2h")


def plain(place: Place) -> Any:  # noqa: ANN401 - JSON has no narrower type
    """Read any value that JSON can carry."""
    if isinstance(place.node, yaml.ScalarNode):
        return _read_scalar(place)
    return _read_collection(place)


_IN_PROGRESS = object()


def _read_collection(place: Place) -> Any:  # noqa: ANN401 - JSON has no narrower type
    known = place.document.known
    key = (place.node, plain)
    if key not in known:
        known[key] = _IN_PROGRESS
        if isinstance(place.node, yaml.MappingNode):
            known[key] = {entry_key: plain(entry) for entry_key, entry in read_items(place)}
        else:
            known[key] = [plain(entry) for entry in read_places(place)]
    if known[key] is _IN_PROGRESS:
        raise place.error("refers to itself")
    return known[key]


def _read_scalar(place: Place) -> object:
    node = yaml.ScalarNode(place.node.tag, place.node.value)
    construct = yaml.constructor.SafeConstructor()
    try:
        match node.tag.removeprefix(_TAG):
            case "str" | "timestamp":  # JSON has no dates: the API server sends them as text
                return str(node.value)
            case "null":
                return None
            case "bool":
                return _TRUTH[node.value.lower()]
            case "int":
                return construct.construct_yaml_int(node)
            case "float" if math.isfinite(value := construct.construct_yaml_float(node)):
                return value
    except ValueError as error:
        raise place.error(f"expected a number, found {_describe(node)}") from error
    raise place.wrong("a value that JSON can carry")


def _describe(node: yaml.Node) -> str:
    if not node.tag.startswith(_TAG):
        return f"the tag {node.tag}"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if node.tag == f"{_TAG}null":
        return "nothing"
    shown = node.value if len(node.value) <= _LONGEST_SHOWN else f"{node.value[:_LONGEST_SHOWN]}..."
    kind = _SCALARS.get(node.tag)
    return f"{kind} ({shown!r})" if kind else repr(shown)
