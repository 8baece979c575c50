"""Build the torch runner for a described model. Weights are loaded lazily, and mapped from files where possible."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from penstock.contract.errors import ConfigError, InvariantError
from penstock.gpu_node.model.architecture.rank_part import RankPart
from penstock.gpu_node.model.checkpoint.description import Description, cache_sizes, state_slots_of
from penstock.gpu_node.model.checkpoint.rank_tensors import RankTensors
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.checkpoint.stored_layer import StoredLayer, StoredLinear
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import CacheSizes
from penstock.gpu_node.model.torch_common.exchanges import Exchanges
from penstock.gpu_node.model.torch_common.layers import DecoderWeights, LayerWeights, Product
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.gpu_node.model.torch_common.positions import alibi_biases
from penstock.gpu_node.model.torch_common.ranks import ALONE, RankLinks
from penstock.gpu_node.model.torch_common.tensors import Converter, read_layer, read_norm, read_token_inputs, rows_of
from penstock.gpu_node.model.torch_cpu.attention import PagedAttention
from penstock.gpu_node.model.torch_cpu.decoder import Decoder
from penstock.gpu_node.model.torch_cpu.runner import TorchRunner
from penstock.kernels.cpu.probe import usable_cores


class Linear:
    """x @ weight.T + bias. Prepacks the weight if the CPU supports it, and then keeps no other copy.

    Packed by oneDNN, SmolLM2's bfloat16 products take 8 ms instead of 12 for one token, and 27 instead of 32 for 64.
    `functional.linear` reorders the weight at every call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in]; bias: [out]."""
        self._bias = bias
        self._prepacked = can_prepack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._prepacked else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in], where num_tokens may be 0; returns [num_tokens, out]."""
        if self._prepacked:
            return _multiply_prepacked(x, self._weight, self._bias)
        return functional.linear(x, self._weight, self._bias)


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """A fused matrix kept as separate parts, whose outputs are concatenated."""

    parts: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in]; returns [num_tokens, outputs of all parts]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


# Of one user, or of our own code and files.
@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Return whether weights of `dtype` can be prepacked on this machine, found by trying one.

    torch's own compiler emits these operations, but they are not public: a torch without them is not an error.
    """
    if dtype is not torch.bfloat16 or not torch.cpu._is_avx512_bf16_supported():
        return False
    weight = torch.eye(32, dtype=dtype)
    try:
        product = _multiply_prepacked(weight, torch.ops.mkldnn._reorder_linear_weight(weight), None)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product, weight)


def _multiply_prepacked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


class LayersAsNeeded:
    """A decoder's layers; each one is read on its first use and then kept."""

    def __init__(self, num_layers: int, read: Callable[[int], LayerWeights]) -> None:
        self._num_layers = num_layers
        # Keyed by id: tensor of a checkpoint.
        self._read = cache(read)

    def __iter__(self) -> Iterator[LayerWeights]:
        return map(self._read, range(self._num_layers))


