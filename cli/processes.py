"""Child processes of one command: started, watched until they are ready, started again, stopped in reverse order.

Each child runs under a guard (`runtime/process_guard.py`) in its own session. So Ctrl-C does not reach it, the command
controls the order of the shutdown, and the child ends even if the command is killed. A child reports
`{"event": "progress" | "ready", …}` as JSON lines on its stdout; all other lines are its log.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from penstock.cli.child_logs import PIPE_BYTES, LogSink, end_in_words, lines_of, status_in_words
from penstock.contract.errors import ConfigError, PenstockError
from penstock.runtime.process_guard import guarded
from penstock.runtime.settings import RedisSettings

_log = logging.getLogger(__package__)
NODE_DRAIN_S = 20.0
GATEWAY_DRAIN_S = 30.0
"""What nodes and gateways take to drain by default."""
_DRAIN_MARGIN_S = 10.0
"""Seconds that a child has after its drain, to give jobs back and to end."""
NODE_HURRY_S = 5.0
_GUARD_MARGIN_S = 5.0
_TAIL_LINES = 20
_PENSTOCK = (sys.executable, "-m", "penstock")

T = TypeVar("T")
Event = dict[str, Any]


class ProcessDiedError(PenstockError):
    """A child process ended unexpectedly."""

    code = "process_died"

    def __init__(self, message: str, why: str) -> None:
        """`message` includes the last lines of the child's log; `why` has the reason in one line."""
        super().__init__(message)
        self.why = why


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """The command line of a child process."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    """Environment variables that are added to this process's own."""
    grace_s: float
    """Seconds after which a child that does not stop is killed."""
    on_progress: Callable[[Event], None] | None = None
    """Called with each progress event."""
    group: str = ""
    """Children of one group that were started one after the other stop at the same time."""
    hurry_s: float = 0.0
    """Seconds that it gets if a second signal ends the command: a node gives its jobs back in that time."""
    cpus: tuple[int, ...] = ()
    """The CPUs that it stays on; empty: all."""
    descriptors: tuple[int, ...] = ()
    """The descriptors that it inherits, under the same numbers."""


