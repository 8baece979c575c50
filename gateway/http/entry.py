"""The entry of each request: authentication, which maps an API key to a caller with a tenant and limits, and scopes.

Callers without a key are refused while keys exist, and if keys existed before and are missing. If there were never any,
a gateway on a loopback address serves them with all scopes, unless a proxy passed their request on. On other addresses
it refuses them. With `allow_anonymous` it serves them in all of these cases, with the scope `infer` alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.contract.errors import ForbiddenError, PenstockError, UnauthorizedError
from penstock.contract.priority import ClassName
from penstock.contract.tenant import (
    ANONYMOUS,
    OPENED,
    ApiKey,
    are_required,
    identify,
    identify_given,
    key_id_of,
    keys_in_use,
    opened_s,
)
from penstock.contract.tenant import Scope as KeyScope
from penstock.gateway.errors import ErrorShapes, soon
from penstock.gateway.http.allowed_hosts import AllowedHosts, is_loopback
from penstock.gateway.http.foreign_pages import SAFE_METHODS, check_page
from penstock.gateway.kept.answer import record_of
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.settings import GatewaySettings, given_records
from penstock.producer.client import AsyncClient
from penstock.runtime.trusted_folders import open_own, trusted_folder

logger = logging.getLogger("penstock.gateway")

PUBLIC_PATHS = frozenset(("/health", "/ready"))
"""Paths of probes, which need no API key. An API may add its own."""
READING_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods of requests for such paths. Others need a key."""
READING_SCOPES: Mapping[str, tuple[KeyScope, ...]] = {
    "/metrics": ("metrics", "admin"),
    "/health/nodes": ("admin",),
    "/dashboard": ("admin",),
    "/v1/usage": ("infer", "admin"),
    "/v1/key": ("infer", "admin"),
    "/v1/jobs": ("infer", "admin"),
    "/v1/jobs/events": ("infer", "admin"),
    "/v1/jobs/events/cursor": ("infer", "admin"),
    "/v1/jobs/paused": ("infer", "admin"),
}
"""Path → the scopes of which a key needs one for GET and HEAD. A route may restrict a scope further."""
STEERING_PATHS = frozenset(("/v1/jobs/bulk", "/v1/jobs/pause", "/v1/jobs/resume"))
"""Paths where an admin may act for all tenants. Their routes say what another key may do."""
OTHER_SCOPES: tuple[KeyScope, ...] = ("infer",)
"""The scopes for every other request. A new route is closed to `metrics` and `admin` until READING_SCOPES names it."""
OPERATOR_PATIENCE_S = 1.0
"""Seconds that a request of an operator waits for fresh keys from Redis. After that the last known keys apply, so that
an operator can still see that Redis is unreachable."""
SCRAPE_PATIENCE_S = 0.03
"""The same for a scrape, which must be answered soon."""
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
"""Headers that a proxy adds. Behind a proxy, a loopback address is no longer local."""
_SCHEME = "bearer "
_KEY_HEADER = "x-api-key"
"""The header in which Anthropic's clients send the key. An Authorization header goes first."""


def scopes_for(method: str, path: str) -> tuple[KeyScope, ...]:
    """Return the scopes of which a key needs one for a request."""
    if path in STEERING_PATHS or path.startswith("/v1/jobs/bulk/"):
        return ("infer", "admin")
    return READING_SCOPES.get(path, OTHER_SCOPES) if method in ("GET", "HEAD") else OTHER_SCOPES


