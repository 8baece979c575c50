"""All grammar processes of a model: the template, the workers that serve choices, and the workers that run trials.

Not thread-safe except for `start_template`; the host's lock protects it.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from penstock.contract.errors import RequestError, UnavailableError
from penstock.gpu_node.engine.structured import protocol
from penstock.gpu_node.engine.structured.compiler import Grammar, TrialResult
from penstock.gpu_node.engine.structured.guide import Guide
from penstock.gpu_node.engine.structured.lanes import GrammarCounts, Lanes, Trial, TrialQueue, blames_task
from penstock.gpu_node.engine.structured.protocol import FrameReader, frame

# The node's handles of its grammar processes: start, send without blocking, kill.

_MODULE = "penstock.gpu_node.engine.structured.template"
_EXIT_S = 2.0
_numbers = itertools.count(1)


class Worker:
    """A grammar worker. `tasks`: its unanswered tasks, in the order in which it runs them."""

    def __init__(self, node: socket.socket, page: mmap.mmap) -> None:
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
        return int.from_bytes(self._page[:8], "little")

    def close(self) -> None:
        """Close the socket. The worker ends after its current task."""
        self.socket.close()
        self._page.close()


class Template:
    """The process that loads the tokenizer and forks workers."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Start the process and send it the tokenizer. Raises OSError."""
        self.socket, child_end = socket.socketpair()
        try:
            self._process = self._started(child_end)
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
            self.socket.sendall(frame([tokenizer, vocab_size, list(eos_token_ids)]))
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
                os.ftruncate(fd, mmap.PAGESIZE)
                worker = Worker(own_end, mmap.mmap(fd, mmap.PAGESIZE))
                message = frame(["fork", worker.number, [task_cpu_s, memory_mib, niceness]])
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
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _started(self, child_end: socket.socket) -> subprocess.Popen[bytes]:
        with child_end:
            # The child must find the same modules, and must not import from the current folder.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            return subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(child_end.fileno())],
                env=environment,
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def _ask(self, action: str, worker: Worker) -> None:
        with suppress(OSError):
            self.socket.send(frame([action, worker.number, []]))


log = logging.getLogger(__name__)

_RESTART_AFTER_S = 0.2
_FORK_AGAIN_AFTER_S = 0.05
_MAX_DOUBLINGS = 6
_MAX_FAILED_STARTS = 5
"""With more failed starts in a row, about five seconds, requests no longer wait for the next one."""
_TRIAL_TASK = 1


