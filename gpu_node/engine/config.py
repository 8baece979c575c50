"""The settings of an engine, read once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from penstock.contract.adapters import AdapterName
from penstock.contract.errors import ConfigError
from penstock.contract.problems import config_error
from penstock.gpu_node.engine.kv_cache.eviction import EvictionName
from penstock.gpu_node.engine.scheduler.swap_cost import PreemptionName
from penstock.queue.policy import PolicyName

THEIR_NAMES = {
    "swap_space": "swap_space_gib",
    "cpu_offload_gb": "cpu_offload_gib",
    "num_gpu_blocks_override": "num_kv_blocks",
}
"""vLLM's names of settings that have another name in penstock."""


class EngineConfig(BaseModel):
    """The configuration of an engine.

    The KV cache holds `num_kv_blocks` blocks or `kv_cache_tokens` tokens where one of them is set, else as many blocks
    as fit into `kv_cache_gib`. It never holds more than `max_num_seqs` sequences of full length could use. A host pool
    holds `num_swap_blocks` blocks, or as many as fit into `swap_space_gib`. It stores the blocks of preempted
    sequences, evicted prefixes, and the part of a sequence that exceeds the KV cache alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(min_length=1)
    """Hub id with optional `:FILE.gguf` and `@revision`, a folder, or a `.gguf` file."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    runner: Literal["auto", "gpu", "native", "torch"] = "auto"
    """`gpu`: a CUDA device; `native`: the C++ kernels; `auto`: a GPU if there is one, else `native`, else `torch`."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    quantization: Literal["auto", "none", "int8", "int8_group", "int4", "fp8"] = "auto"
    """Storage format of matrices; `auto`: the checkpoint's format, `none`: the dtype of computation. On the CPU only
    the native runner quantizes, and `int8_group` is for it alone; `fp8` is for GPUs.
    """
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = "auto"
    block_size: Literal[8, 16, 32] = 16
    num_kv_blocks: int | None = Field(default=None, ge=1)
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    num_swap_blocks: int | None = Field(default=None, ge=0)
    swap_space_gib: float = Field(default=0.0, ge=0.0)
    preemption: PreemptionName = "auto"
    """What happens to the blocks of a preempted sequence; `auto`: whatever costs less at measured rates."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Fraction of the GPU's memory to use."""
    cpu_offload_gib: float = Field(default=0.0, ge=0.0)
    """GiB of weights kept in host memory and streamed to the GPU."""
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int = Field(default=512, ge=1)
    max_prefill_beside_decode: int | None = Field(default=None, ge=1)
    """Most prompt tokens in a step in which other sequences decode; None: as in any other step."""
    max_prefill_ms_beside_decode: float | None = Field(default=None, gt=0.0)
    """Most milliseconds that prompts add to a step in which other sequences decode; None: no limit.

    Without a limit the engine computes the most tokens a second. Nodes set a limit by default, because their callers
    read streams while they are generated.
    """
    enable_prefix_caching: bool = True
    scheduling_policy: PolicyName = "fcfs"
    """Which sequences start first and which are preempted; for `aging_ms` and `bypass_ms` see `queue/policy.py`."""
    aging_ms: int = Field(default=60_000, ge=1)
    bypass_ms: int = Field(default=2_000, ge=0)
    prefix_cache_salt: Literal["none", "tenant"] = "none"
    """`tenant`: tenants do not share cached prefixes."""
    prefix_eviction: EvictionName = "lru"
    """Which cached prefixes are evicted first: the least recently used, the least often used, or the shortest."""
    lora: dict[AdapterName, Path] = {}
    """LoRA adapters by name: folders in PEFT's format. Each entry may also be given as text, NAME=PATH."""
    lora_dir: Path | None = None
    """A folder with more adapters, each in a subfolder of its name; each is loaded when first requested."""
    max_loras: int = Field(default=8, ge=1)
    """Adapters that one step may use. When all slots are taken, the least recently used adapter is replaced."""
    max_lora_rank: int = Field(default=16, ge=1, le=512)
    speculative: Literal["ngram", "off"] = "off"
    """`ngram`: draft the tokens that followed the last occurrence of the newest ones, where that pays. Output tokens
    stay the same.
    """
    max_draft_tokens: int = Field(default=8, ge=1, le=64)
    """Most tokens that a sequence drafts in one step."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads that compute; None: one for each core that the process may use, by its affinity and its CPU quota."""
    reserved_cores: int = Field(default=0, ge=0)
    """Cores to leave to other processes when `num_threads` is None; at least one thread always computes."""
    stall_after_s: float = Field(default=120.0, gt=0.0)
    """A node exits when a step takes longer. Requests in steps that take a tenth of it are isolated."""
    weight_cache: bool = True
    """Whether the native runner keeps packed weights in a file that all processes of the machine map."""
    deterministic: bool = False
    """On GPUs, split contexts in the same way for any batch, and never split matrix products along their sums. This
    costs a few percent of speed. On CPUs the order of every sum is always fixed.
    """

    @classmethod
    def of(cls, model: ModelOrConfig, settings: Mapping[str, Any]) -> EngineConfig:
        """The config of a model by its settings, or a config as it is. Raises ConfigError naming the wrong setting."""
        if isinstance(model, EngineConfig):
            if settings:
                raise ConfigError("give settings in the config or as keywords, not both", param=next(iter(settings)))
            return model
        try:
            return cls(**{"model": str(model), **settings})
        except ValidationError as error:
            raise config_error(error) from error

    @model_validator(mode="before")
    @classmethod
    def _by_our_names(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for theirs, ours in THEIR_NAMES.items():
            if theirs in given and ours in given:
                raise ValueError(f"{theirs} is another name for {ours}: give one of them")
        return {THEIR_NAMES.get(name, name): value for name, value in given.items()}

    @field_validator("lora", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            return given
        pairs = [text.partition("=")[::2] for text in given]
        if len(dict(pairs)) < len(pairs):
            raise ValueError("names an adapter twice")
        return dict(pairs)

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        if self.num_kv_blocks is not None and self.kv_cache_tokens is not None:
            raise ValueError("give num_kv_blocks or kv_cache_tokens, not both")
        if self.num_threads is not None and self.reserved_cores:
            raise ValueError("give num_threads or reserved_cores, not both")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or sequences that decode would starve"
            )
        return self

    @property
    def num_adapter_slots(self) -> int:
        """Adapter slots of the runner; 0 if no adapters are configured."""
        return self.max_loras if self.lora or self.lora_dir is not None else 0

    @property
    def wanted_blocks(self) -> int | None:
        """Configured number of blocks, given directly or in tokens; None leaves it to `kv_cache_gib`."""
        if self.kv_cache_tokens is not None:
            return max(1, self.kv_cache_tokens // self.block_size)
        return self.num_kv_blocks


ModelOrConfig: TypeAlias = str | Path | EngineConfig
"""A model by hub id or path, or the config that names it."""
