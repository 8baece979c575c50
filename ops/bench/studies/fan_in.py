"""Jobs and one that gets all their results: `python -m bench.studies.fan_in --jobs 2000 --bullmq FOLDER`.

Three by turns on one Redis: a flow of penstock, whose engine is a clock; a chord of Celery; a flow of BullMQ. The table
has the jobs a second from the submission until the caller has the last job's result. `--bullmq` names the folder
`node_modules` of `npm install bullmq ioredis`; without it, BullMQ is left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from celery import Celery, chord, group

from bench.queue_cost.processes import CELERY_REDIS, POOL, celery_worker, gateway, node
from penstock import Client
from penstock.runtime.embedded_redis import EmbeddedRedis

MAX_S = 600
PROMPT = "Say one word."
BULLMQ = Path(__file__).parents[1] / "fan_in" / "bullmq.mjs"


def make_app(redis_url: str) -> Celery:
    """Return an app with an empty task, and one that gets the results of others."""
    url = redis_url.replace("unix://", "redis+socket://", 1)
    made = Celery("fan_in", broker=url, backend=url)
    made.conf.worker_prefetch_multiplier = 64
    made.task(name="row")(_row)
    made.task(name="all")(_all)
    return made


def _row() -> str:
    return "word"


def _all(texts: Sequence[str]) -> int:
    return len(" ".join(texts))


if CELERY_REDIS in os.environ:
    app = make_app(os.environ[CELERY_REDIS])  # For `celery -A`.


def by_flow(client: Client, num_jobs: int, files_url: str) -> float:
    """Return the seconds of a flow of penstock."""
    flow = client.flow(files_url=files_url)
    names = [flow.add(f"r{at}", model=POOL, prompt=PROMPT, max_tokens=1, ignore_eos=True) for at in range(num_jobs)]
    flow.add("all", after=names, model=POOL, prompt="{{*.text}}", max_tokens=1, ignore_eos=True)
    begun_s = time.monotonic()
    flow.submit()
    answers = flow.answers(timeout=MAX_S)
    took_s = time.monotonic() - begun_s
    wrong = [answer for answer in answers if answer.error is not None]
    if wrong or len(answers) != num_jobs + 1:
        raise RuntimeError(f"{len(answers)} rows ended: {wrong[:3]}")
    return took_s


def by_chord(app: Celery, num_jobs: int) -> float:
    """Return the seconds of a chord of Celery."""
    begun_s = time.monotonic()
    size = chord(group(app.signature("row") for _ in range(num_jobs)))(app.signature("all")).get(timeout=MAX_S)
    took_s = time.monotonic() - begun_s
    if size != 5 * num_jobs - 1:
        raise RuntimeError(f"the last task got {size} characters")
    return took_s


def by_bullmq(modules: Path, socket: str, num_jobs: int) -> float:
    """Return the seconds of a flow of BullMQ."""
    argv = ["node", str(BULLMQ), str(modules), socket, str(num_jobs)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=MAX_S)
    return float(done.stdout.split()[-1])


def measure(num_jobs: int, num_turns: int, modules: Path | None, pool: str, concurrency: int) -> None:
    """Run all by turns, and print the jobs a second of each."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-fan-in-") as folder,
        EmbeddedRedis() as server,
        node(server.url, 0.0),
        gateway(server.url, PENSTOCK_FILES_URL=f"{folder}/files"),
        celery_worker(__spec__.name, server.url, pool, concurrency),
        Client(server.url) as client,
    ):
        made, socket = make_app(server.url), server.url.removeprefix("unix://")
        works: dict[str, Callable[[int], float]] = {
            "penstock's flow": lambda num: by_flow(client, num, f"{folder}/files"),
            f"Celery's chord, {concurrency} {pool}": lambda num: by_chord(made, num),
        }
        if modules is not None:
            works["BullMQ's flow, 64 at once"] = lambda num: by_bullmq(modules, socket, num)
        found: dict[str, list[float]] = {name: [] for name in works}
        for work in works.values():
            work(20)
        for _ in range(num_turns):
            for name, work in works.items():
                found[name].append(work(num_jobs))
    print(f"| {num_jobs:,} jobs, and one that gets their results | s | jobs/s |\n|---|---|---|")
    for name, spent_s in found.items():
        print(f"| {name} | {median(spent_s):.2f} | {(num_jobs + 1) / median(spent_s):,.0f} |")


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--bullmq", type=Path, help="a folder node_modules with bullmq")
    parser.add_argument("--pool", default="prefork", help="of Celery's worker")
    parser.add_argument("--concurrency", type=int, default=2)
    options = parser.parse_args()
    measure(options.jobs, options.turns, options.bullmq, options.pool, options.concurrency)


if __name__ == "__main__":
    main()
