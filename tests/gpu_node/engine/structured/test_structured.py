"""Structured answers: each has its form, in a batch with other rows, and after a takeover at any token."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from fakes.engine_runs import check_idle, drain, tokens_of
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams
from penstock.contract.tool_formats import FORMATS
from penstock.gpu_node.engine import Engine, EngineConfig, ResumedChoice
from penstock.gpu_node.engine.records import EngineRequest
from penstock.producer.parsing.parsed_text import AnswerFormat

MAX_TOKENS = 200
"""The longest text of each form below has fewer."""


class River(BaseModel):
    """A schema whose every text is short."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, StringConstraints(max_length=6)]
    length_km: Annotated[int, Field(ge=1, le=9999)]
    kind: Literal["brook", "stream", "river"]
    flows_into: Annotated[list[Literal["sea", "lake"]], Field(max_length=3)]
    is_deep: bool


def _is_river(text: str) -> bool:
    return River.model_validate_json(text) is not None


def _is_nested(text: str) -> bool:
    return re.fullmatch(r"(a*)c(b*)", text) is not None and text.count("a") == text.count("b") <= 3


def _is_called(text: str) -> bool:
    calls = AnswerFormat(FORMATS["hermes"]).read(text).calls
    return calls != () and all(call.name == "river" and _is_river(call.arguments) for call in calls)


CALLS = {
    "form": {"name": "hermes", "kind": "json", "call": "<tool_call>", "call_end": "</tool_call>", "padding": "\n"},
    "parallel": False,
    "functions": [{"name": "river", "parameters": json.dumps(River.model_json_schema())}],
}
REGEX = r"[a-c]{2,5}-[0-9]{1,9}x"
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json": ({"json": River.model_json_schema()}, _is_river),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    "choice": ({"choice": ["yes", "no", 'ż"ół\\w\n']}, lambda text: text in ("yes", "no", 'ż"ół\\w\n')),
    "calls": ({"calls": CALLS}, _is_called),
    "grammar": ({"grammar": 'start: one | "a" one "b" | "aa" one "bb" | "aaa" one "bbb"\none: "c"'}, _is_nested),
}


def _params(form: str | None, **options: Any) -> SamplingParams:
    wanted = None if form is None else FORMS[form][0]
    return SamplingParams(**{"temperature": 1.0, "max_tokens": MAX_TOKENS, "structured_outputs": wanted} | options)


MOSTLY_NATIVE = pytest.mark.parametrize(
    "make", [pytest.param("torch", marks=pytest.mark.slow), "native"], indirect=True, scope="module"
)
"""For tests of the guides and of the engine. Two tests of every run show that both runners apply masks."""


@pytest.fixture(scope="module", params=["torch", "native"])
def make(request: pytest.FixtureRequest, tiny_model: Path) -> Callable[..., Engine]:
    """Make an engine on each runner."""
    dtype = {"torch": "float32", "native": "bfloat16"}[request.param]
    plain = {
        "model": str(tiny_model),
        "runner": request.param,
        "dtype": dtype,
        "num_kv_blocks": 400,
        "weight_cache": False,
    }
    return lambda **settings: Engine(EngineConfig(**plain | settings))


@pytest.fixture(scope="module")
def engine(make: Callable[..., Engine]) -> Engine:
    return make()


def _batch(forms: list[str | None], **options: Any) -> list[SamplingParams]:
    return [_params(form, seed=i, **options) for i, form in enumerate(forms)]


def test_every_answer_matches_its_grammar_and_unconstrained_rows_do_not_change(engine: Engine) -> None:
    forms = [*FORMS, None] * 6
    answers = engine.generate(["the gate"] * len(forms), _batch(forms))
    for form, answer in zip(forms, answers, strict=True):
        if form is not None:
            choice = answer.choices[0]
            assert FORMS[form][1](choice.text) and choice.finish_reason == "stop"
    free = [answer.choices for form, answer in zip(forms, answers, strict=True) if form is None]
    alone = [params for form, params in zip(forms, _batch(forms), strict=True) if form is None]
    assert free == [answer.choices for answer in engine.generate(["the gate"] * len(alone), alone)]
    texts = {answer.choices[0].text for form, answer in zip(forms, answers, strict=True) if form == "json"}
    assert len(texts) == 6
    check_idle(engine)


