"""The files of the web page, read once."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

PAGE = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = {
    path.name: path.read_bytes()
    for path in files("penstock.gateway.web").joinpath("static").iterdir()
    if path.is_file()
}
_ETAGS = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, content in _FILES.items()}
ASSET_PATHS = frozenset(f"/web/{name}" for name in _FILES)
"""The paths of the page's files. They need no API key, because a browser sends none with them."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page's Content-Security-Policy: its own files and its own gateway, and nothing else."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A browser asks each time, and gets a 304 until the gateway is updated.
    "Cache-Control": "no-cache",
}


def wants_page(request: Request) -> bool:
    """Return whether a request accepts HTML, as those of browsers do."""
    return "text/html" in request.headers.get("accept", "").lower()


def asset_response(request: Request, name: str) -> Response | None:
    """Return the answer with one of the page's files, or None if the page has no such file."""
    content = _FILES.get(name)
    if content is None:
        return None
    headers = _HEADERS | {"ETag": _ETAGS[name]} | ({"Vary": "Accept"} if name == PAGE else {})
    if request.headers.get("if-none-match") == _ETAGS[name]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_TYPES[name.rpartition(".")[2]], headers=headers)
