"""Which pages of other sites may call this gateway from a browser. Credentials (cookies) are never allowed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.contract.errors import ConfigError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_ANY_ORIGIN = ("*", "null")
"""Every page, and every page without an origin of its own, such as a local file or a sandboxed frame."""
OPERATORS_PATHS = ("/dashboard", "/metrics", "/health/nodes", "/v1/usage")
"""Paths for operators. No page of another site may read them."""


def allows_any_page(origins: Sequence[str]) -> bool:
    """Return whether one of the origins stands for every page."""
    return any(origin in _ANY_ORIGIN for origin in origins)


def check_origins(origins: Sequence[str], *, needs_keys: bool) -> None:
    """Raise ConfigError for an origin that no browser sends, and for one of any page if callers need no key."""
    for origin in origins:
        if origin in _ANY_ORIGIN and not needs_keys:
            message = (
                f"cors_origins: {origin!r} lets any web page use this gateway, which needs no API key here; name exact "
                "origins, make a key with `penstock keys add TENANT`, or start the gateway with --require-keys"
            )
            raise ConfigError(message, param="cors_origins")
        if origin not in _ANY_ORIGIN and _ORIGIN.fullmatch(origin) is None:
            message = (
                f"cors_origins: {origin[:100]!r} is not an origin, such as https://app.example or http://localhost:3000"
            )
            raise ConfigError(message, param="cors_origins")


class Cors:
    """ASGI middleware that answers preflights and lets pages of these origins read answers, but not OPERATORS_PATHS."""

    def __init__(self, app: ASGIApp, *, origins: Sequence[str], methods: Sequence[str], exposed: Sequence[str]) -> None:
        self._app = app
        self._open = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=methods,
            allow_headers=["*"],
            allow_credentials=False,
            expose_headers=exposed,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with or without the headers of CORS."""
        is_operators = scope["type"] == "http" and scope["path"].startswith(OPERATORS_PATHS)
        await (self._app if is_operators else self._open)(scope, receive, send)
