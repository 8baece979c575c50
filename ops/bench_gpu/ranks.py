"""Checks of ranks that compute a model together: NCCL inside of graphs, and two ranks on one GPU or on two.

python -m bench_gpu.ranks           on one GPU: a group of one rank, then two ranks as threads, without NCCL
python -m bench_gpu.ranks --two     on two GPUs: a process for each. This has never run
python -m bench_gpu.ranks --engine  on two GPUs: an engine whose second rank is killed. This has never run
python -m bench_gpu.ranks --dry     on the CPU by Triton's interpreter; with --two and --engine by gloo

Results go to build/bench-gpu/ranks-one.json, ranks-two.json and ranks-engine.json, or to the folder of --out. A run
that ends early keeps what it has. --engine needs `pip install 'penstock-llm[gpu]'`, the others torch,
triton and numpy alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from bench_gpu.model_checks import BOUNDS, check_equal, check_graphs
from bench_gpu.models import BLOCK_SIZE, Options, make_model, parts_of, random_weights, spec_of
from bench_gpu.plans import Ints, plan_of
from bench_gpu.reference import reference_logits
from bench_gpu.verdict import WrongResultError, judge, judge_equal
from penstock.gpu_node.model.architecture.rank_part import RankPart
from penstock.gpu_node.model.architecture.spec import MATRICES, LayerSpec, ModelSpec
from penstock.gpu_node.model.gpu.adapters import GpuAdapters
from penstock.gpu_node.model.gpu.decoder import GpuDecoder, GpuWeights
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.kv_pool import KvLayout, KvPool
from penstock.gpu_node.model.gpu.linear import HEAD_ROWS, EmbeddingTable, PlainLinear, pad_rows
from penstock.gpu_node.model.gpu.runner import GpuRunner, Limits
from penstock.gpu_node.model.protocol import CacheSizes, MatrixName
from penstock.gpu_node.model.torch_common.layers import DecoderWeights, LayerWeights, Norm
from penstock.gpu_node.model.torch_common.ranks import (
    ONE_RANK,
    Communicator,
    Joining,
    RankLinks,
    join,
    join_gpus,
    leave_gpus,
    open_store,
)

Rows = Iterator[dict[str, Any]]
SIZE = 2
LOOPBACK = "127.0.0.1"
_NUM_TOKENS = 40
_NUM_EXCHANGES = 64
"""In the graph that is timed."""
_TIMED_ROWS = (1, 64, 512, 2048)
_PATIENCE_S = 300.0
"""For two processes, and for an engine that has lost a rank."""


def check(name: str, spec: ModelSpec, device: Device, rows: int) -> Rows:
    """Yield the results of all checks that one GPU can run."""
    yield from check_group_of_one(name, spec, device, rows)
    yield from check_threads(name, spec, device)


def check_group_of_one(name: str, spec: ModelSpec, device: Device, rows: int) -> Rows:
    """Compare a runner whose graphs contain NCCL's exchanges, with a single rank, with one that has none."""
    dtype = torch.bfloat16 if device.is_gpu else torch.float32
    with _group_of_one(device) as ranks:
        models = []
        for each in (ranks, ONE_RANK):
            torch.manual_seed(0)
            usual: dict[str, Any] = {"dtype": dtype, "max_num_seqs": rows, "max_model_len": 512}
            options = Options(**usual, num_blocks=40 * rows, ranks=each)
            models.append(make_model(f"{name}, a group of one rank", spec, device, options))
        try:
            yield from check_equal(f"{name}: a group of one rank = no group", models[0], models[1], 20)
            yield from check_graphs(models[0], 20)
        finally:
            # NCCL's connections may not end before the graphs that contain them.
            models.clear()
            gc.collect()


def check_threads(name: str, spec: ModelSpec, device: Device) -> Rows:
    """Compare the logits of two ranks, threads that share the device, with a decoder in float64."""
    from fixtures.turn_ranks import TurnRanks, on_all_ranks

    dtype = torch.bfloat16 if device.is_gpu else torch.float32
    whole, group = _weights(spec, device, dtype), TurnRanks.group(SIZE)
    with torch.inference_mode():
        runners = on_all_ranks(SIZE, lambda rank: _runner(whole, spec, group[rank], device, graphs=False))
        got, other = on_all_ranks(SIZE, lambda rank: _logits(runners[rank], spec))
    yield judge_equal(f"{name}: the logits of both ranks", torch.from_numpy(other), torch.from_numpy(got))
    yield judge(f"{name}: logits of two ranks", torch.from_numpy(got), _reference(whole, spec, device), BOUNDS[dtype])


