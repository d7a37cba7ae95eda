"""`fgpu-exporter explain` against a real server on a simulated node: sentences, JSON, and what went wrong in one sentence."""

import http.client
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from jsonschema import Draft202012Validator

from exporter import simulated
from exporter.__main__ import main
from exporter.config import parse_config
from exporter.daemon import about
from exporter.endpoints import build_routes
from exporter.server import Server
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario

ROOT = Path(__file__).parents[2]
CASE = ROOT / "tests" / "cases" / "kai" / "breach-begins-and-ends.yaml"
GPU = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
SCHEMA = Draft202012Validator(json.loads((ROOT / "docs" / "explain.v1.schema.json").read_text()))
CONFIG = parse_config(["--demo"], {})
OVER = f"team-a/greedy is over its memory limit on {GPU}: it uses 25.0 GiB of 19.9 GiB since 2026-01-01 00:00:15 UTC (20 s)."


@pytest.fixture
def exporter():
    """An exporter of a simulated node that has been sampled up to 35 s, when a pod is in breach."""
    with ExitStack() as stack:
        clock = SimulatedClock()
        node = stack.enter_context(SimulatedNode(load_scenario(CASE), clock))
        sampler = simulated.wire(CONFIG, node, clock, stack)
        server = Server(address="127.0.0.1", port=0, routes=build_routes(sampler, about(CONFIG, "worker-1")))
        server.start()
        stack.callback(server.close)

        def sample_until(seconds):
            for second in range(0, seconds + 1, 5):
                simulated.sample_at(node, sampler, second)

        def get(target):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
            connection.request("GET", target, headers={"Connection": "close"})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), json.loads(response.read())

        def pass_time(seconds):
            node.advance_to(35 + seconds)

        yield SimpleNamespace(url=f"http://127.0.0.1:{server.port}", sample_until=sample_until, get=get, pass_time=pass_time)


@pytest.fixture
def sampled(exporter):
    exporter.sample_until(35)
    return exporter


@pytest.fixture
def explain(exporter, capsys):
    def run(*arguments):
        status = main(["explain", "--url", exporter.url, *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_the_cause_stands_first_and_then_the_evidence(sampled, explain):
    status, out, err = explain("team-a/greedy")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert " ".join(lines[: lines.index("")]) == OVER
    evidence = " ".join(out.split())
    for part in (
        " (python) holds 25.0 GiB, by NVML's compute list; its cgroup names container ",
        "grants container main 19.9 GiB of memory and 25 % of compute (nothing enforces it), read from: annotation gpu-fraction: '0.25'",
        "19.9 GiB of memory = floor(0.25 x 81500) MiB (in MiB; the node label nvidia.com/gpu.memory is '81559', floored",
        "The breach of memory began at 2026-01-01 00:00:15 UTC, the first sample above.",
        "compute is judged by the mean over 60 s, of which 35 s are known so far.",
    ):
        assert part in evidence
    assert max(map(len, lines)) <= 120


def test_a_bare_name_is_enough_where_it_is_the_only_one(sampled, explain):
    assert explain("greedy")[:2] == explain("team-a/greedy")[:2]


def test_a_gpu_is_explained_by_its_uuid(sampled, explain):
    status, out, _ = explain(GPU)
    assert status == 0
    assert out.startswith(f"On {GPU} ")


def test_the_json_is_what_the_schema_says_and_what_the_path_answers(sampled, explain):
    for target, query in (("team-a/greedy", "pod=team-a/greedy"), (GPU, f"gpu={GPU}")):
        _, out, _ = explain(target, "--json")
        answer = json.loads(out)
        assert [error.message for error in SCHEMA.iter_errors(answer)] == []
        status, headers, body = sampled.get(f"/api/v1/explain?{query}")
        assert (status, headers["Content-Type"], headers["Cache-Control"], body) == (200, "application/json", "no-store", answer)


def test_a_pod_that_is_not_here_is_one_sentence_with_the_nearest_names(sampled, explain):
    known = "node worker-1 has 3 pods, 3 of them with GPUs; did you mean team-a/greedy?"
    assert explain("team-a/gredy") == (1, "", f"fgpu-exporter explain: no pod 'team-a/gredy' is known here: {known}\n")


def test_a_gpu_that_is_not_here_is_one_sentence(sampled, explain):
    assert explain("GPU-0")[::2] == (
        1,
        f"fgpu-exporter explain: no GPU 'GPU-0' is known here: node worker-1 has 1; did you mean {GPU}?\n",
    )


def test_without_a_sample_it_says_so(exporter, explain):
    status, out, err = explain("team-a/greedy")
    assert (status, out) == (1, "")
    assert "there is no report that can be believed now (nvml: not read yet; " in err
    assert exporter.get("/api/v1/explain?pod=a")[0] == 503


def test_what_is_too_old_is_not_explained(sampled, explain):
    sampled.pass_time(16)
    status, _, err = explain("team-a/greedy")
    assert status == 1
    assert "there is no report that can be believed now (samples stopped coming): ask again" in err


def test_a_url_that_cannot_be_used_is_an_argument_that_cannot_be_used(capsys):
    assert main(["explain", "a/b", "--url", "ftp://node"]) == 2
    assert "is no URL like" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["explain"])
    assert caught.value.code == 2
    capsys.readouterr()


def test_an_exporter_that_is_not_there_is_one_sentence(capsys):
    assert main(["explain", "a/b", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("fgpu-exporter explain: no connection to http://127.0.0.1:1: ")


@pytest.mark.parametrize(
    "query", ["", "pod=", "gpu=", "pod", "pod=a&gpu=b", "pod=a&pod=b", "name=x", "%", "&".join(["pod=a"] * 20), "pod;a"]
)
def test_a_question_that_cannot_be_understood_is_asked_back(sampled, query):
    assert sampled.get(f"/api/v1/explain?{query}")[::2] == (
        400,
        {"error": "say what to explain: either ?pod=NAMESPACE/POD or ?gpu=UUID"},
    )


@pytest.mark.parametrize("name", ["%00%0a%1b[2J", "%3Cscript%3E", "%ff%fe", "a" * 5000, "..%2f..%2fetc", "%7B0%7D", "%22%27", "%E2%80%AE"])
def test_a_hostile_name_is_not_found_and_stands_harmless_in_the_answer(sampled, name):
    for kind in ("pod", "gpu"):
        status, _, body = sampled.get(f"/api/v1/explain?{kind}={name}")
        assert status == 404
        assert body["error"].isprintable()
        assert body["error"].isascii()
        assert len(body["error"]) < 400


def test_a_hostile_name_on_the_command_line_is_one_line(sampled, explain):
    status, out, err = explain("team-a/\x1b[2J\n&gpu=" + GPU)
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "\x1b" not in err


def test_a_daemon_that_no_one_asks_does_not_load_what_explains():
    program = "import sys, exporter.__main__; sys.exit(any(name.startswith('exporter.explain') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
