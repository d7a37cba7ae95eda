"""The node page in a real browser (Debian's Chromium), on a simulated node: what it says, to whom, and what it never does."""

import http.client
import re
import shutil
import tomllib
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path

import bcrypt
import pytest
import trustme
import yaml
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

from exporter import __version__, simulated
from exporter.config import parse_config
from exporter.daemon import about
from exporter.endpoints import build_routes
from exporter.page import build_page
from exporter.server import Server
from exporter.simulation import DEMO, SimulatedClock, SimulatedNode, load_scenario

ROOT = Path(__file__).parents[1]
GPU = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
HOSTILE = "<img src=x onerror=document.title='owned'>"
TURNED = "safe\u202egpj.exe"
WIDTHS = (360, 1280)
# The page asks each second here; a busy machine may take longer.
expect.set_options(timeout=15_000)


class Node:
    """A simulated node and its exporter over HTTP, which samples when it is told to."""

    def __init__(self, stack, scenario, *flags):
        self.config = parse_config(["--scenario", str(scenario), "--sample-interval-seconds", "1", *flags], {})
        self.clock = SimulatedClock()
        self.node = stack.enter_context(SimulatedNode(load_scenario(scenario), self.clock))
        self.sampler = simulated.wire(self.config, self.node, self.clock, stack)
        self.server = None
        stack.callback(self.close)

    def sample(self, *seconds):
        for each in seconds:
            simulated.sample_at(self.node, self.sampler, each)

    def serve(self, port=0, **settings):
        routes = build_routes(self.sampler, about(self.config, self.node.name))
        self.server = Server(address="127.0.0.1", port=port, routes=routes, **settings)
        self.server.start()
        return self

    def close(self):
        if self.server:
            self.server.close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.port}/"


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no browser to open the page with (Debian package chromium)")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program)
        yield running
        running.close()


@pytest.fixture
def look(browser):
    """Open the page of a URL; in the end nothing may have been asked of anyone else, nor an error have come up but those expected."""
    with ExitStack() as stack:
        complaints, strangers = [], []

        def open_page(url, *, width=1280, errors=(), prepare=lambda page: None, **settings):
            context = browser.new_context(viewport={"width": width, "height": 800}, **settings)
            stack.callback(context.close)
            page = context.new_page()
            page.on("console", lambda message: complaints.append(message.text) if message.type in {"error", "warning"} else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: None if request.url.startswith(url) else strangers.append(request.url))
            prepare(page)
            stack.callback(lambda: check(url, errors))
            page.goto(url)
            page.set_default_timeout(10_000)
            return page

        def check(url, errors):
            assert strangers == [], f"{url} asks others"
            assert [text for text in complaints if not any(error in text for error in errors)] == []

        yield open_page


@pytest.fixture(scope="module")
def demo():
    """The built-in node at 2:20 of its story."""
    with ExitStack() as stack:
        node = Node(stack, DEMO)
        node.sample(*range(0, 141, 5))
        yield node.serve()


@pytest.fixture
def play(tmp_path):
    """Answer a node made of a scenario's content."""
    with ExitStack() as stack:

        def start(content, *flags):
            file = tmp_path / "scenario.yaml"
            file.write_text(yaml.safe_dump(content, allow_unicode=True))
            return Node(stack, file, *flags)

        yield start


