"""`penstock submit`: submit one job from the shell and stream its answer to stdout."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from inspect import Parameter
from typing import Annotated, Any, Literal, get_origin

import typer

from penstock.cli.command_line import queue_option, sampling_option
from penstock.cli.options import REDIS_URL_HELP, takes
from penstock.cli.output import write_text
from penstock.contract.errors import RequestError
from penstock.contract.sampling import SamplingParams, option_of

PriorityName = Literal["interactive", "standard", "batch"]


_BOUNDS = {"ge": "min", "le": "max"}
"""Marks of a field → what typer calls them."""


def _flags() -> Iterator[Parameter]:
    """Yield a flag for each sampling option that has a help text."""
    for name, field in SamplingParams.model_fields.items():
        if not (text := option_of(SamplingParams, name).flag):
            continue
        kind: Any = list[str] if get_origin(field.annotation) is tuple else field.annotation
        marks = [(bound, getattr(mark, ours, None)) for mark in field.metadata for ours, bound in _BOUNDS.items()]
        limits = {bound: limit for bound, limit in marks if limit is not None}
        flag = Annotated[kind | None, sampling_option(help=text, **limits)]
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=flag)


@takes(*_flags(), before="priority")
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
    given = {name: value for name, value in sampling.items() if value not in (None, [])}
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
