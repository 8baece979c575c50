"""A batch of rows beside other ways to run them: `python -m bench.studies.batch_rates` prints tables.

`ways`: rows a second of `client.generate`, of a batch through `/v1/batches`, and of a Celery app whose tasks are one
HTTP request each, by turns on the demo model. `order`: what it gains to submit rows with common prefixes one after the
other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from celery import Celery, group

from bench.queue_cost.processes import child
from penstock import Client
from penstock.cli.demo_model import demo_model
from penstock.runtime.embedded_redis import EmbeddedRedis

REDIS_VARIABLE, GATEWAY_VARIABLE = "BENCH_CELERY_REDIS", "BENCH_CELERY_GATEWAY"
TASK = "bench.complete"
MAX_TOKENS = 32
POLL_S = 0.1
SUBJECTS = ("rivers", "bridges", "locks", "mills", "canals", "weirs", "harbors", "dams")
STOP_TIMEOUT_S = 30


def complete(prompt: str) -> str:
    """Ask the gateway for a completion, as a user's task would do it."""
    answer = httpx.post(f"{os.environ[GATEWAY_VARIABLE]}/v1/completions", json=body_of(prompt), timeout=600)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


def body_of(prompt: str) -> dict[str, Any]:
    """Return the body of a row's request."""
    return {"model": "demo", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}


def make_app(redis_url: str) -> Celery:
    """Return a user's app."""
    url = redis_url.replace("unix://", "redis+socket://", 1)
    made = Celery("bench", broker=url, backend=url)
    made.task(name=TASK)(complete)
    return made


if REDIS_VARIABLE in os.environ:
    app = make_app(os.environ[REDIS_VARIABLE])  # For `celery -A`.


@contextmanager
def worker(redis_url: str, gateway: str, *words: str) -> Iterator[Celery]:
    """Run a worker of the app. Yield the app."""
    argv = [sys.executable, "-m", "celery", "-A", __spec__.name, "worker", "--loglevel", "ERROR", *words]
    env = os.environ | {REDIS_VARIABLE: redis_url, GATEWAY_VARIABLE: gateway}
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL) as running:
        try:
            yield make_app(redis_url)
        finally:
            running.terminate()
            running.wait(STOP_TIMEOUT_S)


def prompts_of(number: int, seed: int) -> list[str]:
    """Return prompts of 20 to 200 words, each of its own."""
    rng = random.Random(seed)
    return [
        f"Text {seed}-{at}. " + " ".join(rng.choice(SUBJECTS) for _ in range(rng.randint(20, 200)))
        for at in range(number)
    ]


