"""Child processes of one command: started, watched until ready, and ended in reverse order, whatever ends us.

A child runs under a guard (`runtime/process_guard.py`) in a session of its own: Ctrl-C does not reach it, the order of
the shutdown is ours, and it ends even when we are killed. It says `{"event": "progress" | "ready", …}` in JSON lines on
its stdout; all other lines are its log.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from penstock.contract.errors import ConfigError, PenstockError
from penstock.runtime.process_guard import guarded

NODE_GRACE_S = 30.0
GATEWAY_GRACE_S = 35.0
_GUARD_MARGIN_S = 5.0
_MAX_LINE_BYTES = 1 << 20
_TAIL_LINES = 20
_PENSTOCK = (sys.executable, "-m", "penstock")

T = TypeVar("T")
Event = dict[str, Any]
LogSink = Callable[[str, str], None]
"""Takes a child's name and one line of its log."""


class ProcessDiedError(PenstockError):
    """A child ended that should have gone on."""

    code = "process_died"


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, in our environment plus `env`; after `grace_s` a stop becomes a kill."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    grace_s: float
    on_progress: Callable[[Event], None] | None = None


class Child:
    """One running child."""

    def __init__(self, command: Command, process: asyncio.subprocess.Process, sink: LogSink) -> None:
        self.name = command.name
        self._command = command
        self._process = process
        self._sink = sink
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._ready: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._watch(), name=f"child {command.name}")

    @property
    def pid(self) -> int:
        """Process id of the child's guard."""
        return self._process.pid

    async def ready(self, *, timeout_s: float | None = None) -> Event:
        """The child's ready event; raises ProcessDiedError when it ends before."""
        done, _ = await asyncio.wait((self._ready, self.task), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()
        if not done:
            raise ProcessDiedError(f"{self.name} was not ready within {timeout_s:g} s{self._last_words()}")
        raise self.death()

    def death(self) -> ProcessDiedError:
        """The error that says how the child ended."""
        return ProcessDiedError(f"{self._status()}{self._last_words()}")

    async def ended(self) -> None:
        """Returns when the child has ended."""
        await asyncio.wait((self.task,))

    def why_it_ended(self) -> str:
        """Status and reason of a child that has ended, in a line."""
        said = reason_in(self._tail)
        return self._status() + (f": {said}" if said else "")

    def _status(self) -> str:
        return f"{self.name} ended with {status_in_words(self._process.returncode)}"

    async def stop(self) -> None:
        """Asks the child to end, and makes it end after its grace time."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.wait((self.task,), timeout=self._command.grace_s + _GUARD_MARGIN_S)
        await self.kill()
        await self.task

    async def kill(self) -> None:
        """Makes the child end at once, if it has not."""
        if not self.task.done():
            with suppress(ProcessLookupError):
                self._process.kill()
            await asyncio.wait((self.task,))

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as relays:
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    relays.create_task(self._relay(stream))
        await self._process.wait()

    async def _relay(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                # A line above the limit is dropped, not the child.
                continue
            if not line:
                return
            self._take_line(line.decode(errors="replace").rstrip())

    def _take_line(self, line: str) -> None:
        event = _event_in(line)
        if event is None:
            self._tail.append(line)
            self._sink(self.name, line)
        elif event["event"] == "ready" and not self._ready.done():
            self._ready.set_result(event)
        elif self._command.on_progress is not None:
            self._command.on_progress(event)

    def _last_words(self) -> str:
        return "".join(f"\n  {line}" for line in self._tail)


def status_in_words(status: int | None) -> str:
    """An exit status, and the signal that it stands for; guards and shells show a signal as 128 and its number."""
    number = 0 if status is None else -status if status < 0 else status - 128
    if number not in set(signal.Signals):
        return f"status {status}"
    hint = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return f"status {128 + number} ({signal.Signals(number).name}{hint})"


def reason_in(tail: Iterable[str]) -> str:
    """What a log's end says of the reason: the last line, or what is to be read in it where it is JSON."""
    last = next((line for line in reversed([*tail]) if line.strip()), "")
    try:
        record = json.loads(last)
        return ": ".join(str(record[name]) for name in ("message", "reason") if name in record)
    except (ValueError, TypeError, KeyError):
        return last.strip()


class Supervisor:
    """The children of one command; leaving its context ends them, the last started first. Who is cancelled while it
    waits for that makes them end at once.
    """

    def __init__(self, sink: LogSink) -> None:
        self._sink = sink
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            while self._children:
                await self._children[-1].stop()
                self._children.pop()
        except BaseException:
            await asyncio.gather(*(child.kill() for child in self._children))
            raise

    @property
    def children(self) -> tuple[Child, ...]:
        """In the order in which they were started."""
        return tuple(self._children)

    async def start(self, command: Command) -> Child:
        """Starts a child; it is not ready yet."""
        process = await asyncio.create_subprocess_exec(
            *guarded([*command.argv], grace_s=command.grace_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **command.env},
            limit=_MAX_LINE_BYTES,
            start_new_session=True,
        )
        child = Child(command, process, self._sink)
        self._children.append(child)
        return child

    async def replace(self, ended: Child, command: Command) -> Child:
        """Starts a child in the place of one that has ended."""
        place = self._children.index(ended)
        child = await self.start(command)
        self._children.remove(child)
        self._children[place] = child
        return child

    async def until_one_dies(self) -> NoReturn:
        """Waits as long as all children live; raises ProcessDiedError for the first that ended."""
        if not self._children:
            raise ConfigError("no process was started")
        await asyncio.wait([child.task for child in self._children], return_when=asyncio.FIRST_COMPLETED)
        raise next(child for child in self._children if child.task.done()).death()

    async def unless_one_dies(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; raises ProcessDiedError, and cancels the work, when a child ends before."""
        task, watch = asyncio.create_task(work), asyncio.create_task(self.until_one_dies())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            return await (task if task.done() else watch)
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)


def run_until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; Ctrl-C and SIGTERM cancel it, as often as they come, and become the usual exit status."""
    received: list[int] = []

    async def stoppable() -> None:
        task = asyncio.create_task(work)

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            # Who starts us in the background lets us ignore Ctrl-C.
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await task

    try:
        asyncio.run(stoppable())
    except asyncio.CancelledError:
        sys.exit(128 + received[0])


def node_command(
    model: str, redis_url: str, *, arguments: Sequence[str] = (), on_progress: Callable[[Event], None] | None = None
) -> Command:
    """A node that runs `model`."""
    env = {"PENSTOCK_REDIS_URL": redis_url, "PENSTOCK_NODE_PROGRESS": "json"}
    return Command("node", (*_PENSTOCK, "node", model, *arguments), env, NODE_GRACE_S, on_progress)


def gateway_command(redis_url: str, *, arguments: Sequence[str] = ()) -> Command:
    """A gateway; its ready event carries the `url`."""
    env = {"PENSTOCK_REDIS_URL": redis_url, "PENSTOCK_GATEWAY_PROGRESS": "json"}
    return Command("gateway", (*_PENSTOCK, "gateway", *arguments), env, GATEWAY_GRACE_S)


def _event_in(line: str) -> Event | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
