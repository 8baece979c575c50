"""Writes that are answered only once Redis's disk has them (`fsync`), or a replica of it (`replicated`).

WAIT answers when replicas have confirmed all up to the last write of its own connection. So the writes and the WAIT go
out together on a connection that no other call uses.

WAITAOF (Redis 8.0) does the same for the disk: it answers when the append-only file is on disk up to the last write of
its own connection. A round sends the scripts of all calls that wait, then one WAITAOF or WAIT. With `appendfsync
everysec`, WAITAOF is answered by the next fsync, up to a second later. Until then, further rounds begin on other
connections.

WAITAOF of Redis 7.4 and of Valkey 8 answers too early with `everysec`, which Redis 8.0 has corrected
(https://github.com/redis/redis/pull/13793). There, and on servers without WAITAOF, `appendfsync always` makes Redis
itself wait for the disk before it replies. In place of WAITAOF, a round then asks whether that is still set.

A reader that waits until what it has read is safe makes a small write of its own (`confirm`). All readers that ask at
the same time share that write, and with it a round.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis import exceptions
from redis.asyncio import Redis

from penstock.contract.durability import FSYNC, MEMORY, REPLICATED, Durability
from penstock.contract.errors import (
    ConfigError,
    InvariantError,
    NotConfirmedError,
    NotOnDiskError,
    NotReplicatedError,
    PenstockError,
    UnavailableError,
    UnsupportedDurabilityError,
)
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.broker.scripts import Argument, command
from penstock.queue.broker.shared_connection import SharedConnection, run_id_of
from penstock.runtime import crash_points
from penstock.runtime.event_loop import cancel_until_done

CONFIRM_TIMEOUT_S = 5.0
"""Seconds that Redis gets to confirm a round. Less than the time after which a silent connection is closed."""
MAX_ROUNDS = 16
"""Most rounds at once, each on a connection."""
GATHER_S = 0.1
"""While rounds wait for the disk, another one begins so long after the first call that it takes. So the connections
suffice for all calls of the second that an fsync may take to come."""
MAX_CALLS_PER_ROUND = 256

_PROBE = ("WAITAOF", 1, 0, 1)
_FIRST_MAJOR = 8
"""The first major version of Redis whose WAITAOF is believed."""
_EARLY = "WAITAOF of this version answers too early"
_READ_POLICY = ("CONFIG", "GET", "*append*")
_ALWAYS = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}
"""What makes Redis wait for the disk before each reply. The last one matters during a rewrite of the file."""
_ROLE_CHANGED = re.compile(r"\bUNBLOCKED\b|WAIT(AOF)? cannot be used with replica")
"""Errors of a server that is a replica, or has become one meanwhile."""


class Confirmed(NamedTuple):
    """What a round says about a call of a script."""

    answer: Any
    is_confirmed: bool
    """Whether the disk, or a replica, has all that the server had written before its answer."""
    run_id: str
    """That of the server, if the calls ask for it."""


@dataclass(eq=False, slots=True)
class _Call:
    """A script call that waits for its answer, and for whether its writes are confirmed."""

    name: str
    pool: str
    arguments: Sequence[Argument]
    check: Callable[[Any], None]
    done: asyncio.Future[Confirmed]

    def finish(self, answer: Any, run_id: str, *, is_confirmed: bool) -> None:
        if not self.done.done():  # its caller may be gone
            self.done.set_result(Confirmed(answer, is_confirmed, run_id))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Line:
    """A connection, and the command whose answer confirms that the disk, or a replica, has what was written before."""

    connection: SharedConnection
    confirm: tuple[Any, ...]
    run_id: str = ""

    async def is_confirmed(self, confirmation: asyncio.Future[Any]) -> bool:
        """Return whether the answer to `confirm` says that the writes are safe. Raises UnavailableError."""
        try:
            with translated():
                reply = await confirmation
            if self.confirm == _READ_POLICY:
                is_safe = _is_always(_pairs(reply))
            else:
                is_safe = int(reply if self.confirm[0] == "WAIT" else reply[0]) >= 1
        except (InvariantError, ConfigError) as error:
            _check_role(error)
            is_safe = False
        if not is_safe:
            # The settings may have changed since this connection was opened, or the replica is lost. Another one tells.
            self.connection.close()
        return is_safe


class DurableCalls:
    """Script calls of one client that wait for the disk, or for a replica."""

    def __init__(
        self, redis: Redis, patience: Patience | None, durability: Durability, *, names_server: bool = False
    ) -> None:
        """`patience`: how rounds are repeated while Redis is unreachable. Their scripts must be idempotent.

        `names_server`: tell which server confirmed a call. Its user must be allowed to run INFO.
        """
        self.patience = patience
        self._redis = redis
        self._durability = durability
        self._names_server = names_server
        self._waiting: list[_Call] = []
        self._shared: _Call | None = None
        """The write of `confirm` that has not begun yet."""
        self._free: list[_Line] = []
        self._rounds: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._checking: asyncio.Task[None] | None = None
        """The check that runs."""
        self._is_closed = False

    async def call(
        self, name: str, pool: str, arguments: Sequence[Argument], check: Callable[[Any], None]
    ) -> tuple[Any, bool]:
        """Return a script's answer, and whether the disk, or a replica, has its writes.

        `check` raises the error of an answer that is a refusal. The caller gets it at once. If it is UnavailableError,
        the script is called again instead. A script that changes nothing, because an earlier call did so, must write
        all the same; otherwise WAITAOF and WAIT wait for nothing. Raises the errors of `connection.translated`, and,
        without a call of the script, UnsupportedDurabilityError if this Redis cannot promise it, and NotReplicatedError
        if no replica is connected.
        """
        confirmed = await self._add(name, pool, arguments, check).done
        return confirmed.answer, confirmed.is_confirmed

    async def confirm(self, name: str, pool: str, arguments: Sequence[Argument]) -> Confirmed:
        """Return whether the disk, or a replica, has all that Redis had written before this call, and which server.

        For that, it calls a script that always writes. Calls share the one that has not begun, whatever its arguments.
        Raises what `call` raises.
        """
        if self._shared is None:
            self._shared = self._add(name, pool, arguments, lambda _: None)
            self._shared.done.add_done_callback(_note_error)
        # Of several callers, one that leaves must not take the answer from the others.
        return await asyncio.shield(self._shared.done)

    async def check(self) -> None:
        """Raise the error of a Redis that cannot promise it now: that of `call` without a call of a script.

        Callers of one moment share a check.
        """
        if (checking := self._checking) is None:
            checking = self._checking = asyncio.create_task(self._check(), name="penstock check of durability")
            checking.add_done_callback(self._note_checked)
        # Of several callers, one that leaves must not take the answer from the others.
        await asyncio.shield(checking)

    def _note_checked(self, checked: asyncio.Task[None]) -> None:
        self._checking = None
        _note_error(checked)

    @retried
    async def _check(self) -> None:
        if self._is_closed:
            raise _closed()
        with translated():
            line = await self._line()
            try:
                if self._durability == REPLICATED:
                    await _replicating_command(line.connection)
            except BaseException:
                line.connection.close()
                raise
            self._free.append(line)

    def _add(self, name: str, pool: str, arguments: Sequence[Argument], check: Callable[[Any], None]) -> _Call:
        if self._is_closed:
            raise _closed()
        loop = asyncio.get_running_loop()
        one = _Call(name, pool, arguments, check, loop.create_future())
        self._waiting.append(one)
        if not self._rounds:
            self._begin_round()
        elif self._timer is None:
            self._timer = loop.call_later(GATHER_S, self._begin_round)
        return one

    async def close(self) -> None:
        """Close all connections. Calls that wait get UnavailableError."""
        self._is_closed = True
        self._stop_timer()
        await cancel_until_done([*self._rounds, *([] if self._checking is None else [self._checking])])
        for one in self._waiting:
            one.fail(_closed())
        for line in self._free:
            line.connection.close()

    def _begin_round(self) -> None:
        self._stop_timer()
        if self._waiting and len(self._rounds) < MAX_ROUNDS and not self._is_closed:
            task = asyncio.create_task(self._run_round(), name="penstock round of durable calls")
            self._rounds.add(task)
            task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._rounds.discard(task)
        self._begin_round()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _run_round(self) -> None:
        calls, self._waiting = self._waiting[:MAX_CALLS_PER_ROUND], self._waiting[MAX_CALLS_PER_ROUND:]
        if self._shared in calls:
            self._shared = None
        if self._waiting:
            self._begin_round()
        error: Exception = _closed()
        try:
            await self._round(calls)
        except Exception as caught:
            error = caught
        finally:
            for one in calls:
                one.fail(error)

    @retried
    async def _round(self, calls: Sequence[_Call]) -> None:
        """Answer those of the calls that have no answer yet. An earlier attempt may have answered others."""
        with translated():
            line = await self._line()
            try:
                left = [one for one in calls if not one.done.done()]
                # Scripts that Redis no longer has go again with their text.
                if unknown := await _run(line, left, whole=False):
                    if line.connection.lost.done():  # what was written before them is not confirmed
                        line = await self._line()
                    await _run(line, unknown, whole=True)
            except BaseException:
                line.connection.close()
                raise
            self._free.append(line)

    async def _line(self) -> _Line:
        """Return a free connection, or open one. Raises what `_open_line` raises."""
        while self._free:
            if not (line := self._free.pop()).connection.lost.done():
                return line
        return await _open_line(self._redis, self._durability, names_server=self._names_server)


async def _open_line(redis: Redis, durability: Durability, *, names_server: bool = False) -> _Line:
    """Open a connection. Raises UnsupportedDurabilityError, NotReplicatedError, and redis-py's errors."""
    connection = await SharedConnection.open(redis)
    try:
        choose = _replicating_command if durability == REPLICATED else _syncing_command
        confirm = await choose(connection)
        run_id = await run_id_of(connection) if names_server else ""
        if names_server and not run_id:
            message = (
                f"durability: {durability} is not possible, because Redis refuses INFO; the ACL rule +info permits it"
            )
            raise UnsupportedDurabilityError(message, param="durability")
        return _Line(connection, confirm, run_id)
    except BaseException:
        connection.close()
        raise


