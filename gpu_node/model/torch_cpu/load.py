"""Build the torch runner for a described model."""

from __future__ import annotations

import logging

import torch

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.description import Description, cache_sizes
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.gpu_node.model.torch_common.positions import alibi_biases
from penstock.gpu_node.model.torch_cpu.attention import PagedAttention
from penstock.gpu_node.model.torch_cpu.decoder import Decoder
from penstock.gpu_node.model.torch_cpu.runner import TorchRunner
from penstock.gpu_node.model.torch_cpu.weights import can_prepack, map_weights
from penstock.kernels.cpu.probe import usable_cores

log = logging.getLogger(__package__)


_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@translate_out_of_memory()
def load_torch(described: Description, options: RunnerOptions, progress: Progress) -> tuple[TorchRunner, str]:
    """Return the runner and the name of its arithmetic. Raises ConfigError for a missing or unsupported feature."""
    if options.quantization not in ("auto", "none"):
        supported = (
            "runner torch has auto and none, the native runner has int8, int8_group and int4, a GPU int8, int4, fp8"
        )
        raise ConfigError(f"quantization {options.quantization} is not supported: {supported}")
    # torch respects the CPU affinity, but not the CPU quota of a container.
    limit = max(1, usable_cores() - options.reserved_cores)
    torch.set_num_threads(options.num_threads or min(torch.get_num_threads(), limit))
    spec, name = described.spec, _choose_dtype(options.dtype, described.stored_dtype)
    dtype = _DTYPES[name]
    if options.kv_cache_dtype not in ("auto", name):
        supported = f"runner torch has {name}, the native runner has bfloat16 and int8"
        raise ConfigError(f"kv_cache_dtype {options.kv_cache_dtype} is not supported: {supported}")
    checkpoint = described.open_checkpoint()
    report, is_lazy = (lambda done: progress("load", done)), described.read_scaled is None
    weights = map_weights(DecoderTensors(checkpoint, spec), spec, dtype, report, is_lazy=is_lazy)
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    sizes = cache_sizes(described, options, token_bytes)
    decoder = Decoder(spec, weights, described.max_model_len)
    # ALiBi, in a model without RoPE.
    biases = None if spec.rope is not None else torch.from_numpy(alibi_biases(spec, described.max_model_len))
    attention = PagedAttention(
        spec.num_kv_heads,
        sizes.num_blocks,
        options.block_size,
        dtype,
        biases,
        set(spec.windows),
        spec.score_scale,
        spec.score_cap,
    )
    runner = TorchRunner(spec, decoder, attention, sizes, block_size=options.block_size, dtype=dtype)
    facts = {"dtype": name, "is_prepacked": can_prepack(dtype), "num_threads": torch.get_num_threads()}
    facts |= {"num_kv_blocks": sizes.num_device_blocks, "num_swap_blocks": sizes.num_host_blocks}
    log.info("torch runner", extra=facts)
    if torch.cuda.is_available():
        log.warning("a CUDA device is visible, but this runner computes on the CPU")
    return runner, f"torch-{name}"


def _choose_dtype(wanted: str, stored: str) -> str:
    """Return the requested dtype; with `auto`, bfloat16 if the checkpoint has it and this CPU has AVX512-BF16.

    Otherwise `auto` means float32.
    """
    if wanted != "auto":
        return wanted
    capability = torch.backends.cpu.get_cpu_capability()
    chosen = stored if stored == "bfloat16" and torch.cpu._is_avx512_bf16_supported() else "float32"
    log.info("dtype is chosen", extra={"dtype": chosen, "stored": stored, "cpu": capability})
    return chosen
