"""Embeddings equal transformers' pooled hidden states, in any batch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.engine_runs import TORCH
from fakes.runners.ahead_runner import AheadRunner
from fakes.runners.faulty_runner import FaultyRunner
from fixtures.random_adapters import make_adapter, merge
from fixtures.random_llama import make_llama
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError, JobFailedError, PromptTooLongError, RequestError
from penstock.contract.job import SamplingParams
from penstock.contract.tasks import WHOLE_CONTEXT, Embed, Embedding, Pooling
from penstock.gpu_node.engine import Engine, StepOutput
from penstock.gpu_node.engine.offline import Prompt
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.model.protocol import StepPlan

POOLINGS: tuple[Pooling, ...] = ("mean", "last", "cls")
RUNNERS = {
    "torch": ({"runner": "torch", "dtype": "float32"}, 1e-5),
    # Its weights and activations are rounded to eight bits.
    "native": ({"runner": "native", "dtype": "bfloat16"}, 0.01),
}
PARAMS = SamplingParams(**Embed().sampling())


def _prompts(count: int, seed: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(300), k=rng.randrange(1, longest)) for _ in range(count)]


def _wanted(model: Any, token_ids: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
    """Return the embedding by transformers' hidden states after the final norm."""
    with torch.inference_mode():
        states = model.model(torch.tensor([list(token_ids)])).last_hidden_state[0]
    vector = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[pooling]
    wanted: NDArray[np.float32] = (vector / vector.norm()).numpy()
    return wanted


def _distance(found: Embedding, wanted: NDArray[np.float32]) -> float:
    """Return 1 - cosine similarity, and check the length."""
    vector = np.array(found.values)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    return float(1 - vector @ wanted)


def _values(embeddings: Sequence[Embedding]) -> list[tuple[float, ...]]:
    return [one.values for one in embeddings]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_embeddings_of_a_batch_in_chunks_equal_transformers(
    model: Any, make_engine: Callable[..., Engine], runner: str, pooling: Pooling
) -> None:
    settings, most = RUNNERS[runner]
    engine = make_engine(max_num_batched_tokens=24, max_num_seqs=16, **settings)
    prompts = [*_prompts(9, seed=4), list(range(200))]
    for _ in range(2):  # the second time all prompts are cached
        for prompt, found in zip(prompts, engine.embed(prompts, pooling=pooling), strict=True):
            assert found.num_tokens == len(prompt)
            assert _distance(found, _wanted(model, prompt, pooling)) < most
        engine.check_integrity()
    assert (engine.stats().prefix_hit_tokens > 0) == (pooling == "last")


def test_many_short_prompts_share_steps(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_num_batched_tokens=256, max_num_seqs=64)
    engine.embed([[1, 2, number] for number in range(64)])
    assert engine.stats().steps <= 2


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_have_the_same_bits_alone_and_in_any_batch_and_chunks(
    make_engine: Callable[..., Engine], pooling: Pooling
) -> None:
    settings, prompts = RUNNERS["native"][0], [*_prompts(12, seed=5), list(range(290))]
    alone = make_engine(**settings, max_num_batched_tokens=512)
    wanted = [alone.embed([prompt], pooling=pooling)[0].values for prompt in prompts]
    for max_num_batched_tokens in (16, 33, 512):
        engine = make_engine(**settings, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=16)
        assert _values(engine.embed(prompts, pooling=pooling)) == wanted


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_embeddings_have_the_same_bits_through_preemption(
    make_engine: Callable[..., Engine], pooling: Pooling, preemption: str
) -> None:
    """Each prompt is more urgent than those before it, and arrives while they are computed."""
    settings, rng = RUNNERS["native"][0], random.Random(6)
    prompts, wanted = [rng.choices(range(300), k=85) for _ in range(3)], Embed(pooling=pooling)
    sizes = {"max_num_batched_tokens": 24, "max_num_seqs": 16, "num_kv_blocks": 6, "num_swap_blocks": 12}
    alone = _values(make_engine(**settings).embed(prompts, pooling=pooling))
    engine = make_engine(**settings, **sizes, preemption=preemption, scheduling_policy="priority")
    found: dict[str, tuple[float, ...]] = {}
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(number), prompt, PARAMS, seed=0, embed=wanted, level=2 - number))
        for _ in range(3):
            _note(found, engine.step())
    while engine.has_work():
        _note(found, engine.step())
    assert engine.stats().num_preemptions == 2
    assert [found[str(number)] for number in range(len(prompts))] == alone


