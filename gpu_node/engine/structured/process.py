"""The node's ends of its grammar processes: starting, sending without waiting, and killing."""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from penstock.gpu_node.engine.structured import limits
from penstock.gpu_node.engine.structured.frames import FrameReader, frame

_MODULE = "penstock.gpu_node.engine.structured.template"
_EXIT_S = 2.0
_numbers = itertools.count(1)


class Worker:
    """A grammar worker. `tasks` are those that are not answered, in the order in which it does them."""

    def __init__(self, node: socket.socket, page: mmap.mmap) -> None:
        node.setblocking(False)
        self.number = next(_numbers)
        self.socket = node
        self.tasks: dict[int, Any] = {}
        self.grammars: set[int] = set()
        """Those that it was sent."""
        self.base_memory = 0
        self.memory = 0
        """Bytes resident when it last measured them."""
        self.progress_s = time.monotonic()
        """When it last answered, or was idle."""
        self._page = page
        self._reader = FrameReader()
        self._unsent: deque[bytes] = deque()

    def send(self, tasks: Sequence[Any]) -> None:
        """Send tasks as far as the socket takes them now; `flush` sends the rest."""
        self._unsent.append(frame(tasks))
        self.flush()

    def flush(self) -> bool:
        """Send what waits; whether all is sent. An end that has closed is noticed by `receive`."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent[0])
            except BlockingIOError:
                return False
            except OSError:
                self._unsent.clear()
                return True
            rest = self._unsent.popleft()[sent:]
            if rest:
                self._unsent.appendleft(rest)
        return True

    def receive(self) -> list[Any] | None:
        """The replies that have come; None once the worker has gone."""
        replies: list[Any] = []
        try:
            while data := self.socket.recv(1 << 20):
                for part in self._reader.feed(data):
                    replies += part
        except BlockingIOError:
            return replies
        except (OSError, ValueError):
            pass
        return replies or None

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until it reads on."""
        return bool(self._unsent)

    @property
    def current(self) -> int:
        """The number of the task that is under way, or was when it died; 0 for none."""
        return int.from_bytes(self._page[:8], "little")

    def close(self) -> None:
        """Hang up, which ends it after its task."""
        self.socket.close()
        self._page.close()


class Template:
    """The process that forks workers."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Starts it, and leaves it alone with its tokenizer. Raises OSError."""
        self.socket, theirs = socket.socketpair()
        with theirs:
            # It must find what this process finds, and must not look in the current folder.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.started_s = time.monotonic()
        self.special_tokens: frozenset[int] | None = None
        """None until it is ready."""
        self._reader = FrameReader()
        with suppress(OSError):  # one that died at once is noticed by `receive`
            self.socket.sendall(frame([tokenizer, vocab_size, list(eos_token_ids)]))
        self.socket.setblocking(False)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def fork(self, task_cpu_s: float, niceness: int = 0, memory_mib: int = limits.WORKER_MEMORY_MIB) -> Worker:
        """A new worker; what is sent to it waits until it is there. Raises OSError."""
        ours, theirs = socket.socketpair()
        fd = os.memfd_create("penstock-grammar-page")
        try:
            with theirs:
                os.ftruncate(fd, mmap.PAGESIZE)
                worker = Worker(ours, mmap.mmap(fd, mmap.PAGESIZE))
                message = frame(["fork", worker.number, [task_cpu_s, memory_mib, niceness]])
                socket.send_fds(self.socket, [message], [theirs.fileno(), fd])
        except OSError:
            ours.close()
            raise
        finally:
            os.close(fd)
        return worker

    def kill(self, worker: Worker) -> None:
        """End a worker at once."""
        self._ask("kill", worker)

    def ask_how_it_ended(self, worker: Worker) -> None:
        """Have the exit status of a worker that has gone sent."""
        self._ask("wait", worker)

    def receive(self) -> list[Any] | None:
        """The messages that have come; None once the process has gone."""
        messages: list[Any] = []
        try:
            while data := self.socket.recv(1 << 20):
                messages += self._reader.feed(data)
        except BlockingIOError:
            return messages
        except (OSError, ValueError):
            pass
        return messages or None

    def close(self) -> None:
        """End it, and its workers with it."""
        self.socket.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, action: str, worker: Worker) -> None:
        with suppress(OSError):
            self.socket.send(frame([action, worker.number, []]))
