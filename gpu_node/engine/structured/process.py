"""The node's handles of its grammar processes: start, send without blocking, kill."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from penstock.gpu_node.engine.structured import protocol
from penstock.gpu_node.engine.structured.protocol import FrameReader, frame
from penstock.gpu_node.engine.structured.shared_page import NO_SLOT, NUM_SLOTS, SharedPage, size_of
from penstock.gpu_node.engine.structured.tenant_grammar import Grammar
from penstock.runtime.socket_process import end_process, start_process

_MODULE = "penstock.gpu_node.engine.structured.template"
_numbers = itertools.count(1)


class Worker:
    """A grammar worker. `tasks`: its unanswered tasks, in the order in which it runs them."""

    def __init__(self, node: socket.socket, page: SharedPage) -> None:
        node.setblocking(False)
        self.number = next(_numbers)
        self.socket = node
        self.tasks: dict[int, Any] = {}
        self.grammars: set[int] = set()
        """Numbers of the grammars that were sent to it."""
        self.unmeasured: dict[Grammar, float] = {}
        """Processor time of each grammar's tasks since its memory was last measured, in seconds."""
        self.memory_of: WeakKeyDictionary[Grammar, int] = WeakKeyDictionary()
        """Bytes that it grew by during each grammar's tasks."""
        self.base_memory = 0
        self.memory = 0
        """Resident bytes at its last measurement."""
        self.progress_s = time.monotonic()
        """When it last replied or was idle, on the monotonic clock."""
        self.is_overdue = False
        """Whether the template was asked to kill it because it did not reply in time."""
        self._page = page
        self._free_slots = list(range(NUM_SLOTS))
        self._reader = FrameReader()
        self._unsent: deque[memoryview] = deque()

    def send(self, tasks: Sequence[Any]) -> None:
        """Send as much as the socket takes now; `flush` sends the rest."""
        self._unsent.append(memoryview(frame(tasks)))
        self.flush()

    def flush(self) -> bool:
        """Send what is buffered; return whether all is sent. `receive` notices a closed socket."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent[0])
            except BlockingIOError:
                return False
            except OSError:
                self._unsent.clear()
                return True
            rest = self._unsent.popleft()[sent:]  # A view: a large message is not copied again at each partial send.
            if rest:
                self._unsent.appendleft(rest)
        return True

    def receive(self) -> list[Any] | None:
        """Return the replies that have arrived; None once the worker has ended."""
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
        """Whether data waits until the worker reads more."""
        return bool(self._unsent)

    @property
    def current(self) -> int:
        """The number of the task that the worker is running, or was when it died; 0 for none."""
        return self._page.current

    def take_slot(self) -> int:
        """Return a slot for the mask of a new task, until `read_slot`; NO_SLOT if all are in use."""
        return self._free_slots.pop() if self._free_slots else NO_SLOT

    def read_slot(self, slot: int) -> bytes:
        """Return what is in a slot, which is free from then on."""
        self._free_slots.append(slot)
        return self._page.read(slot)

    def close(self) -> None:
        """Close the socket. The worker ends after its current task."""
        self.socket.close()
        self._page.close()


class Template:
    """The process that loads the tokenizer and forks workers."""

    def __init__(self, load: bytes, mask_bytes: int) -> None:
        """Start the process and send it the frame `load`, with the tokenizer. Raises OSError."""
        self._mask_bytes = mask_bytes
        self.socket, child_end = socket.socketpair()
        try:
            with child_end:
                self._process = start_process(_MODULE, child_end, os.environ)
        except OSError:
            self.socket.close()
            raise
        self.started_s = time.monotonic()
        self.special_tokens: frozenset[int] | None = None
        """Token ids; None until the process is ready."""
        self.is_killed = False
        self._reader = FrameReader()
        self.socket.settimeout(protocol.TEMPLATE_WALL_S)
        with suppress(OSError):  # `receive` notices a process that died at once. One that hangs is ended as overdue.
            self.socket.sendall(load)
        self.socket.setblocking(False)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def fork(self, task_cpu_s: float, niceness: int = 0, memory_mib: int = protocol.WORKER_MEMORY_MIB) -> Worker:
        """Fork a worker. Messages to it wait until it is ready. Raises OSError."""
        own_end, child_end = socket.socketpair()
        fd = os.memfd_create("penstock-grammar-page")
        try:
            with child_end:
                os.ftruncate(fd, size_of(self._mask_bytes))
                worker = Worker(own_end, SharedPage(fd, self._mask_bytes))
                message = frame(["fork", worker.number, [task_cpu_s, memory_mib, niceness, self._mask_bytes]])
                socket.send_fds(self.socket, [message], [child_end.fileno(), fd])
        except OSError:
            own_end.close()
            raise
        finally:
            os.close(fd)
        return worker

    def kill(self, worker: Worker) -> None:
        """Kill a worker with SIGKILL."""
        self._ask("kill", worker)

    def kill_all(self) -> None:
        """Kill this process with SIGKILL, and its workers with it. `receive` notices that."""
        self.is_killed = True
        self._process.kill()

    def ask_how_it_ended(self, worker: Worker) -> None:
        """Request the exit status of a worker that has closed its socket."""
        self._ask("wait", worker)

    def receive(self) -> list[Any] | None:
        """Return the messages that have arrived; None once the process has ended."""
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
        """End the process and its workers."""
        self.socket.close()
        end_process(self._process)

    def _ask(self, action: str, worker: Worker) -> None:
        with suppress(OSError):
            self.socket.send(frame([action, worker.number, []]))
