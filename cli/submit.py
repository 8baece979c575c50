"""`penstock submit`: submit one job from the shell and stream its answer to stdout."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any, Literal

import typer

from penstock.cli.command_line import queue_option
from penstock.cli.options import REDIS_URL_HELP, given_flags, sampling_flags, takes
from penstock.cli.output import write_text
from penstock.contract.errors import RequestError

PriorityName = Literal["interactive", "standard", "batch"]
DurabilityName = Literal["memory", "fsync"]


@takes(*sampling_flags(), before="priority")
def submit(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt. - reads it from stdin, which is the default for a pipe.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name or alias of the model. Optional if only one pool is served.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, not as a chat.")] = False,
    priority: Annotated[PriorityName, queue_option(help="Priority class of the job.")] = "standard",
    deadline: Annotated[
        float | None, queue_option(help="Seconds after which an unfinished job is ended. Default: no deadline.")
    ] = None,
    not_before: Annotated[
        float | None, queue_option(help="Seconds to wait before the job may run. Default: no wait.")
    ] = None,
    durability: Annotated[
        DurabilityName | None, queue_option(help="What the submission waits for: Redis, or its disk. Default: memory.")
    ] = None,
    tag: Annotated[list[str] | None, queue_option(help="Tag of the job. Repeat it for several, up to 4.")] = None,
    metadata: Annotated[
        list[str] | None, queue_option(metavar="NAME=VALUE", help="Text to keep with the job. Repeat it for several.")
    ] = None,
    tenant: Annotated[str, queue_option(help="Tenant for which the job runs.")] = "default",
    redis_url: Annotated[str | None, queue_option(help=REDIS_URL_HELP)] = None,
    **sampling: Any,
) -> None:
    """Submit a prompt and print the answer while it is generated. Ctrl-C cancels the job.

    Examples:
        penstock submit "Name three rivers." --max-tokens 64
        penstock submit --temperature 0 < question.txt
    """
    from penstock.runtime.settings import redis_url_of

    text = _given_or_piped(prompt)
    times = {"deadline_s": deadline, "not_before_s": not_before}
    listed = {"tags": tag or (), "metadata": _pairs(metadata or [])}
    options = {"model": model, "tenant": tenant, "durability": durability, **times, **listed, **given_flags(sampling)}
    asyncio.run(
        _stream(redis_url_of(redis_url), text if raw else [{"role": "user", "content": text}], priority, options)
    )


def _pairs(texts: list[str]) -> dict[str, str] | None:
    if wrong := [text for text in texts if "=" not in text]:
        raise RequestError(f"metadata: must be NAME=VALUE, not {wrong[0][:64]!r}", param="metadata")
    return dict(text.split("=", 1) for text in texts) or None


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
