"""A grammar worker: it compiles grammars and computes masks, one task after the other, until a limit kills it.

The worker writes the number of its current task into a shared page, which identifies the faulty task after a kill.
Replies leave in batches, at the end of a message or after a millisecond.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.gpu_node.engine.structured.compiling import Compiler, Trial
from penstock.gpu_node.engine.structured.frames import FrameReader, frame
from penstock.gpu_node.engine.structured.matching import Matching

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MIB = 1 << 20
_REPLY_WITHIN_S = 0.001
_MEASURED_CPU_S = 0.001
"""Memory is measured after this much processor time. In less, tasks cannot have taken much."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The limits of a worker: processor time per task in seconds, added address space in MiB, and niceness."""

    task_cpu_s: float
    memory_mib: int
    niceness: int


class Worker:
    """The loop of a worker process. Each of the node's messages is a list of tasks: number, name, arguments."""

    def __init__(self, tokenizer: LLTokenizer, node: socket.socket, page: mmap.mmap, task_cpu_s: float) -> None:
        self._node = node
        self._page = page
        self._task_cpu_s = task_cpu_s
        self._compiler = Compiler(tokenizer)
        self._matching = Matching(tokenizer, self._compiler)
        self._replies: list[Any] = []
        self._replied_s = 0.0
        self._unmeasured_s = 0.0
        """Processor time since memory was last measured."""

    def run(self) -> None:
        """Serve until the node closes the socket."""
        reader = FrameReader()
        while data := self._node.recv(1 << 18):
            for tasks in reader.feed(data):
                self._replied_s = time.monotonic()
                for number, name, *arguments in tasks:
                    self._page[:8] = number.to_bytes(8, "little")
                    self._do(number, name, arguments)
                self._page[:8] = bytes(8)
                self._reply()

    def _do(self, number: int, name: str, arguments: list[Any]) -> None:
        # The timer counts this process's processor time. Its signal ends the process.
        began_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, self._task_cpu_s)
        answer = self._answer(name, arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
        cpu_s = time.process_time() - began_s
        self._unmeasured_s += cpu_s
        memory = 0
        if self._unmeasured_s > _MEASURED_CPU_S:
            memory, self._unmeasured_s = _resident_bytes(), 0.0
        self._replies.append([number, answer, cpu_s, memory])
        if time.monotonic() - self._replied_s > _REPLY_WITHIN_S:
            self._reply()

    def _answer(self, name: str, arguments: list[Any]) -> Any:
        if name == "mask":
            return self._matching.mask(*arguments)
        if name == "compile":
            return self._compiler.compile(*arguments)
        if name == "close":
            return self._matching.close(*arguments)
        if name == "forget":
            return self._compiler.forget(*arguments)
        return Trial(self._compiler).run(*arguments)

    def _reply(self) -> None:
        self._replied_s = time.monotonic()
        if self._replies:
            self._node.sendall(frame(self._replies))
            self._replies.clear()


def serve(tokenizer: LLTokenizer, node_fd: int, page_fd: int, limits: WorkerLimits) -> None:
    """Run as a worker, in a process that was just forked."""
    os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + limits.niceness))
    limit = _virtual_bytes() + limits.memory_mib * _MIB
    with suppress(ValueError):  # The process was started with a lower limit.
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=node_fd) as node, mmap.mmap(page_fd, mmap.PAGESIZE) as page:
        os.close(page_fd)
        Worker(tokenizer, node, page, limits.task_cpu_s).run()


def _virtual_bytes() -> int:
    return _statm(0)


def _resident_bytes() -> int:
    return _statm(1)


def _statm(field: int) -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[field]) * _PAGE_BYTES