def shared_gpu(*names, **more):
    """One GPU, of which each pod has 8 GiB and uses the GiB that are named."""
    pods = [
        {
            "metadata": {"namespace": "kai-resource-reservation", "name": "reservation", "uid": "r", "labels": {"runai-gpu-group": "g"}}
            | {"annotations": {"run.ai/reserve_for_gpu_index": GPU}},
            "spec": {"nodeName": "gpu-node-1", "containers": [{"name": "main"}]},
            "status": {"phase": "Running"},
        }
    ]
    processes = []
    for number, (name, used_gib) in enumerate(names):
        labels = {"runai-gpu-group": "g", "kai.scheduler/queue": f"queue-of-{name}"}
        status = {"name": "main", "containerID": f"containerd://{number:064x}", "state": {"running": {}}}
        pods.append(
            {
                "metadata": {"namespace": "team-a", "name": name, "uid": f"{number:08x}-0000-4000-8000-000000000000", "labels": labels}
                | {"annotations": {"gpu-memory": "8192"}},
                "spec": {"nodeName": "gpu-node-1", "containers": [{"name": "main"}]},
                "status": {"phase": "Running", "containerStatuses": [status]},
            }
        )
        use = {"gpu": GPU, "memory": f"{used_gib}Gi", "sm": 1}
        processes.append({"pid": 41000 + number, "container": f"team-a/{name}/main", "gpus": [use]})
    gpus = [{"uuid": GPU, "model": "NVIDIA H100", "memory_total": "81559Mi"}]
    return {
        "node": {"name": "gpu-node-1", "labels": {"nvidia.com/gpu.memory": "81559"}},
        "gpus": gpus,
        "pods": pods,
        "processes": processes,
        **more,
    }


def rows(page):
    """The rows of the table of pods: what stands in each, as it is read."""
    return [[cell.inner_text() for cell in row.locator("th, td").all()] for row in page.locator("#pods tbody tr").all()]


def plain(text):
    return text.replace("\u00a0", " ")


# --- what it says ---


def test_it_says_which_node_it_is_and_that_it_is_a_simulated_one(look, demo):
    page = look(demo.url)
    expect(page.locator("h1")).to_have_text("gpu-node-7 simulated node")
    expect(page.locator(".product")).to_have_text(f"fgpu-exporter {__version__}")
    expect(page.locator("#sampled")).to_contain_text("every 1")
    links = page.get_by_role("navigation").get_by_role("link").all()
    assert [link.get_attribute("href") for link in links] == ["metrics", "api/v1/node", "api/v1/history", "healthz", "readyz"]


def test_a_real_node_is_not_called_simulated():
    config = parse_config(["--node-name", "worker-1"], {})
    page = build_page(about(config, "worker-1"))["/"](None).body.decode()
    assert 'id="simulated" hidden' in page


def test_breaches_are_told_in_words_and_in_the_title(look, demo):
    page = look(demo.url)
    told = page.locator("#breaches li")
    expect(told).to_have_count(2)
    assert [plain(text) for text in told.all_inner_texts()] == [
        (
            "▲ recsys/ranker-5d8f7c9b4-7hm2n on GPU 1 over its memory limit for 1 min 40 s: 29.4 of 23.9 GiB; "
            "over its compute limit for 1 min 20 s: 44 %, limit 30 %, mean of 1 min"
        ),
        "▲ research/scratch on GPU 1 uses a GPU that it was not given for 20 s: 2.8 GiB",
    ]
    assert page.title() == "2 pods in breach · gpu-node-7 · fgpu-exporter"


def test_a_breach_of_one_containers_own_limit_is_told_with_its_numbers_and_not_with_the_pods(look, play):
    content = shared_gpu(("train", 4))
    pod, two = content["pods"][1], ("a", "b")
    pod["metadata"]["annotations"] = {f"nvidia.com/container.{name}.gpu-memory.limit": "4096Mi" for name in two}
    pod["metadata"]["annotations"]["gpu-memory"] = "8192"
    pod["spec"]["containers"] = [{"name": name} for name in two]
    pod["status"]["containerStatuses"] = [
        {"name": name, "containerID": f"containerd://{name * 64}", "state": {"running": {}}} for name in two
    ]
    content["processes"] = [{"pid": 41000, "container": "team-a/train/a", "gpus": [{"gpu": GPU, "memory": "5Gi"}]}]
    node = play(content, "--breach-hold-seconds", "0")
    node.sample(0)
    page = look(node.serve().url)
    expect(page.locator("#breaches li")).to_contain_text("over its memory limit for 0\u00a0s: container a: 5.0 of 4.0\u00a0GiB")


