"""On a GPU that works as late as possible, steps, swaps, adapters and offloaded layers give the same results.

Each wait for an event in the runner is omitted in turn. Then results differ, or pinned memory changes too early.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from bench_gpu.models import BLOCK_SIZE, Options, random_weights, spec_of
from bench_gpu.plans import Ints, decode_plan, plan_of
from fakes.runners.deferred_device import DeferredDevice
from fakes.runners.deferred_gpu import DeferredGpu
from fakes.runners.deferred_work import RaceError, Site
from fixtures.tiny_runners import changed_layer
from triton.runtime.errors import InterpreterError

from penstock.gpu_node.model import gpu as gpu_folder
from penstock.gpu_node.model.gpu.adapters import GpuAdapters
from penstock.gpu_node.model.gpu.decoder import GpuDecoder
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.kv_pool import KvLayout, KvPool
from penstock.gpu_node.model.gpu.linear import linear_of
from penstock.gpu_node.model.gpu.offload import OffloadedLayers
from penstock.gpu_node.model.gpu.runner import GpuRunner, Limits, StagingBuffer
from penstock.gpu_node.model.protocol import CacheSizes, LowRank, MatrixName, StepResult
from penstock.gpu_node.model.torch_common.layers import LayerWeights, Norm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in Triton's interpreter")

WHOLE = spec_of("tiny")
SMALL = changed_layer(WHOLE.layers[0], {"num_heads": 2, "num_kv_heads": 1}, {"intermediate_size": 32})
TINY = replace(WHOLE, layers=(SMALL,), hidden_size=32, vocab_size=64)
NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 3
HOST = NUM_BLOCKS + 1
"""The first host block."""
RANK, HIDDEN = 2, 64
WAITS = ("wait", "hold", "wait_for_swap_out")
Results = list[Any]
FOLDER = Path(gpu_folder.__file__).parent


class Gpu:
    """The CPU where all work completes at once, or a deferred GPU."""

    def __init__(self, deferred: DeferredGpu | None = None) -> None:
        self._deferred = deferred

    def device(self) -> Device:
        """Return a device with a side stream of its own."""
        return Device(torch.device("cpu")) if self._deferred is None else DeferredDevice(self._deferred)

    def __enter__(self) -> None:
        self._active = nullcontext() if self._deferred is None else self._deferred.activated()
        self._active.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._active.__exit__(*error)


def make_runner(gpu: Gpu, *, num_adapters: int = 0) -> GpuRunner:
    """Return a runner of one small layer with random weights."""
    torch.manual_seed(0)
    device, rows, length = gpu.device(), 3, 3 * BLOCK_SIZE
    weights = random_weights(TINY, Options(dtype=torch.float32), device.torch)
    layout = KvLayout(TINY, BLOCK_SIZE, torch.float32)
    return GpuRunner(
        GpuDecoder(TINY, weights, length),
        GpuAdapters(TINY, num_adapters, RANK, torch.float32, gpu.device()),
        KvPool(layout, NUM_BLOCKS, NUM_HOST_BLOCKS, device),
        CacheSizes(NUM_BLOCKS, NUM_HOST_BLOCKS, layout.block_bytes),
        Limits(rows, length, BLOCK_SIZE, max_num_batched_tokens=length),
        device,
    )


def tables_of(*blocks: list[int]) -> Ints:
    """Return block tables of one width; unused entries name the null block."""
    return np.array([[*some, 0, 0][:3] for some in blocks], np.int32)


def prompt(length: int, seed: int) -> Ints:
    """Return random tokens."""
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, length).astype(np.int32)


def previous(count: int) -> Ints:
    """Return placeholders for the tokens that the previous step samples."""
    return (-1 - np.arange(count)).astype(np.int32)


def found(result: StepResult) -> Results:
    """Return the arrays of a result."""
    arrays: Results = [result.tokens]
    if result.logprobs is not None:
        arrays += [result.logprobs.token_ids, result.logprobs.values]
    return arrays


def steps(gpu: Gpu) -> Results:
    """Run a prefill and decode steps, two in flight, some with log-probabilities or penalties; then three in flight."""
    runner, tables, starts = make_runner(gpu), tables_of([1, 2], [3], [4]), np.array([9, 6, 3])
    prompts, results = [prompt(length, length) for length in starts.tolist()], []
    with gpu:
        steps = deque([runner.submit(plan_of(prompts, np.zeros(3, np.int64), tables, np.arange(3)))])
        for at in range(3):
            wanted = {"num_logprobs": np.full(3, 2, np.int32)} if at == 1 else {}
            plan = plan_of(list(previous(3)[:, None]), starts + at, tables, np.arange(3), **wanted)
            steps.append(runner.submit(plan))
            results += found(steps.popleft().result())
        results += found(steps.popleft().result())
        plan = decode_plan(results[-1][1:2], int(starts[1]) + 4, tables[1:2], repetition_penalty=1.5)
        steps.append(runner.submit(replace(plan, sampling=replace(plan.sampling, seen=(prompts[1],)))))
        for at in range(2):
            steps.append(runner.submit(decode_plan(previous(1), int(starts[1]) + 5 + at, tables[1:2])))
        steps.popleft()  # The result of the third last step is never read, as after an error.
        results += [array for step in steps for array in found(step.result())]
        runner.submit(plan_of([prompts[0]], np.array([0]), tables[:1], np.array([0])))
        runner.submit(plan_of([prompts[1]], np.array([0]), tables[1:2], np.array([0])))
        results.append(runner.logits(plan_of([prompts[2]], np.array([0]), tables[2:], np.zeros(0, np.int64))))
    return results


def swaps(gpu: Gpu) -> Results:
    """Swap blocks out and in beside decode steps, and read a block from host memory as soon as it is there."""
    runner, long, short = make_runner(gpu), prompt(2 * BLOCK_SIZE, 1), prompt(4, 2)
    results: Results = []

    def decode(at: int, *copies: tuple[int, int], blocks: tuple[int, ...] = (3,)) -> None:
        plan = decode_plan(prompt(1, at), at + 1, tables_of([*blocks]))
        in_flight.append(runner.submit(replace(plan, copies=np.array(copies, np.int32).reshape(-1, 2))))
        if len(in_flight) == runner.max_in_flight:
            results.extend(found(in_flight.popleft().result()))

    with gpu:
        first = plan_of([long, short], np.zeros(2, np.int64), tables_of([1, 2], [3]), np.arange(2))
        in_flight = deque([runner.submit(first)])
        decode(4, (1, HOST))
        decode(5, (2, HOST + 1))
        # The last copy out and the copies in follow each other at once, to other blocks than before.
        decode(6, (HOST + 1, 5), (HOST, 4))
        decode(2 * BLOCK_SIZE, (3, HOST + 2), blocks=(4, 5, 6))
        decode(7, blocks=(HOST + 2,))
        decode(2 * BLOCK_SIZE, (4, HOST), blocks=(HOST, 5, 6))
        results += found(in_flight.popleft().result())
        rest = np.zeros(0, np.int64)
        results.append(runner.logits(plan_of([long[-1:]], np.array([2 * BLOCK_SIZE - 1]), tables_of([4, 5]), rest)))
    return results


@dataclass
class RandomAdapter:
    """Low-rank terms of every matrix."""

    seed: int
    digest: str = ""
    name: str = "random"

    def low_ranks(self, layer: int, matrix: MatrixName) -> tuple[LowRank, ...]:
        """Return one term for each part of a matrix."""
        rng, columns = np.random.default_rng([self.seed, layer, len(matrix)]), TINY.columns_of(SMALL, matrix)
        return tuple(
            LowRank(i, rng.standard_normal((RANK, columns), np.float32), rng.standard_normal((rows, RANK), np.float32))
            for i, (_, rows) in enumerate(TINY.parts_of(SMALL, matrix))
        )


def adapters(gpu: Gpu) -> Results:
    """Replace an adapter twice while a step with the first one is in flight."""
    runner, tables, ids = make_runner(gpu, num_adapters=1), tables_of([1], [2]), prompt(5, 1)
    rules = {"adapters": np.array([0, -1]), "num_logprobs": np.full(2, 3, np.int32)}
    plan = plan_of([ids, ids], np.zeros(2, np.int64), tables, np.arange(2), **rules)
    with gpu:
        handles = []
        for seeds in ((1,), (2, 3)):
            for seed in seeds:
                runner.set_adapter(0, RandomAdapter(seed))
            handles.append(runner.submit(plan))
        return [array for handle in handles for array in found(handle.result())]


def offload(gpu: Gpu) -> Results:
    """Stream three of four layers from the host, twice."""
    torch.manual_seed(0)
    norm, linear = Norm(torch.ones(HIDDEN), None, 1e-5), linear_of("none")

    def layer() -> LayerWeights:
        qkv, out, mlp_in, mlp_out = (linear(torch.randn(HIDDEN, HIDDEN), torch.randn(HIDDEN)) for _ in range(4))
        return LayerWeights(norm, qkv, None, out, norm, mlp_in, mlp_out)

    size = 4 * 4 * (HIDDEN + 1) * HIDDEN
    streamed = OffloadedLayers(4, 2.5 * size / (1 << 30), gpu.device(), [layer() for _ in range(4)])
    results, x = [], torch.randn(2, HIDDEN)
    with gpu:
        for _ in range(2):
            for weights in streamed:
                for product in (weights.qkv, weights.out, weights.mlp_in, weights.mlp_out):
                    x = torch.tanh(product(x))
                results.append(x)
    return [x.numpy() for x in results]


SCENARIOS: dict[str, Callable[[Gpu], Results]] = {
    scenario.__name__: scenario for scenario in (steps, swaps, adapters, offload)
}


@cache
def wanted(scenario: str) -> Results:
    """Return the results where all work completes at once."""
    return SCENARIOS[scenario](Gpu())


def is_wrong(scenario: str, *, side_is_early: bool, omitted: Site | None = None) -> bool:
    """Return whether a scenario gives other results on a deferred GPU, or races, without the waits at one place."""
    deferred = DeferredGpu(side_is_early=side_is_early)
    deferred.omitted = omitted
    try:
        with ExitStack() as stack:
            for owner, method in ((StagingBuffer, "wait"), (KvPool, "wait_for_swap_out")):
                stack.enter_context(patch.object(owner, method, deferred.unless_omitted(getattr(owner, method))))
            got = SCENARIOS[scenario](Gpu(deferred))
    except (RaceError, InterpreterError):
        return True  # The interpreter stops where all of a row's numbers are NaN.
    assert deferred.num_deferred > 0
    return any(not np.array_equal(x, y) for x, y in zip(got, wanted(scenario), strict=True))


@pytest.mark.parametrize("side_is_early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_results_do_not_depend_on_when_the_gpu_works(scenario: str, side_is_early: bool) -> None:
    assert not is_wrong(scenario, side_is_early=side_is_early)


def synchronizations() -> list[Site]:
    """Return all calls of the runner that wait for an event of the device, or let a stream wait for one."""
    # Left out: CUDA's own events, and the wait for masks, which another thread of the host writes.
    paths = [path for path in sorted(FOLDER.glob("*.py")) if path.name != "device.py"]
    return [
        Site(str(path), node.lineno)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
        if not ast.unparse(node.func).endswith(".masks.wait")
    ]


SCENARIOS_OF = {"in_flight.py": ["steps"], "runner.py": ["steps", "swaps"], "kv_pool.py": ["swaps"]}
"""The scenarios that need the synchronizations of a file; by default the one with its name."""


@pytest.mark.slow
@pytest.mark.parametrize("site", synchronizations(), ids=lambda site: f"{Path(site.file).name}:{site.line}")
def test_a_missing_synchronization_is_found(site: Site) -> None:
    name = Path(site.file).name
    scenarios = SCENARIOS_OF.get(name, [name.removesuffix(".py")])
    assert any(
        is_wrong(scenario, side_is_early=side_is_early, omitted=site)
        for scenario in scenarios
        for side_is_early in (False, True)
    )


def test_all_synchronizations_are_tried() -> None:
    assert len(synchronizations()) >= 12
