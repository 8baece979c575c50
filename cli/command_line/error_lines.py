"""Errors of the command line in one line: each names the option that is wrong, and says what to do.

Imports that take time are inside the functions, because every command imports this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import typer

from penstock.cli.command_line.help_page import argument_name, examples_in
from penstock.contract.errors import ConfigError, PenstockError, RequestError, UnavailableError

_EXTRA_ARGUMENTS = re.compile(r"unexpected extra argument\S* \((\S+).*\)")
_VARIABLE_PREFIXES = {
    "node": ("PENSTOCK_NODE_",),
    "gateway": ("PENSTOCK_GATEWAY_",),
    "serve": ("PENSTOCK_NODE_", "PENSTOCK_GATEWAY_"),
}
"""Command → prefix of the environment variables that set its options."""

_NOT_NEEDED = {
    "--api-key": "`penstock keys add TENANT` makes API keys",
    "--pipeline-parallel-size": "a node computes its model on one device; further nodes share the load",
    "--tensor-parallel-size": "a node computes its model on one device; further nodes share the load",
    "--trust-remote-code": "code that comes with a checkpoint never runs",
}
"""Options of vLLM's server that no command has → what is done instead."""


def usage_line(error: Any) -> str:
    """Return the line for an error of the parser: what is wrong, and an example or the help to read."""
    ctx = error.ctx
    return f"{_usage_problem(error)} ({_advice(ctx)})" if ctx is not None else _usage_problem(error)


@contextmanager
def with_names_of(ctx: Any) -> Iterator[None]:
    """Change errors of a command so that they name its option instead of our field, or the unreachable Redis."""
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
    if instead := _instead_of(option, error.ctx):
        return f"no option {option}: {instead}"
    known = [name for one in error.ctx.command.params for name in (*one.opts, *one.secondary_opts)]
    nearest = get_close_matches(option, [name for name in known if name.startswith("-")], n=1)
    return f"no option {option}" + (f"; did you mean {nearest[0]}?" if nearest else "")


def _instead_of(option: str, ctx: Any) -> str | None:
    """Return what to do instead of an option of vLLM's server, or of a part of `serve`; None if nothing is known."""
    if ctx.info_name not in _VARIABLE_PREFIXES:
        return None
    for part in ("node", "gateway") if ctx.info_name == "serve" else ():
        command = ctx.find_root().command.get_command(ctx, part)
        if found := next((one for one in command.params if option in (*one.opts, *one.secondary_opts)), None):
            (prefix,) = _VARIABLE_PREFIXES[part]
            return f"set {prefix}{found.name.upper()}, as for every setting of `penstock {part}`"
    return _NOT_NEEDED.get(option)


def _value_problem(error: typer.BadParameter) -> str:
    """Return what is wrong with a value, in our own words where the library has checked it."""
    from pydantic import ValidationError

    from penstock.contract.named import problem_of

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
    variable = _variable_of(field, ctx.info_name) if field and is_absent else None
    if variable is None and parameter is None:
        return
    name = variable or _name_of(parameter)
    if is_absent and not variable and error.message == f"{field}: is required":
        error.message = f"{name} is missing ({_advice(ctx)})"
    else:
        # Otherwise the message begins with a word of prose, as in "pool m has live nodes".
        error.message = re.sub(rf"^{re.escape(field)}(?=[:.\[]| must )", name, error.message)


def _variable_of(field: str, command: str) -> str | None:
    """Return the environment variable that is set for a setting of this command, or None."""
    prefixes = (*_VARIABLE_PREFIXES.get(command, ()), "PENSTOCK_")
    variables = [f"{prefix}{field.upper()}" for prefix in prefixes]
    return next((variable for variable in variables if variable in os.environ), None)


def _refused(error: ConfigError, given_url: str | None) -> str:
    from penstock.queue.broker.connection import refused_at
    from penstock.runtime.settings import redis_url_of, without_password

    return refused_at(error, without_password(redis_url_of(given_url))).message


def _without_redis(error: UnavailableError, given_url: str | None) -> str:
    """Return one line: the address that was tried, why it failed, and how to start a Redis."""
    from penstock.queue.broker.connection import os_error_of, tls_problem
    from penstock.runtime.settings import redis_url_of, without_password

    address = without_password(redis_url_of(given_url))
    if (why := tls_problem(error, address)) is not None:
        return f"no connection to Redis at {address}: {why}"
    if (cause := os_error_of(error)) is None:
        return f"Redis at {address} does not serve: {error.message.removeprefix('Redis is unreachable: ')}"
    reason = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else str(cause) or "no answer in time"
    return f"no Redis answers at {address}: {reason}; `penstock serve` starts one"
