"""Restarts of the parts of `penstock serve`: each restart waits for a growing pause and logs why the part ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

from penstock.cli.process_ends import end_in_words
from penstock.cli.processes import Child, Command, ProcessDiedError, Supervisor
from penstock.contract.errors import ConfigError
from penstock.runtime.embedded_redis import EmbeddedRedis
from penstock.runtime.local_redis import RunningRedis

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
STEADY_S = 60.0
"""Seconds that a part must run for its pause to be reset to FIRST_PAUSE_S."""
_POLL_INTERVAL_S = 0.1
_JOINED_POLL_INTERVAL_S = 1.0

Say = Callable[[str], None]


class BackOff:
    """Exponential backoff for the restarts of one part. A steady run resets the pause."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def pause_s(self, ran_s: float) -> float:
        """Return the seconds to wait before the next start. `ran_s`: seconds that the part ran before it ended."""
        if ran_s >= STEADY_S:
            self._pause_s = FIRST_PAUSE_S
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        return pause_s


async def keep_child(supervisor: Supervisor, child: Child, command: Command, say: Say) -> NoReturn:
    """Restart a child process whenever it ends."""
    back_off, started_s = BackOff(), time.monotonic()
    while True:
        await child.ended()
        pause_s = back_off.pause_s(time.monotonic() - started_s)
        say(f"{child.why_it_ended()}; it starts again in {pause_s:g} s")
        await asyncio.sleep(pause_s)
        started_s = time.monotonic()
        try:
            child = await supervisor.replace(child, command)
            await child.ready()
        except ProcessDiedError:
            continue
        except OSError as error:
            # The machine may have no memory for another process now.
            say(f"{command.name} does not start: {error}")
            continue
        say(f"{command.name} serves again")


async def keep_redis(server: EmbeddedRedis, say: Say) -> NoReturn:
    """Restart the embedded Redis at the same address whenever it ends or its socket is deleted."""
    back_off, started_s = BackOff(), time.monotonic()
    while True:
        while server.is_running:
            if not server.has_socket:
                say("redis ends, because its socket was deleted and no client reaches it")
                await asyncio.to_thread(server.end)
            await asyncio.sleep(_POLL_INTERVAL_S)
        pause_s = back_off.pause_s(time.monotonic() - started_s)
        words = end_in_words(server.status, [server.last_log_line()])
        say(f"redis ended with {words}; it starts again in {pause_s:g} s")
        if not server.keeps_jobs:
            say("redis kept its jobs only in memory: jobs without a waiting caller are lost (--data-dir keeps them)")
        await asyncio.sleep(pause_s)
        started_s = time.monotonic()
        try:
            await asyncio.to_thread(server.start_again)
        except (ConfigError, OSError) as error:
            say(f"redis does not start: {error}")
        else:
            say("redis serves again")


async def watch_joined_redis(joined: RunningRedis, say: Say) -> NoReturn:
    """Report when the Redis of another `penstock serve` ends, and when a later `penstock serve` runs one there again.

    It starts no Redis itself: the other command may come back, and its jobs may be in a folder that only it knows.
    """
    while True:
        await _until(joined, accepts=False)
        say(
            f"the Redis of {joined.owner} has ended, which this `penstock serve` joined; to go on, start another "
            "`penstock serve`, or stop this one and start it again"
        )
        await _until(joined, accepts=True)
        say("redis serves again")


async def _until(joined: RunningRedis, *, accepts: bool) -> None:
    while joined.accepts() != accepts:  # noqa: ASYNC110  polled: another command's process raises no event here
        await asyncio.sleep(_JOINED_POLL_INTERVAL_S)
