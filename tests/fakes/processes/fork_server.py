"""`python fork_server.py <fd>`: imports penstock's services once, and forks for each command that a test starts.

A child has the command's own environment, folder, streams and process id, and runs it as armed.py does. A start takes a
few milliseconds of CPU time instead of most of a second. See forked_process.py for the other end of the socket.
"""

from __future__ import annotations

import array
import json
import os
import selectors
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from armed import arm, end_with_parent, run  # type: ignore[import-not-found]

MAX_REQUEST_BYTES = 1 << 20
STREAMS = 3
"""Descriptors that come with a request: stdout, stderr, and the pipe that gets the exit status."""
PRELOADED = (
    *("penstock.cli.main", "penstock.cli.gateway", "penstock.cli.node", "penstock.gateway.app"),
    *("penstock.gpu_node.process", "penstock.producer.client", "reference_engine"),
)
"""Services, without torch: only nodes with a real model need it."""

Request = dict[str, Any]


def serve(control: socket.socket) -> Request | None:
    """Fork for each request. Return the request in a child, and None in the server when the test process has ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fileobj)
                    _report_end(key.fd, *key.data)
                    continue
                message, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, STREAMS)
                if not message:
                    return None
                *streams, status = fds
                pid = os.fork()
                if pid == 0:
                    # Objects that a child still held would later close descriptors of its own.
                    selector.close()
                    control.close()
                    _take_streams(streams)
                    request: Request = json.loads(message)
                    return request
                for stream in streams:
                    os.close(stream)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
                control.send(str(pid).encode())


def _report_end(pidfd: int, pid: int, status: int) -> None:
    """Reap a child and write its exit status, negative for a signal."""
    os.close(pidfd)
    _, ended = os.waitpid(pid, 0)
    os.write(status, array.array("i", [os.waitstatus_to_exitcode(ended)]).tobytes())
    os.close(status)


def _take_streams(streams: list[int]) -> None:
    """Make the streams stdout and stderr, and close what the server has open for its other children."""
    for own, stream in enumerate(streams, start=1):
        os.dup2(stream, own)
    os.closerange(STREAMS, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    # The server's own objects remember whether its descriptors can seek.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  open as long as the process
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def become(request: Request) -> None:
    """Take over the environment and the working folder of a request."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])


def main() -> None:
    """Serve until the test process ends; in a child, run its command."""
    for name in PRELOADED:
        import_module(name)
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        become(request)
        end_with_parent()
        if os.environ.get("FAULT_AT"):
            arm(os.environ["FAULT_AT"])
        run(request["command"])


if __name__ == "__main__":
    main()
