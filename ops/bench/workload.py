"""What is asked: the offline mix and the single stream. Deterministic: the same seed gives the same requests."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

FIRST_ORDINARY_TOKEN = 1000
LAST_ORDINARY_TOKEN = 40_000


@dataclass(frozen=True)
class BenchRequest:
    """A prompt in token ids, and how many tokens to generate (greedy, eos ignored)."""

    prompt: list[int]
    num_output: int


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ORDINARY_TOKEN, LAST_ORDINARY_TOKEN) for _ in range(count)]


def offline_mix(num_requests: int = 64, *, seed: int = 0) -> list[BenchRequest]:
    """Prompts of 16–512 and outputs of 16–256 tokens, log-uniform; every third shares a prefix of 128 tokens."""
    rng = random.Random(seed)
    prefix = _tokens(rng, 128)
    requests = []
    for i in range(num_requests):
        length, output = _log_uniform(rng, 16, 512), _log_uniform(rng, 16, 256)
        shared = prefix[: length - 1] if i % 3 == 0 else []
        requests.append(BenchRequest(shared + _tokens(rng, length - len(shared)), output))
    return requests


def single_stream(*, seed: int = 1) -> list[BenchRequest]:
    """One request, 32 → 128."""
    return [BenchRequest(_tokens(random.Random(seed), 32), 128)]
