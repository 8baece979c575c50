"""`… bench.studies.poisson_bound`: the least TTFT of the load by chance, by calculation.

It gives the requests of the workload `poisson` to a simulated node. Its steps take a fixed time, and more for each
token that they decode and each prompt token. The defaults are the bf16 times of SmolLM2-135M on 2 Zen 5 cores.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field

from bench.stopwatch import percentile
from bench.workload import BenchRequest, poisson

PREFIX_TOKENS = 128
BLOCK_TOKENS = 16
PERCENTS = (50, 90, 99)
BUDGETS_MS = (10.0, 20.0, 25.0, 30.0, 40.0, 80.0, float("inf"))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Milliseconds of a step."""

    fixed_ms: float
    decoded_ms: float
    """Of each token that it decodes."""
    prompt_ms: float
    """Of each prompt token."""

    def decode_ms(self, num_decoded: int) -> float:
        """Return the time of a step without prompt tokens."""
        return self.fixed_ms + self.decoded_ms * num_decoded


@dataclass(slots=True)
class _Request:
    at_ms: float
    num_prompt: float
    """Prompt tokens that are not computed yet."""
    num_output: int
    last_ms: float = 0.0


@dataclass(slots=True)
class Latencies:
    """What the callers see, in milliseconds."""

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)


def requests_of(requests: list[BenchRequest]) -> list[_Request]:
    """Return the requests without the shared prefix, which is cached after the first of those that have it."""
    asked = []
    for i, one in enumerate(requests):
        num_prompt = len(one.prompt)
        num_cached = min(PREFIX_TOKENS, num_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS if i and i % 3 == 0 else 0
        asked.append(_Request(one.at_s * 1000, num_prompt - num_cached, one.num_output))
    return asked


def simulate(requests: list[_Request], step: StepTime, budget_ms: float) -> Latencies:
    """Answer the requests in order of arrival. Beside decoding, prompts add at most `budget_ms` to a step."""
    coming, waiting, running = deque(requests), deque[_Request](), list[_Request]()
    seen, now_ms = Latencies(), 0.0
    while coming or waiting or running:
        if not waiting and not running:
            now_ms = max(now_ms, coming[0].at_ms)
        while coming and coming[0].at_ms <= now_ms:
            waiting.append(coming.popleft())
        decode_ms = step.decode_ms(len(running))
        limit_ms = max(budget_ms, decode_ms) if running else float("inf")
        num_prompt, first = _prefill(waiting, limit_ms / step.prompt_ms)
        now_ms += decode_ms + step.prompt_ms * num_prompt
        for one in running:
            seen.gaps_ms.append(now_ms - one.last_ms)
        seen.ttft_ms += [now_ms - one.at_ms for one in first]
        for one in (*running, *first):
            one.last_ms, one.num_output = now_ms, one.num_output - 1
        running = [one for one in (*running, *first) if one.num_output > 0]
    return seen


def _prefill(waiting: deque[_Request], budget: float) -> tuple[float, list[_Request]]:
    """Compute up to `budget` prompt tokens. Return their number, and the requests that get their first token."""
    num_prompt, first = 0.0, list[_Request]()
    while waiting and budget - num_prompt >= 1:
        count = min(waiting[0].num_prompt, budget - num_prompt)
        waiting[0].num_prompt -= count
        num_prompt += count
        if waiting[0].num_prompt <= 0:
            first.append(waiting.popleft())
    return num_prompt, first


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.studies.poisson_bound", description=__doc__)
    parser.add_argument("--fixed-ms", type=float, default=5.2)
    parser.add_argument("--decoded-ms", type=float, default=0.3)
    parser.add_argument("--prompt-ms", type=float, default=0.262, help="of a prompt token")
    parser.add_argument("--way-ms", type=float, default=4.0, help="that HTTP and the queue add to a first token")
    options = parser.parse_args()
    step = StepTime(options.fixed_ms, options.decoded_ms, options.prompt_ms)
    alone_ms = [step.fixed_ms + step.prompt_ms * one.num_prompt for one in requests_of(poisson())]
    print("| prompts beside decoding, ms a step | TTFT p50, ms | p90 | p99 | ITL p50 | p90 | p99 | longest |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| each request alone | {_row(alone_ms, options.way_ms)} | | | | |")
    for budget_ms in BUDGETS_MS:
        seen = simulate(requests_of(poisson()), step, budget_ms)
        gaps = f"{_row(seen.gaps_ms)} | {max(seen.gaps_ms):.0f}"
        print(f"| {budget_ms:g} | {_row(seen.ttft_ms, options.way_ms)} | {gaps} |")


def _row(times_ms: list[float], added_ms: float = 0.0) -> str:
    return " | ".join(f"{percentile(times_ms, percent) + added_ms:.1f}" for percent in PERCENTS)


if __name__ == "__main__":
    main()
