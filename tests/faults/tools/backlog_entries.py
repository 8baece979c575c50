"""The same requests through each way into the queue: submit, generate, map, HTTP, Celery tasks and a batch file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fakes.processes.reference_engine import reference_tokens, text_of
from faults.tools.processes import GatewayProcess

from penstock.contract.job import SamplingParams
from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.endpoints import COMPLETIONS_URL
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.tasks import GENERATE
from penstock.producer.client import AsyncClient
from penstock.runtime.process_memory import resident_bytes

FIRST_TOKEN_ID = 100
"""The last token of a prompt is this plus the request's number, so the reference engine's answers differ."""
_PROMPT = tuple(range(40, 48))
_AT_ONCE = 64
_READ_AT_ONCE = 256
HTTP_AT_ONCE = 8
"""With more connections, httpx takes most of a core to choose one for each request."""
_POLL_S = 0.2
_PATIENCE_S = 3600.0
_CELERY_PROCESSES = 4
_SHOWN = 5


@dataclass(slots=True)
class Requests:
    """Numbered requests to one pool. `is_reference`: the pool has the reference engine, so texts are known."""

    pool: str
    number: int
    max_tokens: int
    is_reference: bool = True

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters of all requests."""
        return {"max_tokens": self.max_tokens, "temperature": 0.0}

    def prompt(self, index: int) -> list[int]:
        """Return the prompt of one request. Its token ids stay within the vocabulary of the demo model."""
        return [*_PROMPT, *(FIRST_TOKEN_ID + digits for digits in divmod(index, 10_000))]

    def is_right(self, index: int, text: str) -> bool:
        """Whether a text can be the answer to that request."""
        if not self.is_reference:
            return True
        return text == text_of(reference_tokens("", SamplingParams(**self.sampling), self.prompt(index)))


@dataclass(slots=True)
class Answers:
    """What came back, as the caller sees it, and what it took."""

    texts: dict[int, list[str]] = field(default_factory=dict)
    job_ids: list[str] = field(default_factory=list)
    accepted_s: float = 0.0
    """Seconds until all requests were accepted, where that can be told from their ends."""
    took_s: float = 0.0
    mib: float = 0.0
    """Memory of the calling process while all requests are open."""
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, index: int, text: str) -> None:
        """Add an answer."""
        self.texts.setdefault(index, []).append(text)

    def problems(self, requests: Requests) -> list[str]:
        """Return what contradicts that each request was answered once, and rightly."""
        wrong = [i for i, texts in self.texts.items() if not requests.is_right(i, texts[0])]
        lists = {
            "not answered": [i for i in range(requests.number) if i not in self.texts],
            "answered more than once": [i for i, texts in self.texts.items() if len(texts) > 1],
            "answered wrongly": wrong,
        }
        told = [f"{len(found)} requests {what}: {found[:_SHOWN]}" for what, found in lists.items() if found]
        if len(set(self.job_ids)) != len(self.job_ids):
            told.append("two requests have the same job")
        return told + [f"refused: {name} {count}" for name, count in self.refusals.items()]


async def each(number: int, work: Callable[[int], Awaitable[None]], *, at_once: int) -> None:
    """Do work 0 to number - 1, some of it at once."""
    numbers = iter(range(number))

    async def worker() -> None:
        for index in numbers:
            await work(index)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(at_once, number)):
            tasks.create_task(worker())


async def by_submit(url: str, requests: Requests, _: Path) -> Answers:
    """Submit all, then read all, then acknowledge all."""
    answers, started_s = Answers(job_ids=[""] * requests.number), time.perf_counter()
    async with AsyncClient(url) as client:
        jobs: dict[int, Any] = {}

        async def submit(index: int) -> None:
            jobs[index] = await client.submit(requests.prompt(index), model=requests.pool, **requests.sampling)
            answers.job_ids[index] = jobs[index].id

        async def read(index: int) -> None:
            answers.add(index, (await jobs.pop(index).result()).text)

        await each(requests.number, submit, at_once=_AT_ONCE)
        answers.accepted_s, answers.mib = time.perf_counter() - started_s, resident_bytes() / (1 << 20)
        await each(requests.number, read, at_once=_READ_AT_ONCE)
        await client.ack(*answers.job_ids)
        _note_decisions(client, answers)
    answers.took_s = time.perf_counter() - started_s
    return answers


async def by_generate(url: str, requests: Requests, _: Path) -> Answers:
    """Pass all prompts in one call."""
    answers, started_s = Answers(), time.perf_counter()
    async with AsyncClient(url) as client:
        prompts = [requests.prompt(index) for index in range(requests.number)]
        results = await client.generate(prompts, model=requests.pool, **requests.sampling)
        for index, result in enumerate(results):
            answers.add(index, result.text)
            answers.job_ids.append(result.job_id)
        _note_decisions(client, answers)
    answers.took_s, answers.mib = time.perf_counter() - started_s, resident_bytes() / (1 << 20)
    return answers


async def by_map(url: str, requests: Requests, _: Path) -> Answers:
    """Iterate over the answers, as many jobs open as the client allows."""
    answers, started_s, index = Answers(), time.perf_counter(), 0
    async with AsyncClient(url) as client:
        prompts = map(requests.prompt, range(requests.number))
        async for result in client.map(prompts, model=requests.pool, max_in_flight=4096, **requests.sampling):
            answers.add(index, result.text)
            answers.job_ids.append(result.job_id)
            index += 1
        _note_decisions(client, answers)
    answers.took_s, answers.mib = time.perf_counter() - started_s, resident_bytes() / (1 << 20)
    return answers


