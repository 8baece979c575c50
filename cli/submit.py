"""`penstock submit`: submit one job from the shell and stream its answer to stdout."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any, Literal

import typer

from penstock.cli.command_line import queue_option, sampling_option
from penstock.cli.options import REDIS_URL_HELP
from penstock.cli.output import write_text
from penstock.contract.errors import RequestError
from penstock.runtime.settings import redis_url_of

_DEFAULT = "Default: what the model recommends."
PriorityName = Literal["interactive", "standard", "batch"]


def submit(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt. - reads it from stdin, which is the default for a pipe.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name or alias of the model. Optional if only one pool is served.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, not as a chat.")] = False,
    max_tokens: Annotated[
        int | None, sampling_option(min=1, help="Most tokens of the answer. Default: up to the model's context length.")
    ] = None,
    temperature: Annotated[
        float | None,
        sampling_option(min=0.0, help=f"Sampling temperature. 0 always picks the most likely token. {_DEFAULT}"),
    ] = None,
    top_p: Annotated[
        float | None,
        sampling_option(help=f"Sample from the most likely tokens that together reach this probability. {_DEFAULT}"),
    ] = None,
    min_p: Annotated[
        float | None,
        sampling_option(help=f"Drop tokens below this fraction of the most likely token's probability. {_DEFAULT}"),
    ] = None,
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
        penstock submit --temperature 0 < question.txt
    """
    text = _given_or_piped(prompt)
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
    given = {name: value for name, value in sampling.items() if value is not None}
    options = {"model": model, "tenant": tenant, **times, **given}
    asyncio.run(
        _stream(redis_url_of(redis_url), text if raw else [{"role": "user", "content": text}], priority, options)
    )


def _given_or_piped(prompt: str | None) -> str:
    if prompt not in (None, "-"):
        return prompt
    text = "" if prompt is None and sys.stdin.isatty() else sys.stdin.read()
    if prompt is None and not text:
        raise RequestError("prompt: is required", param="prompt")
    return text


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
