"""The settings of an engine, read once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from penstock.contract.errors import ConfigError
from penstock.contract.problems import config_error
from penstock.contract.tool_formats import BY_NAME
from penstock.contract.tools import ReasoningParserName
from penstock.gpu_node.model.options import DEFAULT_KV_CACHE_GIB as DEFAULT_KV_CACHE_GIB
from penstock.gpu_node.model.options import RunnerOptions, RunnerSettings
from penstock.gpu_node.model.options import for_device as for_device
from penstock.queue.policy import PolicyName

EvictionName = Literal["lru", "lfu", "length"]
PreemptionName = Literal["auto", "recompute", "swap"]


class EngineOptions(RunnerSettings):
    """Base of `EngineConfig` and `NodeSettings`. The docstring of a field is also its help text on the command line."""

    model: str = Field(min_length=1)
    """Model to serve: a hub id with optional :FILE.gguf and @revision, a folder, or a .gguf file."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; default: the hub's default branch."""
    generation_config: str = "auto"
    """Sampling of requests that do not set it. auto: what the model's generation_config.json recommends; none: OpenAI's
    defaults; or the path of such a file, or its JSON. The fields are temperature, top_p, top_k, min_p and
    repetition_penalty."""
    chat_template: str | None = None
    """Jinja template of chats, instead of the model's: the path of a file, or the template itself. Nodes with different
    templates have different revisions of the model."""
    tool_parser: str | None = None
    """Format of the model's tool calls; default: the one that its chat template shows. json: the node tells the model
    of the tools; none: requests with tools are refused."""
    reasoning_parser: ReasoningParserName | None = None
    """Syntax of the model's reasoning; think_open: the chat template opens it. Default: detected from the template.
    Nodes with different values have different revisions of the model."""
    preemption: PreemptionName = "auto"
    """How a preempted sequence resumes: its blocks are swapped or recomputed; auto: the cheaper of both."""
    enable_prefix_caching: bool = True
    """Keep the KV blocks of prompts for later prompts with the same prefix."""
    prefix_eviction: EvictionName = "lru"
    """Which cached prefixes are evicted first: lru: least recently used; lfu: least often used; length: shortest."""
    prefix_cache_salt: Literal["tenant", "pool"] = "tenant"
    """Which jobs share cached prefixes. tenant: the jobs of one tenant; pool: all jobs without a cache_salt, so that
    cached_tokens and times tell a tenant whether another one sent the same text."""
    max_prefill_beside_decode: int | None = Field(default_factory=for_device(None, 2048), ge=1)
    """Maximum prompt tokens in a step in which other sequences decode. Default: on a GPU 2048, else the limit of every
    step."""
    max_prefill_ms_beside_decode: float | None = Field(default=None, gt=0.0)
    """Maximum milliseconds that prefill adds to a step in which other sequences decode. The limit is higher if decoding
    itself takes longer, or if one tenant owns all running and waiting sequences."""
    background_slowdown: float = Field(default=1.5, ge=1.0, allow_inf_nan=False)
    """Maximum factor by which background work lengthens a step in which foreground sequences decode."""
    background_share: float = Field(default=0.1, ge=0.0, le=0.5)
    """Share of the engine's time that background work gets at least while there is any."""
    background_step_ms: float = Field(default=50.0, gt=0.0, allow_inf_nan=False)
    """Maximum milliseconds of a step of background work alone while foreground work came in the last minute."""
    speculative: Literal["ngram", "off"] = "off"
    """Speculative decoding. ngram: draft what followed when the sequence last contained the same tokens, where that is
    faster. It does not change the output."""
    max_draft_tokens: int = Field(default=8, ge=1, le=64)
    """Maximum draft tokens per sequence and step."""
    stall_after_s: float = Field(default=120.0, gt=0.0)
    """Seconds without an answer or a step after which a busy engine counts as hung; the node then exits, and other
    nodes take over its jobs."""
    scheduling_policy: PolicyName = "fcfs"
    """Order in which jobs are taken and run. fcfs: oldest first; priority: most urgent class first; sjf: cheapest
    first, by predicted remaining cost; fair: equal shares of all tenants; round_robin: a job of each tenant in turn."""
    aging_ms: int = Field(default=60_000, ge=1)
    """Milliseconds of waiting after which the first job of a class counts as one class more urgent."""
    bypass_ms: int = Field(default=2_000, ge=0)
    """Age in milliseconds up to which other jobs may overtake a job that does not fit."""

    @field_validator("tool_parser")
    @classmethod
    def _is_format(cls, given: str | None) -> str | None:
        if given is not None and given not in BY_NAME:
            raise ValueError(f"{given[:100]!r} is not one of {', '.join(BY_NAME)}")
        return given


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


def chat_template_of(setting: str) -> str:
    """Return the template that the setting `chat_template` gives: a file's content, or the text itself.

    Raises ConfigError for a file that is missing or cannot be read.
    """
    if "\n" in setting or "{" in setting:
        return setting
    from penstock.gpu_node.model.architecture.limits import MAX_TEMPLATE_BYTES

    path = Path(setting).expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        reason = f"cannot read {path} ({why}); it must be a file with a Jinja template, or the template itself"
        raise ConfigError(f"chat_template: {reason}", param="chat_template") from None
    if len(text) > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"chat_template: {path} has more than {MAX_TEMPLATE_BYTES:,} characters", param="chat_template"
        )
    return text