def check_processes(rank: int, port: int, name: str, *, dry: bool) -> Rows:
    """Compare the logits and tokens of two ranks in two processes; rank 0 yields the results."""
    spec, device = spec_of(name), Device(torch.device("cpu" if dry else f"cuda:{rank}"))
    dtype = torch.float32 if dry else torch.bfloat16
    if not dry:
        torch.cuda.set_device(device.torch)
    with _joined(Joining(rank, SIZE, 1, SIZE, LOOPBACK, LOOPBACK, port, "bench"), device) as links:
        whole = _weights(spec, device, dtype)
        runner = _runner(whole, spec, links.tensor, device, graphs=True)
        got = torch.from_numpy(_logits(runner, spec))
        tokens = torch.from_numpy(np.stack(list(_tokens(runner, spec))))
        both = links.world.all_gather(tokens).view(SIZE, *tokens.shape)
        if rank == 0:
            yield judge(f"{name}: logits of two processes", got, _reference(whole, spec, device), BOUNDS[dtype])
            yield judge_equal(f"{name}: the tokens of both", both[1], both[0])
        for num_rows in _TIMED_ROWS if device.is_gpu else ():
            sum_us = _sum_us(links.tensor, num_rows, spec, device)
            if rank == 0:
                yield {"check": f"a sum of {num_rows} rows of {spec.hidden_size} in a graph", "us": sum_us}
        del runner
        gc.collect()


def check_engine(*, dry: bool) -> Rows:
    """Compare greedy tokens before and after the second rank of an engine is killed; a third engine has one rank."""
    from penstock.contract.job import SamplingParams
    from penstock.gpu_node.engine import Engine

    shape: dict[str, Any] = {"num_kv_blocks": 24, "max_num_batched_tokens": 32, "max_model_len": 96} if dry else {}
    settings: dict[str, Any] = {"runner": "gpu", "load_format": "dummy", "dtype": "float32", "max_num_seqs": 4}
    settings |= shape
    name, given = ("tiny" if dry else "llama-1b"), SamplingParams(temperature=0.0, max_tokens=2 if dry else 64)

    def tokens(engine: Engine) -> list[tuple[int, ...]]:
        return [one.choices[0].token_ids for one in engine.generate([[5, 6, 7], [8, 9]], given)]

    engine: Any = Engine(name, tensor_parallel_size=SIZE, rank_stall_s=60, **settings)
    before = tokens(engine)
    ranks = engine.stats().ranks
    yield {"check": f"{name}: bytes by rank", "weights": ranks.weight_bytes, "kv": ranks.kv_bytes}
    os.kill(engine._runner.rank_pids[0], signal.SIGKILL)
    begun_s = time.perf_counter()
    while engine.stats().ranks.num_starts < SIZE:
        if time.perf_counter() - begun_s > _PATIENCE_S:
            raise TimeoutError(f"the ranks were not started again within {_PATIENCE_S:g} s")
        if engine.has_work():
            engine.step()
        time.sleep(0.01)
    took_s = time.perf_counter() - begun_s
    yield _same(f"{name}: tokens after a loss", tokens(engine), before) | {"started again after s": took_s}
    engine._runner.close()
    yield _same(f"{name}: tokens of one rank", tokens(Engine(name, **settings)), before)


def _same(check: str, got: object, want: object) -> dict[str, Any]:
    """Return a result. Raises WrongResultError if two are not equal."""
    if got != want:
        raise WrongResultError(f"{check}: {got} instead of {want}")
    return {"check": check, "equal": True}


@contextmanager
def _joined(joining: Joining, device: Device, store: Any = None) -> Iterator[RankLinks]:
    """Join the other ranks, by NCCL if they have GPUs."""
    is_lost = True  # After an error: another rank would wait for this one, and this one for it.
    try:
        yield (
            join_gpus(joining, nullcontext(), device.torch, store)
            if device.is_gpu
            else join(joining, nullcontext(), store)
        )
        is_lost = False
    finally:
        leave_gpus(is_lost=is_lost)


@contextmanager
def _group_of_one(device: Device) -> Iterator[Communicator]:
    # NCCL wants the device's number.
    own = Device(torch.device("cuda", torch.cuda.current_device())) if device.is_gpu else device
    store, port = open_store(LOOPBACK, 1)
    with _joined(Joining(0, 1, 1, 1, LOOPBACK, LOOPBACK, port, "bench"), own, store) as links:
        yield links.tensor


