"""A described model to a torch runner."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.description import Description, cache_sizes
from penstock.gpu_node.model.checkpoint.files import Checkpoint
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.protocol import RunnerOptions
from penstock.gpu_node.model.torch_common.memory_errors import naming_lack_of_memory
from penstock.gpu_node.model.torch_common.positions import alibi_biases
from penstock.gpu_node.model.torch_cpu.attention import PagedAttention
from penstock.gpu_node.model.torch_cpu.decoder import Decoder
from penstock.gpu_node.model.torch_cpu.linear import can_prepack
from penstock.gpu_node.model.torch_cpu.runner import TorchRunner
from penstock.gpu_node.model.torch_cpu.weights import map_weights
from penstock.kernels.cpu.probe import usable_cores

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@naming_lack_of_memory()
def load_torch(described: Description, options: RunnerOptions, progress: Progress) -> tuple[TorchRunner, str]:
    """The runner, and a name for its arithmetic. Raises ConfigError naming what is missing or not supported."""
    if options.quantization not in ("auto", "none"):
        others = "the native runner has int8, int8_group and int4, a card int8, int4 and fp8"
        raise ConfigError(f"quantization {options.quantization} cannot be had: torch has auto and none, {others}")
    # Torch knows the affinity, but not the CPU quota of a container.
    most = max(1, usable_cores() - options.reserved_cores)
    torch.set_num_threads(options.num_threads or min(torch.get_num_threads(), most))
    spec, name = described.spec, _choose_dtype(options.dtype, described.stored_dtype)
    dtype = _DTYPES[name]
    if options.kv_cache_dtype not in ("auto", name):
        kept = f"torch keeps {name}, the native runner bfloat16 or int8"
        raise ConfigError(f"kv_cache_dtype {options.kv_cache_dtype} cannot be had: {kept}")
    checkpoint = Checkpoint.open(described.source, described.read_scaled)
    told, is_lazy = (lambda done: progress("load", done)), described.read_scaled is None
    weights = map_weights(DecoderTensors(checkpoint, spec), spec, dtype, told, is_lazy=is_lazy)
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    sizes = cache_sizes(described, options, token_bytes)
    decoder = Decoder(spec, weights, described.max_model_len)
    attention = PagedAttention(
        spec.num_kv_heads, sizes.num_blocks, options.block_size, dtype, _biases(described), set(spec.windows)
    )
    runner = TorchRunner(spec, decoder, attention, sizes, block_size=options.block_size, dtype=dtype)
    facts = {"dtype": name, "is_prepacked": can_prepack(dtype), "num_threads": torch.get_num_threads()}
    facts |= {"num_kv_blocks": sizes.num_device_blocks, "num_swap_blocks": sizes.num_host_blocks}
    _log.info("torch runner", extra=facts)
    if torch.cuda.is_available():
        _log.warning("a CUDA device is visible, but this runner computes on the CPU")
    return runner, f"torch-{name}"


def _biases(described: Description) -> Tensor | None:
    """What is added to scores where positions are no rotations."""
    if described.spec.rope is not None:
        return None
    return torch.from_numpy(alibi_biases(described.spec, described.max_model_len))


def _choose_dtype(wanted: str, stored: str) -> str:
    """What was asked for; else the checkpoint's own where this CPU multiplies it well; else float32."""
    if wanted != "auto":
        return wanted
    capability = torch.backends.cpu.get_cpu_capability()
    chosen = stored if stored == "bfloat16" and torch.cpu._is_avx512_bf16_supported() else "float32"
    _log.info("dtype is chosen", extra={"dtype": chosen, "stored": stored, "cpu": capability})
    return chosen
