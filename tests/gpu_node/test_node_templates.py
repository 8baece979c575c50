"""A chat template that never ends: its chats fail by name, and other streams of the node go on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.processes.running_node import running_node

from penstock.contract.errors import TooCostlyError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.engine.text import chat
from penstock.producer.client import AsyncClient

LOOP = "{% for a in range(99999) %}"
ENDLESS = 3 * LOOP + 3 * "{% endfor %}"
PROMPT, PARAMS = [3, 4, 5], SamplingParams(max_tokens=60, seed=1, ignore_eos=True)
NUM_CHATS = 6
MAX_HOLD_S = 20.0
"""Of a crowded machine. Without a process of its own, the template holds the loop for hours."""


async def longest_hold_s(ended: asyncio.Event) -> float:
    longest = 0.0
    while not ended.is_set():
        began_s = time.monotonic()
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - began_s)
    return longest


async def test_an_endless_template_fails_its_chats_and_holds_no_loop(
    redis_url: str, model_copy: Path, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MAX_RENDER_CPU_S", 0.5)
    config = model_copy / "tokenizer_config.json"
    endless = "{% if messages[0].content == 'x' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": endless}))
    (model_copy / "chat_template.jinja").unlink(missing_ok=True)
    engine, ended = make_engine(model=str(model_copy)), asyncio.Event()

    async def refused(client: AsyncClient) -> str:
        job = await client.submit([{"role": "user", "content": "x"}], tenant="evil", max_tokens=4)
        with pytest.raises(TooCostlyError) as caught:
            await job.result()
        return caught.value.message

    async with running_node(redis_url, engine, pool="copy"), AsyncClient(redis_url) as client:
        alone = await (await client.submit(PROMPT, params=PARAMS)).result()
        holds = asyncio.create_task(longest_hold_s(ended))
        attack = [asyncio.create_task(refused(client)) for _ in range(NUM_CHATS)]
        beside = await (await client.submit(PROMPT, params=PARAMS, tenant="good")).result()
        hello = await client.submit([{"role": "user", "content": "hello"}], tenant="good", max_tokens=4)
        assert (await hello.result()).choices[0].token_ids
        assert not all(task.done() for task in attack), "the good tenant's chat waits for none of these"
        errors = await asyncio.gather(*attack)
        ended.set()
        assert await holds < MAX_HOLD_S
    assert beside.choices[0].token_ids == alone.choices[0].token_ids
    assert {"messages: the rendered chat takes more than 0.5 s of CPU time or 15 s"} == set(errors)
