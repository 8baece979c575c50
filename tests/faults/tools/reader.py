"""`python reader.py`: read the jobs of READER_JOBS and print each chunk as a JSON line.

A job is `{"options": {…}}` and is submitted. With `"after": n`, the reader attaches to it after chunk n.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import aclosing
from typing import Any

from penstock.producer.client import AsyncClient


def say(**event: Any) -> None:
    """Print one line and flush."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


async def read(client: AsyncClient, job: dict[str, Any]) -> None:
    """Read one job to its end."""
    if "after" in job:
        handle = await client.attach(job["options"]["job_id"], after=job["after"])
    else:
        handle = await client.submit(**job["options"])
    async with aclosing(handle.chunks()) as chunks:
        async for chunk in chunks:
            end = chunk.outcome.state if chunk.outcome else ""
            said = [chunk.index, chunk.choice, chunk.token_ids, chunk.text, chunk.finish_reason, end]
            say(event="chunk", job=handle.id, chunk=said)


async def main() -> None:
    """Read all jobs concurrently."""
    async with AsyncClient() as client:
        say(event="ready")
        await asyncio.gather(*(read(client, job) for job in json.loads(os.environ["READER_JOBS"])))


if __name__ == "__main__":
    asyncio.run(main())
