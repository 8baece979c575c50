"""`python -m hostile.floods`: the first token and the tokens' gaps of a tenant beside tenants that flood a node.

Each flooding tenant keeps jobs of one shape waiting. The victim asks one short question after the other, and is
compared with itself alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from hostile.stack import Stack, running_stack

from penstock.cli.demo_model import demo_model

PROMPT = "The gate opens by pressure, and the turbine never starves. " * 4
SHAPES: dict[str, dict[str, Any]] = {
    "many": {"jobs": 40, "n": 1, "prompt": PROMPT, "max_tokens": 400},
    "wide": {"jobs": 10, "n": 8, "prompt": PROMPT, "max_tokens": 400},
    "long prompts": {"jobs": 12, "n": 1, "prompt": PROMPT * 30, "max_tokens": 60},
    "long outputs": {"jobs": 20, "n": 2, "prompt": PROMPT, "max_tokens": 1500},
}
"""Jobs that a flooding tenant keeps open at once, and their requests."""


@dataclass
class Times:
    """What the victim's streams measured, in seconds."""

    first_tokens: list[float]
    gaps: list[float]

    @property
    def worst_first_token(self) -> float:
        """The longest wait for a first token."""
        return max(self.first_tokens)

    @property
    def median_gap(self) -> float:
        """The median time between two tokens."""
        return statistics.median(self.gaps)

    @property
    def mean_gap(self) -> float:
        """The mean time between two tokens."""
        return statistics.fmean(self.gaps)


def _body(prompt: str, max_tokens: int, n: int, *, stream: bool) -> dict[str, Any]:
    options = {"max_tokens": max_tokens, "n": n, "stream": stream, "ignore_eos": True, "temperature": 1.0}
    return {"model": "hostile", "prompt": prompt, **options}


@asynccontextmanager
async def flood(stack: Stack, tenants: list[str], shape: dict[str, Any]) -> AsyncIterator[None]:
    """Keep each tenant's jobs of a shape open while the block runs."""

    async def keep_asking(client: httpx.AsyncClient, number: int) -> None:
        while True:
            body = _body(f"{number} {shape['prompt']}", shape["max_tokens"], shape["n"], stream=False)
            answer = await client.post("/v1/completions", json=body, timeout=600)
            if answer.status_code != 200:
                await asyncio.sleep(0.2)

    limits = httpx.Limits(max_connections=None)
    clients = [stack.client(tenant, limits=limits) for tenant in tenants]
    tasks = [asyncio.create_task(keep_asking(client, i)) for client in clients for i in range(shape["jobs"])]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients:
            await client.aclose()


async def measure(stack: Stack, num_requests: int, max_tokens: int = 24) -> Times:
    """Stream the victim's answers one after the other."""
    times = Times([], [])
    async with stack.client("neighbor", timeout=300) as client:
        for number in range(num_requests):
            asked_s, last_s = time.monotonic(), 0.0
            body = _body(f"Question {number}: {PROMPT}", max_tokens, 1, stream=True)
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                        now_s = time.monotonic()
                        if last_s:
                            times.gaps.append(now_s - last_s)
                        else:
                            times.first_tokens.append(now_s - asked_s)
                        last_s = now_s
    return times


async def compare(stack: Stack, tenants: list[str], shape: dict[str, Any], num_requests: int) -> tuple[Times, Times]:
    """Measure the victim alone, then beside the floods."""
    alone = await measure(stack, num_requests)
    async with flood(stack, tenants, shape):
        await asyncio.sleep(3)  # The node is full by then.
        beside = await measure(stack, num_requests)
    return alone, beside


async def drained(stack: Stack) -> None:
    """Wait until no cancelled job of a flood runs any more."""
    async with stack.client("admin") as client:
        for _ in range(100):
            metrics = (await client.get("/metrics")).text
            if 'penstock_open_jobs{pool="hostile"} 0.0' in metrics:
                return
            await asyncio.sleep(0.2)


def main() -> None:
    """Print a row for each shape and number of floods."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--floods", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--requests", type=int, default=12)
    asked = parser.parse_args()
    print("floods  shape          first token alone / beside, worst    gap alone / beside, median and mean", flush=True)
    with running_stack(model=demo_model(), tenants=max(asked.floods)) as stack:
        for num_floods in asked.floods:
            for name in asked.shapes:
                tenants = [f"flood-{i}" for i in range(num_floods)]
                alone, beside = asyncio.run(compare(stack, tenants, SHAPES[name], asked.requests))
                asyncio.run(drained(stack))
                print(
                    f"{num_floods:6}  {name:13}  {alone.worst_first_token:8.3f} s / {beside.worst_first_token:8.3f} s"
                    f"              {1e3 * alone.median_gap:5.1f} {1e3 * alone.mean_gap:5.1f} ms"
                    f" / {1e3 * beside.median_gap:5.1f} {1e3 * beside.mean_gap:5.1f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
