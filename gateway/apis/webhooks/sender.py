"""One attempt of a delivery: a signed POST to an address that was checked, and what of its answer matters.

A tenant chooses the URL, so a gateway must not let it reach what only the gateway can reach (server-side request
forgery). A name is resolved once for each attempt, and the connection goes to one of the addresses that were checked.
So a name that resolves otherwise a moment later (DNS rebinding) changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpcore

from penstock.contract.errors import RequestError
from penstock.contract.webhook import checked_url, payload_of, signed_headers
from penstock.contract.webhook_addresses import is_address, is_open_address
from penstock.gateway.settings import GatewaySettings

MAX_ADDRESSES = 4
"""Addresses of a name that an attempt tries."""
RESOLVING_THREADS = 8
"""Names that are resolved at the same time. A name server that does not answer occupies one of these threads alone."""


class ForbiddenAddressError(Exception):
    """A host has no address to which webhooks may be delivered."""


class AddressGuard:
    """Decides about addresses. `allowed_networks` are open although they are not public."""

    def __init__(self, allowed_networks: Iterable[str] = ()) -> None:
        self._allowed = tuple(ipaddress.ip_network(text, strict=False) for text in allowed_networks)
        self._threads = ThreadPoolExecutor(RESOLVING_THREADS, thread_name_prefix="penstock resolver")

    def allows(self, text: str) -> bool:
        """Return whether webhooks may be delivered to this IP address."""
        return is_open_address(text, self._allowed)

    def check_host(self, host: str) -> None:
        """Raise ForbiddenAddressError for an IP address that is not allowed. A name is checked when it is resolved."""
        if is_address(host) and not self.allows(host):
            raise ForbiddenAddressError(f"the address {host} is not public")

    async def resolved(self, host: str, port: int) -> list[str]:
        """Return the allowed addresses of a host. Raises OSError, and ForbiddenAddressError if there are none."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, _addresses_of, host, port)
        allowed = [address for address in found if self.allows(address)]
        if not allowed:
            # The address is not named: a tenant must not learn what an internal name resolves to.
            raise ForbiddenAddressError("the host has no public address")
        return allowed[:MAX_ADDRESSES]

    def close(self) -> None:
        """End the threads, without waiting for a name server."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _addresses_of(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """The network of deliveries: it connects only to addresses that its guard allows."""

    def __init__(self, guard: AddressGuard) -> None:
        self._guard = guard
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address of a host that accepts. TLS later checks the certificate for the host's name."""
        async with asyncio.timeout(timeout):
            addresses = await self._guard.resolved(host, port)
        return await self._first_of(addresses, port, timeout)

    async def _first_of(
        self, addresses: Sequence[str], port: int, timeout_s: float | None
    ) -> httpcore.AsyncNetworkStream:
        *others, last = addresses
        for address in others:
            try:
                return await self._inner.connect_tcp(address, port, timeout_s)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(last, port, timeout_s)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Refuse: no webhook goes to a socket of this machine."""
        raise ForbiddenAddressError(f"webhooks are not delivered to sockets: {path}")

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)


CONNECT_TIMEOUT_S = 5.0
USER_AGENT = "penstock-webhooks"
MAX_RETRY_AFTER_DIGITS = 9
MAX_REASON_CHARS = 256
_PORTS = {"https": 443, "http": 80}


class SendError(Exception):
    """An attempt without an answer. The text says why, for the endpoint's owner."""


class ForbiddenUrlError(SendError):
    """The gateway delivers nothing to the endpoint's URL: its scheme, or the address in it, is not allowed."""


class SentAnswer(NamedTuple):
    """The answer to an attempt. `retry_after_s`: how long its receiver asks to wait, or 0."""

    status: int
    retry_after_s: float = 0.0


class Sender:
    """Sends events to endpoints, as the gateway's settings allow it.

    A connection is used once, redirects are not followed, no proxy is used, and of an answer only the head is read,
    which may have 100 KiB.
    """

    def __init__(self, settings: GatewaySettings, now_s: Callable[[], float] = time.time) -> None:
        """`now_s` returns the Unix time with which events are signed. Receivers refuse one of another time."""
        self._now_s = now_s
        self._allows_http = settings.webhook_allow_http
        self._timeout_s = settings.webhook_timeout_s
        self._guard = AddressGuard(settings.webhook_allowed_networks)
        self._pool: httpcore.AsyncConnectionPool | None = None
        self._making_pool = asyncio.Lock()

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
        """Send one event, signed with each secret. Raises ForbiddenUrlError, and SendError without an answer."""
        if not secrets:
            raise SendError("the endpoint has no secret: rotate it")
        try:
            self.check_url(url)
        except RequestError as error:
            raise ForbiddenUrlError(error.message) from None
        body = payload_of(event_id, event_type, object_id, created_s)
        signed = signed_headers(event_id, body, secrets, int(self._now_s()))
        headers = {"content-type": "application/json", "user-agent": USER_AGENT, "connection": "close", **signed}
        pool = await self._opened_pool()
        try:
            parts = checked_url(url, allows_http=self._allows_http)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            port = parts.port or _PORTS[parts.scheme]
            where = httpcore.URL(scheme=parts.scheme, host=parts.hostname or "", port=port, target=target)
            async with asyncio.timeout(self._timeout_s):
                return await self._answer_to(pool, where, headers, body)
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

    async def _opened_pool(self) -> httpcore.AsyncConnectionPool:
        # A gateway that starts beside a backlog of events sends many at once. They share one pool.
        async with self._making_pool:
            if self._pool is None:
                # Reading the certificates of authorities takes tens of milliseconds.
                context = await asyncio.to_thread(ssl.create_default_context)
                self._pool = httpcore.AsyncConnectionPool(
                    ssl_context=context,
                    max_connections=None,
                    max_keepalive_connections=0,
                    network_backend=CheckedBackend(self._guard),
                )
            return self._pool

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
