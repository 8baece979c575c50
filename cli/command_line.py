"""Commands, their help pages and their errors: one line that names the wrong option and says what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typer import _completion_classes
from typer.core import TyperCommand, TyperGroup

from penstock.cli.option_words import SHOWS_ALL, known_words
from penstock.contract.errors import EXIT_WRONG_USE, ConfigError, PenstockError, RequestError, UnavailableError

if TYPE_CHECKING:
    from pydantic import BaseModel

sampling_option = partial(typer.Option, rich_help_panel="Sampling")
queue_option = partial(typer.Option, rich_help_panel="Queue")

# Headings under which help pages show options: heading → its settings.
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
        *(
            "chat_template",
            "reasoning_parser",
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
        *("kv_cache_gib", "block_size", "num_kv_blocks", "swap_space_gib", "num_swap_blocks"),
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
            "progress_chunks",
            "avoid_ms",
        ),
    ),
}
_GATEWAY: Mapping[str, tuple[str, ...]] = {
    "HTTP": ("host", "port", "cors_origins", "unknown_fields", "max_tokens_beyond_context"),
    "Queue": ("redis_url",),
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
        *("idle_connection_s", "drain_s"),
    ),
    "Webhooks": (
        *("webhook_allow_http", "webhook_allowed_networks", "webhook_timeout_s", "webhook_in_flight"),
        *("webhook_retry_s", "webhook_give_up_s"),
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


# --- help pages: options grouped by purpose, in two columns; no name and no metavar is ever cut off

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


# --- errors in one line: each names the wrong option and says what to do
# Imports that take time are inside the functions, because every command imports this module.

_EXTRA_ARGUMENTS = re.compile(r"unexpected extra argument\S* \((\S+).*\)")
_VARIABLE_PREFIXES = {
    "node": ("PENSTOCK_NODE_",),
    "gateway": ("PENSTOCK_GATEWAY_",),
    "serve": ("PENSTOCK_NODE_", "PENSTOCK_GATEWAY_"),
}
"""Command → prefix of the environment variables that set its options."""


def usage_line(error: Any) -> str:
    """Return the line for an error of the parser: what is wrong, and an example or the help to read."""
    ctx = error.ctx
    return f"{_usage_problem(error)} ({_advice(ctx)})" if ctx is not None else _usage_problem(error)


@contextmanager
def with_names_of(ctx: Any) -> Iterator[None]:
    """Change errors of a command: they name the option, not the field, and the address of an unreachable Redis."""
    try:
        yield
    except UnavailableError as error:
        if error.code == "redis_away":
            error.message = _without_redis(error, ctx.params.get("redis_url"))
        raise
    except (ConfigError, RequestError) as error:
        if isinstance(error, ConfigError) and error.param == "redis_url":
            error.message = _refused(error, ctx.params.get("redis_url"))
        _name_option(error, ctx)
        raise


def _usage_problem(error: Any) -> str:
    if isinstance(error, typer.BadParameter):
        name = _name_of(error.param) if error.param is not None else "value"
        if not error.message:
            return f"{name} is missing"
        return f"{name}: {_value_problem(error)}"
    option = getattr(error, "option_name", None)
    if option is None:
        extra = _EXTRA_ARGUMENTS.search(error.message)
        return f"unexpected argument {extra[1]}" if extra else str(error.message)
    if not hasattr(error, "possibilities"):
        return f"{option} needs a value"
    known = [name for one in error.ctx.command.params for name in (*one.opts, *one.secondary_opts)]
    nearest = get_close_matches(option, [name for name in known if name.startswith("-")], n=1)
    return f"no option {option}" + (f"; did you mean {nearest[0]}?" if nearest else "")


def _value_problem(error: typer.BadParameter) -> str:
    """Return what is wrong with a value. Pydantic's words are replaced by those that HTTP callers get."""
    from pydantic import ValidationError

    from penstock.contract.problems import problem_of

    cause = error.__cause__
    return problem_of(cause).message if isinstance(cause, ValidationError) else error.message.rstrip(".")


def _advice(ctx: Any) -> str:
    if examples := examples_in(ctx.command.help or ""):
        return f"example: {examples[0]}"
    return f"see {ctx.command_path} --help"


