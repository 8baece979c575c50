"""A synthetic load on the engine's scheduler, with steps planned while the one ahead of them runs, or after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench_gpu.measure import Clock
from bench_gpu.models import BLOCK_SIZE, Model
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.budget import StepLimits
from penstock.gpu_node.engine.scheduler.scheduler import LearnedTimes, Scheduler
from penstock.gpu_node.engine.sequence import Sequence as Choice
from penstock.gpu_node.engine.steps import InFlightSteps
from penstock.gpu_node.engine.text.output import EndRule
from penstock.gpu_node.model.protocol import ModelRunner, StepHandle, StepPlan


@dataclass(frozen=True)
class Whole:
    """What a scheduler wants to know of a request's parameters, without pydantic: it draws from the whole softmax."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None


class OneByOne:
    """A runner that is given a step when it has none."""

    max_in_flight = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step."""
        return self._runner.submit(plan)


Lengths = NDArray[np.int64]
"""[num_requests, 2]: tokens of prompt and output."""
_PROMPTS, _OUTPUTS = (5.02, 1.5), (4.77, 1.1)
"""Mean and standard deviation of the logarithms of ShareGPT's lengths; see `sharegpt_lengths`."""
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


def uniform_lengths(count: int, shortest: int, longest: int, seed: int = 0) -> Lengths:
    """Return lengths as nano-vllm's benchmark draws them."""
    return np.random.default_rng(seed).integers(shortest, longest + 1, size=(count, 2))


def sharegpt_lengths(count: int, seed: int = 0, *, divisor: int = 1) -> Lengths:
    """Return lengths like those of ShareGPT, by formula: log-normal, within the limits of vLLM's `benchmark_serving`.

    These limits are 4 to 1,024 prompt tokens and 2,048 tokens in all. The constants give averages of 217
    prompt tokens and 200 output tokens. divisor: shortens all lengths.
    """
    rng = np.random.default_rng(seed)
    means, deviations = np.array([_PROMPTS, _OUTPUTS]).T
    drawn = np.exp(rng.normal(means, deviations, size=(8 * count, 2))).astype(np.int64)
    prompts, totals = drawn[:, 0], drawn.sum(axis=1)
    fits = (drawn >= _SHORTEST).all(axis=1) & (prompts <= _LONGEST_PROMPT) & (totals <= _LONGEST)
    chosen: Lengths = np.maximum(drawn[fits][:count] // divisor, 1)
    return chosen


def make_requests(lengths: Lengths, seed: int = 0) -> list[Choice]:
    """Return requests of these lengths with random prompts; nothing ends before its length."""
    rng = np.random.default_rng(seed)
    params: Any = Whole()
    return [
        Choice(
            request_id=str(i),
            choice=0,
            params=params,
            seed=i,
            token_ids=rng.integers(1, 60, size=num_prompt, dtype=np.int32),
            num_prompt_tokens=num_prompt,
            end_rule=EndRule(frozenset(), 0, num_output),
        )
        for i, (num_prompt, num_output) in enumerate(lengths.tolist())
    ]


class Driver:
    """An engine without text: it schedules, submits and commits."""

    def __init__(self, model: Model, requests: list[Choice], budget: int, *, overlap: bool) -> None:
        limits = StepLimits(BLOCK_SIZE, model.max_num_seqs, budget, budget, model.max_model_len)
        self._scheduler = Scheduler(KvCacheManager(model.sizes.num_device_blocks), limits, LearnedTimes("recompute", 0))
        self._runner: Any = model.runner if overlap else OneByOne(model.runner)
        self._flights = InFlightSteps()
        self.num_tokens = self.num_steps = self.num_ahead = 0
        for request in requests:
            self._scheduler.add(request)

    def run(self) -> None:
        """All of it."""
        self._launch()
        while self._flights:
            flight = self._flights.complete()
            landed = self._scheduler.commit(flight.step, flight.result().tokens)
            self.num_tokens += len(landed.token_ids)
            self._launch()

    def _launch(self) -> None:
        while self._flights.can_launch(self._runner):
            is_ahead = bool(self._flights)
            step = self._scheduler.schedule_ahead() if is_ahead else self._scheduler.schedule()
            if step is None:
                return
            self._flights.launch(self._runner, step, self._scheduler.plan)
            self.num_steps += 1
            self.num_ahead += is_ahead


def timed_load(model: Model, clock: Clock, lengths: Lengths, budget: int, *, overlap: bool = True) -> dict[str, Any]:
    """Return the time of requests that are all there at once. budget: tokens of a step."""
    driver = Driver(model, make_requests(lengths), budget, overlap=overlap)
    ms = clock.wall_ms(driver.run)
    done = {"tokens": driver.num_tokens, "steps": driver.num_steps, "steps_ahead": driver.num_ahead}
    return {"overlap": overlap, "ms": ms, "tokens_s": driver.num_tokens / ms * 1e3, **done}
