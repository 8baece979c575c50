"""What a node may be told: one frozen record, from flags and PENSTOCK_NODE_* variables."""

from __future__ import annotations

import re
import socket
from pathlib import Path, PurePath
from typing import Annotated, Literal

from pydantic import Field, StringConstraints
from pydantic_settings import SettingsConfigDict

from penstock.contract.adapters import LORA_PATTERN
from penstock.contract.job import NAME_PATTERN
from penstock.contract.tools import ReasoningParserName, ToolParserName
from penstock.gpu_node.engine.config import THEIR_NAMES
from penstock.gpu_node.engine.kv_cache.eviction import EvictionName
from penstock.gpu_node.engine.scheduler.swap_cost import PreemptionName
from penstock.queue.policy import PolicyName
from penstock.queue.policy_state import SHARE_WINDOW_MS
from penstock.runtime.settings import Settings

PROTOCOL_VERSION = 1


VLLM_NAMES = {ours: theirs for theirs, ours in THEIR_NAMES.items()}
"""By ours, where these are other ones."""
POOL_WIDE = (
    *("scheduling_policy", "aging_ms", "bypass_ms", "lease_ms", "abandon_after_ms", "reattach_grace_ms", "log_ttl_ms"),
    *("share_window_ms", "tenant_memory_percent"),
    *("result_ttl_ms", "idem_ttl_ms", "max_open_jobs", "max_queued_cost", "max_losses", "progress_chunks", "avoid_ms"),
)
"""Settings that must be the same for all nodes of a pool, as scripts read them."""


