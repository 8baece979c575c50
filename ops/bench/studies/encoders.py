"""`PYTHONPATH=ops python -m bench.studies.encoders FOLDER --peer PYTHON`: an encoder beside sentence-transformers.

FOLDER has the files of a model that embeds texts, such as all-MiniLM-L6-v2. PYTHON is an interpreter that has
sentence-transformers. Each contestant is a process that stays loaded and sleeps while another one has its turn. The
texts are words of the model's vocabulary, drawn with a fixed seed. Vectors are compared with those of
sentence-transformers in float32. Writes results/encoders.md. `--contestants` names some of them; those of ONNX Runtime,
OpenVINO and llama.cpp (encoder_peers.py) run only if they are named. encoder_doors.py measures HTTP, batch files and
passages.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from bench.machine import describe
from bench.studies.encoder_peers import FURTHER

RESULTS = Path(__file__).parents[1] / "results" / "encoders.md"
MAX_TOKENS = 256
BATCH = 32
"""Texts that sentence-transformers pads to one length, after it has sorted all of them by length."""
OURS: Mapping[str, Mapping[str, str]] = {
    "penstock, bf16": {"quantization": "none"},
    "penstock, int8": {"quantization": "int8"},
    "penstock, runner torch, float32": {"runner": "torch", "dtype": "float32"},
}
PEERS: Mapping[str, str] = {"sentence-transformers, float32": "float32", "sentence-transformers, bfloat16": "bfloat16"}
CROSS_ENCODER = "sentence-transformers, CrossEncoder"
REFERENCE = "sentence-transformers, float32"


def texts_of(folder: Path, count: int, fewest: int, most: int, seed: int) -> list[str]:
    """Return texts of words of the model's vocabulary."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(word for word in vocab if word.isalpha() and len(word) > 2)
    rng = Random(seed)
    return [" ".join(rng.choices(words, k=rng.randint(fewest, most))) for _ in range(count)]


def serve(name: str, folder: Path, num_threads: int, given: Path) -> None:
    """Answer lines of requests: embed the texts of a file, write the vectors, and say how long it took."""
    # Libraries print to standard output, too.
    answers, sys.stdout = sys.stdout, sys.stderr
    embed = _contestant(name, folder, num_threads)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        texts = json.loads((given / line.strip()).read_text())
        began_s = time.perf_counter()
        rows = embed(texts)
        took_s = time.perf_counter() - began_s
        rows.astype("<f4").tofile(given / "vectors")
        print(took_s, file=answers, flush=True)


def _contestant(name: str, folder: Path, num_threads: int) -> Callable[[list[Any]], Any]:
    if name in OURS:
        return _own(name, folder, num_threads)
    if name in FURTHER:
        return FURTHER[name](folder, num_threads)
    return _cross_encoder(folder, num_threads) if name == CROSS_ENCODER else _peer(name, folder, num_threads)


def _cross_encoder(folder: Path, num_threads: int) -> Callable[[list[list[str]]], Any]:
    """Return what scores pairs of texts."""
    import torch
    from sentence_transformers import CrossEncoder

    torch.set_num_threads(num_threads)
    model = CrossEncoder(str(folder), device="cpu", max_length=512)
    return lambda pairs: model.predict([tuple(pair) for pair in pairs], batch_size=BATCH)


def _own(name: str, folder: Path, num_threads: int) -> Callable[[list[str]], Any]:
    from penstock.gpu_node.engine.encoder.engine import EncoderEngine

    engine = EncoderEngine(str(folder), num_threads=num_threads, **OURS[name])
    return lambda texts: engine.embed(texts, truncate_prompt_tokens=MAX_TOKENS)