def test_a_pod_in_breach_on_two_gpus_is_one_pod(look, play):
    other = GPU.replace("5a1e", "5a1f")
    content = shared_gpu(("train", 9))
    content["gpus"].append({"uuid": other, "memory_total": "81559Mi"})
    content["pods"] = content["pods"][1:]
    content["pods"][0]["metadata"] |= {"labels": {}, "annotations": {}}
    content["processes"][0]["gpus"].append({"gpu": other, "memory": "9Gi", "sm": 1})
    node = play(content, "--breach-hold-seconds", "0")
    node.sample(0)
    page = look(node.serve().url)
    expect(page.locator("#breaches li")).to_have_count(2)
    expect(page).to_have_title("1 pod in breach · gpu-node-1 · fgpu-exporter")


def test_pods_in_breach_stand_first_and_the_rest_by_name(look, demo):
    page = look(demo.url)
    expect(page.locator("#pods tbody tr")).to_have_count(9)
    names = [row[0].split("\n")[0] for row in rows(page)]
    assert names[:2] == ["ranker-5d8f7c9b4-7hm2n", "scratch"]
    assert names[2:5] == ["embedder-7c9d8b6f5-x2k4q", "translate-6b5f9d7c8-q9wzr", "notebook-maria-0"]


def test_a_row_tells_use_beside_limit_and_whose_it_is(look, demo):
    page = look(demo.url)
    expect(page.locator("#pods tbody tr")).to_have_count(9)
    cells = {row[0].split("\n")[0]: [plain(cell).replace("\n", " ").strip() for cell in row] for row in rows(page)}
    assert cells["embedder-7c9d8b6f5-x2k4q"] == [
        "embedder-7c9d8b6f5-x2k4q nlp · queue nlp",
        "GPU 0",
        "11.5 of 15.6 GiB",
        "13 %, limit 20 %",
        "✓ within its limits",
    ]
    assert cells["notebook-maria-0"][2] == "0 B of 15.9 GiB"
    assert cells["labeler-0"][1] == "GPU 3, MIG 0 3g.40gb"
    assert cells["labeler-0"][3] == "unknown not told on MIG devices; limit 100 %"
    assert cells["labeler-0"][4] == "✓ within its memory limit ? unknown: compute limit"
    assert cells["scratch"][4] == "▲ uses a GPU that it was not given, for 20 s"


def test_gpus_are_bars_of_their_pods_as_wide_as_what_they_were_given(look, demo):
    page = look(demo.url, reduced_motion="reduce")
    expect(page.locator("#gpus > li")).to_have_count(6)
    names = [plain(name) for name in page.locator("#gpus h3 > span:first-child").all_inner_texts()]
    assert names == ["GPU 0", "GPU 1", "GPU 2", "GPU 3", "MIG 0 3g.40gb", "MIG 1 1g.10gb"]
    slots = page.locator("#gpus > li").nth(1).locator(".slot")
    widths = {plain(slot.get_attribute("title")): slot.bounding_box()["width"] for slot in slots.all()}
    assert list(widths) == [
        "recsys/ranker-5d8f7c9b4-7hm2n: 29.4 of 23.9 GiB",
        "research/scratch: 2.8 GiB, no limit",
        "nlp/translate-6b5f9d7c8-q9wzr: 15.2 of 19.9 GiB",
        "speech/whisper-batch-kx8zl: 17.0 of 19.5 GiB",
        "8.0 GiB not given to any pod",
    ]
    whole = sum(widths.values())
    assert [round(100 * width / whole) for width in widths.values()] == [37, 4, 25, 25, 10]  # 29.4, 2.8, 19.9, 19.5 and 8.0 of 79.6 GiB
    over = slots.first.locator(".over").bounding_box()["width"] / slots.first.bounding_box()["width"]
    assert over == pytest.approx(5.5 / 29.4, abs=0.02)


def test_a_screen_reader_finds_headings_tables_and_the_words_of_each_plot(look, demo):
    page = look(demo.url)
    expect(page.locator("#pods tbody tr")).to_have_count(9)
    tree = plain(page.locator("main").aria_snapshot())
    for heading in ("Breaches", "GPUs", "Pods", "Sources"):
        assert f'heading "{heading}" [level=2]' in tree
    assert 'table "Pods on GPUs, those in breach first, then by name"' in tree
    assert 'columnheader "Memory now; last 15 min"' in tree
    assert 'rowheader "ranker-5d8f7c9b4-7hm2n recsys · queue recsys"' in tree
    assert 'img "Memory of GPU 1 by pod: 4 pods, 1 above the memory limit, 8.0 GiB not given. The table of pods has the amounts."' in tree
    assert re.search(r'img "memory in the last 15 min: [\d.]+ to [\d.]+ GiB; now 29.4 GiB; unknown for 12 min 30 s"', tree)