def run_batch(http: httpx.Client, prompts: Sequence[str]) -> None:
    """Upload rows, run them as a batch, and read its output."""
    lines = [
        json.dumps({"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body_of(prompt)})
        for at, prompt in enumerate(prompts)
    ]
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("rows.jsonl", "\n".join(lines).encode())}}
    file = http.post("/v1/files", **form).raise_for_status().json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=body).raise_for_status().json()
    while batch["status"] not in {"completed", "failed"}:
        time.sleep(POLL_S)
        batch = http.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
    output = http.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text
    assert len(output.splitlines()) == len(prompts), batch


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes."""
    begun_s = time.monotonic()
    work()
    return time.monotonic() - begun_s


@contextmanager
def serving(**settings: str) -> Iterator[tuple[str, str]]:
    """Serve the demo model. Yield the URLs of Redis and of the gateway. `settings`: of the node."""
    of_node = {f"PENSTOCK_NODE_{name.upper()}": value for name, value in settings.items()}
    of_node |= {"PENSTOCK_NODE_PROGRESS": "json", "PENSTOCK_NODE_POOL": "demo"}
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(data_dir=Path(folder) / "redis") as server:
        (files := Path(folder) / "files").mkdir()
        words = ("penstock", "node", str(demo_model()), "--redis-url", server.url)
        gateway = ("penstock", "gateway", "--redis-url", server.url, "--port", "0")
        of_gateway = {"PENSTOCK_GATEWAY_PROGRESS": "json", "PENSTOCK_FILES_URL": str(files)}
        with child(*words, **of_node), child(*gateway, **of_gateway) as (_, said):
            yield server.url, said["url"]


def generate(client: Client, prompts: Sequence[str]) -> None:
    """Run the rows through the Python client."""
    client.generate(prompts, model="demo", max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)


WAYS_HEAD = """
| way | rows | rows/s | beside generate |
|---|---|---|---|"""
CELERY = {"Celery, prefork, 2 processes": ("--concurrency", "2"), "Celery, 32 threads": ("-P", "threads", "-c", "32")}


def measure_ways(num_rows: int, num_tasks: int, num_turns: int) -> None:
    """Print the rates of all ways: medians of their turns."""
    rates: dict[str, list[float]] = {}
    with serving() as (redis_url, gateway), Client(redis_url) as client, httpx.Client(base_url=gateway) as http:
        http.timeout = 600
        generate(client, prompts_of(64, -1))
        for turn in range(num_turns):
            works: dict[str, tuple[int, Callable[[Sequence[str]], Any]]] = {
                "client.generate": (num_rows, lambda prompts: generate(client, prompts)),
                "/v1/batches": (num_rows, lambda prompts: run_batch(http, prompts)),
            }
            # Which way goes first alternates, because the speed of a virtual machine drifts.
            for at, (name, (number, work)) in list(enumerate(works.items()))[:: -1 if turn % 2 else 1]:
                prompts = prompts_of(number, 10 * turn + at)
                rates.setdefault(name, []).append(number / seconds_of(lambda w=work, p=prompts: w(p)))  # type: ignore[misc]
            for at, (name, words) in enumerate(CELERY.items() if num_tasks else ()):
                prompts = prompts_of(num_tasks, 10 * turn + 5 + at)
                with worker(redis_url, gateway, *words) as made:
                    group(made.signature(TASK, (prompt,)) for prompt in prompts[:4]).apply_async().get(timeout=600)
                    tasks = group(made.signature(TASK, (prompt,)) for prompt in prompts)
                    took_s = seconds_of(lambda tasks=tasks: tasks.apply_async().get(timeout=600))  # type: ignore[misc]
                rates.setdefault(name, []).append(num_tasks / took_s)
            print({name: [round(rate, 1) for rate in found] for name, found in rates.items()}, file=sys.stderr)
    print(WAYS_HEAD)
    for name, found in rates.items():
        beside = median(rate / other for rate, other in zip(found, rates["client.generate"], strict=True))
        print(f"| {name} | {num_rows if name not in CELERY else num_tasks:,} | {median(found):.1f} | {beside:.2f} |")


def measure_order(num_rows: int, num_turns: int) -> None:
    """Print the rates of rows with 50 common beginnings, shuffled and sorted, with a cache that holds few of them."""
    rng, rates = random.Random(1), dict[str, list[float]](shuffled=[], sorted=[])
    with serving(max_num_seqs="32", kv_cache_gib="0.15") as (redis_url, _), Client(redis_url) as client:
        for turn in range(num_turns):
            for order, found in rates.items():
                starts = [prompt[:1200] for prompt in prompts_of(50, 1000 + turn + 100 * (order == "sorted"))]
                prompts = [f"{rng.choice(starts)} Question {at}?" for at in range(num_rows)]
                prompts = sorted(prompts) if order == "sorted" else prompts
                took_s = seconds_of(lambda prompts=prompts: generate(client, prompts))  # type: ignore[misc]
                found.append(num_rows / took_s)
    print("\n| order | rows/s |\n|---|---|")
    for order, found in rates.items():
        print(f"| {order} | {median(found):.1f} |")


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["ways", "order"])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--tasks", type=int, default=200, help="of the Celery app; 0 leaves it out")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    if "ways" in options.what:
        measure_ways(options.rows, options.tasks, options.turns)
    if "order" in options.what:
        measure_order(options.rows, options.turns)


if __name__ == "__main__":
    main()
