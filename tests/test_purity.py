"""The core does no I/O, reads no clock and imports one way. Held by what its files import."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "exporter"

CORE = [
    "snapshot",
    "usage",
    "regions",
    "activity",
    "limits",
    "breach",
    "judge",
    "journal",
    "events",
    "report",
    "health",
    "metrics",
    "series_limit",
    "text_format",
    "node_json",
    "history",
    "duration",
    "advice",
]

# What the core may take of the standard library: none of it can reach the world or a clock.
HARMLESS = {
    "bisect",
    "collections",
    "dataclasses",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "re",
    "typing",
}

# Times are written and names hashed; the test below looks that no clock is read.
HARMLESS_OF = {"events": {"datetime", "hashlib"}, "history": {"array"}, "explain": {"datetime", "difflib"}}

ALLOWED = {
    "snapshot": set(),
    "usage": {"snapshot"},
    "regions": {"snapshot", "usage"},
    "activity": {"usage"},
    "limits": {"claims"},
    "breach": set(),
    "claims": {"snapshot", "claims"},
    "judge": {"breach", "limits", "usage"},
    "report": {"snapshot", "usage", "regions", "activity", "claims", "limits", "breach", "judge"},
    "journal": {"report", "judge", "breach"},
    "events": {"journal", "judge", "breach"},
    "health": set(),
    "text_format": set(),
    "metrics": {"report", "judge", "breach", "health", "text_format"},
    "series_limit": {"report", "metrics", "judge", "snapshot", "usage"},
    "duration": set(),
    "advice": {"duration"},
    "node_json": {"report", "judge", "breach", "health", "claims"},
    "history": {"report", "node_json"},
    "explain": {"explain", "report", "judge", "breach", "limits", "usage", "claims", "snapshot", "health", "node_json"},
}


def core_files():
    return [PACKAGE / f"{name}.py" for name in CORE] + [
        path for room in ("claims", "explain") for path in sorted((PACKAGE / room).glob("*.py"))
    ]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they point"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "exporter")


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_core_imports_nothing_that_can_reach_the_world(path):
    room = path.stem if path.parent == PACKAGE else path.parent.name
    for module in imports(path):
        top = module.split(".")[0]
        if top == "exporter":
            inner = module.split(".")[1] if "." in module else None
            assert inner is None or inner in ALLOWED[room] or inner == "__version__", f"{path.name} imports {module}"
        elif top == "prometheus_client":
            assert room == "text_format", f"{path.name} imports {module}"
        else:
            assert top in HARMLESS | HARMLESS_OF.get(room, set()), f"{path.name} imports {module}"
            assert top in sys.stdlib_module_names


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_core_opens_and_prints_nothing(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "exec", "eval", "__import__"}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in {"now", "utcnow", "today"}
        assert not isinstance(node, ast.Global)


def test_sources_are_handed_to_the_sampler_and_never_imported_by_it():
    modules = set(imports(PACKAGE / "sampler.py"))
    assert not {module for module in modules if module.startswith("exporter.sources.")}


def test_the_server_knows_nothing_of_gpus():
    modules = {module for module in imports(PACKAGE / "server.py") if module.startswith("exporter")}
    assert modules <= {"exporter", "exporter.access", "exporter.web_config"}
