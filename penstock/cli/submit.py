"""`penstock submit`: one job from the shell, its answer streamed to stdout."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any, Literal

import typer

from penstock.runtime.settings import redis_url_of

PriorityName = Literal["interactive", "standard", "batch"]


def submit(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from stdin.")],
    model: Annotated[str | None, typer.Option(help="Pool or alias; may be left out when one is served.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, not as a chat.")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Only of the likeliest tokens, up to this share together.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop what is less likely than this share of the likeliest.")] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="Against saying a token again.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time it was said.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    priority: Annotated[PriorityName, typer.Option(help="Who goes first.")] = "standard",
    deadline: Annotated[float | None, typer.Option(help="Seconds after which the answer is of no use.")] = None,
    not_before: Annotated[float | None, typer.Option(help="Seconds before it stands in line.")] = None,
    tenant: Annotated[str, typer.Option(help="On whose behalf.")] = "default",
    redis_url: Annotated[str | None, typer.Option(help="Redis of the pools; default: $PENSTOCK_REDIS_URL.")] = None,
) -> None:
    """Submit a prompt and print the answer as it comes. Ctrl-C cancels the job."""
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    times = {"deadline_s": deadline, "not_before_s": not_before}
    options = {"model": model, "tenant": tenant, **times, **sampling}
    asyncio.run(
        _stream(redis_url_of(redis_url), text if raw else [{"role": "user", "content": text}], priority, options)
    )


async def _stream(
    redis_url: str, prompt: str | list[dict[str, str]], priority: PriorityName, options: dict[str, Any]
) -> None:
    from penstock.contract.job import Priority
    from penstock.producer.client import AsyncClient

    async with AsyncClient(redis_url) as client:
        job = await client.submit(prompt, priority=Priority[priority.upper()], background=False, **options)
        try:
            async for chunk in job.stream():
                print(chunk.text, end="", flush=True)
        except asyncio.CancelledError:
            await job.cancel()
            raise
        finally:
            print()
