"""Commands and their errors: one line that names every wrong option and says what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

import typer
from typer import _completion_classes
from typer.core import TyperCommand, TyperGroup

from penstock.cli.help_page import (
    argument_name,
    examples_in,
    first_sentence,
    write_examples,
    write_parameters,
    write_section,
    write_text,
)
from penstock.cli.option_words import SHOWS_ALL, KnownWords
from penstock.cli.peers import COMMANDS, PEERS
from penstock.contract.errors import EXIT_WRONG_USE, ConfigError, PenstockError, RequestError, UnavailableError

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


def _wrong_words(ctx: Any, words: KnownWords, failure: Any) -> list[str]:
    """Return a sentence for each thing that is wrong in a command line. `failure`: the parser's first error, or None.

    The values that are right are checked together, as the command would do it.
    """
    found, said = [], words.wrong()
    if failure is not None:
        try:
            values, rest, _ = ctx.command.make_parser(ctx).parse_args(args=[*words.taken])
        except typer.TyperException:
            return [*said, _usage_problem(failure)]
        if rest and not words.problems:
            found.append(f"unexpected argument {rest[0]}")
        for parameter in ctx.command.get_params(ctx):
            try:
                parameter.handle_parse_result(ctx, values, list(rest))
            except typer.BadParameter as error:
                ctx.params[parameter.name] = None
                # The value of an unknown option may be the argument that seems to be missing.
                found += [_usage_problem(error)] if error.message or not words.problems else []
    for problem in getattr(ctx.command.callback, "problems", lambda _: ())(ctx.params):
        _name_option(problem, ctx)
        found.append(problem.message)
    return said + found


@contextmanager
def with_names_of(ctx: Any) -> Iterator[None]:
    """Change errors of a command: they name the option, not the field, and the address of an unreachable Redis."""
    try:
        yield
    except UnavailableError as error:
        if error.code == "redis_away":
            error.message, error.detail = _without_redis(error, ctx.params.get("redis_url")), ""
        raise
    except (ConfigError, RequestError) as error:
        if isinstance(error, ConfigError) and error.param == "redis_url":
            error.message, error.detail = _refused(error, ctx.params.get("redis_url")), ""
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
    message = problem_of(cause).message if isinstance(cause, ValidationError) else error.message
    return message.rstrip(".")


def _advice(ctx: Any) -> str:
    if examples := examples_in(ctx.command.help or ""):
        return f"example: {examples[0]}"
    return f"see {ctx.command_path} --help"


def _name_of(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    return argument_name(parameter) if is_argument else next(name for name in parameter.opts if name.startswith("--"))


def _name_option(error: PenstockError, ctx: Any) -> None:
    """Name the options in `error`, or the environment variables that gave the values."""
    for param in (error.param, *error.also):
        _name_one(error, param, ctx)


def _name_one(error: PenstockError, param: str | None, ctx: Any) -> None:
    field = re.split(r"[.\[]", param or "", maxsplit=1)[0]
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
        error.message = error.message.replace(f"{field}: is required", f"{name} is missing")
        # Otherwise the message begins with a word of prose, as in "pool m has live nodes".
        piece = rf"(^|; ){re.escape(field)}(?=[:.\[]| must )"
        error.message = re.sub(piece, lambda match: f"{match[1]}{name}", error.message, count=1)


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
        return f"Redis at {address} does not serve: {error.reason.removeprefix('Redis is unreachable: ')}"
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
        """Parse the command line. All that is wrong in it is said at once."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        words, failure, rest = KnownWords(ctx, args), None, list[str]()
        try:
            rest = super().parse_args(ctx, [*words.taken])
        except typer.TyperException as error:
            failure = error
        if failure is not None or words.wrong():
            ctx.fail("; ".join(_wrong_words(ctx, words, failure)))
        words.tell_notices()
        return rest

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
        option = args[0].partition("=")[0] if ctx.parent is None and args else ""
        if option in PEERS and not ctx.resilient_parsing:
            ctx.fail(f"{option} is an option of a server, which follows its command: penstock serve {option} …")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that `args` begin with. An unknown one is refused with the nearest known name."""
        known = self.list_commands(ctx)
        if ctx.parent is None and args[0] in COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"no command {args[0]!r}: {COMMANDS[args[0]]}")
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