def test_a_table_keeps_its_meaning_where_it_is_shown_as_cards(look, demo):
    page = look(demo.url, width=360)
    expect(page.locator("#pods tbody tr")).to_have_count(9)
    tree = plain(page.locator("#pods").aria_snapshot())
    assert 'rowheader "ranker-5d8f7c9b4-7hm2n recsys · queue recsys"' in tree
    assert re.search(r'cell "29.4 of 23.9 GiB memory in the last 15 min', tree)


def test_what_the_sharing_system_runs_and_uses_nothing_has_no_row(look, play):
    node = play(shared_gpu(("train", 4)))
    node.sample(0)
    page = look(node.serve().url)
    expect(page.locator("#pods tbody tr")).to_have_count(1)
    expect(page.locator("#no-breach")).to_have_text("No pod takes more memory than it was given; for compute, of 1 pod it is unknown.")
    node.sample(*range(5, 66, 5))
    expect(page.locator("#no-breach")).to_have_text("No pod takes more than it was given.")
    assert page.title() == "gpu-node-1 · fgpu-exporter"


def test_the_rows_can_be_filtered_and_stay_so(look, play):
    node = play(shared_gpu(("train", 4), ("serve", 2)))
    node.sample(0)
    page = look(node.serve().url)
    expect(page.locator("#shown")).to_have_text("2 rows")
    page.get_by_role("searchbox", name="Show pods with").fill("Serve")
    expect(page.locator("#shown")).to_have_text("1 of 2 rows")
    expect(page.locator("#pods tbody tr:visible")).to_have_count(1)
    simulated.sample_at(node.node, node.sampler, 15)
    expect(page.locator("#sources")).to_contain_text("0 s ago")
    page.wait_for_timeout(1200)
    expect(page.locator("#pods tbody tr:visible")).to_have_count(1)
    assert page.evaluate("document.activeElement.id") == "wanted"


# --- what is unknown ---


def test_it_shows_the_next_sample_by_itself(look, play):
    step = {"at": "5s", "processes": [{"pid": 41000, "gpus": [{"gpu": GPU, "memory": "9Gi"}]}]}
    node = play(shared_gpu(("train", 4), timeline=[step]), "--breach-hold-seconds", "0")
    node.sample(0)
    page = look(node.serve().url)
    expect(page.locator("#pods tbody tr td").nth(1)).to_contain_text("4.0 of 8.0")
    node.sample(5)
    expect(page.locator("#pods tbody tr td").nth(1)).to_contain_text("9.0 of 8.0")
    expect(page).to_have_title("1 pod in breach · gpu-node-1 · fgpu-exporter")
    expect(page.get_by_role("status").first).to_have_text("1 pod in breach.")


def test_unknown_is_said_with_its_reason_and_never_0(look, play):
    step = {"at": "5s", "sources": {"nvml": "down"}}
    node = play(shared_gpu(("train", 4), timeline=[step]))
    node.sample(0, 5)
    page = look(node.serve().url)
    expect(page.locator("#pods tbody tr")).to_have_count(1)
    cells = [plain(cell).replace("\n", " ").strip() for cell in rows(page)[0]]
    assert cells[2] == "unknown the driver is not read; limit 8.0 GiB"
    assert cells[3].startswith("unknown the driver is not read")
    assert cells[4] == "? unknown: memory limit, compute limit"
    assert "unknown: the driver is not read of" in plain(page.locator("#gpus .figures").inner_text())
    expect(page.locator("#sources tbody tr").first).to_contain_text("▲ not read:")
    expect(page.locator("#no-breach")).to_have_text("No breach is known; of 1 pod it is unknown.")
    assert " 0 B" not in plain(page.locator("#pods").inner_text())


