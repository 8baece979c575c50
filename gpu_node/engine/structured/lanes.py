"""The workers that serve choices: one for cheap grammars, one for costly grammars, each started when needed.

Not thread-safe; the host's lock protects it.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from penstock.contract.errors import PenstockError, RequestError, TooCostlyError
from penstock.gpu_node.engine.structured import protocol
from penstock.gpu_node.engine.structured.guide import Guide
from penstock.gpu_node.engine.structured.process import Worker
from penstock.gpu_node.engine.structured.protocol import EMPTY, MISFIT, PAST_LIMITS, WRITTEN
from penstock.gpu_node.engine.structured.shared_page import NO_SLOT
from penstock.gpu_node.engine.structured.tenant_grammar import Grammar, Kind, TrialResult, reason_of

log = logging.getLogger(__package__)


MAX_KILLS_FROM_OUTSIDE = 3
"""The system may kill any process if memory runs out. A grammar is refused after this many such kills in its tasks."""


@dataclass(slots=True)
class GrammarCounts:
    """Counters of one host; they only grow."""

    grammar_trials: int = 0
    grammar_refusals: int = 0
    """New grammars that were refused."""
    grammar_costly_refusals: int = 0
    """Refused grammars that exceeded a limit of time, memory or work."""
    grammar_kills: int = 0
    """Workers that a limit killed, without trials."""
    grammar_restarts: int = 0
    """Workers started to replace one that had ended."""
    late_masks: int = 0
    """Rows that sampled nothing in a step because their mask was not ready."""
    failed_guides: int = 0
    """Choices that ended because of their grammar."""
    grammar_host_failures: int = 0
    """Times that the node's side of the grammar processes ended with an error. Structured output fails from then on."""


def refusal_of(grammar: Grammar, reason: str) -> TooCostlyError:
    """Return the error of a choice with a grammar that exceeded a limit."""
    return TooCostlyError(
        f"{grammar.field_name}: cannot be enforced: it is too costly: {reason}", param=grammar.field_name
    )


def failure_of(grammar: Grammar, status: int, reason: bytes) -> PenstockError:
    """Return the error of a choice without a mask, from its worker's answer."""
    detail = reason.decode(errors="replace")
    if status == PAST_LIMITS:
        return refusal_of(grammar, f"a token exceeded the limits of work ({reason_of(grammar.kind, detail)})")
    if status == MISFIT:
        return RequestError("the logged tokens do not match the requested structured output", param="resume")
    if status == EMPTY:
        field_name = grammar.field_name
        return RequestError(f"{field_name}: no token of this model can continue the text", param=field_name)
    return refusal_of(grammar, "it could not be compiled again")


def blames_task(exit_status: int | None, grammar: Grammar | None) -> bool:
    """Whether a dying worker's current task is at fault. It is not if the worker was killed from outside."""
    if exit_status is None:
        return False
    if exit_status != -signal.SIGKILL:
        return True
    if grammar is not None:
        grammar.num_kills += 1
    return grammar is not None and grammar.num_kills >= MAX_KILLS_FROM_OUTSIDE


def is_memory_death(exit_status: int | None) -> bool:
    """Whether a worker exited by itself, as one without memory does. Time limits and outside kills are signals."""
    return exit_status not in (None, 0, -signal.SIGPROF, -signal.SIGKILL)


def why_killed(exit_status: int | None, cpu_s: float) -> str:
    """Return the limit that killed a worker."""
    if exit_status == -signal.SIGPROF:
        return f"a task took more than {cpu_s:g} s of processor time"
    return f"a task took more than {protocol.WORKER_MEMORY_MIB} MiB of memory, or broke the compiler"


MAX_AT_ONCE = 2
MAX_LOSSES = 3
"""A grammar is refused after its trial's process was lost more often than this."""


@dataclass(slots=True, eq=False)
class Trial:
    """A grammar to try out, or the parts of one: the trial ends at the first text that fails."""

    kind: Kind
    texts: list[str]
    num_losses: int = 0
    result: Future[TrialResult] = field(default_factory=Future)


