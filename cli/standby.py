"""The gateway on standby: a process that has loaded its modules while another gateway serves, and then follows it.

So the clients of a gateway that dies wait for about 0.2 s instead of a whole start. It takes about 90 MB of memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import NoReturn

from penstock.cli.keeper import ConnectionKeeper
from penstock.cli.processes import BackOff, Child, ChildCommand, Supervisor

_log = logging.getLogger(__package__)

FIRST_AFTER_S = 5.0
"""Seconds that the first gateway serves before the next one loads its modules, so that first answers have the cores."""
AFTER_S = 0.25
"""Seconds that a gateway which has followed another one serves before that. The next end may be near."""
LOAD_TIMEOUT_S = 30.0
"""Seconds that a planned restart waits for the next gateway to have loaded its modules."""


class Standby:
    """The next gateway of a keeper."""

    def __init__(self, supervisor: Supervisor, command: ChildCommand, keeper: ConnectionKeeper) -> None:
        self._supervisor = supervisor
        self._command = command
        self._keeper = keeper
        self._after_s = FIRST_AFTER_S
        self._child: Child | None = None
        self._making: asyncio.Task[Child] | None = None

    async def until_ended(self, gateway: Child) -> None:
        """Wait until a gateway has ended, and load the modules of the next one meanwhile.

        If the keeper is asked to, let the gateway leave once the next one, by the program of now, has loaded.
        """
        ended = asyncio.create_task(gateway.ended())
        asked = asyncio.create_task(self._keeper.asked_to_leave.wait())
        keeping = asyncio.create_task(self._keep())
        try:
            await asyncio.wait((ended, asked, keeping), return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
            keeping.cancel()
            if not ended.done():
                self._keeper.asked_to_leave.clear()
                await self._renew()
                self._keeper.leave()
                await ended
        finally:
            for task in (ended, asked, keeping):
                task.cancel()
            await asyncio.gather(ended, asked, keeping, return_exceptions=True)

    async def follow(self) -> Child:
        """Start the next gateway and return it. Raises OSError if it cannot be started."""
        await self._made()
        child = self._child
        if child is None or child.task.done():
            child = await self._make()
        self._child, self._after_s = None, AFTER_S
        self._keeper.start_next()
        return child

    async def end(self) -> None:
        """End the next gateway."""
        await self._made()
        self._keeper.end_next()
        if (child := self._child) is not None:
            self._child = None
            await child.stop()
            self._supervisor.forget(child)

    async def _keep(self) -> NoReturn:
        """Make one, and another whenever it ends."""
        back_off, began_s = BackOff(first_pause_s=self._after_s), time.monotonic()
        while True:
            await asyncio.sleep(back_off.pause_s(time.monotonic() - began_s))
            began_s = time.monotonic()
            if self._child is None or self._child.task.done():
                # It must not be canceled half-made.
                self._making = asyncio.create_task(self._make())
                try:
                    await asyncio.shield(self._making)
                except OSError as error:
                    # The machine may have no memory for another process now.
                    _log.warning("the next gateway cannot load its modules yet", extra={"reason": str(error)})
                    continue
            if self._child is not None:
                await self._child.ended()
                _log.warning("the gateway on standby ended", extra={"reason": self._child.why_it_ended()})

    async def _made(self) -> None:
        """Wait until a process that is being made exists."""
        if (making := self._making) is not None:
            self._making = None
            with suppress(OSError):
                await making

    async def _make(self) -> Child:
        """Make the process of the next gateway. Raises OSError."""
        if (old := self._child) is not None:
            self._child = None
            self._supervisor.forget(old)
        child = self._child = await self._supervisor.start(self._keeper.command_of(self._command))
        self._keeper.next_exists()
        return child

    async def _renew(self) -> None:
        """Replace the next gateway by one that is made now, unless another keeper follows, and wait for its modules."""
        await self.end()
        if self._keeper.next_command:
            return
        with suppress(OSError):
            child = await self._make()
            loaded = asyncio.create_task(self._keeper.next_has_loaded.wait())
            await asyncio.wait((loaded, child.task), timeout=LOAD_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            loaded.cancel()