def map_weights(
    tensors: DecoderTensors, part: RankPart, dtype: torch.dtype, progress: Callable[[float], None], *, is_lazy: bool
) -> DecoderWeights:
    """Find all tensors of a rank's part, read the head, and release the file pages that were copied.

    Each step reads only the embedding rows of its tokens. With `is_lazy`, the first step reads the layers. That is not
    possible for quantized checkpoints, because finding their tensors reads them. Raises ConfigError that names a
    missing tensor or one with another shape.
    """
    convert, spec = Converter(dtype), part.spec
    # The head comes first, while memory is free: packing may need two copies of it for a moment.
    head = _head(convert.tensor(tensors.head()), part.vocab_width) if part.is_last else _not_here
    tensors.release()

    def found() -> Iterator[StoredLayer]:
        for layer in range(spec.num_layers):
            yield tensors.layer(layer)
            progress((layer + 1) / spec.num_layers)

    def read(stored: StoredLayer) -> LayerWeights:
        layer = read_layer(stored, convert, spec.norm_eps, packed_or_mapped, spec.norm_offset)
        tensors.release()
        # Freed memory between matrices is a tenth of SmolLM2's weights. Only glibc can return it to the system.
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)
        return layer

    layers: Iterable[LayerWeights]
    if is_lazy:
        stored = tuple(found())
        layers = LayersAsNeeded(spec.num_layers, lambda i: read(stored[i]))
    else:
        layers = tuple(map(read, found()))
    final_norm = read_norm(tensors.final_norm(), convert, spec.norm_eps, spec.norm_offset)
    embedding = rows_of(tensors.embedding(), convert) if part.is_first else _not_here
    if part.size > 1:
        embedding = _rows_of_part(embedding, part.vocab, spec.hidden_size)
    inputs = read_token_inputs(tensors.token_inputs(), convert, spec.norm_eps, packed_or_mapped)
    positions = tensors.position_embedding()
    vectors = None if positions is None else convert.tensor(positions)
    return DecoderWeights(embedding, layers, final_norm, head, inputs, vectors)


def _head(rows: Tensor, num_rows: int) -> Linear:
    """Return the product with a head's rows and so many zero rows that all ranks' logits have the same width."""
    missing = num_rows - len(rows)
    return Linear(functional.pad(rows, (0, 0, 0, missing)) if missing else rows)


def _not_here(_: Tensor) -> Tensor:
    raise InvariantError("another stage has this matrix")


def packed_or_mapped(stored: StoredLinear, convert: Converter) -> Product:
    """Return a matrix: its mapped parts if they are all mapped and packing is not possible, else one fused copy."""
    if can_prepack(convert.dtype) or not all(map(convert.is_mapped, stored.weights)):
        return Linear(convert(stored.weights), convert(stored.biases) if stored.biases else None)
    biases: Iterable[Tensor | None] = (
        map(convert.tensor, stored.biases) if stored.biases else [None] * len(stored.weights)
    )
    parts = tuple(Linear(convert.tensor(weight), bias) for weight, bias in zip(stored.weights, biases, strict=True))
    return parts[0] if len(parts) == 1 else FusedLinear(parts)


def _rows_of_part(rows_of: Callable[[Tensor], Tensor], part: range, num_columns: int) -> Callable[[Tensor], Tensor]:
    """Return the rows of a part of the vocabulary; 0 for the ids of others, so that the ranks' sum is the embedding."""

    def rows(ids: Tensor) -> Tensor:
        at = ((ids >= part.start) & (ids < part.stop)).nonzero().flatten()
        embedded = torch.zeros(len(ids), num_columns)
        if len(at):
            embedded[at] = rows_of(ids[at] - part.start).float()
        return embedded

    return rows


log = logging.getLogger(__package__)


TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def fixed_options(described: Description, options: RunnerOptions) -> RunnerOptions:
    """Return the options with what this machine decides: all ranks of a model must have the same type and blocks."""
    name = choose_dtype(options.dtype, described.stored_dtype)
    sizes = cache_sizes(described.max_model_len, options, _token_bytes(RankPart(described.spec), TORCH_DTYPES[name]))
    blocks = {"num_kv_blocks": sizes.num_device_blocks, "num_swap_blocks": sizes.num_host_blocks}
    return options.model_copy(update={"dtype": name, **blocks})


def _token_bytes(part: RankPart, dtype: torch.dtype) -> int:
    """Return the bytes of a token in the caches of all ranks."""
    own = sum(2 * len(part.keys(one)) for layer in part.whole.layers if (one := layer.own_keys) is not None)
    return own * part.size * dtype.itemsize


