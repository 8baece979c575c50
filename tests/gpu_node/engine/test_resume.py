"""A choice that another node began continues exactly where its log ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.engine_runs import drain
from fakes.sentencepiece import write_sentencepiece_tokenizer

from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams
from penstock.contract.output import Usage
from penstock.gpu_node.engine import Engine, ResumedChoice, StepOutput
from penstock.gpu_node.engine.records import EngineRequest

PROMPT = "水門 the gate opens by pressure and stays"
SAMPLED = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    # Its logits do not depend on how a text is cut into steps.
    return make_engine(runner="native", dtype="bfloat16", weight_cache=False)


def _run(engine: Engine, params: SamplingParams, resume: list[ResumedChoice] | None = None) -> list[StepOutput]:
    engine.add(EngineRequest("x", engine.tokenizer.encode(PROMPT), params, seed=7, resume=resume or []))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def _log(outputs: list[StepOutput], choice: int = 0) -> ResumedChoice:
    mine = [output for output in outputs if output.choice == choice]
    return ResumedChoice(
        token_ids=tuple(token_id for output in mine for token_id in output.token_ids),
        text="".join(output.text for output in mine),
        finish_reason=mine[-1].finish_reason if mine else None,
    )


def _stop_in(text: str) -> str:
    """Return a stop string of several characters, which occurs first far into the text."""
    return next(text[at : at + 4] for at in range(len(text) // 2, len(text)) if text.index(text[at : at + 4]) == at)


@pytest.mark.parametrize("with_stop", [False, True])
@pytest.mark.parametrize("params", [SAMPLED, SAMPLED.model_copy(update={"temperature": 0.0, "min_tokens": 10})])
def test_resuming_after_any_token_gives_the_same_tokens_and_text(
    engine: Engine, params: SamplingParams, with_stop: bool
) -> None:
    whole = _run(engine, params)
    if with_stop:
        params = params.model_copy(update={"stop": (_stop_in(_log(whole).text), "never said")})
        whole = _run(engine, params)
        assert whole[-1].finish_reason == "stop"
    for cut in range(len(whole)):
        rest = _run(engine, params, [_log(whole[:cut])])
        assert _log(whole[:cut] + rest) == _log(whole)
        assert rest[0].position == cut
        assert rest[-1].usage == Usage(whole[-1].usage.prompt_tokens, len(whole), rest[-1].usage.cached_tokens)


def test_text_generated_but_not_logged_comes_with_the_next_output(engine: Engine) -> None:
    whole = _run(engine, SAMPLED)
    log = _log(whole[:20])
    behind = ResumedChoice(log.token_ids, log.text[:-3], None)
    assert _log([*whole[:20], *_run(engine, SAMPLED, [behind])]).text[: len(log.text)] == log.text
    rest = _run(engine, SAMPLED, [behind])
    assert rest[0].text.startswith(log.text[-3:])


def test_closed_choices_stay_closed_and_open_ones_continue(engine: Engine) -> None:
    params = SAMPLED.model_copy(update={"n": 3})
    whole = _run(engine, params)
    logs = [_log(whole, 0), _log([output for output in whole if output.position < 11], 1)]
    rest = _run(engine, params, logs)
    assert {output.choice for output in rest} == {1, 2}
    for choice in (1, 2):
        resumed = [output for output in rest if output.choice == choice]
        logged = [output for output in whole if output.choice == choice and output.position < resumed[0].position]
        assert _log(logged + resumed, choice) == _log(whole, choice)
    assert rest[-1].usage is not None and rest[-1].usage.completion_tokens == 90


def test_a_request_whose_choices_are_all_closed_has_nothing_to_do(engine: Engine) -> None:
    whole = _run(engine, SAMPLED)
    assert _run(engine, SAMPLED, [_log(whole)]) == []
    assert engine.usage("x").completion_tokens == 30


def test_a_log_that_lacks_only_the_end_is_ended_without_a_token(engine: Engine) -> None:
    whole = _run(engine, SAMPLED)
    log = _log(whole)
    (end,) = _run(engine, SAMPLED, [ResumedChoice(log.token_ids, log.text[:-1], None)])
    assert (end.position, end.token_ids, end.text, end.finish_reason) == (30, (), log.text[-1:], "length")
    assert end.usage is not None and end.usage.completion_tokens == 30


def test_an_end_found_in_the_log_survives_a_runner_that_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SAMPLED.model_copy(update={"n": 2})
    log = _log(_run(engine, params))
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "submit", lambda plan: 1 / 0)
        engine.add(
            EngineRequest(
                "x", engine.tokenizer.encode(PROMPT), params, seed=7, resume=[replace(log, finish_reason=None)]
            )
        )
        outputs = engine.step()
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert [(output.choice, output.finish_reason) for output in outputs] == [(0, "length")]
    while engine.has_work():
        outputs += engine.step()
    assert outputs[-1].usage is not None and outputs[-1].usage.completion_tokens == 60


@pytest.mark.parametrize(
    "log",
    [
        [ResumedChoice((10, 11), "not this", None)],
        [ResumedChoice((100_000,), "", None)],
        [ResumedChoice((), "", None)] * 2,
        [ResumedChoice((10,) * 31, "", None)],
    ],
)
def test_a_log_of_another_model_or_request_is_refused(engine: Engine, log: list[ResumedChoice]) -> None:
    with pytest.raises(RequestError) as refusal:
        _run(engine, SAMPLED, log)
    assert refusal.value.param == "resume" and not engine.has_work()


def test_a_completion_keeps_the_space_that_joins_it_to_its_prompt_and_a_chat_drops_it(
    make_engine: Callable[..., Engine], model_copy: Path
) -> None:
    write_sentencepiece_tokenizer(model_copy)
    (model_copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    engine = make_engine(model=str(model_copy), runner="native", dtype="bfloat16", weight_cache=False)
    params = SamplingParams(logit_bias={2: 100.0}, max_tokens=3, ignore_eos=True)
    (completion,), (chat,) = (engine.generate(one, params) for one in ("s", [{"role": "user", "content": "s"}]))
    assert (completion.text, chat.text) == (" gate gate gate", "gate gate gate")
    resume = [ResumedChoice((2,), " gate", None)]
    engine.add(EngineRequest("x", [3], params, seed=0, resume=resume))
    assert "".join(output.text for output in drain(engine)) == " gate gate"
