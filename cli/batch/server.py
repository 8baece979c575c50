"""A gateway's files and batches over HTTP, for `penstock batch`, and the form in which it takes an input."""

from __future__ import annotations

import heapq
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from penstock.cli.server_url import address_of
from penstock.contract.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    NotFoundError,
    PenstockError,
    RequestError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
)
from penstock.producer.batch import storage
from penstock.producer.batch.records import BatchProgress
from penstock.queue.files.batch import FLOW_ENDPOINT, MESSAGES_ENDPOINT, is_of_messages
from penstock.runtime.proxies import is_loopback, proxy_error, tls_for

if TYPE_CHECKING:
    from types import TracebackType

    import httpx

    from penstock.producer.batch.lines import InputRow


KEY_VARIABLES = ("PENSTOCK_API_KEY", "OPENAI_API_KEY")
STDOUT = "-"
"""Stands for a file of results."""
_PATH, _MESSAGES_PATH = "/v1/batches", "/v1/messages/batches"
_ENDED = frozenset(("completed", "failed", "expired", "cancelled"))
CONNECT_S, ANSWER_S, UPLOADED_S = 10.0, 60.0, 600.0
"""Seconds for a connection, for the next byte of an answer, and for the answer to an upload."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
_MAX_BODY_CHARS = 200
_REFUSALS = {401: UnauthorizedError, 404: NotFoundError, 409: ConflictError, 413: TooLargeError}
_GONE = (502, 503, 504)
_RANGE_BEHIND_END = 416
T = TypeVar("T")


class Server:
    """One gateway, or several behind one address.

    Raises UnavailableError while it cannot be reached, BusyError for a limit, and RequestError for what it refuses.
    """

    def __init__(self, base_url: str | None, api_key: str | None) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is not installed: pip install 'penstock-llm[batch]'") from error
        self.url = address_of(base_url)
        key = api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            is_here = is_loopback(self.url)
            options: dict[str, Any] = {"trust_env": False, "verify": tls_for(self.url)} if is_here else {}
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, **options)
        except httpx.InvalidURL as error:
            raise ConfigError(f"base_url: {error}", param="base_url") from None
        except UnicodeEncodeError:
            raise ConfigError("api_key must be ASCII text", param="api_key") from None
        except (ImportError, ValueError) as error:
            raise proxy_error(error) or error from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def upload(self, path: Path, name: str, *, key: str) -> str:
        """Store a file as the input of a batch, and return its id. `key`: a repeated call with it stores nothing."""
        with path.open("rb") as file:
            answer = self._ask(
                "POST",
                "/v1/files",
                data={"purpose": "batch"},
                files={"file": (name, file)},
                headers={"Idempotency-Key": key},
                timeout=UPLOADED_S,
            )
        return str(answer["id"])

    def create(self, body: Mapping[str, Any], *, key: str) -> dict[str, Any]:
        """Make a batch. `key`: a repeated call with it returns the same batch."""
        return self._ask("POST", "/v1/batches", json=body, headers={"Idempotency-Key": key})

    def create_of_messages(self, body: Path, *, key: str) -> str:
        """Make a message batch and return its id. `key`: a repeated call with it returns the same batch."""
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        with body.open("rb") as file:
            answer = self._ask("POST", _MESSAGES_PATH, content=file, headers=headers, timeout=UPLOADED_S)
        return str(answer["id"])

    def batch(self, batch_id: str) -> StoredBatch:
        """Return a batch."""
        return stored_batch(self._ask("GET", _path_of(batch_id)))

    def change(self, batch_id: str, action: str) -> StoredBatch:
        """Let a batch `cancel`, `pause` or `resume`, and return it."""
        return stored_batch(self._ask("POST", f"{_path_of(batch_id)}/{action}"))

    def batches(self, limit: int) -> Iterator[StoredBatch]:
        """Yield batches of both APIs, newest first."""
        lists = [self._listed(path, limit, after) for path, after in ((_PATH, "after"), (_MESSAGES_PATH, "after_id"))]
        return islice(heapq.merge(*lists, key=lambda one: one.created_s, reverse=True), limit)

    def _listed(self, path: str, limit: int, after: str) -> Iterator[StoredBatch]:
        position: dict[str, str] = {}
        while limit > 0:
            page = self._ask("GET", path, params={"limit": min(limit, 100), **position})
            yield from map(stored_batch, page["data"])
            limit -= len(page["data"])
            if not page["has_more"]:
                return
            position = {after: page["last_id"]}

    def flow_counts(self, batch_id: str) -> dict[str, int]:
        """Return the number of rows of a flow in each state."""
        return dict(self._ask("GET", f"{_path_of(batch_id)}/rows", params={"limit": 1})["counts"])

    def flow_rows(self, batch_id: str, state: str | None, limit: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of a flow."""
        params: dict[str, Any] = {} if state is None else {"state": state}
        while limit > 0:
            page = self._ask("GET", f"{_path_of(batch_id)}/rows", params={**params, "limit": min(limit, 1000)})
            yield from page["data"]
            limit -= len(page["data"])
            if not page["has_more"]:
                return
            params["after"] = page["last_id"]

    @contextmanager
    def rows(self, batch_id: str, kind: str, start: int) -> Iterator[Iterator[bytes]]:
        """Yield the bytes from `start` on of a batch's `output` or `errors`: those that there are already."""
        headers = {"Range": f"bytes={start}-", "Accept-Encoding": "identity"}
        with self._reached(), self._http.stream("GET", f"/v1/batches/{batch_id}/{kind}", headers=headers) as answer:
            if answer.status_code == _RANGE_BEHIND_END:
                yield iter(())
                return
            if answer.is_error:
                answer.read()
            self._check(answer)
            yield answer.iter_raw()

    @contextmanager
    def message_results(self, batch_id: str) -> Iterator[Iterator[bytes]]:
        """Yield the lines of the results of a message batch that has ended."""
        with self._reached(), self._http.stream("GET", f"{_path_of(batch_id)}/results") as answer:
            if answer.is_error:
                answer.read()
            self._check(answer)
            yield _lines_of(answer.iter_bytes())

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with self._reached():
            answer = self._http.request(method, path, **options)
        self._check(answer)
        try:
            return dict(answer.json())
        except (ValueError, TypeError):
            raise RequestError(f"{self.url} is no gateway of penstock: it answers {path} without JSON") from None

    @contextmanager
    def _reached(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.TransportError as error:
            message = f"{self.url} does not answer: {error or type(error).__name__}"
            raise UnavailableError(message, code="server_away") from error

    def _check(self, answer: httpx.Response) -> None:
        if not answer.is_error:
            return
        status, (message, param) = answer.status_code, _problem_of(answer)
        if status in _GONE:
            raise UnavailableError(f"{self.url}: {message}", code="server_away", retry_after_ms=_pause_ms_of(answer))
        if status == 429:
            raise BusyError(message, retry_after_ms=_pause_ms_of(answer))
        if status == 401:
            message = f"api_key: {self.url} refuses it ({message}); give --api-key or {KEY_VARIABLES[0]}"
            raise UnauthorizedError(message, param="api_key")
        if status >= 500:
            raise PenstockError(f"{self.url}: {message}")
        raise _REFUSALS.get(status, RequestError)(message, param=param)


def _path_of(batch_id: str) -> str:
    """Return the path of a batch. Raises NotFoundError for what cannot be an id."""
    if not batch_id.replace("_", "").isalnum() or not batch_id.isascii():
        raise NotFoundError(f"no batch {batch_id[:64]!r}", code="batch_not_found", param="batch_id")
    return f"{_MESSAGES_PATH if is_of_messages(batch_id) else _PATH}/{batch_id}"


def _lines_of(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield whole lines. U+2028 and others, at which `str.splitlines` splits too, may be in one."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest:
        yield rest


def _problem_of(answer: httpx.Response) -> tuple[str, str | None]:
    """Return the message of an error, and the field that it names."""
    try:
        error = answer.json()["error"]
        return str(error["message"]), error.get("param")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return f"HTTP {answer.status_code}: {answer.text[:_MAX_BODY_CHARS].strip() or 'no text'}", None


def _pause_ms_of(answer: httpx.Response) -> int:
    text = answer.headers.get("Retry-After", "")
    return 1000 * int(text) if text.isdecimal() and len(text) < 6 else 1000


def patiently(call: Callable[[], T], on_wait: Callable[[str], None], until_s: float | None) -> T:
    """Return what `call` returns, repeated while the server is away or busy, until `until_s` (monotonic)."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return call()
        except (UnavailableError, BusyError) as error:
            on_wait(error.reason)
            wait(pause_s, until_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def wait(pause_s: float, until_s: float | None) -> None:
    """Sleep. Raises UnavailableError instead if `until_s` (monotonic) comes before the end of the pause."""
    if until_s is not None and time.monotonic() + pause_s > until_s:
        raise UnavailableError("the batch has not ended within --timeout", code="batch_open")
    time.sleep(pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """A batch of a server, of OpenAI's API or of Anthropic's, as the commands show it."""

    fields: Mapping[str, Any]
    """The object of its API."""
    batch_id: str
    status: str
    is_ended: bool
    created_s: float
    num_rows: int
    num_answered: int
    num_failed: int
    """Of a message batch, known only at its end."""
    problems: Sequence[Mapping[str, Any]] = ()

    @property
    def has_succeeded(self) -> bool:
        """Whether it has ended, with an answer for each row."""
        return self.status in ("completed", "ended") and self.num_answered == self.num_rows

    @property
    def shown_status(self) -> str:
        """The status, or `paused`."""
        return "paused" if self.fields["paused"] and not self.is_ended else self.status

    @property
    def num_tokens(self) -> tuple[int, int] | None:
        """Tokens in and out; None for a message batch, whose object does not have them."""
        usage = self.fields.get("usage")
        return None if usage is None else (usage["input_tokens"], usage["output_tokens"])

    @property
    def progress(self) -> BatchProgress:
        """Its progress, as `batch run` shows its own."""
        waiting = "paused" if self.fields["paused"] else self.fields["waiting"] or ""
        if not self.is_ended and self.status != "in_progress":
            waiting = waiting or self.status
        return BatchProgress(
            self.num_rows, self.num_answered, self.num_failed, *(self.num_tokens or (0, 0)), waiting=waiting
        )


def stored_batch(fields: Mapping[str, Any]) -> StoredBatch:
    """Return a batch by the object of its API."""
    counts = fields["request_counts"]
    if fields.get("type") != "message_batch":
        return StoredBatch(
            fields=fields,
            batch_id=fields["id"],
            status=fields["status"],
            is_ended=fields["status"] in _ENDED,
            created_s=fields["created_at"],
            num_rows=counts["total"],
            num_answered=counts["completed"],
            num_failed=counts["failed"],
            problems=(fields["errors"] or {}).get("data", ()),
        )
    is_ended, num_rows = fields["processing_status"] == "ended", sum(counts.values())
    return StoredBatch(
        fields=fields,
        batch_id=fields["id"],
        status=fields["processing_status"],
        is_ended=is_ended,
        created_s=datetime.fromisoformat(fields["created_at"]).timestamp(),
        num_rows=num_rows,
        num_answered=counts["succeeded"] if is_ended else fields["answered"],
        num_failed=num_rows - counts["succeeded"] if is_ended else 0,
    )


STDIN = "/dev/stdin"
_REQUEST_MEMBERS = frozenset(("custom_id", "params"))


@contextmanager
def prepared(
    source: str, model: str | None, retry_of: str | None, *, is_flow: bool = False
) -> Iterator[tuple[Path, str]]:
    """Yield a plain file with the checked lines of an input, and the endpoint of its batch.

    Of requests of Anthropic's API, it is the body of a message batch. Rows of which one has a field of flows are a
    flow; with `is_flow`, any are.
    """
    from penstock.producer.batch.lines import check_file, plain_copy, rows_in
    from penstock.producer.flows.rows import FLOW_FIELDS

    name = STDIN if source == "-" else source
    with (
        storage.local_copy(name, param="input") as packed,
        tempfile.TemporaryDirectory(prefix="penstock-batch-") as folder,
    ):
        with storage.readable("input"):
            path = plain_copy(packed, Path(folder) / "plain")
            check_file(path)
            if model is not None or retry_of is not None:
                path = _changed(path, Path(folder) / "rows", model, retry_of)
            if is_flow or any(not FLOW_FIELDS.isdisjoint(row.fields) for row in rows_in(path)):
                _check_flow(rows_in(path))
                yield path, FLOW_ENDPOINT
                return
            first = next(rows_in(path))
            is_message = "params" in first.fields and "url" not in first.fields and "body" not in first.fields
            if is_message:
                _write_body(rows_in(path), body := Path(folder) / "body", model)
                yield body, MESSAGES_ENDPOINT
                return
        url = first.fields.get("url")
        if not isinstance(url, str):
            raise RequestError(f"line {first.line}: url must be a text", param="input")
        yield path, url


def _check_flow(rows: Iterable[InputRow]) -> None:
    from penstock.producer.flows.graph import FlowGraph

    graph = FlowGraph()
    for row in rows:
        try:
            graph.add(row.line, row.custom_id, row.fields)
        except RequestError as error:
            raise RequestError(f"line {row.line}: {error.message}", code=error.code, param=error.param) from None
    for wrong, line in graph.problems():
        where = "" if line is None else f"line {line}: "
        raise RequestError(f"{where}{wrong.message}", code=wrong.code, param=wrong.param)


def _changed(path: Path, target: Path, model: str | None, retry_of: str | None) -> Path:
    """Write the rows that an error file lists (None: all), with `model` in those that name none."""
    from penstock.producer.batch.lines import rows_in
    from penstock.producer.openai.json_parts import json_line

    wanted = None if retry_of is None else _failed_in(retry_of)
    num_rows = 0
    with target.open("wb") as file:
        for line in rows_in(path):
            if wanted is None or line.custom_id in wanted:
                file.write(json_line(_with_model(line, model)))
                num_rows += 1
    if not num_rows:
        raise RequestError(f"retry_of: no row of the input is in {retry_of}", param="retry_of")
    return target


def _failed_in(name: str) -> set[str]:
    from penstock.producer.batch.lines import rows_in

    with storage.readable("retry_of"):
        try:
            return {line.custom_id for line in rows_in(Path(name))}
        except RequestError:
            raise RequestError(f"retry_of: {name} is no error file of a batch", param="retry_of") from None


def _with_model(line: InputRow, model: str | None) -> Mapping[str, Any]:
    body = line.fields.get("body")
    if model is None or not isinstance(body, dict) or body.get("model") is not None:
        return line.fields
    return {**line.fields, "body": {**body, "model": model}}


def _write_body(lines: Iterable[InputRow], target: Path, model: str | None) -> None:
    """Write the body of a message batch, with `model` in the requests that name none.

    Raises RequestError for a line that is no request.
    """
    with target.open("wb") as file:
        file.write(b'{"requests": [')
        for at, line in enumerate(lines):
            params = line.fields.get("params")
            if not isinstance(params, dict) or not line.fields.keys() <= _REQUEST_MEMBERS:
                message = "a line of a message batch has custom_id and params, an object, and nothing else"
                raise RequestError(f"line {line.line}: {message}", param="input")
            if model is not None and params.get("model") is None:
                params = {**params, "model": model}
            request = json.dumps({"custom_id": line.custom_id, "params": params}, ensure_ascii=False)
            file.write((b",\n" if at else b"\n") + request.encode(errors="surrogatepass"))
        file.write(b"\n]}")
