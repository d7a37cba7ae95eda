"""What the tests of commands share."""

import contextlib
import importlib.util
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from exporter.server import Response, Server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def capture_top():
    """tools/capture_top.py: exporters that stand still at a moment, and terminals."""
    spec = importlib.util.spec_from_file_location("capture_top", ROOT / "tools" / "capture_top.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class At:
    """An exporter that stands still at a moment of a scenario."""

    url: str
    sample_seconds: float
    answer: dict


@pytest.fixture(scope="session")
def demo(capture_top):
    """The demo at 2:20 of its story: two pods are over."""
    with capture_top.exporter_at(140) as at:
        yield At(*at)


@pytest.fixture(scope="session")
def answer_of(capture_top):
    """Answer a function for the JSON of a case at 30 s."""
    known = {}

    def answer(case):
        if case not in known:
            with capture_top.exporter_at(30, ROOT / "tests" / "cases" / f"{case}.yaml") as at:
                known[case] = at[2]
        return json.loads(json.dumps(known[case]))

    return answer


@dataclass
class Exporter:
    """An HTTP server that answers as an exporter with this JSON, which a test may change as it goes."""

    answer: object
    port: int = 0
    server: Server | None = None

    def start(self):
        route = {"/api/v1/node": lambda _: Response(200, "application/json", json.dumps(self.answer).encode(), ())}
        self.server = Server(address="127.0.0.1", port=self.port, routes=route)
        self.server.start()
        self.port = self.server.port
        return self

    def stop(self):
        server, self.server = self.server, None
        if server:
            server.close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def serve():
    """Answer a function that starts an exporter with an answer; it is stopped in the end."""
    with ExitStack() as stack:

        def start(answer):
            exporter = Exporter(answer).start()
            stack.callback(exporter.stop)
            return exporter

        yield start


@pytest.fixture
def terminal(capture_top):
    """Answer a function that starts fgpu-top in a terminal of its own some seconds after a sample."""
    with ExitStack() as stack:

        def start(url, sample_seconds, *arguments, width=80, height=24, **environment):
            command = capture_top.command(sample_seconds, "--url", url, *arguments)
            return stack.enter_context(contextlib.closing(capture_top.Terminal(command, width, height, **environment)))

        yield start