class TrialQueue:
    """Waiting trials: tenants in turn, and each tenant's in order of arrival. A tenant runs at most one at a time."""

    def __init__(self) -> None:
        # Keyed by tenant; trials in order of arrival.
        self._waiting: OrderedDict[str, deque[Trial]] = OrderedDict()
        self._running: dict[Trial, str] = {}

    def add(self, tenant: str, trial: Trial) -> None:
        """Queue a trial."""
        self._waiting.setdefault(tenant, deque()).append(trial)

    @property
    def has_any(self) -> bool:
        """Whether a trial is waiting or running."""
        return bool(self._waiting or self._running)

    def start(self) -> Trial | None:
        """Return the next trial, if one may run now."""
        if len(self._running) >= MAX_AT_ONCE or not self._waiting:
            return None
        busy = set(self._running.values())
        # A tenant's second trial waits, so that a slot stays free for the next tenant.
        tenant = next((one for one in self._waiting if one not in busy), None)
        if tenant is None:
            return None
        waiting = self._waiting.pop(tenant)
        trial = waiting.popleft()
        if waiting:
            self._waiting[tenant] = waiting
        self._running[trial] = tenant
        return trial

    def end(self, trial: Trial, result: TrialResult) -> None:
        """Set the result of a running trial."""
        self._running.pop(trial, None)
        trial.result.set_result(result)

    def retry(self, trial: Trial) -> None:
        """Queue a trial again after its process was killed from outside; refuse it after too many such losses."""
        tenant = self._running.pop(trial)
        trial.num_losses += 1
        if trial.num_losses > MAX_LOSSES:
            trial.result.set_result(TrialResult(is_too_costly=True, is_killed=True))
        else:
            self.add(tenant, trial)

    def put_back(self, trial: Trial) -> None:
        """Queue a trial again, before all others, because it could not be started."""
        tenant = self._running.pop(trial)
        self._waiting.setdefault(tenant, deque()).appendleft(trial)
        self._waiting.move_to_end(tenant, last=False)

    def clear(self) -> list[Trial]:
        """Remove and return all trials, because none can run any more."""
        trials = [trial for waiting in self._waiting.values() for trial in waiting] + list(self._running)
        self._waiting.clear()
        self._running.clear()
        return trials


LaneName = Literal["cheap", "costly"]
_CPU_S: dict[LaneName, float] = {"cheap": protocol.FAST_TASK_CPU_S, "costly": protocol.SLOW_TASK_CPU_S}
_NICENESS: dict[LaneName, int] = {"cheap": 0, "costly": protocol.SLOW_NICENESS}
_SLOW_MASK_S = 0.01
_MIB = 1 << 20
_MASKS_OF_LONG_USE = 2_000
_MAX_SLOW_MASKS = 1
"""A cheap grammar with more of them moves to the worker for costly grammars."""


class Forks(Protocol):
    """The source of new workers."""

    def fork(self, task_cpu_s: float, niceness: int = 0, memory_mib: int = ...) -> Worker:
        """Fork a worker. Raises OSError."""


@dataclass(slots=True)
class _Task:
    grammar: Grammar
    guide: Guide | None = None
    num_tokens: int = 0
    is_rebuilt: bool = False
    """Whether the matcher consumes all tokens of the choice again."""
    slot: int = NO_SLOT
    """Where the worker writes the mask; NO_SLOT: into its reply."""


