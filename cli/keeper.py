"""The keeper of a gateway: it holds the listening sockets and the connections, so that both outlive the gateway.

When a gateway ends, its holder (`gateway/kept/holder.py`) sends the keeper each connection with an answer that can go
on elsewhere. The next gateway gets all of them, and goes on from the slots of the shared memory
(`gateway/kept/slots.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn, Self

from penstock import __version__
from penstock.cli.child_logs import log_variables, relay_of
from penstock.cli.keeper_upgrade import HandedKeeper, become, own_command, slot_version_of
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
)
from penstock.contract.errors import ConfigError
from penstock.gateway.kept.slots import VERSION, memory_bytes
from penstock.gateway.settings import PROGRESS_VARIABLE, GatewaySettings
from penstock.runtime.kept_sockets import KEEP, LEAVE, READY, TAKEN, Inherited, receive_message, send_message
from penstock.runtime.logging import LogSettings
from penstock.runtime.service_manager import ServiceManager

_log = logging.getLogger(__package__)

KEEP_S = 30.0
"""Seconds for which connections are kept without a gateway."""
MAX_SLOTS = 1 << 14
MIN_OTHER_FILES = 128
"""Descriptors that the keeper leaves for its children and for itself."""
BACKLOG = 2048
"""Connections that wait while no gateway accepts them, as many as a gateway of its own lets wait."""


def num_slots() -> int | None:
    """Return how many connections a keeper may hold by this process's limit of open files. None: no keeper here."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SOCK_SEQPACKET"):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_SLOTS if limit == resource.RLIM_INFINITY else max(0, min(MAX_SLOTS, limit - MIN_OTHER_FILES))


class ConnectionKeeper:
    """Holds what a gateway and its successors share."""

    def __init__(self, listeners: list[socket.socket], slots: int, num_slots: int) -> None:
        self._listeners = listeners
        self._slots = slots
        self._num_slots = num_slots
        self._kept: dict[int, int] = {}
        """Slot → descriptor of its connection, until a gateway has it."""
        self.is_leaving = False
        """Whether the gateway was asked to end, so that a new one takes over."""
        self.next_command: Sequence[str] = ()
        """The command of the keeper that replaces this one when the gateway has ended, or empty."""
        self._control: socket.socket | None = None
        self._theirs: socket.socket | None = None
        self._unsent: deque[tuple[bytes, int, int | None]] = deque()
        self._ended_ns = 0
        self._expiry: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> Self | None:
        """Listen on an address, or return None where connections cannot outlive a gateway.

        Raises ConfigError if the address is taken.
        """
        slots_here = num_slots()
        if not slots_here:
            return None
        try:
            # It resolves the host and sets the options of the sockets as the server of a gateway does.
            server = await asyncio.get_running_loop().create_server(
                asyncio.Protocol, host, port, start_serving=False, backlog=BACKLOG
            )
        except OSError as error:
            raise ConfigError(f"port {port} on {host}: {error.strerror}", param="port") from error
        listeners = [socket.socket(fileno=os.dup(one.fileno())) for one in server.sockets]
        server.close()
        for listener in listeners:
            listener.listen(BACKLOG)
        slots = os.memfd_create("penstock-slots")
        os.ftruncate(slots, memory_bytes(slots_here))
        return cls(listeners, slots, slots_here)

    @classmethod
    def take_over(cls, handed: HandedKeeper) -> Self:
        """Hold what another keeper has handed to this process."""
        keeper = cls([socket.socket(fileno=number) for number in handed.listeners], handed.slots, handed.num_slots)
        keeper._kept, keeper._ended_ns = dict(handed.kept), handed.ended_ns
        keeper._expiry = asyncio.get_running_loop().call_later(KEEP_S, keeper._drop_all)
        return keeper

    def hand_over(self) -> None:
        """Become the keeper of `next_command`. It returns only where that is not possible."""
        command, self.next_command = self.next_command, ()
        listeners = [listener.fileno() for listener in self._listeners]
        try:
            become(command, HandedKeeper(listeners, self._slots, self._num_slots, self._kept, self._ended_ns))
        except OSError as error:
            _log.error("the new release does not start, so this one goes on", extra={"reason": str(error)})

    @property
    def num_kept(self) -> int:
        """Connections that it holds."""
        return len(self._kept)

    def command_of(self, command: ChildCommand) -> ChildCommand:
        """Return the command of the next gateway, which inherits what it needs."""
        self._end_control()
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        listeners = tuple(one.fileno() for one in self._listeners)
        inherited = Inherited(self._theirs.fileno(), self._slots, self._num_slots, listeners)
        env = {**command.env, **inherited.variable}
        return replace(command, env=env, descriptors=inherited.descriptors)

    def gateway_started(self) -> None:
        """Read the messages of the gateway that was started."""
        if self._theirs is not None:
            # Only the gateway may have this end: its death must show here.
            self._theirs.close()
            self._theirs = None
        if self._control is not None:
            asyncio.get_running_loop().add_reader(self._control.fileno(), self._read)

    def gateway_ended(self) -> None:
        """Take the connections of a gateway that has ended, and whose holder has too, and wait for the next gateway."""
        self._ended_ns = time.monotonic_ns()
        self._read()
        self._end_control()
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(KEEP_S, self._drop_all)

    def leave(self) -> None:
        """Ask the gateway to leave its connections to a successor, which is started then."""
        if self._control is not None:
            self.is_leaving = True
            self._unsent.append((LEAVE, 0, None))
            self._flush()

    def close(self) -> None:
        """Accept no connection any more, and hold none: the gateway ends by itself."""
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        self._end_control()
        self._drop_all()
        with suppress(OSError):
            os.close(self._slots)

    def _drop_all(self) -> None:
        """Close the connections: a gateway has them, or they end."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for descriptor in self._kept.values():
            os.close(descriptor)
        self._kept.clear()

    def _read(self) -> None:
        while (control := self._control) is not None:
            try:
                message = receive_message(control)
            except BlockingIOError:
                return
            except OSError:
                message = None
            if message is None:
                self._end_control()
                return
            kind, number, descriptor = message
            if kind == KEEP and descriptor is not None:
                if (old := self._kept.get(number)) is not None:
                    os.close(old)
                self._kept[number] = descriptor
            elif kind == TAKEN:
                self._drop_all()
            elif kind == READY:
                self._hand_over()

    def _hand_over(self) -> None:
        """Give the gateway the connections of its predecessor."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._unsent.extend((KEEP, number, descriptor) for number, descriptor in self._kept.items())
        self._unsent.append((READY, self._ended_ns, None))
        self._flush()

    def _flush(self) -> None:
        loop, control = asyncio.get_running_loop(), self._control
        while self._unsent and control is not None:
            kind, number, descriptor = self._unsent[0]
            try:
                send_message(control, kind, number, descriptor)
            except BlockingIOError:
                loop.add_writer(control.fileno(), self._flush)
                return
            except OSError:
                return  # Its end is being read.
            self._unsent.popleft()
        if control is not None:
            loop.remove_writer(control.fileno())

    def _end_control(self) -> None:
        self._unsent.clear()
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None
        if (control := self._control) is not None:
            self._control = None
            loop = asyncio.get_running_loop()
            loop.remove_reader(control.fileno())
            loop.remove_writer(control.fileno())
            control.close()


