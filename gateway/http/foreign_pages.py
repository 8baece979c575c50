"""The check of the page that sends a request, where no API key protects the gateway.

A browser lets a page of any site send a form, an upload or a post without a body to this machine. It only hides the
answer. The rule is that of Go's `http.CrossOriginProtection`: https://pkg.go.dev/net/http#CrossOriginProtection
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from penstock.contract.errors import ForbiddenError

SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing."""
_OWN_SITES = ("same-origin", "none")
"""Of `Sec-Fetch-Site`. `none` is a person who typed the address; `same-site` may be another port of this machine."""
_MAX_SHOWN = 100


def check_page(headers: Headers, allowed: Sequence[str]) -> None:
    """Raise ForbiddenError if a page of another origin sends the request. `allowed` are the gateway's `cors_origins`.

    Programs send neither header, so they pass. No page of another site can set the headers that name the host.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and (origin in allowed or "*" in allowed):
        return
    if site in _OWN_SITES or (site is None and (origin is None or _host_of(origin) in _own_hosts(headers))):
        return
    page = f"a page of {origin[:_MAX_SHOWN]!r}" if origin else "a page of another site"
    message = (
        f"{page} may not use this gateway without an API key: allow its origin with PENSTOCK_GATEWAY_CORS_ORIGINS, a "
        "JSON list, or let the page send a key. If the page is this gateway's own, let the proxy pass X-Forwarded-Host"
    )
    raise ForbiddenError(message, code="origin_not_allowed", param="origin")


def _own_hosts(headers: Headers) -> set[str]:
    """The hosts, with ports, by which the browser may know this gateway."""
    forwarded = headers.get("x-forwarded-host", "").split(",")
    return {host.strip().lower() for host in (headers.get("host", ""), *forwarded)} - {""}


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
