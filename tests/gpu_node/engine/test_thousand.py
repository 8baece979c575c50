"""Requests of every kind with a KV cache far too small: each answer is the same as if it ran alone.

Every run has 200 of them, `make check-full` a thousand.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes.engine_runs import check_idle, drain

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig, StepOutput
from penstock.gpu_node.engine.records import EngineRequest

MakeEngine = Callable[..., Engine]
ARRIVALS_PER_STEP = 8
NATIVE: dict[str, Any] = {"runner": "native", "dtype": "bfloat16", "weight_cache": False}
TIGHT: dict[str, Any] = {"max_num_seqs": 24, "max_num_batched_tokens": 96, "max_prefill_beside_decode": 40}


@dataclass(frozen=True)
class _Request:
    prompt: list[int]
    params: SamplingParams
    priority: int
    tenant: str
    abort_after: int | None
    """Tokens of all its choices after which its caller has enough."""


@dataclass
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def take(self, output: StepOutput) -> None:
        assert output.position == len(self.token_ids)
        assert self.finish_reason is None
        self.token_ids += output.token_ids
        self.text += output.text
        self.finish_reason = output.finish_reason


_Choices = dict[int, _Choice]
_Answers = dict[str, _Choices]


def _requests(rng: random.Random, count: int, vocab: int, max_prompt: int) -> list[_Request]:
    prefix = rng.choices(range(3, vocab), k=max_prompt // 2)
    return [_request(rng, prefix, vocab, max_prompt) for _ in range(count)]


def _request(rng: random.Random, prefix: list[int], vocab: int, max_prompt: int) -> _Request:
    own = rng.choices(range(3, vocab), k=rng.randint(1, max_prompt // 2))
    params = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        max_tokens=rng.randint(1, 24),
        n=rng.choice([1, 1, 1, 2, 4]),
        seed=rng.randrange(1000),
        stop=rng.choice([(), (), ("e",), ("th", "ate")]),
        stop_token_ids=rng.choice([(), tuple(rng.choices(range(3, vocab), k=min(64, vocab // 20)))]),
        ignore_eos=rng.random() < 0.5,
        min_tokens=0,
    )
    return _Request(
        prompt=(prefix if rng.random() < 0.3 else []) + own,
        params=params,
        priority=rng.randrange(3),
        tenant=rng.choice("abcde"),
        abort_after=rng.randint(0, 30) if rng.random() < 0.1 else None,
    )


def _add(engine: Engine, name: str, request: _Request) -> None:
    engine.add(
        EngineRequest(name, request.prompt, request.params, seed=7, level=request.priority, tenant=request.tenant)
    )


def _run_together(engine: Engine, requests: list[_Request]) -> _Answers:
    answers: _Answers = defaultdict(lambda: defaultdict(_Choice))
    waiting = [(str(i), request) for i, request in enumerate(requests)][::-1]
    abort_after = {str(i): request.abort_after for i, request in enumerate(requests)}
    while waiting or engine.has_work():
        for _ in range(min(ARRIVALS_PER_STEP, len(waiting))):
            _add(engine, *waiting.pop())
        for output in engine.step():
            answers[output.request_id][output.choice].take(output)
            enough = abort_after[output.request_id]
            if enough is not None and sum(len(c.token_ids) for c in answers[output.request_id].values()) >= enough:
                engine.abort(output.request_id)
    return answers


def _run_alone(engine: Engine, request: _Request) -> _Choices:
    choices: _Choices = defaultdict(_Choice)
    _add(engine, "alone", request)
    for output in drain(engine):
        choices[output.choice].take(output)
    return choices


def _check(together: _Answers, alone: Iterable[_Choices], requests: list[_Request]) -> None:
    for i, (want, request) in enumerate(zip(alone, requests, strict=True)):
        got = together[str(i)]
        if request.abort_after is None:
            assert got == want, f"request {i}"
            continue
        for choice, part in got.items():
            assert part.token_ids == want[choice].token_ids[: len(part.token_ids)]
            assert want[choice].text.startswith(part.text)


@pytest.fixture(scope="module", params=[200, pytest.param(1000, marks=pytest.mark.slow)])
def many(request: pytest.FixtureRequest, make_engine: MakeEngine) -> tuple[list[_Request], list[_Choices]]:
    """Requests, and the answer of each when it runs alone."""
    alone = make_engine(**NATIVE, enable_prefix_caching=False)
    requests = _requests(random.Random(0), request.param, alone.vocab_size, max_prompt=80)
    return requests, [_run_alone(alone, request) for request in requests]


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduling_policy": "fair", "num_swap_blocks": 20, "preemption": "swap"},
        {"scheduling_policy": "priority", "preemption": "recompute", "enable_prefix_caching": False},
    ],
)
def test_many_requests_end_as_each_would_alone(
    make_engine: MakeEngine, many: tuple[list[_Request], list[_Choices]], settings: dict[str, Any]
) -> None:
    requests, alone = many
    engine = make_engine(**NATIVE | TIGHT | {"num_kv_blocks": 24} | settings)
    together = _run_together(engine, requests)
    check_idle(engine)
    stats = engine.stats()
    assert stats.num_preemptions > len(requests) / 20
    assert (stats.num_swaps > 0) == ("num_swap_blocks" in settings)
    _check(together, alone, requests)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_a_thousand_requests_of_the_demo_model_end_as_each_would_alone(demo_gguf: Path) -> None:
    settings = {"model": str(demo_gguf), "quantization": "int8", "kv_cache_dtype": "int8"}
    engine = Engine(EngineConfig(**settings | TIGHT, num_kv_blocks=40, num_swap_blocks=40, scheduling_policy="fair"))
    requests = _requests(random.Random(1), 1000, 40_000, max_prompt=120)
    together = _run_together(engine, requests)
    check_idle(engine)
    assert engine.stats().num_preemptions > 50
    alone = Engine(EngineConfig(**settings, enable_prefix_caching=False))
    _check(together, (_run_alone(alone, request) for request in requests), requests)
