"""fgpu-top printed once: into a pipe, on a terminal, as JSON; what it says when there is nothing to show."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live import Daemon

from exporter.commands import COMMANDS, top
from exporter.commands.top_rows import By, Sort

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "fgpu-top.md").read_text()
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
NO_SETTINGS = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"}


def run_top(*arguments, program=("-m", "exporter.commands.top"), **more):
    """Run it with pipes for a terminal."""
    environment = {name: value for name, value in os.environ.items() if name not in NO_SETTINGS} | {"PYTHONUTF8": "1", **more}
    done = subprocess.run([sys.executable, *program, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_captures_are_what_is_shown_of_the_demo(capture_top, demo):
    texts = capture_top.capture_texts(demo.url, demo.sample_seconds)
    for name, text in texts.items():
        assert (ROOT / "docs" / "captures" / name).read_text() == text, f"{name}: run `make captures`"
    assert max(len(line) for line in texts["top-80.txt"].splitlines()) <= 80
    assert CONTROL.search(texts["top-pipe.txt"]) is None
    assert f"```\n{texts['top-80.txt']}```" in DOCUMENT


def test_the_picture_says_the_same_and_fetches_nothing(capture_top, demo):
    for picture in (
        (ROOT / "docs" / "captures" / "top.svg").read_text(),
        capture_top.render_picture(demo.answer, demo.sample_seconds),
    ):
        assert "mem+comp" in picture
        assert "url(http" not in picture.replace('"', "")


@pytest.fixture(scope="module")
def daemon():
    daemon = Daemon(["--demo", "--sample-interval-seconds", "0.5"], {}).wait_until_started()
    daemon.wait_for(1.0, "fgpu_source_up", source="kubernetes")
    yield daemon
    daemon.stop()


def test_a_running_exporter_is_shown_in_a_pipe_as_lines(daemon):
    status, said, complaint = run_top("--url", f"http://127.0.0.1:{daemon.port}")
    assert (status, complaint) == (0, "")
    assert said.startswith("gpu-node-7, fgpu-exporter ")
    assert re.search(r"^. 0 e27b441d +vision +detector-train-0 +trainer +\S+ +\S+Gi 39\.8Gi ", said, re.MULTILINE)
    assert CONTROL.search(said) is None
    assert not re.search(r" $", said, re.MULTILINE)


def test_a_pipe_is_as_wide_as_columns_says(daemon):
    _, said, _ = run_top("--url", f"http://127.0.0.1:{daemon.port}", COLUMNS="80")
    assert 70 < max(len(line) for line in said.splitlines()) <= 80


def test_it_is_a_command_of_the_exporter_and_a_program_of_its_own(daemon):
    assert COMMANDS["top"] == "exporter.commands.top"
    status, said, _ = run_top("top", "--url", f"127.0.0.1:{daemon.port}", "--json", program=("-m", "exporter"))
    assert (status, json.loads(said)["node"]) == (0, "gpu-node-7")
    program = 'import sys; from exporter.commands.top import main; sys.argv = ["fgpu-top", "--version"]; main()'
    assert run_top(program=("-c", program))[1].startswith("fgpu-top ")
    assert re.search(r'^fgpu-top = "exporter\.commands\.top:main"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_json_is_for_scripts(demo):
    status, said, _ = run_top("--url", demo.url, "--json", "--by", "gpu", "--sort", "gpu")
    answer = json.loads(said)
    assert status == 0
    assert [(row["kind"], row["gpu"], len(row["rows"])) for row in answer["rows"]] == [
        ("gpu", 0, 3),
        ("gpu", 1, 4),
        ("gpu", 2, 1),
        ("gpu", 0, 1),
    ]
    assert answer["rows"][1]["limit_exceeded"] == {"memory": True, "compute": True, "unallocated": True}


def test_a_reader_that_has_seen_enough_is_no_error(demo):
    command = f"{sys.executable} -m exporter.commands.top --url {demo.url} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gpu-node-7")


def test_an_encoding_without_blocks_gets_letters(demo):
    status, said, complaint = run_top("--url", demo.url, PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert (status, complaint) == (0, "")
    assert said.isascii()
    assert "####" in said


@pytest.mark.parametrize(
    ("arguments", "environment", "colours"),
    [(["--once"], {}, True), (["--once", "--no-color"], {}, False), (["--once"], {"NO_COLOR": "1"}, False), ([], {"TERM": "dumb"}, False)],
)
def test_colours_are_for_terminals_that_want_them(demo, terminal, arguments, environment, colours):
    shown = terminal(demo.url, demo.sample_seconds, *arguments, height=40, **environment)
    assert shown.wait_for_end() == 0
    assert "mem+comp 1m" in shown.text
    assert (re.search(rb"\x1b\[[0-9;]*3[0-7]m", shown.sent) is not None) == colours
    assert environment.get("TERM") != "dumb" or b"\x1b" not in shown.sent
    assert max(len(line) for line in shown.text.splitlines()) <= 80


def test_a_node_without_pods_is_no_error(demo, serve):
    status, said, _ = run_top("--url", serve(demo.answer | {"pods": []}).url)
    assert (status, "no pod uses or was given a GPU of this node" in said) == (0, True)


# --- nothing to show ---


def test_nobody_listens():
    status, said, complaint = run_top("--url", "http://127.0.0.1:9", "--once")
    assert (status, said) == (1, "")
    assert complaint == (
        "fgpu-top: no connection to http://127.0.0.1:9: start an exporter there, forward its port, or say where one is with --url\n"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"api_version": "v2"}, "answers in version v2 and this program reads v1: use the program of the exporter's own version"),
        ({"gpus": None, "pods": None}, "has no report that can be believed (its last sample is older than three intervals): ask again"),
        ({"pods": [{"pod": "\x1b[2J"}]}, "(pods[0].namespace: is not there): use the fgpu-top of the exporter's own version"),
    ],
)
def test_an_answer_that_cannot_be_shown_is_said_in_one_sentence(demo, serve, change, text):
    status, said, complaint = run_top("--url", serve(copy.deepcopy(demo.answer) | change).url, "--once")
    assert (status, said) == (1, "")
    assert text in complaint
    assert complaint.count("\n") == 1
    assert "\x1b" not in complaint


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--filter", "no-such"],
            "nothing matches the filter 'no-such': give a part of a namespace, pod, container or GPU's uuid, or a GPU's index",
        ),
        (
            ["--namespace", "no-such"],
            "no pod of namespace 'no-such' is on a GPU of this node: take one of nlp, recsys, research, simulation, speech, vision",
        ),
    ],
)
@pytest.mark.parametrize("form", ["--once", "--json"])
def test_a_choice_that_nothing_matches_is_no_empty_table(demo, arguments, text, form):
    assert run_top("--url", demo.url, form, *arguments) == (1, "", f"fgpu-top: {text}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sort", "size"],
        ["--by", "node"],
        ["--interval-seconds", "0"],
        ["--interval-seconds", "nan"],
        ["--url", "ftp://a"],
        ["--ca-file", "/none"],
        ["x"],
    ],
)
def test_a_flag_that_cannot_be_used_is_2(arguments):
    status, said, complaint = run_top(*arguments)
    assert (status, said) == (2, "")
    assert complaint.strip()


# --- what it costs, and what is written about it ---


def test_the_daemon_loads_nothing_of_it_and_it_nothing_of_the_daemon(demo):
    program = "import sys, exporter.__main__; print('rich' in sys.modules or 'exporter.commands.top' in sys.modules)"
    assert run_top(program=("-c", program))[1] == "False\n"
    heavy = ("grpc", "kubernetes", "prometheus_client", "pygments", "markdown_it", "pynvml")
    # The image does not even have what Rich highlights with.
    program = f"import sys; sys.modules.update(dict.fromkeys({heavy})); from exporter.commands import top; sys.exit(top.main(sys.argv[1:]))"
    status, said, complaint = run_top("--url", demo.url, program=("-c", program), FORCE_COLOR="1")
    assert (status, complaint) == (0, "")
    assert "\x1b[1;31m" in said


def test_every_flag_is_documented_and_no_other():
    said = top.make_parser().format_help()
    documented = set(re.findall(r"^\| `(--[a-z-]+)", DOCUMENT, re.MULTILINE))
    flags = {flag for flag in re.findall(r"--[a-z-]+", said) if flag not in ("--help", "--no-containers")}
    assert documented == flags


def test_every_choice_and_key_is_documented():
    for each in [*Sort, *By]:
        assert f"`{each}`" in DOCUMENT
    for key in ("q", "s", "g", "c", "/", "Esc"):
        assert re.search(rf"^\| `{key}`", DOCUMENT, re.MULTILINE)


def test_every_column_is_documented(capture_top):
    wide, narrow = ((ROOT / "docs" / "captures" / name).read_text() for name in ("top-200.txt", "top-80.txt"))
    headers = {word for text in (wide, narrow) for line in text.splitlines() if "MEMORY" in line for word in line.split()}
    documented = set(re.findall(r"`([A-Z%]+)`", DOCUMENT))
    assert headers - documented == set()
