"""`PYTHONPATH=ops python -m bench.studies.int8_steps`: what speed it costs to give `int8` more scales.

`int8` has one scale for a row of weights or activations. Here some of a layer's matrices have one for 32 columns, as
with `int8_group`, or stay in bfloat16. Accuracy is measured as in bench.studies.accuracy, whose results are used for
what it measured too. Then steps of all variants run by turns. What is in the results is not measured again; steps are
timed at each start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench import machine
from bench.studies import accuracy
from bench.studies.accuracy import NUM_WINDOWS, WINDOW
from bench.studies.divergence import BaseFile
from bench.studies.perplexity import BLOCK
from penstock.gpu_node.model.checkpoint.stored_kinds import Stored
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.native.packing import Packer
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import NO_ROWS, StepPlan
from penstock.kernels.cpu.library import Slot
from penstock.kernels.cpu.structs import Format
from penstock.kernels.cpu.structs import Run as FormatRun

Shape = tuple[int, int, int]
"""Of a step: its sequences, the tokens of each, and the tokens before them."""
RESULTS = Path(__file__).parents[1] / "results" / "int8_steps.json"
ROWS = "int8"
LAYERS = (Slot.QKV, Slot.OUT, Slot.MLP_IN, Slot.MLP_OUT)


def _variant(*grouped: Slot, wide: tuple[Slot, ...] = ()) -> tuple[str, dict[Slot, Format]]:
    return "int8", dict.fromkeys(grouped, Format.INT8_GROUP) | dict.fromkeys(wide, Format.BF16)


VARIANTS: dict[str, tuple[str, dict[Slot, Format]]] = {
    ROWS: _variant(),
    "head in groups": _variant(Slot.HEAD),
    "qkv and head in groups": _variant(Slot.QKV, Slot.HEAD),
    "qkv, out and head in groups": _variant(Slot.QKV, Slot.OUT, Slot.HEAD),
    "all but the MLP's second in groups": _variant(Slot.QKV, Slot.OUT, Slot.MLP_IN, Slot.HEAD),
    "all in groups": _variant(*LAYERS, Slot.HEAD),
    "layers in groups, head in bf16": _variant(*LAYERS, wide=(Slot.HEAD,)),
    "`int8_group`: all in groups, not rotated": ("int8_group", {}),
}
"""A name, `--quantization`, and the formats that matrices of some slots have instead of its own."""
STEPS: dict[str, Shape] = {
    "1 sequence": (1, 1, 256),
    "16 sequences": (16, 1, 128),
    "64 sequences": (64, 1, 128),
    "prompt of 256": (1, 256, 0),
}
CACHES = ("int8", "bfloat16", "float16")
LONG_STEPS = STEPS | {
    "1 after 4,000": (1, 1, 4000),
    "16 after 1,000": (16, 1, 1000),
    "prompt of 256 after 2,000": (1, 256, 2000),
}
"""Steps that show what the KV cache costs."""
NUM_BLOCKS = 1280
SECONDS = 40

HEAD = """# Speed against accuracy of int8, {date}

`PYTHONPATH=ops python -m bench.studies.int8_steps` on {cpu}, {cores} cores. RMS Δp is that of
[accuracy](accuracy.md), over {windows} windows of {window} tokens, with keys and values in bfloat16. `int8` has one
scale for a row; the variants have one for 32 columns of some matrices, or keep them in bf16. Times are medians of steps
that ran by turns within {seconds} s, relative to `int8`, with keys and values in int8.

"""
CACHES_HEAD = """
## KV cache

`int8` with keys and values in each format; times relative to bfloat16. RMS Δp is over all 220 windows.

