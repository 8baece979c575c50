"""The node's side of its grammar processes: request masks, pass them to the step, and never delay a step for long.

One thread reads the replies; the engine's thread only sends. All state of a worker can be rebuilt: its successor gets
the grammars and the choices' tokens again.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from penstock.contract.errors import UnavailableError
from penstock.gpu_node.engine.structured import protocol
from penstock.gpu_node.engine.structured.guide import Guide, GuidedMasks
from penstock.gpu_node.engine.structured.lanes import GrammarCounts, Lanes, Trial
from penstock.gpu_node.engine.structured.process import Worker
from penstock.gpu_node.engine.structured.processes import GrammarProcesses
from penstock.gpu_node.engine.structured.tenant_grammar import Grammar, Kind, TrialResult
from penstock.gpu_node.engine.text.reasoning import ReasoningState

log = logging.getLogger(__package__)


PATIENCE_S = 0.02
"""From its start, a step waits this long for late masks while other rows are ready to sample."""
SLOW_PATIENCE_S = 0.004
"""The same if every late row's previous mask took long too."""
LONELY_PATIENCE_S = 0.1
"""The same if no other row is ready."""
_GONE = "the grammar processes have ended"
_END_S = 5.0
_POLL_S = 0.01
_FLUSH_S = 0.001
_IDLE_AFTER_S = 1.0


class MaskHost:
    """The grammar processes of one model. Thread-safe."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer`: the text of tokenizer.json. The processes start with the first grammar."""
        self.counts = GrammarCounts()
        self.vocab_size = vocab_size
        self._selector = selectors.DefaultSelector()
        self._lanes = Lanes(self.counts)
        self._processes = GrammarProcesses(
            # Packed before the node serves: it holds the GIL for 10 to 30 ms for a text of 3 MB.
            protocol.frame([tokenizer, vocab_size, list(eos_token_ids)]),
            protocol.mask_bytes_of(vocab_size),
            lanes=self._lanes,
            selector=self._selector,
            counts=self.counts,
        )
        self._lock = threading.Lock()
        self._ended: deque[tuple[Worker | None, int, Grammar]] = deque()
        self._masks: GuidedMasks | None = None
        """Masks of the step that is waiting."""
        self._due_s = self._active_s = 0.0
        self._is_idle = False
        """Whether the thread sleeps without a timeout, until it is woken."""
        self._is_closed = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    @property
    def process_ids(self) -> list[int]:
        """The template process, whose children are the workers; empty if it is not running."""
        template = self._processes.template
        return [] if template is None else [template.pid]

    def special_tokens(self) -> frozenset[int]:
        """Return the special tokens, which stand for themselves and not for text. Starts the processes.

        Raises RequestError for a tokenizer that llguidance cannot use.
        """
        self._start_thread()
        try:
            return self._processes.special_tokens.result(protocol.TEMPLATE_WALL_S)
        except TimeoutError:
            raise UnavailableError("the grammar processes did not start", code="internal_error") from None

    def try_out(self, kind: Kind, texts: list[str], tenant: str) -> TrialResult:
        """Try grammars within the limits, until one fails."""
        self.special_tokens()
        trial = Trial(kind, texts)
        with self._lock:
            if self._is_closed:
                raise UnavailableError(_GONE, code="internal_error")
            self._processes.try_out(tenant, trial)
            self._wake()
        return trial.result.result()

    def new_guide(self, grammar: Grammar, reasoning: ReasoningState | None = None) -> Guide:
        """Return a guide for a choice at the start of its text, or of its reasoning."""
        self._start_thread()
        with self._lock:
            grammar.num_guides += 1
        return Guide(grammar, self.vocab_size, self._forget, reasoning)

    def begin(self, masks: GuidedMasks) -> None:
        """Request a step's masks. `masks` completes when all have arrived, or when the step has waited long enough."""
        with self._lock:
            self._active_s = time.monotonic()
            self._give_up_waiting()
            for guide, row in masks.guides.items():
                if self._is_closed:
                    self._lanes.fail(guide, UnavailableError(_GONE, code="internal_error"))
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
            # Garbage collection may call this at any point of the thread's work.
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
        # Called by garbage collection on any thread, so it must not take a lock.
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
                self._run_once()
        except Exception:
            self.counts.grammar_host_failures += 1
            log.exception("the grammar processes cannot be served")
        with self._lock:
            self._is_closed = True
            self._end()

    def _run_once(self) -> None:
        template = self._processes.start_template()
        with self._lock:
            if template is not None:
                self._processes.install(template)
            timeout_s = self._timeout_s()
        events = self._selector.select(timeout_s)
        with self._lock:
            if self._is_closed:
                return
            affected: list[Guide] = []
            for key, _ in events:
                if key.data is not None:
                    affected += self._processes.handle_messages(key.data)
                else:
                    with suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
            while self._ended:
                self._lanes.close(*self._ended.popleft())
            affected += self._processes.maintain()
            self._hand_over(affected)

    def _hand_over(self, affected: Sequence[Guide] | None = None) -> bool:
        """Pass arrived masks to the waiting step, request lost ones again, and end its wait in time.

        Returns whether no step waits afterwards. `affected`: guides that changed; None: check all.
        """
        masks = self._masks
        if masks is None:
            return True
        waiting = list(masks.waiting) if affected is None else [one for one in affected if one in masks.waiting]
        lost = []
        for guide in waiting:
            if guide.failure is not None:
                del masks.waiting[guide]
            elif guide.mask_at == len(guide.tokens):
                masks.put(masks.waiting.pop(guide), guide.mask)
            elif affected is not None and guide.asked_at < len(guide.tokens):
                lost.append(guide)
        if lost:
            self._processes.ask(lost)
        if not masks.waiting or (affected is not None and time.monotonic() >= self._due_s):
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
        # A step that begins meanwhile needs this thread for its masks, which wake it, and to end its wait.
        return None if self._is_idle else PATIENCE_S


def _patience_s(masks: GuidedMasks) -> float:
    if not masks.has_other_rows:
        return LONELY_PATIENCE_S
    return SLOW_PATIENCE_S if all(guide.is_slow for guide in masks.waiting) else PATIENCE_S
