"""The settings that engines and nodes have in common, stated once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.gpu_node.engine.kv_cache.eviction import EvictionName
from penstock.gpu_node.engine.scheduler.swap_cost import PreemptionName
from penstock.gpu_node.model.options import RunnerSettings
from penstock.gpu_node.model.options import for_device as for_device
from penstock.queue.policy import PolicyName


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
    first, by predicted remaining cost; fair: equal shares for all tenants."""
    aging_ms: int = Field(default=60_000, ge=1)
    """Milliseconds of waiting after which the first job of a class counts as one class more urgent."""
    bypass_ms: int = Field(default=2_000, ge=0)
    """Age in milliseconds up to which other jobs may overtake a job that does not fit."""
