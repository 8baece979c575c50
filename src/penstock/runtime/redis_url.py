"""URLs of Redis behind Sentinel: `redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/DB?master_name=NAME`.

Hosts and ports are those of the Sentinels; user, password and database are those of the Redis servers.
`rediss+sentinel://` is the same with TLS for both. The query may have `sentinel_username` and `sentinel_password`, the
Sentinels' own credentials, `sentinel_ssl=no`, if only the Redis servers have TLS, and all options of redis-py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from redis import exceptions
from redis.asyncio.connection import parse_url, to_bool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from penstock.contract.errors import ConfigError

_PLAIN = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_CLUSTER = ("redis+cluster", "rediss+cluster")
_DEFAULT_PORT = 26379
_SENTINEL_TIMEOUT_S = 1.0
"""Seconds that one Sentinel gets to answer. They are asked at the same time, so a dead one delays no other's answer."""
NO_CLUSTER = (
    "Redis Cluster is not supported: the list of pools, API keys and batches are keys outside of any pool, and scripts "
    "use them together. Use one Redis with replicas and Sentinel (redis+sentinel://)"
)


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """A URL of Redis behind Sentinel, parsed."""

    master_name: str
    sentinels: tuple[tuple[str, int], ...]
    has_tls: bool
    server: Mapping[str, Any] = field(repr=False)
    """Options of redis-py for connections to the Redis servers, with their credentials and database."""
    sentinel: Mapping[str, Any] = field(repr=False)
    """Options of redis-py for connections to the Sentinels."""

    def new_pool(self, **options: Any) -> SentinelConnectionPool:
        """Return a pool whose connections lead to the present primary. `options` are those of its connections."""
        given = {
            "socket_timeout": _SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": _SENTINEL_TIMEOUT_S,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "driver_info": None,
            **self.sentinel,
        }
        manager = cast(Any, AllSentinels)(self.sentinels, sentinel_kwargs=given)
        merged = {**options, **self.server}
        pool = cast(Any, SentinelConnectionPool)(self.master_name, manager, ssl=self.has_tls, **merged)
        return cast(SentinelConnectionPool, pool)

    @property
    def for_celery(self) -> tuple[str, dict[str, Any]]:
        """The same as a URL of Celery's, with the transport options that it needs."""
        user, password = self.server.get("username", ""), self.server.get("password", "")
        login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
        database = self.server.get("db", 0)
        hosts = (f"[{host}]" if ":" in host else host for host, _ in self.sentinels)
        urls = (
            f"sentinel://{login}{host}:{port}/{database}" for host, (_, port) in zip(hosts, self.sentinels, strict=True)
        )
        return ";".join(urls), {"master_name": self.master_name, "sentinel_kwargs": dict(self.sentinel)}


def sentinel_url_of(url: str) -> SentinelUrl | None:
    """Parse a URL of Redis behind Sentinel; None for a URL of another kind.

    Raises ConfigError, which shows no part of the URL that may be a password, and for a URL of a Redis Cluster.
    """
    scheme, _, rest = url.partition("://")
    if scheme in _CLUSTER:
        raise _wrong(NO_CLUSTER)
    if scheme not in _PLAIN:
        return None
    before, _, query = rest.partition("#")[0].partition("?")
    authority, slash, path = before.partition("/")
    login, _, hosts = authority.rpartition("@")
    given = dict(parse_qsl(query))
    if not (master_name := given.pop("master_name", "")):
        raise _wrong(f"a URL of {scheme}:// names the primary as Sentinel does: ?master_name=NAME")
    own = {name: given.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    has_tls = scheme == "rediss+sentinel"
    sentinel_has_tls = to_bool(given.pop("sentinel_ssl", None))
    if sentinel_has_tls and not has_tls:
        raise _wrong("sentinel_ssl: Sentinels with TLS need rediss+sentinel://")
    try:
        # redis-py reads the options of the query, as of any other URL.
        plain = f"{_PLAIN[scheme]}://{login + '@' if login else ''}unused{slash}{path}?{urlencode(given)}"
        server = dict(cast(Mapping[str, Any], parse_url(plain)))
        sentinels = tuple(map(_address, hosts.split(",")))
    except ValueError as error:
        raise _wrong(str(error)) from None
    for name in ("host", "port", "connection_class"):
        server.pop(name, None)
    sentinel: dict[str, Any] = {name: value for name, value in own.items() if value}
    if has_tls and sentinel_has_tls is not False:
        sentinel |= {"ssl": True} | {name: value for name, value in server.items() if name.startswith("ssl_")}
    return SentinelUrl(master_name, sentinels, has_tls, server, sentinel)


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a Sentinel has no host; a URL is redis+sentinel://HOST:PORT,HOST:PORT/0?master_name=NAME")
    return parts.hostname, parts.port or _DEFAULT_PORT


def _wrong(message: str) -> ConfigError:
    return ConfigError(f"redis_url: {message}", param="redis_url")


class AllSentinels(Sentinel):
    """Sentinels of which the one with the newest configuration is believed.

    redis-py believes the first that answers. One that is cut off from the others still names the old primary, with an
    older `config-epoch`.
    """

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return the primary's address.

        Raises MasterNotFoundError while no Sentinel knows a primary that is up, and ConfigError if they answer and none
        has the name, or if they refuse the credentials.
        """
        answers = await asyncio.gather(*(one.sentinel_masters() for one in self.sentinels), return_exceptions=True)
        known = [answer for answer in answers if isinstance(answer, dict)]
        refusals = [answer for answer in answers if isinstance(answer, exceptions.AuthenticationError)]
        if not known and refusals:
            raise _wrong(f"the Sentinels refuse sentinel_username and sentinel_password: {refusals[0]}")
        states = [masters[service_name] for masters in known if service_name in masters]
        if known and not states:
            names = ", ".join(sorted({name for masters in known for name in masters})) or "none"
            raise _wrong(f"the Sentinels know no primary {service_name!r}; they know {names}")
        newest = max((state["config-epoch"] for state in states), default=0)
        for state in states:
            if state["config-epoch"] == newest and self.check_master_state(state, service_name):
                return state["ip"], state["port"]
        failures = [repr(answer) for answer in answers if isinstance(answer, BaseException)]
        raise MasterNotFoundError(f"no primary {service_name!r} is up, as Sentinel says; {', '.join(failures)}")
