"""Connections to Redis: scripts, retries, and the translation of Redis errors into penstock errors."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock.contract.errors import (
    BusyError,
    ConfigError,
    DamagedDataError,
    DamagedRecordError,
    InvariantError,
    NotConfirmedError,
    PenstockError,
    UnavailableError,
)
from penstock.contract.pool import AWAY, NO_RIGHTS, REDIS_STATES
from penstock.queue.broker.shared_connection import REPLY_TIMEOUT_S, SharedRedis
from penstock.queue.protocol_version import other_version
from penstock.runtime.event_loop import preserve_cancellation
from penstock.runtime.file_descriptors import shortage_of
from penstock.runtime.redis_url import NO_CLUSTER, sentinel_url_of

# Retries while Redis is unreachable: jittered, growing pauses, a limit on the total time and on concurrent calls.

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
LEAST_PAUSE_S = 0.1
"""The least pause of a call that others wake, where its own would be longer."""
PROBE_S = 0.4
"""The longest pause of one of the calls that wait, so that all of them soon notice that Redis is back."""
MAX_CALLS = 64
"""Concurrent calls of one client: after an outage, all streams call at once."""

T = TypeVar("T")
T_ERROR = TypeVar("T_ERROR", bound=PenstockError)
P = ParamSpec("P")


def pauses() -> Iterator[float]:
    """Yield pauses between attempts, in seconds: doubling, and jittered so that many clients do not retry at once."""
    ceiling_s = FIRST_PAUSE_S
    while True:
        yield random.uniform(ceiling_s / 2, ceiling_s)
        ceiling_s = min(2 * ceiling_s, LONGEST_PAUSE_S)


async def with_retries(
    call: Callable[[], Awaitable[T]],
    outage_s: float,
    *,
    before_retry: Callable[[], None] = lambda: None,
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Return the answer of `call`, retried for up to `outage_s` seconds while Redis is unreachable.

    `call` must be idempotent. `wait` waits for a pause, or less. Raises UnavailableError after that time,
    NotConfirmedError at once, and what `before_retry` raises.
    """
    clock = asyncio.get_running_loop().time
    give_up_s = clock() + outage_s
    waits = pauses()
    while True:
        try:
            return await call()
        except NotConfirmedError:
            raise  # it has waited as long as it may
        except UnavailableError:
            pause_s = next(waits)
            if clock() + pause_s > give_up_s:
                raise
        await wait(pause_s)
        before_retry()


class Patience:
    """How long the calls of one client are retried while Redis is unreachable, and how many may run at once.

    One of the calls that wait tries often. Once any call has reached Redis, all of them try again.

    The client gives it to its brokers, and sets `is_open` while it is connected.
    """

    def __init__(self, outage_s: float) -> None:
        self._outage_s = outage_s
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._num_waiting, self._has_probe = 0, False
        self._is_back = asyncio.Event()
        self._is_open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which the client connected: its tasks and connections live there only."""

    @property
    def is_open(self) -> bool:
        """Whether the client is connected."""
        return self._is_open

    @is_open.setter
    def is_open(self, is_open: bool) -> None:
        self._is_open = is_open
        with suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()

    def is_in_its_loop(self) -> bool:
        """Return whether the client connected in this event loop; False if its own one was closed.

        Raises UnavailableError if its own one is another and is still there.
        """
        if self._loop is None or not self._loop.is_closed():
            self.require_open()
            return True
        return False

    async def call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of an idempotent request.

        Raises UnavailableError if Redis stays away for `outage_s`, or if the client is closed.
        """
        self.require_open()
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + self._outage_s
        if self._slots.locked():
            await self._wait_for_slot(give_up_s)
        else:
            await self._slots.acquire()  # a slot is free, so this does not wait
        try:
            answer = await with_retries(
                request, give_up_s - clock(), before_retry=self.require_open, wait=self._wait_for_redis
            )
            if self._num_waiting:
                self._is_back.set()
                self._is_back = asyncio.Event()
            return answer
        finally:
            self._slots.release()

    def require_open(self) -> None:
        """Raise UnavailableError unless the client is connected in this event loop."""
        if not self._is_open:
            raise UnavailableError("the client is not connected: use `with` or connect()", code="client_closed")
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            message = (
                "the client is connected in another event loop: each asyncio.run needs its own AsyncClient "
                "(`async with AsyncClient() as client`); penstock.Client serves all threads and loops"
            )
            raise UnavailableError(message, code="client_closed")

    async def _wait_for_redis(self, pause_s: float) -> None:
        """Wait for a pause, or until another call has reached Redis."""
        probes, is_back = not self._has_probe, self._is_back
        self._has_probe, self._num_waiting = True, self._num_waiting + 1
        try:
            least_s = min(pause_s, random.uniform(0.5, 1) * LEAST_PAUSE_S)
            most_s = min(pause_s, random.uniform(0.5, 1) * PROBE_S) if probes else pause_s
            # Also a call that Redis itself refuses for a while must not try as often as others succeed.
            await asyncio.sleep(least_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, most_s - least_s)):
                    await is_back.wait()
        finally:
            self._num_waiting -= 1
            self._has_probe = self._has_probe and not probes

    async def _wait_for_slot(self, give_up_s: float) -> None:
        try:
            async with asyncio.timeout_at(give_up_s):
                await self._slots.acquire()
        except TimeoutError:
            raise UnavailableError(f"Redis is unreachable: {MAX_CALLS} calls wait for it", code="redis_away") from None


