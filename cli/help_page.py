"""Help pages of commands: options grouped by purpose, in two columns; no name and no metavar is ever cut off."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

sampling_option = partial(typer.Option, rich_help_panel="Sampling")
queue_option = partial(typer.Option, rich_help_panel="Queue")

# Headings under which help pages show options: heading → its settings.
_NODE: Mapping[str, tuple[str, ...]] = {
    "Model": (
        *(
            "runner",
            "cpu_isa",
            "load_format",
            "dtype",
            "quantization",
            "kv_cache_dtype",
            "revision",
            "max_model_len",
            "tool_parser",
        ),
        *(
            "chat_template",
            "reasoning_parser",
            "reasoning_budget",
            "generation_config",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            *("remote_ranks", "rank_address", "rank_secret_file"),
            "num_threads",
            "reserved_cores",
            "weight_cache",
            "deterministic",
            "enforce_eager",
        ),
    ),
    "Queue": ("redis_url", "name", "replicas", "pool", "aliases"),
    "Memory": (
        *("kv_cache_gib", "block_size", "num_kv_blocks", "swap_space_gib", "num_swap_blocks", "state_cache_gib"),
        *("gpu_memory_utilization", "cpu_offload_gib", "enable_prefix_caching", "prefix_eviction"),
        "prefix_cache_salt",
    ),
    "Batching": (
        *("max_num_seqs", "max_num_batched_tokens", "max_prefill_beside_decode", "max_prefill_ms_beside_decode"),
        *("background_slowdown", "background_share", "background_step_ms"),
        *("preemption", "speculative", "max_draft_tokens", "stream_interval_ms"),
    ),
    "LoRA adapters": ("lora", "lora_dir", "max_loras", "max_lora_rank"),
    "Operation": (
        *("drain_s", "stall_after_s", "rank_stall_s", "max_unsent_bytes", "metrics_port", "metrics_host"),
        *("failover_keep_s", "failover_keep_bytes"),
        *("loop_watch_ms", "loop_stall_s", "loop_debug", "log_jobs", "otlp_traces_endpoint"),
    ),
    "Pool: order of jobs (equal on all nodes of a pool)": (
        *("scheduling_policy", "aging_ms", "bypass_ms", "share_window_ms"),
    ),
    "Pool: limits and times (equal on all nodes of a pool)": (
        *("lease_ms", "abandon_after_ms", "reattach_grace_ms", "log_ttl_ms", "result_ttl_ms", "idem_ttl_ms"),
        *(
            "max_open_jobs",
            "max_queued_cost",
            "max_wait_ms",
            *("max_wait_ms_interactive", "max_wait_ms_standard", "max_wait_ms_batch"),
            "tenant_memory_percent",
            "max_losses",
            *("max_attempts", "retry_backoff_ms"),
            "progress_chunks",
            "avoid_ms",
        ),
    ),
}
_GATEWAY: Mapping[str, tuple[str, ...]] = {
    "HTTP": ("host", "port", "cors_origins", "unknown_fields", "max_tokens_beyond_context"),
    "Queue": ("redis_url", "token_durability"),
    "Access": (
        "api_key",
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
        *("idle_connection_s", "drain_s", "keep_connections"),
    ),
    "Webhooks": (
        *("webhook_allow_http", "webhook_allowed_networks", "webhook_timeout_s", "webhook_in_flight"),
        *("webhook_retry_s", "webhook_give_up_s"),
    ),
    "Operation": ("loop_watch_ms", "loop_stall_s", "loop_debug", "log_starts", "otlp_traces_endpoint"),
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


OPTIONS = "Options"
"""Heading of options that have no heading of their own."""
MAX_NAME_COLUMNS = 24
"""A wider name has its text on the next line."""
MAX_METAVAR_COLUMNS = 30
"""A longer list of choices moves from the metavar into the text."""
_INDENT = "  "
_METAVARS = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "bool": "BOOL", "Path": "PATH", "path": "PATH"}
_EXAMPLES = re.compile(r"\n*^Examples?:\n(?P<lines>(?:[ \t]+\S.*\n?)+)", re.MULTILINE)


def without_examples(help_text: str) -> str:
    """Return a command's docstring without its section `Examples:`."""
    return _EXAMPLES.sub("", help_text)


