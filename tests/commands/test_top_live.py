"""The live view of fgpu-top in a real pseudo-terminal."""

import contextlib
import copy
import shlex
import signal
import socket
import time

import pytest

LEAVES_ALTERNATE_SCREEN, SHOWS_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


def is_as_it_was(terminal):
    assert terminal.settings == terminal.settings_before
    assert terminal.sent.rfind(LEAVES_ALTERNATE_SCREEN) > terminal.sent.rfind(b"\x1b[?1049h") >= 0
    assert terminal.sent.rfind(SHOWS_CURSOR) > terminal.sent.rfind(b"\x1b[?25l") >= 0
    return True


def first_pod(text):
    below = text.split(" OVER ")[1].splitlines()[1]
    return below[6:].split()[0]


def test_keys_sort_add_up_and_filter(demo, terminal):
    shown = terminal(demo.url, demo.sample_seconds, width=100)
    assert first_pod(shown.wait_for("recsys", "sort:over  g by:none")).startswith("recsys/ranker")
    shown.press("s")
    assert first_pod(shown.wait_for("sort:memory")).startswith("simulation/cfd-solver-0")
    shown.press("g")
    assert "GPU 1 (4 pods)" in shown.wait_for("by:gpu")
    shown.press("g")
    assert "research (2 pods)" in shown.wait_for("by:namespace")
    shown.press("/")
    shown.wait_for("filter: _")
    shown.press("rankx\x7f")
    assert "whisper" not in shown.wait_for("filter: rank_")
    shown.press("\r")
    assert "recsys (1 pod)" in shown.wait_for("/ filter:rank")
    shown.press("/zzz")
    assert "recsys" not in shown.wait_for("nothing matches the filter 'rankzzz'")
    shown.press("\x1b")
    shown.wait_for("whisper")
    shown.press("q")
    assert shown.wait_for_end() == 0
    assert is_as_it_was(shown)


@pytest.mark.parametrize("end", ["ctrl-c", signal.SIGTERM])
def test_the_terminal_is_given_back_however_it_ends(demo, terminal, end):
    shown = terminal(demo.url, demo.sample_seconds)
    shown.wait_for("q quit")
    assert shown.settings != shown.settings_before
    if end == "ctrl-c":
        shown.press("\x03")
    else:
        shown.process.send_signal(end)
    assert shown.wait_for_end() == 0
    assert is_as_it_was(shown)


def test_a_terminal_that_changes_its_size_is_drawn_anew(demo, terminal):
    shown = terminal(demo.url, demo.sample_seconds)
    assert "NAMESPACE" not in shown.wait_for("q quit", "PR")
    shown.resize(160, 40)
    assert "NAMESPACE" in shown.wait_for("memory 1m40s, compute 1m20s")
    shown.resize(60, 12)
    shown.wait_for("q quit")
    assert "1x" not in shown.text
    assert len([line for line in shown.text.splitlines() if line]) <= 12


def test_250_pods_scroll(demo, serve, terminal):
    answer = copy.deepcopy(demo.answer)
    several = [pod for pod in answer["pods"] if pod["gpus"]]
    answer["pods"] = [
        copy.deepcopy(several[number % len(several)]) | {"namespace": "a", "pod": f"pod-{number:03d}", "pod_uid": str(number)}
        for number in range(250)
    ]
    shown = terminal(serve(answer).url, demo.sample_seconds, "--sort", "name")
    assert first_pod(shown.wait_for("1-13 of 250")) == "a/pod-000"
    shown.press("\x1b[B\x1b[B")
    assert first_pod(shown.wait_for("3-15 of 250")) == "a/pod-002"
    shown.press("\x1b[6~")
    assert first_pod(shown.wait_for("16-28 of 250")) == "a/pod-015"
    shown.press("\x1b[F")
    assert "a/pod-249" in shown.wait_for("238-250 of 250")
    shown.press("\x1b[H")
    shown.wait_for("1-13 of 250")


def test_an_exporter_that_goes_away_is_told_in_place_of_the_table_until_it_is_back(demo, serve, terminal):
    exporter = serve(copy.deepcopy(demo.answer))
    shown = terminal(exporter.url, demo.sample_seconds, "--interval-seconds", "0.5")
    shown.wait_for("recsys/ran")
    exporter.stop()
    text = shown.wait_for("no connection to", "asking again every 0.5 s", "q quit")
    assert "recsys" not in text
    exporter.start()
    shown.wait_for("recsys/ran")
    exporter.answer |= {"gpus": None, "pods": None}
    assert "recsys" not in shown.wait_for("no report that can be believed")
    exporter.answer = copy.deepcopy(demo.answer)
    shown.wait_for("recsys/ran")


def test_an_exporter_that_says_nothing_holds_up_no_key(demo, terminal):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        shown = terminal(f"http://127.0.0.1:{silent.getsockname()[1]}", demo.sample_seconds)
        shown.wait_for("asking http://127.0.0.1:")
        began = time.monotonic()
        shown.press("q")
        assert shown.wait_for_end() == 0
        assert time.monotonic() - began < 4


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_again(capture_top, demo):
    command = shlex.join(capture_top.command(demo.sample_seconds, "--url", demo.url))
    with contextlib.closing(capture_top.Terminal(["/bin/bash", "--norc", "--noprofile", "-i"], 80, 24, PS1="the shell> ")) as shown:
        shown.wait_for("the shell>")
        shown.press(f"{command}\r")
        shown.wait_for("q quit")
        shown.press("\x1a")
        shown.wait_for("Stopped")
        assert shown.sent.count(LEAVES_ALTERNATE_SCREEN) == 1
        shown.press("fg\r")
        shown.wait_for("q quit")
        shown.press("s")
        shown.wait_for("sort:memory")
        shown.press("q")
        shown.wait_for("the shell>")


def test_what_a_name_holds_moves_no_cursor(demo, serve, terminal):
    answer = copy.deepcopy(demo.answer)
    for pod in answer["pods"]:
        pod["namespace"], pod["pod"] = "a", "\x1b[2J\x1b]0;own\x07"
    shown = terminal(serve(answer).url, demo.sample_seconds)
    shown.wait_for("a/\\x1b[2J")
    assert b"\x1b[2J" not in shown.sent
    assert b"\x07" not in shown.sent


def test_a_terminal_that_is_gone_ends_it(demo, terminal):
    shown = terminal(demo.url, demo.sample_seconds)
    shown.wait_for("q quit")
    shown.hang_up()
    # It may see the end of its terminal before it is sent the signal that says so.
    assert shown.process.wait(timeout=10) in (0, -signal.SIGHUP)
