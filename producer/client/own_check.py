"""Checks that callers themselves make of results: a refused result is followed by a job with a new seed."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

from penstock.contract.durations import seconds_of
from penstock.contract.errors import RequestError
from penstock.contract.job import SubmitOptions
from penstock.contract.output import Outcome, Result
from penstock.contract.retries import MAX_ATTEMPTS, MAX_RETRY_BACKOFF_S, OUTPUT_REJECTED
from penstock.producer.client.job import AsyncJob, checked_by
from penstock.producer.client.request import Prompt

_PAUSE_S = 1.0
"""The mean pause before a second attempt, if the caller names none."""
_NO_TOKENS = (0, 0, 0, 0)

Submit = Callable[..., Awaitable[AsyncJob]]


class CheckedSubmission:
    """A submission whose results the caller checks, if `check_output` is a function."""

    def __init__(self, prompt: Prompt, options: SubmitOptions) -> None:
        accepts = options.get("check_output")
        self._accepts = accepts if callable(accepts) else None
        self._prompt = prompt
        self._number = 1
        self._spent = _NO_TOKENS
        self._submit: Submit | None = None
        self.options = options
        """The options of the present attempt."""
        if self._accepts is not None:
            self.options = cast(SubmitOptions, {n: one for n, one in options.items() if n != "check_output"})
            self._most = options.get("max_attempts") or 1
            if not isinstance(self._most, int) or not 1 <= self._most <= MAX_ATTEMPTS:
                raise RequestError(f"max_attempts must be from 1 to {MAX_ATTEMPTS}", param="max_attempts")

    def watched(self, job: AsyncJob, submit: Submit) -> AsyncJob:
        """Return the job of this attempt, with the check that its result is to pass."""
        if self._accepts is None:
            return job
        self._submit = submit
        return checked_by(job, self)

    async def next_after(self, result: Result) -> Result | AsyncJob:
        """Return the result if it is accepted or the last one, then as a failed one; else the next attempt's job."""
        usage = result.usage and result.usage.plus(self._spent)
        if await self._is_accepted(result):
            return replace(result, usage=usage)
        message = f"check_output: the caller's check refused the output of attempt {self._number}"
        if self._number >= self._most:
            return replace(result, usage=usage, outcome=Outcome("failed", OUTPUT_REJECTED, message, "check_output"))
        self._spent = _NO_TOKENS if usage is None else usage.all_counts()
        await asyncio.sleep(self._pause_s())
        self._number += 1
        return await self._again(result.job_id)

    async def _is_accepted(self, result: Result) -> bool:
        accepts = cast(Callable[[Result], Any], self._accepts)
        if inspect.iscoroutinefunction(accepts):
            return bool(await accepts(result))
        # It may take long, and this is the event loop of all streams.
        return bool(await asyncio.to_thread(accepts, result))

    def _pause_s(self) -> float:
        given = self.options.get("retry_backoff_s")
        mean_s = _PAUSE_S if given is None else seconds_of("retry_backoff_s", given)
        return min(MAX_RETRY_BACKOFF_S, mean_s * 2.0 ** (self._number - 1)) * random.uniform(0.5, 1.5)

    async def _again(self, refused: str) -> AsyncJob:
        options: dict[str, Any] = {**self.options, "retry_of": refused, "job_id": None}
        if (key := options.get("idempotency_key")) is not None:
            options["idempotency_key"] = f"{key}:attempt{self._number}"
        if (seed := options.get("seed")) is not None:
            options["seed"] = seed + self._number - 1
        if (params := options.get("params")) is not None and params.seed is not None:
            options["params"] = params.model_copy(update={"seed": params.seed + self._number - 1})
        submit = cast(Submit, self._submit)
        return checked_by(await submit(self._prompt, **options), self)