def examples_in(help_text: str) -> list[str]:
    """Return the lines of the section `Examples:` of a command's docstring."""
    found = _EXAMPLES.search(help_text)
    return [line.strip() for line in found["lines"].splitlines() if line.strip()] if found else []


def first_sentence(help_text: str) -> str:
    """Return the first sentence of a docstring, without its full stop."""
    paragraph = " ".join(help_text.partition("\n\n")[0].split())
    return re.split(r"\.(?:\s|$)", paragraph, maxsplit=1)[0]


def write_section(formatter: Any, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Write a heading and its rows of (name, text)."""
    formatter.write(f"\n{_styled(f'{title}:', bold=True)}\n")
    formatter.indent()
    styled = [(_styled(name, fg="cyan"), text) for name, text in rows]
    formatter.write_dl(styled, col_max=MAX_NAME_COLUMNS)
    formatter.dedent()


def write_text(formatter: Any, help_text: str) -> None:
    """Write the paragraphs of a docstring."""
    if text := without_examples(help_text).strip():
        formatter.write_paragraph()
        formatter.write_text(text)


def write_examples(formatter: Any, help_text: str) -> None:
    """Write the examples of a docstring as they are, so that each one can be copied."""
    if examples := examples_in(help_text):
        formatter.write(f"\n{_styled('Examples:', bold=True)}\n")
        formatter.write("".join(f"{_INDENT}{line}\n" for line in examples))


def write_parameters(formatter: Any, ctx: typer.Context, parameters: Iterable[Any]) -> None:
    """Write one section for the arguments, and one for each heading that the options name."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], OPTIONS: []}
    for parameter in parameters:
        is_argument = parameter.param_type_name == "argument"
        title = "Arguments" if is_argument else parameter.rich_help_panel or OPTIONS
        sections.setdefault(title, []).append((name_of(parameter, ctx), text_of(parameter, ctx)))
    if len(sections[OPTIONS]) == 1:  # only --help, which then comes last
        sections[OPTIONS] = sections.pop(OPTIONS)
    for title, rows in sections.items():
        if rows:
            write_section(formatter, title, rows)


def name_of(parameter: Any, ctx: typer.Context) -> str:
    """Return all names of an option with its metavar, or the metavar of an argument."""
    if parameter.param_type_name == "argument":
        return argument_name(parameter)
    names = ", ".join(sorted(parameter.opts, key=len))
    if parameter.secondary_opts:
        names += " / " + ", ".join(parameter.secondary_opts)
    if parameter.is_flag:
        return names
    return f"{names} {_metavar(parameter, ctx)[0]}"


def argument_name(parameter: Any) -> str:
    """Return the name of an argument in capitals, as in the usage line."""
    return f"{parameter.metavar or parameter.name.upper()}{'...' if parameter.nargs == -1 else ''}"


def text_of(parameter: Any, ctx: typer.Context) -> str:
    """Return the help text of a parameter with its choices, if they are too long for a metavar, and its default."""
    text = " ".join((parameter.help or "").split())
    is_option = parameter.param_type_name == "option"
    if is_option and not parameter.is_flag and (choices := _metavar(parameter, ctx)[1]):
        text = f"{text} One of {choices}."
    default = parameter.get_default(ctx, call=False)
    is_said = "Default:" in text or "default:" in text
    if is_option and not is_said and not (default is None or default is False or default in ("", (), [])):
        words = default_in_words(default)
        text = f"{text} Default: {words}{'' if words.endswith(('.', '?', '!')) else '.'}"
    return text.strip()


def default_in_words(default: object) -> str:
    """Return a default as a help text shows it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _styled(text: str, **style: Any) -> str:
    """Return text for a terminal. Where the output is no terminal, `typer.echo` removes the style."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, **style)


def _metavar(parameter: Any, ctx: typer.Context) -> tuple[str, str]:
    """Return the metavar of an option, and its choices if they are too long to be the metavar."""
    if parameter.metavar:
        return parameter.metavar, ""
    kind = parameter.display_type(ctx).strip("<>")
    kind = re.sub(r"^list\[(.*)\]$", r"\1", kind).removesuffix(" range")
    if "|" not in kind:
        return _METAVARS.get(kind, kind.upper()), ""
    if len(kind) <= MAX_METAVAR_COLUMNS:
        return kind, ""
    return "NAME", ", ".join(kind.split("|"))
