"""Which addresses webhooks may be delivered to, and connections to exactly the addresses that were checked.

A tenant chooses the URL, so a gateway must not let it reach what only the gateway can reach (server-side request
forgery). A name is resolved once for each attempt, and the connection goes to one of the addresses that were checked.
So a name that resolves otherwise a moment later (DNS rebinding) changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpcore

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MAX_ADDRESSES = 4
"""Addresses of a name that an attempt tries."""
RESOLVING_THREADS = 8
"""Names that are resolved at the same time. A name server that does not answer occupies one of these threads alone."""

_NAT64 = (ipaddress.ip_network("64:ff9b::/96"),)
_REFUSED: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # shared by the customers of a provider, and Alibaba's metadata
        "169.254.0.0/16",  # link-local, and the metadata of most clouds
        "168.63.129.16/32",  # Azure's metadata, which is outside of all reserved networks
        "192.0.0.0/24",  # Oracle's metadata, among others
        "198.18.0.0/15",
        "::/96",
        "64:ff9b:1::/48",
        "fc00::/7",  # unique local, and Amazon's metadata
        "fe80::/10",
        "fec0::/10",
        "2001::/23",
        "2001:db8::/32",
    )
)
"""Networks that are refused beside those that are not global by Python's registry, whose copies differ by release."""


class ForbiddenAddressError(Exception):
    """A host has no address to which webhooks may be delivered."""


class AddressGuard:
    """Decides about addresses. `allowed_networks` are open although they are not public."""

    def __init__(self, allowed_networks: Iterable[str] = ()) -> None:
        self._allowed = tuple(ipaddress.ip_network(text, strict=False) for text in allowed_networks)
        self._threads = ThreadPoolExecutor(RESOLVING_THREADS, thread_name_prefix="penstock resolver")

    def allows(self, text: str) -> bool:
        """Return whether webhooks may be delivered to this IP address."""
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return False
        meant = _meant_by(address)
        if any(one in network for one in meant for network in self._allowed if network.version == one.version):
            return True
        return all(map(_is_public, meant))

    def check_host(self, host: str) -> None:
        """Raise ForbiddenAddressError for an IP address that is not allowed. A name is checked when it is resolved."""
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return
        if not self.allows(host):
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


def _meant_by(address: Address) -> Sequence[Address]:
    """Return an address and the IPv4 addresses that it stands for. A NAT64 leads to its IPv4 address alone."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if any(address in network for network in _NAT64):
        return [ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)]
    embedded = (address.ipv4_mapped, address.sixtofour, *(address.teredo or ()))
    return [address, *(one for one in embedded if one is not None)]


def _is_public(address: Address) -> bool:
    is_mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    if is_mapped or not address.is_global or address.is_multicast or address.is_reserved:
        return False
    return not any(address in network for network in _REFUSED if network.version == address.version)


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
