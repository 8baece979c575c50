"""Costly grammars at a node, through the client: their jobs fail with an error, other tenants' streams continue."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest
from fakes.cover import FULL
from fakes.processes.running_node import running_node

from penstock.contract.errors import PenstockError, RequestError, TooCostlyError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.engine.structured import protocol
from penstock.producer.client import AsyncClient

POOL = "tiny"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT = [3, 4, 5]
GUIDED = SamplingParams(structured_outputs={"regex": "[a-c]{60,80}"}, max_tokens=100, seed=1)
NUM_HOSTILE = 12 if FULL else 5
MakeEngine = Callable[..., Engine]


def hostile(i: int) -> SamplingParams:
    """A grammar of 60 KB, another one for each number."""
    words = (LETTERS[(j // 676 + i) % 26] + LETTERS[j // 26 % 26] + LETTERS[j % 26] for j in range(3000))
    grammar = "start: " + " | ".join(f"/[a-z]*{word}[a-z]*/" for word in words)
    return SamplingParams(structured_outputs={"grammar": grammar}, max_tokens=60)


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


async def test_many_hostile_grammars_are_refused_beside_a_stream(redis_url: str, engine: Engine) -> None:
    async def refused(client: AsyncClient, i: int) -> PenstockError:
        job = await client.submit(PROMPT, params=hostile(i), tenant="evil")
        with pytest.raises(TooCostlyError) as caught:
            await job.result()
        return caught.value

    async with running_node(redis_url, engine, pool=POOL), AsyncClient(redis_url) as client:
        alone = await (await client.submit(PROMPT, params=GUIDED)).result()
        attack = [asyncio.create_task(refused(client, i)) for i in range(NUM_HOSTILE)]
        gaps, last_s = [], time.monotonic()
        job = await client.submit(PROMPT, params=GUIDED, tenant="good")
        async for _ in job.stream():
            gaps.append(time.monotonic() - last_s)
            last_s = time.monotonic()
        beside = await job.result()
        errors = await asyncio.gather(*attack)
    assert beside.choices[0].token_ids == alone.choices[0].token_ids
    assert {(error.code, error.param) for error in errors} == {("too_costly", "structured_outputs.grammar")}
    assert max(gaps[1:]) < 3.0  # of a loaded machine


async def test_choice_whose_grammar_becomes_too_costly_ends_the_job_with_a_named_error(
    redis_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "GUIDE_CPU_S", -1.0)
    monkeypatch.setattr(protocol, "GUIDE_CPU_PER_TOKEN_S", 0.0)
    async with running_node(redis_url, engine, pool=POOL), AsyncClient(redis_url) as client:
        free = await client.submit(PROMPT, params=SamplingParams(max_tokens=50, ignore_eos=True))
        job = await client.submit(PROMPT, params=GUIDED)
        with pytest.raises(TooCostlyError, match="too costly") as caught:
            await job.result()
        assert caught.value.param == "structured_outputs.regex"
        assert len((await free.result()).choices[0].token_ids) == 50


async def test_stream_continues_token_exact_when_its_grammar_processes_are_killed(
    redis_url: str, engine: Engine
) -> None:
    async with running_node(redis_url, engine, pool=POOL), AsyncClient(redis_url) as client:
        alone = await (await client.submit(PROMPT, params=GUIDED)).result()
        job, killed = await client.submit(PROMPT, params=GUIDED), 0
        async for _ in job.stream():
            if not killed and engine._guides.process_ids:
                (killed,) = engine._guides.process_ids
                os.kill(killed, signal.SIGKILL)
        assert killed
        assert (await job.result()).choices[0].token_ids == alone.choices[0].token_ids


async def test_unenforceable_grammar_is_refused_by_the_node(redis_url: str, engine: Engine) -> None:
    async with running_node(redis_url, engine, pool=POOL), AsyncClient(redis_url) as client:
        job = await client.submit(PROMPT, params=SamplingParams(structured_outputs={"regex": "(a"}))
        with pytest.raises(RequestError, match="cannot be enforced"):
            await job.result()
