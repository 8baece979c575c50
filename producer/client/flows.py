"""Flows from Python: `client.flow()` collects rows, and stores them as one batch that gateways run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from penstock.contract.errors import JobFailedError, RequestError, ResultTimeoutError
from penstock.contract.priority import ClassName
from penstock.contract.retries import MAX_ATTEMPTS, MAX_RETRY_BACKOFF_S
from penstock.contract.schedule import Schedule
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.schedules import Schedules, WhenOptions
from penstock.producer.files.service import Files
from penstock.producer.files.storage import FilesSettings, Storage
from penstock.producer.flows.graph import FlowGraph
from penstock.producer.flows.marks import answer_text
from penstock.producer.flows.rows import OnFailure
from penstock.queue.files.batch import FLOW_ENDPOINT, BatchRecord, BatchSpec, new_batch_id, window_s
from penstock.queue.files.batch_records import BatchRecords
from penstock.queue.files.file_records import BATCH, MAX_LIFE_S, FileRecords
from penstock.runtime.local_redis import running_files
from penstock.runtime.settings import RedisSettings

CHAT_URL, COMPLETIONS_URL, RESPONSES_URL = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_URL_OF = {"messages": CHAT_URL, "prompt": COMPLETIONS_URL, "input": RESPONSES_URL}
"""The field of a row's body that tells its endpoint, unless `url` does."""
DEFAULT_TENANT = "default"
FIRST_LOOK_S, LAST_LOOK_S = 0.05, 1.0
"""Seconds between two looks at a flow that runs: at first, and at last."""
LOOK_GROWTH = 1.1
"""How the pause grows with each look: its end is noticed after at most a tenth of what the flow took."""


@dataclass(frozen=True, slots=True)
class FlowAnswer:
    """How a row of a flow ended."""

    custom_id: str
    text: str | None
    """The text of its answer; None if it has none."""
    body: Mapping[str, Any] | None
    """Its answer, as over HTTP; None if it failed or was skipped."""
    error: Mapping[str, Any] | None
    """`code` and `message` of its failure; None if it succeeded."""


class FlowOptions(TypedDict, total=False):
    """Options of `client.flow`."""

    metadata: Mapping[str, str] | None
    """Up to 16 pairs that are kept with the flow."""
    completion_window: str
    """Hours or days after which rows without an answer expire, such as `24h`, the default, or `7d`."""
    files_url: str | None
    """Where the gateways store files; by default $PENSTOCK_FILES_URL, else as this user's `penstock serve`."""
    tenant: str | None
    """Whose flow it is; by default the client's."""
    max_attempts: int | None
    """How often each row is tried that says nothing of its own, 1 to 8; by default as the pool says."""
    retry_backoff_s: float | None
    """The mean pause before a row's second attempt, in seconds."""


