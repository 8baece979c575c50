"""`PYTHONPATH=ops python -m bench.studies.encoder_chat CHAT FOLDER`: chats beside a batch of an encoder's node.

CHAT is a model that generates, FOLDER has the files of an encoder. Both have a node of their own on the same cores, and
a gateway. A chat comes every 2 s; a batch file, which does not end in the time, has rows of 32 texts of 20 to 256
tokens. Turns of chats alone, of both, and of the batch alone follow each other. Prints the times of the chats alone and
beside the batch, and which part of the speed that the chats leave the batch reaches. That is its speed beside chats,
divided by its speed alone and by the share of time in which the chat's node computes nothing without the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.child import free_port
from bench.studies.encoder_doors import served
from bench.studies.encoders import texts_of

CHAT_EVERY_S = 2.0
ROW_TEXTS, NUM_ROWS = 32, 1500
CHAT_WORDS, CHAT_TOKENS = 60, 96
SETTLE_S = 3.0
_STEP_SECONDS = r"^penstock_engine_step_kind_seconds_total(?:\{[^}]*\})? (\S+)"
_TOKENS = r"^penstock_engine_prefill_tokens_total(?:\{[^}]*\})? (\S+)"


@dataclass(slots=True)
class Seen:
    """What the turns of one kind gave."""

    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    """Seconds in which the chat's node computed."""
    num_tokens: int = 0
    """Tokens that the encoder computed."""
    took_s: float = 0.0


@contextmanager
def node(model: Path, runtime: Path, num_threads: int, metrics_port: int) -> Iterator[None]:
    """Run a second node at the Redis of `runtime`."""
    words = ("-m", "penstock", "node", str(model), "--metrics-port", str(metrics_port))
    env = {**os.environ, "PENSTOCK_RUNTIME_DIR": str(runtime), "PENSTOCK_NODE_NUM_THREADS": str(num_threads)}
    process = subprocess.Popen([sys.executable, *words], env=env, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def total(url: str, pattern: str) -> float:
    """Return the sum of a counter's values at a node."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return sum(map(float, re.findall(pattern, answer.read().decode(), re.MULTILINE)))


def begin_batch(http: httpx.Client, model: str, folder: Path) -> str:
    """Begin a batch of embeddings and return its id."""
    texts = texts_of(folder, ROW_TEXTS * NUM_ROWS, 20, 254, 7)
    rows = []
    for at in range(NUM_ROWS):
        body = {"model": model, "input": texts[at * ROW_TEXTS : (at + 1) * ROW_TEXTS], "truncate_prompt_tokens": -1}
        rows.append(json.dumps({"custom_id": str(at), "method": "POST", "url": "/v1/embeddings", "body": body}))
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("rows.jsonl", "\n".join(rows).encode())}}
    file = http.post("/v1/files", **form).raise_for_status().json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    return str(http.post("/v1/batches", json=body).raise_for_status().json()["id"])


def end_batch(http: httpx.Client, batch: str) -> None:
    """Cancel a batch, and wait for its end."""
    http.post(f"/v1/batches/{batch}/cancel")
    while (found := http.get(f"/v1/batches/{batch}").raise_for_status().json())["status"] != "cancelled":
        if found["status"] in ("completed", "failed"):
            raise RuntimeError(f"the batch ended before its turn did: {found}")
        time.sleep(0.1)


def chat(http: httpx.Client, model: str, text: str, seen: Seen) -> None:
    """Stream one answer and note its times."""
    sampling = {"max_tokens": CHAT_TOKENS, "ignore_eos": True, "temperature": 0}
    body = {"model": model, "prompt": text, "stream": True, **sampling}
    last_s, times = time.perf_counter(), seen.first_ms
    with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                now_s = time.perf_counter()
                times.append((now_s - last_s) * 1e3)
                last_s, times = now_s, seen.gaps_ms


def turn(http: httpx.Client, names: tuple[str, str], urls: tuple[str, str], texts: list[str], kind: str, seen: Seen,
         folder: Path) -> None:  # fmt: skip
    """Run one turn: a chat of each text, or as long without them."""
    batch = None if kind == "chats" else begin_batch(http, names[1], folder)
    time.sleep(SETTLE_S)
    begun_s, busy_s, num_tokens = time.perf_counter(), total(urls[0], _STEP_SECONDS), total(urls[1], _TOKENS)
    for at, text in enumerate(texts, 1):
        if kind != "batch":
            chat(http, names[0], text, seen)
        time.sleep(max(0.0, begun_s + at * CHAT_EVERY_S - time.perf_counter()))
    seen.took_s += time.perf_counter() - begun_s
    seen.busy_s += total(urls[0], _STEP_SECONDS) - busy_s
    seen.num_tokens += round(total(urls[1], _TOKENS) - num_tokens)
    if batch is not None:
        end_batch(http, batch)


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(prog="bench.studies.encoder_chat", description=__doc__)
    parser.add_argument("chat", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--chats", type=int, default=15, help="chats of a turn")
    options = parser.parse_args()
    seen = {kind: Seen() for kind in ("chats", "both", "batch")}
    with tempfile.TemporaryDirectory(prefix="chat") as name:
        (runtime := Path(name) / "runtime").mkdir(mode=0o700)
        ports = free_port(), free_port()
        os.environ["PENSTOCK_NODE_METRICS_PORT"] = str(ports[0])
        with (
            served(options.chat, runtime, options.threads) as http,
            node(options.folder, runtime, options.threads, ports[1]),
        ):
            while len(listed := http.get("/v1/models").json()["data"]) < 2:
                time.sleep(0.2)
            names = sorted((one["id"] for one in listed), key=lambda one: one == options.folder.name)
            urls = (f"http://127.0.0.1:{ports[0]}/metrics", f"http://127.0.0.1:{ports[1]}/metrics")
            for number in range(options.turns):
                for kind, one in seen.items():
                    texts = texts_of(options.folder, options.chats, CHAT_WORDS, CHAT_WORDS, 1000 * number + len(kind))
                    turn(http, (names[0], names[1]), urls, texts, kind, one, options.folder)
                    print(number, kind, f"{one.num_tokens / one.took_s:.0f} tokens/s", flush=True)
    alone, both, batch = seen.values()
    for title, ours, theirs in (("TTFT", both.first_ms, alone.first_ms), ("ITL", both.gaps_ms, alone.gaps_ms)):
        medians = statistics.median(theirs), statistics.median(ours)
        print(f"{title} p50 {medians[0]:.1f} ms alone, {medians[1]:.1f} beside, {medians[1] / medians[0]:.2f} x")
    left = 1 - alone.busy_s / alone.took_s
    speeds = batch.num_tokens / batch.took_s, both.num_tokens / both.took_s
    print(f"batch {speeds[0]:.0f} tokens/s alone, {speeds[1]:.0f} beside; {left:.2f} of the time is left, ", end="")
    print(f"it gets {speeds[1] / speeds[0] / left:.2f} of that")


if __name__ == "__main__":
    main()