@MOSTLY_NATIVE
@pytest.mark.parametrize("form", FORMS)
def test_all_choices_match_the_grammar_and_sampling_options_apply(engine: Engine, form: str) -> None:
    (answer,) = engine.generate(["the gate"], _params(form, n=5, seed=3, frequency_penalty=0.5, top_k=40))
    assert all(FORMS[form][1](choice.text) for choice in answer.choices)
    greedy = engine.generate(["the gate"] * 2, _params(form, temperature=0.0))
    assert greedy[0].choices == greedy[1].choices and FORMS[form][1](greedy[0].choices[0].text)


@MOSTLY_NATIVE
def test_preemption_chunks_and_batching_change_no_constrained_tokens(
    make: Callable[..., Engine], engine: Engine
) -> None:
    forms = ["json", "regex", None, "calls", "grammar"] * 4
    tight = make(num_kv_blocks=30, max_num_batched_tokens=32, max_num_seqs=16)
    prompts = [f"the gate {i} opens by pressure and stays" for i in range(len(forms))]
    answers = tight.generate(prompts, _batch(forms))
    assert tight.stats().num_preemptions > 0
    assert [answer.choices for answer in answers] == [
        answer.choices for answer in engine.generate(prompts, _batch(forms))
    ]


@MOSTLY_NATIVE
@pytest.mark.parametrize("form", FORMS)
def test_takeover_of_a_constrained_choice_is_token_exact(engine: Engine, form: str) -> None:
    prompt, params = engine.tokenizer.encode("the gate"), _params(form)
    engine.add(EngineRequest("whole", prompt, params, seed=7))
    whole = tokens_of(drain(engine), "whole")
    for cut in range(1, len(whole), max(1, len(whole) // 3)):
        logged = ResumedChoice(tuple(whole[:cut]), "", None)
        engine.add(EngineRequest("rest", prompt, params, seed=7, resume=[logged]))
        assert tokens_of(drain(engine), "rest") == whole[cut:]


NOTHING = json.dumps({"properties": {}, "additionalProperties": False})
NAMED = {"<|im_end|>": "a<|im_end|>b"}
"""A property and a value that spell the token which ends this model's texts."""


@MOSTLY_NATIVE
@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"json": {"const": NAMED}}, json.dumps(NAMED)),
        ({"json": {"enum": ["<|im_start|>"]}}, '"<|im_start|>"'),
        ({"regex": r"<\|im_start\|>{2}x"}, "<|im_start|>>x"),
        ({"choice": ["<|im_end|>"]}, "<|im_end|>"),
        ({"grammar": 'start: "<|im_" "end|>" <|im_start|> "<|endoftext|>"'}, "<|im_end|><|endoftext|>"),
        (
            {
                "calls": {
                    "form": {
                        "name": "hermes",
                        "kind": "json",
                        "call": "<tool_call>",
                        "call_end": "</tool_call>",
                        "padding": "\n",
                    },
                    "parallel": False,
                    "functions": [{"name": "f<|im_end|>", "parameters": NOTHING}],
                }
            },
            '<tool_call>\n{"name": "f<|im_end|>", "arguments": {}}\n</tool_call>',
        ),
    ],
)
def test_name_of_a_special_token_is_spelled_with_ordinary_tokens(
    engine: Engine, wanted: dict[str, Any], text: str
) -> None:
    params = SamplingParams(structured_outputs=wanted, temperature=1.0, max_tokens=MAX_TOKENS, n=3, seed=1)
    (answer,) = engine.generate(["the gate"], params)
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [(text, "stop")] * 3
    logged = ResumedChoice(answer.choices[0].token_ids[:5], "", None)
    engine.add(
        EngineRequest(
            "rest", engine.tokenizer.encode("the gate"), params.model_copy(update={"n": 1}), seed=1, resume=[logged]
        )
    )
    assert tokens_of(drain(engine), "rest") == list(answer.choices[0].token_ids[5:])


