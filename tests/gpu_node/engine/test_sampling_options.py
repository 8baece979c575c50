"""Sampling options in the engine: its tokens equal the reference sampler's over transformers' logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.engine_runs import TORCH, drain, tokens_of
from tokenizers import Tokenizer

from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, ResumedChoice
from penstock.gpu_node.engine.records import EngineRequest
from penstock.kernels.reference.sampler import SamplingRow, sample_row

PROMPT = "the gate opens by pressure and the turbine never starves"
NUM_TOKENS = 24


def _said(engine: Engine, **options: Any) -> list[int]:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **options)
    return list(engine.generate([PROMPT], params)[0].choices[0].token_ids)


def _said_by_reference(model: Any, prompt: list[int], **options: Any) -> list[int]:
    tokens = list(prompt)
    if bias := options.pop("logit_bias", None):
        options |= {"biased": np.array([*bias], np.int32), "biases": np.array([*bias.values()], np.float32)}
    for position in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1].numpy()
        seen = np.array(tokens, np.int32)
        row = SamplingRow(**options, position=position, seen=seen, num_seen_prompt=len(prompt))
        tokens.append(sample_row(logits, row))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    """An engine on the same model."""
    return make_engine(**TORCH)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "presence_penalty": 2.0},
        {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": -0.5, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": -2.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.0, "logit_bias": {5: 100.0, 6: 99.0, 300: -100.0}, "presence_penalty": 2.0},
        {"temperature": 1.0, "seed": 8, "logit_bias": {5: 3.5, 6: -2.0}},
        {"temperature": 1.5, "seed": 6, "min_p": 0.1},
        {"temperature": 1.5, "seed": 7, "min_p": 0.02, "top_k": 20, "top_p": 0.9, "frequency_penalty": 1.0},
    ],
)
def test_tokens_equal_those_of_the_reference(engine: Engine, model: Any, options: dict[str, Any]) -> None:
    prompt = engine.tokenizer.encode(PROMPT)
    assert _said(engine, **options) == _said_by_reference(model, prompt, **options)


def _word(engine: Engine, said: list[int], num_tokens: int) -> str:
    """Return a text of this many tokens from the output, which the tokenizer splits in the same way."""
    for at in range(len(said)):
        ids = tuple(said[at : at + num_tokens])
        word = engine.tokenizer.decode(ids)
        if len(ids) == num_tokens and ids in engine.tokenizer.encode_words([word]):
            return word
    raise LookupError(num_tokens)


def test_bad_words_equal_those_of_transformers(engine: Engine, model: Any) -> None:
    prompt, plain = engine.tokenizer.encode(PROMPT), _said(engine, temperature=0.0)
    # Of what it would say: one token, and two that follow each other.
    words = [_word(engine, plain, 1), _word(engine, plain, 2)]
    banned = [list(ids) for ids in engine.tokenizer.encode_words(words)]
    ids = torch.tensor([prompt])
    want = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        bad_words_ids=banned,
    )
    said = _said(engine, temperature=0.0, bad_words=words)
    assert said == want[0, len(prompt) :].tolist() != plain


def test_bad_words_are_read_once_for_all_choices(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps all sequences wait for the thread that reads the words."""
    read: list[Sequence[str]] = []
    encode_words = engine.tokenizer.encode_words

    def read_words(words: Sequence[str]) -> list[tuple[int, ...]]:
        read.append(words)
        return encode_words(words)

    monkeypatch.setattr(engine.tokenizer, "encode_words", read_words)
    params = SamplingParams(max_tokens=20, ignore_eos=True, n=16, temperature=5.0, bad_words=["e", "the"])
    (answer,) = engine.generate([PROMPT], params)
    assert read == [("e", "the")]
    banned = {ids[0] for ids in encode_words(["e"]) if len(ids) == 1}
    assert banned and all(banned.isdisjoint(choice.token_ids) for choice in answer.choices)


def test_prepared_bad_words_are_not_read_on_the_engines_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    said = _said(engine, temperature=0.0)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, bad_words=[_word(engine, said, 1)])
    (want,) = engine.generate([PROMPT], params)
    prompt, prepared = engine.tokenizer.encode(PROMPT), engine.prepare(params)
    monkeypatch.setattr(engine.tokenizer, "encode_words", None)
    engine.add(EngineRequest("prepared", prompt, params, seed=0, prepared=prepared))
    assert tuple(tokens_of(drain(engine), "prepared")) == want.choices[0].token_ids != tuple(said)


def test_rows_with_and_without_options_stand_side_by_side(engine: Engine) -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": {7: 100.0}},
        {"temperature": 0.9, "seed": 3, "logit_bias": {9: 4.0}, "top_k": 20},
        {"temperature": 0.0, "bad_words": ["e", "the"], "min_tokens": 5},
        {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.5},
    ]
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **one) for one in options]
    together = [list(one.choices[0].token_ids) for one in engine.generate([PROMPT] * len(params), params)]
    assert together == [_said(engine, **one) for one in options]
    assert together[1] == [7] * NUM_TOKENS


def test_bias_of_an_unknown_token_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="logit_bias has a token id outside the vocabulary of 384"):
        _said(engine, logit_bias={384: 1.0})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # of torch, and of the native kernels
def test_tokens_outside_the_models_vocabulary_change_no_output(
    make_engine: Callable[..., Engine], model_copy: Path, dtype: str
) -> None:
    said = _said(make_engine(model=str(model_copy), dtype=dtype), temperature=1.0, seed=3)
    tokenizer = Tokenizer.from_file(str(model_copy / "tokenizer.json"))
    tokenizer.add_tokens([f"<more {i}>" for i in range(said[0] + 1)])
    tokenizer.save(str(model_copy / "tokenizer.json"))
    last, config = f"<more {said[0]}>", model_copy / "tokenizer_config.json"
    # One row behind what the next one says first.
    assert tokenizer.token_to_id(last) == 384 + said[0]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": last}))
    engine = make_engine(model=str(model_copy), dtype=dtype)
    other = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=3)
    for params in ({"bad_words": [last]}, {"min_tokens": 9}):
        odd = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, **params)
        beside = engine.generate([PROMPT, PROMPT], [odd, other])
        assert [len(one.choices[0].token_ids) for one in beside] == [NUM_TOKENS] * 2
        assert list(beside[1].choices[0].token_ids) == said


def test_a_frequency_penalty_makes_a_text_repeat_less_and_a_negative_one_more(engine: Engine) -> None:
    different = [len(set(_said(engine, temperature=0.7, seed=1, frequency_penalty=f))) for f in (-2.0, 0.0, 2.0)]
    assert different[0] < different[1] < different[2]


def test_penalties_of_a_resumed_choice_count_its_logged_tokens(engine: Engine) -> None:
    options = {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    whole = _said(engine, **options)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **options)
    logged = ResumedChoice(tuple(whole[:15]), engine.tokenizer.decode(whole[:15]), None)
    engine.add(EngineRequest("resumed", engine.tokenizer.encode(PROMPT), params, seed=0, resume=[logged]))
    rest: list[int] = []
    while engine.has_work():
        rest += [token for output in engine.step() for token in output.token_ids]
    assert rest == whole[15:]
