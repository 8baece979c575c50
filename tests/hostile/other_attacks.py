"""The rest of the catalogue: forms, limits, connections, heads, and attacks without an API key."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

import httpx
from hostile import payloads as p
from hostile.attacker import Attacker
from hostile.catalogue import attack


@attack("`choice` of 512 texts of 512 characters with one beginning, others each time", seconds=15.0)
async def choices_at_limit(a: Attacker) -> None:
    forms = ({"choice": p.choice_with_one_beginning(i, count=512, chars=512)} for i in range(200))
    bodies = [{"prompt": "Say", "structured_outputs": form, "max_tokens": 8} for form in forms]
    await a.post_all(bodies, at_once=4)


@attack("histories of 4,096 tool calls, 4 at once", seconds=10.0)
async def tool_calls_at_limit(a: Attacker) -> None:
    await a.post_all([p.tool_history(4096)], at_once=4, chat=True, repeat=True)


@attack("regular expressions with large automata", seconds=20.0)
async def regexes(a: Attacker) -> None:
    bodies = [{"prompt": "Say", "structured_outputs": {"regex": one}, "max_tokens": 30, "n": 4} for one in p.regexes()]
    await a.post_all(bodies, at_once=4, repeat=True)


@attack("schemas that explode: enums, references, counts, patterns", seconds=20.0)
async def schemas(a: Attacker) -> None:
    bodies = [{"prompt": "Say", "structured_outputs": {"json": one}, "max_tokens": 30, "n": 2} for one in p.schemas()]
    await a.post_all(bodies, at_once=4, repeat=True)


@attack("a fresh form each time: nothing is cached", seconds=15.0)
async def fresh_forms(a: Attacker) -> None:
    texts = [f"text-{i}" for i in range(200)]
    bodies = [
        {"prompt": "Say", "structured_outputs": {"json": {"enum": [f"{i}", *texts]}}, "max_tokens": 4}
        for i in range(4000)
    ]
    await a.post_all(bodies, at_once=8)


@attack("stop strings, biases, bad words and penalties at their limits, n of 16", load="16 sequences beside it")
async def options_at_limits(a: Attacker) -> None:
    await a.post_all([{"prompt": "Say", **p.options_at_limits()}], at_once=1, repeat=True)


@attack("64 prompts × n of 16", load="a full batch beside it")
async def many_choices(a: Attacker) -> None:
    body = {"prompt": [f"{i}. Say" for i in range(64)], "n": 16, "max_tokens": 8, "stream": True}
    await a.post_all([body], at_once=1, repeat=True)


@attack("n of 16 × `logprobs: 20` × 700 tokens, in one piece", load="16 sequences beside it", seconds=10.0)
async def logprobs_whole(a: Attacker) -> None:
    body = {"prompt": "Say", "n": 16, "logprobs": 20, "max_tokens": 700, "ignore_eos": True}
    await a.post_all([body], at_once=1)


@attack("texts of one long word, of marks, of joined emoji (60 KB)", seconds=10.0)
async def odd_texts(a: Attacker) -> None:
    bodies = [{"prompt": text, "max_tokens": 1} for text in p.odd_texts()]
    await a.post_all(bodies, at_once=4, repeat=True)


@attack("prompts of 8 MB", refused=True)
async def huge_prompts(a: Attacker) -> None:
    bodies = [{"prompt": text * (p.MAX_BODY // len(text) - 1)} for text in ("a", "water stands high. ", "1 ")]
    await a.post_all(bodies, at_once=2, repeat=True)


@attack("chats of 4,096 turns", refused=True, seconds=10.0)
async def long_chats(a: Attacker) -> None:
    turns = [{"role": role, "content": "water " * 20} for role in ("user", "assistant")] * 2048
    await a.post_all([{"messages": turns, "max_tokens": 1}], at_once=4, chat=True, repeat=True)


@attack("bodies of 8 MB that are no valid request", refused=True, seconds=25.0)
async def broken_bodies(a: Attacker) -> None:
    await a.post_all(p.broken_json(), at_once=2, repeat=True)


@attack("128 tools of 2 KB each, 8 chats at once", refused=True, seconds=10.0)
async def many_tools(a: Attacker) -> None:
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(50)}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": parameters, "strict": True}}
        for i in range(128)
    ]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    await a.post_all([body], at_once=8, chat=True, repeat=True)


@attack("700 connections: idle, with half a head, with a body of a byte a second", seconds=15.0)
async def slow_connections(a: Attacker) -> None:
    connections = [a.connect() for _ in range(700)]
    head = a.head(1000)
    for connection in connections[300:500]:
        connection.sendall(head + b"x-slow: ")
    for connection in connections[500:]:
        connection.sendall(head + b"\r\n{")
    at = 0
    while not a.is_over:
        for connection in connections[300:]:
            with contextlib.suppress(OSError):
                connection.sendall(b"x" if at % 2 else b" ")
        at += 1
        await asyncio.sleep(1)
    for connection in connections:
        connection.close()
    a.note("700 connections")


@attack("24 streams with `logprobs: 20` that are never read", load="24 sequences beside it", seconds=15.0)
async def unread_streams(a: Attacker) -> None:
    body = p.as_body(a.model, prompt="Say", stream=True, max_tokens=1000, logprobs=20, ignore_eos=True)
    connections = []
    for _ in range(24):
        connection = a.connect()
        connection.sendall(a.head(len(body)) + b"\r\n" + body)
        connections.append(connection)
    await asyncio.sleep(a.until_s - time.monotonic())
    for connection in connections:
        connection.close()
    a.note("24 streams")


@attack("streams that are left after their first bytes, 16 at a time", load="16 sequences beside it")
async def cancel_storm(a: Attacker) -> None:
    body = {"model": a.model, "prompt": "Once upon a time", "stream": True, "ignore_eos": True, "max_tokens": 500}

    async def lane(http: httpx.AsyncClient) -> None:
        while not a.is_over:
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    break
            a.note(str(answer.status_code))

    async with a.http() as http:
        await asyncio.gather(*(lane(http) for _ in range(16)))


@attack("heads at their limit, broken heads, wrong API keys", refused=True, seconds=10.0)
async def odd_heads(a: Attacker) -> None:
    rng = random.Random(1)
    heads: list[dict[str, str]] = [
        {"x-long": "a" * 65_000},
        {"x-long": "a" * 70_000},
        {f"x-{i}": "a" * 50 for i in range(1000)},
        {"idempotency-key": "k" * 201},
        {"last-event-id": "x" * 60_000},
        {"content-encoding": "gzip"},
        {"authorization": "Bearer " + "k" * 60_000},
        {"authorization": "Basic " + "k" * 100},
    ]

    async def lane(http: httpx.AsyncClient) -> None:
        for _ in a.rounds():
            wrong = f"pk-{rng.getrandbits(64):016x}-{'a' * 43}"
            await a.post(http, {"prompt": []}, headers=rng.choice([*heads, {"authorization": f"Bearer {wrong}"}]))

    async with a.http() as http:
        await asyncio.gather(*(lane(http) for _ in range(4)))


@attack("one idempotency key for other bodies, and all at once for the same", seconds=8.0)
async def same_key(a: Attacker) -> None:
    async with a.http() as http:
        for number, _ in enumerate(a.rounds()):
            key = {"idempotency-key": f"k{number}"}
            bodies = [{"prompt": f"{i % 3}", "max_tokens": 2} for i in range(12)]
            await asyncio.gather(*(a.post(http, body, headers=key) for body in bodies))


@attack("lists of 1,000 jobs, accepted and refused, 4 at once", seconds=10.0)
async def lists_of_jobs(a: Attacker) -> None:
    late = {"model": a.model, "prompt": "Say", "max_tokens": 1, "not_before_s": 5, "ttl_s": 5.1}
    lists: list[list[dict[str, Any]]] = [
        [late] * 1000,
        [{**late, "heat": i} for i in range(1000)],
        [{**late, "prompt": "word " * 1600, "ttl_s": 0} for _ in range(900)],
    ]

    async def lane(http: httpx.AsyncClient) -> None:
        for number, _ in enumerate(a.rounds()):
            answer = await http.post("/v1/jobs", json=lists[number % len(lists)])
            a.note(str(answer.status_code))

    async with a.http() as http:
        await asyncio.gather(*(lane(http) for _ in range(4)))


@attack("`Last-Event-ID` of jobs that are another tenant's, or nobody's", refused=True, seconds=6.0)
async def forged_places(a: Attacker) -> None:
    rng = random.Random(2)
    async with a.http() as http:
        for _ in a.rounds():
            forged = f"hostile.01890000-0000-7000-8000-{rng.getrandbits(48):012x}:0:0"
            for place in (forged, a.foreign_place, "a:1:1", f"{forged}9"):
                await a.post(http, {"prompt": "x", "stream": True}, headers={"last-event-id": place})


@attack("`chat_template_kwargs` at their limits, 8 chats at once", seconds=10.0)
async def template_variables(a: Attacker) -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    variables: list[dict[str, Any]] = [
        {"x": "{{ messages }}" * 1_000},
        {f"a{i}": list(range(40)) for i in range(64)},
        {"deep": deep},
        {"enable_thinking": "{% for i in range(99999) %}" * 500},
    ]
    messages = [{"role": "user", "content": "{% for i in range(10**9) %}{% endfor %}"}]
    bodies = [{"messages": messages, "max_tokens": 1, "chat_template_kwargs": one} for one in variables]
    await a.post_all(bodies, at_once=8, chat=True, repeat=True)


@attack("schemas whose patterns backtrack on their own names of properties", refused=True, seconds=10.0)
async def backtracking_patterns(a: Attacker) -> None:
    bodies = [
        {
            "prompt": "x",
            "max_tokens": 8,
            "structured_outputs": {
                "json": {
                    "type": "object",
                    "propertyNames": {"pattern": f"^(a+)+{i}$"},
                    "properties": {"a" * 60 + "b": {"type": "string"}},
                }
            },
        }
        for i in range(4)
    ]
    await a.post_all(bodies, at_once=4, repeat=True)