class Child:
    """One child process."""

    def __init__(
        self, command: ChildCommand, process: asyncio.subprocess.Process, pipes: Sequence[int], sink: LogSink
    ) -> None:
        """`pipes`: descriptors, which it closes, where the child's output is read."""
        self.name = command.name
        self._command = command
        self._process = process
        self._pipes = pipes
        self._sink = sink
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._ready: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._watch(), name=f"child {command.name}")

    @property
    def pid(self) -> int:
        """The process id of the child's guard."""
        return self._process.pid

    async def ready(self, *, timeout_s: float | None = None) -> Event:
        """Wait for the child's ready event and return it.

        Raises ProcessDiedError if the child ends first or is not ready within `timeout_s` (None: no limit).
        """
        done, _ = await asyncio.wait((self._ready, self.task), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()
        if not done:
            why = f"{self.name} was not ready within {timeout_s:g} s"
            raise ProcessDiedError(f"{why}{self._log_tail()}", why)
        raise self.death()

    def death(self) -> ProcessDiedError:
        """Return an error with the child's exit status and the last lines of its log."""
        status = status_in_words(self._process.returncode)
        return ProcessDiedError(f"{self.name} ended with {status}{self._log_tail()}", self.why_it_ended())

    async def ended(self) -> None:
        """Wait until the child has ended."""
        await asyncio.wait((self.task,))

    def why_it_ended(self) -> str:
        """Return one line with the exit status and the reason of a child that has ended."""
        return f"{self.name} ended with {end_in_words(self._process.returncode, self._tail)}"

    async def stop(self) -> None:
        """Ask the child to end, and kill it after its grace time."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.wait((self.task,), timeout=self._command.grace_s + _GUARD_MARGIN_S)
        await self.kill()
        await self.task

    def hurry(self) -> bool:
        """Ask the child once more to end, and now; return whether it gets time for that."""
        if self.task.done() or not self.hurry_s:
            return False
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        return True

    @property
    def group(self) -> str:
        """The children that it stops with; its name if there are no others."""
        return self._command.group or self.name

    @property
    def hurry_s(self) -> float:
        """Seconds that it gets for a quick end."""
        return self._command.hurry_s

    async def kill(self) -> None:
        """Kill the child if it still runs."""
        if not self.task.done():
            with suppress(ProcessLookupError):
                self._process.kill()
            await asyncio.wait((self.task,))

    async def _watch(self) -> None:
        try:
            async with asyncio.TaskGroup() as relays:
                for pipe in self._pipes:
                    relays.create_task(self._relay(pipe))
        finally:
            for pipe in self._pipes:
                os.close(pipe)
        await self._process.wait()

    async def _relay(self, pipe: int) -> None:
        async for lines in lines_of(pipe):
            told = [line for line in lines if not self._is_event(line)]
            self._tail += told
            if told:
                with self._noting_failures():
                    self._sink(self.name, told)

    def _is_event(self, line: str) -> bool:
        """Take an event. Return whether the line is one."""
        event = _event_in(line)
        if event is None:
            return False
        if event["event"] == "ready" and not self._ready.done():
            self._ready.set_result(event)
        elif self._command.on_progress is not None:
            with self._noting_failures():
                self._command.on_progress(event)
        return True

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """Log what taking a line raises. The child runs on, so its pipe must be read on."""
        try:
            yield
        except OSError:
            pass  # The log cannot be written, as on a full disk.
        except Exception:
            _log.exception("process.line_failed", extra={"part": self.name})

    def _log_tail(self) -> str:
        return "".join(f"\n  {line}" for line in self._tail)


class Supervisor:
    """Owns the child processes of one command. Leaving its context stops them, the last started group first.

    If the task is canceled while it waits for children to stop, all remaining children are killed: those that may
    hurry a few seconds later.
    """

    def __init__(self, sink: LogSink, env: Mapping[str, str] | None = None) -> None:
        """`env`: environment variables that all children get, besides those of their commands."""
        self._sink = sink
        self._env = env or {}
        self._children: list[Child] = []
        self.before_stop: list[Callable[[], None]] = []
        """Called before the first child is asked to end."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            for call in self.before_stop:
                call()
            while self._children:
                _, group = next(groupby(reversed(self._children), key=lambda child: child.group))
                stopping = list(group)
                await asyncio.gather(*(child.stop() for child in stopping))
                del self._children[-len(stopping) :]
        except BaseException:
            await self._end_now()
            raise

    async def _end_now(self) -> None:
        try:
            if hurrying := [child for child in self._children if child.hurry()]:
                patience_s = max(child.hurry_s for child in hurrying)
                await asyncio.wait([child.task for child in hurrying], timeout=patience_s)
        finally:
            await asyncio.gather(*(child.kill() for child in self._children))

    @property
    def children(self) -> tuple[Child, ...]:
        """The children in the order in which they were started."""
        return tuple(self._children)

    async def start(self, command: ChildCommand) -> Child:
        """Start a child and return it without waiting until it is ready."""
        with ExitStack() as after, ExitStack() as unless_started:
            reads, writes = zip(*(_pipe(unless_started, after) for _ in range(2)), strict=True)
            process = await asyncio.create_subprocess_exec(
                *guarded([*command.argv], grace_s=command.grace_s, cpus=command.cpus, descriptors=command.descriptors),
                stdin=asyncio.subprocess.PIPE,
                stdout=writes[0],
                stderr=writes[1],
                env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **self._env, **command.env},
                pass_fds=command.descriptors,
                start_new_session=True,
            )
            unless_started.pop_all()
        child = Child(command, process, reads, self._sink)
        self._children.append(child)
        return child

    def replace(self, ended: Child, child: Child) -> None:
        """Let a child that was started take over the position of an ended one in the order of the shutdown."""
        self._children.remove(child)
        self._children[self._children.index(ended)] = child

    def forget(self, ended: Child) -> None:
        """Forget a child that has ended."""
        self._children.remove(ended)

    async def until_one_dies(self) -> NoReturn:
        """Wait until a child ends, and raise its ProcessDiedError."""
        if not self._children:
            raise ConfigError("no process was started")
        await asyncio.wait([child.task for child in self._children], return_when=asyncio.FIRST_COMPLETED)
        raise next(child for child in self._children if child.task.done()).death()

    async def unless_one_dies(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result. If a child ends first, cancel the work and raise ProcessDiedError."""
        task, watch = asyncio.create_task(work), asyncio.create_task(self.until_one_dies())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            return await (task if task.done() else watch)
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)


def _pipe(reads: ExitStack, writes: ExitStack) -> tuple[int, int]:
    """Return a pipe whose ends these stacks close. Reading it does not block."""
    read, write = os.pipe()
    reads.callback(os.close, read)
    writes.callback(os.close, write)
    os.set_blocking(read, False)
    if sys.platform == "linux":
        with suppress(OSError):  # This user has many large pipes.
            fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return read, write


# --- restarts: each waits for a growing pause and logs why the child ended

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
STEADY_S = 60.0
"""Seconds that a child must run for its pause to be reset to FIRST_PAUSE_S."""

Say = Callable[[str], None]


class BackOff:
    """Exponential backoff for the restarts of one child. A steady run resets the pause."""

    def __init__(self, *, first_pause_s: float | None = None, steady_s: float | None = None) -> None:
        """`first_pause_s`: FIRST_PAUSE_S by default; 0 to start again at once first. `steady_s`: as STEADY_S."""
        self._first_pause_s = FIRST_PAUSE_S if first_pause_s is None else first_pause_s
        self._steady_s = STEADY_S if steady_s is None else steady_s
        self._pause_s = self._first_pause_s

    def pause_s(self, ran_s: float) -> float:
        """Return the seconds to wait before the next start. `ran_s`: seconds that the child ran before it ended."""
        if ran_s >= self._steady_s:
            self._pause_s = self._first_pause_s
        pause_s, self._pause_s = self._pause_s, min(max(2 * self._pause_s, FIRST_PAUSE_S), MAX_PAUSE_S)
        return pause_s


async def keep_child(supervisor: Supervisor, child: Child, command: ChildCommand, say: Say) -> NoReturn:
    """Restart a child process whenever it ends."""
    back_off, started_s = BackOff(), time.monotonic()
    while True:
        await child.ended()
        pause_s = back_off.pause_s(time.monotonic() - started_s)
        say(f"{child.why_it_ended()}; it starts again in {pause_s:g} s")
        await asyncio.sleep(pause_s)
        started_s = time.monotonic()
        child, _ = await started_again(supervisor, child, supervisor.start(command), say)


async def started_again(
    supervisor: Supervisor, ended: Child, starting: Awaitable[Child], say: Say
) -> tuple[Child, bool]:
    """Wait until the child that is being started in the place of an ended one is ready.

    Return it, or the ended one if no process could be started, and whether it is ready.
    """
    child = ended
    try:
        child = await starting
        supervisor.replace(ended, child)
        await child.ready()
    except ProcessDiedError:
        return child, False
    except OSError as error:
        # The machine may have no memory for another process now.
        say(f"{ended.name} does not start: {error}")
        return child, False
    say(f"{child.name} serves again")
    return child, True


async def first_ready(children: Sequence[Child]) -> Event:
    """Wait until one of these children is ready, and return its ready event. Others may have ended by then.

    Raises the ProcessDiedError of the first one if all end before.
    """
    waiting = {asyncio.create_task(child.ready()) for child in children}
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None:
                    return task.result()
        raise children[0].death()
    finally:
        for task in waiting:
            task.cancel()


# --- the end of the command


def run_until_stopped(work: Coroutine[Any, Any, None], *, status: int | None = None) -> None:
    """Run `work`. Each Ctrl-C or SIGTERM cancels it; the process then exits with 128 plus the signal's number.

    `status`: the exit status instead.
    """
    received: list[int] = []

    async def stoppable() -> None:
        task = asyncio.create_task(work)

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            # A shell that starts this process in the background makes it ignore Ctrl-C; keep that.
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await task

    try:
        asyncio.run(stoppable())
    except asyncio.CancelledError:
        sys.exit(128 + received[0] if status is None else status)


def node_command(
    model: str, redis_url: str, *, arguments: Sequence[str] = (), drain_s: float = NODE_DRAIN_S
) -> ChildCommand:
    """Return the command of a node that runs `model`."""
    env = {**_redis_variable(redis_url), "PENSTOCK_NODE_PROGRESS": "json"}
    words = (*_PENSTOCK, "node", model, *arguments)
    return ChildCommand("node", words, env, drain_s + _DRAIN_MARGIN_S, group="node", hurry_s=NODE_HURRY_S)


def gateway_command(redis_url: str, *, arguments: Sequence[str] = (), drain_s: float = GATEWAY_DRAIN_S) -> ChildCommand:
    """Return the command of a gateway. Its ready event holds the `url`."""
    env = {**_redis_variable(redis_url), "PENSTOCK_GATEWAY_PROGRESS": "json"}
    return ChildCommand("gateway", (*_PENSTOCK, "gateway", *arguments), env, drain_s + _DRAIN_MARGIN_S)


def _redis_variable(redis_url: str) -> dict[str, str]:
    """Return the variable that gives a child the URL. A child inherits a file with it: the URL may be a secret."""
    return {} if RedisSettings.load().redis_url == redis_url else {"PENSTOCK_REDIS_URL": redis_url}


def _event_in(line: str) -> Event | None:
    if not line.startswith('{"event"'):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
