"""The calls of `AsyncClient` that run many jobs, and the prompts that they take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, Unpack, cast

from penstock.contract.errors import RequestError
from penstock.contract.job import JobOptions, SubmitOptions
from penstock.contract.output import Result
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.prompts import prompts_of
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.request import Prompt
from penstock.producer.client.run import MAX_IN_FLIGHT, Answer, Run, RunOptions
from penstock.producer.client.signature import with_options
from penstock.runtime.gather import try_all


class GenerateOptions(JobOptions, total=False):
    """Keyword arguments of `generate` and `map`: those of `JobOptions`, for all jobs, and these.

    timeout: seconds for the whole call; no limit by default.
    check: raise the error of a job that failed; otherwise its result has its `outcome`.
    max_in_flight: how many jobs may be open at once.
    """

    timeout: float | None
    check: bool
    max_in_flight: int


DEFAULTS = {"background": False, "check": True, "max_in_flight": MAX_IN_FLIGHT}
"""The defaults that differ from those of `submit`."""
_OF_RUN = GenerateOptions.__annotations__.keys() - JobOptions.__annotations__.keys()
_OF_ONE_JOB = SubmitOptions.__annotations__.keys() - JobOptions.__annotations__.keys()


class ManyCalls(ABC):
    """The calls of `AsyncClient` that run many jobs."""

    def __init__(self, outage_s: float) -> None:
        """`outage_s`: how long to wait for nodes that are gone."""
        self._outage_s = outage_s
        self._runs: set[Run] = set()

    @abstractmethod
    async def submit(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> AsyncJob:
        """Enqueue a job."""

    @with_options(GenerateOptions, **DEFAULTS)
    async def generate(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]) -> list[Result]:
        """Run prompts to their end and return their results, in the order of the prompts; `Engine.generate` is alike.

        A single prompt (a text, token ids or a chat) counts as a list of one. `GenerateOptions` lists the options. Up
        to `max_in_flight` jobs are open at once. While the pool is busy, the call waits as long as the pool asks for,
        and keeps fewer jobs open. It raises other errors at once: RequestError for a wrong option, and
        UnavailableError if there is no node at first, or none for `outage_s` later.

        After `timeout` seconds it raises ResultTimeoutError. After that or another error, a cancellation or Ctrl-C, it
        cancels its open jobs. With `background=True` they go on instead. If the process is killed, the queue cancels
        them soon, unless they are `background`.

        With an `idempotency_key`, the prompt at index i gets the key `<idempotency_key>:<i>`. If the call is repeated,
        in any process, it finds the jobs of the first one. So an early end leaves such jobs to the queue, as a killed
        process does.
        """
        run = self.new_run(options, in_order=False)
        async with aclosing(run.answers(prompts_of(prompts))) as answers:
            results = {answer.index: answer.result async for answer in answers}
        return [results[index] for index in range(len(results))]

    @with_options(GenerateOptions, **DEFAULTS)
    def map(
        self, prompts: Iterable[Prompt] | AsyncIterable[Prompt], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Result, None]:
        """Run prompts and yield their results, in the order of the prompts.

        It reads a prompt only when the pool can take it and the caller waits for a result. So a million prompts take
        the memory of `max_in_flight` jobs and of four times as many results. The results before a failed one come
        first. All else is as in `generate`. A loop that may end early needs `contextlib.aclosing`, as with any
        asynchronous generator; otherwise the jobs are canceled when the garbage collector finds it.
        """
        run = self.new_run(options, in_order=True)
        return _results(run.answers(checked(prompts)))

    @with_options(GenerateOptions, **DEFAULTS)
    def map_unordered(
        self, prompts: Iterable[Prompt] | AsyncIterable[Prompt], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[tuple[Prompt, Result], None]:
        """Run prompts and yield pairs of prompt and result as the jobs end. All else is as in `map`."""
        run = self.new_run(options, in_order=False)
        return _pairs(run.answers(checked(prompts)))

    def new_run(self, options: GenerateOptions, *, in_order: bool) -> Run:
        """Return a run whose jobs have these options. Raises RequestError for options that jobs cannot share."""
        if wrong := sorted(_OF_ONE_JOB & options.keys()):
            raise RequestError(f"{wrong[0]}: allowed only in submit", param=wrong[0])
        key = options.get("idempotency_key")
        # Jobs with a key may have other readers.
        leaves_jobs = bool(options.get("background")) or key is not None
        how = {name: value for name, value in options.items() if name in _OF_RUN}
        of_job = {"background": False, **{name: value for name, value in options.items() if name not in _OF_RUN}}

        async def submit(prompt: Prompt, index: int) -> AsyncJob:
            own = {} if key is None else {"idempotency_key": f"{key}:{index}"}
            return await self.submit(prompt, **cast(SubmitOptions, {**of_job, **own}))

        run_options = RunOptions(in_order=in_order, leaves_jobs=leaves_jobs, **cast(Any, how))
        return Run(submit, run_options, self._outage_s, self._runs)

    async def close_runs(self) -> None:
        """End all runs. Their callers get UnavailableError."""
        await try_all([run.close for run in self._runs])


AnyPrompts = TypeVar("AnyPrompts", bound=Iterable[Prompt] | AsyncIterable[Prompt])


def checked(prompts: AnyPrompts) -> AnyPrompts:
    """Return the prompts of `map`. Raises RequestError for a single text, which would be a prompt per character."""
    if isinstance(prompts, (str, bytes, PackedPrompt)) or not isinstance(prompts, (Iterable, AsyncIterable)):
        raise RequestError("prompts must be an iterable of prompts, such as a list or an open file", param="prompts")
    return prompts


async def _results(answers: AsyncGenerator[Answer, None]) -> AsyncGenerator[Result, None]:
    async with aclosing(answers):
        async for answer in answers:
            yield answer.result


async def _pairs(answers: AsyncGenerator[Answer, None]) -> AsyncGenerator[tuple[Prompt, Result], None]:
    async with aclosing(answers):
        async for answer in answers:
            yield answer.prompt, answer.result
