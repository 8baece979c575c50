"""Connections to Redis, and the translation of its errors."""

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
from penstock.runtime.cancellation import heeding_cancel

CONNECT_TIMEOUT_S = 3.0
HEALTH_CHECK_S = 15
_AWAY = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.InvalidResponse,
    OSError,
)

# At the head of a reply, or inside the report of a script that met it.
_AWAY_CODES = re.compile(r"(?:^|-)(?:MASTERDOWN|LOADING|READONLY|MISCONF|NOREPLICAS|BUSY|CLUSTERDOWN|TRYAGAIN) ")


def connect(url: str) -> Redis:
    """A client for `redis://`, `rediss://` or `unix://`; bytes replies; no blind retries, as the scripts are retried
    by those who know what they ask. Raises ConfigError for an URL that is none.
    """
    try:
        redis = SharedRedis.from_url(
            url,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=REPLY_TIMEOUT_S,
            health_check_interval=HEALTH_CHECK_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            # Or each connection would tell Redis what library it is: refused to our users, it would fill the ACL log.
            driver_info=None,
        )
        # Connects nowhere, and takes the options behind the URL's question mark.
        cast(Any, redis.connection_pool).make_connection()
    except ValueError as error:
        # Not the URL itself, which may hold a password.
        raise ConfigError(f"redis_url: {error}", param="redis_url") from error
    except TypeError as error:
        raise ConfigError(f"redis_url: unknown option {str(error).rpartition(' ')[2]}", param="redis_url") from error
    return redis


@contextmanager
def translated() -> Iterator[None]:
    """Turns redis-py's errors into ours: away is UnavailableError, full is BusyError, the rest is a bug."""
    try:
        with heeding_cancel():
            yield
    except exceptions.AuthenticationError as error:
        raise ConfigError(f"Redis refuses our credentials: {error}", param="redis_url") from error
    except exceptions.NoPermissionError as error:
        raise ConfigError(f"Redis refuses this user: {error}", param="redis_url") from error
    except _AWAY as error:
        raise UnavailableError(f"Redis is away: {error}", code="redis_away") from error
    except exceptions.OutOfMemoryError as error:
        raise BusyError("Redis is full", code="redis_full", retry_after_ms=5000) from error
    except exceptions.ResponseError as error:
        text = str(error)
        if "OOM" in text:
            raise BusyError("Redis is full", code="redis_full", retry_after_ms=5000) from error
        if _AWAY_CODES.search(text):
            raise UnavailableError(f"Redis is away: {text}", code="redis_away") from error
        raise InvariantError(f"Redis: {text}") from error
