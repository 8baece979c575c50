"""The jobs of one call: submits prompts one after another as the pool accepts them, and returns their answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial

from penstock.contract.errors import BusyError, RequestError, ResultTimeoutError, UnavailableError
from penstock.contract.output import Outcome, Result
from penstock.producer.client.job import AsyncJob, checked_timeout
from penstock.producer.client.request import Prompt
from penstock.runtime.event_loop import cancel_until_done, try_all

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
MAX_SUBMITTING = 128
"""Jobs that one call submits at once. Only one while the pool is busy."""
READ_S = 0.002
"""Seconds of reading prompts, after which those that were read are submitted."""
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
    num_refusals: int = 0
    """How often the pool had refused jobs of the run when this one was submitted."""
    without_node_s: float | None = None
    """Loop time at which it was first refused for lack of a node."""


class Run:
    """The jobs of one call. At any time it holds a bounded number of prompts and results.

    The caller repeats `next_step`, and offers a prompt whenever the run wants one. A run belongs to one event loop.
    """

    def __init__(
        self,
        submit: Callable[[Prompt, int], Awaitable[AsyncJob]],
        ack: Callable[..., Awaitable[int]] | None,
        options: RunOptions,
        outage_s: float,
        open_runs: set[Run],
    ) -> None:
        """`ack` frees the results of jobs, named by their ids; None: they stay in Redis.

        `outage_s`: how long to wait for nodes that are gone. `open_runs`: what the client closes when it closes.
        """
        self._submit = submit
        self._ack = ack
        self._to_ack = list[str]()
        """Jobs whose results this process has."""
        self._acking: asyncio.Task[None] | None = None
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
        self._reading: _Entry | None = None
        """The prompt that is being read. Only one, so that the prompts keep their order."""
        self._submitting = set[_Entry]()
        """The prompts that are being read or submitted."""
        self._busy_turn = asyncio.Lock()
        """Held by the refused job that is submitted again: one at a time to a busy pool."""
        self._busy_until_s = 0.0
        """Loop time until which the pool asked to wait."""
        self._num_refusals = 0
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
        if (step := self._step()) is not None:
            return step
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
        self._reading = self._begin_job(read)

    async def offer_all(self, prompts: Sequence[Prompt | RunStep]) -> None:
        """Submit prompts, at most as many as the run wants. END is the last one."""
        for prompt in prompts:
            if isinstance(prompt, RunStep):
                self._has_all_prompts = True
                self._changed.set()
            else:
                self._begin_job(None, prompt)

    @property
    def num_wanted(self) -> int:
        """How many prompts the run wants now."""
        if self._has_all_prompts or self._reading is not None:
            return 0
        may_open = self._window.size - len(self._tasks)
        may_be_unread = UNREAD_PER_OPEN * self._window.size - len(self._entries)
        # The first job alone, because what is wrong with it may be wrong with all.
        is_alone = self._busy_turn.locked() or not self._num_accepted
        may_submit = (1 if is_alone else MAX_SUBMITTING) - len(self._submitting)
        return max(0, min(may_open, may_be_unread, may_submit))

    def _begin_job(self, read: ReadPrompt | None, prompt: Prompt = "") -> _Entry:
        entry = self._new_entry(prompt)
        self._submitting.add(entry)
        self._tasks[entry] = asyncio.create_task(self._run_job(entry, read), name="penstock job of a run")
        return entry

    def _new_entry(self, prompt: Prompt = "") -> _Entry:
        entry = self._entries[self._num_prompts] = _Entry(self._num_prompts, prompt)
        self._num_prompts += 1
        return entry

    async def answers(self, prompts: Iterable[Prompt] | AsyncIterable[Prompt]) -> AsyncGenerator[Answered, None]:
        """Run all prompts and yield their answers. Each prompt is read when the pool can take it."""
        if isinstance(prompts, AsyncIterable):
            source = aiter(prompts)
            offer = partial(self.offer, lambda: anext(source, RunStep.END))
        else:
            offer = partial(self._offer_next, iter(prompts))
        try:
            while (step := await self.next_step()) is not RunStep.END:
                if isinstance(step, Answered):
                    yield step
                else:
                    await offer()
        finally:
            await self.close()

    async def _offer_next(self, prompts: Iterator[Prompt]) -> None:
        """Read and submit as many prompts as the run wants."""
        found = list[Prompt | RunStep]()
        try:
            found.extend(next_prompts(prompts, self.num_wanted))
        except Exception as error:
            await self.offer_all(found)
            # The caller gets it after the answers to the prompts before.
            entry = self._new_entry()
            entry.outcome = error
            self._has_all_prompts = True
            self._note_outcome(entry)
        else:
            await self.offer_all(found)

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
        if self.num_wanted:
            return RunStep.WANTS_PROMPT
        if (answer := self._take_answer()) is not None:
            return answer
        is_over = self._has_all_prompts and not self._entries and self._acking is None
        return RunStep.END if is_over else None

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

    async def _run_job(self, entry: _Entry, read: ReadPrompt | None) -> None:
        try:
            if read is not None:
                prompt = await read()
                self._reading = None
                if isinstance(prompt, RunStep):
                    self._has_all_prompts = True
                    del self._entries[entry.index]
                    return
                entry.prompt = prompt
                self._changed.set()
            entry.outcome = await self._result_of(entry)
        except Exception as error:
            # The caller gets it in place of the answer. Nothing more is submitted.
            entry.outcome = error
            self._has_all_prompts = True
        finally:
            self._note_end(entry)

    def _note_end(self, entry: _Entry) -> None:
        del self._tasks[entry]
        self._submitting.discard(entry)
        if self._reading is entry:
            self._reading = None
        self._note_outcome(entry)

    def _note_outcome(self, entry: _Entry) -> None:
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
        self._submitting.discard(entry)
        self._changed.set()
        result = await entry.job.result(check=self._options.check)
        if self._ack is not None:
            self._to_ack.append(result.job_id)
            if self._acking is None:
                self._acking = asyncio.create_task(self._ack_results(self._ack), name="penstock acks of a run")
        return result

    async def _ack_results(self, ack: Callable[..., Awaitable[int]]) -> None:
        """Free the results of ended jobs, together those that end at the same time."""
        while self._to_ack:
            job_ids, self._to_ack = self._to_ack, []
            # If Redis is away, the results expire by themselves.
            with suppress(UnavailableError):
                await ack(*job_ids)
        self._acking = None
        self._changed.set()

    async def _accepted(self, entry: _Entry) -> AsyncJob:
        """Submit a job, as often as necessary. Raises errors that waiting does not cure."""
        job = await self._try_to_submit(entry)
        if job is None:
            async with self._busy_turn:
                while job is None:
                    await asyncio.sleep(self._busy_until_s - asyncio.get_running_loop().time())
                    job = await self._try_to_submit(entry)
        return job

    async def _try_to_submit(self, entry: _Entry) -> AsyncJob | None:
        """Submit a job. Return None if the pool asks to wait."""
        entry.num_refusals = self._num_refusals
        try:
            return await self._submit(entry.prompt, entry.index)
        except (BusyError, UnavailableError) as error:
            self._note_refusal(entry, error)
            return None

    def _note_refusal(self, entry: _Entry, error: BusyError | UnavailableError) -> None:
        """Note when the pool may accept jobs again. Raises an error that waiting does not cure."""
        now_s = asyncio.get_running_loop().time()
        if isinstance(error, UnavailableError):
            # A pool that accepted earlier jobs may get its nodes back.
            entry.without_node_s = entry.without_node_s or now_s
            is_over = now_s >= entry.without_node_s + self._outage_s
            if error.code != "no_node" or not self._num_accepted or is_over:
                raise error
        elif entry.num_refusals == self._num_refusals:
            # Once for all jobs that were submitted together.
            self._num_refusals += 1
            self._window.note_refused(len(self._tasks) - len(self._submitting))
        pause_s = error.retry_after_ms / 1000 * random.uniform(1, 1 + JITTER)
        self._busy_until_s = max(self._busy_until_s, now_s + pause_s)

    # The end ----------------------------------------------------------------------------------------

    async def _end_jobs(self) -> None:
        tasks = dict(self._tasks)
        await cancel_until_done(tasks.values())
        if (acking := self._acking) is not None:
            await asyncio.wait((acking,), timeout=CANCEL_S)
            await cancel_until_done((acking,))
        if not self._options.leaves_jobs:
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await try_all([entry.job.cancel for entry in tasks if entry.job is not None])
        self._open_runs.discard(self)
        self._changed.set()


def next_prompts(prompts: Iterator[Prompt], count: int) -> Iterator[Prompt | RunStep]:
    """Yield up to `count` prompts, but only those that can be read within READ_S. END follows the last prompt."""
    end_s = time.monotonic() + READ_S
    for _ in range(count):
        prompt = next(prompts, RunStep.END)
        yield prompt
        if prompt is RunStep.END or time.monotonic() > end_s:
            return


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
