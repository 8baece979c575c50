"""A node's settings: one frozen record, from flags and PENSTOCK_NODE_* variables."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError
from pydantic_settings import SettingsConfigDict

from penstock.contract.adapters import LORA_PATTERN
from penstock.contract.fields import NAME_PATTERN
from penstock.contract.problems import config_error
from penstock.contract.retries import MAX_ATTEMPTS, MAX_RETRY_BACKOFF_S
from penstock.contract.sampling import MAX_TOKENS_LIMIT
from penstock.gpu_node.engine.config import DEFAULT_KV_CACHE_GIB as DEFAULT_KV_CACHE_GIB
from penstock.gpu_node.engine.config import NAME_BY_VLLM_NAME, EngineConfig, EngineOptions, chat_template_of, for_device
from penstock.queue.policy import PolicyName
from penstock.queue.policy_state import SHARE_WINDOW_MS
from penstock.runtime.settings import Settings

VLLM_NAME_BY_NAME = {name: vllm_name for vllm_name, name in NAME_BY_VLLM_NAME.items()}
"""vLLM's names of settings that have another name here; the keys are this project's names."""
POOL_WIDE = (
    *("scheduling_policy", "aging_ms", "bypass_ms", "lease_ms", "abandon_after_ms", "reattach_grace_ms", "log_ttl_ms"),
    *("share_window_ms", "tenant_memory_percent"),
    *(
        "result_ttl_ms",
        "idem_ttl_ms",
        "max_open_jobs",
        "max_queued_cost",
        "max_wait_ms",
        *("max_wait_ms_interactive", "max_wait_ms_standard", "max_wait_ms_batch"),
        "max_losses",
        "progress_chunks",
        "avoid_ms",
        "max_attempts",
        "retry_backoff_ms",
    ),
)
"""Settings that all nodes of a pool must share, because Redis scripts read them."""


def _no_limit(budget: object) -> object:
    # llama-server has this value, as a number or from a command line.
    return None if str(budget) == "-1" else budget


class NodeSettings(Settings, EngineOptions):
    """Settings of a node: its model, KV cache, scheduling and pool, and the limits that its pool enforces."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_NODE_")

    redis_url: str = Field(min_length=1)
    """URL of the pool's Redis. Default: $PENSTOCK_REDIS_URL, or the Redis of penstock serve."""
    name: str = Field(default_factory=lambda: slug(socket.gethostname()), pattern=NAME_PATTERN)
    """Name of this node in logs and records; default: the host name."""
    replicas: str = Field(default="1", pattern=r"^(auto|[1-9][0-9]?)$")
    """Number of nodes to start, each in a process of its own. auto: one for each GPU that this process sees, or a
    single one without GPUs. On the CPU they divide its cores, and the KV cache if it has no set size."""
    pool: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Pool to serve; default: a name made from the model's name."""
    aliases: tuple[str, ...] = ()
    """Further names under which clients may request the model; may be repeated."""
    reasoning_budget: Annotated[int | None, BeforeValidator(_no_limit)] = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)
    """Tokens of reasoning after which it is ended, in answers to requests that set no budget and no effort. Default,
    and -1: no limit."""

    max_num_seqs: int = Field(default_factory=for_device(64, 256), ge=1, le=512)
    """Maximum sequences in one step. Default: 64; on a GPU 256."""
    max_prefill_ms_beside_decode: float | None = Field(default=30.0, gt=0.0)
    """Maximum milliseconds that prefill adds to a step in which other sequences decode. The limit is higher if decoding
    itself takes longer, or if one tenant owns all running and waiting sequences."""
    lora: tuple[Annotated[str, StringConstraints(pattern=LORA_PATTERN)], ...] = ()
    """LoRA adapter in PEFT's format, as NAME=PATH; checked at startup; may be repeated."""

    drain_s: float = Field(default=20.0, ge=0.0)
    """Seconds that running jobs may continue after SIGTERM before they are given back."""
    stream_interval_ms: float = Field(default=100.0, ge=0.0, le=1000.0)
    """Maximum milliseconds that a token waits to be sent together with others. It waits only where sending would take
    more than 0.03 of a core, or 0.25 if the engine leaves a core free. 0: send after every step."""
    max_unsent_bytes: int = Field(default=64 << 20, ge=1 << 10)
    """Bytes of unsent chunks to buffer while Redis is unavailable; above this the engine pauses."""
    failover_keep_s: float = Field(default=30.0, ge=0.0, le=600.0)
    """Seconds for which ends of jobs are kept after Redis has stored them. After a fail-over that lost them they are
    repeated."""
    failover_keep_bytes: int = Field(default=64 << 20, ge=0)
    """Most bytes of logs and results that are kept for that."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for Prometheus metrics and for health checks (`/health`); 0: a free port, named in the log. Default: off."""
    metrics_host: str = "127.0.0.1"
    """Address on which metrics are served."""

    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP) that gets the spans of jobs. Default: the standard OTEL_*
    variables; without them traces are off."""
    log_jobs: bool = True
    """Log one line for each job at its end."""

    scheduling_policy: PolicyName = "fair"
    """Order in which jobs are taken and run. fcfs: oldest first; priority: most urgent class first; sjf: cheapest
    first, by predicted remaining cost; fair: equal shares of all tenants; round_robin: a job of each tenant in turn."""
    share_window_ms: int = Field(default=SHARE_WINDOW_MS, ge=1_000, le=3_600_000)
    """Window in milliseconds over which a tenant's share is measured under fair. Interactive work goes before standard
    work only while its tenant used no more than its share in this window and the last one."""
    tenant_memory_percent: int = Field(default=50, ge=1, le=90)
    """Percent of Redis's memory that one tenant's jobs and results may take; an API key can set another limit."""
    lease_ms: int = Field(default=15_000, ge=3_000, le=600_000)
    """Milliseconds without a heartbeat after which a node counts as dead and other nodes take over its jobs."""
    abandon_after_ms: int = Field(default=30_000, ge=1_000)
    """Milliseconds of silence after which a reading process counts as gone; jobs that only it reads are canceled."""
    reattach_grace_ms: int = Field(default=5_000, ge=0)
    """Milliseconds that a job continues after its last reader left."""
    log_ttl_ms: int = Field(default=120_000, ge=1_000)
    """Milliseconds for which the chunk log of an ended job can be read."""
    result_ttl_ms: int = Field(default=86_400_000, ge=1_000)
    """Milliseconds for which the result of an ended job can be read."""
    idem_ttl_ms: int = Field(default=86_400_000, ge=1_000)
    """Milliseconds after a job's end for which its idempotency key is remembered."""
    max_open_jobs: int = Field(default=1_000_000, ge=1)
    """Maximum jobs in the pool, queued and running; further jobs are refused."""
    max_queued_cost: int = Field(default=1 << 31, ge=1)
    """Maximum expected KV tokens of all queued foreground jobs; further ones are refused."""
    max_wait_ms: int = Field(default=60_000, ge=1_000)
    """Maximum expected milliseconds in the queue with which a foreground job is accepted. Background jobs wait for as
    long as it takes."""
    max_wait_ms_interactive: int | None = Field(default=None, ge=1_000)
    """The same for jobs of class interactive. Default: max_wait_ms."""
    max_wait_ms_standard: int | None = Field(default=None, ge=1_000)
    """The same for jobs of class standard. Default: max_wait_ms."""
    max_wait_ms_batch: int | None = Field(default=None, ge=1_000)
    """The same for foreground jobs of class batch. Default: max_wait_ms."""
    max_losses: int = Field(default=3, ge=1)
    """Number of lost nodes without progress between them after which a job fails."""
    progress_chunks: int = Field(default=64, ge=1)
    """Number of new chunks in a job's log that counts as progress."""
    max_attempts: int = Field(default=1, ge=1, le=MAX_ATTEMPTS)
    """How often a job is tried that states no number of attempts: after an error of the node or its engine, it goes on
    after its last token; after an output that its check refuses, a new job with a new seed takes its place."""
    retry_backoff_ms: int = Field(default=1_000, ge=0, le=1000 * MAX_RETRY_BACKOFF_S)
    """Mean milliseconds before the second attempt of a job that states none. The pause doubles with each attempt, up to
    an hour."""
    loop_watch_ms: float = Field(default=50.0, ge=1, le=1000)
    """Interval in milliseconds at which the event loop's delay is measured."""
    loop_stall_s: float = Field(default=30.0, ge=0)
    """Seconds that the event loop may stand still before the process ends with a stack dump. 0: forever."""
    loop_debug: bool = False
    """Log what runs while the event loop is blocked for 50 ms or longer."""
    avoid_ms: int = Field(default=2_000, ge=0)
    """Milliseconds for which a node does not take a job that it gave back."""

    @property
    def has_adapters(self) -> bool:
        """Whether requests may name adapters: some are given, or there is a folder for them."""
        return bool(self.lora) or self.lora_dir is not None

    @property
    def max_waits_s(self) -> tuple[float, ...]:
        """The longest expected wait with which the queue admits a foreground job, by class."""
        of_classes = self.max_wait_ms_interactive, self.max_wait_ms_standard, self.max_wait_ms_batch
        return tuple((one or self.max_wait_ms) / 1000 for one in of_classes)

    @property
    def pool_name(self) -> str:
        """The pool that this node serves."""
        return self.pool or pool_of_model(self.model)

    @property
    def model_name(self) -> str:
        """The model's name as clients see it: the pool's name for a local path, which would mean nothing to them."""
        return self.pool_name if Path(self.model).expanduser().exists() else self.model

    @property
    def pool_config(self) -> dict[str, int | str]:
        """The settings on which all nodes of the pool must agree, under the names that the scripts use; '' for None."""
        given = {name: "" if (value := getattr(self, name)) is None else value for name in POOL_WIDE}
        return {"policy": given.pop("scheduling_policy"), **given}

    def with_config(self, config: Mapping[str, str]) -> NodeSettings:
        """Return these settings with a pool's values, by the names of `pool_config`, for all that were not set.

        So a release with other defaults joins the pool of an earlier one. Raises ConfigError.
        """
        names = {"policy": "scheduling_policy"}
        values = {names.get(name, name): value for name, value in config.items()}
        taken = {
            name: value
            for name, value in values.items()
            if name in (*POOL_WIDE, "max_model_len") and name not in self.model_fields_set
        }
        known = {name: getattr(self, name) for name in self.model_fields_set}
        return NodeSettings.load(**known, **{name: value or None for name, value in taken.items()})


