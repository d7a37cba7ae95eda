"""`fgpu-exporter advise`: its flags, what it says of those that cannot be used, and its documentation."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from exporter.advice import MIB, Advice, Device, Terms, Workload
from exporter.commands import COMMANDS, advise
from exporter.commands.advise import FLAGS, NOTE, render_json, render_table
from exporter.commands.pod_history import Window

DOCUMENT = (Path(__file__).parents[2] / "docs" / "advise.md").read_text()
WINDOW = Window(end_seconds=1767312000.0, range_seconds=604800, step_seconds=300)
TERMS = Terms(headroom_ratio=Fraction("0.2"), min_history_seconds=86400, step_seconds=300)
ROW = Advice(
    workload=Workload("eu", "team-a", "Deployment", "chat"),
    device=Device(model="NVIDIA L4", memory_total_bytes=23034 * MIB),
    systems=("kai",),
    pods=2,
    history_seconds=604800.0,
    memory_used_p99_bytes=5000 * MIB,
    memory_used_max_bytes=5200 * MIB,
    memory_limit_bytes=11500 * MIB,
    memory_limit_ratio=0.5,
    advised_memory_bytes=6210 * MIB,
    advised_memory_ratio=0.27,
    memory_freed_bytes=10580 * MIB,
    notes=(),
)


def refusal(capsys, *arguments):
    status = advise.main(arguments)
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.count("\n") == 1
    return said.err.removeprefix("fgpu-exporter advise: ").rstrip("\n")


def test_the_program_knows_the_command():
    assert COMMANDS["advise"] == advise.__name__
    said = subprocess.run(
        [sys.executable, "-m", "exporter", "advise", "--prometheus-url", "http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == "fgpu-exporter advise: cannot ask http://127.0.0.1:1: Connection refused; is --prometheus-url right?\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--prometheus-url: not given; where is the Prometheus that scrapes the exporters?"),
        (["--prometheus-url", "a b"], "--prometheus-url: a URL like http://prometheus:9090 is expected, without ? and #"),
        (["--range", "week"], "--range: 'week' is not a time like 7d"),
        (["--range", "1.5s"], "--range: '1.5s' is not a time like 7d"),
        (["--range", "0"], "--range: '0' is not a time like 7d"),
        (["--headroom", "20%"], "--headroom: '20%' is not a number from 0 to 10"),
        (["--headroom", "-1"], "--headroom: '-1' is not a number from 0 to 10"),
        (["--headroom", "11"], "--headroom: '11' is not a number from 0 to 10"),
        (["--step", "2h"], "--step: '2h' is not a time from 1s to 1h"),
        (["--namespace", 'a"}'], "--namespace: 'a\"}' is not a namespace"),
        (["--time", "yesterday"], "--time: 'yesterday' is not a time like 2026-12-01T06:00:00Z, or seconds"),
        (["--time", "99999999999999"], "--time: '99999999999999' is not a time like 2026-12-01T06:00:00Z, or seconds"),
        (["--http-config-file", "/nowhere"], "--http-config-file /nowhere: No such file or directory"),
        (
            ["--range", "6h"],
            "--min-history 24h is longer than --range 6h: nothing could ever be advised; give a longer range, or ask for less history",
        ),
        (["--range", "30m", "--min-history", "30m", "--step", "1h"], "--step 1h is longer than --range 30m"),
        (["--namespaces", "a"], "unrecognized arguments: --namespaces a"),
    ],
)
def test_a_flag_that_cannot_be_used_is_said_in_one_line(capsys, arguments, said):
    if arguments and arguments[0] != "--prometheus-url":
        arguments = ["--prometheus-url", "http://127.0.0.1:1", *arguments]
    assert refusal(capsys, *arguments) == said


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        advise.main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert [flag.name for flag in FLAGS if f"--{flag.name}" not in out] == []


def test_the_documentation_has_every_flag_and_names_no_other():
    for flag in FLAGS:
        assert f"| `--{flag.name}` | {f'`{flag.default}`' if flag.default else ''} | {flag.help} Expects {flag.expected}. |\n" in DOCUMENT
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", DOCUMENT))
    assert named == {f"--{flag.name}" for flag in FLAGS} | {"--sample-interval-seconds", "--max-series"}


def test_the_documentation_names_every_key_of_the_json():
    document = json.loads(render_json([ROW], WINDOW, TERMS))
    keys = {*document, *document["workloads"][0]}
    assert [key for key in keys if f"`{key}`" not in DOCUMENT] == []


def test_json_has_the_words_of_the_metrics_and_null_for_what_is_not_known():
    unknown = Advice(
        **{name: getattr(ROW, name) for name in Advice.__slots__}
        | {"device": Device(), "advised_memory_bytes": None, "advised_memory_ratio": None, "memory_freed_bytes": None, "notes": ("short",)}
    )
    document = json.loads(render_json([ROW, unknown], WINDOW, TERMS))
    first, second = document.pop("workloads")
    assert document == {
        "time_seconds": 1767312000.0,
        "range_seconds": 604800,
        "step_seconds": 300,
        "headroom_ratio": 0.2,
        "min_history_seconds": 86400,
        "memory_freed_bytes": 11093934080,
        "note": NOTE,
    }
    assert first == {
        "cluster": "eu",
        "namespace": "team-a",
        "owner_kind": "Deployment",
        "owner_name": "chat",
        "model": "NVIDIA L4",
        "mig_profile": "",
        "gpu_memory_total_bytes": 24152899584,
        "systems": ["kai"],
        "pods": 2,
        "history_seconds": 604800.0,
        "memory_used_p99_bytes": 5242880000,
        "memory_used_peak_bytes": 5452595200,
        "memory_limit_bytes": 12058624000,
        "memory_limit_ratio": 0.5,
        "advised_memory_bytes": 6511656960,
        "advised_memory_ratio": 0.27,
        "memory_freed_bytes": 11093934080,
        "notes": [],
    }
    assert (second["gpu_memory_total_bytes"], second["advised_memory_bytes"], second["notes"]) == (None, None, ["short"])


def test_a_table_of_one_namespace_has_one_sum_and_says_that_use_is_not_need():
    lines = render_table([ROW], WINDOW, TERMS).splitlines()
    assert lines[:8] == [
        "7d until 2026-01-02 00:00 UTC, headroom 0.2. MiB for each pod and GPU; FREED by",
        "all pods that run now.",
        "",
        "WORKLOAD        PODS  ASKS    MIB  P99 PEAK  NEEDS   MIB  FREED",
        "eu/team-a/chat     2  0.50  11500      5000   0.27  6210  10580",
        "    Deployment on L4 23034 MiB",
        "",
        "Together: 10580 MiB would be freed.",
    ]
    assert " ".join(lines[9:]) == NOTE


def test_what_prometheus_says_cannot_move_the_cursor():
    hostile = Advice(
        **{name: getattr(ROW, name) for name in Advice.__slots__}
        | {
            "workload": Workload("", "team-a", "Pod\x1b[2J", "chat\x1b[31m"),
            "device": Device(model="L4\n\x9b1m", memory_total_bytes=1 << 30),
        }
    )
    text = render_table([hostile], WINDOW, TERMS)
    assert not [character for character in text.replace("\n", "") if not character.isprintable()]
    assert len(text.splitlines()) == len(render_table([ROW], WINDOW, TERMS).splitlines())
