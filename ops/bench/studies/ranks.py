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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
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
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.kernels.cpu.build import library_path
from penstock.kernels.cpu.probe import best_isa, cpu_flags, cpu_vendor

RESULTS = Path(__file__).parents[1] / "results"
COMMAND = "PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.studies.ranks"
ROWS, COLUMNS, EXCHANGES = 16, 2048, 2000
OUTPUTS = 24
REPEATS = 8
BATCHES = (1, 16)
CORES = os.sched_getaffinity(0)
ONE, TWO = "one rank, two threads", "two ranks, one thread each"
SHAPES: dict[str, dict[str, Any]] = {
    "one rank, one thread": {"num_threads": 1},
    ONE: {"num_threads": 2},
    TWO: {"num_threads": 2, "tensor_parallel_size": 2},
}
PAUSE_S = 2.0
"""For other processes, between turns with a real-time priority."""
_REALTIME = (
    " The machine did other work meanwhile, so the threads that compute had a real-time priority (`--realtime`)."
)
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)$")


def main() -> None:
    """Measure exchanges, speed and memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="folder of a checkpoint in place of the 1B model")
    parser.add_argument("--quantization", default="int8_group")
    parser.add_argument("--realtime", action="store_true", help="measure speed on a machine that does other work")
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
        lines = list(_lines(model, args.quantization, realtime=args.realtime))
    (RESULTS / "ranks.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _keep_weights_in(folder: Path) -> None:
    """Let packed weights go with the study; the compiled kernels stay where they are."""
    kernels = cache_folder() / "native"
    folder.mkdir()
    (folder / "native").symlink_to(kernels)
    os.environ["PENSTOCK_CACHE"] = str(folder)


def _lines(model: Path, quantization: str, *, realtime: bool) -> Iterator[str]:
    machine = describe()
    settings: dict[str, Any] = {"runner": "native", "dtype": "bfloat16", "quantization": quantization}
    yield from (
        "# Ranks",
        "",
        f"{model.name}, {quantization}, {machine['cores']} cores of {machine['cpu']}, {machine['date']}, "
        f"{revision()}. `{COMMAND}`",
        "",
        f"**An exchange** of {ROWS} rows of {COLUMNS} numbers between two ranks, each on a thread: "
        f"{_exchange_us():.1f} µs; through gloo, an `all_gather` between two processes: {_gloo_us():.1f} µs.",
        "",
    )
    yield from _speeds(str(model), settings, realtime=realtime)
    yield ""
    yield from _over_http(str(model), settings, realtime=realtime)


def _exchange_us() -> float:
    """Return the time of one exchange: the median of several runs."""
    isa = best_isa(cpu_flags(), cpu_vendor())
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


def _speeds(model: str, settings: dict[str, Any], *, realtime: bool) -> Iterator[str]:
    """Yield a table of tokens a second and of memory."""
    sizes = {name: _sizes(model, settings | shape) for name, shape in SHAPES.items()}
    engines = {name: _engine(model, settings | shape) for name, shape in SHAPES.items()}
    rates = {count: _rates(engines, count, realtime=realtime) for count in BATCHES}
    yield (
        f"Tokens a second: the median of {REPEATS} runs of {OUTPUTS} tokens for each stream, all shapes by turns."
        f"{_REALTIME if realtime else ''}"
    )
    yield ""
    yield "| | " + " | ".join(f"{count} streams" for count in BATCHES) + " | PSS, MiB |"
    yield "|---" * (len(BATCHES) + 2) + "|"
    for name in engines:
        speeds = " | ".join(f"{median(rates[count][name]):.0f}" for count in BATCHES)
        yield f"| {name} | {speeds} | {', '.join(f'{size:.0f}' for size in sizes[name])} |"
    quotients = (
        median(two / one for two, one in zip(rates[count][TWO], rates[count][ONE], strict=True)) for count in BATCHES
    )
    yield f"| {TWO} ÷ {ONE} | {' | '.join(f'{quotient:.2f}' for quotient in quotients)} | |"
    for engine in engines.values():
        _runner_of(engine).close()


def _engine(model: str, settings: dict[str, Any]) -> Engine:
    engine = Engine(model, num_kv_blocks=256, **settings)
    _runner_of(engine).wait_until_packed()
    return engine


def _runner_of(engine: Engine) -> NativeRunner:
    if not isinstance(runner := engine._runner, NativeRunner):
        raise SystemExit("the native runner is needed")
    return runner


def _sizes(model: str, settings: dict[str, Any]) -> list[float]:
    """Return the MiB of each rank, after steps that read all weights."""
    engine = _engine(model, settings)
    _run(engine, max(BATCHES), 4)
    runner = _runner_of(engine)
    sizes = [_pss_mib(pid) for pid in ("self", *map(str, runner.rank_pids))]
    runner.close()
    del engine, runner
    ctypes.CDLL(None).malloc_trim(0)
    return sizes


def _rates(engines: dict[str, Engine], count: int, *, realtime: bool) -> dict[str, list[float]]:
    """Return the tokens a second of each turn."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(REPEATS):
        if realtime:
            time.sleep(PAUSE_S)
        with _undisturbed(engines.values()) if realtime else nullcontext():
            for name, engine in engines.items():
                os.sched_setaffinity(0, CORES)
                engine.bind_thread()
                _run(engine, count, 2)
                began_s = time.perf_counter()
                _run(engine, count, OUTPUTS)
                rates[name].append(count * OUTPUTS / (time.perf_counter() - began_s))
    os.sched_setaffinity(0, CORES)
    return rates


def _run(engine: Engine, count: int, num_outputs: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_outputs, ignore_eos=True)
    engine.generate([[5 + i, 6, 7, 8] for i in range(count)], params)


@contextmanager
def _undisturbed(engines: Iterable[Engine]) -> Iterator[None]:
    """Give all threads that compute a real-time priority for some seconds. Other processes get little of the cores."""
    pids = [os.getpid(), *(pid for engine in engines for pid in _runner_of(engine).rank_pids)]
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    computing = [
        int(task.name) for task in tasks if int(task.name) in pids or "penstock-cpu" in (task / "comm").read_text()
    ]
    try:
        for thread in computing:
            os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))
        yield
    finally:
        for thread in computing:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


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


def _over_http(model: str, settings: dict[str, Any], *, realtime: bool) -> Iterator[str]:
    """Yield what `penstock serve` does with the mix of the benchmarks, with and without ranks. It has no goal."""
    found: dict[str, dict[str, float]] = {}
    for name, shape in SHAPES.items():
        env = {f"PENSTOCK_NODE_{field.upper()}": str(value) for field, value in (settings | shape).items()}
        command = [sys.executable, "-m", "penstock", "serve", "{weights}", "--ephemeral", "--port", "{port}"]
        spec = Spec("mix", model, {"command": command, "ready": "/ready", "env": env}, spawned_s=time.monotonic())
        with open_session(spec) as session:
            found[name] = measure(session, spec)
    other = ", beside other work of the machine" if realtime else ""
    yield f"**Over HTTP**: 64 requests at once to `penstock serve`, on the same cores{other}."
    yield ""
    yield "| | output tokens/s | first token p50, s | between tokens p50, ms |"
    yield "|---|---|---|---|"
    for name, run in found.items():
        yield f"| {name} | {run['tokens_per_s']:.0f} | {run['ttft_p50_ms'] / 1000:.2f} | {run['itl_p50_ms']:.0f} |"


if __name__ == "__main__":
    main()
