"""The arithmetic that a claim shows, calculated."""

import math
import re


def calculate(rule):
    """Answer what a rule's arithmetic, with which it begins, comes to: bytes, or a ratio."""
    arithmetic = re.sub(r"(?<=\S) \([a-zA-Z].*$", "", rule)
    python = arithmetic.replace(" x ", " * ").replace(" bytes", "").replace(" MiB", " * 1048576")
    assert re.fullmatch(r"[0-9.+*/(), ]+", re.sub(r"floor|ceil|min|e[+-]", "", python)), rule
    return eval(python, {"__builtins__": {}}, {"floor": math.floor, "ceil": math.ceil, "min": min})  # noqa: S307 - numbers and signs only


def shows_its_amounts(memory_bytes, compute_ratio, memory_rule, compute_rule):
    """Whether the amounts of a claim are what its rules come to, and each amount has a rule."""
    return (memory_bytes is None or calculate(memory_rule) == memory_bytes) and (
        compute_ratio is None or math.isclose(calculate(compute_rule), compute_ratio)
    )
