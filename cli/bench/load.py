"""Sends the planned requests when they are due, even if the server has not answered earlier ones."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from random import Random
from typing import Any

from penstock.cli.bench.commands import LimitOptions, WorkloadOptions
from penstock.cli.bench.connection import AnswerReader, Connections
from penstock.cli.bench.prompts import (
    HASH_BLOCK_TOKENS,
    TokenRatio,
    TracedRequest,
    hashed_words,
    random_lengths,
    read_dataset,
    read_trace,
    sampled,
    words,
)
from penstock.cli.bench.summary import Target

# Records of one request: its plan, and its measurements.

Prompt = str | list[dict[str, Any]]
"""A text, or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of the load: when it is due, in seconds after the start, and what it asks for."""

    due_s: float
    prompt: Prompt
    max_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """The measurements of one request. Times are seconds after the start of the load; 0 until they are known."""

    due_s: float
    ready_s: float = 0.0
    """When the load generator turned to the request; the difference to `due_s` is its own lateness."""
    sent_s: float = 0.0
    """When the request was sent. It is later than `ready_s` by the wait for one of `--max-concurrency` slots."""
    token_events_s: array[float] = field(default_factory=lambda: array("d"))
    """When each event with text arrived."""
    end_s: float = 0.0
    """When the last event of the answer's choices arrived."""
    prompt_tokens: int | None = None
    usage_tokens: int | None = None
    """Tokens of the answer by the server's usage; None if it reported none."""
    is_over: bool = False
    """Whether it was answered or failed; not while it runs, and not if it never started."""
    finish_reason: str = ""
    error: str = ""
    """Why the request failed, in words that are the same for all failures of a kind."""
    detail: str = ""
    """The server's message beside `error`."""

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: as the server counted them, else its events with text."""
        return len(self.token_events_s) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token, from sending the request."""
        return self.token_events_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time from sending the request to the end of the answer."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one; None if there is only one."""
        num_more = self.output_tokens - 1
        return (self.end_s - self.token_events_s[0]) / num_more if num_more > 0 else None

    @property
    def itl_s(self) -> list[float]:
        """Times between consecutive events with text."""
        events = self.token_events_s
        return [after - before for before, after in pairwise(events)]


# When requests arrive.


def arrival_times(num_requests: int, rate_per_s: float, burstiness: float, random: Random) -> list[float]:
    """Return when each request is due, in seconds after the start.

    The times between arrivals have a gamma distribution of shape `burstiness` and mean 1 / `rate_per_s`. With
    burstiness 1 the arrivals are a Poisson process; below 1 they come in bursts, above 1 they are more even. An
    infinite rate makes all due at once.
    """
    if math.isinf(rate_per_s):
        return [0.0] * num_requests
    scale = 1 / (rate_per_s * burstiness)
    return list(accumulate(random.gammavariate(burstiness, scale) for _ in range(num_requests)))


# Makes the requests of a load.

