"""One attempt of a delivery: a signed POST, and what of its answer matters."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import httpcore

from penstock.contract.errors import RequestError
from penstock.contract.webhook import checked_url, payload_of, signed_headers
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.webhooks.addresses import AddressGuard, CheckedBackend, ForbiddenAddressError

CONNECT_TIMEOUT_S = 5.0
USER_AGENT = "penstock-webhooks"
MAX_RETRY_AFTER_DIGITS = 9
MAX_REASON_CHARS = 256
_PORTS = {"https": 443, "http": 80}


class SendError(Exception):
    """An attempt without an answer. The text says why, for the endpoint's owner."""


class SentAnswer(NamedTuple):
    """The answer to an attempt. `retry_after_s`: how long its receiver asks to wait, or 0."""

    status: int
    retry_after_s: float = 0.0


class Sender:
    """Sends events to endpoints, as the gateway's settings allow it.

    A connection is used once, redirects are not followed, no proxy is used, and of an answer only the head is read,
    which may have 100 KiB.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._allows_http = settings.webhook_allow_http
        self._timeout_s = settings.webhook_timeout_s
        self._guard = AddressGuard(settings.webhook_allowed_networks)
        self._pool: httpcore.AsyncConnectionPool | None = None

    def check_url(self, url: str) -> None:
        """Raise RequestError for a URL to which this gateway would not deliver."""
        host = checked_url(url, allows_http=self._allows_http).hostname or ""
        try:
            self._guard.check_host(host)
        except ForbiddenAddressError as error:
            message = f"url: {error} (the operator may allow its network by webhook_allowed_networks)"
            raise RequestError(message, code="forbidden_webhook_url", param="url") from None

    async def send(
        self, url: str, event_id: str, event_type: str, object_id: str, created_s: int, secrets: Sequence[str]
    ) -> SentAnswer:
        """Send one event, signed with each secret. Raises SendError if there is no answer in time."""
        if not secrets:
            raise SendError("the endpoint has no secret: rotate it")
        body = payload_of(event_id, event_type, object_id, created_s)
        signed = signed_headers(event_id, body, secrets, int(time.time()))
        headers = {"content-type": "application/json", "user-agent": USER_AGENT, "connection": "close", **signed}
        if self._pool is None:
            self._pool = await self._new_pool()
        try:
            parts = checked_url(url, allows_http=self._allows_http)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            port = parts.port or _PORTS[parts.scheme]
            where = httpcore.URL(scheme=parts.scheme, host=parts.hostname or "", port=port, target=target)
            async with asyncio.timeout(self._timeout_s):
                return await self._answer_to(self._pool, where, headers, body)
        except RequestError as error:
            raise SendError(error.message) from None
        except ForbiddenAddressError as error:
            raise SendError(str(error)) from None
        except (TimeoutError, httpcore.TimeoutException):
            raise SendError(f"no answer within {self._timeout_s:g} s") from None
        except socket.gaierror:
            raise SendError("the name of the host cannot be resolved") from None
        except (OSError, httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise SendError(f"the connection failed: {str(error) or type(error).__name__}"[:MAX_REASON_CHARS]) from None

    async def close(self) -> None:
        """Close the connections."""
        self._guard.close()
        if self._pool is not None:
            await self._pool.aclose()

    async def _new_pool(self) -> httpcore.AsyncConnectionPool:
        # Reading the certificates of authorities takes tens of milliseconds.
        context = await asyncio.to_thread(ssl.create_default_context)
        return httpcore.AsyncConnectionPool(
            ssl_context=context,
            max_connections=None,
            max_keepalive_connections=0,
            network_backend=CheckedBackend(self._guard),
        )

    @staticmethod
    async def _answer_to(
        pool: httpcore.AsyncConnectionPool, where: httpcore.URL, headers: dict[str, str], body: bytes
    ) -> SentAnswer:
        given = {"headers": headers, "content": body, "extensions": {"timeout": {"connect": CONNECT_TIMEOUT_S}}}
        async with pool.stream("POST", where, **given) as response:  # type: ignore[arg-type]
            asked = next((value for name, value in response.headers if name.lower() == b"retry-after"), b"")
            return SentAnswer(response.status, retry_after_of(asked.decode("latin-1"), time.time()))


def retry_after_of(text: str, now_s: float) -> float:
    """Return the seconds that a header Retry-After asks to wait, given as seconds or as a date; 0 for anything else."""
    text = text.strip()
    if text.isdecimal():
        return float(text) if len(text) <= MAX_RETRY_AFTER_DIGITS else 0.0
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_s)
    except (ValueError, TypeError, OverflowError):
        return 0.0