def _name_of(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    return argument_name(parameter) if is_argument else next(name for name in parameter.opts if name.startswith("--"))


def _name_option(error: PenstockError, ctx: Any) -> None:
    """Name the option in `error`, or the environment variable if that gave the value."""
    field = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
    # The option of a field such as deadline_s is --deadline.
    names = {field, field.removesuffix("_s")}
    parameter = next((one for one in ctx.command.params if one.name in names), None)
    is_absent = parameter is None or ctx.params.get(parameter.name) in (None, (), [])
    variable = None
    if field and is_absent:
        prefixes = (*_VARIABLE_PREFIXES.get(ctx.info_name, ()), "PENSTOCK_")
        variable = next((name for prefix in prefixes if (name := f"{prefix}{field.upper()}") in os.environ), None)
    if variable is None and parameter is None:
        return
    name = variable or _name_of(parameter)
    if is_absent and not variable and error.message == f"{field}: is required":
        error.message = f"{name} is missing ({_advice(ctx)})"
    else:
        # Otherwise the message begins with a word of prose, as in "pool m has live nodes".
        error.message = re.sub(rf"^{re.escape(field)}(?=[:.\[]| must )", name, error.message)


def _refused(error: ConfigError, given_url: str | None) -> str:
    from penstock.queue.broker.connection import refused_at
    from penstock.runtime.settings import redis_url_of, without_password

    return refused_at(error, without_password(redis_url_of(given_url))).message


def _without_redis(error: UnavailableError, given_url: str | None) -> str:
    """Return one line: the address that was tried, why it failed, and how to start a Redis."""
    from penstock.queue.broker.connection import os_error_of, tls_problem
    from penstock.runtime.settings import redis_url_of, without_password

    if not error.message.startswith("Redis is unreachable"):
        return error.message  # It names one of several Redis.
    address = without_password(redis_url_of(given_url))
    if (why := tls_problem(error, address)) is not None:
        return f"no connection to Redis at {address}: {why}"
    if (cause := os_error_of(error)) is None:
        return f"Redis at {address} does not serve: {error.message.removeprefix('Redis is unreachable: ')}"
    reason = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else str(cause) or "no answer in time"
    return f"no Redis answers at {address}: {reason}; `penstock serve` starts one"


# --- the classes of all commands and groups

Function = TypeVar("Function", bound=Callable[..., Any])
# Completion would load rich, to remove its markup from help texts. Ours have none.
_completion_classes._sanitize_help_text = str  # type: ignore[assignment]
CONTEXT = {"help_option_names": ["-h", "--help"]}


class App(typer.Typer):
    """A group of commands. It is the class of every `app`, so that all commands behave in the same way."""

    def __init__(self, *, cls: type[TyperGroup] | None = None, add_completion: bool = False) -> None:
        super().__init__(
            cls=cls or Group,
            add_completion=add_completion,
            context_settings=CONTEXT,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        """Return a decorator that adds a command, as `Typer.command` does."""
        return super().command(name, cls=Command, context_settings=CONTEXT, **options)


class _Page:
    """The help page of a command or group."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words after the command's name: its arguments in capitals, optional ones in brackets."""
        return ["[OPTIONS]", *self._arguments(ctx)]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        write_text(formatter, ctx.command.help or "")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shows_all = ctx.meta.get(SHOWS_ALL, False)
        listed = [one for one in ctx.command.get_params(ctx) if shows_all or not getattr(one, "hidden", False)]
        write_parameters(formatter, ctx, listed)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(formatter, ctx.command.help or "")

    @staticmethod
    def _arguments(ctx: Any) -> Iterator[str]:
        for parameter in ctx.command.params:
            if parameter.param_type_name == "argument":
                name = argument_name(parameter)
                yield name if parameter.required else f"[{name}]"


class Command(_Page, TyperCommand):
    """One command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Options that no command has are refused all at once."""
        if not ctx.resilient_parsing:
            args = known_words(ctx, args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Its errors name the option, or the environment variable, that is wrong."""
        with with_names_of(ctx):
            return super().invoke(ctx)


class Group(_Page, TyperGroup):
    """A group of commands. Without a command it prints its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of the group. Without any argument, print the help."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            raise typer.Exit(EXIT_WRONG_USE)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that `args` begin with. An unknown one is refused with the nearest known name."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            nearest = get_close_matches(args[0], known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else f": {', '.join(known)}"
            ctx.fail(f"no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words after the group's name."""
        return ["[OPTIONS]", "COMMAND"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands first, because a reader of a group's help looks for them."""
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a row for each command with the first sentence of its help."""
        rows = [(name, first_sentence(one.help or "")) for name, one in self.commands.items()]
        write_section(formatter, "Commands", rows)
