"""The headings under which help pages show options."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import typer
from pydantic import BaseModel

sampling_option = partial(typer.Option, rich_help_panel="Sampling")
queue_option = partial(typer.Option, rich_help_panel="Queue")

_NODE: Mapping[str, tuple[str, ...]] = {
    "Model": (
        *(
            "runner",
            "load_format",
            "dtype",
            "quantization",
            "kv_cache_dtype",
            "revision",
            "max_model_len",
            "tool_parser",
        ),
        *("reasoning_parser", "generation_config", "num_threads", "reserved_cores", "weight_cache", "deterministic"),
    ),
    "Queue": ("redis_url", "name", "pool", "aliases"),
    "Memory": (
        *("kv_cache_gib", "block_size", "num_kv_blocks", "swap_space_gib", "num_swap_blocks"),
        *("gpu_memory_utilization", "cpu_offload_gib", "enable_prefix_caching", "prefix_eviction"),
        "prefix_cache_salt",
    ),
    "Batching": (
        *("max_num_seqs", "max_num_batched_tokens", "max_prefill_beside_decode", "max_prefill_ms_beside_decode"),
        *("preemption", "speculative", "max_draft_tokens", "stream_interval_ms"),
    ),
    "LoRA adapters": ("lora", "lora_dir", "max_loras", "max_lora_rank"),
    "Operation": (
        *("drain_s", "stall_after_s", "max_unsent_bytes", "metrics_port", "metrics_host"),
        *("loop_watch_ms", "loop_stall_s", "loop_debug", "log_jobs", "otlp_traces_endpoint"),
    ),
    "Pool: order of jobs (equal on all nodes of a pool)": (
        *("scheduling_policy", "aging_ms", "bypass_ms", "share_window_ms"),
    ),
    "Pool: limits and times (equal on all nodes of a pool)": (
        *("lease_ms", "abandon_after_ms", "reattach_grace_ms", "log_ttl_ms", "result_ttl_ms", "idem_ttl_ms"),
        *("max_open_jobs", "max_queued_cost", "tenant_memory_percent", "max_losses", "progress_chunks", "avoid_ms"),
    ),
}
_GATEWAY: Mapping[str, tuple[str, ...]] = {
    "HTTP": ("host", "port", "cors_origins", "unknown_fields", "max_tokens_beyond_context"),
    "Queue": ("redis_url",),
    "Access": (
        "require_keys",
        "allow_anonymous",
        "first_key_file",
        "keys_seen_file",
        "allowed_hosts",
        "open_highest_class",
    ),
    "Limits": (
        "max_body_bytes",
        "max_logprobs",
        "max_connections",
        "max_sockets",
        "max_key_sockets",
        "max_socket_streams",
    ),
    "Times": (
        *("body_timeout_s", "first_chunk_wait_s", "keep_alive_s", "send_timeout_s", "response_retention_s"),
        "drain_s",
    ),
    "Operation": ("loop_watch_ms", "loop_stall_s", "loop_debug", "otlp_traces_endpoint"),
}

_LIMITS = ("max_open_jobs", "max_queued_cost", "jobs_per_minute", "tokens_per_minute", "burst_s", "memory_percent")
_PANELS = {
    "NodeSettings": _NODE,
    "GatewaySettings": _GATEWAY,
    "LogSettings": {"Logging": ("log_level", "log_format")},
    "Terms": {"Limits of the tenant": (*_LIMITS, "weight")},
}
"""Class of settings → heading → its settings."""


def panel_by_setting(settings: type[BaseModel]) -> dict[str, str]:
    """Return the heading of each setting of this class."""
    panels = _PANELS.get(settings.__name__, {})
    return {name: title for title, names in panels.items() for name in names}