@MOSTLY_NATIVE
def test_log_that_does_not_match_the_grammar_ends_the_choice_with_a_named_error(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("the gate")
    logged = ResumedChoice(tuple(engine.tokenizer.encode("yes")), "yes", None)
    engine.add(EngineRequest("x", prompt, _params("regex"), seed=7, resume=[logged]))
    *_, last = drain(engine)
    assert last.finish_reason == "error" and last.error is not None
    assert last.error.param == "resume" and "do not match" in last.error.message
    check_idle(engine)


@MOSTLY_NATIVE
@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"json": {"type": "text"}}, "json_schema"),
        ({"json": {"not": {"pattern": "a"}}}, "json_schema"),
        ({"regex": "(a"}, "regex"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"grammar": "start: start"}, "grammar"),
        ({"json": {"$ref": "#"}}, "json_schema"),
        ({"json": '{"items":' * 200 + "{}" + "}" * 200}, "json_schema"),
    ],
)
def test_unenforceable_grammars_are_refused_by_field(engine: Engine, wanted: dict[str, Any], param: str) -> None:
    params = SamplingParams(structured_outputs=wanted)
    for refusing in (lambda: engine.prepare(params), lambda: engine.generate(["x"], params)):
        with pytest.raises(RequestError, match="cannot be enforced") as caught:
            refusing()
        assert caught.value.param == f"structured_outputs.{param}"
    check_idle(engine)


@MOSTLY_NATIVE
def test_cached_refusal_keeps_no_frames_of_its_callers_alive(engine: Engine) -> None:
    params = SamplingParams(structured_outputs={"regex": "(b"})

    class Local:
        """A variable of a call."""

    def refused_call() -> weakref.ref[Local]:
        local = Local()
        with suppress(RequestError):
            engine.prepare(params)
        return weakref.ref(local)

    locals_of_calls = [refused_call() for _ in range(3)]
    gc.collect()
    assert [local() for local in locals_of_calls] == [None] * 3


@MOSTLY_NATIVE
def test_choice_whose_grammar_exceeds_the_limits_ends_with_an_error_not_with_stop(engine: Engine) -> None:
    params = _params(None, structured_outputs={"regex": r"(\p{L}{0,1000}\w{0,1000}){0,100}-end"}, n=8, seed=1)
    (answer,) = engine.generate(["the gate"], params)
    assert "error" in [choice.finish_reason for choice in answer.choices]
    assert all(choice.text.endswith("-end") for choice in answer.choices if choice.finish_reason == "stop")
    check_idle(engine)


@MOSTLY_NATIVE
def test_prepared_grammar_stays_usable_after_its_eviction_from_the_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = _params(None, structured_outputs={"regex": "held"})
    prepared = engine.prepare(params)
    engine._guides._known.clear()
    monkeypatch.setattr(engine._guides._host, "try_out", None)
    assert engine.prepare(params).grammar is prepared.grammar
    assert engine.generate(["x"], params)[0].choices[0].text == "held"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_hundred_answers_of_the_real_model_are_valid(demo_gguf: Path) -> None:
    engine = Engine(EngineConfig(model=str(demo_gguf), kv_cache_tokens=16384))
    chats = [[{"role": "user", "content": f"Describe river number {i} in JSON."}] for i in range(500)]
    answers = engine.generate(chats, _batch(["json"] * 500))
    assert [answer.choices[0].finish_reason for answer in answers] == ["stop"] * 500
    assert all(_is_river(answer.choices[0].text) for answer in answers)