def _sum_us(ranks: Communicator, num_rows: int, spec: ModelSpec, device: Device) -> float:
    """Return the microseconds of one sum of rows in a graph."""
    x = torch.zeros(num_rows, spec.hidden_size, dtype=torch.bfloat16, device=device.torch)

    def work() -> None:
        for _ in range(_NUM_EXCHANGES):
            ranks.sum(x)

    replay, _ = device.capture(work, None)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    replay()
    begin.record()
    for _ in range(10):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (10 * _NUM_EXCHANGES)


def _weights(spec: ModelSpec, device: Device, dtype: torch.dtype) -> GpuWeights:
    torch.manual_seed(0)
    return random_weights(spec, Options(dtype=dtype), device.torch)


def _runner(whole: GpuWeights, spec: ModelSpec, ranks: Communicator, device: Device, *, graphs: bool) -> GpuRunner:
    """Return the runner of one rank."""
    part = RankPart(spec, ranks.rank, ranks.size, vocab_multiple=HEAD_ROWS)
    length, num_blocks = 2 * _NUM_TOKENS, 24
    decoder = GpuDecoder(part.spec, cut(whole, part), length, part=part, ranks=ranks)
    layout = KvLayout(part.spec, BLOCK_SIZE, whole.dtype)
    return GpuRunner(
        decoder,
        GpuAdapters(part.spec, 0, 8, whole.dtype, device),
        KvPool(layout, num_blocks, 0, device),
        CacheSizes(num_blocks, 0, layout.block_bytes),
        Limits(2, length, BLOCK_SIZE, enforce_eager=not graphs),
        device,
    )


def _ids(spec: ModelSpec) -> Ints:
    return np.random.default_rng(0).integers(0, spec.vocab_size, _NUM_TOKENS).astype(np.int32)


def _reference(whole: DecoderWeights, spec: ModelSpec, device: Device) -> Tensor:
    return reference_logits(spec, whole, torch.from_numpy(_ids(spec).astype(np.int64)).to(device.torch)).cpu()


def _tables() -> Ints:
    return np.arange(1, 17, dtype=np.int32).reshape(2, 8)


def _logits(runner: GpuRunner, spec: ModelSpec) -> NDArray[np.float32]:
    """Return the logits of one sequence, in a chunk and then token by token."""
    ids, cut_at, none = _ids(spec), _NUM_TOKENS - 3, np.zeros(0, np.int64)
    chunks = [(0, cut_at), *((at, at + 1) for at in range(cut_at, _NUM_TOKENS))]
    plans = (plan_of([ids[first:end]], np.array([first]), _tables()[:1], none) for first, end in chunks)
    return np.concatenate([runner.logits(plan) for plan in plans])


def _tokens(runner: GpuRunner, spec: ModelSpec) -> Iterator[Ints]:
    """Yield the tokens of two sequences, which each step gets from the step before."""
    ids, both = _ids(spec), np.arange(2)
    starts, length = np.zeros(2, np.int64), _NUM_TOKENS // 2
    yield runner.submit(plan_of([ids[:length], ids[length:]], starts, _tables(), both)).result().tokens
    for step in range(8):
        plan = plan_of([np.array([-1], np.int32), np.array([-2], np.int32)], starts + length + step, _tables(), both)
        yield runner.submit(plan).result().tokens


def cut(whole: GpuWeights, part: RankPart) -> GpuWeights:
    """Return a rank's part of unquantized weights."""

    def matrix(layer: LayerSpec, name: MatrixName, kept: Any) -> PlainLinear:
        firsts = accumulate((rows for _, rows in part.whole.parts_of(layer, name)), initial=0)
        rows = np.concatenate([first + own for first, own in zip(firsts, part.rows_of(layer, name), strict=False)])
        columns, at = part.columns_of(layer, name), torch.from_numpy(rows).long().to(kept.weight.device)
        is_summed = len(columns) < kept.weight.shape[1]
        bias = None if kept.bias is None or (is_summed and part.rank) else kept.bias[at]
        return PlainLinear(kept.weight[at, columns.start : columns.stop].contiguous(), bias)

    def norms(of: LayerSpec, layer: LayerWeights) -> tuple[Norm, Norm] | None:
        attention, _ = parts_of(of)
        if layer.head_norms is None or not attention.joint_head_norms:
            return layer.head_norms
        both = zip(layer.head_norms, (part.queries(attention), part.keys(attention)), strict=True)
        q, k = (replace(norm, weight=norm.weight[own.start : own.stop]) for norm, own in both)
        return q, k

    def layer_of(of: LayerSpec, layer: LayerWeights) -> LayerWeights:
        matrices: dict[str, Any] = {name: matrix(of, name, getattr(layer, name)) for name in MATRICES}
        return replace(layer, head_norms=norms(of, layer), **matrices)

    def table(weight: Tensor) -> Tensor:
        return pad_rows(weight[part.vocab.start : part.vocab.stop], part.vocab_width)

    head: Any = whole.head
    return GpuWeights(
        EmbeddingTable(table(whole.embedding.weight)),
        tuple(map(layer_of, part.whole.layers, whole.layers)),
        whole.final_norm,
        PlainLinear(table(head.weight), None),
    )


