"""Layers streamed from host memory give the same results as on the GPU, within the stated memory, without races."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.random_families import make_family_model
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.contract.errors import ConfigError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.linear import linear_of
from penstock.gpu_node.model.gpu.offload import OffloadedLayers
from penstock.gpu_node.model.torch_common.layers import LayerWeights, Norm

HIDDEN, NUM_LAYERS = 64, 7
CPU = torch.device("cpu")
GIB = 1 << 30


def _layer(quantization: str = "none", device: torch.device = CPU) -> LayerWeights:
    """A layer whose tensors fill whole lines of memory."""
    linear, norm = linear_of(quantization), Norm(torch.ones(HIDDEN), None, 1e-5)
    sizes = (HIDDEN, HIDDEN), (HIDDEN,)
    matrices = [linear(*(torch.randn(*size, device=device) for size in sizes)) for _ in range(4)]
    qkv, out, mlp_in, mlp_out = matrices
    return LayerWeights(norm, qkv, None, out, norm, mlp_in, mlp_out)


def _tensors(layer: LayerWeights) -> list[Tensor]:
    products: tuple[Any, ...] = (layer.qkv, layer.out, layer.mlp_in, layer.mlp_out)
    return [getattr(product, field.name) for product in products for field in fields(product)]


def _resident_bytes(layers: Sequence[LayerWeights]) -> int:
    """Return the bytes of device memory of the matrices, with shared memory counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for layer in layers for tensor in _tensors(layer)}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _run(layer: LayerWeights, x: Tensor) -> Tensor:
    for product in (layer.qkv, layer.out, layer.mlp_in, layer.mlp_out):
        x = torch.tanh(product(x))
    return x


def _offloaded(layers: Sequence[LayerWeights], count: int, device: Device) -> OffloadedLayers:
    size = sum(tensor.nbytes for tensor in _tensors(layers[0]))
    return OffloadedLayers(len(layers), (count - 0.5) * size / GIB, device, layers)