STEADY_S = 1.0
"""Seconds that a gateway must serve for its next restart to come at once again: connections wait for it."""


async def start_gateway(supervisor: Supervisor, command: ChildCommand, keeper: ConnectionKeeper | None) -> Child:
    """Start the first gateway."""
    if keeper is None:
        return await supervisor.start(command)
    child = await supervisor.start(keeper.command_of(command))
    keeper.gateway_started()
    return child


async def keep_gateway(
    supervisor: Supervisor, child: Child, command: ChildCommand, keeper: ConnectionKeeper | None, say: Say
) -> NoReturn:
    """Restart a gateway whenever it ends. With a keeper, its connections go over to the next one."""
    if keeper is None:
        await keep_child(supervisor, child, command, say)
    back_off, serves_s = BackOff(first_pause_s=0.0, steady_s=STEADY_S), time.monotonic()
    while True:
        await child.ended()
        keeper.gateway_ended()
        if keeper.next_command:
            keeper.hand_over()
        is_planned, keeper.is_leaving = keeper.is_leaving, False
        pause_s = 0.0 if is_planned else back_off.pause_s(time.monotonic() - serves_s)
        how = f"it starts again {f'in {pause_s:g} s' if pause_s else 'at once'}"
        say(f"{child.why_it_ended()}; {how}, and {keeper.num_kept} connections wait for it")
        await asyncio.sleep(pause_s)
        serves_s = math.inf
        try:
            child = await supervisor.replace(child, keeper.command_of(command))
            keeper.gateway_started()
            await child.ready()
            serves_s = time.monotonic()
        except ProcessDiedError:
            continue
        except OSError as error:
            # The machine may have no memory for another process now.
            say(f"{command.name} does not start: {error}")
            continue
        say(f"{command.name} serves again")


class Upgrade:
    """Lets the keeper, and with it the gateway, become those of the release that its command leads to now."""

    def __init__(self, keeper: ConnectionKeeper, supervisor: Supervisor) -> None:
        """The only child of the `supervisor` is the gateway."""
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
            self._keeper.leave()
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


# `penstock gateway --keep-connections`: this process is the keeper, and the gateway its child.

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
