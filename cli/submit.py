"""`penstock submit`: submit one job from the shell and stream its answer to stdout."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from inspect import Parameter
from itertools import islice
from types import NoneType
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from penstock.cli.help_page import queue_option
from penstock.cli.options import REDIS_URL_HELP, SPAN, given_flags, sampling_flags, seconds_of_text, takes
from penstock.cli.output import write_line, write_text
from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.fields import UNKNOWN_FIELD, option_of
from penstock.contract.job import DURATIONS, QueueFields

if TYPE_CHECKING:
    from penstock.producer.client import AsyncClient

MAX_LINES_AT_ONCE = 1000
"""Lines of a file that are read and submitted together."""
EXIT_SOME_REFUSED = 1
_OF_LINE = ("prompt", "model", "adapter", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
"""Arguments of a line without `url`, beside those of the queue and of sampling."""
PriorityName = Literal["interactive", "standard", "batch"]


def _pairs(texts: list[str]) -> dict[str, str]:
    if wrong := [text for text in texts if "=" not in text]:
        raise RequestError(f"metadata: must be NAME=VALUE, not {wrong[0][:64]!r}", param="metadata")
    return dict(text.split("=", 1) for text in texts)


def _channel(text: str) -> str | dict[str, str]:
    """Return the channel of `FORMAT[:NAME]`; the submission checks both."""
    form, colon, name = text.partition(":")
    return {"name": name, "format": form} if colon else form


def _check(text: str) -> dict[str, str]:
    """Return the check of `regex:PATTERN` or `schema:FILE`; the submission checks the rest."""
    kind, _, rest = text.partition(":")
    if kind == "regex":
        return {"regex": rest}
    if kind != "schema":
        raise RequestError("check_output: must be regex:PATTERN or schema:FILE", param="check_output")
    try:
        with open(rest, encoding="utf-8") as file:
            return {"json_schema": file.read()}
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"check_output: {rest} cannot be read: {error}", param="check_output") from None


_WRITTEN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "not_before_s": (SPAN, seconds_of_text),
    "metadata": ("NAME=VALUE", _pairs),
    "channel": ("FORMAT[:NAME]", _channel),
    "check_output": ("regex:PATTERN|schema:FILE", _check),
}
"""Options of the queue that are no number, name or list → how their flag is written, and the function that reads it."""


def _queue_flags() -> Iterator[Parameter]:
    """Yield a flag for each option of the queue that has a help text: `--ttl` for `ttl_s`, and `--tag` for `tags`."""
    for name, field in QueueFields.model_fields.items():
        if not (text := option_of(QueueFields, name).flag):
            continue
        kind: Any = next(one for one in get_args(field.annotation) if one is not NoneType)
        word = name.removesuffix("_s") if name in DURATIONS else name
        if get_origin(kind) in (tuple, dict):
            kind, word = list[str], word.removesuffix("s")
        elif name in _WRITTEN or get_origin(kind) is Annotated:
            kind = str  # The submission checks it.
        metavar = _WRITTEN[name][0] if name in _WRITTEN else None
        flag = queue_option(f"--{word.replace('_', '-')}", help=text, metavar=metavar)
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, flag])


@takes(*sampling_flags(), before="priority")
@takes(*_queue_flags(), before="tenant")
def submit(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt. - reads it from stdin, which is the default for a pipe.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name or alias of the model. Optional if only one pool is served.")
    ] = None,
    jsonl: Annotated[
        str | None,
        typer.Option(help="File of requests, one JSON object a line; -: stdin. Each becomes a background job."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, not as a chat.")] = False,
    priority: Annotated[PriorityName, queue_option(help="Priority class of the job.")] = "standard",
    tenant: Annotated[str, queue_option(help="Tenant for which the job runs.")] = "default",
    redis_url: Annotated[str | None, queue_option(help=REDIS_URL_HELP)] = None,
    **flags: Any,
) -> None:
    """Submit a prompt and print the answer while it is generated. Ctrl-C cancels the job.

    Examples:
        penstock submit "Name three rivers." --max-tokens 64
        penstock submit --temperature 0 < question.txt
        penstock submit --jsonl requests.jsonl --ttl 3600
    """
    from penstock.runtime.settings import redis_url_of

    options = {"model": model, "tenant": tenant}
    for name, value in given_flags(flags).items():
        options[name] = _WRITTEN[name][1](value) if name in _WRITTEN else value
    if jsonl is not None:
        if prompt is not None:
            raise RequestError("prompt: conflicts with --jsonl; send one of them", param="prompt")
        if not _submit_file(redis_url_of(redis_url), jsonl, priority, options):
            raise typer.Exit(EXIT_SOME_REFUSED)
        return
    text = _given_or_piped(prompt)
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
            write_line()


# Files of requests.


def _submit_file(redis_url: str, path: str, priority: PriorityName, options: dict[str, Any]) -> bool:
    """Submit each line of a file and print its outcome. Return whether all were accepted."""
    from penstock.contract.job import Priority

    shared = {"priority": Priority[priority.upper()], **{n: value for n, value in options.items() if value is not None}}
    if path == "-":
        return asyncio.run(_submit_lines(redis_url, sys.stdin.buffer, shared))
    try:
        with open(path, "rb") as file:
            return asyncio.run(_submit_lines(redis_url, file, shared))
    except OSError as error:
        raise RequestError(f"jsonl: {path} cannot be read: {error.strerror}", param="jsonl") from None


async def _submit_lines(redis_url: str, file: IO[bytes], shared: dict[str, Any]) -> bool:
    from penstock.producer.client import AsyncClient

    num_refused = 0
    lines = ((number, raw) for number, raw in enumerate(file, 1) if not raw.isspace())
    async with AsyncClient(redis_url) as client:
        while group := list(islice(lines, MAX_LINES_AT_ONCE)):
            num_refused += await _submit_group(client, group, shared)
    return not num_refused


async def _submit_group(client: AsyncClient, lines: list[tuple[int, bytes]], shared: dict[str, Any]) -> int:
    """Submit some lines and print their outcomes. Return how many were refused."""
    from pydantic_core import to_json

    from penstock.producer.openai.json_parts import on_one_line

    found = [_request_of(raw) for _, raw in lines]
    requests = [one if isinstance(one, PenstockError) else {**shared, **one} for _, one in found]
    num_refused = 0
    for (number, _), (named, _), outcome in zip(lines, found, await client.submit_many_unread(requests), strict=True):
        if isinstance(outcome, PenstockError):
            num_refused += 1
            error = {"code": outcome.code, "message": outcome.message, "param": outcome.param}
            shown = {"line": number, **named, "error": error}
        else:
            channel = {} if outcome.channel is None else {"channel": outcome.channel}
            shown = {"line": number, **named, "id": outcome.job_id, "state": outcome.state, **channel}
        write_text(on_one_line(to_json(shown).decode()) + "\n")
    return num_refused


def _request_of(raw: bytes) -> tuple[dict[str, Any], dict[str, Any] | PenstockError]:
    """Return what the outcome of a line repeats, and the arguments of its submission or the error of a wrong line."""
    from pydantic_core import from_json

    from penstock.contract.json_text import json_refusal, without_mark
    from penstock.contract.problems import MAX_NAME_CHARS
    from penstock.contract.sampling import SamplingParams
    from penstock.producer.batch.request import request_of_line

    try:
        fields = from_json(without_mark(raw), allow_inf_nan=False)
    except RequestError as error:
        return {}, error
    except ValueError as error:
        return {}, json_refusal(raw, error, "not JSON")
    if not isinstance(fields, dict):
        return {}, RequestError("must be a JSON object")
    named = {name: fields.pop(name) for name in ("custom_id",) if name in fields}
    if "url" not in fields:
        known = {*_OF_LINE, *QueueFields.model_fields, *SamplingParams.model_fields}
        if unknown := next((name for name in fields if name not in known), None):
            shown = unknown[:MAX_NAME_CHARS]
            return named, RequestError(f"{shown}: unknown field", code=UNKNOWN_FIELD, param=shown)
        return named, fields
    try:
        line = request_of_line(fields)
    except RequestError as error:
        return named, error
    if len(line.prompts) != 1:
        message = f"{line.names['prompt']}: a line is one job and has one text, not {len(line.prompts)}"
        return named, RequestError(message, param=line.names["prompt"])
    # Flags beside it may give further sampling options.
    options = {**line.submit_options(), "params": None, **line.params.model_dump(exclude_unset=True)}
    given = {name: value for name, value in options.items() if value is not None}
    return named, {"prompt": line.prompts[0], "lower_max_tokens": True, **given}
