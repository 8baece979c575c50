"""Which numbers of ranks and replicas fit given devices, from a model's config and headers; no weight is read.

Bytes of weights are those of the runner's formats. What a step takes beside them on a GPU is an estimate: a node
measures it when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.rank_part import (
    CutRunner,
    Parallel,
    check_cuts,
    head_spans,
    kv_head_spans,
    panel_spans,
    stage_layers,
)
from penstock.gpu_node.model.architecture.spec import Attention, ModelSpec, state_bytes
from penstock.gpu_node.model.checkpoint.block_repacking import BLOCK, block_kind
from penstock.gpu_node.model.checkpoint.description import Description, cache_sizes
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor
from penstock.gpu_node.model.checkpoint.state_slots import StateFit, fit_states
from penstock.gpu_node.model.checkpoint.stored_kinds import Stored, StoredTensor
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.loading.load import FoundModel, special_features
from penstock.gpu_node.model.native.load import native_problem
from penstock.gpu_node.model.native.packing import packed_bytes, runs_of
from penstock.gpu_node.model.native.shapes import is_rotated, kv_head_bytes, windowed_tokens_of
from penstock.gpu_node.model.options import DEFAULT_KV_CACHE_GIB, RunnerOptions
from penstock.gpu_node.model.plan_records import Devices, ModelPlan, ShapeFit
from penstock.gpu_node.model.protocol import MatrixName
from penstock.kernels.cpu.probe import cpu_flags
from penstock.kernels.cpu.structs import PANEL

_GIB = 1 << 30
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}
_UTILIZATION = 0.9
"""Share of a GPU's memory that a node takes by default (`gpu_memory_utilization`)."""
_GPU_FIXED_BYTES = 1 << 30
"""CUDA's context, workspaces of libraries, and the graphs: an estimate."""
_SCALE_COLUMNS = 128
"""Columns that share a scale of float8 in blocks, where a GPU keeps it."""
_NOTHING = np.empty((0, 0), np.uint8)


# --- the bytes of a model