MAX_REPLICAS = 64
"""As many nodes of one host as `service/seats.py` tells apart."""


def replica_name(name: str, number: int) -> str:
    """Return the name of a replica of the node `name`."""
    return f"{name[:60]}-{number}"


def engine_config(settings: NodeSettings) -> EngineConfig:
    """Return the settings of the node's engine. Raises ConfigError for settings that contradict each other."""
    if settings.chat_template is not None:
        chat_template_of(settings.chat_template)  # A missing file is an error before anything starts.
    shared = EngineConfig.model_fields.keys() & NodeSettings.model_fields.keys()
    try:
        return EngineConfig(**{name: getattr(settings, name) for name in shared})
    except ValidationError as error:
        raise config_error(error) from error


def check_model(settings: NodeSettings) -> None:
    """Check the node's model, as far as it is known before anything starts. Raises ConfigError."""
    from penstock.gpu_node.engine.early import check_early

    check_early(engine_config(settings))


def slug(text: str) -> str:
    """Return `text` with only the characters that pool and node names may have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:64] or "node"


def pool_of_model(model: str) -> str:
    """Return the pool of a model: the last part of its id, path or file, without revision, suffix and part number.

    A quantization after a colon is part of it.
    """
    name = PurePath(model.partition("@")[0]).name
    name = name.rpartition(":")[2] if name.lower().endswith(".gguf") else name
    return slug(re.sub(r"(?i)(-\d{5}-of-\d{5})?\.gguf$", "", name))
