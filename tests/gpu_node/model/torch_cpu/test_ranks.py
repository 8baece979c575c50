"""Ranks that compute a model together, as threads: the same logits as one rank, whatever the model is stored in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fakes.runners.torch_threads import torch_ranks_as_threads
from fixtures.gguf_file import write_gguf
from fixtures.plans import Track, logits_alone, logits_of_step, plan_of
from fixtures.quantized_checkpoint import LAYOUTS, TOKEN_IDS
from fixtures.random_families import FAMILIES, make_family_model
from fixtures.random_llama import make_llama
from fixtures.sampling import rows_of
from fixtures.thread_ranks import ThreadRanks
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.torch_common.tensors import Converter
from penstock.gpu_node.model.torch_cpu.runner import micro_batches

Quantized = Callable[[str, str], tuple[Path, NDArray[Any]]]
LENGTH = 40
MAX_ERROR = 1e-4
EACH_SHAPE = ("llama", "falcon 40b", "qwen3 moe")
"""Families that each run cuts into ranks alone and into stages alone too. Two stages of two ranks cut as both do."""


@pytest.fixture(autouse=True, scope="module")
def _threads() -> Iterator[None]:
    with torch_ranks_as_threads():
        yield


def _runner(folder: Path, size: int, **options: Any) -> Any:
    # No longer than the blocks: some families would have tables of angles for 131,072 positions.
    given = {
        "num_kv_blocks": 12,
        "max_model_len": 192,
        **({"tensor_parallel_size": size} if size > 1 else {}),
    } | options
    return load_model(str(folder), runner_options(**given), lambda *_: None).runner


def _logits(runner: Any) -> NDArray[np.float32]:
    """Return the logits of a sequence in chunks beside another one."""
    own, other = (
        Track(random.Random(seed).choices(range(384), k=LENGTH), range(1 + 5 * seed, 6 + 5 * seed)) for seed in (0, 1)
    )
    steps = [logits_of_step(runner, [(own, count), (other, 3)])[0] for count in (21, 1, 1, 17)]
    return np.concatenate(steps)


@cache
def _logits_of_one(folder: Path) -> NDArray[np.float32]:
    return _logits(_runner(folder, 1))


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        *(pytest.param((2, 2), name) for name in FAMILIES),
        *(
            pytest.param(sizes, name, marks=() if name in EACH_SHAPE else pytest.mark.slow)
            for sizes in ((2, 1), (1, 2))
            for name in FAMILIES
        ),
    ],
)
def test_logits_of_ranks_and_of_stages_are_those_of_one(
    name: str, sizes: tuple[int, int], family_folder: Callable[[str], Path]
) -> None:
    folder = family_folder(name)
    got = _logits(_runner(folder, sizes[0], pipeline_parallel_size=sizes[1]))
    np.testing.assert_allclose(got, _logits_of_one(folder), rtol=0, atol=MAX_ERROR)


@pytest.mark.parametrize(("name", "dtype"), [("falcon 7b", "float32"), ("olmo2", "float32"), ("llama", "bfloat16")])
def test_four_ranks_share_fewer_kv_heads(name: str, dtype: str, tmp_path: Path) -> None:
    folder = make_family_model(tmp_path, name, dtype)
    got, want = (_logits(_runner(folder, size, dtype=dtype)) for size in (4, 1))
    error = np.sqrt(np.square(got - want).mean() / want.var())
    assert error < (1e-5 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_checkpoints_are_cut(layout: str, quantized: Quantized) -> None:
    folder, want = quantized("llama", layout)
    np.testing.assert_allclose(logits_alone(_runner(folder, 2), TOKEN_IDS), want, rtol=0, atol=MAX_ERROR)


GGUF_FILES = [("llama", "llama", "q8_0"), ("phi3 with windows", "phi3", "q4_1"), ("qwen3 moe", "qwen3moe", "f16")]
OTHER_KINDS = (
    "q4_0",
    "q5_0",
    "q5_1",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
    "bf16",
    "f32",
)


@pytest.mark.parametrize(
    ("family", "architecture", "kind"),
    [*GGUF_FILES, *(pytest.param("llama", "llama", kind, marks=pytest.mark.slow) for kind in OTHER_KINDS)],
)
def test_gguf_files_are_cut_inside_of_blocks_too(family: str, architecture: str, kind: str, tmp_path: Path) -> None:
    """48 of 96 columns end in the middle of a block of 32, 128 of 256 in that of a larger one."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256} if kind.endswith(("_k", "_xs")) else {}
    folder = make_family_model(tmp_path / "model", family, **sizes)
    write_gguf(folder, folder / "model.gguf", architecture, kind)
    got, want = (_logits(_runner(folder / "model.gguf", size)) for size in (2, 1))
    np.testing.assert_allclose(got, want, rtol=0, atol=MAX_ERROR)


