"""Swap, tiers, sharing, and sequences larger than the KV cache: tokens are the same with and without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes.cover import pairwise
from fakes.engine_runs import check_idle, drain, tokens_of
from fixtures.tiny_model import make_tiny_model

from penstock.contract.errors import ConfigError, PromptTooLongError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig, ResumedChoice
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.model.checkpoint import description
from penstock.gpu_node.model.options import RunnerOptions

PROMPTS = [[5 + i, *range(10 * i + 3, 10 * i + 43 + i)] for i in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True, seed=3)

MakeEngine = Callable[..., Engine]
TokensAlone = dict[tuple[bool, int], list[tuple[tuple[int, ...], ...]]]
RUNNERS = ("native", "torch")
PREEMPTIONS: list[dict[str, Any]] = [
    {"preemption": "recompute"},
    {"preemption": "swap", "num_swap_blocks": 60},
    {"preemption": "swap", "num_swap_blocks": 60, "enable_prefix_caching": False},
    {"preemption": "swap", "num_swap_blocks": 7, "prefix_eviction": "lfu", "max_num_batched_tokens": 24},
    {"preemption": "auto", "num_swap_blocks": 30, "prefix_eviction": "length"},
]


MOSTLY_NATIVE = pytest.mark.parametrize(
    "make", ["native", pytest.param("torch", marks=pytest.mark.slow)], indirect=True, scope="module"
)
"""For tests of what the engine keeps where. Other tests of every run show that both runners copy blocks."""


@pytest.fixture(scope="module", params=RUNNERS)
def make(request: pytest.FixtureRequest, make_engine: MakeEngine) -> partial[Engine]:
    """Make an engine whose tokens are identical in any batch: the torch runner in float32 on this small model."""
    dtype = "bfloat16" if request.param == "native" else "float32"
    return partial(make_engine, runner=request.param, dtype=dtype)


def _run(engine: Engine, params: SamplingParams) -> list[tuple[tuple[int, ...], ...]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add(EngineRequest(str(i), prompt, params, seed=i))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
        engine.check_integrity()
    check_idle(engine)
    return [tuple(tuple(tokens_of(outputs, str(i), j)) for j in range(params.n)) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def known_alone() -> dict[str, TokensAlone]:
    """What `tokens_alone` is for each runner. Tests of one runner do not all follow each other."""
    return {}


@pytest.fixture(scope="module")
def tokens_alone(make: partial[Engine], known_alone: dict[str, TokensAlone]) -> TokensAlone:
    """By (drawn, n): each prompt's tokens when it runs alone.

    All greedy choices are the same, and a single choice is the first of several.
    """
    runner = make.keywords["runner"]
    if runner not in known_alone:
        engine = make(max_num_seqs=1, max_num_batched_tokens=512, enable_prefix_caching=False)
        greedy, drawn = _run(engine, GREEDY), _run(engine, DRAWN.model_copy(update={"n": 3}))
        known_alone[runner] = {
            (False, 1): greedy,
            (False, 3): [choices * 3 for choices in greedy],
            (True, 1): [choices[:1] for choices in drawn],
            (True, 3): drawn,
        }
    return known_alone[runner]


@pytest.mark.parametrize(
    ("make", "settings", "n", "drawn"),
    pairwise(RUNNERS, PREEMPTIONS, [1, 3], [False, True]),
    indirect=["make"],
    scope="module",
)
def test_tokens_are_the_same_with_swap_with_recompute_and_alone(
    make: MakeEngine, tokens_alone: TokensAlone, settings: dict[str, Any], n: int, drawn: bool
) -> None:
    engine = make(**{"num_kv_blocks": 16, "max_num_seqs": 12} | settings)
    assert _run(engine, (DRAWN if drawn else GREEDY).model_copy(update={"n": n})) == tokens_alone[drawn, n]
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swaps > 0) == (settings["preemption"] != "recompute")
    assert stats.swap_blocks_free == stats.swap_blocks_total and stats.num_swapped == 0


@MOSTLY_NATIVE
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_prompt", [47, 48, 49])
def test_choices_share_their_prompt_and_copy_no_more_than_its_last_block(
    make: MakeEngine, enable_prefix_caching: bool, num_prompt: int
) -> None:
    engine = make(enable_prefix_caching=enable_prefix_caching)
    prompt, params = list(range(1, num_prompt + 1)), DRAWN.model_copy(update={"n": 4, "max_tokens": 8})
    closed, opened = ResumedChoice((), "", "stop"), ResumedChoice((), "", None)
    want = []
    for choice in range(4):
        engine.add(
            EngineRequest("x", prompt, params, seed=9, resume=[opened if i == choice else closed for i in range(4)])
        )
        want.append(tokens_of(drain(engine), "x", choice))
    fresh = make(enable_prefix_caching=enable_prefix_caching)
    fresh.add(EngineRequest("x", prompt, params, seed=9))
    outputs = fresh.step() + fresh.step()
    stats = fresh.stats()
    outputs += drain(fresh)
    # All choices share the full blocks before the last prompt token; each has its own blocks behind them.
    assert stats.kv_blocks_total - stats.kv_blocks_free == (num_prompt - 1) // 16 + 4 + (num_prompt == 48)
    assert fresh.stats().copied_blocks == (0 if num_prompt == 49 else 3)
    assert fresh.stats().prefill_tokens == num_prompt
    assert [tokens_of(outputs, "x", choice) for choice in range(4)] == want
    check_idle(fresh)


@MOSTLY_NATIVE
def test_prefix_evicted_to_the_host_is_not_computed_again(make: MakeEngine, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "long", max_position=4096)
    engine = make(model=str(folder), num_kv_blocks=140, num_swap_blocks=200)
    long, other = [7 + i % 300 for i in range(2049)], [9 + i % 200 for i in range(2100)]
    one = GREEDY.model_copy(update={"max_tokens": 1})
    first, _ = (engine.generate([prompt], one)[0] for prompt in (long, other))
    computed = engine.stats().prefill_tokens
    again = engine.generate([long], one)[0]
    assert again.usage.cached_tokens == 2048 and again.choices == first.choices
    assert engine.stats().prefill_tokens == computed >= 2048 + 2100
    without = make(model=str(folder), num_kv_blocks=140)
    assert [without.generate([prompt], one)[0].usage.cached_tokens for prompt in (long, other, long)][-1] < 200
    check_idle(engine)


def test_a_sequence_larger_than_the_kv_cache_runs_in_both_pools(make: MakeEngine) -> None:
    large, small = make(), make(num_kv_blocks=5, num_swap_blocks=9)
    prompt, params = list(range(3, 150)), GREEDY.model_copy(update={"max_tokens": 60})
    want = large.generate([prompt], params)[0].choices
    assert small.num_kv_tokens == 80 and small.max_model_len == 14 * 16
    for i, other in enumerate(PROMPTS[:3]):
        small.add(EngineRequest(str(i), other, GREEDY, seed=0))
    small.add(EngineRequest("large", prompt, params, seed=0))
    small.add(EngineRequest("growing", prompt[:40], GREEDY.model_copy(update={"max_tokens": 120}), seed=0))
    outputs = drain(small)
    assert tuple(tokens_of(outputs, "large")) == want[0].token_ids
    alone = large.generate([prompt[:40]], GREEDY.model_copy(update={"max_tokens": 120}))[0]
    assert tuple(tokens_of(outputs, "growing")) == alone.choices[0].token_ids
    check_idle(small)


@MOSTLY_NATIVE
def test_request_larger_than_device_and_host_blocks_is_refused_by_name(make: MakeEngine) -> None:
    engine = make(num_kv_blocks=5, num_swap_blocks=9)
    with pytest.raises(PromptTooLongError, match="KV cache holds 80 tokens, the swap space 144") as refusal:
        engine.add(EngineRequest("x", [1] * 224, GREEDY, seed=0))
    assert refusal.value.param == "prompt" and not engine.has_work()


@MOSTLY_NATIVE
def test_prefixes_are_shared_within_a_salt_only(make: MakeEngine) -> None:
    engine = make()
    cached = []
    for salt in (None, "a", "b", "a", None):
        engine.add(EngineRequest("x", PROMPTS[0], GREEDY.model_copy(update={"cache_salt": salt}), seed=0))
        cached.append(drain(engine)[-1].usage.cached_tokens)  # type: ignore[union-attr]
    assert cached == [0, 0, 0, 32, 32]


@MOSTLY_NATIVE
def test_tenants_share_prefixes_only_if_the_setting_says_so(make: MakeEngine) -> None:
    cached = []
    for settings in ({"prefix_cache_salt": "pool"}, {}):
        engine = make(**settings)
        for tenant in ("a", "b", "a"):
            engine.add(EngineRequest("x", PROMPTS[0], GREEDY, seed=0, tenant=tenant))
            cached.append(drain(engine)[-1].usage.cached_tokens)  # type: ignore[union-attr]
    assert cached == [0, 32, 32, 0, 0, 32]


@MOSTLY_NATIVE
@pytest.mark.parametrize("setting", ["tenant", "pool"])
def test_a_salt_never_joins_tenants(make: MakeEngine, setting: str) -> None:
    engine, cached = make(prefix_cache_salt=setting), []
    params = GREEDY.model_copy(update={"cache_salt": "s"})
    for tenant in ("a", "b", "a", "b"):
        engine.add(EngineRequest("x", PROMPTS[0], params, seed=0, tenant=tenant))
        cached.append(drain(engine)[-1].usage.cached_tokens)  # type: ignore[union-attr]
    assert cached == [0, 0, 32, 32]


@MOSTLY_NATIVE
def test_more_choices_than_fit_at_once_start_in_several_groups(make: MakeEngine, tokens_alone: dict[Any, Any]) -> None:
    engine = make(num_kv_blocks=8, num_swap_blocks=8, max_num_seqs=2)
    assert _run(engine, DRAWN.model_copy(update={"n": 3})) == tokens_alone[True, 3]


def test_a_step_that_fails_while_it_copies_changes_no_tokens(
    make: MakeEngine, tokens_alone: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(num_kv_blocks=16, num_swap_blocks=60, max_num_seqs=12, preemption="swap")
    submit, failures = engine._runner.submit, []

    def failing(plan: Any) -> Any:
        if len(plan.copies) and len(failures) < 6:
            failures.append(plan)
            raise MemoryError("no memory for a copy")
        return submit(plan)

    monkeypatch.setattr(engine._runner, "submit", failing)
    for i, prompt in enumerate(PROMPTS):
        engine.add(EngineRequest(str(i), prompt, GREEDY.model_copy(update={"n": 3}), seed=i))
    outputs = []
    while engine.has_work():
        try:
            outputs += engine.step()
        except MemoryError:
            engine.check_integrity()
    got = [tuple(tuple(tokens_of(outputs, str(i), j)) for j in range(3)) for i in range(len(PROMPTS))]
    assert got == tokens_alone[False, 3] and len(failures) == 6
    check_idle(engine)


@MOSTLY_NATIVE
def test_tokens_used_are_counted_once_wherever_they_are_shared(make: MakeEngine) -> None:
    engine = make(enable_prefix_caching=False)
    engine.add(EngineRequest("x", list(range(1, 41)), DRAWN.model_copy(update={"n": 2}), seed=0))
    for _ in range(3):
        engine.step()
    used = engine.stats().kv_tokens_used
    engine.abort("x")
    assert drain(engine) == [] and engine.stats().kv_tokens_used == 0
    # Two blocks are shared; the third step is on its way, and the second one was the fork's first.
    assert used == 2 * 16 + (42 - 32) + (41 - 32)


def test_vllms_names_are_accepted_and_gpu_settings_are_refused_by_name(tiny_model: Path) -> None:
    config = EngineConfig(model="x", swap_space=2, num_gpu_blocks_override=7)  # type: ignore[call-arg]
    assert (config.swap_space_gib, config.num_kv_blocks) == (2.0, 7)
    with pytest.raises(ValueError, match="another name for swap_space_gib"):
        EngineConfig(model="x", swap_space=2, swap_space_gib=1)  # type: ignore[call-arg]
    for name, value in {"gpu_memory_utilization": 0.9, "cpu_offload_gib": 1.0, "kv_cache_dtype": "fp8"}.items():
        with pytest.raises(ConfigError, match=name):
            Engine(EngineConfig(model=str(tiny_model), **{name: value}))


def test_swap_space_is_given_in_gib_or_blocks(make: MakeEngine) -> None:
    block_bytes = make()._runner.cache_sizes.block_bytes
    engine = make(swap_space_gib=20.5 * block_bytes / 2**30)
    assert engine.stats().swap_blocks_total == 20
    assert make(num_swap_blocks=3, swap_space_gib=1.0).stats().swap_blocks_total == 3


def test_default_swap_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has as much as its KV cache, within a quarter of the free memory, unless an operator sizes the KV cache."""

    def num_blocks(default_gib: float, **settings: Any) -> int:
        return description.num_host_blocks(RunnerOptions(**settings), 1 << 20, 8, default_gib)

    assert num_blocks(4.0) == 8
    assert num_blocks(0.0) == num_blocks(4.0, swap_space_gib=0) == num_blocks(4.0, num_kv_blocks=6) == 0
    assert num_blocks(0.0, swap_space_gib=0.5) == 512
    monkeypatch.setattr(description, "available_bytes", lambda: 4 * 3 << 20)
    assert num_blocks(4.0) == 3
