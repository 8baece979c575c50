"""`penstock submit`: submit one job from the shell and stream its answer to stdout."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any, Literal

import typer

from penstock.cli.command_line.panels import queue_option, sampling_option
from penstock.cli.options import REDIS_URL_HELP
from penstock.cli.output import write_text
from penstock.runtime.settings import redis_url_of

PriorityName = Literal["interactive", "standard", "batch"]


def submit(
    prompt: Annotated[str, typer.Argument(help="The prompt. - reads it from stdin.")],
    model: Annotated[
        str | None, typer.Option(help="Name or alias of the model. Optional if only one pool is served.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, not as a chat.")] = False,
    max_tokens: Annotated[
        int | None, sampling_option(min=1, help="Most tokens of the answer. Default: up to the model's context length.")
    ] = None,
    temperature: Annotated[
        float, sampling_option(min=0.0, help="Sampling temperature. 0 always picks the most likely token.")
    ] = 1.0,
    top_p: Annotated[
        float, sampling_option(help="Sample from the most likely tokens that together reach this probability.")
    ] = 1.0,
    min_p: Annotated[
        float, sampling_option(help="Drop tokens below this fraction of the most likely token's probability.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, sampling_option(help="Lower the score of tokens that already occurred in the answer.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, sampling_option(help="Lower the score of a token for each earlier occurrence in the answer.")
    ] = 0.0,
    seed: Annotated[
        int | None, sampling_option(help="Random seed. The same seed gives the same answer. Default: random.")
    ] = None,
    stop: Annotated[
        list[str] | None, sampling_option(help="End the answer before this text. Repeat it for several.")
    ] = None,
    priority: Annotated[PriorityName, queue_option(help="Priority class of the job.")] = "standard",
    deadline: Annotated[
        float | None, queue_option(help="Seconds after which an unfinished job is ended. Default: no deadline.")
    ] = None,
    not_before: Annotated[
        float | None, queue_option(help="Seconds to wait before the job may run. Default: no wait.")
    ] = None,
    tenant: Annotated[str, queue_option(help="Tenant for which the job runs.")] = "default",
    redis_url: Annotated[str | None, queue_option(help=REDIS_URL_HELP)] = None,
) -> None:
    """Submit a prompt and print the answer while it is generated. Ctrl-C cancels the job.

    Examples:
        penstock submit "Name three rivers." --max-tokens 64
        penstock submit - --temperature 0 < question.txt
    """
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
                write_text(chunk.text)
        except asyncio.CancelledError:
            await job.cancel()
            raise
        finally:
            print()
