"""Who may enter: an API key becomes a caller, with a tenant and its terms. Without any key the gateway is open."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.contract.api_keys import ApiKey, identify
from penstock.contract.api_keys import Scope as KeyScope
from penstock.contract.errors import PenstockError, UnauthorizedError
from penstock.contract.priority import ClassName
from penstock.gateway.openai.errors import error_response
from penstock.producer.client import AsyncClient

logger = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset(("/health", "/ready"))
_SCOPES: dict[str, KeyScope | None] = {"/metrics": "admin", "/health/nodes": "admin", "/v1/usage": None}
"""What a key must be good for; None: any key will do. Elsewhere it is `infer`."""
LOOK_PATIENCE_S = 1.0
"""Then who looks after this process is let in by the keys that it knew last: they want to see that Redis is away."""
_SCHEME = "bearer "


class Entry:
    """ASGI middleware: notes the caller, or answers 401 or 403. One that has seen a key stays closed."""

    def __init__(
        self, app: ASGIApp, *, pepper: str, is_closed: bool, open_highest_class: ClassName = "standard"
    ) -> None:
        self._app = app
        # The caller of every request while there are no keys.
        self._anyone = ApiKey(
            key_id="",
            digest="",
            tenant="default",
            scopes=frozenset(("infer", "admin")),
            highest_class=open_highest_class,
        )
        self._pepper = pepper
        self._is_closed = is_closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets in or refuses."""
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            try:
                client, needed = scope["app"].state.client, _SCOPES.get(scope["path"], "infer")
                known = await client.api_keys(patience_s=LOOK_PATIENCE_S if needed == "admin" else None)
                caller = self._identify(known, Headers(scope=scope))
                if needed is not None:
                    caller.require(needed)
            except PenstockError as error:
                scope["app"].state.metrics.refused(error)
                answer = error_response(error)
                if isinstance(error, UnauthorizedError):
                    answer.headers["WWW-Authenticate"] = "Bearer"
                await answer(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _identify(self, known: Mapping[str, ApiKey], headers: Headers) -> ApiKey:
        self._is_closed = self._is_closed or bool(known)
        if not self._is_closed:
            return self._anyone
        said = headers.get("authorization", "")
        if not said.lower().startswith(_SCHEME):
            raise UnauthorizedError("this gateway wants an API key: Authorization: Bearer pk-…")
        return identify(said[len(_SCHEME) :].strip(), known, self._pepper)


def caller_of(request: Request) -> ApiKey:
    """The caller of a request that was let in."""
    caller: ApiKey = request.state.caller
    return caller


async def warn_if_open(client: AsyncClient, *, is_closed: bool) -> None:
    """Says once that nobody is asked who they are."""
    if not is_closed and not await client.api_keys():
        logger.warning("anybody who reaches this gateway may use it: there are no API keys (penstock keys add)")
