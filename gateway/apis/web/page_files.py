"""The files of the web page, read once, and the answers with them."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

from fastapi import Request, Response

PAGE = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_SOURCES = {
    path.name: path.read_bytes()
    for folder in ("static", "vendor")
    for path in files("penstock.gateway.apis.web").joinpath(folder).iterdir()
    if path.name.rpartition(".")[2] in _TYPES
}
RELEASE = hashlib.sha256(b"".join(_SOURCES[name] for name in sorted(_SOURCES))).hexdigest()[:16]
"""Names this version of the files. The page and its modules add it as a query to the addresses that they load."""
_LOADED = re.compile(rb'((?:from "\./|(?:href|src)="web/)[\w.-]+)(?=")')
FILES = {name: _LOADED.sub(rb"\1?" + RELEASE.encode(), content) for name, content in _SOURCES.items()}
_ETAGS = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, content in FILES.items()}
ASSET_PATHS = frozenset(f"/web/{name}" for name in FILES)
"""The paths of the page's files. They need no API key, because a browser sends none with them."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page's Content-Security-Policy: its own files and its own gateway, and nothing else."""
_HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}
_KEPT = "public, max-age=31536000, immutable"


def asset_response(request: Request, name: str) -> Response:
    """Return the answer with one of the page's files.

    A browser asks for the page each time, and gets a 304 until the gateway is updated. It keeps the files of a release.
    A gateway of another release answers with its own file, which the browser must not keep for this one.
    """
    cached = _KEPT if name != PAGE and request.url.query == RELEASE else "no-cache"
    headers = _HEADERS | {"Cache-Control": cached, "ETag": _ETAGS[name]} | ({"Vary": "Accept"} if name == PAGE else {})
    if request.headers.get("if-none-match") == _ETAGS[name]:
        return Response(status_code=304, headers=headers)
    return Response(FILES[name], media_type=_TYPES[name.rpartition(".")[2]], headers=headers)
