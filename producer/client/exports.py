"""The results of a set's jobs in a JSONL file, while they end.

A line is written once the job has ended. PATH.cursor says how many bytes of the file are whole, and at which completion
they end. A run that follows a killed one cuts the file there and goes on, so each job has one line.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock.contract.errors import ConfigError, InvariantError, NotFoundError, RequestError
from penstock.contract.output import Result
from penstock.contract.tasks import Embedding
from penstock.producer.client.completions import Completion, CompletionCursor, CompletionFeed
from penstock.producer.client.job_objects import outcome_object, usage_object
from penstock.queue.broker.completions import CompletionGap, FeedPage
from penstock.queue.broker.jobs import JobStatus
from penstock.runtime.event_loop import CALLS_AT_ONCE

CURSOR_SUFFIX = ".cursor"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export has written: the jobs of all its runs, and those of this run."""

    num_jobs: int
    num_new: int


class SetExport:
    """The file of a set, and how far it goes."""

    def __init__(self, path: Path, tenant: str, tag: str, pool: str | None) -> None:
        self._path = path
        self._cursor_path = path.with_name(path.name + CURSOR_SUFFIX)
        self._set = {"tenant": tenant, "tag": tag, "pool": pool}
        self._cursor = CompletionCursor(tenant, pool)
        self._tag = tag
        self._num_jobs = 0

    async def run(
        self,
        feed: CompletionFeed,
        status: Callable[..., Awaitable[JobStatus]],
        result: Callable[..., Awaitable[Result]],
        is_over: Callable[[], Awaitable[bool]],
    ) -> ExportReport:
        """Write the jobs that have ended and those that end, until the set is over."""
        num_bytes, num_new, was_over = self._known_bytes(), 0, await is_over()
        with self._opened(num_bytes) as file:
            # A file with lines and no cursor would look like another program's.
            self._note(file, self._cursor)
            async for page in feed.pages(self._cursor, self._tag):
                job_ids = [job_id async for job_id in self._new_jobs(feed, page)]
                for at in range(0, len(job_ids), CALLS_AT_ONCE):
                    part = job_ids[at : at + CALLS_AT_ONCE]
                    lines = await asyncio.gather(*(self._line(one, status, result) for one in part))
                    file.write("".join(line for line in lines if line).encode())
                num_new += len(job_ids)
                self._num_jobs += len(job_ids)
                self._note(file, page.cursor)
                if page.has_more:
                    continue
                if was_over:
                    return ExportReport(self._num_jobs, num_new)
                was_over = await is_over()
        raise InvariantError("the pages of completions ended")

    def _opened(self, num_bytes: int) -> BinaryIO:
        try:
            file = self._path.open("r+b" if num_bytes else "wb")
            file.truncate(num_bytes)
            file.seek(num_bytes)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}", param="path") from None
        return file

    def _known_bytes(self) -> int:
        """Return how many bytes of the file earlier runs wrote. Raises RequestError for a file of another set."""
        try:
            noted = json.loads(self._cursor_path.read_text(encoding="utf-8"))
            known = {name: noted[name] for name in self._set}
            num_bytes, self._num_jobs, cursor = int(noted["bytes"]), int(noted["jobs"]), str(noted["cursor"])
        except FileNotFoundError:
            if self._path.exists() and self._path.stat().st_size:
                message = f"{self._path} exists, and no {self._cursor_path.name} says that an export wrote it"
                raise RequestError(f"{message}; name another file", param="path") from None
            return 0
        except (OSError, ValueError, KeyError, TypeError):
            message = f"{self._cursor_path} is damaged: remove it and {self._path.name} to begin anew"
            raise RequestError(message, param="path") from None
        if known != self._set:
            message = f"{self._path} is the export of tag {known['tag']!r} of tenant {known['tenant']!r}"
            raise RequestError(f"{message}; name another file", param="path")
        if not self._path.exists() or self._path.stat().st_size < num_bytes:
            message = f"{self._path} is shorter than {self._cursor_path.name} says: remove both to begin anew"
            raise RequestError(message, param="path")
        self._cursor = CompletionCursor.parse(cursor, self._set["tenant"] or "", self._set["pool"])
        return num_bytes

    def _note(self, file: BinaryIO, cursor: CompletionCursor) -> None:
        """Note how far the file goes, once it is on disk."""
        file.flush()
        os.fsync(file.fileno())
        noted = {**self._set, "cursor": str(cursor), "bytes": file.tell(), "jobs": self._num_jobs}
        beside = self._cursor_path.with_name(self._cursor_path.name + ".new")
        beside.write_text(json.dumps(noted), encoding="utf-8")
        beside.replace(self._cursor_path)

    async def _new_jobs(self, feed: CompletionFeed, page: FeedPage) -> AsyncIterator[str]:
        """Yield the jobs of a page. A gap is filled from the job list, without the jobs that the file has."""
        known: set[str] | None = None
        for event in page.events:
            if isinstance(event.item, Completion):
                if known is None or event.item.job_id not in known:
                    yield event.item.job_id
                continue
            known = self._written() if known is None else known
            async for missed in self._missed(feed, event.item):
                if missed not in known:
                    known.add(missed)
                    yield missed

    async def _missed(self, feed: CompletionFeed, gap: CompletionGap) -> AsyncIterator[str]:
        async for one in feed.missed(self._set["tenant"] or "", gap):
            if self._tag in one.tags:
                yield one.job_id

    def _written(self) -> set[str]:
        """Return the ids of the jobs that the file has."""
        with self._path.open(encoding="utf-8") as file:
            return {json.loads(line)["id"] for line in file}

    async def _line(
        self, job_id: str, status: Callable[..., Awaitable[JobStatus]], result: Callable[..., Awaitable[Result]]
    ) -> str:
        """Return the line of an ended job, nothing for one whose record is gone."""
        try:
            known = await status(job_id, tenant=self._set["tenant"])
        except NotFoundError:
            return ""
        shown: dict[str, Any] = {"id": job_id, "custom_id": known.custom_id, "state": known.state}
        shown |= {"tags": list(known.tags), "metadata": None if known.metadata is None else dict(known.metadata)}
        shown["outcome"] = None if known.outcome is None else outcome_object(known.outcome)
        shown["finished_ms"] = known.ledger.finished_ms or None
        try:
            found = await result(job_id, check=False, tenant=self._set["tenant"])
            shown |= {"result": _result_object(found), "result_expired": False}
        except NotFoundError:
            shown |= {"result": None, "result_expired": True}
        return json.dumps(shown, ensure_ascii=False, separators=(",", ":")) + "\n"


def _result_object(result: Result) -> dict[str, Any]:
    choices: Sequence[dict[str, Any]] = [
        {"index": choice.index, "text": choice.text, "finish_reason": choice.finish_reason} for choice in result.choices
    ]
    shown: dict[str, Any] = {"choices": choices, "usage": result.usage and usage_object(result.usage)}
    if isinstance(result.output, Embedding):
        shown["embedding"] = list(result.output.values)
    return shown
