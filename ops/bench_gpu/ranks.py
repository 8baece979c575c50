"""Checks of ranks that compute a model together: NCCL inside of graphs, and two ranks on one GPU or on two.

python -m bench_gpu.ranks           on one GPU: a group of one rank, then two ranks as threads, without NCCL
python -m bench_gpu.ranks --two     on two GPUs: a process for each. This has never run
python -m bench_gpu.ranks --dry     on the CPU by Triton's interpreter; with --two by gloo
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from bench_gpu.model_checks import BOUNDS, check_equal, check_graphs
from bench_gpu.models import BLOCK_SIZE, Options, make_model, random_weights, spec_of
from bench_gpu.plans import Ints, plan_of
from bench_gpu.reference import reference_logits
from bench_gpu.verdict import judge, judge_equal
from penstock.gpu_node.model.architecture.rank_part import RankPart
from penstock.gpu_node.model.architecture.spec import MATRICES, ModelSpec
from penstock.gpu_node.model.gpu.adapters import GpuAdapters
from penstock.gpu_node.model.gpu.decoder import GpuDecoder, GpuWeights
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.kv_pool import KvLayout, KvPool
from penstock.gpu_node.model.gpu.linear import HEAD_ROWS, EmbeddingTable, PlainLinear, pad_rows
from penstock.gpu_node.model.gpu.runner import GpuRunner, Limits
from penstock.gpu_node.model.protocol import CacheSizes, MatrixName
from penstock.gpu_node.model.torch_common.layers import DecoderWeights, LayerWeights, Norm
from penstock.gpu_node.model.torch_common.ranks import ONE_RANK, Communicator, ProcessRanks, joined, joined_gpus

Rows = Iterator[dict[str, Any]]
SIZE = 2
_NUM_TOKENS = 40
_NUM_EXCHANGES = 64
"""In the graph that is timed."""


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


def check_processes(rank: int, folder: Path, name: str, *, dry: bool) -> Rows:
    """Compare the logits and tokens of two ranks in two processes; rank 0 yields the results."""
    spec, device = spec_of(name), Device(torch.device("cpu" if dry else f"cuda:{rank}"))
    dtype = torch.float32 if dry else torch.bfloat16
    joining = joined(folder, rank, SIZE) if dry else joined_gpus(folder, rank, SIZE, device.torch)
    if not dry:
        torch.cuda.set_device(device.torch)
    with joining as links:
        whole = _weights(spec, device, dtype)
        runner = _runner(whole, spec, links.tensor, device, graphs=True)
        got = torch.from_numpy(_logits(runner, spec))
        tokens = torch.from_numpy(np.stack(list(_tokens(runner, spec))))
        both = links.world.all_gather(tokens).view(SIZE, *tokens.shape)
        if rank == 0:
            yield judge(f"{name}: logits of two processes", got, _reference(whole, spec, device), BOUNDS[dtype])
            yield judge_equal(f"{name}: the tokens of both", both[1], both[0])
        if device.is_gpu:
            sum_us = _sum_us(links.world, spec, device)
            if rank == 0:
                yield {"check": "a sum of 64 rows in a graph", "us": sum_us}
        del runner
        gc.collect()


@contextmanager
def _group_of_one(device: Device) -> Iterator[ProcessRanks]:
    # NCCL wants the device's number.
    given: dict[str, Any] = {"device_id": torch.device("cuda", torch.cuda.current_device())} if device.is_gpu else {}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.HashStore()  # type: ignore[attr-defined]
    backend = "nccl" if device.is_gpu else "gloo"
    distributed.init_process_group(backend, store=store, rank=0, world_size=1, **given)
    try:
        yield ProcessRanks()
    finally:
        distributed.destroy_process_group()


def _sum_us(ranks: Communicator, spec: ModelSpec, device: Device) -> float:
    """Return the microseconds of one sum of 64 rows in a graph."""
    x = torch.zeros(64, spec.hidden_size, dtype=torch.bfloat16, device=device.torch)

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

    def matrix(name: MatrixName, kept: Any) -> PlainLinear:
        firsts = accumulate((rows for _, rows in part.whole.parts_of(name)), initial=0)
        rows = np.concatenate([first + own for first, own in zip(firsts, part.rows_of(name), strict=False)])
        columns, at = part.columns_of(name), torch.from_numpy(rows).long().to(kept.weight.device)
        is_summed = len(columns) < kept.weight.shape[1]
        bias = None if kept.bias is None or (is_summed and part.rank) else kept.bias[at]
        return PlainLinear(kept.weight[at, columns.start : columns.stop].contiguous(), bias)

    def norms(layer: LayerWeights) -> tuple[Norm, Norm] | None:
        if layer.head_norms is None or not part.whole.joint_head_norms:
            return layer.head_norms
        q, k = (
            replace(norm, weight=norm.weight[own.start : own.stop])
            for norm, own in zip(
                layer.head_norms, (part.channels(part.heads), part.channels(part.kv_heads)), strict=True
            )
        )
        return q, k

    def layer_of(layer: LayerWeights) -> LayerWeights:
        matrices: dict[str, Any] = {name: matrix(name, getattr(layer, name)) for name in MATRICES}
        return replace(layer, head_norms=norms(layer), **matrices)

    def table(weight: Tensor) -> Tensor:
        return pad_rows(weight[part.vocab.start : part.vocab.stop], part.vocab_width)

    head: Any = whole.head
    return GpuWeights(
        EmbeddingTable(table(whole.embedding.weight)),
        tuple(map(layer_of, whole.layers)),
        whole.final_norm,
        PlainLinear(table(head.weight), None),
    )


def main() -> None:
    """Run the checks; exit code 1 at a wrong result."""
    parser = argparse.ArgumentParser(prog="bench_gpu.ranks")
    parser.add_argument("--dry", action="store_true", help="on the CPU by Triton's interpreter, tiny")
    parser.add_argument("--two", action="store_true", help="two processes with a GPU each")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.dry:
        _interpret()
    name = "tiny" if given.dry else "qwen3-0.6b"
    if given.rank is not None:
        _print(check_processes(given.rank, given.folder, name, dry=given.dry))
    elif given.two:
        _run_two(dry=given.dry)
    else:
        device = Device(torch.device("cpu" if given.dry else "cuda"))
        _print(check(name, spec_of(name), device, 2 if given.dry else 64))


def _interpret() -> None:
    """Use Triton's interpreter, which Triton chooses when it is imported: this starts the program again for that."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "bench_gpu.ranks", *sys.argv[1:]])
    from fixtures.interpreter import mend

    mend()


def _run_two(*, dry: bool) -> None:
    num_gpus = torch.cuda.device_count()
    if not dry and num_gpus < SIZE:
        raise SystemExit(f"--two needs {SIZE} GPUs, torch sees {num_gpus}")
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        command = [sys.executable, "-m", "bench_gpu.ranks", *(["--dry"] * dry), "--folder", folder]
        ranks = [Popen([*command, "--rank", str(rank)]) for rank in range(SIZE)]
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")


def _print(rows: Rows) -> None:
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
