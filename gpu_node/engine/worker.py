"""The engine's thread: it runs commands between steps and delivers each step's outputs. No Redis here."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from penstock.contract.adapters import AdapterRef
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.pair_scores import PairScores
from penstock.gpu_node.engine.records import EngineRequest, EngineStats, Prepared, StepLostError, StepOutput
from penstock.gpu_node.engine.shared_cores import Gate
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.engine.texts import TextEncoding
from penstock.gpu_node.model.protocol import RankStats

log = logging.getLogger(__package__)


T = TypeVar("T")

MAX_FAILED_STEPS = 16
"""Failed steps in a row that are tolerated. More mean that the runner is broken, not a single request."""
MAX_PAUSE_S = 0.1
"""Longest pause after a failed step; it doubles with each failure in a row, since memory may be freed in a moment."""


class EngineLike(Protocol):
    """The part of an engine's interface that the node uses."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; safe to call from another thread."""

    @property
    def texts(self) -> TextEncoding | None:
        """How whole texts are tokenized; None if the engine computes sequences. Safe to use on another thread."""

    @property
    def pairs(self) -> PairScores | None:
        """How a model that generates text scores pairs; None if it does not. Safe to use on another thread."""

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and output of a sequence."""

    @property
    def num_kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""

    @property
    def window_tokens(self) -> tuple[int, int] | None:
        """Tokens in all blocks of layers with windows, and those of one sequence; None if all layers have the same."""

    @property
    def leaves_core_free(self) -> bool:
        """Whether steps leave at least one of the node's cores to other work."""

    @property
    def background_due(self) -> bool:
        """Whether background work is below its share of the engine's time; safe on any thread."""

    def has_foreground(self) -> bool:
        """Return whether a caller waits for any of its requests. On the engine's thread."""

    def note_foreground_beside(self) -> None:
        """Note that another node on these cores has foreground work, so that steps stay short. On that thread."""

    def note_queued_background(self, is_queued: bool) -> None:
        """Note whether background work waits outside the engine; safe on any thread."""

    @property
    def revision(self) -> str:
        """Identifies everything on which exact tokens depend. Only a node with the same revision may continue a job."""

    @property
    def sampling_defaults(self) -> dict[str, int | float]:
        """The sampling that the model recommends, by the names of `SamplingParams`."""

    def capabilities(self) -> tuple[str, ...]:
        """Return what the model is good for, as `PoolRecord.capabilities` says. It may take long."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError for a request that can never run."""

    def adapters(self) -> dict[str, str]:
        """Return the available adapters and their digests, by name. It may take long; safe on any thread."""

    def prepare(
        self, params: SamplingParams, adapter: AdapterRef | None = None, *, tenant: str = ...
    ) -> Prepared | None:
        """Prepare grammar, adapter and bad words ahead of `add`, since that may take long; safe on any thread.

        Raises RequestError for what can never run.
        """

    def abort(self, request_id: str) -> None:
        """Remove a request."""

    def bind_thread(self) -> None:
        """Register the calling thread as the one that runs steps; it does nothing else."""

    def wait(self) -> None:
        """Block until `step` can run without waiting."""

    def step(self) -> list[StepOutput]:
        """Return one step's outputs; the next step may already be running by then."""

    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def stats(self) -> EngineStats:
        """Return statistics for the pressure record."""

    def memory_trail(self) -> list[str]:
        """Return the recent history of memory use, one line per record."""

    def requests_in_flight(self) -> set[str]:
        """Return the ids of the current step's requests; safe on any thread, also while the step hangs."""

    def num_preemptions(self, request_id: str) -> int:
        """Return how often the open choices of a request were preempted; safe on any thread."""

    @property
    def ranks(self) -> RankStats:
        """The ranks that compute the model together. Any thread may read it."""


