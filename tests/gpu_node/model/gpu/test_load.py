"""Models that the GPU runner refuses, and the size of its KV cache."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fixtures.plans import Track, plan_of
from fixtures.random_families import make_family_model
from fixtures.sampling import rows_of

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.families import family_of
from penstock.gpu_node.model.architecture.spec import state_bytes
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.gpu import load
from penstock.gpu_node.model.gpu.decoder import GpuDecoder
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.graphs import GraphShapes
from penstock.gpu_node.model.gpu.inputs import FIRST_ROWS
from penstock.gpu_node.model.gpu.kv_pool import KvLayout, KvPool
from penstock.gpu_node.model.gpu.linear import padded_head
from penstock.gpu_node.model.gpu.profile import GraphMemory, bytes_left, run_largest_step
from penstock.gpu_node.model.gpu.weights import StoredLinearLoader, load_weights
from penstock.gpu_node.model.loading.load import find_model, load_model
from penstock.gpu_node.model.loading.plan import sizes_of
from penstock.gpu_node.model.loading.state_slots import with_state_slots
from penstock.gpu_node.model.protocol import NO_ADAPTER, CacheSizes

GIB = 1 << 30


def _load(folder: Path, **options: Any) -> None:
    plain: dict[str, Any] = {"runner": "gpu", "num_kv_blocks": 4, "max_model_len": 64, "max_num_seqs": 2}
    load_model(str(folder), runner_options(**plain | options), lambda *_: None)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"quantization": "int8_group"}, "int8_group .* supported: auto, none, int8, int4 or fp8"),
        ({"cpu_offload_gib": 1.0}, "cpu_offload_gib"),
        ({"deterministic": True, "quantization": "fp8"}, "deterministic needs quantization none or int8"),
    ],
)
def test_unsupported_settings_are_refused_by_name(options: dict[str, Any], name: str, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        _load(tiny_model, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is there")
def test_gpu_runner_is_refused_without_a_gpu(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="no CUDA device"):
        _load(tiny_model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is there")
def test_a_gpu_by_its_number_is_not_replaced_by_the_interpreter(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="runner cuda:1: torch sees no CUDA device") as refused:
        _load(tiny_model, runner="cuda:1")
    assert refused.value.param == "runner"


@pytest.mark.parametrize(("count", "seen"), [(1, "cuda:0"), (4, "cuda:0 to cuda:3")])
def test_a_gpu_that_is_not_there_is_named(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, count: int, seen: str
) -> None:
    for name, value in {"is_available": True, "device_count": count}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(load, "_avoid_fragments", lambda: None)
    with pytest.raises(ConfigError, match=f"runner cuda:4: there is no such GPU; this process sees {seen}$"):
        _load(tiny_model, runner="cuda:4")


def test_the_gpu_of_a_number_is_the_current_one_of_each_thread_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    facts: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_capability": lambda _: (9, 0),
        "get_device_name": lambda _: "H100",
        "set_device": chosen.append,
        "Stream": lambda _: None,
    }
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(load, "_avoid_fragments", lambda: None)
    device = Device(load.gpu_of(1))
    device.make_current()
    assert chosen == [torch.device("cuda", 1)]


def test_kv_cache_gets_what_the_largest_step_leaves_of_its_share_of_the_gpu() -> None:
    plain = {"total": 100 * GIB, "free": 80 * GIB, "peak": 6 * GIB, "utilization": 0.9}
    assert bytes_left(reserved=0, **plain) == (90 - 20 - 6) * GIB
    assert bytes_left(reserved=4 * GIB, **plain) == (90 - 20 - 2) * GIB
    assert bytes_left(reserved=9 * GIB, **plain) == (90 - 20) * GIB


@pytest.mark.parametrize("utilization", [0.5, 0.95])
def test_memory_of_a_gpu_is_filled_without_a_number_of_blocks(
    utilization: float, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the CPU were a GPU of 256 MiB, of which a quarter is used and the steps use another quarter each."""
    mib = 1 << 20
    given = _on_small_gpu(
        tiny_model, monkeypatch, gpu_memory_utilization=utilization, max_num_seqs=4, num_swap_blocks=3
    )
    decoder, layout = given[2], given[3]
    (attention,) = decoder.spec.attentions
    splits = 4 * 4 * 8 * attention.num_heads * (attention.head_dim + 1)
    shapes = GraphShapes(4, given[1].max_num_batched_tokens, has_adapters=False).all
    graphs = GraphMemory(
        num_graphs=len(shapes), num_rows=4, logits_width=384, itemsize=4, max_blocks=4, step_bytes=16 * mib + splits
    ).num_bytes
    marks, staged = 8 * FIRST_ROWS * decoder.spec.vocab_size, 3 * layout.block_bytes
    left = int(256 * mib * utilization) - 64 * mib - 16 * mib - splits - graphs - marks - staged
    if left < 2 * layout.block_bytes:
        with pytest.raises(ConfigError, match=f"gpu_memory_utilization {utilization} leaves no block"):
            load._sizes(*given)
    else:
        num_blocks = load._sizes(*given).num_device_blocks
        assert 0 <= left - (num_blocks + 1) * layout.block_bytes < layout.block_bytes