def main() -> None:
    """Run the checks; exit code 1 at a wrong result."""
    parser = argparse.ArgumentParser(prog="bench_gpu.ranks")
    parser.add_argument("--dry", action="store_true", help="on the CPU by Triton's interpreter, tiny")
    parser.add_argument("--two", action="store_true", help="two processes with a GPU each")
    parser.add_argument("--engine", action="store_true", help="an engine of two ranks, of which one is killed")
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu"), help="where results go")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.dry:
        _interpret()
    else:
        _check_gpus(SIZE if given.two or given.engine else 1)
    name = "tiny" if given.dry else "qwen3-0.6b"
    results = Results(given.out / f"ranks-{'two' if given.two else 'engine' if given.engine else 'one'}.json")
    if given.rank is not None:
        rows = check_processes(given.rank, given.port, name, dry=given.dry)
        results.add(rows) if given.rank == 0 else list(rows)
    elif given.two:
        _run_two(given.out, dry=given.dry)
    elif given.engine:
        with _mended() if given.dry else nullcontext():
            results.add(_named_imports(check_engine(dry=given.dry)))
    else:
        device = Device(torch.device("cpu" if given.dry else "cuda"))
        results.add(check(name, spec_of(name), device, 2 if given.dry else 64))


def _check_gpus(count: int) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --dry runs this on the CPU, tiny")
    if (found := torch.cuda.device_count()) < count:
        raise SystemExit(f"this needs {count} GPUs, torch sees {found}")


def _named_imports(rows: Rows) -> Rows:
    """Name the package that an engine needs and that is not installed."""
    try:
        yield from rows
    except ModuleNotFoundError as error:
        raise SystemExit(f"--engine needs {error.name}: pip install 'penstock-llm[gpu]'") from error


class Results:
    """Prints results, and keeps a file of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
        self._found: dict[str, Any] = {"gpus": gpus, "versions": versions, "rows": []}

    def add(self, rows: Rows) -> None:
        """Take results as they come. Ends the program with exit code 1 at a wrong one; other errors are raised."""
        try:
            for row in rows:
                self._found["rows"].append(row)
                self._write()
                print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        except WrongResultError as error:
            self._found["wrong"] = str(error)
            raise SystemExit(f"wrong result: {error}") from error
        except BaseException as error:
            self._found["failed"] = repr(error)
            raise
        finally:
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found, indent=1) + "\n")


def _interpret() -> None:
    """Use Triton's interpreter, which Triton chooses when it is imported: this starts the program again for that."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "bench_gpu.ranks", *sys.argv[1:]])
    from fixtures.interpreter import mend

    mend()


def _mended() -> AbstractContextManager[None]:
    from fakes.runners.mended_rank import mended_ranks

    return mended_ranks()


def _run_two(out: Path, *, dry: bool) -> None:
    """Run both ranks. If one fails, the other one is killed: it would wait for minutes."""
    _store, port = open_store(LOOPBACK, SIZE)  # It ends with this process.
    command = [sys.executable, "-m", "bench_gpu.ranks", "--two", *(["--dry"] * dry), "--out", str(out)]
    ranks = [Popen([*command, "--port", str(port), "--rank", str(rank)]) for rank in range(SIZE)]
    ends_s = time.monotonic() + _PATIENCE_S
    try:
        while None in (codes := [rank.poll() for rank in ranks]):
            if any(codes):
                break
            if time.monotonic() > ends_s:
                raise SystemExit(f"the ranks did not end within {_PATIENCE_S:g} s")
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        failed = [number for number, code in enumerate(codes) if code]
        raise SystemExit(f"rank {failed[0]} ended with {codes[failed[0]]}; its error is above")


if __name__ == "__main__":
    main()
