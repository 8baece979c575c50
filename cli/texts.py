"""`penstock embed` and `penstock rerank`: lines or JSON Lines in, JSON Lines out."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from penstock.cli.help_page import queue_option
from penstock.cli.options import REDIS_URL_HELP
from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.tasks import InputType

if TYPE_CHECKING:
    from penstock.producer.client import AsyncClient

LINES_AT_ONCE = 1024
"""Lines whose texts are in the queue at once."""
_TAIL_BYTES = 1 << 20
"""Bytes at the end of an output file that are searched for its last line."""
PriorityName = Literal["interactive", "standard", "batch"]
Input = Annotated[str, typer.Argument(help="File of lines; - or nothing: stdin.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="File for the results, which the same command continues. Default: stdout."),
]
Model = Annotated[str | None, typer.Option(help="Name or alias of the model. Optional if only one suits.")]
Truncate = Annotated[
    bool, typer.Option("--truncate", help="Shorten a text to what the model takes, instead of refusing it.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Take every line as text, also one that is a JSON object.")]
PriorityOption = Annotated[PriorityName, queue_option(help="Priority class of the jobs.")]
Tenant = Annotated[str, queue_option(help="Tenant for which the jobs run.")]
RedisUrl = Annotated[str | None, queue_option(help=REDIS_URL_HELP)]
Answers: TypeAlias = "AsyncIterator[tuple[_Line, bytes]]"


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the input that is not blank."""

    number: int
    """From 1."""
    fields: Mapping[str, Any]
    """The members of its object; of plain text, the text alone."""

    @property
    def text(self) -> str:
        """Its text. Raises RequestError that names the line."""
        text = self.fields.get("text")
        if not isinstance(text, str):
            raise RequestError(f"line {self.number}: text: must be a text", param="text")
        return text

    def shown(self, *left_out: str) -> dict[str, Any]:
        """Return its number, and its members but for those."""
        return {"line": self.number, **{name: one for name, one in self.fields.items() if name not in left_out}}


def embed(
    source: Input = "-",
    out: Out = None,
    model: Model = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep only the first dimensions of a vector.")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="Put the model's prompt of this name before texts.")] = None,
    input_type: Annotated[InputType | None, typer.Option(help="What the texts are for, such as search_query.")] = None,
    truncate: Truncate = False,
    plain: Plain = False,
    priority: PriorityOption = "standard",
    tenant: Tenant = "default",
    redis_url: RedisUrl = None,
) -> None:
    """Embed each line of a file, and print a line with its vector.

    A line is a text, or a JSON object with the member `text`. The result repeats its other members.

    Examples:
        penstock embed notes.txt > vectors.jsonl
        penstock embed rows.jsonl --out vectors.jsonl --model mini --truncate
    """
    options = {"dimensions": dimensions, "prompt_name": prompt_name, "input_type": input_type}

    async def answers(client: AsyncClient, lines: Iterator[_Line]) -> Answers:
        from array import array

        from penstock.producer.openai.embeddings import numbers_of

        given = {**options, **_shared(model, priority, tenant, truncate)}
        while group := list(islice(lines, LINES_AT_ONCE)):
            with _naming_lines(group):
                found = await client.embed([line.text for line in group], **given)
            for line, embedding in zip(group, found, strict=True):
                vector = b"".join(numbers_of(array("f", embedding.values)))
                yield line, b'"num_tokens":%d,"embedding":%b' % (embedding.num_tokens, vector)

    _run(redis_url, source, out, answers, plain=plain, left_out=("text",))


def rerank(
    query: Annotated[str | None, typer.Argument(help="The query. Not with --rows, whose lines have their own.")] = None,
    source: Input = "-",
    rows: Annotated[
        str | None, typer.Option(help="File of JSON objects with query and documents, one a line; -: stdin.")
    ] = None,
    out: Out = None,
    top_n: Annotated[int | None, typer.Option(min=1, help="Only that many of the best lines or documents.")] = None,
    model: Model = None,
    truncate: Truncate = False,
    plain: Plain = False,
    priority: PriorityOption = "standard",
    tenant: Tenant = "default",
    redis_url: RedisUrl = None,
) -> None:
    """Order the lines of a file by how well they fit a query, the best first.

    A line is a text, or a JSON object with the member `text`. With --rows, each line has a query and documents of its
    own, and the result lists the indices of these.

    Examples:
        penstock rerank "How do I descale the kettle?" notes.txt --top-n 5
        penstock rerank --rows questions.jsonl --out ranked.jsonl
    """
    options = {"top_n": top_n, **_shared(model, priority, tenant, truncate)}
    if (query is None) == (rows is None):
        raise RequestError("query: give either a query or --rows", param="query")
    if rows is not None:
        if plain:
            raise RequestError("plain: conflicts with --rows, whose lines are JSON objects", param="plain")
        _run(redis_url, rows, out, lambda client, lines: _ranked_rows(client, lines, options), left_out=("documents",))
        return

    async def answers(client: AsyncClient, lines: Iterator[_Line]) -> Answers:
        known = [*lines]
        if not known:
            return
        with _naming_lines(known):
            ranked = await client.rerank(query or "", [line.text for line in known], **options)
        for one in ranked:
            yield known[one.index], b'"score":%.9g' % one.score

    if out is not None and out.exists() and out.stat().st_size:
        raise RequestError(f"out: {out} exists; only the results of --rows can be continued", param="out")
    _run(redis_url, source, out, answers, plain=plain)


