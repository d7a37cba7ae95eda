"""Documentation that can drift is held equal to the code."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.claims import SYSTEMS
from exporter.claims.container_env import NAME as CONTAINER_ENV
from exporter.config import FLAGS
from exporter.metrics import EXPORTER_METRICS, NODE_METRICS, PREFIX

ROOT = Path(__file__).parents[1]
NAMES = {PREFIX + row.name for row in (*NODE_METRICS, *EXPORTER_METRICS)} | {PREFIX + "config_info", PREFIX + "series_dropped"}
SERIES = NAMES | {f"{PREFIX}sample_duration_seconds{suffix}" for suffix in ("_bucket", "_count", "_sum")}
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def load_generator():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("path", "render"), load_generator().GENERATED.items(), ids=lambda item: getattr(item, "name", ""))
def test_a_generated_document_is_what_the_code_says(path, render):
    assert path.read_text() == render(), "run `make docs`"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_only_metrics_that_exist(path):
    named = set(re.findall(r"(?<!:)\bfgpu_[a-z0-9_]*[a-z0-9]\b", path.read_text()))
    assert named <= SERIES


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_only_flags_that_exist(path):
    flags = {f"--{flag.name}" for flag in FLAGS} | {"--version", "--help"}
    commands = re.findall(r"fgpu-exporter((?: +--?[^\n`|]*)?)", path.read_text())
    named = {flag for command in commands for flag in re.findall(r"(?<!\S)--[a-z-]+", command)}
    assert named <= flags


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_links_only_to_files_that_exist(path):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_readme_shows_what_the_demo_says():
    shown = re.findall(r"^fgpu_.*\{.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "exporter", "--demo", "--once", "--at", "140s"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert len(shown) > 10
    assert [line for line in shown if line not in said] == []


def test_the_small_scenario_of_the_documentation_has_its_breach(tmp_path):
    text = (ROOT / "docs" / "scenario.md").read_text()
    file = tmp_path / "scenario.yaml"
    file.write_text(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    for at, flag in (("25s", "0.0"), ("30s", "1.0")):
        command = [sys.executable, "-m", "exporter", "--scenario", str(file), "--once", "--at", at]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert re.search(rf'^fgpu_pod_limit_exceeded{{.*pod="train",resource="memory"}} {flag}$', said, re.MULTILINE)


def test_every_sharing_system_is_documented():
    text = (ROOT / "docs" / "sharing-systems.md").read_text()
    for name in (*(system.name for system in SYSTEMS), CONTAINER_ENV):
        assert f"`{name}`" in text


def test_the_project_speaks_of_itself_alone():
    suffixes, made = {".py", ".md", ".toml", ".yaml", ".sh"}, {".venv", ".tools", "build"}
    tracked = [path for path in ROOT.rglob("*") if path.suffix in suffixes and not made & set(path.relative_to(ROOT).parts)]
    for path in tracked:
        if path == Path(__file__):
            continue
        assert not re.search(r"\bpypi\.org\b|\bregistry\.npmjs\b|deb\.debian\.org", path.read_text(errors="replace")), path
