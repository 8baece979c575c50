"""What a job will cost: KV tokens, tokens of a rate, bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fakes.queue.harness import new_job
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.errors import PromptTooLongError
from penstock.contract.job import MAX_TOKENS_LIMIT, PREDICTED_OUTPUT_TOKENS, Message, SamplingParams
from penstock.contract.output import UNKNOWN_WAIT, Chunk, TokenLogprobs
from penstock.contract.pool import NodePressure, PoolRecord
from penstock.contract.tasks import Embed, Score
from penstock.contract.tools import ToolCall
from penstock.queue.job_cost import (
    TEMPLATE_TOKENS,
    Ahead,
    estimate_cost,
    estimate_output_bytes,
    expected_wait,
    prompt_bytes,
    rate_tokens,
)
from penstock.queue.wire import encode_chunk

RECORD = PoolRecord("m", "acme/model", max_model_len=1000)
UNLIMITED = PoolRecord("m", "acme/model")


# Waits


def node(**fields: Any) -> NodePressure:
    return NodePressure("n", **fields)


def test_a_wait_is_the_cost_ahead_and_one_held_job_at_the_sum_of_the_paces() -> None:
    held = {"num_jobs": 2, "kv_blocks_total": 100, "block_size": 10, "kv_tokens_available": 800}
    nodes = [node(drain_cost_per_s=30.0, **held), node(drain_cost_per_s=20.0)]
    nodes.append(node(drain_cost_per_s=9.0, draining=True))
    assert expected_wait(nodes, Ahead(4, 400), is_background=False).estimated_wait_ms == 10_000
    assert expected_wait([node()], Ahead(4, 400), is_background=False) == UNKNOWN_WAIT
    assert expected_wait([], Ahead(0, 0), is_background=False) == UNKNOWN_WAIT


def test_background_work_waits_for_each_kind_at_its_pace() -> None:
    paces = {"drain_cost_per_s": 40.0, "background_cost_per_s": 10.0}
    assert expected_wait([node(**paces)], Ahead(4, 400, 100), is_background=True).estimated_wait_ms == 20_000
    older = [node(drain_cost_per_s=40.0)]
    assert expected_wait(older, Ahead(4, 400, 400), is_background=True).estimated_wait_ms == 20_000


def test_an_interval_is_wide_where_the_pace_is_uncertain_or_few_jobs_are_ahead() -> None:
    def p90_of(num_jobs: int, spread: float) -> float:
        nodes = [node(drain_cost_per_s=10.0, pace_spreads=(spread, spread))]
        value, p10, p90 = expected_wait(nodes, Ahead(num_jobs, 1000), is_background=False)
        assert value is not None and p10 is not None and p90 is not None
        assert p10 * p90 == pytest.approx(value**2, rel=0.01), "as far above as below, as a factor"
        return p90 / value

    assert p90_of(10_000, 0.1) == pytest.approx(1.137, abs=0.001)
    assert p90_of(10_000, 0.5) > p90_of(10_000, 0.1)
    assert p90_of(1, 0.1) > p90_of(100, 0.1) > p90_of(10_000, 0.1)
    assert p90_of(10_000, 0.5) == expected_p90(node(drain_cost_per_s=10.0)), "of a node that reports none"


def expected_p90(one: NodePressure) -> float:
    value, _, p90 = expected_wait([one], Ahead(10_000, 1000), is_background=False)
    assert value is not None and p90 is not None
    return p90 / value


# Tokens of a rate


def may_use(prompt: str | int, max_model_len: int, **params: Any) -> int:
    tokens = {"prompt_token_ids": (1,) * prompt} if isinstance(prompt, int) else {"prompt": prompt}
    return rate_tokens(new_job(**tokens, params=SamplingParams(**params)), max_model_len).may_use


def test_a_job_may_use_its_prompt_and_its_longest_outputs_within_the_context() -> None:
    assert may_use(100, 1000, max_tokens=50, n=3) == 250
    assert may_use(100, 1000, max_tokens=2000) == may_use(100, 1000) == 1000
    assert may_use(100, 1000, n=3) == 100 + 3 * 900
    assert may_use(100, 0) == 100 + MAX_TOKENS_LIMIT
    assert may_use(500, 1000, max_tokens=50, truncate_prompt_tokens=20) == 70


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 3))
def test_no_text_of_a_size_can_use_more_than_is_counted(size: int, max_tokens: int, n: int) -> None:
    """A text has at least one token, and at most one for each byte and those of the template."""
    context = 100
    counted = may_use("x" * size, context, max_tokens=max_tokens, n=n)
    for num_prompt in range(1, min(size + TEMPLATE_TOKENS, context - 1) + 1):
        assert num_prompt + n * min(max_tokens, context - num_prompt) <= counted


def test_an_embedding_may_use_its_prompt_alone() -> None:
    job = new_job(prompt_token_ids=(1,) * 100, task=Embed())
    assert rate_tokens(job, 1000) == (100, 0, 0, 100)


# Cost


def test_prompt_to_embed_may_fill_the_context_and_costs_its_tokens() -> None:
    assert estimate_cost(new_job(prompt_token_ids=(1,) * 100, task=Embed()), RECORD) == 101
    assert estimate_cost(new_job(prompt_token_ids=(1,) * 1000, task=Embed()), RECORD) == 1000
    with pytest.raises(PromptTooLongError, match=r"length is 1000 tokens; the prompt has 1001 tokens"):
        estimate_cost(new_job(prompt_token_ids=(1,) * 1001, task=Embed()), RECORD)
    cut = new_job(prompt_token_ids=(1,) * 2000, task=Embed(truncate_prompt_tokens=10))
    assert estimate_cost(cut, RECORD) == 11
    assert estimate_output_bytes(cut, 100) > 4 * 4096


@pytest.mark.parametrize(("size", "fits"), [(7992, True), (7993, False), (10**6, False)])
def test_text_that_cannot_fit_even_in_the_longest_tokens_is_refused(size: int, fits: bool) -> None:
    """Limit 1000 with one of output: 999 tokens of at most 8 bytes."""
    record = replace(RECORD, max_token_bytes=8)
    if fits:
        assert estimate_cost(new_job(prompt="x" * size), record) == 1000
    else:
        with pytest.raises(
            PromptTooLongError, match=r"maximum context length is 1000 tokens.* has at least .* tokens"
        ) as caught:
            estimate_cost(new_job(prompt="x" * size), record)
        assert caught.value.param == "prompt"


def test_each_text_of_a_task_must_be_able_to_fit() -> None:
    record, long, ids = replace(RECORD, max_token_bytes=8, texts_per_job=64), "x" * 8001, (1,) * 1001
    for task, name in (
        (Embed(texts=("a", long), first=3), r"prompt[5]"),
        (Embed(texts=(ids,)), r"prompt[1]"),
        (Score(texts=("a", long)), r"prompt[1]"),
    ):
        with pytest.raises(PromptTooLongError, match="maximum context length is 1000 tokens") as caught:
            estimate_cost(new_job(prompt="q", task=task), record)
        assert caught.value.param == name
        cut = task.model_copy(update={"truncate_prompt_tokens": 1000})
        assert estimate_cost(new_job(prompt="q", task=cut), record) > 0


def test_text_is_not_refused_while_the_longest_token_is_unknown() -> None:
    assert estimate_cost(new_job(prompt="x" * 10**6), RECORD) == 1000


def test_prompt_is_measured_in_utf8_bytes() -> None:
    assert prompt_bytes(new_job(prompt="héllo")) == 6
    assert (
        prompt_bytes(new_job(messages=(Message(role="user", content="hé"), Message(role="system", content="")))) == 13
    )
    assert prompt_bytes(new_job(prompt_token_ids=(1, 2))) == 0


@pytest.mark.parametrize("num", [0, 5, 20])
def test_logprobs_take_the_memory_that_is_estimated_for_them(num: int) -> None:
    def charged(**params: Any) -> int:
        return estimate_output_bytes(new_job(params=SamplingParams(max_tokens=100, **params)), 300)

    entry = TokenLogprobs((40_000,) * (1 + num), (-1.5,) * (1 + num), (b" word",) * (1 + num))
    logged = 100 * (
        len(encode_chunk(Chunk("j", 0, 0, 0, (7,), "x", logprobs=(entry,))))
        - len(encode_chunk(Chunk("j", 0, 0, 0, (7,), "x")))
    )
    for asked in ({"logprobs": num}, {"prompt_logprobs": num}):
        assert logged < charged(**asked) - charged() < 3 * logged


def test_tools_and_calls_cost_by_length_but_no_chat_is_refused_for_them() -> None:
    call = ToolCall(id="c", name="f", arguments=json.dumps({"a": "x" * 286}))
    chat = (Message(role="user", content="", tool_calls=(call,)),)
    tools = json.dumps([{"type": "function", "function": {"name": "x" * 252}}])
    params = SamplingParams(max_tokens=10)
    assert estimate_cost(new_job(messages=chat, params=params), RECORD) == 110
    assert estimate_cost(new_job(messages=chat, tools=tools, params=params), RECORD) == 210
    short = replace(RECORD, max_token_bytes=1, max_model_len=100)
    assert estimate_cost(new_job(messages=chat, tools=tools, params=params), short) == 100


@pytest.mark.parametrize(
    ("prompt", "params", "cost"),
    [
        ({"prompt": "x" * 300}, {"max_tokens": 10}, 110),
        ({"prompt": "x" * 301}, {"max_tokens": 10}, 111),
        ({"prompt_token_ids": (1,) * 50}, {"max_tokens": 10}, 60),
        ({"prompt": "x" * 300}, {"max_tokens": 10, "n": 3}, 130),
        ({"prompt": "x" * 300}, {}, 100 + PREDICTED_OUTPUT_TOKENS),
        ({"prompt": "x" * 300}, {"max_tokens": 900}, 100 + PREDICTED_OUTPUT_TOKENS),
        ({"prompt": "x" * 40_000}, {"max_tokens": 10}, 1000),
        ({"prompt": "x" * 40_000}, {"max_tokens": 10, "n": 2}, 2000),
    ],
)
def test_cost_is_prompt_and_probable_output_within_the_models_length(
    prompt: dict[str, Any], params: dict[str, Any], cost: int
) -> None:
    assert estimate_cost(new_job(**prompt, params=SamplingParams(**params)), RECORD) == cost


def test_outputs_are_predicted_from_recent_ones_of_their_kind() -> None:
    """The longest of what nodes say: each of them may be the one that takes the job."""
    nodes = [
        NodePressure("n1", predicted_outputs=((7, 7, 30), (7, 10, 400))),
        NodePressure("n2", predicted_outputs=((7, 10, 500), (6, 10, 20))),
    ]
    for max_tokens, output in ((127, 30), (20, 20), (1023, 500), (512, 500), (2000, PREDICTED_OUTPUT_TOKENS)):
        job = new_job(prompt_token_ids=(1,) * 100, params=SamplingParams(max_tokens=max_tokens, n=2))
        assert estimate_cost(job, UNLIMITED, nodes) == 100 + 2 * output
    unlimited = NodePressure("n3", predicted_outputs=((7, MAX_TOKENS_LIMIT.bit_length(), 60),))
    assert estimate_cost(new_job(prompt_token_ids=(1,) * 100), UNLIMITED, [unlimited]) == 160


def test_model_of_unknown_length_limits_nothing() -> None:
    job = new_job(prompt="x" * 40_000, params=SamplingParams(max_tokens=1))
    assert estimate_cost(job, UNLIMITED) == 13_335
    assert estimate_cost(new_job(prompt_token_ids=(1,) * 5000), UNLIMITED) == 5256


def test_token_ids_that_cannot_fit_are_refused_at_once() -> None:
    assert estimate_cost(new_job(prompt_token_ids=(1,) * 999), RECORD) == 1000
    with pytest.raises(
        PromptTooLongError, match=r"maximum context length is 1000 tokens.* prompt has 1000 tokens"
    ) as caught:
        estimate_cost(new_job(prompt_token_ids=(1,) * 1000), RECORD)
    assert caught.value.param == "prompt"


@given(st.text(max_size=200), st.integers(1, 16), st.none() | st.integers(1, 2000))
def test_cost_is_positive_and_grows_with_choices(prompt: str, n: int, max_tokens: int | None) -> None:
    one, many = (
        estimate_cost(new_job(prompt=prompt, params=SamplingParams(n=k, max_tokens=max_tokens)), RECORD) for k in (1, n)
    )
    assert 1 <= one <= many <= n * one
