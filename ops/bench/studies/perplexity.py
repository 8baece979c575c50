"""`PYTHONPATH=ops python -m bench.studies.perplexity`: what each format of weights and KV cache costs in quality.

Perplexity of English text, beside transformers' in float32 with the same weights. Goes on where an earlier start was
broken off: what is in the results is not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fixtures.dequantized import dequantized
from numpy.typing import NDArray
from torch import Tensor

from bench import machine, peers
from bench.studies import grids
from bench.studies.perplexity_report import (
    CHUNK,
    COMPARED,
    NUM_WINDOWS,
    QUANTIZED,
    REFERENCE,
    STORED,
    WINDOW,
    Setting,
    report,
)
from penstock.gpu_node.model.checkpoint.source import resolve_model
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import NO_ROWS, LoadedModel, StepPlan

RESULTS = Path(__file__).parents[1] / "results"
FOLDER = peers.BUILD / "bench" / "perplexity"
BLOCK = 16

Reader = Callable[[NDArray[np.int32]], Tensor]
"""Token ids to the logits after each, [num_tokens, vocab]."""


def settings(*, is_gguf: bool) -> list[Setting]:
    """All of them: the reference, then what decides most."""

    def native(grid: str, kv: str) -> list[Setting]:
        kinds = ("none", *(("auto",) if is_gguf and grid == STORED else ()), *QUANTIZED)
        return [Setting(grid, "native", weights, kv) for weights in kinds]

    found = [REFERENCE, *native(STORED, "bfloat16")]
    for grid in grids.GRIDS:
        found += native(grid, "bfloat16")
        found += [Setting(grid, "rounded", weights, "bfloat16") for weights in (*QUANTIZED, grids.INT4_HEAD8)]
    found += [one for grid in (STORED, *grids.GRIDS) for one in native(grid, "int8")]
    return [*found, Setting(STORED, "transformers", "bfloat16", "bfloat16")]


def english() -> str:
    """The topics of Python's help, about 465,000 characters, as they stand."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows_of(ids: list[int], start: list[int]) -> list[NDArray[np.int32]]:
    """NUM_WINDOWS of WINDOW tokens, evenly over the text; each begins with what the tokenizer begins a text with."""
    size, stride = WINDOW - len(start), len(ids) // NUM_WINDOWS
    if stride < size:
        raise ValueError(f"{len(ids)} tokens are too few for {NUM_WINDOWS} windows of {WINDOW}")
    return [np.array(start + ids[at : at + size], np.int32) for at in range(0, stride * NUM_WINDOWS, stride)]