class KeysSeen:
    """A note, in a file, that API keys exist. It outlives Redis's data, which a restored backup may lack."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.had_keys = path is not None and path.exists()
        self.last_s = int(path.stat().st_mtime) if path is not None and self.had_keys else 0
        """When keys were seen (Unix time in seconds). What opened the gateways before that no longer counts."""

    def note(self) -> None:
        """Write the note, unless it is there. A folder that cannot be written, or that others may write, is logged."""
        if self.had_keys:
            return
        self.had_keys = True
        if self._path is None:
            return
        try:
            folder = trusted_folder(
                self._path.parent, remedy="choose another file with PENSTOCK_GATEWAY_KEYS_SEEN_FILE"
            )
            os.close(open_own(folder / self._path.name))
        except OSError as error:
            logger.warning("cannot note that API keys exist", extra={"reason": str(error)})

    def forget(self) -> None:
        """Remove the note: an operator opened the gateways again."""
        self.had_keys, self.last_s = False, 0
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class Entry:
    """ASGI middleware that attaches the caller to a request or a WebSocket, or answers 401 or 403.

    Once this process has seen any API key, it requires one from then on, even if all keys are removed, unless an
    operator opens it again. While it requires none, it checks the Host header.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: GatewaySettings,
        pepper: str,
        client: AsyncClient,
        metrics: GatewayMetrics,
        errors: ErrorShapes,
        public_paths: frozenset[str] = frozenset(),
    ) -> None:
        """`client` knows the API keys. `public_paths` need no key, as PUBLIC_PATHS."""
        self._app = app
        self._client = client
        self._metrics = metrics
        self._errors = errors
        self._public_paths = PUBLIC_PATHS | public_paths
        self._hosts = AllowedHosts(settings.host, settings.allowed_hosts)
        self._settings = settings
        self._seen = KeysSeen(settings.keys_seen_file)
        self._pepper = pepper
        self._given = given_records(settings, pepper)
        self._known: Mapping[str, ApiKey] = {}
        self._doubted = set[str]()
        """Ids of keys whose wrong secret was logged; at most one for each key."""
        self._is_closed = is_closed_without_keys(settings) or self._seen.had_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate one request and pass it on, or send the refusal."""
        if (record := record_of(scope)) is not None:
            # An earlier gateway let the caller in. The record has no secret.
            scope.setdefault("state", {})["caller"] = await self._caller_of(record)
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket" or (scope["type"] == "http" and not self._is_public(scope)):
            try:
                # A WebSocket has no method.
                needed = scopes_for(scope.get("method", ""), scope["path"])
                # A stream that is resumed waits longer for Redis than other reads of shared state.
                is_stream = scope["path"].endswith("/stream") or b"stream=" in scope["query_string"]
                only_reads = scope.get("method") in ("GET", "HEAD") and not is_stream
                async with soon() if only_reads else nullcontext():
                    patience_s = SCRAPE_PATIENCE_S if scope["path"] == "/metrics" else OPERATOR_PATIENCE_S
                    known = await self._client.api_keys(patience_s=None if "infer" in needed else patience_s)
                caller = self._identify(known, scope)
                scope.setdefault("state", {})["caller"] = caller
                caller.require(*needed)
            except PenstockError as error:
                self._metrics.refused(error)
                answer = self._errors.response(error, scope)
                if isinstance(error, UnauthorizedError):
                    answer.headers["WWW-Authenticate"] = "Bearer"
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _caller_of(self, record: Mapping[str, Any]) -> ApiKey:
        """Return the caller of an answer that was taken over."""
        key_id, tenant = record["scope"]["key_id"], record["scope"]["tenant"]
        with suppress(PenstockError):
            known = {**await self._client.api_keys(patience_s=OPERATOR_PATIENCE_S), **self._given}
            if key_id and (found := known.get(key_id)) is not None:
                return found
        return ApiKey(key_id=key_id, digest="", tenant=tenant, scopes=frozenset(("infer",)))

    def _is_public(self, scope: Scope) -> bool:
        """Return whether a request needs no key: it reads a path that reveals nothing."""
        return scope["path"] in self._public_paths and scope["method"] in READING_METHODS

    def _identify(self, known: Mapping[str, ApiKey], scope: Scope) -> ApiKey:
        headers = Headers(scope=scope)
        if known is not self._known:
            self._learn(known)
        authorization = headers.get("authorization", "")
        if self._is_closed and authorization.lower().startswith(_SCHEME):
            return self._holder_of(authorization[len(_SCHEME) :].strip(), known)
        if self._is_closed and not authorization and _KEY_HEADER in headers:
            return self._holder_of(headers[_KEY_HEADER].strip(), known)
        if self._settings.allow_anonymous:
            self._check_browser(headers, scope)
            return self._keyless(ANONYMOUS if known or self._given else "default", ("infer",))
        if self._is_closed:
            raise UnauthorizedError(self._why_closed(known))
        self._check_browser(headers, scope)
        _refuse_proxies(headers)
        return self._keyless("default", get_args(KeyScope))

    def _learn(self, known: Mapping[str, ApiKey]) -> None:
        """Close or open the gateway as the keys say that were fetched from Redis."""
        self._known = known
        if (since_s := opened_s(known)) and since_s >= self._seen.last_s:
            self._is_closed = is_closed_without_keys(self._settings)
            self._seen.forget()
        elif known.keys() - {OPENED}:
            self._is_closed = True
            self._seen.note()
            if keys_in_use(known):
                self._seen.last_s = int(time.time())

    def _check_browser(self, headers: Headers, scope: Scope) -> None:
        """Refuse what a page of another site sends to a gateway that asks for no key. WebSockets check pages too."""
        self._hosts.check(headers)
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS:
            check_page(headers, self._settings.cors_origins)

    def _holder_of(self, key: str, known: Mapping[str, ApiKey]) -> ApiKey:
        if (given := identify_given(key, self._given, known, self._pepper)) is not None:
            return given
        try:
            return identify(key, known, self._pepper)
        except UnauthorizedError as error:
            if self._given and not key_id_of(key):
                error.message = "unknown API key"  # A given key has no form that this one could lack.
            error.message += self._way_back(known)
            # The caller must not learn which ids exist; the operator may.
            record = known.get(key_id_of(key))
            if record is not None and not record.is_revoked and record.key_id not in self._doubted:
                self._doubted.add(record.key_id)
                facts = {"key_id": record.key_id, "has_pepper": bool(self._pepper)}
                logger.warning("an API key exists and its secret does not fit", extra=facts)
            raise

    def _keyless(self, tenant: str, scopes: tuple[KeyScope, ...]) -> ApiKey:
        return _keyless_record(tenant, scopes, self._settings.open_highest_class)

    def _why_closed(self, known: Mapping[str, ApiKey]) -> str:
        if not known.keys() - {OPENED} and not self._given and not self._settings.require_keys:
            if self._seen.had_keys:
                return f"this gateway requires an API key{self._way_back(known)}"
            return (
                "this gateway has no API keys, and other machines reach its address: make one with "
                "`penstock keys add TENANT`, or start the gateway with --allow-anonymous"
            )
        form = "KEY" if self._given else "pk-…"
        said = f"this gateway requires an API key: Authorization: Bearer {form} or x-api-key: {form}"
        return f"{said}{self._way_back(known)}"

    def _way_back(self, known: Mapping[str, ApiKey]) -> str:
        """Return what an operator can do about a missing key. Callers of other machines learn no state of keys."""
        opens = "" if is_closed_without_keys(self._settings) else ", or let programs do without: `penstock keys open`"
        if not known.keys() - {OPENED} and self._seen.had_keys:
            return (
                "; it had API keys, and they are missing now: restore them with Redis's data, or make new ones with "
                f"`penstock keys add TENANT`{opens}"
            )
        if not is_loopback(self._settings.host) or self._given:
            return ""
        if keys_in_use(known) or not opens:
            return "; `penstock keys add TENANT` makes one"
        return f"; all keys are revoked: make a new one with `penstock keys add TENANT`{opens}"


# Keyed by tenant
@cache
def _keyless_record(tenant: str, scopes: tuple[KeyScope, ...], highest_class: ClassName) -> ApiKey:
    """Return the record of callers without a key. All of them share it."""
    return ApiKey(key_id="", digest="", tenant=tenant, scopes=frozenset(scopes), highest_class=highest_class)


def is_closed_without_keys(settings: GatewaySettings) -> bool:
    """Return whether a gateway refuses callers without a key even while no keys exist."""
    return (
        settings.require_keys
        or settings.api_key is not None
        or not (settings.allow_anonymous or is_loopback(settings.host))
    )


def _refuse_proxies(headers: Headers) -> None:
    name = next((name for name in PROXY_HEADERS if name in headers), None)
    if name is not None:
        message = (
            f"a proxy passed this request on ({name}), but this gateway has no API keys: make one with "
            "`penstock keys add TENANT`, or start the gateway with --allow-anonymous"
        )
        raise ForbiddenError(message, code="proxied_without_keys", param=name)


async def tell_without_keys(client: AsyncClient, settings: GatewaySettings) -> None:
    """Log a warning if callers without an API key are served, or if none can be, because there are no keys."""
    if settings.allow_anonymous:
        logger.warning("this gateway serves callers without an API key (--allow-anonymous)")
    elif settings.api_key is None and not are_required(await client.api_keys()):
        if is_closed_without_keys(settings):
            logger.warning("this gateway refuses every request: there are no API keys (penstock keys add)")
        else:
            logger.warning("this gateway accepts unauthenticated requests: there are no API keys (penstock keys add)")