async def _ranked_rows(client: AsyncClient, lines: Iterator[_Line], options: dict[str, Any]) -> Answers:
    """Rank the documents of each line; the jobs of a few lines are in the queue at once."""
    from pydantic_core import to_json

    async def results(line: _Line) -> bytes:
        query, documents = line.fields.get("query"), line.fields.get("documents")
        if not isinstance(query, str):
            raise RequestError(f"line {line.number}: query: must be a text", param="query")
        if not isinstance(documents, list) or not documents or not all(isinstance(one, str) for one in documents):
            raise RequestError(f"line {line.number}: documents: must be a list of texts", param="documents")
        with _naming_lines([line], named="documents"):
            ranked = await client.rerank(query, documents, **options)
        return b'"results":' + to_json([{"index": one.index, "score": one.score} for one in ranked])

    while group := list(islice(lines, _ROWS_AT_ONCE)):
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(results(line)) for line in group]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for line, task in zip(group, running, strict=True):
            yield line, task.result()


_ROWS_AT_ONCE = 16


def _shared(model: str | None, priority: PriorityName, tenant: str, truncate: bool) -> dict[str, Any]:
    """Return the options of all jobs."""
    from penstock.contract.tasks import WHOLE_CONTEXT

    limit = WHOLE_CONTEXT if truncate else None
    return {"model": model, "priority": priority, "tenant": tenant, "truncate_prompt_tokens": limit}


@contextmanager
def _naming_lines(lines: list[_Line], *, named: str = "") -> Iterator[None]:
    """Let an error that names a text by its number name its line. `named`: the member with the only line's texts."""
    try:
        yield
    except PenstockError as error:
        at = _number_in(error.param or "")
        if at is not None:
            message = error.message.removeprefix(f"{error.param}: ")
            if named:
                error.message = f"line {lines[0].number}: {named}[{at}]: {message}"
            elif at < len(lines):
                error.message = f"line {lines[at].number}: {message}"
        raise


def _number_in(param: str) -> int | None:
    name, _, rest = param.partition("[")
    number = rest.removesuffix("]")
    return int(number) if name in ("prompt", "documents") and number.isdecimal() else None


def _run(
    redis_url: str | None,
    source: str,
    out: Path | None,
    answers: Callable[[AsyncClient, Iterator[_Line]], Answers],
    *,
    plain: bool = False,
    left_out: Iterable[str] = (),
) -> None:
    """Answer the lines of a source, and write a line for each answer. An output file is continued after its last line.

    Raises RequestError for a file that cannot be read or written, and for a line that is no text.
    """
    from penstock.runtime.settings import redis_url_of

    url, last = redis_url_of(redis_url), 0
    try:
        with nullcontext(sys.stdin.buffer) if source == "-" else open(source, "rb") as file:
            if out is None:
                asyncio.run(_write(url, _lines(file, last, plain=plain), sys.stdout.buffer, answers, left_out))
                return
            with open(out, "a+b") as written:
                last = _last_line_of(written, out)
                asyncio.run(_write(url, _lines(file, last, plain=plain), written, answers, left_out))
    except OSError as error:
        raise RequestError(f"{error.filename or source} cannot be used: {error.strerror}", param="source") from None


async def _write(
    redis_url: str,
    lines: Iterator[_Line],
    out: IO[bytes],
    answers: Callable[[AsyncClient, Iterator[_Line]], Answers],
    left_out: Iterable[str],
) -> None:
    from pydantic_core import to_json

    from penstock.producer.client import AsyncClient

    async with AsyncClient(redis_url) as client:
        async for line, members in answers(client, lines):
            out.write(to_json(line.shown(*left_out))[:-1] + b"," + members + b"}\n")
            out.flush()


def _lines(file: IO[bytes], last: int, *, plain: bool) -> Iterator[_Line]:
    """Yield the lines after number `last` that are not blank. Raises RequestError that names a wrong line."""
    from pydantic_core import from_json

    for number, raw in enumerate(file, 1):
        if number <= last or raw.isspace():
            continue
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            fields = from_json(text) if text.lstrip().startswith("{") and not plain else {"text": text}
        except ValueError as error:
            hint = "" if isinstance(error, UnicodeError) else "; --plain takes lines as text"
            raise RequestError(f"line {number}: {error}{hint}", param="source") from None
        yield _Line(number, fields)


def _last_line_of(file: IO[bytes], path: Path) -> int:
    """Return the number of the line that an output file has last; 0 for an empty file. Cut off an incomplete line.

    Raises RequestError for a file of another kind.
    """
    from pydantic_core import from_json

    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read()
    end = tail.rfind(b"\n") + 1
    if not end and (start or size):
        raise RequestError(f"out: {path} has no results of this command", param="out")
    file.truncate(start + end)
    file.seek(0, os.SEEK_END)
    if not size:
        return 0
    try:
        last = from_json(tail[tail.rfind(b"\n", 0, end - 1) + 1 : end])["line"]
        if type(last) is int:
            return last
    except (ValueError, KeyError, TypeError):
        pass
    raise RequestError(f"out: {path} has no results of this command", param="out")