class GrammarProcesses:
    """The owner of all grammar processes: starts them, handles their messages, and replaces ended ones."""

    def __init__(
        self,
        tokenizer: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        lanes: Lanes,
        selector: selectors.BaseSelector,
        counts: GrammarCounts,
    ) -> None:
        """`selector` watches the sockets of all processes."""
        self.special_tokens: Future[frozenset[int]] = Future()
        """Completes when the first template is ready. After too many failed starts it fails, and a new one follows."""
        self._selector = selector
        self.template: Template | None = None
        self._lanes = lanes
        self._trials = TrialQueue()
        self._trial_workers: dict[Worker, Trial] = {}
        self._dying: dict[int, tuple[Worker, int]] = {}
        """Ended workers and their last task, by number, until their exit status is known."""
        self._counts = counts
        self._wanted = (tokenizer, vocab_size, list(eos_token_ids))
        self._num_failed_starts = 0
        self._failed_s = self._trials_after_s = -math.inf
        self._is_unusable = False
        """Whether llguidance cannot use the tokenizer."""

    @property
    def workers(self) -> list[Worker]:
        """All running workers."""
        return [*self._lanes.workers.values(), *self._trial_workers]

    @property
    def is_busy(self) -> bool:
        """Whether a message is expected soon."""
        is_waiting = self._trials.has_any or self._dying or any(worker.tasks for worker in self.workers)
        is_starting = not self._is_unusable and (self.template is None or self.template.special_tokens is None)
        return is_starting or bool(is_waiting)

    def start_template(self) -> Template | None:
        """Start a template if there is none and it is time to retry. `install` puts it to use once it has loaded."""
        # The first restart has no delay.
        pause_s = _RESTART_AFTER_S * (2 ** min(max(0, self._num_failed_starts - 1), _MAX_DOUBLINGS) - 1)
        if self.template is not None or self._is_unusable or time.monotonic() - self._failed_s < pause_s:
            return None
        tokenizer, vocab_size, eos_token_ids = self._wanted
        try:
            return Template(tokenizer(), vocab_size, eos_token_ids)
        except OSError as error:
            self._start_failed()
            log.warning("a grammar process was not started", extra={"reason": repr(error)})
            return None

    def install(self, template: Template) -> None:
        """Use this template from now on."""
        self.template = template
        self._selector.register(template.socket, selectors.EVENT_READ, template)

    def ask(self, guides: Iterable[Guide]) -> None:
        """Request masks. Without a template nothing is requested, and the masks stay late."""
        if self.template is None:
            return
        for worker in self._lanes.ask(guides, self.template):
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def try_out(self, tenant: str, trial: Trial) -> None:
        """Queue a trial."""
        self._counts.grammar_trials += 1
        self._trials.add(tenant, trial)

    def handle_messages(self, sender: Template | Worker) -> list[Guide]:
        """Handle the messages of a process; return the choices that they affect."""
        if isinstance(sender, Template):
            return self._handle_template(sender) if sender is self.template else []
        if sender not in self.workers:
            return []  # It was closed after the selector had reported it.
        replies = sender.receive()
        if replies is None:
            return self._lost(sender)
        if (trial := self._trial_workers.get(sender)) is not None:
            if replies:
                self._end_trial(sender, trial, _result_of(replies[0]))
            return []
        return self._lanes.handle_replies(sender, replies)

    def maintain(self) -> list[Guide]:
        """Start trials, flush sockets, and end workers that are stuck or too large; return the affected choices."""
        affected: list[Guide] = []
        self._start_trials()
        overdue = time.monotonic() - protocol.TASK_WALL_S
        for worker in self.workers:
            worker.flush()
            if worker.tasks and worker.progress_s < overdue and self.template is not None and not worker.is_overdue:
                log.warning("a grammar process did not answer in time", extra={"tasks": len(worker.tasks)})
                self.template.kill(worker)
                worker.is_overdue, worker.progress_s = True, time.monotonic()
        if self.template is not None and not self.template.is_killed and self._is_stuck(self.template, overdue):
            log.warning(
                "the template of the grammar processes did not answer in time", extra={"pid": self.template.pid}
            )
            self.template.kill_all()
        for worker in self._lanes.too_large():
            log.info("a grammar process is replaced for its size", extra={"memory_mib": worker.memory >> 20})
            affected += self._lost(worker)
        return affected

    def close(self) -> None:
        """Close all processes, and fail the waiting trials."""
        gone = UnavailableError("the grammar processes have ended", code="internal_error")
        for trial in self._trials.clear():
            trial.result.set_exception(gone)
        if not self.special_tokens.done():
            self.special_tokens.set_exception(gone)
        for worker in self.workers:
            worker.close()
        if self.template is not None:
            self.template.close()
        self._selector.close()

    def _is_stuck(self, template: Template, overdue_s: float) -> bool:
        """Return whether a template loads for too long, has not killed an overdue worker, or not said how one ended."""
        if template.special_tokens is None:
            return time.monotonic() - template.started_s > protocol.TEMPLATE_WALL_S
        asked = [worker for worker in self.workers if worker.is_overdue] + [
            worker for worker, _ in self._dying.values()
        ]
        return any(worker.progress_s < overdue_s for worker in asked)

    def _handle_template(self, template: Template) -> list[Guide]:
        messages = template.receive()
        if messages is None:
            return self._lost_template(template)
        affected: list[Guide] = []
        for kind, *details in messages:
            if kind == "ended":
                worker, current = self._dying.pop(details[0])
                affected += self._on_ended(worker, current, details[1])
            elif kind == "ready":
                template.special_tokens = frozenset(details[1])
                self._num_failed_starts = 0
                if not self.special_tokens.done():
                    self.special_tokens.set_result(template.special_tokens)
            elif not self.special_tokens.done():
                self._is_unusable = True
                problem = f"this model's tokenizer does not support structured outputs: {details[0]}"
                self.special_tokens.set_exception(RequestError(problem, param="structured_outputs"))
        return affected

    def _lost_template(self, template: Template) -> list[Guide]:
        self._selector.unregister(template.socket)
        template.close()
        self.template = None
        if not self._is_unusable:
            self._start_failed()
            log.warning("the grammar processes ended and start anew", extra={"pid": template.pid})
        # The kernel kills the workers with the template, and no process is left to report their exit status.
        running = [worker for worker in self.workers if worker.number not in self._dying]
        affected = [guide for worker in running for guide in self._lost(worker)]
        for worker, current in [*self._dying.values()]:
            affected += self._on_ended(worker, current, None)
        self._dying.clear()
        return affected

    def _start_failed(self) -> None:
        self._failed_s = time.monotonic()
        self._num_failed_starts += 1
        if self._num_failed_starts > _MAX_FAILED_STARTS and not self.special_tokens.done():
            problem = UnavailableError("the grammar processes did not start", code="internal_error")
            self.special_tokens.set_exception(problem)
            self.special_tokens = Future()  # Later requests wait for the next start.

    def _lost(self, worker: Worker) -> list[Guide]:
        self._selector.unregister(worker.socket)
        current = worker.current
        worker.close()
        self._lanes.remove(worker)
        if self.template is None:
            return self._on_ended(worker, current, None)
        self._ask_how_it_ended(worker, current, self.template)
        return []

    def _on_ended(self, worker: Worker, current: int, exit_status: int | None) -> list[Guide]:
        trial = self._trial_workers.pop(worker, None)
        if trial is None:
            return self._lanes.died(worker, current, exit_status)
        if blames_task(exit_status, None):
            self._trials.end(trial, TrialResult(is_too_costly=True))
        else:
            self._trials.retry(trial)
        return []

    def _start_trials(self) -> None:
        """Start the trials that may run. Where the system refuses a process, try again a moment later."""
        if self.template is None or time.monotonic() < self._trials_after_s:
            return
        while (trial := self._trials.start()) is not None:
            try:
                self._start_trial(trial, self.template)
            except OSError as error:
                log.warning("a grammar process was not started", extra={"reason": repr(error)})
                self._trials.put_back(trial)
                self._trials_after_s = time.monotonic() + _FORK_AGAIN_AFTER_S
                return

    def _start_trial(self, trial: Trial, template: Template) -> None:
        worker = template.fork(protocol.TRIAL_CPU_S, protocol.SLOW_NICENESS, protocol.TRIAL_MEMORY_MIB)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        self._trial_workers[worker] = trial
        worker.tasks[_TRIAL_TASK] = trial
        worker.send([[_TRIAL_TASK, "try", trial.kind, trial.texts]])

    def _end_trial(self, worker: Worker, trial: Trial, result: TrialResult) -> None:
        del self._trial_workers[worker]
        self._selector.unregister(worker.socket)
        worker.close()
        worker.tasks.clear()
        self._trials.end(trial, result)
        if self.template is not None:
            self._ask_how_it_ended(worker, 0, self.template)

    def _ask_how_it_ended(self, worker: Worker, current: int, template: Template) -> None:
        self._dying[worker.number] = worker, current
        worker.progress_s = time.monotonic()
        template.ask_how_it_ended(worker)


def _result_of(reply: Any) -> TrialResult:
    _, (problem, part, is_limit, worst_mask_s), cpu_s, _ = reply
    is_costly = cpu_s > protocol.CHEAP_TRIAL_CPU_S or worst_mask_s > protocol.CHEAP_MASK_CPU_S
    return TrialResult(problem, part, is_costly, is_limit)