DEFAULT_NUM_PROMPTS = 100
DEFAULT_ANSWER_TOKENS = 128
"""Length of an answer, in tokens, if the dataset's file does not state it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The options that decide which requests arrive when, and how the server counts words."""

    options: WorkloadOptions
    ratio: TokenRatio

    def plan(self) -> list[PlannedRequest]:
        """Return the requests in order of arrival. Equal options give equal requests. Raises RequestError."""
        options = self.options
        if options.trace is not None:
            lines = read_trace(options.trace, options.num_prompts)
            return [self._traced(number, line) for number, line in enumerate(lines)]
        random = Random(options.seed)
        prompts = self._prompts(random)
        times = arrival_times(len(prompts), options.request_rate, options.burstiness, random)
        return [PlannedRequest(due_s, *prompt) for due_s, prompt in zip(times, prompts, strict=True)]

    def warmups(self, num_warmups: int) -> list[PlannedRequest]:
        """Return requests of words that the plan does not have, so that no prefix cache knows the plan's."""
        random = Random(f"warmup {self.options.seed}")
        num_words, num_output = self.ratio.num_words(self.options.random_input_len), self.options.random_output_len
        return [PlannedRequest(0.0, words(random, num_words), num_output) for _ in range(num_warmups)]

    def _prompts(self, random: Random) -> list[tuple[Prompt, int]]:
        options, ratio = self.options, self.ratio
        num_prompts = options.num_prompts or DEFAULT_NUM_PROMPTS
        if options.dataset_path is not None:
            given = options.dataset_output_len
            samples = sampled(read_dataset(options.dataset_path), num_prompts, random)
            return [(prompt, given or length or DEFAULT_ANSWER_TOKENS) for prompt, length in samples]
        prefix = words(random, round(options.random_prefix_len / ratio.tokens_per_word))
        spread = options.random_range_ratio
        inputs = random_lengths(options.random_input_len, spread, num_prompts, random)
        outputs = random_lengths(options.random_output_len, spread, num_prompts, random)
        texts = (f"{prefix} {words(random, ratio.num_words(length))}".lstrip() for length in inputs)
        return list(zip(texts, outputs, strict=True))

    def _traced(self, number: int, traced: TracedRequest) -> PlannedRequest:
        due_s = traced.arrival_s / self.options.trace_speed
        if traced.prompt is not None:
            return PlannedRequest(due_s, traced.prompt, traced.num_output_tokens)
        num_words = self.ratio.num_words(traced.num_prompt_tokens)
        if traced.hash_ids:
            words_per_block = max(1, round(HASH_BLOCK_TOKENS / self.ratio.tokens_per_word))
            prompt = hashed_words(traced.hash_ids, num_words, words_per_block)
        else:
            prompt = words(Random(f"{self.options.seed} {number}"), num_words)
        return PlannedRequest(due_s, prompt, traced.num_output_tokens)


@dataclass(frozen=True, slots=True)
class Measured:
    """The records of a load in order of arrival, and its duration and CPU time."""

    records: tuple[RequestRecord, ...]
    duration_s: float
    client_cpu_s: float
    """CPU time of this process during the load."""
    num_unfinished: int = 0
    """Requests that Ctrl-C left without an end. They are not among the records."""


@dataclass(frozen=True)
class Load:
    """An open loop: a request is sent when it is due, not when an earlier answer has come.

    `max_concurrency` bounds the open requests; those beyond it wait. No request is sent after `duration`.
    """

    target: Target
    connections: Connections
    limits: LimitOptions

    async def run(self, plan: Sequence[PlannedRequest], on_end: Callable[[RequestRecord], None]) -> Measured:
        """Run the whole plan, and call `on_end` after each request. Ctrl-C ends it early."""
        bodies = [self.target.request(planned.prompt, planned.max_tokens) for planned in plan]
        slots = asyncio.Semaphore(self.limits.max_concurrency) if self.limits.max_concurrency else None
        records: list[RequestRecord] = []
        start_cpu_s, start_s = time.process_time(), time.perf_counter()
        num_unfinished = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                for planned, body in zip(plan, bodies, strict=True):
                    wait_s = start_s + planned.due_s - time.perf_counter()
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                    record = RequestRecord(planned.due_s)
                    records.append(record)
                    tasks.create_task(self._send(body, record, slots, start_s, on_end))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            num_unfinished = len(plan) - sum(record.is_over for record in records)
        duration_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        over = tuple(record for record in records if record.is_over)
        return Measured(over, duration_s, cpu_s, num_unfinished)

    async def _send(
        self,
        body: bytes,
        record: RequestRecord,
        slots: asyncio.Semaphore | None,
        start_s: float,
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        record.ready_s = time.perf_counter() - start_s
        async with AsyncExitStack() as stack:
            now_s = record.ready_s
            if slots is not None:
                await stack.enter_async_context(slots)
                now_s = time.perf_counter() - start_s
            if self.limits.duration is not None and now_s > self.limits.duration:
                return
            record.sent_s = now_s
            await self.connections.exchange(body, AnswerReader(record), start_s, self.limits.request_timeout)
            record.is_over = True
            on_end(record)
