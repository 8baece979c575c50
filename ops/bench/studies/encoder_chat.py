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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.child import free_port
from bench.studies.background import MODES, STEP_SECONDS, Turn, counter
from bench.studies.encoder_doors import begin_batch, served, upload_rows
from bench.studies.encoders import texts_of

CHAT_EVERY_S = 2.0
ROW_TEXTS, NUM_ROWS = 32, 1500
CHAT_WORDS, CHAT_TOKENS = 60, 96
SETTLE_S = 3.0


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


@dataclass(frozen=True, slots=True)
class Nodes:
    """The two nodes, by the names of their models and the addresses of their metrics."""

    chat: str
    encoder: str
    chat_metrics: str
    encoder_metrics: str

    def counters(self) -> tuple[float, float]:
        """Return the seconds that the chat's node has computed, and the tokens that the encoder has."""
        num_tokens = counter(self.encoder_metrics, "penstock_engine_prefill_tokens_total")
        return counter(self.chat_metrics, STEP_SECONDS), num_tokens


def upload(http: httpx.Client, model: str, folder: Path) -> str:
    """Upload the batch file and return its id."""
    texts = texts_of(folder, ROW_TEXTS * NUM_ROWS, 20, 254, 7)
    parts = (texts[first : first + ROW_TEXTS] for first in range(0, len(texts), ROW_TEXTS))
    return upload_rows(http, [{"model": model, "input": part, "truncate_prompt_tokens": -1} for part in parts])


def end_batch(http: httpx.Client, batch: str) -> None:
    """Cancel a batch, and wait for its end."""
    http.post(f"/v1/batches/{batch}/cancel")
    while (found := http.get(f"/v1/batches/{batch}").raise_for_status().json())["status"] != "cancelled":
        if found["status"] in ("completed", "failed"):
            raise RuntimeError(f"the batch ended before its turn did: {found}")
        time.sleep(0.1)


def chat(http: httpx.Client, model: str, text: str, seen: Turn) -> None:
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


def run_turn(
    http: httpx.Client, nodes: Nodes, chats: list[str], file_id: str | None, seconds: float, seen: Turn
) -> None:
    """Send the chats, one every CHAT_EVERY_S, beside a batch of the file's rows if there is one."""
    batch = None if file_id is None else begin_batch(http, file_id)["id"]
    time.sleep(SETTLE_S)
    begun_s, (busy_s, num_tokens) = time.perf_counter(), nodes.counters()
    for at, text in enumerate(chats):
        time.sleep(max(0.0, begun_s + at * CHAT_EVERY_S - time.perf_counter()))
        chat(http, nodes.chat, text, seen)
    time.sleep(max(0.0, begun_s + seconds - time.perf_counter()))
    seen.took_s += time.perf_counter() - begun_s
    after = nodes.counters()
    seen.busy_s += after[0] - busy_s
    seen.num_background += round(after[1] - num_tokens)
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
    seen = {mode: Turn() for mode in MODES}
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
            nodes = Nodes(names[0], names[1], *(f"http://127.0.0.1:{port}/metrics" for port in ports))
            file_id = upload(http, nodes.encoder, options.folder)
            seconds = options.chats * CHAT_EVERY_S
            for number in range(options.turns):
                for at, (mode, one) in enumerate(seen.items()):
                    count = 0 if mode == "background" else options.chats
                    texts = texts_of(options.folder, count, CHAT_WORDS, CHAT_WORDS, len(MODES) * number + at)
                    run_turn(http, nodes, texts, None if mode == "chats" else file_id, seconds, one)
                    print(number, mode, f"{one.num_background / one.took_s:.0f} tokens/s", flush=True)
    alone, both, batch = seen.values()
    for title, ours, theirs in (("TTFT", both.first_ms, alone.first_ms), ("ITL", both.gaps_ms, alone.gaps_ms)):
        medians = statistics.median(theirs), statistics.median(ours)
        print(f"{title} p50 {medians[0]:.1f} ms alone, {medians[1]:.1f} beside, {medians[1] / medians[0]:.2f} x")
    left = 1 - alone.busy_s / alone.took_s
    speeds = batch.num_background / batch.took_s, both.num_background / both.took_s
    print(f"batch {speeds[0]:.0f} tokens/s alone, {speeds[1]:.0f} beside; {left:.2f} of the time is left, ", end="")
    print(f"it gets {speeds[1] / speeds[0] / left:.2f} of that")


if __name__ == "__main__":
    main()