@asynccontextmanager
async def confirmed_writes(redis: Redis, durability: Durability, done: str) -> AsyncIterator[SharedConnection]:
    """Yield a connection for the writes of the block, and wait behind it until they are as safe as `durability` asks.

    `done`: what is done when the block ends, for the message. Raises UnsupportedDurabilityError, and NotConfirmedError.
    A block that changes nothing, because an earlier one did so, must write all the same.
    """
    if durability == MEMORY:
        connection = await SharedConnection.open(redis)
        try:
            yield connection
        finally:
            connection.close()
        return
    line = await _open_line(redis, durability)
    try:
        yield line.connection
        if not await line.is_confirmed(line.connection.call(*line.confirm)):
            raise not_confirmed(durability, done)
    finally:
        line.connection.close()


def not_confirmed(durability: Durability, done: str, *, job_id: str = "") -> NotConfirmedError:
    """Return the error of a write that Redis has done and did not confirm in time."""
    missing = "its disk has it" if durability == FSYNC else "a replica has it"
    message = (
        f"durability: {done}, but Redis did not confirm within {CONFIRM_TIMEOUT_S:.0f} s that {missing}; a repeated "
        "call with the same id or idempotency key waits again"
    )
    return (NotOnDiskError if durability == FSYNC else NotReplicatedError)(message, job_id=job_id)