class EngineWorker:
    """An engine's own thread. It calls `deliver` once per step that produced output."""

    def __init__(
        self,
        engine: EngineLike,
        deliver: Callable[[list[StepOutput]], None],
        on_lost: Callable[[frozenset[str]], None] = lambda requests: None,
        gate: Gate | None = None,
    ) -> None:
        """on_lost: gets the requests of a step that was lost with a rank, before the ranks are started again.

        gate: lets background work wait for other nodes of this host; None: it never does.
        """
        self._gate = gate
        self.is_held = False
        """Whether background work waits for another node of this host. Any thread may read it."""
        self._engine = engine
        self._deliver = deliver
        self._on_lost = on_lost
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._may_step = threading.Event()
        self._may_step.set()
        self._stopping = False
        self._num_failed_steps = self._num_steps = 0
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self.stopped: Future[None] = Future()
        """Completes when the thread ends; carries the exception that killed it."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after its current step."""
        self._stopping = True
        self._may_step.set()
        self._wake.set()

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused between two steps."""
        return not self._may_step.is_set()

    def set_paused(self, paused: bool) -> None:
        """Pause the engine between two steps, or resume it."""
        if paused:
            self._may_step.clear()
        else:
            self._may_step.set()
            self._wake.set()

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` on the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # The caller has canceled its wait.
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self._commands.append(run)
        self._wake.set()
        return future

    def add(self, request: EngineRequest, on_refused: Callable[[Exception], None]) -> None:
        """Queue a request. If the engine refuses it, `on_refused` gets the error, on the engine's thread.

        A future for each request would wake the event loop as often.
        """

        def run() -> None:
            try:
                self._engine.add(request)
            except Exception as error:
                on_refused(error)

        self._commands.append(run)
        self._wake.set()

    def prepare(self, params: SamplingParams, adapter: AdapterRef | None, tenant: str) -> Prepared | None:
        """Prepare a request on the caller's thread, so that `add` does not delay the engine's steps."""
        return self._engine.prepare(params, adapter, tenant=tenant)

    def abort(self, request_id: str) -> None:
        """Remove a request before the next step."""
        self.call(lambda: self._engine.abort(request_id))

    def requests_in_flight(self) -> set[str]:
        """Return the ids of the current step's requests, to find out which of them it hangs at."""
        return self._engine.requests_in_flight()

    def num_preemptions(self, request_id: str) -> int:
        """Return how often the open choices of a request were preempted; 0 for an unknown id."""
        return self._engine.num_preemptions(request_id)

    @property
    def ranks(self) -> RankStats:
        """The ranks that compute the model together."""
        return self._engine.ranks

    def stats(self) -> Future[EngineStats]:
        """Read the engine's statistics between two steps."""
        return self.call(self._engine.stats)

    def _run(self) -> None:
        try:
            self._engine.bind_thread()
            while not self._stopping:
                self._run_commands()
                self._engine.wait()
                self._run_commands()  # Commands that arrived during a step take effect in the next one.
                if not self._may_step.is_set() or not self._engine.has_work():
                    if self._gate is not None:
                        self._gate.idle()
                    self._wake.wait()
                elif (pause_s := self._pause_s()) > 0:
                    self._wake.wait(pause_s)
                elif outputs := self._step():
                    self._deliver(outputs)
                self._wake.clear()
            self.stopped.set_result(None)
        except BaseException as error:
            try:
                log.critical("the engine died", extra={"reason": repr(error), "trail": self._engine.memory_trail()})
            finally:
                self.stopped.set_exception(error)

    def _pause_s(self) -> float:
        """Return for how long the next step waits for another node of this host; 0: it does not."""
        if self._gate is None:
            return 0.0
        pause_s = self._gate.pause_s(time.monotonic(), has_foreground=self._engine.has_foreground())
        self.is_held = pause_s > 0
        if self._gate.is_foreground_beside:
            self._engine.note_foreground_beside()
        return pause_s

    def _step(self) -> list[StepOutput]:
        """Run one step. Retry a failed one later, while the engine isolates the request that makes steps fail."""
        try:
            return self._engine.step()
        except Exception as error:
            num_steps = self._engine.stats().steps
            self._num_failed_steps = 1 if num_steps > self._num_steps else self._num_failed_steps + 1
            self._num_steps = num_steps
            if self._num_failed_steps > MAX_FAILED_STEPS:
                raise
            log.warning("a step failed", extra={"reason": repr(error), "in_a_row": self._num_failed_steps})
            if isinstance(error, StepLostError):
                self._on_lost(error.requests)
            time.sleep(min(MAX_PAUSE_S, 2**self._num_failed_steps / 1000))
            return []

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()
