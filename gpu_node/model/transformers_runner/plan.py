"""What a module of transformers takes of a machine, for `penstock plan`."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.description import cache_sizes
from penstock.gpu_node.model.checkpoint.state_slots import StateFit, fit_states
from penstock.gpu_node.model.options import DEFAULT_KV_CACHE_GIB, RunnerOptions
from penstock.gpu_node.model.plan_records import Devices, ModelPlan, ShapeFit
from penstock.gpu_node.model.torch_cpu.load import TORCH_DTYPES, choose_dtype
from penstock.gpu_node.model.transformers_runner.description import LACKS, ModuleDescription


def plan_module(
    name: str,
    described: ModuleDescription,
    options: RunnerOptions,
    devices: Devices,
    shapes: Sequence[tuple[int, int, int]],
) -> ModelPlan:
    """Return what each shape takes of the devices. Raises ConfigError if that is not known before loading."""
    if (observed := described.observed) is None:
        reason = "its module must be loaded to know its KV cache"
        raise ConfigError(f"runner transformers cannot plan {described.architecture}: {reason}")
    dtype = choose_dtype(options.dtype, described.stored_dtype)
    item_bytes = TORCH_DTYPES[dtype].itemsize
    weights, token_bytes = described.num_weights * item_bytes, observed.channels * item_bytes
    states = fit_states(options, observed.state_bytes, lambda: token_bytes * options.block_size)
    return ModelPlan(
        model=name,
        runner="transformers",
        dtype=dtype,
        quantization=options.quantization,
        kv_cache_dtype=dtype,
        max_model_len=described.max_model_len,
        layers=len(observed.layers),
        heads=max((layer.num_heads for layer in observed.layers), default=0),
        kv_heads=max((layer.num_kv_heads for layer in observed.layers), default=0),
        weight_bytes=weights,
        kv_token_bytes=token_bytes,
        state_bytes=states.slot_bytes,
        state_slots=states.num_slots,
        max_num_seqs=states.max_num_seqs,
        shapes=tuple(_fit(described, options, devices, shape, weights, token_bytes, states) for shape in shapes),
        why=f"transformers computes {described.architecture}; that runner has no {LACKS}",
    )


def _fit(
    described: ModuleDescription,
    options: RunnerOptions,
    devices: Devices,
    shape: tuple[int, int, int],
    weight_bytes: int,
    token_bytes: int,
    states: StateFit,
) -> ShapeFit:
    tensor, pipeline, replicas = shape
    if devices.kind == "gpu":
        return ShapeFit(*shape, problem="runner transformers computes on the CPU", weight_bytes=weight_bytes)
    if tensor * pipeline > 1:
        return ShapeFit(*shape, problem="runner transformers has no ranks", weight_bytes=weight_bytes)
    try:
        own = options.model_copy(update={"kv_cache_gib": options.kv_cache_gib or DEFAULT_KV_CACHE_GIB / replicas})
        blocks = cache_sizes(described.max_model_len, own, token_bytes)
    except ConfigError as error:
        return ShapeFit(*shape, problem=error.message, weight_bytes=weight_bytes)
    kv_bytes = blocks.num_blocks * blocks.block_bytes
    # Each replica has its own copy of the weights.
    needs, free = replicas * (weight_bytes + kv_bytes + states.num_bytes), devices.rank_bytes or devices.shared_bytes
    if needs > free:
        problem = f"{needs / 2**30:.4g} GiB of weights, KV cache and states, but {free / 2**30:.4g} GiB are free"
        return ShapeFit(*shape, problem=problem, weight_bytes=weight_bytes)
    return ShapeFit(*shape, "", weight_bytes, kv_bytes, blocks.num_device_blocks * options.block_size)