async def _run(line: _Line, calls: Sequence[_Call], *, whole: bool) -> list[_Call]:
    """Run scripts, wait for the disk or a replica, and answer. Return the calls whose script Redis does not have.

    Raises UnavailableError if it refused calls that another server, or this one later, may accept.
    """
    for one in calls:
        crash_points.point("before", one.name)
    replies = [line.connection.call(*command(one.name, one.pool, one.arguments, whole=whole)) for one in calls]
    confirmation = line.connection.call(*line.confirm)
    unknown: list[_Call] = []
    written: list[tuple[_Call, Any]] = []
    failure: PenstockError | None = None
    for one, reply in zip(calls, await asyncio.gather(*replies, return_exceptions=True), strict=True):
        if isinstance(reply, exceptions.NoScriptError):
            unknown.append(one)
            continue
        try:
            with translated():
                if isinstance(reply, BaseException):
                    raise reply
                one.check(reply)
            written.append((one, reply))
        except UnavailableError as error:
            failure = error
        except PenstockError as error:
            one.fail(error)
    is_confirmed = await line.is_confirmed(confirmation)
    for one, answer in written:
        crash_points.point("after", one.name)
        one.finish(answer, line.run_id, is_confirmed=is_confirmed)
    if failure is not None:
        raise failure
    return unknown


# What a server can promise.


