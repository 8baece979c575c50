"""One engine with 16 sequences that always decode. It prints `ready`, waits for a line, measures, prints JSON.

Arguments: seconds to measure, then settings of EngineConfig as one JSON object.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time

from bench.stopwatch import percentile
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.engine import Engine
from penstock.gpu_node.engine.records import EngineRequest

NUM_SEQS = 16
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 200
WARM_UP_S = 1.0


class Load:
    """Keeps NUM_SEQS requests in the engine: a request that ends is followed by another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rng = random.Random(0)
        self._num_added = 0
        for i in range(NUM_SEQS):
            # Staggered, so that prompts arrive one by one and not all in one step.
            self._add(OUTPUT_TOKENS * (i + 1) // NUM_SEQS)

    def step(self) -> int:
        """Run one step; return the number of tokens it delivered."""
        num_tokens = 0
        for output in self._engine.step():
            num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._add(OUTPUT_TOKENS)
        self._engine.wait()
        return num_tokens

    def _add(self, num_output: int) -> None:
        prompt = [self._rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        self._engine.add(EngineRequest(str(self._num_added), prompt, params, seed=0))
        self._num_added += 1


def run(load: Load, seconds: float) -> dict[str, float]:
    """Step for some seconds; return tokens per second and the steps' lengths in milliseconds."""
    num_tokens, steps_ms = 0, []
    start_s = before_s = time.monotonic()
    while before_s - start_s < seconds:
        num_tokens += load.step()
        now_s = time.monotonic()
        steps_ms.append((now_s - before_s) * 1e3)
        before_s = now_s
    return {
        "tokens_per_s": num_tokens / (before_s - start_s),
        "median_ms": statistics.median(steps_ms),
        "p99_ms": percentile(steps_ms, 99),
        "longest_ms": max(steps_ms),
        "num_steps": len(steps_ms),
    }


def main() -> None:
    """Load the engine, and measure it when the parent process asks for it."""
    seconds, settings = float(sys.argv[1]), json.loads(sys.argv[2])
    engine = Engine(EngineConfig(kv_cache_dtype="int8", **settings))
    engine.bind_thread()
    load = Load(engine)
    run(load, WARM_UP_S)
    print("ready", flush=True)
    sys.stdin.readline()
    run(load, WARM_UP_S)
    print(json.dumps(run(load, seconds)), flush=True)


if __name__ == "__main__":
    # As in a node, the engine has a thread of its own.
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