def test_without_a_reading_of_the_pods_it_does_not_say_that_there_are_none(look, play):
    node = play({"node": {"name": "n"}, "gpus": [{"uuid": GPU, "memory_total": "80Gi"}], "sources": {"kubernetes": "down"}})
    node.sample(0)
    page = look(node.serve().url)
    expect(page.locator("#no-breach")).to_have_text("Unknown: not read: kubernetes.")
    expect(page.locator("#shown")).to_have_text("Pods: unknown, not read: kubernetes.")
    assert plain(page.locator("#gpus .figures").inner_text()).startswith("0 B of 80.0 GiB used · given to whom is unknown")
    assert plain(page.locator("#gpus .slot").get_attribute("title")) == "80.0 GiB given to whom is unknown"
    assert page.locator("#gpus .bar").get_attribute("aria-label").startswith("Memory of GPU 0 by pod: pods unknown, ")


def test_without_a_reading_of_the_driver_it_does_not_say_that_there_is_no_gpu(look, play):
    node = play({"node": {"name": "n"}, "gpus": [{"uuid": GPU}], "sources": {"nvml": "down"}})
    node.sample(0)
    page = look(node.serve().url)
    expect(page.locator("#no-gpu")).to_have_text("Unknown: the driver is not read.")
    expect(page.locator("#no-breach")).to_have_text("Unknown: not read: nvml.")


def test_a_gap_in_the_samples_is_a_gap_in_the_plot(look, play):
    node = play(shared_gpu(("train", 4)))
    node.sample(0, 15, 30, 120, 135)
    page = look(node.serve().url)
    line = page.locator("#pods .plot .line").first
    expect(line).to_have_attribute("d", re.compile(r"^M50.5 [\d.]+L51.5 [\d.]+L52.5 [\d.]+M58.5 [\d.]+L59.5 [\d.]+$"))
    gap = page.locator("#pods .plot .gap").first
    assert gap.get_attribute("d") == "M0 0H50V100H0ZM53 0H58V100H53Z"


def test_a_contract_that_cannot_be_read_is_told_with_its_error(look, play):
    content = shared_gpu(("train", 4))
    content["pods"][1]["metadata"]["annotations"] = {"gpu-memory": HOSTILE}
    node = play(content)
    node.sample(0)
    page = look(node.serve().url)
    expect(page.locator("#errors li")).to_contain_text("team-a/train, kai:")
    expect(page.locator("#errors li")).to_contain_text("<img")
    expect(page.locator("img")).to_have_count(0)


# --- what is not there ---


def test_before_the_first_sample_it_says_so(look, play):
    page = look(play(shared_gpu()).serve().url)
    expect(page.get_by_role("alert")).to_contain_text("There is no sample of this node yet")
    expect(page.locator("#no-gpu")).to_have_text("Unknown.")
    expect(page.locator("#shown")).to_have_text("Pods: unknown.")
    assert page.title() == "? · gpu-node-1 · fgpu-exporter"


def test_when_samples_stop_it_says_so_with_their_age_and_shows_no_old_number(look, play):
    node = play(shared_gpu(("train", 9)), "--breach-hold-seconds", "0")
    node.sample(0)
    page = look(node.serve().url)
    expect(page.locator("#pods tbody tr")).to_have_count(1)
    node.clock.advance_to(47.0)
    expect(page.get_by_role("alert")).to_contain_text("The newest sample is too old to be believed")
    assert 47 <= int(re.search(r"Newest sample (\d+)", page.locator("#problem-age").inner_text())[1]) <= 52
    expect(page.locator("#pods tbody tr")).to_have_count(0)
    expect(page.locator("#no-breach")).to_have_text("Unknown.")
    expect(page).to_have_title("? · gpu-node-1 · fgpu-exporter")
    node.sample(50)
    expect(page.locator("#pods tbody tr")).to_have_count(1)
    expect(page.locator("#problem")).to_be_hidden()