def chunks_of(ids: NDArray[np.int32]) -> Iterator[StepPlan]:
    """Steps of one sequence that reads `ids` and samples nothing: every later one attends to blocks in the cache."""
    blocks = np.arange(1, 1 - (-len(ids) // BLOCK), dtype=np.int32)[None]
    for start in range(0, len(ids), CHUNK):
        end = min(start + CHUNK, len(ids))
        yield StepPlan(
            token_ids=ids[start:end],
            positions=np.arange(start, end, dtype=np.int32),
            query_starts=np.array([0, end - start], np.int32),
            context_lens=np.array([end], np.int32),
            block_tables=blocks,
            sample_tokens=np.empty(0, np.int32),
            sampling=NO_ROWS,
        )


@contextmanager
def native_model(model: str, weights: str, kv: str) -> Iterator[LoadedModel]:
    """A model on the native runner, with a KV cache for one window."""
    options = RunnerOptions(
        runner="native",
        dtype="bfloat16",
        quantization=weights,
        kv_cache_dtype=kv,
        block_size=BLOCK,
        num_kv_blocks=-(-WINDOW // BLOCK),
        max_num_seqs=1,
        weight_cache=False,
    )
    loaded = load_model(model, options, _silent)
    assert isinstance(loaded.runner, NativeRunner)
    yield loaded
    loaded.runner.close()


def native_logits(loaded: LoadedModel, ids: NDArray[np.int32]) -> Tensor:
    """The logits of the native runner, chunk by chunk through its KV cache, [num_tokens, vocab]."""
    assert isinstance(loaded.runner, NativeRunner)
    return torch.from_numpy(np.concatenate([loaded.runner.logits(plan) for plan in chunks_of(ids)]))


@contextmanager
def native_reader(model: str, weights: str, kv: str) -> Iterator[tuple[Reader, str]]:
    """The native runner, and the name of its arithmetic."""
    with native_model(model, weights, kv) as loaded:
        yield lambda ids: native_logits(loaded, ids), loaded.arithmetic


@contextmanager
def transformers_reader(folder: str, dtype: str) -> Iterator[tuple[Reader, str]]:
    """Transformers on a whole window at once."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def read(ids: NDArray[np.int32]) -> Tensor:
        with torch.inference_mode():
            return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].float()

    yield read, f"transformers-{dtype}"


@dataclass
class Score:
    """What a reader made of the windows."""

    nll: list[float]
    """Of each window, the mean over its tokens but the first, in nats."""
    kl: float
    """Mean divergence from the reference's distributions over the compared windows, in nats."""
    top1: float
    """How often both hold the same token for the likeliest there."""


def score(read: Reader, windows: list[NDArray[np.int32]], reference: Path, *, is_reference: bool) -> Score:
    """Reads the windows. The reference leaves its distributions in the file that others are compared with."""
    nll, kl, same = [], [], []
    for i, ids in enumerate(windows):
        ours = torch.log_softmax(read(ids)[:-1], dim=-1)
        nll.append(float(-ours.gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None]).mean()))
        if i not in COMPARED:
            continue
        part = _part(reference, i)
        if is_reference:
            part.parent.mkdir(parents=True, exist_ok=True)
            np.save(part, ours.numpy())
        theirs = torch.from_numpy(np.load(part))
        same.append(float((theirs.argmax(1) == ours.argmax(1)).double().mean()))
        kl.append(float(((theirs - ours) * theirs.exp()).sum(1).double().mean()))
    return Score(nll, statistics.mean(kl), statistics.mean(same))


def _part(reference: Path, window: int) -> Path:
    return reference.with_suffix(f".{window}.npy")


def measure(setting: Setting, model: str, windows: list[NDArray[np.int32]]) -> dict[str, Any]:
    """One setting, as it goes into the results."""
    place = FOLDER / Path(model).stem
    if setting != REFERENCE and not all(_part(place / "reference", i).exists() for i in COMPARED):
        # The results may have come with the clone; the distributions, 800 MB, do not.
        measure(REFERENCE, model, windows)
    source = dequantized(model)
    folder, temporary = source, None
    if setting.grid != STORED:
        rounding = setting.weights if setting.engine == "rounded" else None
        folder = temporary = place / f"weights-{setting.grid}"
        shutil.rmtree(folder, ignore_errors=True)
        grids.make(source, setting.grid, folder, rounding)
    if setting.engine == "transformers":
        opened = transformers_reader(str(folder), setting.weights)
    elif setting.engine == "rounded":
        opened = native_reader(str(folder), "none", setting.kv)
    else:
        opened = native_reader(model if setting.weights == "auto" else str(folder), setting.weights, setting.kv)
    with opened as (read, arithmetic):
        found = score(read, windows, place / "reference", is_reference=setting == REFERENCE)
    if temporary is not None:
        shutil.rmtree(temporary)
    return asdict(setting) | asdict(found) | {"arithmetic": arithmetic, "revision": machine.revision()}


def _silent(_stage: str, _fraction: float) -> None:
    pass


def merged(
    path: Path, wanted: Iterable[Setting], run: Callable[[Setting], dict[str, Any]], about: dict[str, Any]
) -> None:
    """Measures what the results at `path` lack, writing them after each."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    names = [setting.name for setting in wanted]
    for setting in wanted:
        if setting.name not in content["runs"]:
            content["runs"][setting.name] = run(setting)
        order = sorted(content["runs"], key=lambda name: names.index(name) if name in names else len(names))
        content = about | {"runs": {name: content["runs"][name] for name in order}}
        path.write_text(json.dumps(content, indent=1) + "\n")
        path.with_suffix(".md").write_text(report(content))
        print(setting.name, math.exp(statistics.mean(content["runs"][setting.name]["nll"])), flush=True)


def main() -> None:
    """Measures what is missing, writes table and JSON."""
    from transformers import AutoTokenizer

    from penstock.cli.demo_model import demo_model

    parser = argparse.ArgumentParser(prog="bench.studies.perplexity", description=__doc__)
    parser.add_argument("--model", help="folder or .gguf file; the demo model if not given")
    parser.add_argument("--results", type=Path, default=RESULTS / "perplexity.json")
    options = parser.parse_args(sys.argv[1:])
    model = options.model or str(demo_model())
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(resolve_model(model, _silent).folder)
    text = english()
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    windows = windows_of(ids, tokenizer("").input_ids)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    source = f"the text of pydoc_data.topics ({len(ids):,} tokens, blake2b {digest})"
    about = {
        "command": "python -m bench.studies.perplexity",
        "machine": machine.describe(),
        "text": {"source": source, "scored": sum(len(ids) - 1 for ids in windows)},
    }
    wanted = settings(is_gguf=model.endswith(".gguf"))
    merged(options.results, wanted, lambda setting: measure(setting, model, windows), about)


if __name__ == "__main__":
    main()
