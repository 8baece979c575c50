"""What `penstock doctor` says of the other servers of a Redis: its replicas and Sentinels.

Redis replicates data, and neither users nor settings. What a replica lacks is met only after a fail-over, so each
server is asked, and compared with the primary. That takes a user that may read users and settings, such as `operator`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from redis import exceptions
from redis.asyncio import Connection, ConnectionPool, Redis
from redis.asyncio.connection import UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock.cli.machine.check import Check
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
MAX_LAG_S = 1
MAX_LAG_BYTES = 1 << 20
"""More of a replica's lag is named: a fail-over now would lose it."""
MIN_SENTINELS = 3
_TIMEOUT_S = 2.0
_SUBJECT = "servers"
_SAVE = "then ACL SAVE there (ops/acl)"


@dataclass(frozen=True, slots=True)
class Server:
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


def judge_servers(primary: Server, replicas: Sequence[Server]) -> Iterator[Check]:
    """Yield how each replica differs from the primary, and what the primary itself lacks for a fail-over."""
    yield from _own_checks(primary, "primary")
    for one in replicas:
        if one.problem:
            advice = f"give it the users of the primary, which Redis does not replicate: ACL SETUSER, {_SAVE}"
            yield Check("warn", _SUBJECT, f"replica {one.name} cannot be asked: {one.problem}", advice)
            continue
        found = [*_own_checks(one, "replica"), *_differences(primary, one), *_lag(one)]
        yield from found or [Check("ok", _SUBJECT, f"replica {one.name}: users, version and settings as the primary's")]


def _own_checks(server: Server, role: str) -> Iterator[Check]:
    if len(server.users) > 1 and not server.settings.get("aclfile"):
        advice = "name a file (aclfile in its configuration) and restart it, or its users end with its process"
        yield Check("warn", _SUBJECT, f"{role} {server.name}: it has users and no aclfile", advice)
    if " off " in server.users.get("default", "") and not server.settings.get("masteruser"):
        advice = "CONFIG SET masteruser replica, CONFIG SET masterauth PASSWORD, CONFIG REWRITE (ops/acl)"
        finding = f"{role} {server.name}: no masteruser, so it cannot follow another primary after a fail-over"
        yield Check("warn", _SUBJECT, finding, advice)


def _differences(primary: Server, other: Server) -> Iterator[Check]:
    named = f"replica {other.name}"
    if missing := sorted(primary.users.keys() - other.users.keys()):
        finding = f"{named} lacks users of the primary: {', '.join(missing)}"
        yield Check("warn", _SUBJECT, finding, f"make them there: ACL SETUSER NAME RULES, {_SAVE}")
    differing = [name for name in primary.users.keys() & other.users.keys() if primary.users[name] != other.users[name]]
    if differing:
        finding = f"{named}: passwords or rights of {', '.join(sorted(differing))} differ from the primary's"
        yield Check(
            "warn", _SUBJECT, finding, f"after a fail-over they are refused; make the change there too, {_SAVE}"
        )
    if extra := sorted(other.users.keys() - primary.users.keys()):
        finding = f"{named} has users that the primary lacks: {', '.join(extra)}"
        yield Check("warn", _SUBJECT, finding, f"delete them there (ACL DELUSER NAME), {_SAVE}")
    if primary.version != other.version:
        finding = f"{named} has version {other.version}, and the primary {primary.version}"
        yield Check("warn", _SUBJECT, finding, "upgrade the older one; fail over only to the newer one")
    for name in SETTINGS:
        mine, theirs = primary.settings.get(name, ""), other.settings.get(name, "")
        # What `_own_checks` says of an empty one is enough.
        if mine != theirs and theirs and mine:
            advice = (
                f"after a fail-over it counts: CONFIG SET {name} {mine}, CONFIG REWRITE there, unless it is meant so"
            )
            yield Check("warn", _SUBJECT, f"{named}: {name} is {theirs}, and on the primary {mine}", advice)


def _lag(server: Server) -> Iterator[Check]:
    if not server.is_linked:
        advice = "read its log: often masteruser or masterauth is wrong; a fail-over to it would lose what it lacks"
        yield Check("warn", _SUBJECT, f"replica {server.name} is not connected to its primary", advice)
    elif server.lag_s > MAX_LAG_S or server.lag_bytes > MAX_LAG_BYTES:
        finding = f"replica {server.name} is {server.lag_s} s and {server.lag_bytes / 2**20:.1f} MiB behind"
        yield Check("warn", _SUBJECT, finding, "wait before a planned fail-over: what it lacks would be lost")


