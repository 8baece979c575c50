"""What is asked, in token ids. Deterministic: the same seed gives the same requests. Greedy, end tokens ignored."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

FIRST_ORDINARY_TOKEN = 1000
LAST_ORDINARY_TOKEN = 40_000


@dataclass(frozen=True)
class BenchRequest:
    """A prompt, how many tokens to generate, and when it is asked, counted from the start of the run."""

    prompt: list[int]
    num_output: int
    at_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requests, and how they are put to an engine."""

    requests: list[BenchRequest]
    max_in_flight: int | None = None
    """None: each is sent at its time, whatever is still open. Else the next waits for an earlier one's end."""
    warm: bool = True
    """Whether the engine answers something else first, unmeasured."""
    rss_after: tuple[int, ...] = ()
    """After how many finished requests the memory is looked at."""
    parts: Mapping[str, Workload] = field(default_factory=dict)
    """Further workloads that the same process answers afterwards. Their metrics begin with their names."""

    def most_tokens(self, num_slots: int) -> int:
        """The most that prompts and outputs of requests under way can come to, `num_slots` of them at once."""
        lengths = sorted((len(r.prompt) + r.num_output for r in self.requests), reverse=True)
        own = sum(lengths[: min(num_slots, self.max_in_flight or num_slots)])
        return max((own, *(part.most_tokens(num_slots) for part in self.parts.values())))


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


def poisson(num_requests: int = 120, *, per_s: float = 4.0, seed: int = 3) -> list[BenchRequest]:
    """Requests like the mix's that come by chance, `per_s` of them a second on average."""
    return by_chance(offline_mix(num_requests, seed=seed), per_s=per_s, seed=seed)


def by_chance(requests: list[BenchRequest], *, per_s: float, seed: int) -> list[BenchRequest]:
    """The requests, the first at once, the others by chance, `per_s` of them a second on average."""
    rng = random.Random(seed)
    at_s = 0.0
    timed = []
    for request in requests:
        timed.append(replace(request, at_s=at_s))
        at_s += rng.expovariate(per_s)
    return timed


def shared_prefix(num_requests: int = 32, *, num_shared: int = 1024, seed: int = 4) -> list[BenchRequest]:
    """One long prefix, 16–64 tokens of each request's own, 32 tokens out."""
    rng = random.Random(seed)
    prefix = _tokens(rng, num_shared)
    return [BenchRequest(prefix + _tokens(rng, _log_uniform(rng, 16, 64)), 32) for _ in range(num_requests)]


def alike(num_requests: int, num_prompt: int, num_output: int, *, seed: int) -> list[BenchRequest]:
    """Requests of one shape that share nothing."""
    rng = random.Random(seed)
    return [BenchRequest(_tokens(rng, num_prompt), num_output) for _ in range(num_requests)]


WARM_UP = Workload(alike(2, 24, 8, seed=100), max_in_flight=1)

NUM_PROMPT_TOKENS = 512
"""Of the prompt whose time is compared with the machine's peak."""


def larger(num_alone: int, num_prompt: int, num_output: int) -> Workload:
    """For models of 1B parameters and more: single streams, as many long prompts, then 16 requests at once."""
    prompt = Workload(alike(num_alone, NUM_PROMPT_TOKENS, 1, seed=9), max_in_flight=1)
    batch = Workload(alike(16, num_prompt, num_output, seed=10))
    return Workload(alike(num_alone, 32, 64, seed=8), max_in_flight=1, parts={"prompt": prompt, "batch": batch})


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mix": lambda: Workload(offline_mix()),
    "prefix": lambda: Workload(shared_prefix()),
    "long": lambda: Workload(alike(1, 8000, 64, seed=5)),
    "single": lambda: Workload(alike(6, 32, 128, seed=1), max_in_flight=1),
    "poisson": lambda: Workload(poisson()),
    "startup": lambda: Workload(alike(1, 32, 1, seed=6), warm=False),
    "larger-1b": lambda: larger(2, 64, 48),
    "larger-3b": lambda: larger(1, 32, 24),
    "load": lambda: Workload(alike(1, 32, 1, seed=11), warm=False),
    "tiny": lambda: Workload(alike(10_000, 8, 2, seed=7), max_in_flight=64, rss_after=(2_000, 10_000)),
}
