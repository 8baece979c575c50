"""The node's side of its grammar processes: asks for masks, hands them to the step, and never lets a step wait long.

One thread reads the replies. The engine's thread only sends. A worker holds nothing that cannot be rebuilt: what it
held is sent again, with the choices' tokens, to its successor.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock.contract.errors import UnavailableError
from penstock.gpu_node.engine.structured import limits
from penstock.gpu_node.engine.structured.grammar import Grammar, Kind, TrialResult
from penstock.gpu_node.engine.structured.guide import Guide, GuidedMasks
from penstock.gpu_node.engine.structured.outcomes import GrammarCounts
from penstock.gpu_node.engine.structured.process import Worker
from penstock.gpu_node.engine.structured.processes import GrammarProcesses
from penstock.gpu_node.engine.structured.trials import Trial

log = logging.getLogger(__name__)

PATIENCE_S = 0.02
"""From a step's start: so long it waits for the masks of some rows while others are ready to be sampled."""
SLOW_PATIENCE_S = 0.004
"""The same where all that it waits for took long the last time."""
LONELY_PATIENCE_S = 0.1
"""The same where no other row is ready."""
_GONE = "the grammar processes have ended"
_END_S = 5.0
_POLL_S = 0.01
_FLUSH_S = 0.001
_IDLE_AFTER_S = 1.0


class MaskHost:
    """Keeps the grammar processes of one model. Any thread may call it."""

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer` gives the text of tokenizer.json. Nothing is started before the first grammar."""
        self.counts = GrammarCounts()
        self.vocab_size = vocab_size
        self._processes = GrammarProcesses(tokenizer, vocab_size, eos_token_ids, self.counts)
        self._lock = threading.Lock()
        self._ended: deque[tuple[Worker | None, int, Grammar]] = deque()
        self._masks: GuidedMasks | None = None
        """Of the step that waits."""
        self._due_s = self._active_s = 0.0
        self._is_idle = False
        """Whether the thread sleeps until it is woken."""
        self._is_closed = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._processes.selector.register(self._wake_fd, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    @property
    def process_ids(self) -> list[int]:
        """The process that all others are children of, while it runs."""
        template = self._processes.template
        return [] if template is None else [template.pid]

    def special_tokens(self) -> frozenset[int]:
        """The tokens that stand for themselves and not for text; starts the processes.

        Raises RequestError for a tokenizer that cannot be guided.
        """
        self._start_thread()
        try:
            return self._processes.special_tokens.result(limits.TEMPLATE_WALL_S)
        except TimeoutError:
            raise UnavailableError("the grammar processes do not start", code="internal_error") from None

    def try_out(self, kind: Kind, texts: list[str], tenant: str) -> TrialResult:
        """Whether a new grammar compiles within the limits: the first text, or which of the others it fails for."""
        self.special_tokens()
        trial = Trial(kind, texts)
        with self._lock:
            if self._is_closed:
                raise UnavailableError(_GONE, code="internal_error")
            self._processes.try_out(tenant, trial)
            self._wake()
        return trial.result.result()

    def new_guide(self, grammar: Grammar) -> Guide:
        """A choice at the start of its text."""
        self._start_thread()
        with self._lock:
            grammar.num_guides += 1
        return Guide(grammar, self.vocab_size, self._forget)

    def begin(self, masks: GuidedMasks) -> None:
        """Ask for a step's masks. They are finished when all are there, or when the step has waited long enough."""
        with self._lock:
            self._active_s = time.monotonic()
            self._give_up_waiting()
            for row, guide in enumerate(masks.guides):
                if self._is_closed:
                    self._processes.lanes.fail(guide, UnavailableError(_GONE, code="internal_error"))
                if guide.failure is None:
                    masks.waiting[guide] = row
            self._masks = masks
            if self._hand_over():
                return
            self._processes.ask([guide for guide in masks.waiting if guide.asked_at < len(guide.tokens)])
            patience_s = _patience_s(masks)
            self._due_s = self._active_s + patience_s
            if self._is_idle or patience_s < PATIENCE_S:
                self._wake()

    def close(self) -> None:
        """End all processes."""
        if threading.current_thread() is self._thread:
            # Garbage collection may call this in the middle of anything that the thread does.
            self._is_closed = True
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._thread is None:
                self._end()
                return
            self._wake()
        self._thread.join(_END_S)

    def _forget(self, guide: Guide) -> None:
        # It is called wherever Python collects garbage, so it must take no lock.
        self._ended.append((guide.worker, guide.number, guide.grammar))

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="penstock-masks", daemon=True)
                self._thread.start()

    def _wake(self) -> None:
        self._is_idle = False
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        except Exception:
            log.exception("the grammar processes cannot be served")
        with self._lock:
            self._is_closed = True
            self._end()

    def _turn(self) -> None:
        template = self._processes.start_template()
        with self._lock:
            if template is not None:
                self._processes.install(template)
            timeout_s = self._timeout_s()
        events = self._processes.selector.select(timeout_s)
        with self._lock:
            if self._is_closed:
                return
            concerned: list[Guide] = []
            for key, _ in events:
                if key.data is not None:
                    concerned += self._processes.hear(key.data)
                else:
                    with suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
            while self._ended:
                self._processes.lanes.close(*self._ended.popleft())
            concerned += self._processes.look_after()
            self._hand_over(concerned)

    def _hand_over(self, concerned: Sequence[Guide] | None = None) -> bool:
        """Give the waiting step the masks that are there, ask again for lost ones, and end its waiting in time.

        Whether no step waits afterwards.
        """
        masks = self._masks
        if masks is None:
            return True
        waiting = list(masks.waiting) if concerned is None else [one for one in concerned if one in masks.waiting]
        lost = []
        for guide in waiting:
            if guide.failure is not None:
                del masks.waiting[guide]
            elif guide.mask_at == len(guide.tokens):
                masks.put(masks.waiting.pop(guide), guide.mask)
            elif concerned is not None and guide.asked_at < len(guide.tokens):
                lost.append(guide)
        if lost:
            self._processes.ask(lost)
        if not masks.waiting or (concerned is not None and time.monotonic() >= self._due_s):
            self._give_up_waiting()
        return self._masks is None

    def _give_up_waiting(self) -> None:
        masks, self._masks = self._masks, None
        if masks is not None:
            self.counts.late_masks += len(masks.waiting)
            masks.give_up_waiting()

    def _end(self) -> None:
        self._give_up_waiting()
        self._processes.close()
        os.close(self._wake_fd)

    def _timeout_s(self) -> float | None:
        now_s = time.monotonic()
        if any(worker.has_unsent for worker in self._processes.workers):
            return _FLUSH_S
        if self._masks is not None:
            return min(_POLL_S, max(0.0, self._due_s - now_s))
        self._is_idle = now_s - self._active_s > _IDLE_AFTER_S and not self._processes.is_busy
        return None if self._is_idle else _POLL_S


def _patience_s(masks: GuidedMasks) -> float:
    if not masks.has_other_rows:
        return LONELY_PATIENCE_S
    return SLOW_PATIENCE_S if all(guide.is_slow for guide in masks.waiting) else PATIENCE_S