@pytest.mark.parametrize("is_ahead", [False, True])
def test_embeddings_have_the_same_bits_through_failed_steps(make_engine: Callable[..., Engine], is_ahead: bool) -> None:
    """Also with steps that are planned before the steps ahead of them are done."""
    settings, prompts = RUNNERS["native"][0], _prompts(30, seed=7)
    wanted = _values(make_engine(**settings).embed(prompts))
    engine: Any = make_engine(**settings, max_num_batched_tokens=24, max_num_seqs=12, num_kv_blocks=24)
    # Far enough apart that no request is blamed for two of them, and never a request that runs alone.
    errors = cycle([*[None] * 9, MemoryError(), *[None] * 9, RuntimeError()])

    def fault(at: str, plan: StepPlan) -> Exception | None:
        return next(errors) if at == "forward" and len(plan.context_lens) > 1 else None

    faulty: Any = FaultyRunner(engine._runner, fault)
    engine._runner = AheadRunner(faulty) if is_ahead else faulty
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(number), prompt, PARAMS, seed=0, embed=Embed()))
    found: dict[str, tuple[float, ...]] = {}
    while engine.has_work():
        with suppress(RuntimeError, MemoryError):
            _note(found, engine.step())
    assert faulty.num_failures == 2
    assert [found[str(number)] for number in range(len(prompts))] == wanted


def _note(found: dict[str, tuple[float, ...]], outputs: Sequence[StepOutput]) -> None:
    for output in outputs:
        if output.embedding:
            assert (output.finish_reason, output.token_ids, output.text) == ("stop", (), "")
            assert output.usage is not None
            assert output.usage.completion_tokens == 0
            found[output.request_id] = tuple(np.frombuffer(output.embedding, "<f4").tolist())


