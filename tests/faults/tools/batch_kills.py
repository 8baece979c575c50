"""One batch of many rows, whose gateways, nodes and Redis are killed at random moments while it runs."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import httpx
from fakes.waiting import Deadline, until
from faults.tools.backlog_entries import Requests
from faults.tools.soak_kills import Fleet
from redis import Redis
from redis.exceptions import RedisError

from penstock.queue.files.batch import OPEN_STATES

F = "penstock:{.files}"
_MESSAGES = "/v1/messages/batches"
_PATIENCE_S = 90.0
_PAUSE_S = 0.25
_SHOWN = 3
_PLANT_AFTER = 0.2
"""Part of the rows that are committed when a fault is planted."""


class Line(NamedTuple):
    """A row of a result as its reader sees it."""

    custom_id: str
    text: str | None
    """None for a row of errors."""
    num_output: int = 0
    """Output tokens by its usage."""


@dataclass(slots=True)
class Ended:
    """A batch that has ended, by what the server says of it."""

    status: str
    counts: dict[str, int]
    lines: list[Line]
    num_output: int | None = None
    """Output tokens by the batch's usage, where it has one."""


class Api:
    """Calls of the gateways. One that is away is called again, or another one instead."""

    def __init__(self, fleet: Fleet, http: httpx.AsyncClient) -> None:
        self._fleet = fleet
        self._http = http
        self._number = 0

    @property
    def url(self) -> str:
        """The URL of a gateway, which the one that replaces it keeps."""
        self._number += 1
        return self._fleet.gateways[self._number % len(self._fleet.gateways)].url

    async def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Call until a gateway answers with a status below 500. Raises for other statuses from 400."""
        deadline, last = Deadline(_PATIENCE_S), "no call"
        while deadline.left_s():
            try:
                answer = await self._http.request(method, f"{self.url}{path}", **options)
            except httpx.HTTPError as error:
                last = repr(error)
            else:
                if answer.status_code < 400:
                    return answer
                last = f"{answer.status_code} {answer.text[:300]}"
                assert answer.status_code in {409, 429} or answer.status_code >= 500, last
            await asyncio.sleep(_PAUSE_S)
        raise AssertionError(f"{method} {path} is not answered: {last}")


class Entry(Protocol):
    """A way to submit a batch, to follow it and to read its result."""

    requests: Requests

    async def create(self, api: Api) -> str:
        """Submit the batch. Return its id."""
        ...

    async def ended(self, api: Api, batch_id: str) -> Ended | None:
        """Return the ended batch; None while it runs."""
        ...

    def kill(self) -> str:
        """Kill the process that reads the result, and return its name; an empty one if there is none."""
        ...


@dataclass(slots=True)
class OpenAIEntry:
    """`/v1/files` and `/v1/batches`."""

    endpoint: ClassVar[str] = "/v1/completions"
    requests: Requests

    def body_of(self, index: int) -> dict[str, Any]:
        """Return the body of a row."""
        return {"model": self.requests.pool, "prompt": self.requests.prompt(index), **self.requests.sampling}

    def line_of(self, row: dict[str, Any]) -> Line:
        """Return a row of a result as its reader sees it."""
        if row["error"] is not None:
            return Line(row["custom_id"], None)
        body = row["response"]["body"]
        return Line(row["custom_id"], body["choices"][0]["text"], body["usage"]["completion_tokens"])

    def _row(self, index: int) -> dict[str, Any]:
        return {"custom_id": f"row-{index}", "method": "POST", "url": self.endpoint, "body": self.body_of(index)}

    async def create(self, api: Api) -> str:
        """Upload the rows, and make the batch."""
        content = "".join(json.dumps(self._row(index)) + "\n" for index in range(self.requests.number)).encode()
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("rows.jsonl", content)}}
        file = await api("POST", "/v1/files", headers={"Idempotency-Key": "file"}, **form)
        body = {"input_file_id": file.json()["id"], "endpoint": self.endpoint, "completion_window": "24h"}
        made = await api("POST", "/v1/batches", json=body, headers={"Idempotency-Key": "batch"})
        return str(made.json()["id"])

    async def ended(self, api: Api, batch_id: str) -> Ended | None:
        """Return the ended batch; None while it runs."""
        batch = (await api("GET", f"/v1/batches/{batch_id}")).json()
        if batch["status"] not in {"completed", "failed", "expired", "cancelled"}:
            return None
        lines: list[Line] = []
        for name in ("output_file_id", "error_file_id"):
            if (file_id := batch[name]) is not None:
                content = await api("GET", f"/v1/files/{file_id}/content")
                lines += [self.line_of(json.loads(line)) for line in content.text.splitlines()]
        return Ended(batch["status"], batch["request_counts"], lines, batch["usage"]["output_tokens"])

    def kill(self) -> str:
        """There is no reading process."""
        return ""


@dataclass(slots=True)
class CommandEntry(OpenAIEntry):
    """`penstock batch submit`, and `penstock batch results --wait`, which is killed and starts again."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="batch-command-")))
    _reader: subprocess.Popen[bytes] | None = None
    _words: tuple[str, ...] = ()

    async def create(self, api: Api) -> str:
        """Submit the rows by the command, until a gateway answers it."""
        source = self.folder / "rows.jsonl"
        source.write_text("".join(json.dumps(self._row(index)) + "\n" for index in range(self.requests.number)))
        deadline = Deadline(_PATIENCE_S)
        while True:
            words = ("submit", str(source), "--idempotency-key", "batch", "--base-url", api.url)
            done = await asyncio.to_thread(self._run, words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            if done.returncode == 0:
                batch_id = done.stdout.decode().split()[-1]
                self._words = ("results", batch_id, str(self.folder / "out.jsonl"), "--wait", "--base-url", api.url)
                return batch_id
            deadline.check(done.stderr.decode())

    async def ended(self, api: Api, batch_id: str) -> Ended | None:
        """Return the ended batch once the command has ended; None while it runs."""
        self._reader = self._reader or self._start(self._words)
        if (code := self._reader.poll()) is None:
            return None
        assert code in {0, 1}, f"the command has ended with {code}"
        batch = (await api("GET", f"/v1/batches/{batch_id}")).json()
        lines: list[Line] = []
        for name in ("out.jsonl", "out.jsonl.errors.jsonl"):
            if (path := self.folder / name).exists():
                lines += [self.line_of(json.loads(line)) for line in path.read_text().splitlines()]
        shutil.rmtree(self.folder)
        return Ended(batch["status"], batch["request_counts"], lines, batch["usage"]["output_tokens"])

    def kill(self) -> str:
        """Kill the command. The next look at the batch starts it again."""
        if self._reader is None or self._reader.poll() is not None:
            return ""
        self._reader.kill()
        self._reader.wait()
        self._reader = None
        return "reading command"

    @staticmethod
    def _start(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "penstock", "batch", *words], **options)

    @staticmethod
    def _run(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-m", "penstock", "batch", *words], check=False, **options)


class MessageRequests(Requests):
    """Requests whose prompts are messages. The stub's chat template is the text itself."""

    def prompt(self, index: int) -> list[int]:
        """Return the bytes of the message."""
        return list(f"row {index}".encode())


@dataclass(slots=True)
class MessagesEntry(OpenAIEntry):
    """`/v1/messages/batches`."""

    async def create(self, api: Api) -> str:
        """Send all requests in one body."""
        self.requests = MessageRequests(self.requests.pool, self.requests.number, self.requests.max_tokens)
        asked = []
        for index in range(self.requests.number):
            messages = [{"role": "user", "content": bytes(self.requests.prompt(index)).decode()}]
            params = {"model": self.requests.pool, "messages": messages, **self.requests.sampling}
            asked.append({"custom_id": f"row-{index}", "params": params})
        made = await api("POST", _MESSAGES, json={"requests": asked}, headers={"Idempotency-Key": "batch"})
        return str(made.json()["id"])

    async def ended(self, api: Api, batch_id: str) -> Ended | None:
        """Return the ended batch; None while it runs."""
        batch = (await api("GET", f"{_MESSAGES}/{batch_id}")).json()
        if batch["processing_status"] != "ended":
            return None
        content, lines = await api("GET", f"{_MESSAGES}/{batch_id}/results"), list[Line]()
        for one in map(json.loads, content.text.splitlines()):
            if one["result"]["type"] != "succeeded":
                lines.append(Line(one["custom_id"], None))
                continue
            message = one["result"]["message"]
            text = "".join(part["text"] for part in message["content"])
            lines.append(Line(one["custom_id"], text, message["usage"]["output_tokens"]))
        return Ended("ended", batch["request_counts"], lines)


def problems_of(requests: Requests, ended: Ended) -> list[str]:
    """Return what contradicts that each row was answered once, rightly, and counted once."""
    names = {f"row-{index}": index for index in range(requests.number)}
    counts = Counter(line.custom_id for line in ended.lines)
    lists = {
        "missing": [name for name in names if name not in counts],
        "repeated": [name for name, number in counts.items() if number > 1],
        "strange": [name for name in counts if name not in names],
        "failed": [line.custom_id for line in ended.lines if line.text is None],
        "wrong": [
            line.custom_id
            for line in ended.lines
            if line.text is not None
            and line.custom_id in names
            and not requests.is_right(names[line.custom_id], line.text)
        ],
    }
    problems = [f"{len(found)} rows are {what}: {found[:_SHOWN]}" for what, found in lists.items() if found]
    num_output = sum(line.num_output for line in ended.lines)
    if ended.num_output is not None and ended.num_output != num_output:
        problems.append(f"the batch counts {ended.num_output} output tokens, its rows {num_output}")
    return problems


@dataclass(slots=True)
class BatchRun:
    """A batch that runs, and what is done to its processes meanwhile."""

    fleet: Fleet
    entry: Entry
    rng: random.Random
    killed: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    """Most memory that Redis used."""

    async def run(self, *, num_kills: int, every_s: float, freeze_s: float, plant: str = "") -> Ended:
        """Submit the batch and wait for its end. Raises if it ends before the last kill.

        `freeze_s`: how long the batch's holder is stopped once. `plant`: `lost` or `doubled`, what is made to happen
        to one row. A check that then finds nothing is no check.
        """
        async with httpx.AsyncClient(timeout=120) as http, asyncio.TaskGroup() as tasks:
            api, memory = Api(self.fleet, http), tasks.create_task(self._watch_memory())
            batch_id = await self.entry.create(api)
            await self.fleet.begin()
            if plant:
                await self._plant(batch_id, plant)
            freeze_at = self.rng.randrange(num_kills) if num_kills else -1
            for number in range(num_kills):
                await asyncio.sleep(self.rng.uniform(0.3, 1.7) * every_s)
                assert await self._ended(api, batch_id) is None, f"the batch has ended after {number} kills"
                if number == freeze_at:
                    await self._freeze_holder(batch_id, freeze_s)
                else:
                    await self._kill_one()
            while (ended := await self._ended(api, batch_id)) is None:
                await asyncio.sleep(1)
            memory.cancel()
        return ended

    async def _ended(self, api: Api, batch_id: str) -> Ended | None:
        """Return the ended batch; None while it runs, by its record if no gateway does. It may be called until then."""
        if self.fleet.holders is not self.fleet.gateways:
            if self._field(batch_id, "status") in {*OPEN_STATES, ""}:
                return None
            await self.fleet.end()
        return await self.entry.ended(api, batch_id)

    async def _kill_one(self) -> None:
        kind = self.rng.choice(self.fleet.kinds)
        if kind == "reader":
            kind = self.entry.kill() or "gateway"
        if kind in self.fleet.kinds:
            await getattr(self.fleet, f"kill_{kind}")(self.rng)
        self.killed[kind] += 1

    async def _freeze_holder(self, batch_id: str, seconds: float) -> None:
        holder = await self._when(lambda: self._holder(batch_id))
        holder.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        holder.signal(signal.SIGCONT)
        self.killed["holder frozen"] += 1

    def _holder(self, batch_id: str) -> Any:
        """Return the process that runs the batch, by its log; None while none does."""
        token = self._field(batch_id, "token")
        found = [one for one in self.fleet.holders if re.search(rf'"{batch_id}", "token": {token}\b', one.log)]
        return found[0] if token and found else None

    async def _plant(self, batch_id: str, what: str) -> None:
        """Set the mark of a row that no part has, or clear that of one that a part has. Then let another holder run."""
        least = self.entry.requests.number * _PLANT_AFTER
        await self._when(lambda: int(self._field(batch_id, "completed") or 0) >= least)
        holder = await self._when(lambda: self._holder(batch_id))
        holder.signal(signal.SIGSTOP)
        with self.fleet.redis.client() as redis:
            name, is_done = f"{F}:rows:{batch_id}", int(what == "doubled")
            at = 0 if is_done else self.entry.requests.number - 1
            assert redis.getbit(name, at) == is_done
            redis.setbit(name, at, 1 - is_done)
        await self.fleet.kill_holder_at(self.fleet.holders.index(holder))

    def _field(self, batch_id: str, name: str) -> str:
        try:
            with self.fleet.redis.client() as redis:
                return (_bytes(redis, batch_id, name) or b"").decode()
        except RedisError:
            return ""

    async def _when(self, found: Callable[[], Any]) -> Any:
        return await until(found, within_s=_PATIENCE_S, what="the batch does not go on")

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.peak_bytes = max(self.peak_bytes, await asyncio.to_thread(used_bytes, self.fleet))


def used_bytes(fleet: Fleet) -> int:
    """Return the memory that Redis uses; 0 while it is away."""
    try:
        with fleet.redis.client() as redis:
            return int(redis.info("memory")["used_memory"])
    except RedisError:
        return 0


def _bytes(redis: Redis, batch_id: str, name: str) -> bytes | None:
    value = redis.hget(f"{F}:batch:{batch_id}", name)
    assert value is None or isinstance(value, bytes)
    return value