def judge_sentinels(found: Sequence[SentinelFacts], primary: str) -> Iterator[Check]:
    """Yield which Sentinels do not answer or name another primary, and whether there are enough."""
    for one in found:
        if one.problem:
            advice = "start it, or correct its address, or sentinel_username and sentinel_password of the URL"
            yield Check("warn", "Sentinel", f"{one.name} cannot be asked: {one.problem}", advice)
        elif one.primary != primary:
            finding = f"{one.name} names the primary {one.primary or 'of none'}, and others {primary}"
            yield Check(
                "warn", "Sentinel", finding, "it may be cut off from the others: look at its network and its log"
            )
    if len(found) < MIN_SENTINELS:
        advice = "use three on different machines; fewer cannot agree on a fail-over when one is lost"
        yield Check("warn", "Sentinel", f"the URL names {len(found)}", advice)
    elif all(not one.problem and one.primary == primary for one in found):
        yield Check("ok", "Sentinel", f"{len(found)} name the primary {primary}")


async def check_servers(url: str) -> list[Check]:
    """Ask the servers of the Redis at `url`; nothing where it has neither replicas nor Sentinels."""
    behind = sentinel_url_of(url)
    sentinels = [] if behind is None else await _sentinels_of(behind)
    checks, options = list[Check](), dict(parse_url(url)) if behind is None else dict(behind.server)
    primary_name = next((one.primary for one in sentinels if one.primary), "")
    if behind is not None:
        checks += judge_sentinels(sentinels, primary_name)
        if not primary_name:
            return checks
        host, _, port = primary_name.rpartition(":")
        options |= {"host": host, "port": int(port)}
        if behind.has_tls:
            options["connection_class"] = dict(parse_url("rediss://unused"))["connection_class"]
    async with _connected(options) as redis:
        try:
            info = await redis.info("replication")
            if info.get("role") != "master":
                return [*checks, Check("warn", _SUBJECT, "the URL leads to a replica", "name the primary, or Sentinel")]
            lags = {(one["ip"], one["port"]): one for name, one in info.items() if re.fullmatch(r"slave\d+", name)}
            addresses = {*lags, *(address for one in sentinels for address in one.replicas)}
            if not addresses:
                return checks
            primary = await _server(redis, primary_name or _address_of(options), info)
        except exceptions.NoPermissionError:
            finding = "replicas are not compared: this user may not read users and settings"
            return [*checks, Check("ok", _SUBJECT, finding, "run it with the URL of the user operator (ops/acl)")]
        except (exceptions.RedisError, OSError) as error:
            return [*checks, Check("warn", _SUBJECT, f"the primary cannot be asked: {error}")]
    replicas = await asyncio.gather(
        *(_replica(options, address, lags.get(address, {}), info) for address in sorted(addresses))
    )
    return [*checks, *judge_servers(primary, replicas)]


def _address_of(options: Mapping[str, Any]) -> str:
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


def _connected(options: Mapping[str, Any]) -> Redis:
    given = {**options, "decode_responses": True, "protocol": 2, "driver_info": None}
    given |= {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S, "retry": Retry(NoBackoff(), 0)}
    return Redis.from_pool(ConnectionPool(**given))


async def _replica(
    options: Mapping[str, Any], address: tuple[str, int], lag: Mapping[str, Any], of_primary: Mapping[str, Any]
) -> Server:
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
        return Server(name, problem=str(error) or type(error).__name__)


async def _server(redis: Redis, name: str, replication: Mapping[str, Any]) -> Server:
    rules = [str(one).split(" ", 2) for one in await redis.acl_list()]
    settings = {one: str((await redis.config_get(one)).get(one) or "") for one in SETTINGS}
    version = str((await redis.info("server")).get("redis_version", ""))
    users = {words[1]: f" {words[2]} " for words in rules}
    is_linked = replication.get("role") == "master" or replication.get("master_link_status") == "up"
    return Server(name, version, settings, users, is_linked=is_linked)


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
