"""`python backlog_client.py`: one client of a backlog, which is killed and started again until it has all its answers.

BACKLOG_PART names a JSON file: `pool`, `max_tokens`, `jobs` (number of the request → id or key of its job), `output`,
and for HTTP `gateways`. Each answer is written as one line, and only then acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any, BinaryIO

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from faults.tools.backlog_entries import HTTP_AT_ONCE, Requests, each

from penstock.contract.errors import BusyError, UnavailableError
from penstock.producer.client import AsyncClient, ClientSettings

_AT_ONCE = 64
_READ_AT_ONCE = 128
_POLL_S = 0.2
_OUTAGE_S = 120.0


class Part:
    """The requests of this client, and the file of their answers."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.requests = Requests(given["pool"], 0, given["max_tokens"])
        self.gateways: list[str] = given.get("gateways", [])
        self._path = Path(given["output"])
        written = {index for index, _, _ in rows_in(self._path)}
        self.left = [(int(index), job) for index, job in given["jobs"].items() if int(index) not in written]

    def open(self) -> BinaryIO:
        """Open the file for whole rows: what a killed run has half written is cut off."""
        data = self._path.read_bytes() if self._path.exists() else b""
        file = self._path.open("ab", buffering=0)
        file.truncate(data.rfind(b"\n") + 1)
        return file


def rows_in(path: Path) -> list[tuple[int, str, str]]:
    """Return (number of the request, text, job) of each whole row."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def _row(index: int, text: str, job_id: str) -> bytes:
    return json.dumps([index, text, job_id]).encode() + b"\n"


async def run_python(part: Part) -> None:
    """Submit all that is not answered, then read, write and acknowledge each."""
    made = AsyncClient(settings=ClientSettings(outage_s=_OUTAGE_S))
    # Redis may be down just now: a client that is started then says so at once.
    await _persistent(made.connect)
    async with made as client:
        jobs: dict[int, Any] = {}
        with part.open() as file:

            async def submit(at: int) -> None:
                index, job_id = part.left[at]
                options: dict[str, Any] = {"job_id": job_id, "model": part.requests.pool, **part.requests.sampling}
                jobs[at] = await _persistent(lambda: client.submit(part.requests.prompt(index), **options))

            async def read(at: int) -> None:
                job = jobs.pop(at)
                result = await _persistent(lambda: job.result(check=False))
                file.write(_row(part.left[at][0], result.text or result.outcome.code, job.id))
                await _persistent(job.ack)

            await each(len(part.left), submit, at_once=_AT_ONCE)
            await each(len(part.left), read, at_once=_READ_AT_ONCE)


async def _persistent(call: Any) -> Any:
    while True:
        try:
            return await call()
        except (BusyError, UnavailableError) as error:
            sys.stderr.write(f"again: {error.code} {error.message}\n")
            await asyncio.sleep(max(0.1, error.retry_after_ms / 1000))


async def run_http(part: Part) -> None:
    """Post each job with its idempotency key, poll it to its end, write it, and acknowledge it."""
    limits, rng = httpx.Limits(max_connections=HTTP_AT_ONCE), random.Random()
    async with httpx.AsyncClient(limits=limits, timeout=60) as http:

        async def ask(method: str, path: str, **options: Any) -> dict[str, Any]:
            while True:
                try:
                    answer = await http.request(method, rng.choice(part.gateways) + path, **options)
                except httpx.TransportError:
                    await asyncio.sleep(_POLL_S)
                    continue
                if answer.status_code < 300:
                    return dict(answer.json())
                sys.stderr.write(f"again: {answer.status_code} {answer.text[:200]}\n")
                assert answer.status_code in (429, 503), answer.text
                await asyncio.sleep(_POLL_S)

        with part.open() as file:
            ids: dict[int, str] = {}

            async def submit(at: int) -> None:
                index, key = part.left[at]
                body: dict[str, Any] = {"model": part.requests.pool, "tokens": part.requests.prompt(index)}
                body |= {"params": part.requests.sampling}
                ids[at] = (await ask("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": key}))["id"]

            async def read(at: int) -> None:
                while (job := await ask("GET", f"/v1/jobs/{ids[at]}"))["state"] in ("queued", "running"):
                    await asyncio.sleep(1.0)
                text = job["result"]["choices"][0]["text"] if job["result"] else str(job["outcome"])
                file.write(_row(part.left[at][0], text, ids[at]))
                await ask("POST", f"/v1/jobs/{ids[at]}/ack")

            await each(len(part.left), submit, at_once=HTTP_AT_ONCE)
            await each(len(part.left), read, at_once=HTTP_AT_ONCE)


def main() -> None:
    """Run one client to its end."""
    part = Part(json.loads(Path(os.environ["BACKLOG_PART"]).read_text()))
    asyncio.run(run_http(part) if part.gateways else run_python(part))


if __name__ == "__main__":
    main()
