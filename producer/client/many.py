"""The options and the runs of calls for many jobs, the prompts that they take, and lists of submissions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

from penstock.contract.errors import PenstockError, RequestError, UnavailableError
from penstock.contract.job import JobOptions, PackedPrompt, SubmitOptions
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.request import Prompt
from penstock.producer.client.run import MAX_IN_FLIGHT, Run, RunOptions
from penstock.runtime.event_loop import try_all

Submit = Callable[..., Awaitable[AsyncJob]]
"""A client's `submit`."""


class GenerateOptions(JobOptions, total=False):
    """Keyword arguments of `generate` and `map`: those of `JobOptions`, for all jobs, and these.

    timeout: seconds for the whole call; no limit by default.
    check: raise the error of a job that failed; otherwise its result has its `outcome`.
    max_in_flight: how many jobs may be open at once.
    """

    timeout: float | None
    check: bool
    max_in_flight: int


DEFAULTS = {"needs_reader": True, "check": True, "max_in_flight": MAX_IN_FLIGHT}
"""The defaults that differ from those of `submit`."""
_OF_RUN = GenerateOptions.__annotations__.keys() - JobOptions.__annotations__.keys()
_OF_ONE_JOB = SubmitOptions.__annotations__.keys() - JobOptions.__annotations__.keys()


class Runs:
    """The open runs of a client."""

    def __init__(self, ack: Callable[..., Awaitable[int]], outage_s: float) -> None:
        """`ack` is that of the client. `outage_s`: how long to wait for nodes that are gone."""
        self._ack = ack
        self._outage_s = outage_s
        self._open: set[Run] = set()

    def new(self, submit: Submit, options: GenerateOptions, *, in_order: bool) -> Run:
        """Return a run whose jobs have these options. Raises RequestError for options that jobs cannot share."""
        if wrong := sorted(_OF_ONE_JOB & options.keys()):
            raise RequestError(f"{wrong[0]}: allowed only in submit", param=wrong[0])
        key = options.get("idempotency_key")
        # Jobs with a key may have other readers.
        leaves_jobs = options.get("needs_reader") is False or key is not None
        how = {name: value for name, value in options.items() if name in _OF_RUN}
        of_job = {"needs_reader": True, **{name: value for name, value in options.items() if name not in _OF_RUN}}

        async def submit_one(prompt: Prompt, index: int) -> AsyncJob:
            own = {} if key is None else {"idempotency_key": f"{key}:{index}"}
            return await submit(prompt, **{**of_job, **own})

        run_options = RunOptions(in_order=in_order, leaves_jobs=leaves_jobs, **cast(Any, how))
        # With a key, a repeated call finds the results of the first one.
        ack = None if key is not None else partial(self._ack, tenant=options.get("tenant"))
        return Run(submit_one, ack, run_options, self._outage_s, self._open)

    async def close(self) -> None:
        """End all runs. Their callers get UnavailableError."""
        await try_all([run.close for run in self._open])


AnyPrompts = TypeVar("AnyPrompts", bound=Iterable[Any] | AsyncIterable[Any])


def checked(prompts: AnyPrompts) -> AnyPrompts:
    """Return the prompts of `map`. Raises RequestError for a single text, which would be a prompt per character."""
    if isinstance(prompts, (str, bytes, PackedPrompt)) or not isinstance(prompts, (Iterable, AsyncIterable)):
        raise RequestError("prompts must be an iterable of prompts, such as a list or an open file", param="prompts")
    return prompts


# Lists of submissions.

SubmitRequest: TypeAlias = Prompt | Mapping[str, Any]
"""A prompt, or the arguments of `submit` by name, among them `prompt`."""
SUBMITTED_AT_ONCE = 16
"""Submissions of a list that are on their way to Redis at the same time. More would hold the event loop."""

AnySubmitted = TypeVar("AnySubmitted")


async def submit_all(
    submit: Callable[..., Awaitable[AnySubmitted]],
    requests: Iterable[SubmitRequest | PenstockError],
    shared: JobOptions,
) -> list[AnySubmitted | PenstockError]:
    """Submit requests and return what `submit` returned or raised for each, in their order.

    An error in place of a request is its outcome. If Redis becomes unreachable, the rest is not tried. The options of a
    request precede the shared ones. With a shared `idempotency_key`, the request at index i has
    `<idempotency_key>:<i>`.

    This is the only place that submits lists.
    """
    if wrong := sorted(_OF_ONE_JOB & shared.keys()):
        raise RequestError(f"{wrong[0]}: allowed only for each request", param=wrong[0])
    calls = [_call_of(request, shared, index) for index, request in enumerate(requests)]
    outcomes: dict[int, AnySubmitted | PenstockError] = {}
    left, unreachable = iter(enumerate(calls)), list[UnavailableError]()

    async def work() -> None:
        for index, call in left:
            outcome = unreachable[0] if unreachable else await _outcome(submit, call)
            if isinstance(outcome, UnavailableError) and outcome.code in ("redis_away", "client_closed"):
                unreachable.append(outcome)
            outcomes[index] = outcome

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(SUBMITTED_AT_ONCE, len(calls))):
            tasks.create_task(work())
    return [outcomes[index] for index in range(len(calls))]


def _call_of(
    request: SubmitRequest | PenstockError, shared: JobOptions, index: int
) -> tuple[Prompt, dict[str, Any]] | PenstockError:
    if isinstance(request, PenstockError):
        return request
    key = shared.get("idempotency_key")
    common = {**shared, **({} if key is None else {"idempotency_key": f"{key}:{index}"})}
    if not isinstance(request, Mapping):
        return request, common
    own = dict(request)
    if "prompt" not in own:
        return RequestError("prompt: is required", param="prompt")
    return own.pop("prompt"), {**common, **own}


async def _outcome(
    submit: Callable[..., Awaitable[AnySubmitted]], call: tuple[Prompt, dict[str, Any]] | PenstockError
) -> AnySubmitted | PenstockError:
    if isinstance(call, PenstockError):
        return call
    prompt, options = call
    try:
        return await submit(prompt, **options)
    except PenstockError as error:
        return error