def test_a_rank_converts_only_its_own_rows_and_columns(
    family_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: set[tuple[int, ...]] = set()
    filled = Converter._filled

    def watched(self: Converter, parts: Any) -> torch.Tensor:
        shapes.update(part.shape for part in parts if len(part.shape) > 1 and "embed" not in part.name)
        return filled(self, parts)

    monkeypatch.setattr(Converter, "_filled", watched)
    _logits(_runner(family_folder("llama"), 2, dtype="bfloat16"))
    # Queries; keys and values; attention's output; gate and up; down.
    assert shapes == {(32, 64), (16, 64), (64, 32), (48, 64), (64, 48)}


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_that_does_not_divide_is_cut(size: int, tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    token_ids = [130, 0, 98, 99, 65, 66, 32, 33]
    got, want = (logits_alone(_runner(folder, ranks), token_ids) for ranks in (size, 1))
    assert got.shape == (8, 131)
    np.testing.assert_allclose(got, want, rtol=0, atol=MAX_ERROR)


def test_all_ranks_have_the_blocks_of_one_and_a_part_of_their_bytes(tiny_model: Path) -> None:
    one, two = (_runner(tiny_model, size, num_kv_blocks=None, kv_cache_gib=0.001) for size in (1, 2))
    assert two.cache_sizes == one.cache_sizes
    caches = [rank._caches[0].k for rank in two._ranks]
    assert [cache.nbytes for cache in caches] == [one._caches[0].k.nbytes / 2] * 2


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["llama", "qwen3 moe"])
def test_ranks_know_the_bytes_of_their_matrices(
    name: str, sizes: tuple[int, int], family_folder: Callable[[str], Path]
) -> None:
    runner = _runner(family_folder(name), sizes[0], pipeline_parallel_size=sizes[1])
    for rank in getattr(runner, "_ranks", [runner]):
        weights, part = rank._decoder._weights, rank._part
        matrices = [weights.head] if part.is_last else []
        for layer in weights.layers:
            matrices += [
                layer.qkv,
                layer.out,
                *(one for pair in map(layer.expert, range(_num_experts(part))) for one in pair),
            ]
            matrices += [] if layer.router is None else [layer.router]
        parts = [one for matrix in matrices for one in getattr(matrix, "parts", (matrix,))]
        table = 0 if not part.is_first or (part.is_last and part.whole.tied_head) else len(part.vocab)
        own = sum(one._weight.nbytes for one in parts) + 4 * table * part.whole.hidden_size
        assert rank.held.weights == own
        assert rank.held.kv_blocks == sum(cache.k.nbytes + cache.v.nbytes for cache in rank._caches)


def _num_experts(part: Any) -> int:
    return int(part.spec.mlps[0].num_experts)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1), "tensor_parallel_size 3: num_heads 4 is not a multiple of it"),
        ((4, 1), "tensor_parallel_size 4: intermediate_size 90 is not a multiple of it"),
        ((1, 3), "pipeline_parallel_size 3: the model has only 2 layers"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(sizes: tuple[int, int], message: str, tmp_path: Path) -> None:
    folder = make_family_model(tmp_path, "llama", intermediate_size=90, num_key_value_heads=1)
    with pytest.raises(ConfigError, match=message):
        _runner(folder, sizes[0], pipeline_parallel_size=sizes[1])


def test_kv_heads_that_no_rank_can_have_whole_are_refused(tmp_path: Path) -> None:
    folder = make_family_model(tmp_path, "llama", num_attention_heads=12, num_key_value_heads=6, hidden_size=96)
    with pytest.raises(ConfigError, match="4: num_kv_heads 6 is neither a multiple nor a divisor of it"):
        _runner(folder, 4)


def test_another_runner_refuses_stages_by_name(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size 2 needs runner torch"):
        _runner(tiny_model, 1, runner="native", dtype="bfloat16", pipeline_parallel_size=2)


PLACES = ("before the first exchange", "in the first layer", "in the last layer", "at the end")
FAILURES = [
    (sizes, rank, at)
    for sizes in ((2, 1), (1, 2), (2, 2))
    for rank in range(sizes[0] * sizes[1])
    for at in PLACES
    # Only the last stage has a head.
    if at != "at the end" or rank >= (sizes[1] - 1) * sizes[0]
]


@pytest.mark.parametrize(("sizes", "rank", "at"), FAILURES)
@pytest.mark.parametrize("error", [MemoryError("too large"), ValueError("odd")], ids=repr)
def test_a_step_that_fails_at_one_rank_fails_at_all_and_the_next_one_succeeds(
    sizes: tuple[int, int], rank: int, error: Exception, at: str, two_runners: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, runner = two_runners(*sizes)
    decoder = runner._ranks[rank]._decoder
    calls: list[None] = []
    name = {"before the first exchange": "_rotations", "at the end": "outputs"}.get(at, "_mlp")
    kept = getattr(decoder, name)

    def fail(*given: Any) -> Any:
        calls.append(None)
        if len(calls) == (2 if at == "in the last layer" else 1):  # or in the second micro-batch
            raise error
        return kept(*given)

    tracks = [Track([5, 7, 11], [1]), Track([13, 17], [2])]
    failing = type("Failing", (), {"items": fail})() if name == "_rotations" else fail
    with monkeypatch.context() as patched:
        patched.setattr(decoder, name, failing)
        # All ranks lack memory then; which of them says so does not matter.
        with pytest.raises(type(error), match="memory|too large" if isinstance(error, MemoryError) else "odd"):
            runner.submit(plan_of([(tracks[0], 3), (tracks[1], 2)], rows_of(2))).result()
    plan = plan_of([(tracks[0], 3), (tracks[1], 2)], rows_of(2))
    results = [each.submit(plan).result().tokens for each in (runner, whole)]
    np.testing.assert_array_equal(*results)


@pytest.fixture(scope="module")
def two_runners(tiny_model: Path) -> Callable[[int, int], tuple[Any, Any]]:
    """Return a runner of one rank and one of several."""

    @cache
    def make(size: int, num_stages: int) -> tuple[Any, Any]:
        return _runner(tiny_model, 1), _runner(tiny_model, size, pipeline_parallel_size=num_stages)

    return make


def test_sequences_that_share_a_block_which_a_step_fills_are_in_one_micro_batch() -> None:
    """The first fills blocks 1 and 2, which the fourth reads; the third reads a block that is full already."""
    tables = [[1, 2, 3], [4, 5, 0], [9, 6, 0], [1, 2, 7]]
    dones, counts = (0, 16, 16, 32), (40, 3, 1, 1)
    tracks = [Track([*range(48)], table, done=done) for table, done in zip(tables, dones, strict=True)]
    plan = plan_of(zip(tracks, counts, strict=True), rows_of(4))
    batches = micro_batches(plan, plan.sample_tokens.astype(np.int64), 16, 2)
    assert [batch.rows.tolist() for batch in batches] == [[0, 3], [1, 2]]
    assert [batch.tokens.tolist() for batch in batches] == [[39, 40], [2, 3]]
    assert [batch.plan.query_starts.tolist() for batch in batches] == [[0, 40, 41], [0, 3, 4]]
    assert batches[1].plan.block_tables.tolist() == tables[1:3]
    assert len(micro_batches(plan, plan.sample_tokens.astype(np.int64), 16, 9)) == 3


def test_sums_are_the_same_to_the_last_bit_on_each_rank() -> None:
    with ThreadPoolExecutor(3) as threads:

        def add(ranks: ThreadRanks) -> torch.Tensor:
            return [ranks.sum(torch.full((5,), 0.1 * step + ranks.rank / 3)) for step in range(20)][-1]

        first, *others = threads.map(add, ThreadRanks.group(3))
    assert all(torch.equal(first, other) for other in others)
