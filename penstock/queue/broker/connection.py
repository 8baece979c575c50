"""Connections to Redis, and the translation of Redis errors into penstock errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock.contract.errors import BusyError, ConfigError, InvariantError, UnavailableError
from penstock.queue.broker.shared_connection import REPLY_TIMEOUT_S, SharedRedis
from penstock.queue.protocol_version import other_version
from penstock.runtime.cancellation import preserve_cancellation

CONNECT_TIMEOUT_S = 3.0
HEALTH_CHECK_S = 15
_UNREACHABLE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.InvalidResponse,
    OSError,
)

# At the head of an error reply, or inside the error of a script in which a call failed.
_OTHER_VERSION = re.compile(r"OTHER_PROTOCOL_VERSION (\S+) ([\w-]+)")
_UNREACHABLE_CODES = re.compile(r"(?:^|-)(?:MASTERDOWN|LOADING|READONLY|MISCONF|NOREPLICAS|BUSY|CLUSTERDOWN|TRYAGAIN) ")


def connect(url: str) -> Redis:
    """Return a client for a `redis://`, `rediss://` or `unix://` URL; replies are bytes.

    The client does not retry. Callers do, because only they know whether a call may be repeated. Raises ConfigError for
    an invalid URL.
    """
    try:
        redis = SharedRedis.from_url(
            url,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=REPLY_TIMEOUT_S,
            health_check_interval=HEALTH_CHECK_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            # Otherwise each connection sends CLIENT SETINFO, which our ACL users may not call, and fills the ACL log.
            driver_info=None,
        )
        # Opens no connection, but checks the options in the URL's query.
        cast(Any, redis.connection_pool).make_connection()
    except ValueError as error:
        # The message omits the URL, which may hold a password.
        raise ConfigError(f"redis_url: {error}", param="redis_url") from None
    except TypeError as error:
        raise ConfigError(f"redis_url: unknown option {str(error).rpartition(' ')[2]}", param="redis_url") from None
    return redis


def not_reached(error: UnavailableError, shown_url: str) -> UnavailableError:
    """Return the error of a failed first connection, which names the tried URL and the remedy."""
    remedy = "`penstock serve` starts a Redis and a model; redis_url or PENSTOCK_REDIS_URL names another Redis"
    return UnavailableError(f"{error.message.rstrip('.')}; tried {shown_url}. {remedy}", code=error.code)


@contextmanager
def translated() -> Iterator[None]:
    """Translate redis-py's errors.

    An unreachable Redis raises UnavailableError, a full one BusyError, refused credentials or rights ConfigError, and a
    pool of another protocol version ProtocolVersionError. Their messages say all that callers need, so redis-py's error
    is not shown as their cause. Any other error is a bug and raises InvariantError, with that cause.
    """
    try:
        with preserve_cancellation():
            yield
    except exceptions.AuthenticationError as error:
        raise ConfigError(f"Redis refuses our credentials: {error}", param="redis_url") from None
    except exceptions.NoPermissionError as error:
        raise ConfigError(f"Redis refuses this user: {error}", param="redis_url") from None
    except _UNREACHABLE as error:
        raise UnavailableError(f"Redis is unreachable: {error}", code="redis_away") from None
    except exceptions.OutOfMemoryError:
        raise BusyError("Redis is full", code="redis_full", retry_after_ms=5000) from None
    except exceptions.ResponseError as error:
        text = str(error)
        if found := _OTHER_VERSION.search(text):
            raise other_version(found[2], found[1]) from None
        if "OOM" in text:
            raise BusyError("Redis is full", code="redis_full", retry_after_ms=5000) from None
        if _UNREACHABLE_CODES.search(text):
            raise UnavailableError(f"Redis is unreachable: {text}", code="redis_away") from None
        raise InvariantError(f"Redis: {text}") from error