def test_states_count_in_the_share_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_family_model(tmp_path, "qwen3.5")
    options = {"gpu_memory_utilization": 0.95, "max_num_seqs": 4, "num_swap_blocks": 0, "enforce_eager": True}
    blocks = {}
    for num_slots in (1, 101):
        given = _on_small_gpu(folder, monkeypatch, state_slots=num_slots, **options)
        blocks[num_slots] = load._sizes(*given).num_device_blocks
    state, block = state_bytes(given[2].spec), given[3].block_bytes
    assert abs((blocks[1] - blocks[101]) * block - 100 * state) < block
    given = _on_small_gpu(folder, monkeypatch, state_slots=(192 << 20) // state, **options)
    sizes = rf"a block takes {block / 2**20:,.4g} MiB, and \d+ states of recurrent layers of {state / 2**20:,.4g} MiB"
    with pytest.raises(
        ConfigError, match=f"0.95 leaves no block of 16 tokens: {sizes} each take .* of the [0-9.]+ MiB"
    ):
        load._sizes(*given)


@pytest.mark.parametrize(("num_free", "slots", "seqs"), [(400, 8, 4), (20, 5, 2)])
def test_fewer_sequences_run_where_a_gpu_holds_fewer_states(
    num_free: int,
    slots: int,
    seqs: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The host's own memory, of which more is free, does not count."""
    folder = make_family_model(tmp_path, "qwen3.5")
    given = runner_options(runner="gpu", max_num_seqs=4, gpu_memory_utilization=0.9)
    found = find_model(str(folder), given, lambda *_: None)
    free = num_free * state_bytes(found.described.spec) + sizes_of(found.described, given, "gpu").weight_bytes
    monkeypatch.setattr(load, "free_bytes", lambda _: free)
    with caplog.at_level(logging.WARNING):
        options = with_state_slots(found, given)
    assert (options.state_slots, options.max_num_seqs) == (slots, seqs)
    assert any("max_num_seqs is lowered" in record.getMessage() for record in caplog.records) == (seqs < 4)


def test_graphs_take_their_pool_and_a_second_buffer_of_logits() -> None:
    """At Llama-3.1-8B's sizes the parts beside the pool are not small: 65 MiB of logits, 16 MiB of tables."""
    memory = GraphMemory(
        num_graphs=20, num_rows=256, logits_width=128_256, itemsize=2, max_blocks=8192, step_bytes=0
    ).num_bytes
    assert memory == 256 * 128_256 * 2 + 2 * 4 * 256 * 8192 + (64 << 20) + 20 * (2 << 20)


def test_size_in_gib_is_honored_or_refused_on_a_gpu(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    given = _on_small_gpu(tiny_model, monkeypatch, kv_cache_gib=mib / GIB, max_num_seqs=4)
    block_bytes = given[3].block_bytes
    assert load._sizes(*given).num_device_blocks == mib // block_bytes
    for gib in (1.0, 1e-9):
        options = runner_options(num_kv_blocks=None, kv_cache_gib=gib, max_num_seqs=4)
        with pytest.raises(ConfigError, match=f"kv_cache_gib {gib} does not fit: .* gpu_memory_utilization 0.9 leaves"):
            load._sizes(given[0], options, *given[2:])


def _on_small_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Return arguments of `_sizes`: the CPU as a GPU of 256 MiB, 64 of them used, where every step takes 16 MiB."""
    mib = 1 << 20
    for name, value in {"mem_get_info": (192 * mib, 256 * mib), "memory_reserved": 0, "memory_allocated": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(load, "peak_bytes", lambda *_: 16 * mib)
    device, layout, decoder = _parts(folder)
    device.is_gpu = True
    given = runner_options(**{"num_kv_blocks": None, "kv_cache_gib": None} | options)
    return SimpleNamespace(spec=decoder.spec, max_model_len=64), given, decoder, layout, device


def test_a_gpu_that_cannot_swap_serves_without_swap_space_unless_it_is_asked_for(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, options, _, layout, device = _on_small_gpu(tiny_model, monkeypatch)
    device.is_gpu = False

    def refuse(_: object, _memory: object) -> None:
        raise ConfigError("swap blocks: cannot be read")

    monkeypatch.setattr(Device, "check_host_address", refuse)
    sizes = CacheSizes(4, 3, layout.block_bytes)
    assert load._new_pool(options, layout, sizes, device)[1] == CacheSizes(4, 0, layout.block_bytes)
    with pytest.raises(ConfigError, match="cannot be read"):
        load._new_pool(runner_options(swap_space_gib=1.0), layout, sizes, device)


@pytest.mark.parametrize(("given", "want"), [({}, True), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, False)])
def test_segments_of_memory_may_grow_unless_the_operator_says_otherwise(
    given: dict[str, str], want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    # So that what the function sets goes with the test.
    monkeypatch.setattr(os, "environ", given.copy())
    load._avoid_fragments()
    assert (os.environ.get("PYTORCH_ALLOC_CONF") == "expandable_segments:True") == want


def _parts(folder: Path) -> tuple[Device, KvLayout, GpuDecoder]:
    config = json.loads((folder / "config.json").read_text())
    spec = family_of(config).spec_of(config)
    device = Device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    tensors = DecoderTensors(Checkpoint.open(ModelSource(folder)), spec)
    weights = load_weights(tensors, spec, torch.float32, lambda _: None, device.torch)
    return device, KvLayout(spec, 16, torch.float32), GpuDecoder(spec, weights, 64)


def test_the_largest_step_leaves_no_trace(tiny_model: Path) -> None:
    device, layout, decoder = _parts(tiny_model)
    pool = KvPool(layout, 1, 0, device)
    run_largest_step(decoder, pool, num_tokens=37, num_samples=2)
    assert not any(cache.k.any() or cache.v.any() for cache in pool.layers)


def test_largest_step_has_contexts_within_the_models_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases end where those do: the address behind them on a GPU need not be memory."""
    device, layout, decoder = _parts(make_family_model(tmp_path, "falcon rw", num_hidden_layers=1))
    contexts: list[list[int]] = []
    compute = decoder.hidden

    def watched(step: Any, *given: Any, **rest: Any) -> torch.Tensor:
        contexts.append(step.context_lens.tolist())
        return compute(step, *given, **rest)

    monkeypatch.setattr(decoder, "hidden", watched)
    run_largest_step(decoder, KvPool(layout, 1, 0, device), num_tokens=70, num_samples=2)
    assert contexts == [[64, 6]]


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # A captured step is all padding.
@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the interpreter's launches")
def test_loading_a_runner_compiles_all_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for the compiler delays all steps, for seconds."""
    from triton.runtime.interpreter import GridExecutor

    launched: set[tuple[str, frozenset[Any]]] = set()
    launch = GridExecutor.__call__

    def watched(self: Any, *args: Any, **constants: Any) -> None:
        launched.add((self.fn.__name__, frozenset(constants.items())))
        launch(self, *args, **constants)

    def capture(_device: Device, work: Callable[[], None], _pool: object) -> tuple[Callable[[], None], None]:
        """Run the work once, as the capture on a GPU does."""
        work()
        return work, None

    monkeypatch.setattr(GridExecutor, "__call__", watched)
    monkeypatch.setattr(Device, "capture", capture)
    options = runner_options(
        runner="gpu",
        quantization="int8",
        max_num_seqs=2,
        max_num_batched_tokens=70,
        lora_dir=tmp_path,
        max_loras=1,
        max_lora_rank=2,
    )
    folder = make_family_model(tmp_path, "llama", num_hidden_layers=1)
    runner: Any = load_model(str(folder), options, lambda *_: None).runner
    runner.compile_eager_steps()
    runner.compile_rest()
    ready = launched.copy()
    launched.clear()
    rows = rows_of(1, repetition_penalty=1.2, seen=[np.array([5], np.int32)], mask=[np.arange(384) > 7])
    for length, adapter in ((5, NO_ADAPTER), (20, 0), (70, 0)):
        track = Track([9] * length, [1, 2, 3, 4, 5], adapter=adapter)
        assert runner.submit(plan_of([(track, length)], rows, copies=[(1, 6)])).result().tokens[0] > 7
    assert {"_copy", "_mark", "_mask", "_shrink", "_expand", "_prefill", "draw_tokens"} <= {
        name for name, _ in launched
    }
    assert launched - ready == set()


def test_gpu_that_is_too_old_is_refused_by_name(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"is_available": True, "current_device": 0, "get_device_capability": (7, 5), "get_device_name": "Tesla T4"}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(load, "_avoid_fragments", lambda: None)
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5; at least 8\.0 is needed"):
        _load(tiny_model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_deterministic_runner_loads_in_float16_and_bfloat16(dtype: str, tiny_model: Path) -> None:
    _load(tiny_model, dtype=dtype, deterministic=True)


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4", "fp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_knows_the_bytes_of_the_weights(quantization: str, tied: bool, tmp_path: Path) -> None:
    """All tensors of the matrices; norms are left out."""
    folder = make_family_model(tmp_path, "qwen2", "bfloat16", tie_word_embeddings=tied)
    options = runner_options(runner="gpu", dtype="bfloat16", quantization=quantization)
    described = find_model(str(folder), options, lambda *_: None).described
    device = Device(torch.device("cpu"))
    keep = StoredLinearLoader(quantization, device)
    tensors = DecoderTensors(described.open_checkpoint(), described.spec)
    head = partial(padded_head, quantization=quantization)
    weights = load_weights(tensors, described.spec, torch.bfloat16, lambda _: None, device.torch, keep, tuple, head)
    products = [getattr(layer, name) for layer in weights.layers for name in ("qkv", "out", "mlp_in", "mlp_out")]
    kept = [getattr(one, field.name) for one in (*products, weights.head) for field in fields(one)]
    found = {id(one): one for one in (*kept, weights.embedding.weight) if one is not None and one.dim() > 0}
    biases = {id(one.bias) for one in products if one.bias is not None}
    assert sizes_of(described, options, "gpu").weight_bytes == sum(
        one.nbytes for name, one in found.items() if name not in biases
    )