def _peer(name: str, folder: Path, num_threads: int) -> Callable[[list[str]], Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(num_threads)
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": PEERS[name]})
    # numpy has no bfloat16.
    return lambda texts: model.encode(texts, batch_size=BATCH, convert_to_tensor=True).float().numpy()


class Contestant:
    """A process that embeds texts when it has its turn."""

    def __init__(self, name: str, python: str, folder: Path, num_threads: int, given: Path) -> None:
        self.given = given
        command = [python, "-m", "bench.studies.encoders", str(folder), "--serve", name, "--given", str(given)]
        self._process = subprocess.Popen(
            [*command, "--threads", str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "true"},
        )
        self._answer()

    def turn(self, file: str) -> float:
        """Return the seconds that the texts of a file take."""
        if self._process.stdin is None:
            raise RuntimeError("the process has no input")
        self._process.stdin.write(f"{file}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def end(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> str:
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contestant ended: {self._process.args!r}")
        return line.strip()


def agreement(expected: Any, found: Any) -> dict[str, float]:
    """Return the smallest cosine of two vectors of a text, and the rank correlation of all pairs' similarities."""
    import numpy as np

    a, b = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (expected, found))
    pairs = np.triu_indices(len(a), 1)
    ranks = [np.argsort(np.argsort((rows @ rows.T)[pairs])).astype(np.float64) for rows in (a, b)]
    return {"least_cosine": float((a * b).sum(1).min()), "rank_correlation": float(np.corrcoef(*ranks)[0, 1])}


def measure(folder: Path, options: argparse.Namespace, given: Path) -> dict[str, Any]:
    """Return what each contestant gave."""
    peer, num_threads, turns = options.peer, options.threads, options.turns
    import numpy as np
    import tokenizers

    counter = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    counter.no_truncation()
    counter.no_padding()
    (given / "compared").write_text(json.dumps(texts_of(folder, options.compared, 1, 400, 0)))
    num_tokens = []
    for turn in range(turns):
        texts = texts_of(folder, options.texts, 20, MAX_TOKENS - 2, 1 + turn)
        (given / f"turn{turn}").write_text(json.dumps(texts))
        num_tokens.append(sum(min(MAX_TOKENS, len(one.ids)) for one in counter.encode_batch(texts)))
    names = options.contestants or [*PEERS, *OURS]
    # The others are compared with it.
    names = [REFERENCE, *(name for name in names if name != REFERENCE)]
    contestants = {
        name: Contestant(name, sys.executable if name in OURS else peer, folder, num_threads, given) for name in names
    }
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    try:
        vectors = {}
        for name, one in contestants.items():
            one.turn("compared")
            vectors[name] = np.fromfile(given / "vectors", "<f4").reshape(options.compared, -1)
            found[name] = agreement(vectors[REFERENCE], vectors[name])
        rates: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(turns):
            for name in names if turn % 2 == 0 else reversed(names):
                rates[name].append(num_tokens[turn] / contestants[name].turn(f"turn{turn}"))
                print(name, round(rates[name][-1]), "tokens/s", flush=True)
    finally:
        for one in contestants.values():
            one.end()
    for name in names:
        found[name] |= {"tokens_per_s": rates[name], "median": statistics.median(rates[name])}
    sizes = {"threads": num_threads, "turns": turns, "texts": options.texts, "compared": options.compared}
    return {"machine": str(describe()["cpu"]), **sizes, "contestants": found}


def page_of(measured: Mapping[str, Any]) -> str:
    """Return the page of the results."""
    found = measured["contestants"]
    best = max(one["median"] for name, one in found.items() if name in PEERS)
    lines = [
        "# An encoder beside sentence-transformers",
        "",
        "`PYTHONPATH=ops python -m bench.studies.encoders FOLDER --peer PYTHON` with all-MiniLM-L6-v2 on"
        f" {measured['machine']}, {measured['threads']} cores.",
        f"Each contestant embedded {measured['texts']:,} texts of 20 to 256 tokens in each of {measured['turns']}",
        f"turns; the rates are medians. Cosines are those of {measured['compared']:,} texts of 1 to 400 words with",
        "sentence-transformers in float32, and the rank correlation is that of the similarities of all pairs of them.",
        "",
        "| | tokens a second | of the best peer | least cosine | rank correlation |",
        "|---|---|---|---|---|",
    ]
    for name, one in found.items():
        numbers = f"{one['median']:,.0f} | {one['median'] / best:.2f} × | {one['least_cosine']:.6f}"
        lines.append(f"| {name} | {numbers} | {one['rank_correlation']:.6f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, or serve as one of the contestants."""
    parser = argparse.ArgumentParser(prog="bench.studies.encoders", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--contestants", nargs="*", choices=[*PEERS, *OURS, *FURTHER], help="default: the first five")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--texts", type=int, default=1000, help="texts of a turn")
    parser.add_argument("--compared", type=int, default=1000, help="texts whose vectors are compared")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve")
    parser.add_argument("--given", type=Path)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.folder, options.threads, options.given)
        return
    with tempfile.TemporaryDirectory() as given:
        measured = measure(options.folder, options, Path(given))
    options.out.write_text(page_of(measured))
    print(page_of(measured))


if __name__ == "__main__":
    main()
