"""The check that a gateway can listen on its address. `penstock serve` imports it, so it needs no web framework."""

from __future__ import annotations

import asyncio
import errno
import time

from penstock.contract.errors import ConfigError

_POLL_S = 0.1


async def check_address(host: str, port: int, *, wait_s: float = 0.0) -> None:
    """Raise ConfigError, with the remedy, unless a server can listen on the address.

    `wait_s`: seconds to wait for another process that ends and frees the port.
    """
    deadline_s = time.monotonic() + wait_s
    while (error := await _refusal_of(host, port)) is not None:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host}: {error.strerror}", param="port") from error
        if time.monotonic() >= deadline_s:
            remedy = "choose another with --port, or let --port 0 choose a free one"
            raise ConfigError(f"port {port} on {host} is in use; {remedy}", param="port") from error
        await asyncio.sleep(_POLL_S)


async def _refusal_of(host: str, port: int) -> OSError | None:
    """Listen for a moment. Return the error of a failure."""
    try:
        listener = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    except OSError as error:
        return error
    listener.close()
    return None
