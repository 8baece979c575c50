"""What the servers of a Redis say of themselves: the primary, its replicas, and the Sentinels.

Redis replicates data, and neither users nor settings. It takes a user that may read both, such as `operator`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from redis import exceptions
from redis.asyncio import Connection, ConnectionPool, Redis
from redis.asyncio.connection import UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock.runtime.redis_url import AllSentinels, SentinelUrl, sentinel_url_of

SETTINGS = (
    "appendonly",
    "appendfsync",
    "maxmemory",
    "maxmemory-policy",
    "min-replicas-to-write",
    "masteruser",
    "aclfile",
)
"""What is the same on each server, because each may become the primary."""
_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What one Redis server says of itself."""

    name: str
    """Its address."""
    version: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    """Name → rules."""
    lag_s: int = 0
    lag_bytes: int = 0
    is_linked: bool = True
    problem: str = ""
    """Why it did not answer. Then nothing else is known."""


@dataclass(frozen=True, slots=True)
class SentinelFacts:
    """What one Sentinel says."""

    name: str
    primary: str = ""
    replicas: tuple[tuple[str, int], ...] = ()
    """Those that it knows, also if they are away."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class AskedServers:
    """The servers of one Redis, as far as they answer."""

    primary: ServerFacts | None = None
    """None without replicas, or if `problem` says why it was not asked."""
    replicas: Sequence[ServerFacts] = ()
    sentinels: Sequence[SentinelFacts] | None = None
    """None for a URL without Sentinel."""
    primary_name: str = ""
    """The primary's address as Sentinel names it."""
    problem: str = ""
    lacks_rights: bool = False
    """Whether the URL's user may not read users and settings."""
    is_replica: bool = False
    """Whether the URL leads to a replica."""


async def ask_servers(url: str) -> AskedServers:
    """Ask the servers of the Redis at `url`. Nothing raises: what does not answer is named."""
    behind = sentinel_url_of(url)
    sentinels = None if behind is None else await _sentinels_of(behind)
    options = dict(parse_url(url)) if behind is None else dict(behind.server)
    primary_name = next((one.primary for one in sentinels or () if one.primary), "")
    found = AskedServers(sentinels=sentinels, primary_name=primary_name)
    if behind is not None:
        if not primary_name:
            return found
        host, _, port = primary_name.rpartition(":")
        options |= {"host": host, "port": int(port)}
        if behind.has_tls:
            options["connection_class"] = dict(parse_url("rediss://unused"))["connection_class"]
    async with _connected(options) as redis:
        try:
            info = await redis.info("replication")
            if info.get("role") != "master":
                return replace(found, is_replica=True)
            lags = {(one["ip"], one["port"]): one for name, one in info.items() if re.fullmatch(r"slave\d+", name)}
            addresses = {*lags, *(address for one in sentinels or () for address in one.replicas)}
            if not addresses:
                return found
            primary = await _server(redis, primary_name or _address_of(options), info)
        except exceptions.NoPermissionError:
            return replace(found, lacks_rights=True)
        except (exceptions.RedisError, OSError) as error:
            return replace(found, problem=str(error) or type(error).__name__)
    replicas = await asyncio.gather(
        *(_replica(options, address, lags.get(address, {}), info) for address in sorted(addresses))
    )
    return replace(found, primary=primary, replicas=replicas)


def _address_of(options: Mapping[str, Any]) -> str:
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


def _connected(options: Mapping[str, Any]) -> Redis:
    given = {**options, "decode_responses": True, "protocol": 2, "driver_info": None}
    given |= {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S, "retry": Retry(NoBackoff(), 0)}
    return Redis.from_pool(ConnectionPool(**given))


async def _replica(
    options: Mapping[str, Any], address: tuple[str, int], lag: Mapping[str, Any], of_primary: Mapping[str, Any]
) -> ServerFacts:
    """Ask a replica with the credentials of the primary's URL. `lag`: what the primary says of it."""
    name, given = f"{address[0]}:{address[1]}", {**options, "host": address[0], "port": address[1]}
    if given.get("connection_class") is UnixDomainSocketConnection:
        given = {one: value for one, value in given.items() if one != "path"} | {"connection_class": Connection}
    try:
        async with _connected(given) as redis:
            found = await _server(redis, name, await redis.info("replication"))
            behind = int(of_primary.get("master_repl_offset", 0)) - int(lag.get("offset", 0)) if lag else 0
            return replace(found, lag_s=int(lag.get("lag", 0)), lag_bytes=max(0, behind))
    except (exceptions.RedisError, OSError) as error:
        return ServerFacts(name, problem=str(error) or type(error).__name__)


async def _server(redis: Redis, name: str, replication: Mapping[str, Any]) -> ServerFacts:
    rules = [str(one).split(" ", 2) for one in await redis.acl_list()]
    settings = {one: str((await redis.config_get(one)).get(one) or "") for one in SETTINGS}
    version = str((await redis.info("server")).get("redis_version", ""))
    users = {words[1]: f" {words[2]} " for words in rules}
    is_linked = replication.get("role") == "master" or replication.get("master_link_status") == "up"
    return ServerFacts(name, version, settings, users, is_linked=is_linked)


async def _sentinels_of(url: SentinelUrl) -> list[SentinelFacts]:
    async def ask(at: int, one: Any) -> SentinelFacts:
        name = "{}:{}".format(*url.sentinels[at])
        try:
            state = (await one.sentinel_masters()).get(url.master_name)
            if state is None:
                return SentinelFacts(name)
            replicas = await one.sentinel_slaves(url.master_name)
        except (exceptions.RedisError, OSError) as error:
            return SentinelFacts(name, problem=str(error) or type(error).__name__)
        finally:
            await one.aclose()
        return SentinelFacts(
            name, f"{state['ip']}:{state['port']}", tuple((found["ip"], int(found["port"])) for found in replicas)
        )

    given: dict[str, Any] = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S, "protocol": 2}
    given |= {"driver_info": None, "retry": Retry(NoBackoff(), 0), **url.sentinel}
    manager = cast(Any, AllSentinels)(url.sentinels, sentinel_kwargs=given)
    return list(await asyncio.gather(*(ask(at, one) for at, one in enumerate(manager.sentinels))))
