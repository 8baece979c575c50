"""The settings of an engine, read once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from penstock.contract.errors import ConfigError
from penstock.contract.named import config_error
from penstock.gpu_node.engine.options import EngineOptions
from penstock.gpu_node.model.options import RunnerOptions

NAME_BY_VLLM_NAME = {
    "device": "runner",
    "swap_space": "swap_space_gib",
    "cpu_offload_gb": "cpu_offload_gib",
    "num_gpu_blocks_override": "num_kv_blocks",
}
"""vLLM's names of settings that have another name in penstock."""


class EngineConfig(EngineOptions, RunnerOptions):
    """The configuration of an engine. `kv_cache_tokens` may give the KV cache's size instead of `num_kv_blocks`."""

    model_config = ConfigDict(allow_inf_nan=False)

    kv_cache_tokens: int | None = Field(default=None, ge=1)

    @classmethod
    def of(cls, model: ModelOrConfig, settings: Mapping[str, Any]) -> EngineConfig:
        """Return a config for a model and its settings; an EngineConfig is returned unchanged.

        Raises ConfigError, which names the wrong setting.
        """
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
        for theirs, ours in NAME_BY_VLLM_NAME.items():
            if theirs in given and ours in given:
                raise ValueError(f"{theirs} is another name for {ours}: give one of them")
        return {NAME_BY_VLLM_NAME.get(name, name): value for name, value in given.items()}

    @field_validator("lora", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """Accept adapters also as texts, NAME=PATH each."""
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
    def wanted_blocks(self) -> int | None:
        """Configured number of blocks, given directly or in tokens; None leaves it to `kv_cache_gib`."""
        if self.kv_cache_tokens is not None:
            return max(1, self.kv_cache_tokens // self.block_size)
        return super().wanted_blocks


ModelOrConfig: TypeAlias = str | Path | EngineConfig
"""A model by hub id or path, or the config that names it."""