@dataclass(frozen=True, slots=True)
class MatrixSize:
    """A matrix, in the format of the runner."""

    num_bytes: int
    num_rows: int

    def largest_part(self, parts: int) -> int:
        """Return the bytes of the largest of equal parts; those of the native runner have whole panels."""
        largest = panel_spans(self.num_rows, parts)[0]
        return -(-self.num_bytes * -(-len(largest) // PANEL) // -(-self.num_rows // PANEL))


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The bytes of a model's weights, and of its KV cache."""

    runner: CutRunner
    dtype: str
    layers: tuple[tuple[MatrixSize, ...], ...]
    head: MatrixSize
    embedding_bytes: int
    """0 if the head is also the embedding."""
    kv_head_bytes: tuple[int, ...]
    """Key and value of one token and KV head in each layer; 0 without attention."""

    @property
    def weight_bytes(self) -> int:
        """All matrices."""
        inner = sum(matrix.num_bytes for layer in self.layers for matrix in layer)
        return inner + self.head.num_bytes + self.embedding_bytes

    def kv_token_bytes(self, spec: ModelSpec, layers: Sequence[int], tensor: int = 1) -> int:
        """Return the bytes of a token in these layers of the KV cache of a rank: that with the most heads."""
        return sum(
            max(len(span) for span in kv_head_spans(attention, tensor)) * self.kv_head_bytes[at]
            for at in layers
            if (attention := spec.layers[at].attention) is not None
        )


def runner_for(described: Description, options: RunnerOptions, *, on_gpus: bool) -> CutRunner:
    """Return the runner that would compute a model. Raises ConfigError where `runner` asks for one that cannot."""
    if on_gpus:
        if missing := ", ".join(special_features(described.spec)):
            raise ConfigError(f"runner gpu: {described.architecture} is not supported on a GPU, which has no {missing}")
        return "gpu"
    problem = "runner torch is wanted" if options.runner == "torch" else native_problem(described, options)
    if problem is not None and options.runner == "native":
        raise ConfigError(f"runner native: {problem}", param="runner")
    return "native" if problem is None else "torch"


def sizes_of(described: Description, options: RunnerOptions, runner: CutRunner) -> ModelSizes:
    """Return the sizes of a model. Of the weights only the headers are read, and a quantized matrix or two.

    All layers of a kind in a quantized safetensors checkpoint count as the first one, because reading a matrix unpacks
    it.
    """
    spec, dtype = described.spec, _dtype_of(described, options, runner)
    tensors = None if described.source.is_dummy else DecoderTensors(described.open_checkpoint(), spec)
    size = _Sizer(options, runner, dtype, spec).size

    def layer_sizes(at: int) -> tuple[MatrixSize, ...]:
        mlp = spec.layers[at].mlp
        return tuple(
            size(
                parts,
                interleaved=name == "mlp_in" and mlp is not None and mlp.is_gated,
                is_expert=spec.layers[at].num_experts_of(name) > 1,
            )
            for name in spec.layers[at].matrices
            for parts in _parts_of(spec, tensors, at, name)
        ) + tuple(size((part,)) for part in _token_parts(spec, tensors, at))

    if described.read_scaled is None and tensors is not None:
        layers = tuple(map(layer_sizes, range(spec.num_layers)))
    else:
        by_kind = {kind: layer_sizes(spec.layers.index(kind)) for kind in spec.kinds}
        layers = tuple(by_kind[layer] for layer in spec.layers)
    table = StoredTensor("table", "bfloat16", (spec.vocab_size, spec.hidden_size), _NOTHING)
    head = size((table if tensors is None else tensors.head(),), is_head=True)
    embedding = size((table if tensors is None else tensors.embedding(),), is_embedding=True)
    is_own = not spec.tied_head or head.num_bytes != embedding.num_bytes
    if runner == "native":
        is_own = not spec.tied_head or is_rotated(spec, options.quantization)
    kept = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype

    def kv_bytes(attention: Attention) -> int:
        if runner == "native":
            return kv_head_bytes(attention, options.kv_cache_dtype)
        return 2 * (attention.head_dim * _ITEM_BYTES[kept] + (4 if _ITEM_BYTES[kept] == 1 else 0))

    of_layers = tuple(0 if (own := layer.own_keys) is None else kv_bytes(own) for layer in spec.layers)
    return ModelSizes(runner, dtype, layers, head, embedding.num_bytes if is_own else 0, of_layers)


def _dtype_of(described: Description, options: RunnerOptions, runner: CutRunner) -> str:
    if runner == "native":
        return "bfloat16"
    if options.dtype != "auto":
        return options.dtype
    stored = described.stored_dtype
    if runner == "torch":
        return stored if stored == "bfloat16" and "avx512_bf16" in cpu_flags() else "float32"
    return stored if stored in ("bfloat16", "float16") else "float32"


def _parts_of(
    spec: ModelSpec, tensors: DecoderTensors | None, layer: int, name: MatrixName
) -> Iterator[tuple[Stored, ...]]:
    """Yield the stored parts of a layer's matrix: of each expert's, if there are experts."""
    kind = spec.layers[layer]
    if tensors is None:
        rows, columns = spec.parts_of(kind, name), spec.columns_of(kind, name)
        parts = tuple(StoredTensor(part, "bfloat16", (count, columns), _NOTHING) for part, count in rows)
        yield from (parts,) * kind.num_experts_of(name)
    elif name in ("qkv", "out", "mixer_out"):
        of_mixer = {"qkv": tensors.qkv, "out": tensors.out, "mixer_out": tensors.mixer_out}
        if (linear := of_mixer[name](layer)) is not None:
            yield linear.weights
    else:
        mixture = tensors.mixture(layer) if name.startswith("expert") else None
        pairs = tensors.experts(layer) if mixture is None else mixture.experts
        yield from (pair[0 if name.endswith("in") else 1].weights for pair in pairs)


def _token_parts(spec: ModelSpec, tensors: DecoderTensors | None, layer: int) -> Iterator[Stored]:
    """Yield the matrices of a layer that tokens' own embeddings pass, with the layer's part of their projection."""
    if (inputs := spec.token_inputs) is None:
        return
    size, hidden = inputs.size, spec.hidden_size
    gate, stored = (None, None) if tensors is None else (tensors.token_gate(layer), tensors.token_inputs())
    if gate is None or stored is None:
        for shape in ((size, hidden), (hidden, size), (size, hidden)):
            yield StoredTensor("own", "bfloat16", shape, _NOTHING)
        return
    yield from (*gate.gate.weights, *gate.out.weights)
    yield from (part.span(layer * size, (layer + 1) * size) for part in stored.projection.weights)


class _Sizer:
    """Knows the bytes of a matrix in the formats of one runner."""

    def __init__(self, options: RunnerOptions, runner: CutRunner, dtype: str, spec: ModelSpec) -> None:
        quantization = options.quantization
        self._runner = runner
        self._keeps_blocks = options.wants_gpu
        self._item_bytes = _ITEM_BYTES[dtype]
        self._asked = quantization
        rotated = is_rotated(spec, quantization)
        self._native = "int8_group" if quantization == "int8" and not rotated else quantization
        self._precise_embedding = rotated

    def size(
        self,
        parts: Sequence[Stored],
        *,
        interleaved: bool = False,
        is_head: bool = False,
        is_embedding: bool = False,
        is_expert: bool = False,
    ) -> MatrixSize:
        num_rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        if self._runner == "native":
            wanted = "none" if is_embedding and self._precise_embedding else self._native
            runs = runs_of(parts, wanted, interleaved=interleaved)
            return MatrixSize(packed_bytes(runs, columns), num_rows)
        name = "none"
        if self._runner == "gpu" and not is_embedding:
            # The head is quantized to float8 only.
            name = (
                self._gpu_format(parts, is_expert=is_expert)
                if not is_head
                else "fp8"
                if self._asked == "fp8"
                else "none"
            )
        return MatrixSize(_gpu_bytes(name, num_rows, columns, self._item_bytes), num_rows)

    def _gpu_format(self, parts: Sequence[Stored], *, is_expert: bool) -> str:
        if self._asked != "auto":
            return self._asked
        names = {_stored_format(part, is_expert=is_expert, keeps_blocks=self._keeps_blocks) for part in parts}
        return names.pop() if len(names) == 1 else "none"


def _stored_format(part: Stored, *, is_expert: bool, keeps_blocks: bool) -> str:
    """Return the format in which a GPU keeps a stored matrix with quantization auto (`StoredLinearLoader`).

    keeps_blocks: whether float8 stays with blocks of 128.
    """
    if isinstance(part, ScaledTensor) and part.kind in ("int8", "fp8"):
        if keeps_blocks and part.kind == "fp8" and part.group == _SCALE_COLUMNS < part.shape[1]:
            return "fp8_blocks"
        return part.kind if part.group >= part.shape[1] and part.zeros is None else "none"
    if part.kind == "mxfp4":
        return "mxfp4" if is_expert and part.shape[1] % BLOCK == 0 else "none"
    return "int4" if block_kind(part) in ("q4_0", "q4_1") else "none"


def _gpu_bytes(name: str, num_rows: int, columns: int, item_bytes: int) -> int:
    if name in ("int8", "fp8"):
        return num_rows * (columns + 4)
    if name == "fp8_blocks":
        return num_rows * (columns + 4 * -(-columns // _SCALE_COLUMNS))
    if name == "mxfp4":
        return num_rows * (columns // 2 + columns // BLOCK)
    if name == "int4":
        return num_rows * (columns // 2 + 4 * -(-columns // BLOCK))
    return num_rows * columns * item_bytes


# --- what fits


def plan_model(
    found: FoundModel, options: RunnerOptions, devices: Devices, shapes: Sequence[tuple[int, int, int]]
) -> ModelPlan:
    """Return what each shape takes of the devices: ranks in both directions, and replicas."""
    if not isinstance(found.description, Description):
        from penstock.gpu_node.model.transformers_runner.plan import plan_module

        return plan_module(found.name, found.description, options, devices, shapes)
    described, spec = found.described, found.described.spec
    runner = runner_for(described, options, on_gpus=devices.kind == "gpu")
    sizes = sizes_of(described, options, runner)
    token_bytes = sizes.kv_token_bytes(spec, range(spec.num_layers))
    left = None
    if devices.kind == "gpu":
        left = _gpu_limit(options, devices) - sizes.weight_bytes
    states = fit_states(options, state_bytes(spec), lambda: token_bytes * options.block_size, free_on_gpu=left)
    windowed = windowed_tokens_of(spec, options) if runner == "native" else None
    fits = [
        _fit(described, options, sizes, devices, Parallel(tensor, pipeline), replicas, states)
        for tensor, pipeline, replicas in shapes
    ]
    kv_dtype = options.kv_cache_dtype
    if runner == "native" and kv_dtype == "fp8":
        kv_dtype = "int8"
    return ModelPlan(
        model=found.name,
        runner=runner,
        dtype=sizes.dtype,
        quantization=options.quantization,
        kv_cache_dtype=sizes.dtype if kv_dtype == "auto" else kv_dtype,
        max_model_len=described.max_model_len,
        layers=spec.num_layers,
        heads=max((one.num_heads for one in spec.attentions), default=0),
        kv_heads=max((one.num_kv_heads for one in spec.attentions), default=0),
        weight_bytes=sizes.weight_bytes,
        kv_token_bytes=token_bytes,
        state_bytes=states.slot_bytes,
        state_slots=states.num_slots,
        max_num_seqs=states.max_num_seqs,
        shapes=tuple(fits),
        window=windowed.window if windowed is not None and any(shape.window_bytes for shape in fits) else 0,
        window_token_bytes=0 if windowed is None else windowed.token_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """The largest rank of a stage."""

    weight_bytes: int
    kv_token_bytes: int


def _fit(
    described: Description,
    options: RunnerOptions,
    sizes: ModelSizes,
    devices: Devices,
    parallel: Parallel,
    replicas: int,
    states: StateFit,
) -> ShapeFit:
    counts = parallel.tensor, parallel.pipeline, replicas
    group = BLOCK if options.quantization == "int4" and sizes.runner == "gpu" else 1
    try:
        check_cuts(described.spec, parallel, sizes.runner, column_group=group)
    except ConfigError as error:
        return ShapeFit(*counts, problem=error.message)
    ranks = _ranks_of(described.spec, sizes, parallel)
    most = max(rank.weight_bytes for rank in ranks)
    is_gpu, num_ranks = devices.kind == "gpu", parallel.num_ranks * replicas
    if num_ranks > devices.count:
        needed = "as many GPUs" if is_gpu else "a core each"
        problem = f"{num_ranks} ranks need {needed}, there are {devices.count}"
        return ShapeFit(*counts, problem=problem, weight_bytes=most)
    try:
        if is_gpu:
            tokens = _gpu_tokens(described.spec, options, sizes, devices, ranks, parallel.tensor, states.num_bytes)
            most_kv, of_windows = max(rank.kv_token_bytes for rank in ranks) * tokens, 0
        else:
            on_cpu = described, options, sizes, devices, ranks, parallel, replicas, states.num_bytes
            tokens, most_kv, of_windows = _cpu_tokens(*on_cpu)
    except ConfigError as error:
        return ShapeFit(*counts, problem=error.message, weight_bytes=most)
    return ShapeFit(*counts, "", most, most_kv, tokens, of_windows)


def _ranks_of(spec: ModelSpec, sizes: ModelSizes, parallel: Parallel) -> list[_Rank]:
    """Return the largest rank of each stage."""
    layers = [sum(matrix.largest_part(parallel.tensor) for matrix in layer) for layer in sizes.layers]
    head = sizes.head.largest_part(parallel.tensor)
    # Where the head is also the embedding, stages need two copies of it. Ranks of a stage divide both.
    first = sizes.embedding_bytes or (sizes.head.num_bytes if parallel.pipeline > 1 else 0)
    first = -(-first // parallel.tensor)
    stages = stage_layers(layers, parallel.pipeline, first_bytes=first, last_bytes=head)
    ranks = []
    for at, stage in enumerate(stages):
        weights = sum(layers[layer] for layer in stage)
        weights += (first if at == 0 else 0) + (head if at == len(stages) - 1 else 0)
        ranks.append(_Rank(weights, sizes.kv_token_bytes(spec, stage, parallel.tensor)))
    return ranks


def _gpu_limit(options: RunnerOptions, devices: Devices) -> int:
    """Return the bytes of each GPU that a node may take."""
    return int((devices.rank_bytes or 0) * (options.gpu_memory_utilization or _UTILIZATION))


def _gpu_tokens(
    spec: ModelSpec,
    options: RunnerOptions,
    sizes: ModelSizes,
    devices: Devices,
    ranks: Sequence[_Rank],
    tensor: int,
    bytes_of_states: int,
) -> int:
    """Return the tokens of KV cache that the fullest GPU holds. Raises ConfigError if that is no block."""
    limit = _gpu_limit(options, devices)
    step = _step_bytes(spec, options, _ITEM_BYTES[sizes.dtype], tensor)
    blocks = []
    for rank in ranks:
        taken, block_bytes = rank.weight_bytes + step + bytes_of_states, rank.kv_token_bytes * options.block_size
        left = limit - taken
        if left < block_bytes:
            what = "weights, steps and states" if bytes_of_states else "weights and steps"
            needs, has = (number / _GIB for number in (taken, limit))
            raise ConfigError(f"a rank's {what} take {needs:.4g} GiB of the {has:.4g} GiB that it may use")
        if options.kv_cache_gib is not None:
            left = min(left, int(options.kv_cache_gib * _GIB))
        blocks.append(left // block_bytes)
    return min(blocks) * options.block_size


def _step_bytes(spec: ModelSpec, options: RunnerOptions, item_bytes: int, tensor: int) -> int:
    """Estimate what the largest step takes: activations of its tokens, and logits of its sampling rows."""
    inner = max((3 if mlp.is_gated else 2) * -(-mlp.intermediate_size // tensor) for mlp in spec.mlps)
    heads = max((_rank_channels(attention, tensor) for attention in spec.attentions), default=0)
    activations = options.max_num_batched_tokens * (4 * spec.hidden_size + inner + heads) * item_bytes
    logits = options.max_num_seqs * spec.vocab_size * (item_bytes + 4)
    return activations + logits + _GPU_FIXED_BYTES


def _rank_channels(attention: Attention, tensor: int) -> int:
    """Return the channels of queries, keys and values at the rank with the most heads."""
    heads, kv_heads = (max(map(len, spans(attention, tensor))) for spans in (head_spans, kv_head_spans))
    return (heads + 2 * kv_heads) * attention.head_dim


def _cpu_tokens(
    described: Description,
    options: RunnerOptions,
    sizes: ModelSizes,
    devices: Devices,
    ranks: Sequence[_Rank],
    parallel: Parallel,
    replicas: int,
    bytes_of_states: int,
) -> tuple[int, int, int]:
    """Return the tokens of KV cache of a replica, the bytes of its largest rank, and those of windows among them.

    Raises ConfigError if a rank's memory does not hold its part.
    """
    spec = described.spec
    total = sizes.kv_token_bytes(spec, range(spec.num_layers))
    changes = {"kv_cache_gib": options.kv_cache_gib or DEFAULT_KV_CACHE_GIB / replicas}
    own = options.model_copy(update=changes | {"tensor_parallel_size": parallel.tensor})
    windowed = windowed_tokens_of(spec, own) if sizes.runner == "native" else None
    blocks = cache_sizes(described.max_model_len, own, total, windowed)
    num_tokens, of_windows = blocks.num_device_blocks * options.block_size, blocks.windows.num_bytes
    # Only the largest rank of several has less than all layers keep, and then windows have no blocks of their own.
    most = blocks.num_device_blocks * blocks.block_bytes + of_windows
    if parallel.num_ranks > 1:
        most = max(rank.kv_token_bytes for rank in ranks) * num_tokens
    kv_bytes = most if parallel.num_ranks == 1 else sum(rank.kv_token_bytes for rank in ranks) * num_tokens
    if devices.rank_bytes is not None:
        # Stages are for other runners, so there is one.
        weights, has, whose = ranks[0].weight_bytes, devices.rank_bytes, "a rank's"
    else:
        # All processes of a machine map one file with the native runner's weights.
        copies = 1 if sizes.runner == "native" else replicas * parallel.num_ranks
        weights, has, whose = copies * sizes.weight_bytes, devices.shared_bytes, "all"
        kv_bytes *= replicas * parallel.tensor
        bytes_of_states *= replicas
    if weights + kv_bytes + bytes_of_states > has:
        takes, beside, states, limit = (f"{size / _GIB:.4g} GiB" for size in (weights, kv_bytes, bytes_of_states, has))
        of_states, smaller = (f", states {states}", " or state_cache_gib") if bytes_of_states else ("", "")
        remedy = f"; a smaller kv_cache_gib{smaller} would fit" if weights < has else ""
        reason = f"{whose} weights take {takes} and KV cache {beside}{of_states}, more than {limit} of memory"
        raise ConfigError(f"{reason}{remedy}")
    return num_tokens, most, of_windows
