"""Settings of an engine, read once."""

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
"""vLLM's names of settings that are called otherwise here."""


class EngineConfig(BaseModel):
    """What an engine is built from.

    The KV cache holds `num_kv_blocks` blocks or `kv_cache_tokens` tokens where one of them is given, else what fits
    `kv_cache_gib`, but never more than `max_num_seqs` sequences of full length could use. Behind it lies a host pool of
    `num_swap_blocks` blocks, else of what fits `swap_space_gib`: for sequences that had to give up their blocks, for
    prefixes that were evicted, and for a sequence that the KV cache cannot hold alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(min_length=1)
    """Hub id with optional `:FILE.gguf` and `@revision`, a folder, or a `.gguf` file."""
    revision: str | None = None
    """Of a model of the hub: branch, tag or commit."""
    runner: Literal["auto", "gpu", "native", "torch"] = "auto"
    """`gpu`: a CUDA device; `native`: the C++ kernels; `auto`: a device where there is one, else those or torch."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    quantization: Literal["auto", "none", "int8", "int8_group", "int4", "fp8"] = "auto"
    """How matrices are kept; `auto`: as the checkpoint does, `none`: in what is computed in. On the CPU this is for the
    native runner, and `int8_group` for it alone; `fp8` for a card."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = "auto"
    block_size: Literal[8, 16, 32] = 16
    num_kv_blocks: int | None = Field(default=None, ge=1)
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    num_swap_blocks: int | None = Field(default=None, ge=0)
    swap_space_gib: float = Field(default=0.0, ge=0.0)
    preemption: PreemptionName = "auto"
    """What happens to a preempted sequence's blocks; `auto`: what measured rates say is cheaper."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Of a card's memory."""
    cpu_offload_gib: float = Field(default=0.0, ge=0.0)
    """Of the weights, streamed to a card from host memory."""
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int = Field(default=512, ge=1)
    max_prefill_beside_decode: int | None = Field(default=None, ge=1)
    """Most prompt tokens in a step in which other sequences decode; None: as in any other step."""
    max_prefill_ms_beside_decode: float | None = Field(default=None, gt=0.0)
    """Most milliseconds that prompts add to a step in which other sequences decode; None: no limit.

    No limit computes the most tokens a second. Nodes have a limit by default, since their callers read along."""
    enable_prefix_caching: bool = True
    scheduling_policy: PolicyName = "fcfs"
    """Who starts first and who gives way; `aging_ms` and `bypass_ms`: see `queue/policy.py`."""
    aging_ms: int = Field(default=60_000, ge=1)
    bypass_ms: int = Field(default=2_000, ge=0)
    prefix_cache_salt: Literal["none", "tenant"] = "none"
    """`tenant`: tenants do not share cached prefixes."""
    prefix_eviction: EvictionName = "lru"
    """Which cached prefixes go first: the least recently used, the least used, or the short ones."""
    lora: dict[AdapterName, Path] = {}
    """Low-rank adapters by name: folders in PEFT's format; NAME=PATH as a text does too."""
    lora_dir: Path | None = None
    """Holds more of them, each in a folder of its name, which is read when it is first asked for."""
    max_loras: int = Field(default=8, ge=1)
    """Adapters that one step may compute with; the least recently used one gives its place to another."""
    max_lora_rank: int = Field(default=16, ge=1, le=512)
    speculative: Literal["ngram", "off"] = "off"
    """`ngram`: sequences draft what followed when they last said the same, if that pays; tokens stay the same."""
    max_draft_tokens: int = Field(default=8, ge=1, le=64)
    """Most tokens that a sequence drafts for a step."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads that compute; None: one for each core that the process may use, by its affinity and its CPU quota."""
    reserved_cores: int = Field(default=0, ge=0)
    """Cores to leave to other processes when `num_threads` is None; one thread always computes."""
    stall_after_s: float = Field(default=120.0, gt=0.0)
    """How long a step may take before a node ends itself; requests whose steps take a tenth of it are isolated."""
    weight_cache: bool = True
    """Whether the native runner's packed weights lie in a file that all processes of the machine map."""
    deterministic: bool = False
    """On a card contexts are cut in one way whatever the batch, and products not split along their sums, some percent
    slower; on the CPU every sum is in one order in any case."""

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
    def num_adapter_places(self) -> int:
        """Adapters that the runner keeps; none where it could never get one."""
        return self.max_loras if self.lora or self.lora_dir is not None else 0

    @property
    def wanted_blocks(self) -> int | None:
        """Blocks asked for by number or by tokens; None leaves it to `kv_cache_gib`."""
        if self.kv_cache_tokens is not None:
            return max(1, self.kv_cache_tokens // self.block_size)
        return self.num_kv_blocks


ModelOrConfig: TypeAlias = str | Path | EngineConfig
"""A model by hub id or path, or the config that names it."""
