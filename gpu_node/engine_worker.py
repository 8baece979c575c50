"""The engine's thread: commands in, one batch of outputs a step out. Nothing here knows Redis."""

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
from penstock.gpu_node.engine.records import EngineRequest, EngineStats, StepOutput
from penstock.gpu_node.engine.text.tokenizer import Tokenizer

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 16
"""Without one that was computed between them: more, and it is not a request but the runner that is broken."""
MAX_PAUSE_S = 0.1
"""After a failed step, longer with each in a row: memory that another process took may be back in a moment."""


class EngineLike(Protocol):
    """What the node needs of an engine."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Turns prompts into token ids; safe to call from another thread."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that a sequence may have."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache can hold."""

    @property
    def revision(self) -> str:
        """What must be equal for another node to continue a job token-exact."""

    def add(self, request: EngineRequest) -> None:
        """Queues a request; raises RequestError for one that can never run."""

    def adapters(self) -> dict[str, str]:
        """The adapters that requests may name as of now, and their digests; may take long, on any thread."""

    def prepare(self, params: SamplingParams, adapter: AdapterRef | None = None, *, tenant: str = ...) -> object:
        """Does ahead of `add` what takes long, on any thread; raises RequestError for what could never run.

        It is done as long as the caller keeps the answer.
        """

    def abort(self, request_id: str) -> None:
        """Forgets a request."""

    def bind_thread(self) -> None:
        """Told by the thread that steps, which does nothing else."""

    def wait(self) -> None:
        """Blocks until `step` would not."""

    def step(self) -> list[StepOutput]:
        """What one step gave; the next one may be running when it comes back."""

    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def stats(self) -> EngineStats:
        """Figures for the pressure record."""

    def memory_trail(self) -> list[str]:
        """What the memory went through lately, a line a record."""

    def requests_in_flight(self) -> set[str]:
        """Requests of the step that it is in; may be called from any thread while it hangs there."""


class EngineWorker:
    """Runs an engine on a thread of its own. `deliver` is called there, once per step that produced something."""

    def __init__(self, engine: EngineLike, deliver: Callable[[list[StepOutput]], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._may_step = threading.Event()
        self._may_step.set()
        self._stopping = False
        self._num_failed_steps = self._num_steps = 0
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self.stopped: Future[None] = Future()
        """Done when the thread ends; carries what killed it."""

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end after the step it is in."""
        self._stopping = True
        self._may_step.set()
        self._wake.set()

    @property
    def is_paused(self) -> bool:
        """Whether the engine is held between two steps."""
        return not self._may_step.is_set()

    def set_paused(self, paused: bool) -> None:
        """Holds the engine between two steps, or lets it go on."""
        if paused:
            self._may_step.clear()
        else:
            self._may_step.set()
            self._wake.set()

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Runs `command` on the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # who asked has given up meanwhile
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self._commands.append(run)
        self._wake.set()
        return future

    def add(self, request: EngineRequest) -> Future[None]:
        """Queues a request; the future carries the engine's refusal."""
        return self.call(lambda: self._engine.add(request))

    def prepare(self, params: SamplingParams, adapter: AdapterRef | None, tenant: str) -> object:
        """Does ahead of `add` what would keep the engine's thread from its steps; on the caller's own.

        It is done as long as the caller keeps the answer.
        """
        return self._engine.prepare(params, adapter, tenant=tenant)

    def abort(self, request_id: str) -> None:
        """Forgets a request before the next step."""
        self.call(lambda: self._engine.abort(request_id))

    def requests_in_flight(self) -> set[str]:
        """Requests of the step that the engine is in; for the time when it hangs there."""
        return self._engine.requests_in_flight()

    def stats(self) -> Future[EngineStats]:
        """The engine's figures, read between two steps."""
        return self.call(self._engine.stats)

    def _run(self) -> None:
        try:
            self._engine.bind_thread()
            while not self._stopping:
                self._run_commands()
                self._engine.wait()
                self._run_commands()  # what came while a step was running counts for the next one
                if self._may_step.is_set() and self._engine.has_work():
                    outputs = self._step()
                    if outputs:
                        self._deliver(outputs)
                else:
                    self._wake.wait()
                self._wake.clear()
            self.stopped.set_result(None)
        except BaseException as error:
            try:
                log.critical("the engine died", extra={"reason": repr(error), "trail": self._engine.memory_trail()})
            finally:
                self.stopped.set_exception(error)

    def _step(self) -> list[StepOutput]:
        """One step; one that fails is taken again, for the engine finds out whether a single request is to blame."""
        try:
            return self._engine.step()
        except Exception as error:
            num_steps = self._engine.stats().steps
            self._num_failed_steps = 1 if num_steps > self._num_steps else self._num_failed_steps + 1
            self._num_steps = num_steps
            if self._num_failed_steps > MAX_FAILED_STEPS:
                raise
            log.warning("a step failed", extra={"reason": repr(error), "in_a_row": self._num_failed_steps})
            time.sleep(min(MAX_PAUSE_S, 2**self._num_failed_steps / 1000))
            return []

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()
