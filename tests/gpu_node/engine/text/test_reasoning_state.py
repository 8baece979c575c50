"""Which tokens of an answer are its reasoning: those that the gateway's parser reads as such."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.calls.opening import CallOpening
from penstock.contract.tool_formats import ToolFormat
from penstock.gpu_node.engine.text.reasoning import NEVER, ReasoningRule, ReasoningState
from penstock.producer.parsing.parsed_text import AnswerFormat

OPENING, CLOSING = "<t>", "</t>"
CALLS = ToolFormat("x", "expressions", call="<c>", name_end="(", arguments_end=")", call_end="</c>")
NAMES = ("a", "aé")
TOKENS = ("<", "t", ">", "/", "</", "t>", "</t", "<t>", "</t>", ">x", "a", " ", "\n", "é", "<c", ">a", "<c>", "(")
BYTES = [token.encode() for token in TOKENS]
FORCED = (12, 8, 12)
texts = st.lists(st.integers(0, len(TOKENS) - 1), max_size=24)


def rule(*, is_open: bool, budget: int | None = None) -> ReasoningRule:
    opening = b"" if is_open else OPENING.encode()
    return ReasoningRule(CLOSING.encode(), FORCED, BYTES, opening, budget=budget)


@given(texts, st.booleans())
def test_state_agrees_with_the_parser_of_answers(token_ids: list[int], is_open: bool) -> None:
    state = ReasoningState(rule(is_open=is_open))
    state.push(token_ids)
    text = "".join(TOKENS[one] for one in token_ids)
    parsed = AnswerFormat(None, "think_open" if is_open else "think", marks=(OPENING, CLOSING)).read(text)
    assert (state.num_tokens > 0) == (bool(token_ids) and (is_open or text.startswith(OPENING)))
    counted = "".join(TOKENS[one] for one in token_ids[: state.num_tokens])
    if state.num_tokens and state.is_over:
        assert CLOSING in counted and CLOSING not in "".join(TOKENS[one] for one in token_ids[: state.num_tokens - 1])
        thought = counted.removeprefix("" if is_open else OPENING).partition(CLOSING)[0]
        assert parsed.reasoning == (thought if is_open else thought.lstrip())
    elif state.num_tokens:
        assert counted == text and CLOSING not in text.removeprefix("" if is_open else OPENING)
    else:
        assert parsed.reasoning == ""


@given(texts, st.booleans())
def test_state_and_parser_end_the_reasoning_at_the_same_call(token_ids: list[int], is_open: bool) -> None:
    state = ReasoningState(replace(rule(is_open=is_open), calls=CallOpening.of(CALLS, NAMES)))
    state.push(token_ids)
    form = AnswerFormat(CALLS, "think_open" if is_open else "think", marks=(OPENING, CLOSING), names=NAMES)
    if not state.has_begun:
        return
    text = "".join(TOKENS[one] for one in token_ids)
    if state.is_over:
        counted = "".join(TOKENS[one] for one in token_ids[: state.num_tokens])
        assert form.read(text).reasoning == form.read(counted).reasoning
        begun = "".join(TOKENS[one] for one in token_ids[: state.num_tokens - 1])
        assert form.read(begun + ".").reasoning.endswith(".")
    else:
        assert form.read(text + ".").reasoning.endswith(".")


def test_call_ends_the_reasoning_so_that_a_budget_does_not_cut_it() -> None:
    mentioned, called = ["t", " ", "<c>", " ", "t"], ["<c>", "\n", "a", "("]
    ids = [TOKENS.index(one) for one in mentioned + called]
    state = ReasoningState(replace(rule(is_open=True, budget=len(ids)), calls=CallOpening.of(CALLS, NAMES)))
    state.push(ids[: len(mentioned)])
    assert not state.is_over
    state.push(ids[len(mentioned) :])
    assert state.is_over and state.forced_token is None


@given(texts, st.booleans(), st.integers(1, 20), st.integers(0, 24))
def test_state_is_a_function_of_the_tokens_however_they_come(
    token_ids: list[int], is_open: bool, budget: int, cut: int
) -> None:
    limited = rule(is_open=is_open, budget=budget)
    whole, parts = ReasoningState(limited), ReasoningState(limited)
    said: list[int] = []
    for token_id in token_ids:
        # A forced token takes the place of what the model would have said.
        forced = whole.forced_token
        said.append(token_id if forced is None else forced)
        whole.push(said[-1:])
    parts.push(said[:cut])
    copied = parts.copy()
    copied.push(said[cut:])
    assert (parts.num_seen, copied.num_seen) == (min(cut, len(said)), len(said))
    for one in (copied,):
        assert (one.num_tokens, one.is_over, one.forced_token) == (whole.num_tokens, whole.is_over, whole.forced_token)
    assert whole.num_tokens <= max(budget, len(OPENING)) + len(FORCED)
    assert (
        ReasoningState(limited).first_limited == budget and ReasoningState(rule(is_open=is_open)).first_limited == NEVER
    )