@translate_out_of_memory()
def load_torch(
    described: Description, options: RunnerOptions, progress: Progress, links: RankLinks = ALONE
) -> tuple[TorchRunner, str]:
    """Return the runner of a rank, and the name of its arithmetic, which does not depend on the number of ranks.

    Raises ConfigError for a missing or unsupported feature.
    """
    if options.quantization not in ("auto", "none"):
        supported = (
            "runner torch has auto and none, the native runner has int8, int8_group and int4, a GPU int8, int4, fp8"
        )
        raise ConfigError(f"quantization {options.quantization} is not supported: {supported}")
    wanted, found = (
        (options.tensor_parallel_size, options.pipeline_parallel_size),
        (links.tensor.size, links.num_stages),
    )
    if wanted != found:
        raise ConfigError(f"tensor_parallel_size and pipeline_parallel_size are {wanted}, but the ranks joined {found}")
    set_threads(options, links.num_here)
    whole, name = described.spec, choose_dtype(options.dtype, described.stored_dtype)
    part = RankPart(whole, links.tensor.rank, links.tensor.size, links.stage, links.num_stages)
    spec, dtype = part.spec, TORCH_DTYPES[name]
    if options.kv_cache_dtype not in ("auto", name):
        supported = f"runner torch has {name}, the native runner has bfloat16 and int8"
        raise ConfigError(f"kv_cache_dtype {options.kv_cache_dtype} is not supported: {supported}")
    report, is_lazy = (lambda done: progress("load", done)), described.read_scaled is None
    weights = map_weights(RankTensors(described.open_checkpoint(), part), part, dtype, report, is_lazy=is_lazy)
    # The cache of all ranks, so that its size means the same whatever their number.
    sizes = cache_sizes(described.max_model_len, options, _token_bytes(part, dtype))
    widest = max(spec.hidden_size, *(mlp.num_experts for mlp in spec.mlps))
    largest = options.max_num_batched_tokens * widest
    decoder = Decoder(
        part,
        weights,
        described.max_model_len,
        Exchanges(links, largest),
        state_slots=state_slots_of(described, options),
    )
    runner = TorchRunner(
        part,
        decoder,
        _attention(described, options, part, sizes, dtype),
        sizes,
        block_size=options.block_size,
        dtype=dtype,
    )
    facts = {"dtype": name, "is_prepacked": can_prepack(dtype), "num_threads": torch.get_num_threads()}
    facts |= {"num_kv_blocks": sizes.num_device_blocks, "num_swap_blocks": sizes.num_host_blocks}
    log.info("torch runner", extra=facts | {"rank": links.world.rank, "num_ranks": links.world.size})
    if torch.cuda.is_available():
        log.warning("a CUDA device is visible, but this runner computes on the CPU")
    return runner, f"torch-{name}"


def set_threads(options: RunnerOptions, num_ranks: int = 1) -> None:
    """Set the threads that torch computes with, divided among the ranks of this process's machine."""
    # torch respects the CPU affinity, but not the CPU quota of a container.
    limit = max(1, usable_cores() - options.reserved_cores)
    num_threads = options.num_threads or min(torch.get_num_threads(), limit)
    torch.set_num_threads(max(1, num_threads // num_ranks))


def _attention(
    described: Description, options: RunnerOptions, part: RankPart, sizes: CacheSizes, dtype: torch.dtype
) -> PagedAttention:
    biases, biased = None, part.whole.biased_attention
    if biased is not None:
        heads = part.heads(biased)
        biases = torch.from_numpy(alibi_biases(biased, described.max_model_len)[heads.start : heads.stop])
    return PagedAttention(part.spec.attentions, sizes.num_blocks, options.block_size, dtype, biases)


def choose_dtype(wanted: str, stored: str) -> str:
    """Return the requested dtype; with `auto`, bfloat16 if the checkpoint has it and this CPU has AVX512-BF16.

    Otherwise `auto` means float32.
    """
    if wanted != "auto":
        return wanted
    capability = torch.backends.cpu.get_cpu_capability()
    chosen = stored if stored == "bfloat16" and torch.cpu._is_avx512_bf16_supported() else "float32"
    log.info("dtype is chosen", extra={"dtype": chosen, "stored": stored, "cpu": capability})
    return chosen
