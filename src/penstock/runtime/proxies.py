"""Proxies of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY): never for this machine, and wrong ones in words.

A proxy cannot reach a loopback address of this machine. Many companies set the variables for all programs, and NO_PROXY
not always.
"""

from __future__ import annotations

import os
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.contract.errors import ConfigError

if TYPE_CHECKING:
    import ssl

_VARIABLES = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY")


def is_loopback(url: str) -> bool:
    """Return whether a URL names this machine: localhost, a loopback address, or the address of all interfaces."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def tls_for(url: str) -> ssl.SSLContext | bool:
    """Return httpx's `verify` for a client that ignores the environment's proxies but trusts its certificates."""
    if not url.startswith("https://"):
        return True
    import httpx

    return httpx.create_ssl_context(trust_env=True)


def proxy_error(error: Exception) -> ConfigError | None:
    """Return the error of an HTTP library about a proxy of the environment in words; None for other errors."""
    said = str(error)
    if not isinstance(error, ImportError | ValueError) or "proxy" not in said.lower():
        return None
    name, value = _first_set()
    if isinstance(error, ImportError):
        problem = "is a SOCKS proxy, which needs a package: pip install socksio"
    else:
        problem = "is no URL of a proxy; it begins with http://, https://, socks5:// or socks5h://"
    return ConfigError(f"{name}: {_without_login(value)} {problem}; or name the server in NO_PROXY", param=name)


def _first_set() -> tuple[str, str]:
    """Return the variable whose proxy is of an unusual kind, else the first one that is set, and its value."""
    names = [name for upper in _VARIABLES for name in (upper, upper.lower()) if os.environ.get(name)]
    odd = [name for name in names if not os.environ[name].startswith(("http://", "https://"))]
    name = next(iter(odd or names), _VARIABLES[0])
    return name, os.environ.get(name, "")


def _without_login(url: str) -> str:
    scheme, mark, rest = url.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"
