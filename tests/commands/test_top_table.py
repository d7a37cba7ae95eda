"""How fgpu-top draws: it fits, it says what is unknown, and no name moves the cursor."""

import copy
import re
import unicodedata

import pytest
from rich.cells import cell_len
from rich.console import Console

from exporter.commands.top_rows import By, Choice, choose, parse_node
from exporter.commands.top_table import Style, draw, draw_screen
from exporter.commands.top_text import ASCII, UNICODE

HOSTILE = "\x1b]0;own\x07\x1b[2J\r\nroot\u202e\u2028\x9b31m\udcff"
WIDE = "推論サーバー-本番環境-日本語のとても長い名前-8f7c"


def lines_of(content, width):
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(content)
    return captured.get().splitlines()


def lines(answer, width=80, *, by=By.NONE, age=3.0, containers=True, glyphs=UNICODE):
    view = parse_node(answer)
    style = Style(width=width, glyphs=glyphs, containers=containers)
    content = draw(view, choose(view, Choice(by=by)), style, now_seconds=(view.sample_seconds or 0.0) + age)
    return lines_of(content, width or 10_000)


def rename(answer, *, pod, namespace=None, container=None):
    renamed = copy.deepcopy(answer)
    for each in renamed["pods"]:
        each["pod"], each["namespace"] = pod, namespace or each["namespace"]
        for on_gpu in each["gpus"]:
            for one in on_gpu["containers"]:
                one["container"] = container or one["container"]
    return renamed


@pytest.mark.parametrize("by", By)
@pytest.mark.parametrize("width", [30, 40, 60, 79, 80, 81, 99, 100, 129, 130, 160, 200])
def test_no_line_is_wider_than_the_terminal(demo, width, by):
    named = rename(demo.answer, pod=WIDE, namespace="a-namespace-of-sixty-three-letters-which-is-the-most-there-can-be-x")
    for answer in (demo.answer, named):
        assert max(cell_len(line) for line in lines(answer, width, by=by)) <= width


def test_at_80_columns_everything_has_its_column(demo):
    header = next(line for line in lines(demo.answer, 80) if "LIMIT" in line)
    assert header.split() == ["GPU", "POD", "MEMORY", "USED", "LIMIT", "SM%", "AVG", "OVER", "SYS", "ENF", "PR"]


def test_what_has_no_room_goes_and_what_matters_stays(demo):
    header = next(line for line in lines(demo.answer, 40) if "OVER" in line)
    assert header.split() == ["POD", "OVER"]
    assert [line.split()[0] for line in lines(demo.answer, 40) if "1m" in line or "20s" in line] == ["!", "!"]


def test_without_a_width_nothing_is_cut(demo):
    text = "\n".join(lines(demo.answer, None))
    assert "…" not in text
    for pod in demo.answer["pods"]:
        assert not pod["gpus"] or f" {pod['namespace']} " in text
        assert not pod["gpus"] or f" {pod['pod']} " in text


def test_a_breach_is_marked_without_colours(demo):
    rows = [line for line in lines(demo.answer, 80) if line.startswith("!")]
    assert [re.findall(r"(\S+) (mem\+comp 1m|unalloc 20s)", row) != [] for row in rows] == [True, True]


@pytest.mark.parametrize("by", By)
@pytest.mark.parametrize("width", [80, 200, None])
def test_nothing_that_a_name_holds_reaches_the_terminal_as_it_is(demo, width, by):
    answer = rename(demo.answer, pod=HOSTILE, namespace=HOSTILE, container=HOSTILE)
    answer["node"] = answer["version"] = HOSTILE
    answer["sources"][0] |= {"up": False, "reason": HOSTILE, "source": HOSTILE}
    answer["claim_errors"] = [{"namespace": HOSTILE, "pod": HOSTILE, "system": HOSTILE, "errors": [HOSTILE]}]
    for gpu in answer["gpus"]:
        gpu |= {"model": HOSTILE, "gpu_uuid": gpu["gpu_uuid"] + HOSTILE, "unattributed_memory_bytes": {HOSTILE: 5}}
    text = "\n".join(lines(answer, width, by=by))
    assert {unicodedata.category(each) for each in text if each != "\n"} & {"Cc", "Cf", "Cs", "Zl", "Zp"} == set()
    assert width != 200 or "\\x1b]0;own\\x07" in text


def test_a_terminal_of_letters_gets_letters(demo):
    assert "\n".join(lines(demo.answer, 80, glyphs=ASCII)).isascii()


def test_two_containers_of_a_pod_have_rows_of_their_own(answer_of):
    answer = answer_of("hami/two-containers-two-devices")
    assert [line.split()[2] for line in lines(answer, 80) if "└" in line] == ["encode", "train"]
    assert not [line for line in lines(answer, 80, containers=False) if "└" in line]