class _Patient(Protocol):
    @property
    def patience(self) -> Patience | None: ...


Patient = TypeVar("Patient", bound=_Patient)


def retried(
    method: Callable[Concatenate[Patient, P], Awaitable[T]],
) -> Callable[Concatenate[Patient, P], Coroutine[Any, Any, T]]:
    """Retry a method with its object's patience; without a patience it is called once. It must be idempotent.

    Such a method calls no other of the same client, because it would take a second place among the concurrent calls.
    """

    @wraps(method)
    async def call(self: Patient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.patience is None:
            return await method(self, *args, **kwargs)
        return await self.patience.call(lambda: method(self, *args, **kwargs))

    return call


@contextmanager
def ignoring_retried_errors(log: logging.Logger) -> Iterator[None]:
    """Suppress errors of Redis in a call that will be repeated later anyway.

    An unreachable Redis is ignored; any other error of Redis is logged.
    """
    try:
        yield
    except UnavailableError:
        pass
    except PenstockError as error:
        log.error("redis refused a call that will be retried", extra={"code": error.code, "reason": error.reason})


# Warning for a Redis that may evict keys: an evicted key can be an accepted job.

_LOG = logging.getLogger(__package__)

SAFE_POLICY = "noeviction"


async def warn_of_eviction(redis: Redis) -> None:
    """Log a warning unless Redis's `maxmemory-policy` is `noeviction`. Raises nothing."""
    try:
        with translated():
            info = await redis.info("memory")
    except PenstockError as error:
        # The ACL user may not call INFO, or a managed service hides it.
        _LOG.info("redis's memory policy cannot be read", extra={"reason": error.reason})
        return
    policy, max_bytes = str(info.get("maxmemory_policy", SAFE_POLICY)), int(info.get("maxmemory", 0))
    if policy != SAFE_POLICY:
        facts = {"policy": policy, "maxmemory": max_bytes, "want": f"maxmemory-policy {SAFE_POLICY}"}
        _LOG.warning("redis may evict keys: an evicted key is a lost job", extra=facts)


async def redis_now_ms(redis: Redis) -> int:
    """Return Redis's time, which records have. Raises UnavailableError."""
    with translated():
        seconds, us = await cast(Any, redis).time()
    return int(seconds) * 1000 + int(us) // 1000


# Connections to Redis, and the translation of Redis errors into penstock errors.

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

_SIGNS_OF_TLS = ("\\x15", "reset by peer", "Connection closed by server")
"""How a TLS server ends a connection without TLS: with an alert, whose first byte hiredis shows, or without."""
_CREDENTIALS = re.compile(r"^(?:NOAUTH|WRONGPASS|Authentication required|invalid username-password)")
_NO_RIGHT = re.compile(
    r"(?:^-?NOPERM |ACL failure in script: )(.+?)(?: script: \w+, on .+)?$|The user executing the script can't run this"
)
"""A call that the rules of Redis's user do not allow, in a script too. The first group says which one."""
_NO_DATABASE = "DB index is out of range"
_CLUSTER = re.compile(r"^(?:MOVED|ASK|CROSSSLOT)\b")
"""Errors that only a server in cluster mode returns."""
# At the head of an error reply, or inside the error of a script in which a call failed.
_OTHER_VERSION = re.compile(r"OTHER_PROTOCOL_VERSION (\S+) ([\w-]+)")
_UNREACHABLE_CODES = re.compile(r"(?:^|-)(MASTERDOWN|LOADING|READONLY|MISCONF|NOREPLICAS|BUSY|CLUSTERDOWN|TRYAGAIN) ")
_STATES_OF_CODES = {
    "LOADING": "loading",
    "READONLY": "read_only",
    "MASTERDOWN": "read_only",
    "MISCONF": "disk_full",
    "NOREPLICAS": "no_replicas",
    "BUSY": "slow",
}
_STATES_OF_ERRORS: dict[type[Exception], str] = {
    exceptions.ReadOnlyError: "read_only",
    exceptions.BusyLoadingError: "loading",
}
_REFUSED_CALL = "Redis refused a call, because of damaged data or a bug"


def connect(url: str) -> Redis:
    """Return a client for a `redis://`, `rediss://` or `unix://` URL, or one of Sentinel; replies are bytes.

    The client does not retry. Callers do, because only they know whether a call may be repeated. Raises ConfigError for
    an invalid URL.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": REPLY_TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        # Otherwise each connection sends CLIENT SETINFO, which our ACL users may not call, and fills the ACL log.
        "driver_info": None,
    }
    try:
        if (behind_sentinel := sentinel_url_of(url)) is None:
            redis = SharedRedis.from_url(url, **options)
        else:
            redis = SharedRedis(connection_pool=behind_sentinel.new_pool(**options))
        # Opens no connection, but checks the options in the URL's query.
        cast(Any, redis.connection_pool).make_connection()
    except ValueError as error:
        # The message omits the URL, which may hold a password. So may what stands where a port should be.
        if str(error).startswith("Port "):
            message = (
                "the port is no number from 0 to 65535; in a password, write / ? # [ ] @ : as %2F %3F %23 and so on"
            )
            raise ConfigError(f"redis_url: {message}", param="redis_url") from None
        raise ConfigError(f"redis_url: {error}", param="redis_url") from None
    except TypeError as error:
        raise ConfigError(f"redis_url: unknown option {str(error).rpartition(' ')[2]}", param="redis_url") from None
    return redis


def not_reached(error: UnavailableError, shown_url: str) -> UnavailableError:
    """Return the error of a failed first connection, which names the tried URL and the remedy."""
    if (why := tls_problem(error, shown_url)) is not None:
        return UnavailableError(f"Redis is unreachable: {why}; tried {shown_url}", code=error.code)
    remedy = "`penstock serve` starts a Redis and a model; redis_url or PENSTOCK_REDIS_URL names another Redis"
    return UnavailableError(f"{error.reason.rstrip('.')}; tried {shown_url}. {remedy}", code=error.code)


def refused_at(error: ConfigError, shown_url: str) -> ConfigError:
    """Return the error of a Redis that refuses this URL, which names the URL. Errors of a setting stay as they are."""
    if not error.message.startswith("Redis ") or error.message.startswith("Redis at "):
        return error
    return ConfigError(f"Redis at {shown_url} {error.reason.removeprefix('Redis ')}", param=error.param)


def os_error_of(error: BaseException) -> OSError | None:
    """Return the system's error that ended a connection, or None if Redis was reached."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause


def tls_problem(error: BaseException, url: str) -> str | None:
    """Return what is wrong with TLS on either side, and the remedy; None if something else is wrong."""
    cause, has_tls = os_error_of(error), url.startswith(("rediss://", "rediss+sentinel://"))
    if isinstance(cause, ssl.SSLCertVerificationError):
        remedy = "in redis_url, ?ssl_ca_certs=FILE names the certificate of its authority"
        return f"its TLS certificate is not accepted ({cause.verify_message}); {remedy}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS fails ({cause.reason or cause}); if this Redis has no TLS, its URL begins with redis://"
    if has_tls and isinstance(cause, TimeoutError) and not cause.errno:
        return "no answer in time; if this Redis has no TLS, its URL begins with redis://"
    if not has_tls and any(sign in str(error) for sign in _SIGNS_OF_TLS):
        return "it ends the connection; if it speaks TLS, its URL begins with rediss://"
    return None


@contextmanager
def translated() -> Iterator[None]:
    """Translate redis-py's errors.

    An unreachable Redis raises UnavailableError, a full one BusyError, refused credentials or rights ConfigError, and a
    pool of another protocol version ProtocolVersionError. A key of another type than penstock gives it raises
    DamagedRecordError, unless a script was refused it. Their messages say all that callers need, so redis-py's error
    is not shown as their cause. Any other error comes from damaged data or a bug. It raises DamagedDataError with that
    cause.
    """
    try:
        with preserve_cancellation():
            yield
    except exceptions.AuthenticationError as error:
        raise _refused_credentials(str(error)) from None
    except exceptions.NoPermissionError as error:
        raise _refused_user(str(error).removeprefix("NOPERM ")) from None
    except _UNREACHABLE as error:
        if (why := shortage_of(os_error_of(error))) is not None:
            message = f"Redis is unreachable: no file descriptor is free for a connection; {why}"
            raise _with_state(UnavailableError(message, code="redis_away"), AWAY) from None
        # redis-py raises a ConnectionError if a connection is refused while it is set up.
        raise _unusable(str(error)) or _unreachable(str(error), _STATES_OF_ERRORS.get(type(error), AWAY)) from None
    except exceptions.OutOfMemoryError:
        raise _full() from None
    except exceptions.ResponseError as error:
        if (known := _known_error(str(error))) is not None:
            raise known from None
        raise _with_state(DamagedDataError(_REFUSED_CALL), detail=str(error)) from error


def error_of_reply(text: str) -> PenstockError:
    """Return the error for an error that a script has caught."""
    return _known_error(text) or _with_state(InvariantError(_REFUSED_CALL), detail=text)


def _known_error(text: str) -> PenstockError | None:
    """Return the error for an error reply of Redis; None if only a bug explains it."""
    if found := _OTHER_VERSION.search(text):
        return other_version(found[2], found[1])
    if "OOM" in text:
        return _full()
    if _UNREACHABLE_CODES.search(text):
        return _unreachable(text)
    if text.startswith("WRONGTYPE") and " script: " not in text:
        return DamagedRecordError("a key of penstock in Redis has another type than penstock gives it")
    return _unusable(text)


def _with_state(error: T_ERROR, state: str = "", detail: str = "") -> T_ERROR:
    error.redis_state, error.detail = state, detail.rstrip(".")
    return error


def _unreachable(text: str, state: str = AWAY) -> UnavailableError:
    """Return the error for what Redis said. `state` is that of an error without a code."""
    if found := _UNREACHABLE_CODES.search(text):
        state = _STATES_OF_CODES.get(found[1], AWAY)
    why = f": {REDIS_STATES[state]} ({state})" if state != AWAY else ""
    return _with_state(UnavailableError(f"Redis is unreachable{why}", code="redis_away"), state, text)


def _full() -> BusyError:
    return _with_state(BusyError("Redis is full", code="redis_full", retry_after_ms=5000), "full")


def _unusable(text: str) -> ConfigError | None:
    """Return the error for a Redis that answers and refuses what the URL says; None if that is not the problem."""
    if _CREDENTIALS.search(text):
        return _refused_credentials(text)
    if found := _NO_RIGHT.search(text):
        return _refused_user(found[1] or "a script uses a command that it may not run")
    if _CLUSTER.search(text):
        return ConfigError(f"redis_url: {NO_CLUSTER}", param="redis_url")
    if _NO_DATABASE in text:
        return ConfigError("Redis has no database of the number in its URL", param="redis_url")
    return None


def _refused_credentials(text: str) -> ConfigError:
    if text.startswith(("NOAUTH", "Authentication required")):
        message = (
            "Redis requires a password, and its URL has none (redis://USER:PASSWORD@HOST, or redis://:PASSWORD@HOST)"
        )
        return _with_state(ConfigError(message, param="redis_url"), NO_RIGHTS)
    return _with_state(ConfigError("Redis rejected the credentials", param="redis_url"), NO_RIGHTS, text)


def _refused_user(why: str) -> ConfigError:
    remedy = "each role has a user with the rights that it needs (ops/acl)"
    detail = f"{why.rstrip('.')}; {remedy}"
    return _with_state(ConfigError("Redis refuses this user", param="redis_url"), NO_RIGHTS, detail)
