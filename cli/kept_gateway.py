"""A gateway with a keeper: it is started, followed by another one when it ends, and upgraded with its keeper."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from penstock import __version__
from penstock.cli.child_logs import log_variables, relay_of
from penstock.cli.keeper import ConnectionKeeper
from penstock.cli.keeper_upgrade import HandedKeeper, own_command, slot_version_of
from penstock.cli.processes import (
    BackOff,
    Child,
    ChildCommand,
    Event,
    ProcessDiedError,
    Say,
    Supervisor,
    keep_child,
    run_until_stopped,
    started_again,
)
from penstock.cli.standby import Standby
from penstock.gateway.kept.slots import VERSION
from penstock.gateway.settings import PROGRESS_VARIABLE, GatewaySettings
from penstock.runtime.logging import LogSettings
from penstock.runtime.service_manager import ServiceManager

_log = logging.getLogger(__package__)

STEADY_S = 1.0
"""Seconds that a gateway must serve for its next restart to come at once again: connections wait for it."""


async def start_gateway(supervisor: Supervisor, command: ChildCommand, keeper: ConnectionKeeper | None) -> Child:
    """Start the first gateway."""
    if keeper is None:
        return await supervisor.start(command)
    child = await supervisor.start(keeper.command_of(command))
    keeper.next_exists()
    keeper.start_next()
    return child


async def keep_gateway(
    supervisor: Supervisor, child: Child, command: ChildCommand, keeper: ConnectionKeeper | None, say: Say
) -> NoReturn:
    """Restart a gateway whenever it ends. With a keeper, its connections go over to the next one."""
    if keeper is None:
        await keep_child(supervisor, child, command, say)
    standby = Standby(supervisor, command, keeper)
    back_off, serves_s = BackOff(first_pause_s=0.0, steady_s=STEADY_S), time.monotonic()
    while True:
        await standby.until_ended(child)
        keeper.gateway_ended()
        if keeper.next_command:
            await standby.end()
            keeper.hand_over()
        is_planned, keeper.is_leaving = keeper.is_leaving, False
        pause_s = 0.0 if is_planned else back_off.pause_s(time.monotonic() - serves_s)
        how = f"it starts again {f'in {pause_s:g} s' if pause_s else 'at once'}"
        say(f"{child.why_it_ended()}; {how}, and {keeper.num_kept} connections wait for it")
        await asyncio.sleep(pause_s)
        child, is_ready = await started_again(supervisor, child, standby.follow(), say)
        serves_s = time.monotonic() if is_ready else math.inf


class Upgrade:
    """Lets the keeper, and with it the gateway, become those of the release that its command leads to now."""

    def __init__(self, keeper: ConnectionKeeper, supervisor: Supervisor) -> None:
        """The first child of the `supervisor` is the gateway."""
        self._keeper = keeper
        self._supervisor = supervisor
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name="upgrade")

    async def _run(self) -> None:
        command = own_command()
        version = await slot_version_of(command)
        if version is None:
            return
        self._keeper.next_command = command
        if version == VERSION:
            self._keeper.asked_to_leave.set()
            return
        _log.warning(
            "the new release cannot go on with open answers, so the gateway drains first",
            extra={"slot_version": VERSION, "next_slot_version": version},
        )
        await self._supervisor.children[0].stop()


def on_hangup(call: Callable[[], object], *, is_ignored_for_now: bool = False) -> None:
    """Let SIGHUP call something, unless it means that the terminal of this process is gone, or is ignored.

    `is_ignored_for_now`: whether the keeper before this one had it ignored, until this one handles it.
    """
    has_terminal = any(os.isatty(number) for number in (0, 2))
    if is_ignored_for_now or (not has_terminal and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, call)


# `penstock gateway --keep-connections`: this process is the keeper, and the gateways are its children.

START_TIMEOUT_S = 60.0


def run_kept_gateway(command: ChildCommand, settings: GatewaySettings, logs: LogSettings) -> None:
    """Run a gateway and its successors until SIGTERM or SIGINT.

    SIGHUP replaces this process and its gateway by those of the installed release, and cuts no answer.
    """
    run_until_stopped(_run_kept(command, settings, logs), status=0)


async def _run_kept(command: ChildCommand, settings: GatewaySettings, logs: LogSettings) -> None:
    manager = ServiceManager.of_environment()
    async with Supervisor(relay_of(logs), log_variables(logs)) as supervisor:
        handed = HandedKeeper.of_environment()
        if handed is None:
            keeper = await ConnectionKeeper.open(settings.host, settings.port)
        else:
            keeper = ConnectionKeeper.take_over(handed)
        if keeper is None:
            _log.warning("connections cannot outlive the gateway on this system")
        else:
            supervisor.before_stop.append(keeper.close)
            on_hangup(Upgrade(keeper, supervisor).start, is_ignored_for_now=handed is not None)
        # Only this process is the service's main process, so it alone tells the service manager.
        command = replace(command, env={**command.env, "NOTIFY_SOCKET": ""})
        child = await start_gateway(supervisor, command, keeper)
        if handed is None:
            ready: Event | None = await child.ready(timeout_s=START_TIMEOUT_S)
            if os.environ.get(PROGRESS_VARIABLE) == "json":
                print(json.dumps(ready), flush=True)  # noqa: T201
        elif (ready := await _ready_or_restarted(child)) is not None:
            _log.warning("gateway serves again, with its keeper", extra={"release": __version__, "prefix": sys.prefix})
        address = f"port {settings.port}" if ready is None else ready["url"]
        manager.ready(f"listens on {address}, from {sys.prefix}")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(manager.feed())
                tasks.create_task(keep_gateway(supervisor, child, command, keeper, _log.warning))
        finally:
            manager.stopping()


async def _ready_or_restarted(child: Child) -> Event | None:
    """Return the ready event of a gateway for which connections wait, or None if it has ended: it is started again."""
    with suppress(ProcessDiedError):
        return await child.ready()
    return None
