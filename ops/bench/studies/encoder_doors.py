"""`PYTHONPATH=ops python -m bench.studies.encoder_doors http|rows|passages FOLDER`: what the doors of an encoder cost.

`http`: texts of 20 to 256 tokens over HTTP, 64 a request, beside `Engine.embed`. `rows`: a batch file whose rows have
one text of 16 to 64 tokens each, beside `Engine.embed`. `passages`: 100 passages of 100 tokens through `/rerank`, by a
random cross-encoder of the shape of all-MiniLM-L6-v2, beside sentence-transformers' `CrossEncoder` (`--peer`, an
interpreter that has it). FOLDER has the files of all-MiniLM-L6-v2. The contestants have turns; each of them sleeps
while another one computes. Prints a table of each turn's ratio and the median.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fixtures.tiny_encoder import write_wide

from bench.studies.encoders import CROSS_ENCODER, Contestant, texts_of

TEXTS_A_REQUEST = 64
REQUESTS_AT_ONCE = 4
POLL_S = 0.1
OURS = "penstock, bf16"
SHAPE = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
}
"""Of the random cross-encoder."""
PASSAGES, PASSAGE_WORDS = 100, 100


@contextmanager
def served(model: Path, runtime: Path, num_threads: int) -> Iterator[httpx.Client]:
    """Serve a model from the command line. Yield a client of its gateway."""
    words = ("-m", "penstock", "serve", str(model), "--port", "0", "--ephemeral")
    env = {**os.environ, "PENSTOCK_RUNTIME_DIR": str(runtime), "PENSTOCK_NODE_NUM_THREADS": str(num_threads)}
    process = subprocess.Popen([sys.executable, *words], env=env, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None:
            raise RuntimeError("the process has no output")
        url = next(found[1] for line in process.stdout if (found := re.search(r"at (http://\S+)/v1", line)))
        with httpx.Client(base_url=url, timeout=600) as http:
            yield http
    finally:
        process.terminate()
        process.wait()


def through_http(http: httpx.Client, texts: list[str]) -> None:
    """Embed texts, 64 in a request, with some requests at once."""
    parts = [texts[first : first + TEXTS_A_REQUEST] for first in range(0, len(texts), TEXTS_A_REQUEST)]
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        for _ in threads.map(lambda part: _embeddings(http, part), parts):
            pass


def _embeddings(http: httpx.Client, texts: list[str]) -> Any:
    body = {"input": texts, "encoding_format": "base64", "truncate_prompt_tokens": -1}
    return http.post("/v1/embeddings", json=body).raise_for_status().content


def upload_rows(http: httpx.Client, bodies: list[dict[str, Any]]) -> str:
    """Upload a batch file with a request for embeddings of each body, and return its id."""
    request = {"method": "POST", "url": "/v1/embeddings"}
    rows = "".join(json.dumps({"custom_id": str(at), **request, "body": one}) + "\n" for at, one in enumerate(bodies))
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("rows.jsonl", rows.encode())}}
    return str(http.post("/v1/files", **form).raise_for_status().json()["id"])


def begin_batch(http: httpx.Client, file_id: str) -> dict[str, Any]:
    """Begin a batch of the rows of a file, and return it."""
    body = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch: dict[str, Any] = http.post("/v1/batches", json=body).raise_for_status().json()
    return batch


def through_rows(http: httpx.Client, texts: list[str]) -> None:
    """Run a batch file whose rows have one text each, and read its output."""
    model = http.get("/v1/models").json()["data"][0]["id"]
    batch = begin_batch(http, upload_rows(http, [{"model": model, "input": one} for one in texts]))
    while batch["status"] not in {"completed", "failed"}:
        time.sleep(POLL_S)
        batch = http.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
    if batch["request_counts"]["completed"] != len(texts):
        raise RuntimeError(f"the batch did not complete: {batch}")


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes."""
    begun_s = time.monotonic()
    work()
    return time.monotonic() - begun_s


def beside_engine(options: argparse.Namespace, given: Path, *, rows: bool) -> list[float]:
    """Return for each turn how fast the door was, as part of the speed of `Engine.embed`."""
    fewest, most = (16, 62) if rows else (20, 254)
    send = through_rows if rows else through_http
    engine = Contestant(OURS, sys.executable, options.folder, options.threads, given)
    ratios = []
    try:
        with served(options.folder, given / "runtime", options.threads) as http:
            send(http, texts_of(options.folder, TEXTS_A_REQUEST, fewest, most, -1))
            for turn in range(options.turns):
                texts = texts_of(options.folder, options.texts, fewest, most, turn)
                (given / "texts").write_text(json.dumps(texts))
                works: list[Callable[[], float]] = [
                    lambda: engine.turn("texts"),
                    lambda texts=texts: seconds_of(lambda: send(http, texts)),  # type: ignore[misc]
                ]
                taken = [work() for work in (works if turn % 2 == 0 else works[::-1])]
                own_s, door_s = taken if turn % 2 == 0 else taken[::-1]
                ratios.append(own_s / door_s)
                print(f"Engine.embed {own_s:.2f} s, the door {door_s:.2f} s, {ratios[-1]:.3f} x", flush=True)
    finally:
        engine.end()
    return ratios


def beside_cross_encoder(options: argparse.Namespace, given: Path) -> list[float]:
    """Return for each turn the time of `/rerank`, as part of that of `CrossEncoder.predict`."""
    model = given / "cross-encoder"
    model.mkdir()
    write_wide(model, "bert", "ForSequenceClassification", num_labels=1, **SHAPE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((options.folder / name).read_bytes())
    peer = Contestant(CROSS_ENCODER, options.peer, model, options.threads, given)
    ratios = []
    try:
        with served(model, given / "runtime", options.threads) as http:
            for turn in range(options.turns + 2):
                query, *passages = texts_of(options.folder, 1 + PASSAGES, PASSAGE_WORDS, PASSAGE_WORDS, turn)
                query = " ".join(query.split()[:10])
                (given / "texts").write_text(json.dumps([[query, passage] for passage in passages]))
                body = {"query": query, "documents": passages, "return_documents": False}
                own_s = seconds_of(lambda body=body: http.post("/rerank", json=body).raise_for_status())  # type: ignore[misc]
                peer_s = peer.turn("texts")
                if turn >= 2:  # The first ones load code.
                    ratios.append(own_s / peer_s)
                    print(f"/rerank {own_s:.3f} s, CrossEncoder {peer_s:.3f} s, {ratios[-1]:.3f} x", flush=True)
    finally:
        peer.end()
    return ratios


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(prog="bench.studies.encoder_doors", description=__doc__)
    parser.add_argument("what", choices=("http", "rows", "passages"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int)
    parser.add_argument("--texts", type=int, help="texts of a turn")
    options = parser.parse_args()
    turns, texts = {"http": (6, 2000), "rows": (2, 50_000), "passages": (30, PASSAGES)}[options.what]
    options.turns, options.texts = options.turns or turns, options.texts or texts
    with tempfile.TemporaryDirectory(prefix="doors") as name:
        (given := Path(name)).joinpath("runtime").mkdir(mode=0o700)
        if options.what == "passages":
            ratios = beside_cross_encoder(options, given)
        else:
            ratios = beside_engine(options, given, rows=options.what == "rows")
    print(f"{options.what}: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
