"""What the HTTP paths answer: metrics, health, readiness, the node as JSON. They read what the sampler published and change nothing.

None of them touches a driver, a kubelet or an API server, so none can hang with one.
"""

import gzip
from collections.abc import Callable, Mapping

from exporter.exposition import Exposition, accepts_gzip, choose_format
from exporter.node_json import About, build_node, render_json
from exporter.sampler import Sampler
from exporter.server import Request, Response

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

_GZIP_LEVEL = 1


def build_routes(sampler: Sampler, about: About) -> Mapping[str, Callable[[Request], Response]]:
    """Answer the function for each path."""
    return {
        "/metrics": lambda request: metrics(sampler, request),
        "/healthz": lambda _: healthz(sampler),
        "/readyz": lambda _: readyz(sampler),
        "/api/v1/node": lambda request: node(sampler, about, request),
    }


def metrics(sampler: Sampler, request: Request) -> Response:
    """Answer the newest exposition; of a report that is too old to be believed only the exporter's own series."""
    exposition = sampler.exposition
    if sampler.is_stale():
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


def node(sampler: Sampler, about: About, request: Request) -> Response:
    """Answer the newest report as JSON; what is too old to be believed is null."""
    exposition = sampler.exposition
    report = None if sampler.is_stale() else exposition.report
    body = render_json(build_node(about, exposition.health, report))
    # Nothing may keep it: the next sample makes it untrue.
    headers = [("Vary", "Accept-Encoding"), ("Cache-Control", "no-store")]
    if accepts_gzip(request.accept_encoding):
        body = gzip.compress(body, _GZIP_LEVEL, mtime=0)
        headers.append(("Content-Encoding", "gzip"))
    return Response(200, JSON, body, tuple(headers))
