"""What the HTTP paths answer: metrics, health, readiness, the node as JSON and as a page.

They read what the sampler published and change nothing.

None of them touches a driver, a kubelet or an API server, so none can hang with one.
"""

from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl

from exporter.exposition import Exposition, accepts_gzip, choose_format, compress
from exporter.history import build_history
from exporter.node_json import About, Json, build_node, render_json
from exporter.page import build_page
from exporter.sampler import Sampler
from exporter.server import Request, Response

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

_MAX_FIELDS = 8


class LastAnswer:
    """The last answer of a path: asked again before anything has changed, it is not made again, however many ask. For one thread."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._response = Response(503, TEXT, b"")

    def get(self, key: tuple[object, ...], make: Callable[[], Response]) -> Response:
        """Answer what was made for an equal key, or make it."""
        if key != self._key:
            self._response, self._key = make(), key
        return self._response


def build_routes(sampler: Sampler, about: About) -> Mapping[str, Callable[[Request], Response]]:
    """Answer the function for each path."""
    last_node, last_history = LastAnswer(), LastAnswer()
    return {
        **build_page(about),
        "/metrics": lambda request: metrics(sampler, request),
        "/healthz": lambda _: healthz(sampler),
        "/readyz": lambda _: readyz(sampler),
        "/api/v1/node": lambda request: node(sampler, about, last_node, request),
        "/api/v1/history": lambda request: history(sampler, last_history, request),
        "/api/v1/explain": lambda request: explain(sampler, about, request),
    }


def metrics(sampler: Sampler, request: Request) -> Response:
    """Answer the newest exposition; of a report that is too old to be believed only the exporter's own series."""
    # In this order: a report that is published in between is younger, never older, than the one that was looked at.
    is_stale, exposition = sampler.is_stale(), sampler.exposition
    if is_stale:
        exposition = exposition.without_report()
    wire_format = choose_format(request.accept)
    compressed = accepts_gzip(request.accept_encoding)
    headers = (("Vary", "Accept, Accept-Encoding"), *((("Content-Encoding", "gzip"),) if compressed else ()))
    return Response(200, wire_format.value, exposition.render(wire_format, compressed=compressed), headers)


def healthz(sampler: Sampler) -> Response:
    """Answer 200 while the sampler is alive: a report is younger than three intervals, or the first is not due yet."""
    if sampler.is_late():
        return Response(503, TEXT, b"no sample for three intervals\n")
    return Response(200, TEXT, b"ok\n")


def readyz(sampler: Sampler) -> Response:
    """Answer 200 once there was a report for which every source was up; before that 503 and what is missing."""
    if sampler.was_whole:
        return Response(200, TEXT, b"ok\n")
    exposition: Exposition = sampler.exposition
    reasons = [f"{source.source}: {source.reason}" for source in exposition.health.sources if not source.up]
    return Response(503, TEXT, ("\n".join(reasons or ["no sample yet"]) + "\n").encode("utf-8", "replace"))


def node(sampler: Sampler, about: About, last: LastAnswer, request: Request) -> Response:
    """Answer the newest report as JSON; what is too old to be believed is null."""
    is_stale, exposition = sampler.is_stale(), sampler.exposition
    age_seconds = int(sampler.age_seconds(exposition.report)) if exposition.report else None
    report = None if is_stale else exposition.report

    def make() -> Response:
        return _answer_json(build_node(about, exposition.health, report, age_seconds=age_seconds), request)

    return last.get((exposition, report is None, age_seconds, accepts_gzip(request.accept_encoding)), make)


def history(sampler: Sampler, last: LastAnswer, request: Request) -> Response:
    """Answer the last minutes as JSON; steps without a sample are null."""
    newest = sampler.history
    steps_since = newest.steps_since(sampler.age_seconds(newest.report)) if newest.report else 0

    def make() -> Response:
        return _answer_json(build_history(newest, steps_since), request)

    return last.get((newest, steps_since, accepts_gzip(request.accept_encoding)), make)


def explain(sampler: Sampler, about: About, request: Request) -> Response:
    """Answer why the newest report says what it says of a pod or a GPU; an error is an object with one sentence."""
    # Few ever ask, and a node pays for what it loads.
    from exporter.explain.answer import NoReportError, explain_gpu, explain_pod  # noqa: PLC0415
    from exporter.explain.target import NotFoundError  # noqa: PLC0415

    answers = {"pod": explain_pod, "gpu": explain_gpu}
    asked = [(kind, name) for kind, name in _parse_fields(request.query) if kind in answers]
    if len(asked) != 1 or not asked[0][1]:
        return _answer_json({"error": "say what to explain: either ?pod=NAMESPACE/POD or ?gpu=UUID"}, request, status=400)
    kind, name = asked[0]
    is_stale, exposition = sampler.is_stale(), sampler.exposition
    report = None if is_stale else exposition.report
    try:
        return _answer_json(answers[kind](about, exposition.health, report, name), request)
    except NotFoundError as error:
        return _answer_json({"error": str(error)}, request, status=404)
    except NoReportError as error:
        return _answer_json({"error": str(error)}, request, status=503)


def _parse_fields(query: str) -> list[tuple[str, str]]:
    """Answer names and values; none of a query that has more than anyone asks with."""
    try:
        return parse_qsl(query, keep_blank_values=True, errors="replace", max_num_fields=_MAX_FIELDS)
    except ValueError:
        return []


def _answer_json(value: Json, request: Request, *, status: int = 200) -> Response:
    body = render_json(value)
    # Nothing may keep it: the next sample makes it untrue.
    headers = [("Vary", "Accept-Encoding"), ("Cache-Control", "no-store")]
    if accepts_gzip(request.accept_encoding):
        body = compress(body)
        headers.append(("Content-Encoding", "gzip"))
    return Response(status, JSON, body, tuple(headers))
