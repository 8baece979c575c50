"""Processes of chat templates that engines of tests use one after another, and that start as forks.

Each engine starts one, which takes a tenth of a second of CPU time. Hundreds of engines have the tiny model's template.
If the session's server of services runs, the process of a new template is a fork of it.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import pytest
from fakes.processes.child_process import ChildProcess
from fakes.processes.forked_process import ForkedProcess

from penstock.gpu_node.engine.text import chat
from penstock.runtime.socket_process import start_process

MOST_IDLE = 4
Key = tuple[str, frozenset[tuple[str, str]]]


class Lent:
    """A process that one template has for itself. When the template is gone, the next one gets it."""

    def __init__(self, processes: Any, key: Key, idle: deque[tuple[Key, Any]]) -> None:
        self._processes = processes
        weakref.finalize(self, _give_back, processes, key, idle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processes, name)

    def takes_tools(self) -> bool:
        """Whether the template uses tools. The process says it once."""
        if not hasattr(self._processes, "said"):
            self._processes.said = self._processes.takes_tools()
        said: bool = self._processes.said
        return said


def _give_back(processes: Any, key: Key, idle: deque[tuple[Key, Any]]) -> None:
    """Keep a process, unless it was ended or its template does not compile."""
    if hasattr(processes, "said") and processes.close.alive:
        idle.append((key, processes))
    while len(idle) > MOST_IDLE:
        idle.popleft()[1].close()


def fork_process(module: str, child_end: socket.socket, environment: Mapping[str, str]) -> Any:
    """Have the server of services fork the process at the other end of this socket, which gets it as its stdin."""
    server = ChildProcess.fork_server
    if server is None or not server.address:
        return start_process(module, child_end, environment)
    request = {
        "command": ["-c", f"from {module} import main; main()", "0"],
        "env": dict(environment),
        "cwd": os.getcwd(),
        "imports": [module],
    }
    with open(os.devnull, "wb") as nothing:
        pid, status = server.fork(request, [child_end.fileno(), nothing.fileno(), 2])
    return ForkedProcess(pid, BytesIO(), status)


@contextmanager
def lent_templates() -> Iterator[None]:
    """Lend processes to the templates that are made in the block."""
    idle: deque[tuple[Key, Any]] = deque()
    start = chat._Processes

    def lend(source: str, variables: Mapping[str, str]) -> Lent:
        key = source, frozenset(variables.items())
        found = next((one for one in idle if one[0] == key), None)
        if found is None:
            return Lent(start(source, variables), key, idle)
        idle.remove(found)
        return Lent(found[1], key, idle)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chat, "_Processes", lend)
        patched.setattr(chat, "start_process", fork_process)
        yield
    while idle:
        idle.pop()[1].close()
