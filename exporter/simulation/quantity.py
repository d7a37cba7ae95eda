"""Kubernetes quantities and times, as scenario files write them.

https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

import math
import re
from fractions import Fraction

MAX_QUANTITY = (1 << 63) - 1  # Kubernetes caps quantities there

_QUANTITY = re.compile(r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]+))?")
_FACTORS = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    **{letter: Fraction(10 ** (3 * power)) for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Fraction(1 << (10 * power)) for power, letter in enumerate("KMGTPE", 1)},
}
_LONGEST_NUMBER = 100
_HIGHEST_EXPONENT = 100

_DURATION = re.compile(r"(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+(?:\.[0-9]+)?)s)?")
_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_MAX_DURATION_SECONDS = 10.0**9


def parse_quantity(text: str) -> int:
    """Answer a quantity of bytes. Fractions of a byte are rounded up, as Kubernetes does. Raises ValueError."""
    value = parse_exactly(text)
    if value < 0:
        raise ValueError("it is negative")
    if value > MAX_QUANTITY:
        raise ValueError("it is above 2^63 - 1")
    return math.ceil(value)


def parse_exactly(text: str) -> Fraction:
    """Answer a quantity without any rounding: `100m` of a CPU is 1/10. Raises ValueError."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError("it is not a number with one of the suffixes n, u, m, k, M, G, T, P, E, Ki, Mi, Gi, Ti, Pi, Ei or an exponent")
    sign, number, suffix, exponent = match.groups()
    if len(number) > _LONGEST_NUMBER or abs(int((exponent or "0")[:_LONGEST_NUMBER])) > _HIGHEST_EXPONENT:
        raise ValueError("it is too long")
    factor = Fraction(10) ** int(exponent) if exponent else _FACTORS.get(suffix, Fraction(1))
    return Fraction(f"{sign}{number.removesuffix('.')}") * factor


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