class NodeSettings(Settings):
    """A node's model, cache, place in the pool, and the pool's times and limits."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_NODE_")

    model: str = Field(min_length=1)
    """Hub id with optional :FILE.gguf and @revision, a folder, or a .gguf file."""
    revision: str | None = None
    """Of a model of the hub: branch, tag or commit."""
    redis_url: str = Field(min_length=1)
    """Redis of the pool."""
    name: str = Field(default_factory=lambda: slug(socket.gethostname()), pattern=NAME_PATTERN)
    """This node's name in logs and records; else the machine's."""
    pool: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Pool to work for; else made from the model's name."""
    aliases: tuple[str, ...] = ()
    """Further names under which clients may ask for the model."""
    tool_parser: ToolParserName | None = None
    """The form in which the model writes tool calls; else what its chat template shows."""
    reasoning_parser: ReasoningParserName | None = None
    """The form in which it writes reasoning; think_open: the chat template opens it; else what that shows."""

    runner: Literal["auto", "gpu", "native", "torch"] = "auto"
    """gpu: a CUDA device; native: the C++ kernels; auto: a device where there is one, else those, else torch."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """What torch computes in."""
    quantization: Literal["auto", "none", "int8", "int8_group", "int4", "fp8"] = "auto"
    """How matrices are kept; auto: as stored. int8_group is for the native runner, fp8 for a card."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = "auto"
    """The native runner keeps keys and values in bfloat16 or int8; a card in what it computes in, int8 or fp8."""
    block_size: Literal[8, 16, 32] = 16
    """Tokens of a block of the KV cache; 8 on torch only."""
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    """Memory for the KV cache."""
    num_kv_blocks: int | None = Field(default=None, ge=1)
    """Blocks of the KV cache, instead of a size."""
    swap_space_gib: float = Field(default=0.0, ge=0.0)
    """Host memory for preempted sequences, evicted prefixes and what the KV cache alone cannot hold."""
    num_swap_blocks: int | None = Field(default=None, ge=0)
    """Blocks of host memory, instead of a size."""
    preemption: PreemptionName = "auto"
    """What happens to a preempted sequence's blocks; auto: what costs less."""
    enable_prefix_caching: bool = True
    """Keep what was computed of prompts for others that begin alike."""
    prefix_eviction: EvictionName = "lru"
    """Which cached prefixes go first: the least recently used, the least used, or the short ones."""
    prefix_cache_salt: Literal["none", "tenant"] = "none"
    """tenant: tenants do not share cached prefixes."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Of a card's memory."""
    cpu_offload_gib: float = Field(default=0.0, ge=0.0)
    """Of the weights, streamed to a card from host memory."""
    deterministic: bool = False
    """Sums on a card in one order whatever the batch, some percent slower."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and answer together."""
    max_num_seqs: int = Field(default=64, ge=1, le=512)
    """Most sequences in one step."""
    max_num_batched_tokens: int = Field(default=512, ge=1)
    """Most tokens in one step."""
    max_prefill_beside_decode: int | None = Field(default=None, ge=1)
    """Most prompt tokens in a step in which other sequences decode."""
    max_prefill_ms_beside_decode: float | None = Field(default=30.0, gt=0.0)
    """Most milliseconds that prompts add to a step in which other sequences decode; more where decoding itself takes
    longer, or where only the tenant of a backlog of prompts waits for it."""
    lora: tuple[Annotated[str, StringConstraints(pattern=LORA_PATTERN)], ...] = ()
    """NAME=PATH of a low-rank adapter in PEFT's format, checked at the start; may be repeated."""
    lora_dir: Path | None = None
    """Folder of more of them, each in a folder of its name; one is read when it is first asked for."""
    max_loras: int = Field(default=8, ge=1)
    """Adapters that one step may compute with; the least recently used one gives its place to another."""
    max_lora_rank: int = Field(default=16, ge=1, le=512)
    """Highest rank of an adapter."""
    speculative: Literal["ngram", "off"] = "off"
    """ngram: compute ahead what followed when a text last said the same, as far as that pays; never changes tokens."""
    max_draft_tokens: int = Field(default=8, ge=1, le=64)
    """Most tokens that a sequence has computed ahead in one step."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the model; else one for each core that the process may use, by its affinity and its CPU quota."""
    reserved_cores: int = Field(default=0, ge=0)
    """Cores to leave to other processes, where num_threads is not given; one thread always computes."""
    weight_cache: bool = True
    """Whether the native runner's packed weights lie in a file of the cache folder that the machine's nodes map."""

    drain_s: float = Field(default=20.0, ge=0.0)
    """After SIGTERM: how long running jobs may go on before the rest is given back."""
    stall_after_s: float = Field(default=120.0, gt=0.0)
    """An engine that has not answered, or has work and made no step, this long hangs; its node ends, others go on."""
    stream_interval_ms: float = Field(default=100.0, ge=0.0, le=1000.0)
    """How long a token may wait for others to leave with; it does so only where streams are many. 0: each step's tokens
    leave at once."""
    max_unsent_bytes: int = Field(default=64 << 20, ge=1 << 10)
    """Chunks kept while Redis is away; past it the engine pauses."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Where this node's figures are served for Prometheus; 0: on a free port, which the log tells; else nowhere."""
    metrics_host: str = "127.0.0.1"
    """The address that they are served at."""

    scheduling_policy: PolicyName = "fair"
    """In which order jobs are taken and run: fcfs, priority, sjf (by predicted cost) or fair (tenants take turns)."""
    aging_ms: int = Field(default=60_000, ge=1)
    """The first job of a class counts as one class higher for each time it has waited this long."""
    bypass_ms: int = Field(default=2_000, ge=0)
    """A job that does not fit may be passed by others until it is this old."""
    share_window_ms: int = Field(default=SHARE_WINDOW_MS, ge=1_000, le=3_600_000)
    """Under fair, interactive work goes before standard work only while its tenant used no more than its share in this
    window of time and the last one."""
    tenant_memory_percent: int = Field(default=50, ge=1, le=90)
    """Percent of Redis's memory that one tenant's jobs and results may take; an API key may say otherwise."""
    lease_ms: int = Field(default=15_000, ge=3_000, le=600_000)
    """A node silent for this long is dead; another takes its jobs."""
    abandon_after_ms: int = Field(default=30_000, ge=1_000)
    """A reading process silent for this long is gone; jobs that run for it alone are cancelled."""
    reattach_grace_ms: int = Field(default=5_000, ge=0)
    """How long a job whose last reader left goes on."""
    log_ttl_ms: int = Field(default=120_000, ge=1_000)
    """How long an ended job's log of chunks can be read."""
    result_ttl_ms: int = Field(default=86_400_000, ge=1_000)
    """How long its result can be."""
    idem_ttl_ms: int = Field(default=86_400_000, ge=1_000)
    """How long an idempotency key is known."""
    max_open_jobs: int = Field(default=200_000, ge=1)
    """Jobs queued and running; more are refused."""
    max_queued_cost: int = Field(default=1 << 31, ge=1)
    """KV tokens that queued jobs will probably need; more are refused."""
    max_losses: int = Field(default=3, ge=1)
    """A job that lost its node so often without progress fails."""
    progress_chunks: int = Field(default=64, ge=1)
    """A job whose log grew by so many chunks made progress."""
    loop_watch_ms: float = Field(default=20.0, ge=1, le=1000)
    """How often the event loop is asked how late it comes."""
    loop_debug: bool = False
    """Log what runs while the event loop is held for 50 ms and more."""
    avoid_ms: int = Field(default=2_000, ge=0)
    """How long a node that gave a job back does not take it again."""

    @property
    def has_adapters(self) -> bool:
        """Whether there are adapters, or a place where some may come to be."""
        return bool(self.lora) or self.lora_dir is not None

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
        given = {name: getattr(self, name) for name in POOL_WIDE}
        return {"version": PROTOCOL_VERSION, "policy": given.pop("scheduling_policy"), **given}


def slug(text: str) -> str:
    """`text` as a pool's or node's name."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:64] or "node"


def pool_of_model(model: str) -> str:
    """A pool's name for a model: the last part of its id or path, without revision, suffix and quantisation."""
    name = PurePath(model.partition("@")[0]).name
    return slug(re.sub(r"\.(gguf)$", "", name))