def test_sums_say_how_many_pods_they_are_of(demo):
    rows = lines(demo.answer, 100, by=By.NAMESPACE)
    assert [re.search(r"(\S+ \(\d pods?\))", row)[1] for row in rows if "pod)" in row or "pods)" in row] == [
        "recsys (1 pod)",
        "research (2 pods)",
        "vision (2 pods)",
        "speech (1 pod)",
        "simulation (1 pod)",
        "nlp (2 pods)",
    ]
    (research,) = (row for row in rows if "research (2 pods)" in row)
    assert ">=0" in research  # the mean of one pod is not known yet
    assert "░" in research  # the use of a pod without a limit is not held to its neighbour's


def test_a_long_name_of_a_node_leaves_room_for_the_age_of_the_sample(demo):
    answer = demo.answer | {"node": "ip-10-120-134-217.eu-central-1.compute.internal", "version": "0.1.0", "simulated": False}
    assert lines(answer, 80)[0] == "ip-10-120-134…ute.internal, fgpu-exporter 0.1.0, sampled 3s ago, every 5s"


@pytest.mark.parametrize(("age", "said"), [(3, "sampled 3s ago"), (0, "sampled 0s ago"), (-40, "sampled 40s ahead of this clock")])
def test_the_age_of_the_sample_is_told(demo, age, said):
    assert said in lines(demo.answer, 120, age=age)[0]


def test_the_head_says_what_is_wrong(demo, answer_of):
    answer = copy.deepcopy(demo.answer)
    answer["sources"][1] |= {"up": False, "reason": "/proc is not the host's"}
    answer |= {"gpus_unidentified": 2, "pods_dropped": 7, "last_sample_timestamp_seconds": None, "node": ""}
    said = lines(answer, 100)
    assert said[0].startswith("a node without a name, fgpu-exporter ")
    assert "never sampled" in said[0]
    assert said[1:3] == ["! procfs is down: /proc is not the host's", "! 2 GPUs of this node do not even tell their uuid"]
    assert said[-1] == "7 pods are left out: their series are beyond the exporter's --max-series"
    assert any(
        line.startswith("1 ") and line.endswith("no answer") for line in map(str.rstrip, lines(answer_of("attribution/one-gpu-lost")))
    )
    assert "1 hidden" in "\n".join(lines(answer_of("attribution/hidden-memory")))


def test_a_claim_that_cannot_be_read_stands_below(answer_of):
    assert " ".join(line.strip() for line in lines(answer_of("hami/malformed-tuple"))[-2:]).startswith(
        "cannot be read: team-a/broken-0 (hami): hami.io/"
    )


def test_a_node_that_no_pod_uses_says_so(demo):
    assert "no pod uses or was given a GPU of this node" in lines(demo.answer | {"pods": []})


def test_without_a_reading_of_the_pods_it_does_not_say_that_there_are_none(demo):
    answer = copy.deepcopy(demo.answer) | {"pods": []}
    answer["sources"][3] |= {"up": False, "reason": "no answer"}
    assert "which pods are on GPUs is unknown: not read: kubernetes" in lines(answer)


def crowded(answer, pods):
    many = copy.deepcopy(answer)
    several = [pod for pod in many["pods"] if pod["gpus"]]
    many["pods"] = [
        copy.deepcopy(several[number % len(several)]) | {"pod": f"pod-{number:03d}", "pod_uid": str(number)} for number in range(pods)
    ]
    return many


@pytest.mark.parametrize("height", [5, 10, 15, 23, 50])
def test_a_screen_is_as_high_as_the_terminal_however_many_pods_there_are(demo, height):
    answer = crowded(demo.answer, 250)
    answer["claim_errors"] = [{"namespace": "a", "pod": str(number), "system": "kai", "errors": ["x" * 200]} for number in range(30)]
    view = parse_node(answer)
    picture = draw_screen(view, choose(view, Choice()), Style(width=80), now_seconds=0.0, height=height, first=0)
    drawn = lines_of(picture.content, 80)
    assert picture.rows == 250
    assert len(drawn) == height
    assert drawn[-1].startswith("and ")  # some of the 30 that cannot be read have no room


def test_a_screen_scrolls_to_the_last_row_and_no_further(demo):
    view = parse_node(crowded(demo.answer, 250))
    rows = choose(view, Choice())
    style = Style(width=80)
    last = lines_of(draw_screen(view, rows, style, now_seconds=0.0, height=23, first=10**6).content, 80)
    whole = lines_of(draw(view, rows, style, now_seconds=0.0), 80)
    assert last[-1] == whole[-1]
    assert len(last) == 23
