"""The options of a load, its plan, and the open loop that sends it: a request goes out when it is due.

The docstrings of options are the help texts of `penstock bench serve`. Their names are vLLM's where it has them.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from penstock.cli.bench.connection import AnswerRecorder, Connections
from penstock.cli.bench.prompts import (
    HASH_BLOCK_TOKENS,
    PlannedRequest,
    Prompt,
    RequestRecord,
    TokenRatio,
    TracedRequest,
    hashed_words,
    random_lengths,
    read_dataset,
    read_trace,
    sampled,
    words,
)
from penstock.cli.bench.target import Target
from penstock.cli.server_url import OWN_VARIABLE, usual_url

SLO_METRICS = ("ttft", "tpot", "e2el")
PLOT_SUFFIXES = (".svg", ".png", ".pdf")
MAX_NUM_PROMPTS = 1_000_000


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerOptions(_Options):
    """The server that gets the requests, and what all requests have in common."""

    base_url: str = Field(default_factory=partial(usual_url, (OWN_VARIABLE,)))
    """URL of the server, with or without /v1. Default: $PENSTOCK_URL, or this machine's."""
    model: str | None = None
    """Model to request. Default: the first of /v1/models."""
    endpoint: str = "chat"
    """chat, completions, or a path such as /v1/chat/completions."""
    api_key: str | None = None
    """API key of the server. Default: $OPENAI_API_KEY."""
    header: tuple[str, ...] = ()
    """Header of every request, as NAME=VALUE. Repeat it for several."""
    extra_body: str = "{}"
    """JSON object with more fields of every body."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature. Default: the server's."""
    ignore_eos: bool = False
    """Ask for answers of exactly the wanted length."""

    @field_validator("header")
    @classmethod
    def _has_names(cls, headers: tuple[str, ...]) -> tuple[str, ...]:
        for header in headers:
            if not header.partition("=")[1] or not header.partition("=")[0].strip():
                raise ValueError(f"{header!r} is not NAME=VALUE")
        return headers

    @field_validator("extra_body")
    @classmethod
    def _is_object(cls, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object")
        return text

    @property
    def body(self) -> dict[str, Any]:
        """Fields of every body beside model, prompt and length."""
        fields: dict[str, Any] = {"ignore_eos": True} if self.ignore_eos else {}
        fields |= {"temperature": self.temperature} if self.temperature is not None else {}
        return fields | dict(json.loads(self.extra_body))


class WorkloadOptions(_Options):
    """The requests of the load, and the times at which they arrive."""

    num_prompts: int | None = Field(default=None, ge=1, le=MAX_NUM_PROMPTS)
    """Number of requests. Default: 100, or all of a trace."""
    request_rate: float = Field(default=math.inf, gt=0)
    """Arrivals per second; inf: all at once."""
    burstiness: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Shape of the gamma distribution of the times between arrivals. 1: a Poisson process; below 1: bursts."""
    trace: Path | None = None
    """Arrivals and lengths from a file: JSON lines (also Mooncake's) or CSV (Azure's, BurstGPT's)."""
    trace_speed: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Replay a trace this many times faster."""
    random_input_len: int = Field(default=256, ge=1)
    """Mean tokens of a prompt."""
    random_output_len: int = Field(default=128, ge=1)
    """Mean tokens of an answer."""
    random_range_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Lengths vary evenly by this share of the mean."""
    random_prefix_len: int = Field(default=0, ge=0)
    """Tokens before each prompt that all prompts share."""
    dataset_path: Path | None = None
    """Prompts from ShareGPT's JSON, or from JSON lines with prompt or messages."""
    dataset_output_len: int | None = Field(default=None, ge=1)
    """Tokens of a dataset's answers. Default: as in the file, else 128."""
    seed: int = 0
    """Equal seeds give equal requests."""

    @property
    def arrivals(self) -> str:
        """When requests arrive, in words."""
        if self.trace is not None:
            return f"trace {self.trace.name}"
        return f"{self.request_rate:g} a second" if math.isfinite(self.request_rate) else "all at once"


class LimitOptions(_Options):
    """Limits of the load."""

    max_concurrency: int | None = Field(default=None, ge=1)
    """Most open requests; further ones wait. Default: no limit."""
    duration: float | None = Field(default=None, gt=0)
    """Seconds after which no request starts. Default: no limit."""
    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds after which a request fails."""
    num_warmups: int = Field(default=0, ge=0, le=MAX_NUM_PROMPTS)
    """Requests before the load that are not measured."""


class OutputOptions(_Options):
    """The statistics to compute and the files to write."""

    goodput: tuple[str, ...] = ()
    """Count requests within limits in ms, such as ttft:200 tpot:50; also e2el."""
    metric_percentiles: str = "50,90,99"
    """Percentiles to compute."""
    output_json: str | None = None
    """Write the result and each request's measurements to this file; -: print them instead of the table."""
    plot: Path | None = None
    """Draw distributions and a timeline to this .svg or .png file; needs matplotlib (the extra `bench`)."""

    @field_validator("goodput")
    @classmethod
    def _has_limits(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in _split(words):
            metric, _, limit = word.partition(":")
            if metric not in SLO_METRICS or not _number(limit) > 0:
                raise ValueError(f"{word!r} is not METRIC:MS with a METRIC of {', '.join(SLO_METRICS)}")
        return words

    @field_validator("metric_percentiles")
    @classmethod
    def _has_percentiles(cls, text: str) -> str:
        if not all(0 <= _number(word) <= 100 for word in text.split(",")):
            raise ValueError("must be numbers from 0 to 100 with commas between them")
        return text

    @field_validator("plot")
    @classmethod
    def _has_suffix(cls, path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in PLOT_SUFFIXES:
            raise ValueError(f"the name must end in {', '.join(PLOT_SUFFIXES)}")
        return path

    @property
    def limits_ms(self) -> dict[str, float]:
        """Metric → limit of the goodput."""
        return {metric: float(limit) for metric, _, limit in (word.partition(":") for word in _split(self.goodput))}

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles as numbers."""
        return tuple(map(float, self.metric_percentiles.split(",")))


def _split(words: tuple[str, ...]) -> list[str]:
    return " ".join(words).replace(",", " ").split()


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


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
            await self.connections.exchange(body, AnswerRecorder(record), start_s, self.limits.request_timeout)
            record.is_over = True
            on_end(record)
