"""Budgets of reasoning: the text that ends it comes in time, whatever node continues the answer, and is counted."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes.engine_runs import check_idle, drain, tokens_of

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, ResumedChoice, StepOutput
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.text.reasoning import ReasoningRule

PROMPTS = ("the gate opens by pressure", "水門 🌊", "Größe " * 20, "a")
NUM_ANSWERS = 200
LONGER = 12
"""Tokens of an answer behind its budget."""
CLOSING = "\n</t>\n\n"


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    # Its logits do not depend on how a text is cut into steps.
    return make_engine(runner="native", max_num_seqs=64, num_kv_blocks=2048)


def rule_of(engine: Engine, closing: str = CLOSING, *, mark: str = "</t>", opening: bytes = b"") -> ReasoningRule:
    """Return a rule whose closing text has several tokens of this model."""
    tokenizer = engine.tokenizer
    ids = tuple(tokenizer.encode(closing, framed=False))
    opening_id = tokenizer.token_bytes.index(opening) if opening in tokenizer.token_bytes else None
    return ReasoningRule(mark.encode(), ids, tokenizer.token_bytes, opening, opening_id)


def request_of(engine: Engine, number: int, rule: ReasoningRule | None, **options: Any) -> EngineRequest:
    prompt = engine.tokenizer.encode(PROMPTS[number % len(PROMPTS)])
    params = SamplingParams(**{"temperature": 1.0, "ignore_eos": True} | options)
    return EngineRequest(str(number), prompt, params, seed=number, begins_text=True, reasoning=rule)


def run(engine: Engine, requests: Sequence[EngineRequest]) -> list[StepOutput]:
    for request in requests:
        engine.add(request)
    return drain(engine)


def reasoning_tokens_of(outputs: Sequence[StepOutput], request_id: str) -> int:
    (usage,) = [output.usage for output in outputs if output.request_id == request_id and output.usage is not None]
    return usage.reasoning_tokens


def text_of(engine: Engine, token_ids: Sequence[int]) -> bytes:
    return b"".join(engine.tokenizer.token_bytes[one] for one in token_ids)


def closing_of(engine: Engine, free: Sequence[int], number: int) -> ReasoningRule:
    """Return a rule whose mark the model never writes, or writes within the answer that it gives without a budget."""
    if number % 3:
        return rule_of(engine)
    letter = chr(text_of(engine, free[len(free) // 2 :]).decode(errors="ignore").strip().encode()[0] & 0x7F)
    return rule_of(engine, f"\n{letter}", mark=letter)


def test_200_answers_end_their_reasoning_at_their_budget_and_repeat_after_a_takeover(engine: Engine) -> None:
    chance = random.Random(7)
    budgets = chance.sample(range(1, NUM_ANSWERS + 1), NUM_ANSWERS)
    limits = {"max_tokens": 0}
    free_runs = [request_of(engine, i, None, **limits | {"max_tokens": b + LONGER}) for i, b in enumerate(budgets)]
    outputs = run(engine, free_runs)
    free = [tokens_of(outputs, str(i)) for i in range(NUM_ANSWERS)]
    rules = [closing_of(engine, tokens, i) for i, tokens in enumerate(free)]
    asked = [
        request_of(engine, i, rule, max_tokens=budget + LONGER, reasoning_budget=budget)
        for i, (rule, budget) in enumerate(zip(rules, budgets, strict=True))
    ]
    outputs = run(engine, asked)
    said = [tokens_of(outputs, str(i)) for i in range(NUM_ANSWERS)]
    num_by_model = 0
    for i, (tokens, rule, budget) in enumerate(zip(said, rules, budgets, strict=True)):
        before = text_of(engine, free[i][:budget])
        counted = reasoning_tokens_of(outputs, str(i))
        if rule.closing in before:
            # The model ended it by itself: nothing is forced.
            num_by_model += 1
            assert tokens == free[i] and counted <= budget
            assert rule.closing in text_of(engine, tokens[:counted])
            assert rule.closing not in text_of(engine, tokens[: counted - 1])
        else:
            end = budget + len(rule.closing_ids)
            assert tokens[:end] == free[i][:budget] + [*rule.closing_ids][: len(tokens) - budget]
            assert counted == min(end, len(tokens))
    assert 10 < num_by_model < NUM_ANSWERS - 10
    taken_over = [
        replace(request, resume=[ResumedChoice(tuple(tokens[:cut]), "", None)])
        for request, tokens in zip(asked, said, strict=True)
        for cut in [chance.randrange(len(tokens))]
    ]
    again = run(engine, taken_over)
    for i, (request, tokens) in enumerate(zip(taken_over, said, strict=True)):
        cut = len(request.resume[0].token_ids)
        assert tokens[:cut] + tokens_of(again, str(i)) == tokens
        assert reasoning_tokens_of(again, str(i)) == reasoning_tokens_of(outputs, str(i))
    check_idle(engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 5, "num_kv_blocks": 256},
        {"speculative": "ngram", "num_kv_blocks": 256},
        {"num_kv_blocks": 24},
    ],
    ids=["chunks", "speculative", "preempted"],
)
def test_budget_gives_the_same_tokens_however_steps_are_made(
    engine: Engine, make_engine: Callable[..., Engine], settings: dict[str, Any]
) -> None:
    other = make_engine(runner="native", **settings)
    options = {"max_tokens": 40, "n": 2, "temperature": 0.3}
    requests = [request_of(engine, i, rule_of(engine), reasoning_budget=9 + i, **options) for i in range(4)]
    want = run(engine, requests)
    # The second time the prompts are in the prefix cache.
    for got in (run(other, requests), run(other, requests)):
        for i in range(4):
            for choice in range(2):
                assert tokens_of(got, str(i), choice) == tokens_of(want, str(i), choice)
            assert reasoning_tokens_of(got, str(i)) == 2 * (9 + i + len(rule_of(engine).closing_ids))


def test_only_what_begins_with_the_mark_is_reasoning(engine: Engine) -> None:
    free = tokens_of(run(engine, [request_of(engine, 0, None, max_tokens=30)]), "0")
    begin = text_of(engine, free[:3])
    for opening, is_reasoning in ((begin, True), (begin + b"@", False)):
        rule = rule_of(engine, opening=opening)
        outputs = run(engine, [request_of(engine, 0, rule, max_tokens=30, reasoning_budget=1)])
        # The budget is over before the mark is complete, and what has not begun does not end.
        want = [*free[:3], *rule.closing_ids] if is_reasoning else free[:8]
        assert tokens_of(outputs, "0")[: len(want)] == want
        assert reasoning_tokens_of(outputs, "0") == (len(want) if is_reasoning else 0)


def test_nothing_that_the_caller_bans_keeps_the_closing_text_back(engine: Engine) -> None:
    rule = rule_of(engine)
    options = {"logit_bias": dict.fromkeys(rule.closing_ids, -100.0), "bad_words": ["</t>", "t"], "min_tokens": 20}
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 2.0, "top_k": 1}
    asked = request_of(engine, 1, rule, max_tokens=30, reasoning_budget=5, ignore_eos=False, **options, **penalties)
    tokens = tokens_of(run(engine, [asked]), "1")
    assert tuple(tokens[5 : 5 + len(rule.closing_ids)]) == rule.closing_ids


def test_grammar_begins_behind_the_reasoning(engine: Engine) -> None:
    rule, wanted = rule_of(engine), {"regex": "[a-c]{3}-[0-9]{2}"}
    options = {"max_tokens": 60, "structured_outputs": wanted, "ignore_eos": False}
    plain = request_of(engine, 5, None, max_tokens=30)
    asked = [request_of(engine, i, rule, reasoning_budget=4 + i, **options) for i in range(4)]
    whole = run(engine, [*asked, plain])
    assert tokens_of(whole, "5") == tokens_of(run(engine, [plain]), "5")
    for i, request in enumerate(asked):
        tokens = tokens_of(whole, str(i))
        end = 4 + i + len(rule.closing_ids)
        answer = "".join(output.text for output in whole if output.request_id == str(i)).rpartition(CLOSING)[2]
        assert re.fullmatch(wanted["regex"], answer) and reasoning_tokens_of(whole, str(i)) == end
        for cut in (1, 5 + i, end, end + 1):
            rest = run(engine, [replace(request, resume=[ResumedChoice(tuple(tokens[:cut]), "", None)])])
            assert tokens[:cut] + tokens_of(rest, str(i)) == tokens
    check_idle(engine)


def test_grammar_lets_the_model_choose_whether_to_reason(engine: Engine) -> None:
    wanted = {"choice": ["yes", "no"]}
    options = {"structured_outputs": wanted, "max_tokens": 40, "reasoning_budget": 6, "ignore_eos": False}
    rule = rule_of(engine, opening=b"q")
    assert rule.opening_id is not None
    for bias, has_thought in ((100.0, True), (-100.0, False)):
        asked = request_of(engine, 2, rule, logit_bias={rule.opening_id: bias}, **options)
        outputs = run(engine, [asked])
        text = "".join(output.text for output in outputs)
        assert text.endswith(("yes", "no")) and (reasoning_tokens_of(outputs, "2") > 0) == has_thought
        assert has_thought or text in ("yes", "no")


def test_best_choices_keep_to_the_budget_and_beams_refuse_it(engine: Engine) -> None:
    rule = rule_of(engine)
    outputs = run(engine, [request_of(engine, 3, rule, max_tokens=20, best_of=3, reasoning_budget=4)])
    assert tuple(tokens_of(outputs, "3")[4 : 4 + len(rule.closing_ids)]) == rule.closing_ids
    with pytest.raises(ValueError, match="use_beam_search"):
        SamplingParams(use_beam_search=True, n=2, reasoning_budget=4)


def test_steps_without_budgets_have_no_masks(engine: Engine) -> None:
    engine.add(request_of(engine, 0, rule_of(engine), max_tokens=12))
    table = engine._scheduler._table
    while engine.has_work():
        engine.step()
        assert not table._last.are_limited and not table._last.look_back
