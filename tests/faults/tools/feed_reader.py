"""`python feed_reader.py`: reads a tenant's completions into a file. After a kill it continues after its last line.

FEED_READER names a JSON file: `output`, `after` (the cursor at which it begins), and `gateways` for a reader over HTTP.
A line has the cursor behind a completion, and its job and state. After a loss in Redis, completions may come again: a
line says so, and those in the file are then skipped.
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

from penstock.contract.errors import UnavailableError
from penstock.producer.client import AsyncClient, ClientSettings

GAP = "gap"
_PAUSE_S = 0.1
_TIMEOUT_S = 60.0
"""Longer than the pause between two keep-alives. A gateway without a word is gone."""


def lines_of(path: Path) -> list[tuple[str, str, str]]:
    """Return (cursor, job, state) of each whole line."""
    data = path.read_bytes() if path.exists() else b""
    return [tuple(json.loads(line)) for line in data.split(b"\n")[:-1]]


def opened(path: Path) -> BinaryIO:
    """Open the file for whole lines: what a killed run has half written is cut off."""
    data = path.read_bytes() if path.exists() else b""
    file = path.open("ab", buffering=0)
    file.truncate(data.rfind(b"\n") + 1)
    return file


def _line(*values: str) -> bytes:
    return json.dumps(values).encode() + b"\n"


async def read_by_python(file: BinaryIO, after: str) -> None:
    """Follow the completions with a client."""
    async with AsyncClient(settings=ClientSettings(outage_s=120.0)) as client:
        while True:
            try:
                async for cursor, done in client.completions(after):
                    file.write(_line(cursor, done.job_id, done.state))
                    after = cursor
            except UnavailableError as error:
                sys.stderr.write(f"again: {error.code} {error.message}\n")


async def read_by_http(file: BinaryIO, after: str, gateways: list[str]) -> None:
    """Follow the completions at any gateway, and at another one when it ends."""
    rng, known = random.Random(), set[str]()
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as http:
        while True:
            try:
                headers = {"Last-Event-ID": after}
                async with http.stream("GET", f"{rng.choice(gateways)}/v1/jobs/events", headers=headers) as answer:
                    if answer.status_code != httpx.codes.OK:
                        await answer.aread()
                        assert answer.status_code in (429, 503), answer.text
                    async for cursor, shown in events_of(answer):
                        if "error" in shown:
                            break
                        after = cursor
                        if shown["object"] == "job.gap":
                            assert shown["reason"] == "lost", shown
                            file.write(_line(cursor, GAP, shown["reason"]))
                            known = {job_id for _, job_id, _ in lines_of(Path(file.name))}
                        elif shown["object"] == "job.completion" and shown["id"] not in known:
                            file.write(_line(cursor, shown["id"], shown["state"]))
            except httpx.TransportError as error:
                sys.stderr.write(f"again: {error!r}\n")
            await asyncio.sleep(_PAUSE_S)


async def events_of(answer: httpx.Response) -> Any:
    """Yield the id and the data of each event."""
    event_id = ""
    async for line in answer.aiter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield event_id, json.loads(line.removeprefix("data: "))


def main() -> None:
    """Read until the process is killed."""
    given = json.loads(Path(os.environ["FEED_READER"]).read_text())
    path = Path(given["output"])
    with opened(path) as file:
        lines = lines_of(path)
        after = lines[-1][0] if lines else given["after"]
        asyncio.run(read_by_http(file, after, given["gateways"]) if given["gateways"] else read_by_python(file, after))


if __name__ == "__main__":
    main()
