"""`PYTHONPATH=ops python -m bench.studies.scrapes`: what a scrape of a node and of a gateway costs.

16 streams decode on a node with the demo model. Turns with a scrape of both processes every second alternate with turns
without one.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from bench import machine
from bench.queue_cost.processes import Child, child, gateway
from penstock.cli.demo_model import demo_model
from penstock.producer.client import AsyncClient
from penstock.runtime.embedded_redis import EmbeddedRedis

RESULTS = Path(__file__).parents[1] / "results"
PORT = 9109
NUM_STREAMS = 16
MAX_TOKENS = 7000
WARM_S = 5.0
TURN_S = 5.0
TURNS = ("without", "with", "with", "without") * 4
"""In this order, because a step takes longer as the contexts grow."""
INTERVAL_S = 1.0
NUM_ALONE = 100
"""Scrapes of idle processes, for their own cost."""
HEAD = """# Scrapes of metrics, {date}

`PYTHONPATH=ops python -m bench.studies.scrapes` on {cores} cores of {cpu}: {streams} streams decode on a node with
SmolLM2-135M, by turns of {turn:.0f} s with a scrape of node and gateway each second and without. Cost of a scrape: of
idle processes, the mean of {alone}. Other processes took {foreign:.0%} of the machine.

"""


class Streams:
    """The streams that decode, and how many tokens of them have arrived."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.num_tokens = 0

    async def run(self) -> None:
        """Read all streams until they are canceled."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(self._read(f"Story {number}:"))

    async def _read(self, prompt: str) -> None:
        async for chunk in self._client.stream(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=1.0):
            self.num_tokens += len(chunk.token_ids)


def scrape(url: str) -> bytes:
    """Return a process's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return bytes(answer.read())


async def scrape_each_second(urls: Sequence[str]) -> None:
    """Scrape until canceled."""
    while True:
        await asyncio.gather(*(asyncio.to_thread(scrape, url) for url in urls))
        await asyncio.sleep(INTERVAL_S)


async def rates(redis_url: str, urls: Sequence[str]) -> dict[str, list[float]]:
    """Return the tokens per second of each turn, by its kind."""
    found: dict[str, list[float]] = {kind: [] for kind in TURNS}
    async with AsyncClient(redis_url) as client:
        streams = Streams(client)
        reading = asyncio.create_task(streams.run())
        await asyncio.sleep(WARM_S)
        for kind in TURNS:
            scraping = asyncio.create_task(scrape_each_second(urls if kind == "with" else ()))
            before, start_s = streams.num_tokens, time.monotonic()
            await asyncio.sleep(TURN_S)
            found[kind].append((streams.num_tokens - before) / (time.monotonic() - start_s))
            scraping.cancel()
        reading.cancel()
    return found


def cost(process: Child, url: str) -> str:
    """Return the bytes, the CPU time and the duration of a scrape of an idle process, for a table."""
    size = len(scrape(url))
    before_s, start_s = cpu_s(process[0]), time.monotonic()
    for _ in range(NUM_ALONE):
        scrape(url)
    wall_ms = (time.monotonic() - start_s) / NUM_ALONE * 1e3
    cpu_ms = (cpu_s(process[0]) - before_s) / NUM_ALONE * 1e3
    return f"{size / 1e3:.0f} | {cpu_ms:.1f} | {wall_ms:.1f}"


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, threads that have ended included: a node serves each scrape on a thread."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, print and write the tables."""
    foreign = machine.ForeignCpu()
    settings = {"PENSTOCK_NODE_METRICS_PORT": str(PORT), "PENSTOCK_NODE_KV_CACHE_GIB": "6"}
    argv = ("penstock", "node", str(demo_model()))
    with EmbeddedRedis() as server:
        node = child(*argv, PENSTOCK_REDIS_URL=server.url, PENSTOCK_NODE_PROGRESS="json", **settings)
        with node as of_node, gateway(server.url) as of_gateway:
            urls = f"http://127.0.0.1:{PORT}", of_gateway[1]["url"]
            found = asyncio.run(rates(server.url, urls))
            time.sleep(WARM_S)
            rows = [f"| node | {cost(of_node, urls[0])} |", f"| gateway | {cost(of_gateway, urls[1])} |"]
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    facts = {
        **machine.describe(),
        "streams": NUM_STREAMS,
        "turn": TURN_S,
        "alone": NUM_ALONE,
        "foreign": foreign.share(),
    }
    lines = [
        "| process | KB | ms of CPU | ms in all |",
        "|---|---|---|---|",
        *rows,
        "",
        f"Decode without scrapes: {medians['without']:.0f} tokens/s; with a scrape each second: {medians['with']:.0f}, "
        f"{medians['with'] / medians['without'] - 1:+.1%}. Medians of {len(found['with'])} turns each.",
    ]
    page = HEAD.format(**facts) + "\n".join(lines) + "\n"
    print(page)
    (RESULTS / "scrapes.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
