"""Authentication: map a request's API key to a caller with a tenant and limits. With no keys the gateway is open."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import get_args

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.contract.api_keys import ApiKey, identify
from penstock.contract.api_keys import Scope as KeyScope
from penstock.contract.errors import PenstockError, UnauthorizedError
from penstock.contract.priority import ClassName
from penstock.gateway.errors import error_response, soon
from penstock.gateway.http.allowed_hosts import AllowedHosts
from penstock.gateway.web.assets import ASSET_PATHS
from penstock.producer.client import AsyncClient

logger = logging.getLogger(__name__)

PUBLIC_PATHS = ASSET_PATHS.union(("/health", "/ready", "/", "/version", "/openapi.json", "/docs"))
"""Paths that need no API key: probes, the description of this release, and the files of the web page."""
READING_SCOPES: Mapping[str, tuple[KeyScope, ...]] = {
    "/metrics": ("metrics", "admin"),
    "/health/nodes": ("admin",),
    "/dashboard": ("admin",),
    "/v1/usage": ("infer", "admin"),
    "/v1/jobs": ("infer", "admin"),
}
"""Path → the scopes of which a key needs one for GET and HEAD. A route may restrict a scope further."""
OTHER_SCOPES: tuple[KeyScope, ...] = ("infer",)
"""The scopes for every other request. A new route is closed to `metrics` and `admin` until READING_SCOPES names it."""
OPERATOR_PATIENCE_S = 1.0
"""Seconds that a request of an operator waits for fresh keys from Redis. After that the last known keys apply, so that
an operator can still see that Redis is unreachable."""
_SCHEME = "bearer "
_KEY_HEADER = "x-api-key"
"""The header in which Anthropic's clients send the key. An Authorization header goes first."""


def scopes_for(method: str, path: str) -> tuple[KeyScope, ...]:
    """Return the scopes of which a key needs one for a request."""
    return READING_SCOPES.get(path, OTHER_SCOPES) if method in ("GET", "HEAD") else OTHER_SCOPES


class Entry:
    """ASGI middleware that attaches the caller to a request or a WebSocket, or answers 401 or 403.

    Once this process has seen any API key, it requires one from then on, even if all keys are removed. Until then it
    checks the Host header.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        pepper: str,
        is_closed: bool,
        hosts: AllowedHosts,
        open_highest_class: ClassName = "standard",
    ) -> None:
        self._app = app
        self._hosts = hosts
        # The caller of every request while no API keys exist.
        self._open_caller = ApiKey(
            key_id="",
            digest="",
            tenant="default",
            scopes=frozenset(get_args(KeyScope)),
            highest_class=open_highest_class,
        )
        self._pepper = pepper
        self._is_closed = is_closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate one request and pass it on, or send the refusal."""
        if scope["type"] == "websocket" or (scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS):
            try:
                # A WebSocket has no method.
                client, needed = scope["app"].state.client, scopes_for(scope.get("method", ""), scope["path"])
                async with soon() if _only_reads(scope) else nullcontext():
                    known = await client.api_keys(patience_s=None if "infer" in needed else OPERATOR_PATIENCE_S)
                caller = self._identify(known, Headers(scope=scope))
                caller.require(*needed)
            except PenstockError as error:
                scope["app"].state.metrics.refused(error)
                answer = error_response(error, scope)
                if isinstance(error, UnauthorizedError):
                    answer.headers["WWW-Authenticate"] = "Bearer"
                await answer(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _identify(self, known: Mapping[str, ApiKey], headers: Headers) -> ApiKey:
        self._is_closed = self._is_closed or bool(known)
        if not self._is_closed:
            self._hosts.check(headers)
            return self._open_caller
        authorization = headers.get("authorization", "")
        if authorization.lower().startswith(_SCHEME):
            key = authorization[len(_SCHEME) :].strip()
        elif not authorization and _KEY_HEADER in headers:
            key = headers[_KEY_HEADER].strip()
        else:
            raise UnauthorizedError("this gateway requires an API key: Authorization: Bearer pk-… or x-api-key: pk-…")
        return identify(key, known, self._pepper)


def _only_reads(scope: Scope) -> bool:
    """Return whether a request only reads shared state. A stream that is resumed waits longer for Redis."""
    is_stream = scope["path"].endswith("/stream") or b"stream=" in scope["query_string"]
    return scope.get("method") in ("GET", "HEAD") and not is_stream


def caller_of(request: Request) -> ApiKey:
    """Return the caller of an authenticated request."""
    caller: ApiKey = request.state.caller
    return caller


async def warn_if_open(client: AsyncClient, *, is_closed: bool) -> None:
    """Log a warning if this gateway accepts requests without an API key."""
    if not is_closed and not await client.api_keys():
        logger.warning("this gateway accepts unauthenticated requests: there are no API keys (penstock keys add)")
