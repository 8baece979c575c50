"""The version of the queue protocol, and the refusal of pools of another version."""

from __future__ import annotations

from penstock.contract.errors import ProtocolVersionError

PROTOCOL_VERSION = 1
"""Version of the keys, scripts and records in Redis, as in prelude.lua. Processes of one pool have the same version."""


def other_version(pool: str, found: int | str) -> ProtocolVersionError:
    """Return the error for a pool of the protocol version `found`."""
    return ProtocolVersionError(
        f"pool {pool} has protocol version {found}, and this release has version {PROTOCOL_VERSION}: run the release "
        f"that made the pool, or drain its nodes and remove it with that release (`penstock pools forget {pool}`)",
        param="model",
    )
