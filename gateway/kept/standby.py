"""A gateway on standby: its modules are loaded, and it starts when the gateway before it has ended.

Loading takes most of a gateway's start. So a keeper starts the next gateway while the present one serves
(`cli/standby.py`), and the clients of one that dies wait for the rest only.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from penstock.gateway.kept.holder import begin_to_hold
from penstock.runtime.kept_sockets import LOADED, START, Inherited, receive_message, send_message

PROCESS_NAME = "gateway-standby"
"""The name of a process that waits, as `ps -o comm` shows it."""
_NAME_FILE = Path("/proc/self/comm")


def may_start(inherited: Inherited) -> bool:
    """Wait until the keeper starts this gateway. Return False if it never will."""
    name = _renamed(PROCESS_NAME)
    with socket.socket(fileno=os.dup(inherited.control)) as control:
        try:
            send_message(control, LOADED)
            message = receive_message(control)
        except OSError:
            return False
    if message is None or message[0] != START:
        return False
    _renamed(name)
    begin_to_hold(inherited)
    return True


def _renamed(name: str) -> str:
    """Give this process a name, and return the one that it had. Some systems have no names."""
    try:
        before = _NAME_FILE.read_text(encoding="utf-8").rstrip("\n")
        _NAME_FILE.write_text(name, encoding="utf-8")
    except OSError:
        return name
    return before
