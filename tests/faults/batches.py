"""`python -m faults.batches`: a large batch runs to its end while everything that runs it is killed.

The output and the error file together must have each row of the input once, with the text of an undisturbed run and its
tokens counted once. With the entries `embeddings` and `scores` real nodes run a small encoder, and each row must have
the bits of an undisturbed engine. The batch's holder, a gateway or a Celery worker, also sleeps through its lease once.
With workers, Celery's scheduler, which is killed too, sends a task each second. It prints what it measured and what was
violated.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import boto3  # type: ignore[import-untyped]
from faults.tools.backlog_entries import Requests
from faults.tools.backlog_view import audited
from faults.tools.batch_kills import BatchRun, CommandEntry, Entry, MessagesEntry, OpenAIEntry, problems_of, used_bytes
from faults.tools.batch_workers import WorkerFleet
from faults.tools.encoder_rows import EmbeddingsEntry, EncoderRequests, ScoresEntry
from faults.tools.redis_process import RedisProcess, free_port
from faults.tools.report import Measurement, record
from faults.tools.soak_kills import Fleet
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from penstock.queue.broker.connection import connect
from penstock.queue.files.records_audit import audit_files

POOL = "batches"
ENTRIES: dict[str, Callable[[Requests], Entry]] = {
    "openai": OpenAIEntry,
    "messages": MessagesEntry,
    "command": CommandEntry,
    "embeddings": EmbeddingsEntry,
    "scores": ScoresEntry,
}
STORAGES = ("folder", "s3")
DAY_MS = 86_400_000
MAX_BYTES = 200 << 20
"""Of Redis's memory above an idle one."""


@contextmanager
def storage(kind: str, folder: Path) -> Iterator[None]:
    """Let all processes that start meanwhile keep their files in a folder, or in a bucket of an S3 server."""
    if kind == "folder":
        with mock.patch.dict(os.environ, {"PENSTOCK_FILES_URL": str(folder)}):
            yield
        return
    port = free_port()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "PENSTOCK_FILES_URL": "s3://penstock-faults/here",
    }
    try:
        with mock.patch.dict(os.environ, settings):
            boto3.client("s3").create_bucket(Bucket="penstock-faults")
            yield
    finally:
        server.stop()


async def run(args: argparse.Namespace) -> list[str]:
    """Run one batch. Return what is wrong."""
    rng = random.Random(args.seed)
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="batches-") as name, storage(args.storage, Path(name) / "files"):
        requests, of_model = _requests_of(args, Path(name) / POOL)
        settings = {"log_jobs": False, "max_num_seqs": 64, "step_s": args.step_s, "result_ttl_ms": DAY_MS, **of_model}
        with RedisProcess(Path(name) / "redis") as server:
            shape = {"num_nodes": 2, "num_gateways": 2, "keeps_ports": True, "idem_ttl_ms": DAY_MS, **settings}
            made = partial(WorkerFleet, folder=Path(name)) if args.holders == "workers" else Fleet
            fleet = made(server, POOL, **shape)
            try:
                await fleet.start()
                idle_bytes, begun_s = used_bytes(fleet), time.monotonic()
                batch = BatchRun(fleet, ENTRIES[args.entry](requests), rng)
                ended = await batch.run(
                    num_kills=args.kills, every_s=args.every, freeze_s=args.freeze_s, plant=args.plant
                )
                took_s, found = time.monotonic() - begun_s, problems_of(batch.entry.requests, ended) + fleet.problems()
                others = fleet.measurements()
                async with connect(server.url) as redis:
                    found += await audited(redis, POOL)
                    found += [f"audit of files: {finding}" for finding in await audit_files(redis) or []]
            finally:
                fleet.close()
    if (grown := batch.peak_bytes - idle_bytes) > MAX_BYTES:
        found.append(f"Redis uses {grown >> 20} MiB more than idle")
    measurements: dict[str, Measurement] = {
        "rows": args.rows,
        "kills": batch.killed.total(),
        "what was killed": ", ".join(f"{number} {kind}" for kind, number in sorted(batch.killed.items())),
        "Redis MiB above idle": grown >> 20,
        "seconds": round(took_s),
        **others,
    }
    row = f"{args.entry}, {args.storage}" + (", held by Celery workers" if args.holders == "workers" else "")
    print(f"{time.strftime('%H:%M:%S')} {row}: {measurements} {ended.status} {ended.counts}")
    print("\n".join(f"  VIOLATION {problem}" for problem in found) or "  nothing violated", flush=True)
    if args.record and not found:
        record("Batches: everything killed", row, measurements)
    return found


def _requests_of(args: argparse.Namespace, folder: Path) -> tuple[Requests, dict[str, str]]:
    """Return the requests of an entry, and the settings of nodes that can answer them."""
    if args.entry not in ("embeddings", "scores"):
        return Requests(POOL, args.rows, max_tokens=8), {}
    made = EncoderRequests(POOL, args.rows, folder, scores=args.entry == "scores")
    return made, {"model": str(folder)}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    one = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one.add_argument("--record", action="store_true", help="write the measurements to ops/bench/results/faults.md")
    one.add_argument("--entry", choices=ENTRIES, default="openai")
    one.add_argument("--storage", choices=STORAGES, default="folder")
    one.add_argument("--holders", choices=("gateways", "workers"), default="gateways", help="what runs the batch")
    one.add_argument("--rows", type=int, default=50_000)
    one.add_argument("--kills", type=int, default=20)
    one.add_argument("--every", type=float, default=6.0, help="seconds between two kills, on average")
    one.add_argument("--freeze-s", type=float, default=30.0, help="how long the batch's holder sleeps once")
    one.add_argument("--step-s", type=float, default=0.05)
    one.add_argument("--plant", choices=("lost", "doubled"), default="", help="what is to be found")
    one.add_argument("--seed", type=int, default=secrets.randbits(32))
    return one


def main() -> None:
    """Run the campaign. The exit status tells whether anything was violated."""
    found = asyncio.run(run(parser().parse_args()))
    sys.exit(f"{len(found)} violations" if found else 0)


if __name__ == "__main__":
    main()
