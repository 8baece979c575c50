"""The holder of a gateway's connections: a process that shares the gateway's table of descriptors, and outlives it.

When a process ends, the kernel closes its descriptors, unless another process has the same table of them (`clone` with
CLONE_FILES). So the holder has each connection that the gateway has, at no cost for a connection. It sleeps until the
gateway has ended. Then it sends the keeper the connections that the slots name, and exits, which closes all others.

It starts before the modules of the gateway are imported, so it is small. It must never run another program, because
`exec` ends the sharing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

from penstock.gateway.kept.slots import ConnectionTable, mapped
from penstock.runtime.kept_sockets import KEEP, Inherited, send_message

_CLONE_NUMBERS = {"x86_64": 56, "aarch64": 220, "riscv64": 220}
"""The number of the system call by the machine."""
_CLONE_FILES = 0x400
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_NAME = b"gateway-holder"
_GATEWAY_ENDED = signal.SIGUSR1
_CHECK_S = 5.0
"""Seconds after which the holder looks whether the gateway still runs, although no signal has said otherwise."""
_FULL_S = 0.001
"""Seconds between two attempts while the keeper reads too slowly."""
_PATIENCE_S = 30.0
"""Seconds for which the holder waits for a keeper that reads nothing."""
_begun = mmap.mmap(-1, 1)
"""A byte that a gateway and its holder share: 1 once the gateway has started, so that the connections are its own."""


def can_share_descriptors() -> bool:
    """Return whether a holder can start on this system."""
    return sys.platform == "linux" and platform.machine() in _CLONE_NUMBERS


def start_holder() -> None:
    """Start the holder of this process, if this process is a gateway with a keeper. It must have one thread."""
    inherited = Inherited.of_environment()
    if inherited is None or not can_share_descriptors():
        return
    memory = mapped(inherited.slots, inherited.num_slots)
    table = ConnectionTable(memory, inherited.num_slots)
    gateway, flags = os.getpid(), _CLONE_FILES | signal.SIGCHLD
    # Held back until the holder ignores them: a handler of this process must not run there.
    with _without_signals():
        holder = ctypes.PyDLL(None, use_errno=True).syscall(_CLONE_NUMBERS[platform.machine()], flags, 0, 0, 0, 0)
        if holder == 0:
            _hold(gateway, inherited.control, table)
    if holder > 0:
        os.environ.update(replace(inherited, holder=holder).variable)


def begin_to_hold(inherited: Inherited) -> None:
    """Let the holder send the connections in the table when this process ends. Until now, another gateway had them."""
    ConnectionTable(mapped(inherited.slots, inherited.num_slots), inherited.num_slots).forget_all()
    _begun[0] = 1


@contextmanager
def _without_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hold(gateway: int, control: int, table: ConnectionTable) -> NoReturn:
    """Wait until the gateway has ended, and send its connections. It runs in the holder, and blocks all signals."""
    try:
        prctl = ctypes.PyDLL(None).prctl
        prctl(_PR_SET_NAME, _NAME, 0, 0, 0)
        # A signal to the gateway's process group is not meant for the holder.
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, _GATEWAY_ENDED, 0, 0, 0)
        while os.getppid() == gateway:
            signal.sigtimedwait((_GATEWAY_ENDED,), _CHECK_S)
        if _begun[0]:
            with suppress(OSError):  # The keeper has ended too, so no gateway follows.
                send_connections(control, table)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def send_connections(control: int, table: ConnectionTable) -> None:
    """Send the keeper each connection of a gateway that has ended. `control`: its socket to the keeper.

    Raises OSError if there is no keeper.
    """
    with socket.socket(fileno=os.dup(control)) as to_keeper:
        until_s = time.monotonic() + _PATIENCE_S
        for number, connection in table.found().items():
            while not _was_sent(to_keeper, number, connection) and time.monotonic() < until_s:
                time.sleep(_FULL_S)
            table.forget(number)


def _was_sent(to_keeper: socket.socket, number: int, connection: int) -> bool:
    """Send one connection. Return False while the keeper reads too slowly, and raise OSError if there is none."""
    try:
        send_message(to_keeper, KEEP, number, connection)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS):
            return False
        if error.errno != errno.EBADF:
            raise
    return True