class AsyncFlow:
    """Rows that wait for rows. Nothing runs before `submit`.

        flow = client.flow()
        flow.add("plan", prompt="Name three rivers as a JSON list of texts:")
        flow.add("river", prompt="Describe {{item}}.", for_each="plan.json")
        flow.add("summary", prompt="In short: {{*.text}}", after=["river"])
        await flow.submit()
        for answer in await flow.answers():
            print(answer.custom_id, answer.text)

    A flow is a batch: gateways run it, and it goes on if this process ends.
    """

    def __init__(self, records: FileRecords, batches: BatchRecords, schedules: Schedules, options: FlowOptions) -> None:
        self._completion_window = options.get("completion_window", "24h")
        window_s(self._completion_window)
        self._settings = FilesSettings.load(url=options.get("files_url"))
        if self._settings.url is None and (noted := running_files(RedisSettings.load().runtime_dir)):
            self._settings = FilesSettings.load(url=noted)
        self._records = records
        self._batches = batches
        self._schedules = schedules
        self._max_attempts, self._retry_backoff_s = options.get("max_attempts"), options.get("retry_backoff_s")
        if not (self._max_attempts is None or 1 <= self._max_attempts <= MAX_ATTEMPTS):
            raise RequestError(f"max_attempts must be from 1 to {MAX_ATTEMPTS}", param="max_attempts")
        if not (self._retry_backoff_s is None or 0 <= self._retry_backoff_s <= MAX_RETRY_BACKOFF_S):
            message = f"retry_backoff_s must be from 0 to {MAX_RETRY_BACKOFF_S} seconds"
            raise RequestError(message, param="retry_backoff_s")
        self._tenant = options.get("tenant") or DEFAULT_TENANT
        self._metadata = dict(options.get("metadata") or {}) or None
        self._graph = FlowGraph()
        self._lines: list[bytes] = []
        self.id = ""
        """The id of its batch; empty before `submit`."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id or f'of {len(self._lines)} rows'}>"

    def add(
        self,
        custom_id: str,
        *,
        url: str | None = None,
        after: Sequence[str | AsyncJob | Mapping[str, str]] = (),
        for_each: str | None = None,
        on_failure: OnFailure = "fail",
        priority: ClassName = "batch",
        **body: Any,
    ) -> str:
        """Add a row, and return its name. `body` are the fields of a request over HTTP, such as `messages` or `prompt`.

        The texts of rows take the places of `{{name.text}}` and `{{name.json.path}}` in the prompt. The row waits for
        these, and for what `after` names: rows, and jobs that were submitted earlier. `{{*.text}}` stands for the
        texts of all rows of `after`. `for_each` makes a row for each entry of a list in an answer; `{{item}}` is the
        entry. If a parent fails, the row does too (`fail`), is skipped (`skip`), or runs without its text (`continue`).

        `url` is the endpoint: by default that of chats for `messages`, of completions for `prompt`, and of responses
        for `input`. Raises RequestError for what is wrong with the row by itself.
        """
        if custom_id in self._graph.numbers:
            raise RequestError(
                f"custom_id {custom_id[:64]!r} is used twice", code="duplicate_custom_id", param="custom_id"
            )
        endpoint = url or next((_URL_OF[name] for name in _URL_OF if name in body), None)
        if endpoint is None:
            raise RequestError(f"a row needs url, or one of {', '.join(_URL_OF)}", param="url")
        row: dict[str, Any] = {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}
        if parents := [{"job": one.id} if isinstance(one, AsyncJob) else one for one in after]:
            row["after"] = parents
        given = {"for_each": for_each, "on_failure": on_failure, "priority": priority}
        defaults = {"for_each": None, "on_failure": "fail", "priority": "batch"}
        row |= {name: value for name, value in given.items() if value != defaults[name]}
        self._graph.add(len(self._lines) + 1, custom_id, row)
        self._lines.append(json.dumps(row, ensure_ascii=False).encode(errors="surrogatepass") + b"\n")
        return custom_id

    async def submit(self, *, idempotency_key: str | None = None) -> str:
        """Store the rows, and let gateways run them. Return the id of the batch.

        A repeated call with the same rows and key, within a day, makes no second flow. Raises RequestError for a cycle
        or an unknown parent, and UnavailableError without the storage of files that the gateways have.
        """
        key = None if idempotency_key is None else f"flow {idempotency_key}"
        file_id = await self._stored(self._settings.retention_ms, key)
        spec = BatchSpec(
            file_id,
            FLOW_ENDPOINT,
            self._completion_window,
            self._metadata,
            max_attempts=self._max_attempts,
            retry_backoff_s=self._retry_backoff_s,
        )
        self.id = await self._batches.create(
            new_batch_id(),
            self._tenant,
            spec,
            window_ms=1000 * window_s(self._completion_window),
            max_open=self._settings.max_tenant_batches,
            key=idempotency_key,
        )
        return self.id

    async def schedule(self, **when: Unpack[WhenOptions]) -> Schedule:
        """Store the rows, and let gateways start a flow of them at times that come again. `when`: `WhenOptions`.

        `client.schedules` has the schedule; its rows stay stored for ten years. Raises what `submit` and
        `Schedules.create` raise.
        """
        self._schedules.timing_of(when)
        file_id = await self._stored(1000 * MAX_LIFE_S, None)
        return await self._schedules.create_batch(
            file_id,
            FLOW_ENDPOINT,
            completion_window=self._completion_window,
            metadata=self._metadata,
            max_attempts=self._max_attempts,
            retry_backoff_s=self._retry_backoff_s,
            tenant=self._tenant,
            **when,
        )

    async def _stored(self, life_ms: int, idempotency_key: str | None) -> str:
        """Store the rows, and return the id of their file. Raises what `submit` raises."""
        if not self._lines:
            raise RequestError("the flow has no rows", code="empty_file")
        for wrong, _ in self._graph.problems():
            raise wrong
        files, content = Files(self._settings, self._records), b"".join(self._lines)
        try:
            async with await files.begin(self._tenant, len(content)) as upload:
                await upload.write(content)
                return await upload.save("flow.jsonl", BATCH, life_ms, idempotency_key=idempotency_key)
        finally:
            files.close()

    async def status(self) -> BatchRecord:
        """Return the record of its batch: its state and its counts. Raises RequestError before `submit`."""
        return await self._batches.find(self._submitted_id(), self._tenant)

    async def cancel(self) -> None:
        """Cancel the flow. Rows without an answer end with the error `batch_cancelled`."""
        await self._batches.cancel(self._submitted_id(), self._tenant)

    def _submitted_id(self) -> str:
        if not self.id:
            raise RequestError("the flow was not submitted: call submit() first")
        return self.id

    async def wait(self, *, timeout: float | None = None) -> BatchRecord:  # noqa: ASYNC109
        """Wait for the end of the flow, and return the record of its batch. Rows may have failed.

        Raises JobFailedError if its rows were refused, and ResultTimeoutError after `timeout` seconds; it goes on then.
        """
        clock = asyncio.get_running_loop().time
        began_s, pause_s = clock(), FIRST_LOOK_S
        while (found := await self.status()).is_open:
            if timeout is not None and clock() - began_s + pause_s > timeout:
                raise ResultTimeoutError(f"flow {self.id} has not ended within {timeout} s")
            await asyncio.sleep(pause_s)
            pause_s = min(LAST_LOOK_S, LOOK_GROWTH * pause_s)
        if found.status == "failed":
            reason = found.problems[0].message if found.problems else "its rows were refused"
            raise JobFailedError(f"flow {self.id} failed: {reason}")
        return found

    async def answers(self, *, timeout: float | None = None) -> list[FlowAnswer]:  # noqa: ASYNC109
        """Wait for the end of the flow, and return how each row ended, in the order in which they ended.

        Raises what `wait` raises.
        """
        found = await self.wait(timeout=timeout)
        files, answers = Files(self._settings, self._records), list[FlowAnswer]()
        try:
            for file_id in (found.output_file_id, found.error_file_id):
                if file_id is not None:
                    file, storage = await files.find(file_id, self._tenant), await files.storage()
                    answers += await files.on_thread(_answers_in, storage, file.object_name)
        finally:
            files.close()
        return answers


def _answer_of(line: Mapping[str, Any]) -> FlowAnswer:
    body = None if line["response"] is None else line["response"]["body"]
    text = None if body is None else answer_text(body)
    return FlowAnswer(line["custom_id"], text, body, line["error"])


def _answers_in(storage: Storage, name: str) -> list[FlowAnswer]:
    with closing(storage.lines(name)) as source:
        return [_answer_of(json.loads(line)) for line in iter(source.readline, b"")]


Caller = Callable[..., Any]


class Flow:
    """A flow for synchronous callers; see `AsyncFlow`, whose methods it has."""

    def __init__(self, flow: AsyncFlow, call: Caller) -> None:
        self._flow = flow
        self._call = call

    def __repr__(self) -> str:
        return repr(self._flow).replace("AsyncFlow", "Flow", 1)

    @property
    def id(self) -> str:
        """The id of its batch; empty before `submit`."""
        return self._flow.id

    def add(
        self,
        custom_id: str,
        *,
        url: str | None = None,
        after: Sequence[str | Mapping[str, str]] = (),
        for_each: str | None = None,
        on_failure: OnFailure = "fail",
        priority: ClassName = "batch",
        **body: Any,
    ) -> str:
        """Add a row, and return its name; see `AsyncFlow.add`."""
        given: dict[str, Any] = {"url": url, "after": after, "for_each": for_each, "on_failure": on_failure}
        return self._flow.add(custom_id, priority=priority, **given, **body)

    def submit(self, *, idempotency_key: str | None = None) -> str:
        """Store the rows, and let gateways run them; see `AsyncFlow.submit`."""
        submitted: str = self._call(self._flow.submit(idempotency_key=idempotency_key))
        return submitted

    def schedule(self, **when: Unpack[WhenOptions]) -> Schedule:
        """Let gateways start a flow of the rows at times that come again; see `AsyncFlow.schedule`."""
        made: Schedule = self._call(self._flow.schedule(**when))
        return made

    def status(self) -> BatchRecord:
        """Return the record of its batch: its state and its counts."""
        found: BatchRecord = self._call(self._flow.status())
        return found

    def cancel(self) -> None:
        """Cancel the flow. Rows without an answer end with the error `batch_cancelled`."""
        self._call(self._flow.cancel())

    def wait(self, *, timeout: float | None = None) -> BatchRecord:
        """Wait for the end of the flow, and return the record of its batch; see `AsyncFlow.wait`."""
        found: BatchRecord = self._call(self._flow.wait(timeout=timeout))
        return found

    def answers(self, *, timeout: float | None = None) -> list[FlowAnswer]:
        """Wait for the end of the flow, and return how each row ended; see `AsyncFlow.answers`."""
        found: list[FlowAnswer] = self._call(self._flow.answers(timeout=timeout))
        return found
