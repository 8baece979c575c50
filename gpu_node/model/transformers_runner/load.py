"""Load a described module's weights into a runner that is ready for steps."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import transformers
from torch import nn

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError, NotFoundError
from penstock.gpu_node.model.checkpoint.description import cache_sizes
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import Adapter
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.gpu_node.model.torch_cpu.load import TORCH_DTYPES, choose_dtype, set_threads
from penstock.gpu_node.model.transformers_runner.agreement import continues_by_tokens
from penstock.gpu_node.model.transformers_runner.description import LACKS, ModuleDescription
from penstock.gpu_node.model.transformers_runner.observed import observe
from penstock.gpu_node.model.transformers_runner.packed import PackedModule
from penstock.gpu_node.model.transformers_runner.runner import TransformersRunner
from penstock.gpu_node.model.transformers_runner.weights import stored_module
from penstock.runtime.reading import reason_of

log = logging.getLogger(__package__)


class NoAdapters:
    """Finds no adapter."""

    def digests(self) -> dict[str, str]:
        """Return nothing."""
        return {}

    def find(self, wanted: AdapterRef) -> Adapter:
        """Raise NotFoundError."""
        raise NotFoundError(f"there is no adapter {wanted.name}: runner transformers has none", param="adapter")


def check_settings(options: RunnerOptions) -> None:
    """Refuse settings that this runner does not support, by their names."""
    refused = {
        "lora": bool(options.lora),
        "lora_dir": options.lora_dir is not None,
        "tensor_parallel_size": options.tensor_parallel_size > 1,
        "pipeline_parallel_size": options.pipeline_parallel_size > 1,
        "remote_ranks": options.remote_ranks > 0,
        "quantization": options.quantization not in ("auto", "none"),
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{name} is not supported by runner transformers, which has no {LACKS}", param=name)


@translate_out_of_memory()
def load_module(
    described: ModuleDescription, options: RunnerOptions, progress: Progress
) -> tuple[TransformersRunner, str]:
    """Return the runner of a model, and the name of its arithmetic. Raises ConfigError."""
    check_settings(options)
    set_threads(options)
    name = choose_dtype(options.dtype, described.stored_dtype)
    if options.kv_cache_dtype not in ("auto", name):
        raise ConfigError(f"kv_cache_dtype {options.kv_cache_dtype} is not supported: runner transformers has {name}")
    dtype = TORCH_DTYPES[name]
    progress("load", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Any = _random(described, dtype) if described.source.is_dummy else _stored(described, dtype)
        try:
            observed = observe(module, described.max_model_len, torch.device("cpu"))
            by_tokens = continues_by_tokens(module, observed, dtype)
        except MemoryError:
            raise
        except Exception as error:
            # A module may also fail where it does not expect packed tokens, or another cache than its own.
            raised = f"its module fails in a trial: {reason_of(error).partition(' of type <class')[0]}"
            reason = error.message if isinstance(error, ConfigError) else raised
            refused = f"runner transformers does not support {described.architecture}"
            raise ConfigError(f"{refused}: {reason}") from error
    sizes = cache_sizes(described.max_model_len, options, observed.channels * dtype.itemsize)
    if observed.states and not options.state_slots:
        needs = f"the states of a sequence take {observed.state_bytes:,} bytes"
        raise ConfigError(f"state_slots is 0 but must be at least 1: {needs}", param="state_slots")
    packed = PackedModule(
        module, observed, sizes.num_blocks, options.block_size, dtype, options.state_slots, by_tokens=by_tokens
    )
    runner = TransformersRunner(module, packed, sizes)
    facts = {"architecture": described.architecture, "dtype": name, "num_threads": torch.get_num_threads()}
    facts |= {"num_kv_blocks": sizes.num_device_blocks, "num_swap_blocks": sizes.num_host_blocks, "lacks": LACKS}
    facts |= {"state_slots": runner.state_sizes.num_slots, "state_bytes": runner.state_sizes.slot_bytes}
    log.info("transformers runner", extra=facts)
    if observed.by_texts:
        log.warning("the class has an attention of its own, so sequences are computed one after the other")
    if torch.cuda.is_available():
        log.warning("a CUDA device is visible, but this runner computes on the CPU")
    progress("load", 1.0)
    return runner, f"transformers-{transformers.__version__}-{name}"


def _random(described: ModuleDescription, dtype: torch.dtype) -> nn.Module:
    """Return a module of random weights, always the same ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = described.module_class._from_config(
            described.config, dtype=dtype, attn_implementation=described.attention
        )
    module: nn.Module = made.eval()
    return module


def _stored(described: ModuleDescription, dtype: torch.dtype) -> nn.Module:
    return stored_module(
        described.module_class,
        described.config,
        described.source,
        architecture=described.architecture,
        num_weights=described.num_weights,
        dtype=dtype,
        attn_implementation=described.attention,
    )
