"""What deciding, building and committing a step costs, without a model: `python -m bench.studies.plan_cost`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.budget import StepLimits
from penstock.gpu_node.engine.scheduler.scheduler import LearnedTimes, Scheduler
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.text.output import EndRule

BLOCK_SIZE = 16
NUM_STEPS = 400
NUM_WARM_UP = 20
PROMPT_TOKENS = 100
EOS = 2
VOCAB = 49_152


def main() -> None:
    """Prints µs a step; sequences stand at different places in their blocks, so each step fills and takes some."""
    for num_seqs in (1, 16, 64, 256):
        costs = list(_decode_costs_us(num_seqs))[NUM_WARM_UP:]
        print(
            f"{num_seqs:4} decoding: min {min(costs):6.1f}  median {statistics.median(costs):6.1f}  "
            f"mean {statistics.mean(costs):6.1f} µs a step"
        )


def _decode_costs_us(num_seqs: int) -> Iterator[float]:
    rng = np.random.default_rng(0)
    max_model_len = PROMPT_TOKENS + BLOCK_SIZE + NUM_STEPS
    scheduler = Scheduler(
        KvCacheManager(num_seqs * (max_model_len // BLOCK_SIZE + 1)),
        StepLimits(
            block_size=BLOCK_SIZE,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs * (PROMPT_TOKENS + BLOCK_SIZE),
            max_prefill_beside_decode=PROMPT_TOKENS,
            max_model_len=max_model_len,
        ),
        LearnedTimes("recompute", 0),
    )
    for i in range(num_seqs):
        scheduler.add(_sequence(i, rng.integers(EOS + 1, VOCAB, PROMPT_TOKENS + i % BLOCK_SIZE, dtype=np.int32)))
    for _ in range(NUM_STEPS):
        tokens = rng.integers(EOS + 1, VOCAB, num_seqs, dtype=np.int32)
        started_s = time.perf_counter()
        step = scheduler.schedule()
        if step is None:
            return
        scheduler.plan(step)
        scheduler.commit(step, tokens)
        yield (time.perf_counter() - started_s) * 1e6


def _sequence(number: int, prompt: np.typing.NDArray[np.int32]) -> Sequence:
    return Sequence(
        request_id=str(number),
        choice=0,
        params=SamplingParams(temperature=0),
        seed=number,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        end_rule=EndRule(frozenset((EOS,)), 0, NUM_STEPS),
    )


if __name__ == "__main__":
    main()