def test_when_the_exporter_is_gone_it_says_so_keeps_trying_and_finds_it_again(look, play):
    node = play(shared_gpu(("train", 4)))
    node.sample(0)
    page = look(node.serve().url, errors=["net::ERR_"])
    expect(page.locator("#pods tbody tr")).to_have_count(1)
    port = node.server.port
    node.close()
    expect(page.get_by_role("alert")).to_contain_text(
        re.compile(r"does not answer: no connection\. What stands below is from .* may be untrue")
    )
    expect(page.locator("#problem-age")).to_contain_text(re.compile(r"Last answer \d+.s ago"))
    expect(page).to_have_title("? · gpu-node-1 · fgpu-exporter")
    node.serve(port)
    expect(page.locator("#problem")).to_be_hidden()
    expect(page).to_have_title("gpu-node-1 · fgpu-exporter")


def answers(page, path, **changes):
    """Let the exporter's answer at a path have other values, as one of another version would."""

    def change(route):
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), **changes})

    page.route(f"**/{path}", change)


def test_when_the_exporter_became_another_version_it_says_to_reload(look, demo):
    page = look(demo.url)
    expect(page.locator("#advice")).to_be_hidden()
    answers(page, "api/v1/node", version="99.0.0")
    expect(page.locator("#advice")).to_have_text(
        f"The exporter is of version 99.0.0 now and this page of version {__version__}: reload the page to have the newer one."
    )


def test_an_answer_in_an_unknown_form_is_not_shown(look, demo):
    page = look(demo.url)
    expect(page.locator("#pods tbody tr")).to_have_count(9)
    answers(page, "api/v1/node", api_version="v2")
    expect(page.get_by_role("alert")).to_contain_text("it speaks version v2 of its API, and this page v1; reload the page")


def test_without_a_past_all_but_the_plots_is_there(look, demo):
    broken = {"**/api/v1/history": lambda route: route.fulfill(status=500, body="no")}
    page = look(demo.url, errors=["500"], prepare=lambda page: [page.route(path, answer) for path, answer in broken.items()])
    expect(page.locator("#pods tbody tr")).to_have_count(9)
    expect(page.locator("#gpus .plot").first).to_contain_text("unknown: its past cannot be read")


def test_without_javascript_it_is_its_links(look, demo):
    page = look(demo.url, java_script_enabled=False, errors=["404"])  # the icon of a page of text
    expect(page.locator("noscript p")).to_be_visible()
    expect(page.get_by_role("link", name="/metrics")).to_be_visible()
    expect(page.locator("#view")).to_be_hidden()
    page.get_by_role("link", name="/healthz").click()
    assert page.locator("body").inner_text().strip() == "ok"


# --- hostile names, strangers, passwords ---


def test_a_hostile_name_is_text_wherever_it_stands(look, play):
    node = play(shared_gpu((HOSTILE, 9), (TURNED, 4)), "--breach-hold-seconds", "0")
    node.sample(0, 5)
    page = look(node.serve().url)
    expect(page.locator("#pods tbody tr")).to_have_count(2)
    names = [row[0].split("\n")[0] for row in rows(page)]
    assert names == [HOSTILE, "safe⟨U+202E⟩gpj.exe"]
    expect(page.locator("#breaches li")).to_contain_text(f"team-a/{HOSTILE} on GPU 0")
    assert page.locator(".slot").first.get_attribute("title").startswith(f"team-a/{HOSTILE}: ")
    expect(page.locator("img, script:not([src])")).to_have_count(0)
    assert page.title() == "1 pod in breach · gpu-node-1 · fgpu-exporter"
    assert "\u202e" not in page.content()


def test_a_hostile_name_of_the_node_is_text(look, play):
    content = shared_gpu()
    node = play({**content, "node": {**content["node"], "name": HOSTILE}}, "--node-name", HOSTILE)
    page = look(node.serve().url)
    expect(page.locator("#node")).to_have_text(HOSTILE)
    expect(page.locator("img")).to_have_count(0)


