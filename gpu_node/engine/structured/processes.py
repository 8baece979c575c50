"""All grammar processes of a model: the template, the workers that serve choices, and the workers that run trials.

Not thread-safe except for `start_template`; the host's lock protects it.
"""

from __future__ import annotations

import logging
import math
import selectors
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from penstock.contract.errors import RequestError, UnavailableError
from penstock.gpu_node.engine.structured import protocol
from penstock.gpu_node.engine.structured.guide import Guide
from penstock.gpu_node.engine.structured.lanes import GrammarCounts, Lanes, Trial, TrialQueue, blames_task
from penstock.gpu_node.engine.structured.process import Template, Worker
from penstock.gpu_node.engine.structured.tenant_grammar import TrialResult

log = logging.getLogger(__package__)


_RESTART_AFTER_S = 0.2
_FORK_AGAIN_AFTER_S = 0.05
_MAX_DOUBLINGS = 6
_MAX_FAILED_STARTS = 5
"""With more failed starts in a row, about five seconds, requests no longer wait for the next one."""
_TRIAL_TASK = 1


class GrammarProcesses:
    """The owner of all grammar processes: starts them, handles their messages, and replaces ended ones."""

    def __init__(
        self, load: bytes, mask_bytes: int, *, lanes: Lanes, selector: selectors.BaseSelector, counts: GrammarCounts
    ) -> None:
        """`load`: a template's first frame, with its tokenizer. `selector` watches the sockets of all processes."""
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
        self._load, self._mask_bytes = load, mask_bytes
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
        try:
            return Template(self._load, self._mask_bytes)
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
                self._end_trial(sender, trial, replies[0])
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

    def _end_trial(self, worker: Worker, trial: Trial, reply: Any) -> None:
        _, (problem, part, is_limit, worst_mask_s), cpu_s, _ = reply
        is_costly = cpu_s > protocol.CHEAP_TRIAL_CPU_S or worst_mask_s > protocol.CHEAP_MASK_CPU_S
        del self._trial_workers[worker]
        self._selector.unregister(worker.socket)
        worker.close()
        worker.tasks.clear()
        self._trials.end(trial, TrialResult(problem, part, is_costly, is_limit))
        if self.template is not None:
            self._ask_how_it_ended(worker, 0, self.template)

    def _ask_how_it_ended(self, worker: Worker, current: int, template: Template) -> None:
        self._dying[worker.number] = worker, current
        worker.progress_s = time.monotonic()
        template.ask_how_it_ended(worker)
