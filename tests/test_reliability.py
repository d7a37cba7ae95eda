"""The table of docs/reliability.md and the tests that it is made of."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).with_name("test_faults.py")
DOCUMENT = Path(__file__).parents[1] / "docs" / "reliability.md"


def names_of_faults():
    return {node.name for node in ast.parse(TESTS.read_text()).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def rows():
    lines = DOCUMENT.read_text().partition("<!-- measured -->")[2].partition("<!-- /measured -->")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_fault_that_is_documented_is_a_test_and_every_test_is_documented():
    assert {row[-1].strip("`") for row in rows()} == names_of_faults()


def test_every_fault_has_words_and_measured_seconds():
    assert len(rows()) > 40
    for fault, still, noticed, whole, _ in rows():
        assert fault
        assert still
        assert all(re.fullmatch(r"\d+\.\d s|", cell) for cell in (noticed, whole))
        assert noticed or whole
