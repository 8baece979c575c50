"""`python forked_worker.py <address> ... -c <code>`: a worker of xdist, as a fork of a server that has read the tests.

Execnet starts it in place of an interpreter. It hands its streams to the fork, and has the fork's exit status.
"""

from __future__ import annotations

import array
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fakes.processes.forked_process import ForkServer


def fork_workers(server: ForkServer, specs: Sequence[Any]) -> None:
    """Have execnet start workers of these specifications as forks of a server."""
    server.open()
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-I", "-S", __file__, server.address])


def main() -> None:
    """Have the server fork, and wait for the end of the worker, which gets interrupts itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status, ended = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.connect(sys.argv[1])
        request = json.dumps({"command": sys.argv[-1:], "imports": []}).encode()
        socket.send_fds(control, [request], [0, 1, 2, ended])
        os.close(ended)
        if not control.recv(64):
            sys.exit("the fork server has died")
        for stream in (0, 1):
            os.close(stream)
        code = array.array("i", os.read(status, 64))
    sys.exit(code[0] if code else "the fork server has died")


if __name__ == "__main__":
    main()