def test_embeddings_do_not_change_text_in_the_same_batch(model: Any, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(**TORCH, max_num_batched_tokens=32, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    (wanted,) = engine.generate([[1, 2, 3]], params)
    prompt = list(range(50))
    engine.add(EngineRequest("text", [1, 2, 3], params, seed=0))
    engine.add(EngineRequest("vector", prompt, PARAMS, seed=0, embed=Embed(pooling="mean")))
    outputs: list[StepOutput] = []
    while engine.has_work():
        outputs += engine.step()
    said = tuple(token for output in outputs for token in output.token_ids if output.request_id == "text")
    assert said == wanted.choices[0].token_ids
    (vector,) = (output.embedding for output in outputs if output.request_id == "vector")
    assert np.frombuffer(vector, "<f4") @ _wanted(model, prompt, "mean") == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_prompt_may_fill_the_context(model: Any, make_engine: Callable[..., Engine], pooling: Pooling) -> None:
    engine = make_engine(**TORCH, max_model_len=128, num_kv_blocks=8, max_num_batched_tokens=48, max_num_seqs=4)
    prompt = _prompts(1, seed=8)[0] * 128
    (found,) = engine.embed([prompt[:128]], pooling=pooling)
    assert _distance(found, _wanted(model, prompt[:128], pooling)) < 1e-5
    with pytest.raises(PromptTooLongError, match="maximum context length is 128 tokens; the prompt has 129 tokens"):
        engine.embed([prompt[:129]], pooling=pooling)
    for limit in (128, WHOLE_CONTEXT):
        (cut,) = engine.embed([[9, *prompt[:128]]], pooling=pooling, truncate_prompt_tokens=limit)
        assert cut == found


def test_first_dimensions_are_normalized_again(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    (whole,), (cut,) = (engine.embed([[1, 2, 3]], dimensions=dimensions) for dimensions in (None, 10))
    first = np.array(whole.values[:10])
    np.testing.assert_allclose(cut.values, first / np.linalg.norm(first), atol=1e-6)
    assert len(whole.values) == 64
    with pytest.raises(RequestError, match="dimensions is 65, but this model's embeddings have 64") as caught:
        engine.embed([[1]], dimensions=65)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "at least one token"), ([100_000], "outside the vocabulary"), (None, "must be a text, token ids or a chat")],
)
def test_wrong_prompt_is_refused(make_engine: Callable[..., Engine], prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_engine().embed([prompt])


def test_chat_and_text_are_tokenized_as_for_generation(make_engine: Callable[..., Engine]) -> None:
    engine, chat = make_engine(), [{"role": "user", "content": "the gate"}]
    ids = [engine.tokenizer.encode("the gate"), engine.tokenizer.encode_chat(chat)]
    prompts: list[Prompt] = ["the gate", chat]
    assert engine.embed(prompts) == engine.embed(ids)


def test_the_models_files_name_the_default_pooling(model_copy: Path, make_engine: Callable[..., Engine]) -> None:
    (model_copy / "1_Pooling").mkdir()
    (model_copy / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    engine = make_engine(model=str(model_copy))
    assert engine.embed([[1, 2, 3]]) == engine.embed([[1, 2, 3]], pooling="last")
    assert engine.embed([[1, 2, 3]]) != engine.embed([[1, 2, 3]], pooling="mean")


@pytest.mark.parametrize(
    ("modules", "pooling", "said"),
    [
        ("Pooling", {"pooling_mode": "lasttoken"}, None),
        ("Pooling", {"pooling_mode_max_tokens": True}, "pooling max is not supported for a model that generates text"),
        ("Pooling", {"pooling_mode": "median"}, "pooling_mode 'median' is not one of"),
        ("Dense", {}, "module Dense is not supported for a model that generates text"),
    ],
)
def test_a_list_of_modules_names_the_pooling(
    model_copy: Path, make_engine: Callable[..., Engine], modules: str, pooling: dict[str, Any], said: str | None
) -> None:
    listed = [{"idx": 1, "path": f"2_{modules}", "type": f"sentence_transformers.models.{modules}"}]
    (model_copy / "modules.json").write_text(json.dumps(listed))
    (model_copy / f"2_{modules}").mkdir()
    (model_copy / f"2_{modules}" / "config.json").write_text(json.dumps(pooling))
    if said is not None:
        with pytest.raises(ConfigError, match=said):
            make_engine(model=str(model_copy))
        return
    engine = make_engine(model=str(model_copy))
    assert engine.embed([[1, 2, 3]]) == engine.embed([[1, 2, 3]], pooling="last")


def test_the_models_prompts_stand_before_texts(model_copy: Path, make_engine: Callable[..., Engine]) -> None:
    settings = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": None}
    path = model_copy / "config_sentence_transformers.json"
    path.write_text(json.dumps(settings))
    engine = make_engine(model=str(model_copy))
    plain = engine.embed(["find: the gate", "the gate"])
    assert engine.embed(["the gate"], prompt_name="query") == plain[:1]
    assert engine.embed(["the gate"], prompt_name="document") == engine.embed(["the gate"]) == plain[1:]
    assert engine.embed([[1, 2, 3]], prompt_name="query") == engine.embed([[1, 2, 3]])
    with pytest.raises(RequestError, match="prompt_name is 'poem', but this model's prompts are: query, document"):
        engine.embed(["the gate"], prompt_name="poem")
    path.write_text(json.dumps(settings | {"default_prompt_name": "query"}))
    assert make_engine(model=str(model_copy)).embed(["the gate"]) == plain[:1]


def test_an_embedder_reads_the_token_that_its_tokenizer_puts_behind_a_text(
    model: Any, model_copy: Path, make_engine: Callable[..., Engine]
) -> None:
    """As Qwen3-Embedding: the last token is that of the end, and vectors have length 1."""
    tokenizer = json.loads((model_copy / "tokenizer.json").read_text())
    end = tokenizer["added_tokens"][0]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end["content"], "type_id": 0}}],
        "pair": [],
        "special_tokens": {end["content"]: {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}},
    }
    (model_copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model_copy / "1_Pooling").mkdir()
    (model_copy / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    engine = make_engine(model=str(model_copy), **TORCH)
    texts: list[Prompt] = ["the gate", "the turbine"]
    for text, found in zip(texts, engine.embed(texts), strict=True):
        token_ids = [*engine.tokenizer.encode(str(text), framed=False), end["id"]]
        assert engine.tokenizer.encode(str(text)) == token_ids
        assert _distance(found, _wanted(model, token_ids, "last")) < 1e-5


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embedding_of_a_prompt_with_an_adapter(
    model: Any, tmp_path: Path, make_engine: Callable[..., Engine], pooling: Pooling
) -> None:
    adapter = make_adapter(tmp_path / "tuned", model)
    tuned = merge(deepcopy(model), adapter)
    engine = make_engine(**TORCH, lora={"tuned": adapter})
    first, second = engine.embed([[1, 2, 3]] * 2, adapters=[None, "tuned"], pooling=pooling)
    assert _distance(first, _wanted(model, [1, 2, 3], pooling)) < 1e-5
    assert _distance(second, _wanted(tuned, [1, 2, 3], pooling)) < 1e-5
    assert _distance(second, _wanted(model, [1, 2, 3], pooling)) > 1e-3


@pytest.mark.parametrize("runner", RUNNERS)
def test_prompt_with_nan_fails_alone(tmp_path: Path, make_engine: Callable[..., Engine], runner: str) -> None:
    from fixtures.tiny_model import write_tokenizer

    folder = make_llama(tmp_path / "poisoned", poison=[(7, float("nan"))])
    write_tokenizer(folder, 300)
    engine = make_engine(model=str(folder), **RUNNERS[runner][0])
    with pytest.raises(JobFailedError, match="NaN, infinity or zeros for prompt 1"):
        engine.embed([[1, 2, 3], [4, 7, 5]])
    assert len(engine.embed([[1, 2, 3]])[0].values) == 64