"""


@contextmanager
def packed_as(formats: Mapping[Slot, Format]) -> Iterator[None]:
    """Give the matrices of these slots these formats while models are loaded."""
    runs_of = Packer._runs_of

    def chosen(packer: Packer, slot: Slot, parts: tuple[Stored, ...], *, interleaved: bool = False) -> list[FormatRun]:
        runs = runs_of(packer, slot, parts, interleaved=interleaved)
        return [(formats[slot], sum(rows for _, rows in runs))] if slot in formats else runs

    with mock.patch.object(Packer, "_runs_of", chosen):
        yield


@contextmanager
def opened(model: Path, quantization: str, kv: str) -> Iterator[NativeRunner]:
    """A runner for the largest step."""
    options = RunnerOptions(
        runner="native",
        dtype="bfloat16",
        quantization=quantization,
        kv_cache_dtype=kv,
        block_size=BLOCK,
        num_kv_blocks=NUM_BLOCKS,
        max_num_seqs=max(count for count, _, _ in LONG_STEPS.values()),
        weight_cache=False,
    )
    runner = load_model(str(model), options, lambda *_: None).runner
    assert isinstance(runner, NativeRunner)
    yield runner
    runner.close()


def plan_of(num_seqs: int, num_tokens: int, num_before: int) -> StepPlan:
    """A step in which each sequence has some tokens behind those that are in the cache."""
    count, context = num_seqs * num_tokens, num_before + num_tokens
    num_blocks = -(-context // BLOCK)
    return StepPlan(
        token_ids=np.arange(100, 100 + count, dtype=np.int32),
        positions=np.tile(np.arange(num_before, context, dtype=np.int32), num_seqs),
        query_starts=np.arange(0, count + 1, num_tokens, dtype=np.int32),
        context_lens=np.full(num_seqs, context, np.int32),
        block_tables=np.arange(1, 1 + num_seqs * num_blocks, dtype=np.int32).reshape(num_seqs, num_blocks),
        sample_tokens=np.empty(0, np.int32),
        sampling=NO_ROWS,
    )


def measure_times(runners: Mapping[str, NativeRunner], steps: Mapping[str, Shape]) -> dict[str, dict[str, float]]:
    """The median milliseconds of each kind of step, by runner."""
    times: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in steps} for name in runners}
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        for kind, shape in steps.items():
            plan = plan_of(*shape)
            for name, runner in runners.items():
                begun_s = time.perf_counter()
                runner.logits(plan)
                times[name][kind].append(1000 * (time.perf_counter() - begun_s))
    return {name: {kind: statistics.median(found) for kind, found in own.items()} for name, own in times.items()}


def variant_times(model: Path) -> dict[str, dict[str, float]]:
    """The times of all variants, with keys and values in int8."""
    with ExitStack() as stack:
        runners = {}
        for name, (quantization, formats) in VARIANTS.items():
            with packed_as(formats):
                runners[name] = stack.enter_context(opened(model, quantization, "int8"))
        return measure_times(runners, STEPS)


def cache_times(model: Path) -> dict[str, dict[str, float]]:
    """The times of int8 weights with each KV cache."""
    with ExitStack() as stack:
        return measure_times({kv: stack.enter_context(opened(model, "int8", kv)) for kv in CACHES}, LONG_STEPS)


def table(first: str, runs: Mapping[str, Any], base: str) -> list[str]:
    """A row for each run: RMS Δp, and its times relative to one run's."""
    kinds = runs[base]["ms"]
    lines = [f"| {first} | RMS Δp, % | {' | '.join(kinds)} |\n", f"|---{'|---' * (1 + len(kinds))}|\n"]
    for name, run in runs.items():
        figure = run["rms_delta_p"]
        rms = "–" if figure is None else f"{figure['value']:.2f} ± {figure['error']:.2f}"
        ratios = " | ".join(f"{run['ms'][kind] / runs[base]['ms'][kind]:.2f}" for kind in kinds)
        lines.append(f"| {name} | {rms} | {ratios} |\n")
    return lines


def report(content: dict[str, Any]) -> str:
    """The results as a page."""
    facts = content["machine"] | {"windows": content["windows"], "window": WINDOW, "seconds": SECONDS}
    lines = [HEAD.format(**facts), *table("variant", content["runs"], ROWS), CACHES_HEAD]
    return "".join([*lines, *table("KV cache", content["caches"], "bfloat16")])


def main() -> None:
    """Measure all variants; write table and JSON."""
    from penstock.cli.demo_model import demo_model

    parser = argparse.ArgumentParser(prog="bench.studies.int8_steps", description=__doc__)
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help=f"how many of the {NUM_WINDOWS} to read")
    windows = parser.parse_args(sys.argv[1:]).windows
    model = demo_model()
    path, base = accuracy.file_of(model, "BF16"), BaseFile(accuracy.base_file(model, NUM_WINDOWS))
    known = json.loads(accuracy.RESULTS.read_text())["runs"] if accuracy.RESULTS.exists() else {}
    content: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}
    if content.get("windows", windows) != windows:
        parser.error(f"{RESULTS} has {content['windows']} windows; delete it or read as many")
    content |= {"machine": machine.describe(), "revision": machine.revision(), "windows": windows}
    runs = content["runs"]
    for name, (quantization, formats) in VARIANTS.items():
        run = accuracy.Run("penstock", "BF16", quantization, "bfloat16")
        if not formats and run.name in known and windows == NUM_WINDOWS:
            runs[name] = {"rms_delta_p": known[run.name]["rms_delta_p"]}
        elif name not in runs:
            with packed_as(formats):
                runs[name] = {"rms_delta_p": asdict(accuracy.by_penstock(path, run, base, windows).rms_delta_p)}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
        print(name, runs[name]["rms_delta_p"], flush=True)
    times = variant_times(path)
    content["runs"] = {name: runs[name] | {"ms": times[name]} for name in VARIANTS}
    caches = {kv: known.get(accuracy.Run("penstock", "BF16", "int8", kv).name, {}).get("rms_delta_p") for kv in CACHES}
    content["caches"] = {kv: {"rms_delta_p": caches[kv], "ms": found} for kv, found in cache_times(path).items()}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(report(content))


if __name__ == "__main__":
    main()
