"""The settings that engines and nodes have in common, stated once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.gpu_node.engine.kv_cache.eviction import EvictionName
from penstock.gpu_node.engine.scheduler.swap_cost import PreemptionName
from penstock.queue.policy import PolicyName


class EngineOptions(BaseModel):
    """Base of `EngineConfig` and `NodeSettings`. The docstring of a field is also its help text on the command line.

    The KV cache holds `num_kv_blocks` blocks if that is set, else as many blocks as fit into `kv_cache_gib`. It never
    holds more than `max_num_seqs` sequences of full length could use. A host pool holds `num_swap_blocks` blocks, or as
    many as fit into `swap_space_gib`. It stores the blocks of preempted sequences, evicted prefixes, and the part of a
    sequence that exceeds the KV cache alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str = Field(min_length=1)
    """Model to serve: a hub id with optional :FILE.gguf and @revision, a folder, or a .gguf file."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; default: the hub's default branch."""
    runner: Literal["auto", "gpu", "native", "torch"] = "auto"
    """What computes the model. gpu: a CUDA GPU; native: C++ kernels on the CPU; torch: PyTorch on the CPU. auto: a GPU
    if there is one, else native, else torch."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Compute type. The native runner has bfloat16 only. auto: the stored type if runner and machine support it,
    else float32."""
    quantization: Literal["auto", "none", "int8", "int8_group", "int4", "fp8"] = "auto"
    """Format of the weight matrices; auto: as stored. int8_group needs the native runner, fp8 needs a GPU."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = "auto"
    """Type of the KV cache. native: bfloat16 or int8; a GPU: its compute type, int8 or fp8."""
    block_size: Literal[8, 16, 32] = 16
    """Tokens per KV block; 8 is for the torch runner only."""
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    """Memory for the KV cache in GiB, on the CPU; on a GPU gpu_memory_utilization sets it."""
    num_kv_blocks: int | None = Field(default=None, ge=1)
    """Number of KV blocks, instead of a size in GiB."""
    swap_space_gib: float = Field(default=0.0, ge=0.0)
    """Host memory in GiB for preempted sequences, evicted prefixes and sequences larger than the KV cache."""
    num_swap_blocks: int | None = Field(default=None, ge=0)
    """Number of KV blocks in host memory, instead of a size in GiB."""
    preemption: PreemptionName = "auto"
    """How a preempted sequence resumes: its blocks are swapped or recomputed; auto: the cheaper of both."""
    enable_prefix_caching: bool = True
    """Keep the KV blocks of prompts for later prompts with the same prefix."""
    prefix_eviction: EvictionName = "lru"
    """Which cached prefixes are evicted first: lru: least recently used; lfu: least often used; length: shortest."""
    prefix_cache_salt: Literal["none", "tenant"] = "none"
    """none: all tenants share cached prefixes; tenant: each tenant has its own."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Fraction of the GPU's memory to use; the KV cache gets what weights and the largest step leave. Default: 0.9."""
    cpu_offload_gib: float = Field(default=0.0, ge=0.0)
    """GiB of weights that stay in host memory and are streamed to the GPU in each step."""
    deterministic: bool = False
    """Make results on a GPU independent of the batch, at a cost of some percent in speed."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and output together; default: the model's limit."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Maximum sequences in one step."""
    max_num_batched_tokens: int = Field(default=512, ge=1)
    """Maximum tokens in one step."""
    max_prefill_beside_decode: int | None = Field(default=None, ge=1)
    """Maximum prompt tokens in a step in which other sequences decode; default: no limit but that of every step."""
    max_prefill_ms_beside_decode: float | None = Field(default=None, gt=0.0)
    """Maximum milliseconds that prefill adds to a step in which other sequences decode. The limit is higher if decoding
    itself takes longer, or if one tenant owns all running and waiting sequences."""
    lora_dir: Path | None = None
    """Folder of further LoRA adapters, each in a folder of its name; an adapter is loaded at its first request."""
    max_loras: int = Field(default=8, ge=1)
    """Maximum LoRA adapters in one step; a further adapter replaces the least recently used one."""
    max_lora_rank: int = Field(default=16, ge=1, le=512)
    """Maximum rank of a LoRA adapter."""
    speculative: Literal["ngram", "off"] = "off"
    """Speculative decoding. ngram: draft what followed when the sequence last contained the same tokens, where that is
    faster. It does not change the output."""
    max_draft_tokens: int = Field(default=8, ge=1, le=64)
    """Maximum draft tokens per sequence and step."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads that compute the model; default: one per core that CPU affinity and quota allow."""
    reserved_cores: int = Field(default=0, ge=0)
    """Cores to leave to other processes if num_threads is not set; at least one thread computes."""
    weight_cache: bool = True
    """Keep the native runner's packed weights in a cache file that all nodes of the machine map."""
    stall_after_s: float = Field(default=120.0, gt=0.0)
    """Seconds without an answer or a step after which a busy engine counts as hung; the node then exits, and other
    nodes take over its jobs."""
    scheduling_policy: PolicyName = "fcfs"
    """Order in which jobs are taken and run. fcfs: oldest first; priority: most urgent class first; sjf: cheapest
    first, by predicted cost; fair: equal shares for all tenants."""
    aging_ms: int = Field(default=60_000, ge=1)
    """Milliseconds of waiting after which the first job of a class counts as one class more urgent."""
    bypass_ms: int = Field(default=2_000, ge=0)
    """Age in milliseconds up to which other jobs may overtake a job that does not fit."""