async def _replicating_command(connection: SharedConnection) -> tuple[Any, ...]:
    """Return the command that waits until a replica has a connection's writes.

    Raises NotReplicatedError if no replica is connected, UnsupportedDurabilityError if this user may not run WAIT, and
    UnavailableError if this server is a replica.
    """
    try:
        with translated():
            await connection.call("WAIT", 0, 1)
            role, *state = await connection.call("ROLE")
    except ConfigError as error:
        message = f"durability: replicated is not possible, because Redis refuses WAIT or ROLE ({error.reason}); "
        raise UnsupportedDurabilityError(
            f"{message}the ACL rules +wait and +role permit them", param="durability"
        ) from None
    except InvariantError as error:
        _check_role(error)
        raise
    if role != b"master":
        raise UnavailableError("Redis is unreachable: this server is a replica", code="redis_away")
    if not state[1]:
        message = "durability: no replica is connected to Redis, so nothing was written; a repeated call may find one"
        raise NotReplicatedError(message)
    return ("WAIT", 1, round(1000 * CONFIRM_TIMEOUT_S))


async def _syncing_command(connection: SharedConnection) -> tuple[Any, ...]:
    """Return the command that confirms that the disk has a connection's writes.

    Raises UnsupportedDurabilityError if there is none.
    """
    info, refusal = await _info_of(connection), _EARLY
    try:
        with translated():
            await connection.call(*_PROBE)
        if "valkey_version" not in info and int(info.get("redis_version", "0").partition(".")[0]) >= _FIRST_MAJOR:
            return ("WAITAOF", 1, 0, round(1000 * CONFIRM_TIMEOUT_S))
    except (InvariantError, ConfigError) as error:
        _check_role(error)
        refusal = error.reason
    policy = await _policy_of(connection)
    if _is_always(policy):
        return _READ_POLICY
    raise UnsupportedDurabilityError(_reason(info, policy, refusal), param="durability")


def _check_role(error: PenstockError) -> None:
    """Raise UnavailableError for the error of a server that is a replica; a new connection may reach the master."""
    if _ROLE_CHANGED.search(error.reason):
        raise UnavailableError("Redis is unreachable: this server is a replica", code="redis_away") from None


async def _policy_of(connection: SharedConnection) -> dict[str, str]:
    """Return the settings of the append-only file; empty if this user may not read them."""
    try:
        with translated():
            return _pairs(await connection.call(*_READ_POLICY))
    except (InvariantError, ConfigError):
        return {}


def _pairs(reply: Sequence[bytes]) -> dict[str, str]:
    texts = [one.decode(errors="replace") for one in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _is_always(policy: dict[str, str]) -> bool:
    return _ALWAYS.items() <= policy.items()


def _reason(info: dict[str, str], policy: dict[str, str], refusal: str) -> str:
    """Return why this server cannot promise that its disk has a write, and what to change."""
    enabled = {"0": "no", "1": "yes"}.get(info.get("aof_enabled", ""), "unknown")
    appendonly, appendfsync = policy.get("appendonly", enabled), policy.get("appendfsync", "unknown")
    pauses = policy.get("no-appendfsync-on-rewrite", "no") != "no"
    version = info.get("redis_version", "of an unknown version")
    server = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    known = f"this is {server} with appendonly {appendonly}, appendfsync {appendfsync}"
    if pauses:
        known += ", no-appendfsync-on-rewrite yes"
    if "numlocal" in refusal and appendonly != "yes":
        remedy = "set `appendonly yes`"
    elif refusal == _EARLY or "unknown command" in refusal.lower():
        remedy = "use Redis 8.0 or later with `appendonly yes`, or set `appendonly yes` and `appendfsync always`"
        if not policy:
            remedy += ", and let this user read them (ACL rule +config|get)"
        elif pauses:
            remedy += ", and `no-appendfsync-on-rewrite no`"
    else:
        remedy = f"Redis refuses WAITAOF ({refusal}): the ACL rule +waitaof permits it"
    return f"durability: fsync is not possible, because {known}; {remedy}"


async def _info_of(connection: SharedConnection) -> dict[str, str]:
    """Return the server's version and the state of its append-only file; empty if this user may not read them."""
    found: dict[str, str] = {}
    try:
        with translated():
            for section in ("server", "persistence"):
                lines = (await connection.call("INFO", section)).decode(errors="replace").splitlines()
                found |= {name: value for name, is_pair, value in (line.partition(":") for line in lines) if is_pair}
    except (InvariantError, ConfigError):
        pass
    return found


def _note_error(done: asyncio.Future[Any]) -> None:
    """Mark the error of something shared as seen: all of its callers may have left."""
    if not done.cancelled():
        done.exception()


def _closed() -> UnavailableError:
    return UnavailableError("the client was closed", code="client_closed")
