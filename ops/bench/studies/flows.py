"""What waiting costs: `python -m bench.studies.flows --rows 10000 --steps 100 --turns 3` prints a table.

`wide`: rows and one that waits for all of them, beside the same rows as a plain batch, by turns. That one row comes
after all others, so the flow also takes the time of one job alone. The table has the ratio with that time, and the time
itself, which a slow model makes long. `chain`: rows of which each waits for the one before it, beside the same jobs one
after the other from a client. The engine is a clock, so the rest shows. The CPU time is that of Redis, node and gateway
together. Other work on the machine changes it little.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.queue_cost.processes import POOL, cpu_us, gateway, node, redis_pid
from penstock import Client
from penstock.runtime.embedded_redis import EmbeddedRedis

FLOW, CHAT = "flow", "/v1/chat/completions"
POLL_S = 0.02
NUM_ALONE = 20
PROMPT = "Say one word."


def row(name: str, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    """Return a row of one token."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": POOL, "messages": messages, "max_tokens": 1, "ignore_eos": True}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body, **fields}


def seconds_of(http: httpx.Client, rows: Sequence[dict[str, Any]], endpoint: str) -> float:
    """Return the seconds from the creation of a batch to its end. Its input is stored before."""
    content = "\n".join(map(json.dumps, rows)).encode()
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("rows.jsonl", content)}).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    begun_s = time.monotonic()
    batch = http.post("/v1/batches", json=body).raise_for_status().json()
    while batch["status"] not in {"completed", "failed"}:
        time.sleep(POLL_S)
        looked = http.get(f"/v1/batches/{batch['id']}")
        if looked.status_code != httpx.codes.SERVICE_UNAVAILABLE:  # On a machine that is busy with other work.
            batch = looked.raise_for_status().json()
    assert batch["request_counts"]["completed"] == len(rows), batch
    return time.monotonic() - begun_s


def job_alone(client: Client) -> None:
    """Run a job of one token."""
    client.submit([{"role": "user", "content": PROMPT}], model=POOL, max_tokens=1, ignore_eos=True).result()


def wide(http: httpx.Client, client: Client, pids: Sequence[int], num_rows: int, num_turns: int) -> None:
    """Print the seconds and the CPU seconds of both, and their ratios. `pids`: the processes whose CPU time counts."""
    rows = [row(f"r{at}") for at in range(num_rows)]
    last = row("all", after=[one["custom_id"] for one in rows])
    spent: dict[str, list[tuple[float, float]]] = {CHAT: [], FLOW: []}
    for turn in range(num_turns):
        for endpoint, of_kind in list(spent.items())[:: -1 if turn % 2 else 1]:
            before_us = sum(map(cpu_us, pids))
            took_s = seconds_of(http, rows if endpoint == CHAT else [*rows, last], endpoint)
            of_kind.append((took_s, (sum(map(cpu_us, pids)) - before_us) / 1e6))
    for unit, at in (("s", 0), ("s of CPU", 1)):
        plain, flow = (median(one[at] for one in of_kind) for of_kind in spent.values())
        shown = f"{flow:.2f} {unit} | {flow / plain:.3f}"
        print(f"| {num_rows:,} rows | {plain:.2f} {unit} | and one that waits for all | {shown} |", flush=True)
    alone_ms = list[float]()
    for _ in range(NUM_ALONE):
        begun_s = time.monotonic()
        job_alone(client)
        alone_ms.append(1000 * (time.monotonic() - begun_s))
    print(f"| one job | {median(alone_ms):.1f} ms | | | |", flush=True)


def chain(http: httpx.Client, client: Client, pids: Sequence[int], num_steps: int, num_turns: int) -> None:
    """Print the milliseconds of a step of both, and their difference; then the same of the CPU time of `pids`."""
    rows = [row("r0"), *(row(f"r{at}", f"{PROMPT} {{{{r{at - 1}.text}}}}") for at in range(1, num_steps))]

    def jobs() -> None:
        for _ in range(num_steps):
            job_alone(client)

    works = jobs, lambda: seconds_of(http, rows, FLOW)
    spent: list[list[tuple[float, float]]] = [[], []]
    for _ in range(num_turns):
        for work, of_work in zip(works, spent, strict=True):
            begun_s, before_us = time.monotonic(), sum(map(cpu_us, pids))
            work()
            used_ms = (sum(map(cpu_us, pids)) - before_us) / 1e3
            of_work.append((1000 * (time.monotonic() - begun_s) / num_steps, used_ms / num_steps))
    for unit, at in (("ms", 0), ("ms of CPU", 1)):
        alone, ours = (median(one[at] for one in of_work) for of_work in spent)
        shown = f"{ours:.1f} {unit} a step | {ours - alone:+.1f} {unit}"
        print(f"| a chain of {num_steps} | {alone:.1f} {unit} a step | as a flow | {shown} |", flush=True)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=1.0, help="milliseconds of a step of the engine")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="bench-flows-") as folder,
        EmbeddedRedis() as server,
        node(server.url, args.step_ms) as (node_pid, _),
        gateway(server.url, PENSTOCK_FILES_URL=str(Path(folder) / "files")) as (gateway_pid, said),
        httpx.Client(base_url=said["url"], timeout=600) as http,
        Client(server.url) as client,
    ):
        print("| | alone | | as a flow | |\n|---|---|---|---|---|")
        pids = redis_pid(server), node_pid, gateway_pid
        wide(http, client, pids, args.rows, args.turns)
        chain(http, client, pids, args.steps, args.turns)


if __name__ == "__main__":
    main()
