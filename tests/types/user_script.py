"""A script as users of the package write it. The type checkers read it; `reveal_type` lines are held by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from penstock import (
    AsyncClient,
    BusyError,
    Client,
    ClientSettings,
    Engine,
    EngineConfig,
    GatewaySettings,
    Job,
    JobFailedError,
    Message,
    NodeSettings,
    PenstockError,
    Priority,
    Result,
    ResultTimeoutError,
    SamplingParams,
    StructuredOutputs,
    Terms,
)

PARAMS = SamplingParams(max_tokens=8)
MORE = SamplingParams(
    n=2,
    temperature=0.5,
    stop=["\n", "###"],
    logit_bias={5: -1.0},
    structured_outputs=StructuredOutputs(choice=["yes", "no"]),
)
SCHEMA = SamplingParams(stop="\n", structured_outputs={"json": {"type": "object"}})
SETTINGS = ClientSettings(outage_s=5.0)
NODE = NodeSettings(model="model.gguf", redis_url="redis://localhost")
GATEWAY = GatewaySettings(port=0)


def read(client: Client) -> str:
    job: Job = client.submit("Once upon a time", params=PARAMS, priority=Priority.BATCH, terms=Terms(weight=2.0))
    text = "".join(chunk.text for chunk in job.stream())
    result: Result = client.attach(job.id, after=4).result(check=False)
    return text + result.text


def many(client: Client, lines: Iterator[str]) -> int:
    results: list[Result] = client.generate(["Once upon a time"], max_tokens=8, timeout=60.0, check=False)
    results += client.generate([[1, 2, 3], [4, 5]], params=PARAMS)
    texts: list[str] = [result.text for result in client.map(lines, params=PARAMS, max_in_flight=8)]
    for prompt, result in client.map_unordered([[1, 2], [3]], priority=Priority.BATCH, queue_without_node=True):
        print(prompt, result.text, result.token_ids, result.finish_reason)
    (single,) = client.generate("Once upon a time")
    try:
        single = client.submit("Once upon a time").result(timeout=5)
    except ResultTimeoutError as error:
        wait: TimeoutError = error
        print(wait)
    return len(results) + len(texts) + len(single.text)


def chat(client: Client) -> int:
    try:
        result = client.submit([Message(role="user", content="Hello")], max_tokens=8, stop=["."]).result()
    except BusyError as error:
        return error.retry_after_ms
    except (JobFailedError, PenstockError) as error:
        raise SystemExit(error.message) from error
    return 0 if result.usage is None else result.usage.completion_tokens


async def stream() -> None:
    async with AsyncClient("redis://localhost", settings=SETTINGS) as client:
        async for chunk in client.stream([{"role": "user", "content": "Hello"}], temperature=0.0):
            print(chunk.text, end="")
        results: list[Result] = await client.generate([[{"role": "user", "content": "Hello"}]], timeout=9)
        async for result in client.map(result.text for result in results):
            print(result.text)
        async for _, result in client.map_unordered(prompts()):
            print(result.finish_reason)


async def prompts() -> AsyncIterator[str]:
    yield "Once upon a time"


def offline() -> list[str]:
    engine = Engine(Path("model.gguf"), kv_cache_dtype="int8")
    generations = engine.generate(["Once upon a time"], PARAMS)
    again = Engine(EngineConfig(model="model.gguf", kv_cache_dtype="int8")).generate([[1, 2, 3]], [MORE])
    return [generation.text for generation in generations + again]


if __name__ == "__main__":
    with Client() as one:
        print(read(one), chat(one), many(one, iter(["Once upon a time"])), offline())
    asyncio.run(stream())
