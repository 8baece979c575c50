"""An engine of two ranks answers as one of one rank, with each feature. The ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.engine_runs import check_idle, drain
from fakes.runners.thread_ranks import ranks_as_threads
from fixtures.random_adapters import make_adapter
from transformers import AutoModelForCausalLM

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams
from penstock.contract.tasks import Embed
from penstock.gpu_node.engine import Engine, StepOutput
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.speculative.drafts import DraftBudget
from penstock.gpu_node.model.native.ranks import NativeRank

PROMPTS = [[5, *range(3, 43)], [5, *range(3, 40), 7], [9, 8, 7, 6] * 12, [11]]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True, "n": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "swap": {"num_kv_blocks": 14, "num_swap_blocks": 40, "preemption": "swap", "max_num_seqs": 6},
    "recompute": {"num_kv_blocks": 14, "preemption": "recompute", "max_num_seqs": 6},
    "drafts": {"speculative": "ngram"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
PARAMS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "logit_bias": {"5": 3.0}, "bad_words": ["a"]},
    "grammar": {"structured_outputs": {"regex": "[a-f]{3,30}"}, "ignore_eos": False},
    "greedy": {"temperature": 0.0},
    "beams": {"use_beam_search": True, "n": 2, "best_of": 3, "temperature": 0.0},
}


def _run(engine: Engine, params: SamplingParams, embed: Embed | None = None) -> list[StepOutput]:
    for i, prompt in enumerate(PROMPTS):
        engine.add(EngineRequest(str(i), prompt, params, seed=i, embed=embed))
    outputs = drain(engine)
    check_idle(engine)
    return sorted(outputs, key=lambda output: (output.request_id, output.choice, output.position))


def _shown(outputs: list[StepOutput]) -> list[tuple[Any, ...]]:
    """All that a caller sees."""
    return [
        (one.request_id, one.choice, one.token_ids, one.text, one.logprobs, one.prompt_logprobs, one.embedding)
        for one in outputs
    ]


def _both(make_engine: Callable[..., Engine], **settings: Any) -> tuple[Engine, Engine]:
    with ranks_as_threads():
        ranks = make_engine(tensor_parallel_size=2, **settings | {"num_threads": 2})
    return make_engine(**settings), ranks


@pytest.fixture(scope="module")
def engines(make_engine: Callable[..., Engine]) -> tuple[Engine, Engine]:
    return _both(make_engine)


@pytest.fixture
def _free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts cost nothing, so that it does not depend on times whether there are some."""
    monkeypatch.setattr(DraftBudget, "needs", lambda self, num, most: [0.0] * min(most, num * self.max_draft_tokens))


@pytest.mark.usefixtures("_free_drafts")
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_an_engine(make_engine: Callable[..., Engine], name: str) -> None:
    one, ranks = _both(make_engine, **SETTINGS[name])
    # Texts of few tokens repeat themselves, so there are drafts.
    few = {"logit_bias": {"6": 60.0, "7": 60.0, "8": 60.0}} if name == "drafts" else {}
    params = SamplingParams(**SAMPLED | few)
    assert _shown(_run(ranks, params)) == _shown(_run(one, params))
    stats = ranks.stats()
    used = {"swap": stats.num_swaps, "recompute": stats.num_preemptions, "drafts": stats.accepted_tokens}
    assert used.get(name, 1) > 0
    assert ranks.revision == one.revision, "nodes of both kinds continue each other's jobs"


@pytest.mark.parametrize("name", PARAMS)
def test_options_of_a_request(engines: tuple[Engine, Engine], name: str) -> None:
    one, ranks = engines
    params = SamplingParams(**SAMPLED | PARAMS[name])
    # The second run finds its prompts in the prefix cache.
    for _ in range(2):
        assert _shown(_run(ranks, params)) == _shown(_run(one, params))
    assert ranks.stats().prefix_hit_tokens > 0 or params.prompt_logprobs is not None


def test_adapters(make_engine: Callable[..., Engine], tiny_model: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    for seed, name in enumerate("ab"):
        make_adapter(tmp_path / name, base, seed=seed)
    prompts, wanted, params = PROMPTS[:3], (None, "a", "b"), SamplingParams(**SAMPLED)
    # The second adapter takes the slot of the first.
    one, ranks = (
        [found.choices for found in engine.generate(prompts, params, adapters=wanted)]
        for engine in _both(make_engine, lora_dir=tmp_path, max_loras=1)
    )
    tokens = [[[choice.token_ids for choice in choices] for choices in found] for found in (one, ranks)]
    assert tokens[0] == tokens[1]


def test_an_adapter_that_one_rank_refuses_fails_its_own_requests_alone(
    make_engine: Callable[..., Engine], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another digest lies in that rank's folder."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    for seed, folder in enumerate("ab"):
        make_adapter(tmp_path / folder, base, seed=seed)
    one, ranks = _both(make_engine, lora_dir=tmp_path, max_loras=2)
    load, params = NativeRank.load_adapter, SamplingParams(**SAMPLED)

    def refusing(rank: NativeRank, slot: int, adapter: AdapterRef) -> None:
        load(rank, slot, AdapterRef(name="b", digest="0" * 32) if adapter.name == "b" else adapter)

    monkeypatch.setattr(NativeRank, "load_adapter", refusing)
    found, wanted = [], (None, "a", "b")
    for engine, names in ((one, wanted[:2]), (ranks, wanted)):
        for i, own in enumerate(names):
            adapter = None if own is None else AdapterRef(name=own)
            engine.add(EngineRequest(str(i), PROMPTS[i], params, seed=i, adapter=adapter))
        outputs = []
        while engine.has_work():
            with suppress(RequestError):
                outputs += engine.step()
        check_idle(engine)
        found.append(sorted(outputs, key=lambda output: (output.request_id, output.choice, output.position)))
    mine = [output for output in found[1] if output.request_id != "2"]
    assert _shown(mine) == _shown(found[0])
    assert {output.finish_reason for output in found[1] if output.request_id == "2"} == {"error"}


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings(engines: tuple[Engine, Engine], pooling: Any) -> None:
    wanted = Embed(pooling=pooling)
    one, ranks = (_run(engine, SamplingParams(**wanted.sampling()), wanted) for engine in engines)
    assert _shown(ranks) == _shown(one)
    assert all(output.embedding for output in one)
