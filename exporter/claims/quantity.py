"""Numbers as sharing systems and Kubernetes write them. Strict: what the writer's own parser refuses is refused here.

Python's own parsers are kinder than theirs (they take spaces, underscores, NaN and digits of any script), so each grammar is a pattern
first. Every parser raises `ValueError` whose text shows what stood there, cut to a sane length, and what was expected.
"""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

MAX_BYTES = (1 << 63) - 1
"""No amount of memory is larger."""

Number = TypeVar("Number", int, float)

_SHOWN_CHARACTERS = 40
_MAX_DIGITS = 64

_DIGITS = re.compile(r"[0-9]+")
# What Go's ParseFloat and the Kubernetes quantity grammar both take: no NaN, infinity, hexadecimal, underscore or space.
_FLOAT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,4}))?")
_SUFFIXES = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY_SUFFIXES = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
# HAMi-core hands the digits to strtoul with base 0, to which 010 is 8: a zero in front leaves open what was meant.
_CUDA_LIMIT = re.compile(r"(0|[1-9][0-9]{0,19})([kKmMgG]?)")
_CUDA_PERCENT = re.compile(r"0|[1-9][0-9]?|100")
_CUDA_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30}


def shown(text: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """Answer hostile text as it can stand in a log line or an error: quoted, escaped and cut."""
    return ascii(text[:characters]) + ("..." if len(text) > characters else "")


def parse_keyed(key: str, text: str, parse: Callable[[str], Number]) -> Number:
    """Answer what `parse` answers; its ValueError says which key held the text."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def parse_unsigned(text: str, *, maximum: int = (1 << 64) - 1) -> int:
    """Answer a non-negative decimal integer of digits 0-9 alone, as Go's ParseUint(text, 10, 64) reads it."""
    if len(text) > _MAX_DIGITS or not _DIGITS.fullmatch(text) or int(text) > maximum:
        raise ValueError(f"{shown(text)} is no whole number of digits up to {maximum}")
    return int(text)


def parse_percent(text: str) -> int:
    """Answer a percentage from 0 to 100, digits alone."""
    return parse_unsigned(text, maximum=100)


def parse_fraction(text: str) -> float:
    """Answer a share above 0 and below 1, as KAI's admission reads `gpu-fraction`."""
    value = _parse_float(text)
    if not 0 < value < 1:
        raise ValueError(f"{shown(text)} is no fraction between 0 and 1")
    return value


def parse_share(text: str) -> float:
    """Answer a share above 0 and up to 1."""
    value = _parse_float(text)
    if not 0 < value <= 1:
        raise ValueError(f"{shown(text)} is no share above 0 and up to 1")
    return value


def parse_positive_percent(text: str) -> float:
    """Answer a percentage above 0 and up to 100, with or without decimals."""
    value = _parse_float(text)
    if not 0 < value <= 100:  # noqa: PLR2004 - per cent
        raise ValueError(f"{shown(text)} is no percentage above 0 and up to 100")
    return value


def _parse_float(text: str) -> float:
    return float(text) if len(text) <= _MAX_DIGITS and _FLOAT.fullmatch(text) else math.nan


def parse_exact_quantity(text: str) -> Fraction:
    """Answer a Kubernetes quantity as it stands: `100m` of a CPU is 1/10."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_DIGITS else None
    if match is None:
        raise ValueError(f"{shown(text)} is no quantity like 8Gi or 4096M")
    amount, suffix, exponent = Fraction(match[1]), match[2] or "", match[3]
    if suffix in _BINARY_SUFFIXES:
        return amount * (1 << _BINARY_SUFFIXES[suffix])
    return amount * Fraction(10) ** (int(exponent) if exponent else _SUFFIXES[suffix])


def parse_quantity(text: str) -> int:
    """Answer a Kubernetes quantity in whole units (bytes of memory), rounded up; negative ones are refused."""
    amount = parse_exact_quantity(text)
    if not 0 <= amount <= MAX_BYTES:
        raise ValueError(f"{shown(text)} is no amount from 0 to 2^63-1")
    return math.ceil(amount)


def parse_cuda_limit(text: str) -> int:
    """Answer a HAMi-core limit in bytes: k, m and g are powers of 1024, no suffix is bytes. 0 means no limit."""
    match = _CUDA_LIMIT.fullmatch(text)
    value = int(match[1]) << _CUDA_SHIFTS[match[2].lower()] if match else -1
    if not 0 <= value <= MAX_BYTES:
        raise ValueError(f"{shown(text)} is no limit like 4096m, 6g or a number of bytes")
    return value


def parse_cuda_percent(text: str) -> int:
    """Answer HAMi-core's limit of compute in percent, from 0 to 100. 0 means no limit."""
    if not _CUDA_PERCENT.fullmatch(text):
        raise ValueError(f"{shown(text)} is no percentage from 0 to 100")
    return int(text)
