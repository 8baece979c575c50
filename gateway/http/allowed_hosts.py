"""The check of the Host header while a gateway has no API keys, against DNS rebinding.

A web site can point its own name at this machine. Its pages then call the gateway as their own origin, and no check of
`Origin` refuses them. But a browser always sends the name of the page's address as `Host`. So a gateway without keys
accepts only names that an attacker cannot point to this machine. https://en.wikipedia.org/wiki/DNS_rebinding
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from penstock.contract.errors import ForbiddenError

_LOCAL_DOMAINS = ("localhost", "local", "internal")
"""Domains that the public DNS does not have. RFC 6761, RFC 6762, and a reservation of ICANN."""
_MAX_NAMES = 256


class AllowedHosts:
    """The hosts that callers may name while the gateway has no API keys.

    Without `names`, only a gateway on a loopback address checks: on another address it serves a network, which may know
    it by any name.
    """

    def __init__(self, address: str, names: Sequence[str] = ()) -> None:
        """`address` is the one that the gateway listens on. `names` are allowed as well; `*` allows every name."""
        self._names = {*map(_name_of, names), _plain(address), _plain(socket.gethostname())}
        self._checks = "*" not in names and (bool(names) or is_loopback(address))
        # Keyed by id: Host header, of a gateway without keys: it has one tenant.
        self._is_allowed = lru_cache(_MAX_NAMES)(self._decide)

    def check(self, headers: Headers) -> None:
        """Raise ForbiddenError if a request names a host that is not allowed. HTTP/1.0 needs no Host header."""
        host = headers.get("host")
        if not self._checks or host is None or self._is_allowed(host):
            return
        message = (
            f"Host {host[:100]!r} is not allowed while this gateway has no API keys: "
            "add the name to PENSTOCK_GATEWAY_ALLOWED_HOSTS, a JSON list, or make a key"
        )
        raise ForbiddenError(message, code="host_not_allowed", param="host")

    def _decide(self, host: str) -> bool:
        name = _name_of(host)
        if not name:
            return False
        # No public name has a single label. Names of services in a container network have one.
        is_local = "." not in name or name.rpartition(".")[2] in _LOCAL_DOMAINS
        return is_local or name in self._names or _is_ip(name)


def _name_of(host: str) -> str:
    """Return the host of `host:port`, or an empty text if it is malformed."""
    try:
        return _plain(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return ""


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether only processes of this machine reach an address."""
    return address == "localhost" or (_is_ip(address) and ipaddress.ip_address(address).is_loopback)
