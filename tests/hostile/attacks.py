"""The catalogue of attacks by a tenant with a valid API key. Here: the controls and the first table."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from typing import Any

import httpx
from hostile import payloads as p
from hostile.attacker import Attacker
from hostile.catalogue import ATTACKS, MAX_TOKENS, TABLE, Attack, attack

from penstock.contract.tenant import Terms

__all__ = ["ATTACKS", "TABLE", "Attack"]


@attack("nothing", seconds=6.0, load="control")
async def nothing(a: Attacker) -> None:
    await asyncio.sleep(a.until_s - time.monotonic())


@attack("3 scored prompts × 8,000 tokens, a token each", load="control", seconds=5.0, grace_s=120.0)
async def scored_prompts(a: Attacker) -> None:
    prompts = [p.prompt_of(8000, i) for i in range(3)]
    await a.post_all([{"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 0}])


@attack("3 plain prompts × 8,000 tokens, a token each", load="control", seconds=5.0, grace_s=120.0)
async def plain_prompts(a: Attacker) -> None:
    prompts = [p.prompt_of(8000, i) for i in range(3)]
    await a.post_all([{"prompt": prompts, "max_tokens": 1}])


@attack("16 plain streams", load="control")
async def plain_streams(a: Attacker) -> None:
    body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "max_tokens": 200, "temperature": 1}
    await a.post_all([body], at_once=16, repeat=True)


@attack("a grammar of 1,000 alternatives of `/[a-z]*xy[a-z]*/` (47 KB), n of 4", refused=True, seconds=20.0)
async def grammar(a: Attacker) -> None:
    form = {"grammar": p.alternating_grammar()}
    body = {"prompt": "Say", "structured_outputs": form, "n": 4, "max_tokens": 100, "temperature": 2.0}
    await a.post_all([body], at_once=2, repeat=True)


@attack("a dozen such grammars", seconds=20.0)
async def grammars(a: Attacker) -> None:
    bodies = [
        {"prompt": "Say", "structured_outputs": {"grammar": p.alternating_grammar(i)}, "max_tokens": 8}
        for i in range(12)
    ]
    await a.post_all(bodies, at_once=4, repeat=True)


@attack("`choice` of 1,024 texts with one beginning (1 MB), 40 times", refused=True, seconds=20.0)
async def choice(a: Attacker) -> None:
    form = {"choice": p.choice_with_one_beginning()}
    await a.post_all([{"prompt": "Say", "structured_outputs": form, "max_tokens": 8}] * 40, at_once=4)


@attack("3 prompts × 8,000 tokens, `prompt_logprobs: 20`, `n: 16`", seconds=5.0, grace_s=120.0)
async def prompt_logprobs_n(a: Attacker) -> None:
    prompts = [p.prompt_of(8000, i) for i in range(3)]
    await a.post_all([{"prompt": prompts, "prompt_logprobs": 20, "n": 16, "max_tokens": 1}])


@attack("12 histories of 112,000 tool calls (8 MB)", seconds=15.0)
async def tool_histories(a: Attacker) -> None:
    await a.post_all([p.tool_history()] * 12, chat=True)


@attack(
    "scored prompts until Redis (24 MB here) is full",
    seconds=45.0,
    stack={"maxmemory": "24mb", "terms": Terms(tokens_per_minute=120_000)},
)
async def stored_results(a: Attacker) -> None:
    numbers = itertools.count()
    async with a.http() as http:

        async def lane() -> None:
            while not a.is_over:
                prompt = p.prompt_of(1000, next(numbers))
                await a.post(http, {"prompt": prompt, "prompt_logprobs": 20, "max_tokens": 1})
                await asyncio.sleep(0.05)

        await asyncio.gather(*(lane() for _ in range(3)))


@attack('`priority: "interactive"` from a standard key, 64 streams at once', refused=True)
async def interactive_flood(a: Attacker) -> None:
    body = {"prompt": "Say", "priority": "interactive", "stream": True, "ignore_eos": True, "max_tokens": 60}
    await a.post_all([body], at_once=64, repeat=True)


@attack(
    "short answers first, then long ones, with a key of 6,000 tokens a minute",
    seconds=25.0,
    stack={"terms": Terms(tokens_per_minute=6000)},
)
async def short_then_long(a: Attacker) -> None:
    used, began_s = 0, time.monotonic()
    short_until_s = began_s + (a.until_s - began_s) / 3

    async def ask(http: httpx.AsyncClient, **fields: Any) -> int:
        text = await a.post(http, {"prompt": "Say", "max_tokens": MAX_TOKENS, **fields})
        with contextlib.suppress(ValueError, KeyError):
            return int(json.loads(text)["usage"]["total_tokens"])
        await asyncio.sleep(0.1)
        return 0

    async with a.http() as http:
        while time.monotonic() < short_until_s:
            used += await ask(http, stop=["e", "a", "i", "o", " "])

        async def lane() -> int:
            total = 0
            while not a.is_over:
                total += await ask(http, ignore_eos=True)
            return total

        used += sum(await asyncio.gather(*(lane() for _ in range(8))))
    took_s = time.monotonic() - began_s
    allowed = 6000 / 60 * (took_s + Terms().burst_s) + MAX_TOKENS
    a.figures["tokens used ÷ allowed (rate, burst and one job)"] = used / allowed


import hostile.memory_attacks  # noqa: E402
import hostile.other_attacks  # noqa: E402, F401  both enter the rest of the catalogue behind these
