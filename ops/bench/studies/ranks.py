"""Measure a model that several ranks compute together; `python -m bench.studies.ranks` writes the results.

Without arguments it makes a model of 1B parameters with random weights, which takes some minutes, 4 GB of disk and 4 GB
of memory. It is a checkpoint, so that all shapes map the same file of packed weights, as nodes do.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.child import Spec, measure
from bench.engines.http_server import open_session
from bench.larger.models import write_folder
from bench.machine import describe, revision
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.model.checkpoint.conversion_cache import cache_folder
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import RankStats
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.kernels.cpu.build import library_path
from penstock.kernels.cpu.probe import best_isa, cpu_flags

RESULTS = Path(__file__).parents[1] / "results"
COMMAND = "PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.studies.ranks"
ROWS, COLUMNS, EXCHANGES = 16, 2048, 2000
OUTPUTS = 48
REPEATS = 5
BATCHES = (1, 16)
CORES = os.sched_getaffinity(0)
SHAPES: dict[str, dict[str, Any]] = {
    "one rank, one thread": {"num_threads": 1},
    "one rank, two threads": {"num_threads": 2},
    "two ranks, one thread each": {"num_threads": 2, "tensor_parallel_size": 2},
}
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)$")


def main() -> None:
    """Measure exchanges, speed and memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="folder of a checkpoint in place of the 1B model")
    parser.add_argument("--quantization", default="int8_group")
    parser.add_argument("--gloo", nargs=2, metavar=("RANK", "STORE"), help="be a rank that exchanges through gloo")
    args = parser.parse_args()
    if args.gloo is not None:
        _exchange_through_gloo(int(args.gloo[0]), args.gloo[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        _keep_weights_in(Path(folder) / "cache")
        model = args.model
        if model is None:
            write_folder("1b", model := Path(folder) / "llama-1b")
        lines = list(_lines(model, args.quantization))
    (RESULTS / "ranks.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _keep_weights_in(folder: Path) -> None:
    """Let packed weights go with the study; the compiled kernels stay where they are."""
    kernels = cache_folder() / "native"
    folder.mkdir()
    (folder / "native").symlink_to(kernels)
    os.environ["PENSTOCK_CACHE"] = str(folder)


def _lines(model: Path, quantization: str) -> Iterator[str]:
    machine = describe()
    settings: dict[str, Any] = {"runner": "native", "dtype": "bfloat16", "quantization": quantization}
    yield from (
        "# Ranks",
        "",
        f"{model.name}, {quantization}, {machine['cores']} cores of {machine['cpu']}, {machine['date']}, "
        f"{revision()}. `{COMMAND}`",
        "",
        f"**An exchange** of {ROWS} rows of {COLUMNS} numbers between two ranks, each on a thread: "
        f"{_exchange_us():.1f} µs. Each rank writes its half, meets the other one, reads all rows, and meets it again. "
        f"An `all_gather` of as much through gloo, between two processes: {_gloo_us():.1f} µs.",
        "",
    )
    yield from _speeds(str(model), settings)
    yield ""
    yield from _over_http(str(model), settings)


def _exchange_us() -> float:
    """Return the time of one exchange: the median of several runs."""
    isa = best_isa(cpu_flags())
    if isa is None:
        raise SystemExit("this CPU has none of the kernels' instruction sets")
    library = library_path(isa, cache_folder() / "native", lambda fraction: None)
    memory = GroupMemory.create()
    memory.rows.grow(4 * ROWS * COLUMNS)
    took_us = []
    for _ in range(REPEATS):
        exchanges = [memory.exchange(library, rank, 2) for rank in range(2)]
        numbers = EXCHANGES, memory.rows.address, ROWS * COLUMNS
        threads = [threading.Thread(target=exchange.repeat, args=numbers) for exchange in exchanges]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_us.append(1e6 * (time.perf_counter() - began_s) / EXCHANGES)
    memory.close()
    return median(took_us)


def _gloo_us() -> float:
    """Return the time of one exchange between two processes through torch's gloo: the median of several runs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, "--gloo"]
        store = f"{folder}/store"
        with subprocess.Popen([*command, "1", store]):
            ran = subprocess.run([*command, "0", store], check=True, capture_output=True, text=True)
    return float(ran.stdout)


def _exchange_through_gloo(rank: int, store: str) -> None:
    """Be one of two ranks; rank 0 prints the time of an exchange."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    own, rows = torch.zeros(ROWS, COLUMNS // 2), list(torch.zeros(2, ROWS, COLUMNS // 2))
    took_us = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        for _ in range(EXCHANGES):
            distributed.all_gather(rows, own)
        took_us.append(1e6 * (time.perf_counter() - began_s) / EXCHANGES)
    distributed.destroy_process_group()
    if rank == 0:
        print(median(took_us))


def _speeds(model: str, settings: dict[str, Any]) -> Iterator[str]:
    """Yield a table of tokens a second and of memory."""
    yield f"Tokens a second, the best of {REPEATS} runs of {OUTPUTS} tokens for each stream. PSS counts the weights"
    yield "and the KV cache that a rank has mapped. The share is its part of what one rank has. Each rank's time at a"
    yield "meeting is that of waiting for the other one, then that from its arrival until this rank went on."
    yield ""
    yield "| | " + " | ".join(f"{count} streams" for count in BATCHES) + " | PSS, MiB | share | at a meeting, µs |"
    yield "|---" * (len(BATCHES) + 4) + "|"
    of_one = 0.0
    for name, shape in SHAPES.items():
        engine = Engine(model, num_kv_blocks=256, **settings, **shape)
        runner = engine._runner
        if not isinstance(runner, NativeRunner):
            raise SystemExit("the native runner is needed")
        runner.wait_until_packed()
        engine.bind_thread()
        rates = [_best_rate(engine, count) for count in BATCHES]
        os.sched_setaffinity(0, CORES)
        sizes = [_pss_mib(pid) for pid in ("self", *map(str, runner.rank_pids))]
        of_one = of_one or sizes[0]
        shares = ", ".join(f"{size / of_one:.2f}" for size in sizes)
        row = [name, *(f"{rate:.0f}" for rate in rates), ", ".join(f"{size:.0f}" for size in sizes), shares]
        yield f"| {' | '.join(row)} | {_meetings(runner.ranks)} |"
        runner.close()
        del engine, runner
        ctypes.CDLL(None).malloc_trim(0)


def _best_rate(engine: Engine, count: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=OUTPUTS, ignore_eos=True)
    prompts = [[5 + i, 6, 7, 8] for i in range(count)]
    engine.generate(prompts, params)
    best_s = float("inf")
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        engine.generate(prompts, params)
        best_s = min(best_s, time.perf_counter() - began_s)
    return count * OUTPUTS / best_s


def _pss_mib(pid: str) -> float:
    """Return the proportional share of the weights and of large private memory, which is the KV cache."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if (mapping := _MAPPING.match(line)) is not None:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            name = mapping[1]
            is_cache = not name and end - begin > 8 << 20
            counts = is_cache or "penstock-weights" in name or name.endswith(".weights")
        elif counts and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total / 1024


def _meetings(ranks: RankStats) -> str:
    if not ranks.num_meetings:
        return ""
    per_meeting = 1e6 / ranks.num_meetings
    times = zip(ranks.waited_s, ranks.exchanged_s, strict=True)
    return ", ".join(f"{per_meeting * waited:.0f} + {per_meeting * exchanged:.0f}" for waited, exchanged in times)


def _over_http(model: str, settings: dict[str, Any]) -> Iterator[str]:
    """Yield what `penstock serve` does with the mix of the benchmarks, with and without ranks. It has no goal."""
    found: dict[str, dict[str, float]] = {}
    for name, shape in SHAPES.items():
        env = {f"PENSTOCK_NODE_{field.upper()}": str(value) for field, value in (settings | shape).items()}
        command = [sys.executable, "-m", "penstock", "serve", "{weights}", "--ephemeral", "--port", "{port}"]
        spec = Spec("mix", model, {"command": command, "ready": "/ready", "env": env}, spawned_s=time.monotonic())
        with open_session(spec) as session:
            found[name] = measure(session, spec)
    yield "**Over HTTP**: 64 requests at once to `penstock serve`, with prompts of 16 to 512 and outputs of 16 to 256"
    yield "tokens. Gateway, Redis and the client use the same cores."
    yield ""
    yield "| | output tokens/s | first token p50, s | between tokens p50, ms |"
    yield "|---|---|---|---|"
    for name, run in found.items():
        yield f"| {name} | {run['tokens_per_s']:.0f} | {run['ttft_p50_ms'] / 1000:.2f} | {run['itl_p50_ms']:.0f} |"


if __name__ == "__main__":
    main()
