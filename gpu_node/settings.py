"""What a node may be told: one frozen record, from flags and PENSTOCK_NODE_* variables."""

from __future__ import annotations

import re
import socket
from pathlib import Path, PurePath
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.contract.job import NAME_PATTERN
from penstock.contract.policy import PolicyName
from penstock.contract.settings import Settings
from penstock.gpu_node.engine.eviction import EvictionName
from penstock.gpu_node.engine.preemption import PreemptionName

PROTOCOL_VERSION = 1


class NodeSettings(Settings):
    """A node's model, cache, place in the pool, and the pool's times and limits (which all its nodes must share)."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_NODE_")

    model: str = Field(min_length=1)
    """Hub id with optional @revision, a folder, or a .gguf file."""
    redis_url: str = Field(min_length=1)
    name: str = Field(default_factory=lambda: slug(socket.gethostname()), pattern=NAME_PATTERN)
    pool: str | None = Field(None, pattern=NAME_PATTERN)
    """None: made from the model's name."""
    aliases: tuple[str, ...] = ()
    """Further names under which clients may ask for the model."""

    runner: Literal["auto", "native", "torch"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    quantization: Literal["auto", "none", "int8", "int8_group", "int4"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = "auto"
    block_size: Literal[8, 16, 32] = 16
    num_kv_blocks: int | None = Field(None, ge=1)
    kv_cache_gib: float = Field(1.0, gt=0.0)
    num_swap_blocks: int | None = Field(None, ge=0)
    swap_space_gib: float = Field(0.0, ge=0.0)
    """Host memory for preempted sequences, evicted prefixes and what the KV cache alone cannot hold."""
    preemption: PreemptionName = "auto"
    prefix_eviction: EvictionName = "lru"
    prefix_cache_salt: Literal["none", "tenant"] = "none"
    """`tenant`: tenants do not share cached prefixes."""
    gpu_memory_utilization: float | None = Field(None, gt=0.0, le=1.0)
    cpu_offload_gib: float = Field(0.0, ge=0.0)
    max_model_len: int | None = Field(None, ge=2)
    max_num_seqs: int = Field(64, ge=1, le=512)
    max_num_batched_tokens: int = Field(512, ge=1)
    max_prefill_beside_decode: int = Field(192, ge=1)
    """Most tokens of prompts in a step in which others decode, who all wait for it."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads of the model; None: all cores that the process may use."""

    drain_s: float = Field(20.0, ge=0.0)
    """After SIGTERM: how long running jobs may go on before the rest is given back."""
    stall_after_s: float = Field(120.0, gt=0.0)
    """An engine that has not answered, or has work and made no step, this long hangs; its node ends, others go on."""
    stream_interval_ms: float = Field(40.0, ge=0.0, le=1000.0)
    """How often the tokens of 16 and more jobs leave at most; those of fewer leave at every step."""
    max_unsent_bytes: int = Field(64 << 20, ge=1 << 10)
    """Chunks kept while Redis is away; past it the engine pauses."""

    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Where this node's figures are served for Prometheus; None: nowhere, 0: a free port, which the log tells."""
    metrics_host: str = "127.0.0.1"

    lease_ms: int = Field(15_000, ge=3_000, le=600_000)
    """A node silent for this long is dead; another takes its jobs."""
    abandon_after_ms: int = Field(30_000, ge=1_000)
    reattach_grace_ms: int = Field(5_000, ge=0)
    log_ttl_ms: int = Field(120_000, ge=1_000)
    result_ttl_ms: int = Field(86_400_000, ge=1_000)
    idem_ttl_ms: int = Field(86_400_000, ge=1_000)
    max_open_jobs: int = Field(200_000, ge=1)
    max_queued_cost: int = Field(1 << 31, ge=1)
    max_losses: int = Field(3, ge=1)
    progress_chunks: int = Field(64, ge=1)
    avoid_ms: int = Field(2_000, ge=0)
    scheduling_policy: PolicyName = "fair"
    """In which order jobs are taken and run: fcfs, priority, sjf (by predicted cost) or fair (tenants take turns)."""
    aging_ms: int = Field(60_000, ge=1)
    """The first job of a class counts as one class higher for each time it has waited this long."""
    bypass_ms: int = Field(2_000, ge=0)
    """A job that does not fit may be passed by others until it is this old."""

    @property
    def pool_name(self) -> str:
        """The pool this node serves."""
        return self.pool or pool_of_model(self.model)

    @property
    def model_name(self) -> str:
        """The model as clients see it; a path on this machine would say nothing to them."""
        return self.pool_name if Path(self.model).expanduser().exists() else self.model

    @property
    def schema_fields(self) -> dict[str, int | str]:
        """What every node of the pool must agree on, as the scripts read it."""
        names = (
            *("lease_ms", "abandon_after_ms", "reattach_grace_ms", "log_ttl_ms", "result_ttl_ms", "idem_ttl_ms"),
            *("max_open_jobs", "max_queued_cost", "max_losses", "progress_chunks", "avoid_ms"),
            *("aging_ms", "bypass_ms"),
        )
        numbers = {name: getattr(self, name) for name in names}
        return {"version": PROTOCOL_VERSION, "policy": self.scheduling_policy, **numbers}


def slug(text: str) -> str:
    """`text` as a pool's or node's name."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:64] or "node"


def pool_of_model(model: str) -> str:
    """A pool's name for a model: the last part of its id or path, without revision, suffix and quantisation."""
    name = PurePath(model.partition("@")[0]).name
    return slug(re.sub(r"\.(gguf)$", "", name))