def _note_decisions(client: AsyncClient, answers: Answers) -> None:
    answers.refusals.update({name: n for name, n in client.stats.decisions.items() if name != "admitted"})


async def by_http(url: str, requests: Requests, _: Path) -> Answers:
    """Post all to `/v1/jobs`, then poll and acknowledge each."""
    answers = Answers(job_ids=[""] * requests.number)
    limits = httpx.Limits(max_connections=HTTP_AT_ONCE)
    gateway = await asyncio.to_thread(GatewayProcess(url).wait_ready)
    async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=60) as http:
        started_s = time.perf_counter()

        async def submit(index: int) -> None:
            body = {"model": requests.pool, "tokens": requests.prompt(index), "params": requests.sampling}
            answer = await http.post("/v1/jobs", json=body)
            if answer.status_code != 202:
                answers.refusals[f"{answer.status_code} {answer.text[:100]}"] += 1
            else:
                answers.job_ids[index] = answer.json()["id"]

        async def read(index: int) -> None:
            job_id = answers.job_ids[index]
            while (job := (await http.get(f"/v1/jobs/{job_id}")).json())["state"] in ("queued", "running"):
                await asyncio.sleep(_POLL_S)
            answers.add(index, job["result"]["choices"][0]["text"] if job["result"] else job["state"])
            (await http.post(f"/v1/jobs/{job_id}/ack")).raise_for_status()

        await each(requests.number, submit, at_once=HTTP_AT_ONCE)
        answers.accepted_s = time.perf_counter() - started_s
        await each(requests.number, read, at_once=HTTP_AT_ONCE)
        answers.took_s = time.perf_counter() - started_s
    gateway.close()
    return answers


async def by_celery(url: str, requests: Requests, folder: Path) -> Answers:
    """Send a task for each request to a worker, and get each task's result from Celery."""
    with _worker(url, folder / "worker.log"):
        return await asyncio.to_thread(_send_tasks, url, requests)


def _send_tasks(url: str, requests: Requests) -> Answers:
    answers, started_s = Answers(), time.perf_counter()
    app = make_app(CelerySettings.load(), url)
    options = {"model": requests.pool, **requests.sampling}
    tasks = [app.send_task(GENERATE, kwargs={"prompt": requests.prompt(i), **options}) for i in range(requests.number)]
    answers.accepted_s = time.perf_counter() - started_s
    for index, task in enumerate(tasks):
        body = task.get(timeout=_PATIENCE_S, interval=0.05)
        answers.add(index, body["choices"][0]["text"])
        answers.job_ids.append(body["id"].removeprefix("cmpl-"))
        task.forget()
    answers.took_s, answers.mib = time.perf_counter() - started_s, resident_bytes() / (1 << 20)
    app.close()
    return answers


@contextmanager
def _worker(url: str, log: Path) -> Iterator[None]:
    words = [sys.executable, "-m", "celery", "-A", "penstock.producer.batch.app", "worker", "--loglevel", "WARNING"]
    words += ["--concurrency", str(_CELERY_PROCESSES), "--without-mingle", "--without-gossip"]
    with log.open("wb") as said:
        env = os.environ | {"PENSTOCK_REDIS_URL": url}
        worker = subprocess.Popen(words, env=env, stdout=said, stderr=said, process_group=0)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


async def by_batch(url: str, requests: Requests, folder: Path) -> Answers:
    """Run `penstock batch run` on a file with all requests."""
    answers, started_s = Answers(), time.perf_counter()
    source, target = folder / "requests.jsonl", folder / "results.jsonl"
    write_batch(source, requests, range(requests.number))
    words = [sys.executable, "-m", "penstock", "batch", "run", str(source), str(target), "--in-flight", "4096"]
    process = await asyncio.create_subprocess_exec(*words, "--redis-url", url, stderr=subprocess.PIPE)
    said = (await process.communicate())[1].decode()
    assert process.returncode == 0, said[-1000:]
    answers.took_s = time.perf_counter() - started_s
    for index, text, job_id in read_batch(target):
        answers.add(index, text)
        answers.job_ids.append(job_id)
    return answers


def write_batch(path: Path, requests: Requests, indices: range) -> None:
    """Write a batch file of these requests. Their numbers are the rows' names."""
    rows = (
        {
            "custom_id": str(index),
            "url": COMPLETIONS_URL,
            "body": {"model": requests.pool, "prompt": requests.prompt(index), **requests.sampling},
        }
        for index in indices
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_batch(path: Path) -> list[tuple[int, str, str]]:
    """Return (number, text, job) of each row of a results file."""
    found = []
    for row in map(json.loads, path.read_text().splitlines()):
        answer = row["response"]
        text = answer["body"]["choices"][0]["text"] if answer else str(row["error"])
        found.append((int(row["custom_id"]), text, answer["request_id"] if answer else ""))
    return found


ENTRIES = {
    "submit": by_submit,
    "generate": by_generate,
    "map": by_map,
    "http": by_http,
    "celery": by_celery,
    "batch": by_batch,
}
