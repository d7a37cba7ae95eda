"""The node as a page for people: HTML, style, script and icon, as they are sent. The script asks `/api/v1/node` and `/api/v1/history`.

The page is whole in itself: its Content-Security-Policy lets it load and ask nothing but this exporter
(https://www.w3.org/TR/CSP3/). Its links are relative, so that it works behind `kubectl proxy` too.
"""

import html
import string
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from exporter import __version__
from exporter.node_json import About
from exporter.server import Request, Response

_FOLDER = Path(__file__).parent
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    # No text is ever taken for markup: a browser that knows of this refuses to.
    "require-trusted-types-for 'script'; trusted-types 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    # A newer exporter has a newer page.
    ("Cache-Control", "no-cache"),
)
_ASSETS = {
    "style.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def build_page(about: About) -> Mapping[str, Callable[[Request], Response]]:
    """Answer the function for each path of the page. Its files are read here, once."""
    page = string.Template((_FOLDER / "index.html").read_text("utf-8")).substitute(
        version=html.escape(__version__),
        node=html.escape(about.node or "node without a name"),
        simulated="" if about.simulated else "hidden",
    )
    files = {"/": (page.encode("utf-8", "replace"), "text/html; charset=utf-8")}
    files |= {f"/page/{name}": ((_FOLDER / name).read_bytes(), content_type) for name, content_type in _ASSETS.items()}
    return {path: partial(_answer, body, content_type) for path, (body, content_type) in files.items()}


def _answer(body: bytes, content_type: str, _: Request) -> Response:
    return Response(200, content_type, body, _HEADERS)
