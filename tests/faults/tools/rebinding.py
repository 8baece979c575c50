"""Runs a module in a process where a name resolves otherwise each time, as an attacker's name server may answer."""

from __future__ import annotations

import itertools
import runpy
import socket
import sys
from typing import Any

NAME = "rebinding.example"
OUTSIDE, INSIDE = "127.0.0.1", "127.0.0.2"
"""An address that the gateways may reach, and one that they may not."""


def rebind() -> None:
    """Let NAME resolve to OUTSIDE, and to INSIDE every third time."""
    resolve, turns = socket.getaddrinfo, itertools.cycle((OUTSIDE, INSIDE, OUTSIDE))

    def getaddrinfo(host: Any, *args: Any, **options: Any) -> Any:
        return resolve(next(turns) if host == NAME else host, *args, **options)

    socket.getaddrinfo = getaddrinfo


if __name__ == "__main__":
    rebind()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