class _Streams(Device):
    """Two streams that only marks and holds put in order: clocks[a][b] is what of b's work a's next piece comes after.

    As in L. Lamport, "Time, clocks, and the ordering of events in a distributed system" (1978), with a clock for each.
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self.current = 0
        self.clocks = [[0, 0], [0, 0]]

    def record_event(self) -> Any:
        return _Point(self, self.clocks[self.current])

    @contextmanager
    def on_side(self) -> Iterator[None]:  # type: ignore[override]
        self.current = 1
        yield
        self.current = 0


class _Point:
    def __init__(self, streams: _Streams, clock: list[int]) -> None:
        self._streams = streams
        self._clock = tuple(clock)

    def hold(self) -> None:
        clock = self._streams.clocks[self._streams.current]
        clock[:] = map(max, clock, self._clock)


class _Watch(TorchDispatchMode):
    """Notes what memory streams read and write out of order."""

    def __init__(self, streams: _Streams) -> None:
        super().__init__()
        self._streams = streams
        self._reads: dict[int, list[int]] = {}
        self._writes: dict[int, list[int]] = {}
        self.races: list[str] = []
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream, clock = self._streams.current, self._streams.clocks[self._streams.current]
        clock[stream] += 1
        is_copy = func is torch.ops.aten.copy_.default
        self.num_copies += is_copy
        for i, tensor in enumerate(x for x in args if isinstance(x, Tensor)):
            place = tensor.untyped_storage().data_ptr()
            reads, writes = (marks.setdefault(place, [0, 0]) for marks in (self._reads, self._writes))
            is_write = is_copy and i == 0
            before = [*writes, *reads] if is_write else writes
            if any(done > clock[at % 2] for at, done in enumerate(before)):
                self.races.append(f"{func} of stream {stream}")
            (writes if is_write else reads)[stream] = clock[stream]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [3, 4, NUM_LAYERS])
def test_no_buffer_is_read_before_its_copy_nor_filled_before_it_was_read(count: int) -> None:
    layers, streams = [_layer() for _ in range(NUM_LAYERS)], _Streams()
    offloaded = _offloaded(layers, count, streams)
    passes = 3
    with _Watch(streams) as watch:
        for _ in range(passes):
            is_one_coming = []
            for layer in offloaded:
                _run(layer, torch.ones(2, HIDDEN))
                is_one_coming.append(streams.clocks[1][1] > streams.clocks[0][1])
            assert is_one_coming == [True] * (NUM_LAYERS - 1) + [False]
            # What is captured as a graph must come together in the stream that it began in.
            assert streams.clocks[0][1] == streams.clocks[1][1]
    assert watch.races == []
    assert watch.num_copies == passes * count


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_offloaded_matrices_are_correct_in_every_pass(quantization: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = [_layer(quantization, device) for _ in range(NUM_LAYERS)]
    x = torch.randn(3, HIDDEN, device=device)
    wants = [_run(layer, x) for layer in layers]
    offloaded = _offloaded(layers, 5, Device(device))
    next(iter(offloaded))  # a step that failed on its way
    for _ in range(2):
        for want, layer in zip(wants, offloaded, strict=True):
            assert torch.equal(_run(layer, x), want)
            if all(layer is not given for given in layers):
                for tensor in _tensors(layer):
                    tensor.view(torch.uint8).fill_(255)  # NaN, for a layer that reads it without a copy


def test_gpu_keeps_the_other_layers_and_two_buffers() -> None:
    given: list[weakref.ref[Tensor]] = []
    most = 0

    def read() -> Iterator[LayerWeights]:
        nonlocal most
        for _ in range(NUM_LAYERS):
            most = max(most, sum(matrix() is not None for matrix in given))
            layer = _layer()
            given.append(weakref.ref(_tensors(layer)[0]))
            yield layer
            del layer

    size = sum(tensor.nbytes for tensor in _tensors(_layer()))
    offloaded = OffloadedLayers(NUM_LAYERS, 4.5 * size / GIB, Device(CPU), read())
    assert _resident_bytes(list(offloaded)) == (NUM_LAYERS - 5 + 2) * size
    # Those that stay, evenly over the depth; while layers are read, none but those and the one on its way is there.
    assert [i for i, matrix in enumerate(given) if matrix() is not None] == [2, 5]
    assert most == 2


@pytest.mark.parametrize(("of_layer", "reason"), [(7.5, "more than the layers' matrices"), (1.5, "frees nothing")])
def test_offload_sizes_that_are_too_large_or_free_nothing_are_refused_by_name(of_layer: float, reason: str) -> None:
    layers = [_layer() for _ in range(NUM_LAYERS)]
    size = sum(tensor.nbytes for tensor in _tensors(layers[0]))
    with pytest.raises(ConfigError, match=f"cpu_offload_gib .* {reason}"):
        OffloadedLayers(NUM_LAYERS, of_layer * size / GIB, Device(CPU), layers)


def _matrices_gib(folder: Path) -> float:
    """Return the size of the layers' matrices in a float32 checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    return sum(tensor.nbytes for name, tensor in tensors.items() if "layers." in name and "norm" not in name) / GIB


def test_offloaded_weights_change_no_tokens(tmp_path: Path) -> None:
    folder = make_family_model(tmp_path, "llama", num_hidden_layers=3)

    def said(offload_gib: float) -> list[tuple[int, ...]]:
        config: dict[str, Any] = {"num_kv_blocks": 12, "max_model_len": 64, "max_num_seqs": 2}
        settings = EngineConfig(
            model=str(folder), runner="gpu", dtype="float32", block_size=8, cpu_offload_gib=offload_gib, **config
        )
        params = [SamplingParams(max_tokens=4, ignore_eos=True, seed=seed, temperature=seed * 1.0) for seed in (0, 1)]
        generations = Engine(settings).generate([[5, 6, 7], [9] * 11], params)
        return [generation.choices[0].token_ids for generation in generations]

    assert said(0.9 * _matrices_gib(folder)) == said(0.0)


def test_layers_that_are_larger_than_the_first_are_refused() -> None:
    layers = [_layer("int4"), *(_layer() for _ in range(NUM_LAYERS - 1))]
    with pytest.raises(ConfigError, match="cpu_offload_gib needs layers of equal size"):
        _offloaded(layers, 5, Device(CPU))