def test_the_browser_refuses_to_take_text_for_markup_and_to_ask_anyone_else(look, demo):
    page = look(demo.url, errors=["Content Security Policy", "TrustedHTML", "Failed to fetch"])
    assert "TrustedHTML" in page.evaluate("() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.message } }")
    assert page.evaluate("() => fetch('http://127.0.0.1:1/').then(() => 'asked', (error) => error.message)") == "Failed to fetch"
    assert page.evaluate("() => { const script = document.createElement('script'); return script.text === '' }")


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/style.css", "text/css; charset=utf-8"),
        ("/page/page.js?v=1", "text/javascript; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
def test_each_file_of_the_page_is_sent_with_a_policy_that_allows_nothing_else(demo, path, content_type):
    status, headers, body = get(demo.server.port, path)
    assert (status, headers["Content-Type"]) == (200, content_type)
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert {policy[kind] for kind in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"://" not in re.sub(rb"https?://(www\.w3\.org/2000/svg|jfly\.uni-koeln\.de/color/)", b"", body)


@pytest.mark.parametrize("path", ["/page/", "/page/index.html", "/page/__init__.py", "/page/../page/page.js"])
def test_no_other_file_is_sent(demo, path):
    assert get(demo.server.port, path)[0] == 404


def test_it_works_behind_tls_and_a_password(look, play, tmp_path):
    node = play(shared_gpu(("train", 4)))
    node.sample(0)
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    secret = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(4)).decode()
    config = {"tls_server_config": {"cert_file": "server.pem", "key_file": "server.key"}, "basic_auth_users": {"alice": secret}}
    (tmp_path / "web.yaml").write_text(yaml.safe_dump(config))
    url = node.serve(web_config=tmp_path / "web.yaml").url.replace("http:", "https:")
    page = look(url, ignore_https_errors=True, http_credentials={"username": "alice", "password": "open sesame"}, errors=["401"])
    expect(page.locator("#pods tbody tr")).to_have_count(1)


# --- for everyone's eyes and hands ---


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_nothing_that_keeps_people_out(look, demo, width, color_scheme):
    page = look(demo.url, width=width, color_scheme=color_scheme, reduced_motion="reduce", bypass_csp=True)
    expect(page.locator("#pods tbody tr")).to_have_count(9)
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    assert [(rule["id"], [node["html"][:120] for node in rule["nodes"]]) for rule in found.response["violations"]] == []


def test_axe_finds_nothing_while_the_exporter_is_gone(look, play):
    node = play(shared_gpu(("train", 9)), "--breach-hold-seconds", "0")
    node.sample(0)
    page = look(node.serve().url, bypass_csp=True, errors=["net::ERR_"])
    expect(page.locator("#pods tbody tr")).to_have_count(1)
    node.close()
    expect(page.locator("#problem")).to_be_visible()
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    assert [rule["id"] for rule in found.response["violations"]] == []


@pytest.mark.parametrize("width", [320, *WIDTHS])
def test_nothing_is_wider_than_the_window(look, play, width):
    content = shared_gpu(("a" * 253, 9), ("serve", 2))
    content["pods"][2]["metadata"]["annotations"] = {"gpu-memory": "x" * 300}
    node = play(content, "--breach-hold-seconds", "0")
    node.sample(0, 5)
    page = look(node.serve().url, width=width)
    expect(page.locator("#pods tbody tr")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("reduced_motion", "seconds"), [("reduce", "0s"), ("no-preference", "0.4s")])
def test_nothing_moves_for_those_who_ask_for_that(look, demo, reduced_motion, seconds):
    page = look(demo.url, reduced_motion=reduced_motion)
    page.locator(".slot").first.wait_for()
    assert page.evaluate("getComputedStyle(document.querySelector('.slot')).transitionDuration") == seconds


def test_light_and_dark_follow_the_browser(look, demo):
    grounds = [
        look(demo.url, color_scheme=each).evaluate("getComputedStyle(document.documentElement).backgroundColor")
        for each in ("light", "dark")
    ]
    assert grounds == ["rgb(244, 246, 248)", "rgb(14, 19, 24)"]


# --- what is installed ---


def test_every_file_of_the_package_is_installed_with_it():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["exporter"]
    for path in (ROOT / "exporter").rglob("*"):
        if path.is_file() and path.suffix not in {".py", ".pyi", ".pyc"}:
            name = str(path.relative_to(ROOT / "exporter"))
            assert any(fnmatch(name, pattern) or fnmatch(f"/{name}", f"/{pattern.removeprefix('**/')}") for pattern in patterns), name