class Lanes:
    """The workers' task lists: sends tasks, handles replies, accounts for processor time and memory."""

    def __init__(self, counts: GrammarCounts) -> None:
        self.workers: dict[LaneName, Worker] = {}
        self._counts = counts
        self._num_tasks = 0
        self._lane_of: dict[Worker, LaneName] = {}
        self._started: set[LaneName] = set()

    def ask(self, guides: Iterable[Guide], forks: Forks) -> list[Worker]:
        """Request the next masks of some choices; return the workers started for it.

        The masks of a lane whose worker cannot be started stay late. The next step requests them again.
        """
        by_lane: dict[LaneName, list[Guide]] = {}
        for guide in sorted(guides, key=lambda one: one.is_slow):
            by_lane.setdefault("costly" if guide.grammar.is_costly else "cheap", []).append(guide)
        started = [worker for lane in by_lane if (worker := self._start(lane, forks)) is not None]
        for lane, waiting in by_lane.items():
            if (worker := self.workers.get(lane)) is not None:
                worker.send([task for guide in waiting for task in self._tasks_for(guide, worker)])
        return started

    def close(self, worker: Worker | None, guide_number: int, grammar: Grammar) -> None:
        """Release a choice's matcher."""
        grammar.num_guides -= 1
        if worker is not None and worker in self.workers.values():
            worker.send([[0, "close", guide_number]])

    def handle_replies(self, worker: Worker, replies: list[Any]) -> list[Guide]:
        """Handle a worker's replies; return the choices that got their mask or failed."""
        answered = []
        worker.progress_s = time.monotonic()
        for number, answer, cpu_s, memory in replies:
            task: _Task | None = worker.tasks.pop(number, None)
            if task is None:
                continue
            self._account(worker, task.grammar, cpu_s, memory)
            if task.guide is None:
                if answer:
                    task.grammar.refuse(refusal_of(task.grammar, answer))
                continue
            if not task.is_rebuilt:
                self._move_if_slow(worker, task.grammar, cpu_s)
            status, data = answer
            if task.slot != NO_SLOT:
                mask = worker.read_slot(task.slot)
                data = mask if status == WRITTEN else data
            self._handle_mask(task.guide, task.num_tokens, status, data, cpu_s)
            answered.append(task.guide)
        return answered

    def died(self, worker: Worker, current: int, exit_status: int | None) -> list[Guide]:
        """Note how a worker ended. Return the choices with unanswered masks, which the caller requests again."""
        lane = self._lane_of.pop(worker, None)
        culprit: _Task | None = worker.tasks.get(current)
        if culprit is not None and blames_task(exit_status, culprit.grammar):
            self._blame(_culprit_of(worker, culprit.grammar, exit_status), lane, exit_status)
        elif exit_status != 0:
            log.warning("a grammar process was ended from outside", extra={"status": exit_status})
        waiting = [task.guide for task in worker.tasks.values() if task.guide is not None]
        for guide in waiting:
            guide.asked_at = min(guide.asked_at, guide.mask_at)
            if guide.grammar.refusal is not None:
                self.fail(guide, guide.grammar.refusal)
        worker.tasks.clear()
        return waiting

    def remove(self, worker: Worker) -> None:
        """Send a worker no more tasks. `died` is called later with its exit status."""
        self.workers = {lane: known for lane, known in self.workers.items() if known is not worker}

    def too_large(self) -> list[Worker]:
        """Return idle workers that take too much memory and should be replaced."""
        limit = protocol.MAX_WORKER_MIB * _MIB
        return [one for one in self.workers.values() if not one.tasks and one.memory - one.base_memory > limit]

    def fail(self, guide: Guide, error: PenstockError) -> None:
        """Mark a choice as failed; it ends with the next step."""
        if guide.failure is None:
            guide.failure = error
            self._counts.failed_guides += 1

    def _start(self, lane: LaneName, forks: Forks) -> Worker | None:
        """Start a lane's worker, unless it has one or the system refuses a process."""
        if lane in self.workers:
            return None
        try:
            worker = forks.fork(_CPU_S[lane], _NICENESS[lane])
        except OSError as error:
            log.warning("a grammar process was not started", extra={"reason": repr(error)})
            return None
        self._counts.grammar_restarts += lane in self._started
        self._started.add(lane)
        self.workers[lane], self._lane_of[worker] = worker, lane
        return worker

    def _tasks_for(self, guide: Guide, worker: Worker) -> list[Any]:
        grammar, tasks = guide.grammar, []
        if grammar.number not in worker.grammars:
            worker.grammars.add(grammar.number)
            number = self._note(worker, _Task(grammar))
            tasks.append([number, "compile", grammar.number, grammar.kind, grammar.text])
        is_new = guide.worker is not worker
        tokens = guide.tokens if is_new else guide.tokens[guide.asked_at :]
        if is_new and guide.worker is not None and guide.worker in self.workers.values():
            guide.worker.send([[0, "close", guide.number]])  # Its grammar has moved to the other worker.
        guide.worker, guide.asked_at = worker, len(guide.tokens)
        slot = worker.take_slot()
        number = self._note(worker, _Task(grammar, guide, guide.asked_at, is_new and guide.asked_at > 0, slot))
        tasks.append([number, "mask", guide.number, grammar.number, is_new, tokens.tobytes(), slot])
        return tasks

    def _note(self, worker: Worker, task: _Task) -> int:
        if not worker.tasks:
            worker.progress_s = time.monotonic()
        self._num_tasks += 1
        worker.tasks[self._num_tasks] = task
        return self._num_tasks

    def _handle_mask(self, guide: Guide, num_tokens: int, status: int, data: bytes, cpu_s: float) -> None:
        guide.cpu_s += cpu_s
        guide.is_slow = cpu_s > _SLOW_MASK_S
        guide.grammar.num_masks += 1
        if status == WRITTEN:
            guide.mask, guide.mask_at = data, num_tokens
        elif status == PAST_LIMITS and guide.rebuilt_at != num_tokens:
            self._rebuild(guide, num_tokens)
        else:
            self.fail(guide, guide.grammar.refusal or failure_of(guide.grammar, status, data))
        if guide.grammar.refusal is not None:
            self.fail(guide, guide.grammar.refusal)
        if guide.cpu_s > protocol.GUIDE_CPU_S + protocol.GUIDE_CPU_PER_TOKEN_S * num_tokens:
            self.fail(guide, refusal_of(guide.grammar, f"its masks took {guide.cpu_s:.1f} s for {num_tokens} tokens"))

    def _move_if_slow(self, worker: Worker, grammar: Grammar, cpu_s: float) -> None:
        """Serve a grammar among costly ones if its masks have become slow, so that no other choice waits for them.

        Its choices move with their next masks. Masks that are already requested still come from the old worker.
        """
        if cpu_s <= protocol.CHEAP_MASK_CPU_S or grammar.is_costly or self._lane_of.get(worker) != "cheap":
            return
        grammar.num_slow_masks += 1
        if grammar.num_slow_masks > _MAX_SLOW_MASKS:
            grammar.is_costly = True
            grammar.memory = 0  # Its matchers are built anew in the other worker.
            log.info("a grammar's masks became slow", extra={"field": grammar.field_name, "mask_ms": cpu_s * 1e3})

    def _rebuild(self, guide: Guide, num_tokens: int) -> None:
        """Rebuild a choice's matcher from its tokens before a limit may end the choice.

        The matchers of a grammar's choices share caches, and those count toward the limits. A matcher of its own
        depends on the grammar and the tokens alone, so that every node decides alike.
        """
        guide.rebuilt_at = num_tokens
        if guide.worker is not None:
            guide.worker.grammars.discard(guide.grammar.number)
        guide.worker, guide.asked_at = None, -1

    def _account(self, worker: Worker, grammar: Grammar, cpu_s: float, memory: int) -> None:
        """Divide what a worker grew by since its last measurement among the tasks since then, by processor time."""
        worker.unmeasured[grammar] = worker.unmeasured.get(grammar, 0.0) + cpu_s
        if not memory:
            return
        tasks, worker.unmeasured = worker.unmeasured, {}
        if not worker.base_memory:
            worker.base_memory = worker.memory = memory
            return
        grown, worker.memory = max(0, memory - worker.memory), memory
        whole_s = sum(tasks.values()) or 1.0
        for one, its_s in tasks.items():
            self._charge(worker, one, int(grown * its_s / whole_s))

    def _charge(self, worker: Worker, grammar: Grammar, num_bytes: int) -> None:
        grammar.memory += num_bytes
        worker.memory_of[grammar] = worker.memory_of.get(grammar, 0) + num_bytes
        is_old = worker.progress_s - grammar.account_s > protocol.ACCOUNT_S
        if not is_old and grammar.memory <= protocol.MAX_GRAMMAR_MIB * _MIB:
            return
        if is_old or grammar.num_masks > _MASKS_OF_LONG_USE:
            # Long use fills the caches. Compiling the grammar again empties them.
            worker.grammars.discard(grammar.number)
            grammar.begin_account(worker.progress_s)
        elif grammar.refusal is None:
            reason = f"its masks took more than {protocol.MAX_GRAMMAR_MIB} MiB of memory"
            grammar.refuse(refusal_of(grammar, reason))
            log.warning("a grammar was too costly", extra={"field": grammar.field_name, "reason": reason})
            worker.send([[0, "forget", grammar.number]])

    def _blame(self, grammar: Grammar, lane: LaneName | None, exit_status: int | None) -> None:
        self._counts.grammar_kills += 1
        reason = why_killed(exit_status, _CPU_S[lane or "costly"])
        if lane == "cheap":
            grammar.is_costly = True
        else:
            grammar.refuse(refusal_of(grammar, reason))
        log.warning("a grammar's task was killed", extra={"field": grammar.field_name, "lane": lane, "reason": reason})


def _culprit_of(worker: Worker, current: Grammar, exit_status: int | None) -> Grammar:
    """Return the grammar that caused a worker's death.

    That is the one of its current task, unless memory ran out in a worker that others had already filled.
    """
    was_full = worker.memory - worker.base_memory > protocol.MAX_WORKER_MIB * _MIB
    if not is_memory_death(exit_status) or not was_full:
        return current
    return max(worker.memory_of, key=worker.memory_of.__getitem__, default=current)
