"""Chats with a model that has recurrent layers: from the engine's door, with the native kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.random_families import make_family_model

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.engine.records import Generation

BLOCK_SIZE = 16
NUM_CHATS, NUM_SLOTS = 64, 16
SYSTEM_TOKENS = 2000
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return make_family_model(tmp_path_factory.mktemp("hybrid"), "qwen3.5", "bfloat16")


@pytest.fixture(scope="module")
def hybrid(folder: Path) -> MakeEngine:
    """Make an engine of that model."""

    def make(**settings: Any) -> Engine:
        chosen = {"model": str(folder), "runner": "native", "num_threads": 1, "num_kv_blocks": 2000, "max_num_seqs": 8}
        return Engine(EngineConfig(**chosen | {"block_size": BLOCK_SIZE} | settings))

    return make


def _serve(engine: Engine, prompt: list[int]) -> Generation:
    [generation] = engine.generate([prompt], GREEDY)
    return generation


def _cached(generation: Generation) -> int:
    return generation.usage.cached_tokens


def test_many_conversations_in_few_slots_get_the_tokens_that_each_gets_alone(hybrid: MakeEngine) -> None:
    rng = random.Random(0)
    starts = [rng.choices(range(384), k=rng.randint(20, 70)) for _ in range(NUM_CHATS)]
    messages = [[rng.choices(range(384), k=rng.randint(3, 30)) for _ in range(NUM_CHATS)] for _ in range(2)]
    alone, crowded = hybrid(enable_prefix_caching=False, max_num_seqs=1), hybrid(state_slots=NUM_SLOTS)
    chats = [list(start) for start in starts]
    for turn in range(3):
        answers = crowded.generate(chats, GREEDY)
        for chat, answer in zip(chats, answers, strict=True):
            assert answer.token_ids == _serve(alone, chat).token_ids
            chat += answer.token_ids
        for i, chat in enumerate(chats if turn < len(messages) else ()):
            chat += messages[turn][i]
    stats = crowded.stats()
    assert stats.state_evictions > 0
    assert stats.state_slots_total == stats.state_slots_free == NUM_SLOTS


def test_from_the_third_request_on_a_long_system_prompt_is_not_computed(hybrid: MakeEngine) -> None:
    rng, engine = random.Random(1), hybrid()
    system = rng.choices(range(384), k=SYSTEM_TOKENS)
    prompts = [system + rng.choices(range(384), k=40) for _ in range(4)]
    answers = [_serve(engine, prompt) for prompt in prompts]
    shared = SYSTEM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert [_cached(answer) for answer in answers] == [0, 0, shared, shared]
    alone = hybrid(enable_prefix_caching=False, max_num_seqs=1)
    assert [one.token_ids for one in answers] == [_serve(alone, prompt).token_ids for prompt in prompts]


def test_the_next_turn_computes_at_most_two_blocks_beside_the_new_message(hybrid: MakeEngine) -> None:
    """Two where the prompt before ended with a block, whose last token every request computes."""
    rng, engine = random.Random(2), hybrid()
    chat, message = rng.choices(range(384), k=100), rng.choices(range(384), k=21)
    for _ in range(5):
        answer = _serve(engine, chat)
        chat += [*answer.token_ids, *message]
        computed = len(chat) - _cached(_serve(engine, chat))
        assert computed - len(message) <= 2 * BLOCK_SIZE
