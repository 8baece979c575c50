"""The jobs of one call: submits prompts one after another as the pool accepts them, and returns their answers."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from enum import Enum

from penstock.contract.errors import BusyError, RequestError, ResultTimeoutError, UnavailableError
from penstock.contract.output import Outcome, Result
from penstock.producer.client.job import AsyncJob, checked_timeout
from penstock.producer.client.request import Prompt
from penstock.runtime.cancellation import cancel_until_done
from penstock.runtime.gather import try_all

# The number of jobs that one call may have open at once, learned from the pool's refusals.

SHRINK = 0.8
"""After a refusal, the share of the jobs then open that may be open at once."""


class Window:
    """How many jobs may be open: fewer after a refusal, slowly more as jobs are accepted. 1 <= size <= max_size."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._size = float(max_size)

    @property
    def size(self) -> int:
        """How many jobs may be open now."""
        return int(self._size)

    def note_accepted(self) -> None:
        """The pool accepted a job. So the window widens by one whenever it has been filled once."""
        self._size = min(float(self._max_size), self._size + 1 / self._size)

    def note_refused(self, num_open: int) -> None:
        """The pool refused a job, while it held `num_open` jobs of this call."""
        self._size = max(1.0, SHRINK * min(self._size, num_open))


MAX_IN_FLIGHT = 256
"""Default limit of the jobs that one call has open at once. The pool may accept fewer."""
MAX_MAX_IN_FLIGHT = 65_536
UNREAD_PER_OPEN = 4
"""Answers that may wait for an earlier one, for each job that may be open."""
JITTER = 0.2
"""The share by which a pause is randomly lengthened, so that many callers do not return at once."""
CANCEL_S = 5.0
"""Seconds for canceling open jobs. If Redis is unreachable for longer, the queue itself ends these jobs, as unread."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run. Raises RequestError for a wrong value."""

    in_order: bool
    timeout: float | None = None
    """Seconds from the first step to the last one."""
    check: bool = True
    """Whether a failed job ends the run with its error."""
    max_in_flight: int = MAX_IN_FLIGHT
    leaves_jobs: bool = False
    """Whether an early end leaves the open jobs to the queue instead of canceling them."""
    acks: bool = True
    """Whether the results may leave Redis once this process has them."""

    def __post_init__(self) -> None:
        checked_timeout(self.timeout)
        if not isinstance(self.max_in_flight, int) or not 1 <= self.max_in_flight <= MAX_MAX_IN_FLIGHT:
            raise RequestError(f"max_in_flight must be from 1 to {MAX_MAX_IN_FLIGHT}", param="max_in_flight")


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt, its index and its result."""

    index: int
    prompt: Prompt
    result: Result


class RunStep(Enum):
    """What `next_step` returns instead of an answer: the run wants a prompt, or it has ended."""

    WANTS_PROMPT = "wants a prompt"
    END = "end"


ReadPrompt = Callable[[], Awaitable[Prompt | RunStep]]
"""Reads the next prompt; END if there is none."""


@dataclass(eq=False, slots=True)
class _Entry:
    """An offered prompt and its outcome: a result, an error, or None while the job is open."""

    index: int
    prompt: Prompt = ""
    job: AsyncJob | None = None
    outcome: Result | Exception | None = None


class Run:
    """The jobs of one call. At any time it holds a bounded number of prompts and results.

    The caller repeats `next_step`, and offers a prompt whenever the run wants one. A run belongs to one event loop.
    """

    def __init__(
        self,
        submit: Callable[[Prompt, int], Awaitable[AsyncJob]],
        options: RunOptions,
        outage_s: float,
        open_runs: set[Run],
    ) -> None:
        """`outage_s`: how long to wait for nodes that are gone. `open_runs`: what the client closes when it closes."""
        self._submit = submit
        self._options = options
        self._outage_s = outage_s
        self._open_runs = open_runs
        self._window = Window(options.max_in_flight)
        self._end_s: float | None = None
        self._entries: dict[int, _Entry] = {}
        """By index, the prompts whose answers the caller does not have yet, in their order."""
        self._ended: deque[_Entry] = deque()
        """The entries that have ended, for a run that returns answers as they end."""
        self._tasks: dict[_Entry, asyncio.Task[None]] = {}
        """The open jobs."""
        self._submitting: _Entry | None = None
        """The prompt that is being read or submitted. Only one, so that a run submits one at a time to a busy pool."""
        self._num_prompts = self._num_accepted = self._num_done = 0
        self._is_begun = self._has_all_prompts = self._is_closed = False
        self._changed = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    async def next_step(self) -> Answered | RunStep:
        """Wait for what the caller must do next: take an answer, offer a prompt, or end.

        Raises the error of a prompt instead of its answer. Raises ResultTimeoutError when the run's time is over, and
        UnavailableError if the client was closed.
        """
        if not self._is_begun:
            self._begin()
        limit = asyncio.timeout_at(self._end_s)
        try:
            async with limit:
                while (step := self._step()) is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            if not limit.expired():
                raise
            error = self._too_late()
            await self.close()
            raise error from None
        return step

    async def offer(self, read: ReadPrompt) -> None:
        """Read a prompt that the run wants, and submit it. The answers do not wait for the reading."""
        entry = self._submitting = _Entry(self._num_prompts)
        self._num_prompts += 1
        self._entries[entry.index] = entry
        self._tasks[entry] = asyncio.create_task(self._run_job(entry, read), name="penstock job of a run")

    async def answers(self, prompts: Iterable[Prompt] | AsyncIterable[Prompt]) -> AsyncGenerator[Answered, None]:
        """Run all prompts and yield their answers. Each prompt is read when the pool can take it."""
        source = aiter(prompts) if isinstance(prompts, AsyncIterable) else _each(prompts)
        try:
            while (step := await self.next_step()) is not RunStep.END:
                if isinstance(step, Answered):
                    yield step
                else:
                    await self.offer(lambda: anext(source, RunStep.END))
        finally:
            await self.close()

    async def close(self) -> None:
        """End the run and cancel its open jobs, unless they are left to the queue. A further call waits for the end."""
        if self._closing is None:
            self._is_closed = True
            self._closing = asyncio.create_task(self._end_jobs(), name="penstock end of a run")
        await asyncio.shield(self._closing)

    # What the caller must do ------------------------------------------------------------------------

    def _begin(self) -> None:
        self._is_begun = True
        self._open_runs.add(self)
        if self._options.timeout is not None:
            self._end_s = asyncio.get_running_loop().time() + self._options.timeout

    def _step(self) -> Answered | RunStep | None:
        if self._is_closed:
            raise UnavailableError("the client was closed", code="client_closed")
        if self._wants_prompt():
            return RunStep.WANTS_PROMPT
        if (answer := self._take_answer()) is not None:
            return answer
        return RunStep.END if self._has_all_prompts and not self._entries else None

    def _wants_prompt(self) -> bool:
        may_open = len(self._tasks) < self._window.size and len(self._entries) < UNREAD_PER_OPEN * self._window.size
        return may_open and self._submitting is None and not self._has_all_prompts

    def _take_answer(self) -> Answered | None:
        if self._options.in_order:
            entry = next(iter(self._entries.values()), None)
        else:
            entry = self._ended.popleft() if self._ended else None
        if entry is None or entry.outcome is None:
            return None
        del self._entries[entry.index]
        if isinstance(entry.outcome, Exception):
            raise entry.outcome
        return Answered(entry.index, entry.prompt, entry.outcome)

    def _too_late(self) -> ResultTimeoutError:
        are_left = "left to the queue" if self._options.leaves_jobs else "canceled"
        return ResultTimeoutError(
            f"{self._num_done} prompts were answered within {self._options.timeout} s. "
            f"The {len(self._tasks)} open jobs are {are_left}. `map` gives each answer as soon as it is there"
        )

    # One job ----------------------------------------------------------------------------------------

    async def _run_job(self, entry: _Entry, read: ReadPrompt) -> None:
        try:
            prompt = await read()
            if isinstance(prompt, RunStep):
                self._has_all_prompts = True
                del self._entries[entry.index]
                return
            entry.prompt = prompt
            entry.outcome = await self._result_of(entry)
        except Exception as error:
            # The caller gets it in place of the answer. Nothing more is submitted.
            entry.outcome = error
            self._has_all_prompts = True
        finally:
            self._note_end(entry)

    def _note_end(self, entry: _Entry) -> None:
        del self._tasks[entry]
        if self._submitting is entry:
            self._submitting = None
        if entry.outcome is not None:
            self._num_done += 1
            if not self._options.in_order:
                self._ended.append(entry)
        self._changed.set()

    async def _result_of(self, entry: _Entry) -> Result:
        try:
            entry.job = await self._accepted(entry)
        except RequestError as error:
            if self._options.check or error.param != "prompt":
                raise
            # Another prompt may be right.
            return Result("", Outcome("failed", error.code, error.message, "prompt"))
        self._num_accepted += 1
        self._window.note_accepted()
        self._submitting = None
        self._changed.set()
        result = await entry.job.result(check=self._options.check)
        if self._options.acks:
            # If Redis is away, the result expires by itself.
            with suppress(UnavailableError):
                await entry.job.ack()
        return result

    async def _accepted(self, entry: _Entry) -> AsyncJob:
        """Submit a job, as often as necessary. Raises errors that waiting does not cure."""
        clock = asyncio.get_running_loop().time
        first_without_node_s: float | None = None
        while True:
            try:
                return await self._submit(entry.prompt, entry.index)
            except BusyError as error:
                self._window.note_refused(len(self._tasks) - 1)
                pause_ms = error.retry_after_ms
            except UnavailableError as error:
                # A pool that accepted earlier jobs may get its nodes back.
                first_without_node_s = first_without_node_s or clock()
                is_over = clock() >= first_without_node_s + self._outage_s
                if error.code != "no_node" or not self._num_accepted or is_over:
                    raise
                pause_ms = error.retry_after_ms
            await asyncio.sleep(pause_ms / 1000 * random.uniform(1, 1 + JITTER))

    # The end ----------------------------------------------------------------------------------------

    async def _end_jobs(self) -> None:
        tasks = dict(self._tasks)
        await cancel_until_done(tasks.values())
        if not self._options.leaves_jobs:
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await try_all([entry.job.cancel for entry in tasks if entry.job is not None])
        self._open_runs.discard(self)
        self._changed.set()


async def _each(prompts: Iterable[Prompt]) -> AsyncGenerator[Prompt, None]:
    for prompt in prompts:
        yield prompt


async def results_of(answers: AsyncGenerator[Answered, None]) -> AsyncGenerator[Result, None]:
    """Yield the results of a run's answers. Its end is the run's end."""
    async with aclosing(answers):
        async for answer in answers:
            yield answer.result


async def pairs_of(answers: AsyncGenerator[Answered, None]) -> AsyncGenerator[tuple[Prompt, Result], None]:
    """Yield the prompts and results of a run's answers. Its end is the run's end."""
    async with aclosing(answers):
        async for answer in answers:
            yield answer.prompt, answer.result
