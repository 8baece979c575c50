"""Command-line options generated from settings and from sampling options.

An option that is not given is None. The environment then applies to a setting, and the model's default to sampling.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from inspect import Parameter, Signature, signature
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.cli.help_page import default_in_words, panel_by_setting, sampling_option
from penstock.contract.durations import span_of
from penstock.contract.errors import ConfigError, PenstockError, RequestError
from penstock.contract.fields import option_of
from penstock.contract.sampling import SamplingParams
from penstock.runtime.settings import Settings

TIME_HELP = "An age such as 90m, 2h or 3d, or a time such as 2026-11-22T05:00 (UTC unless it names a zone)."
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SPAN = "SECONDS|TIME"
"""The form of an option that takes seconds, or the time at which they have passed."""


def seconds_of_text(text: str) -> float:
    """Return the seconds of a text: a number, or a time with its offset. Raises RequestError."""
    with suppress(ValueError):
        return float(text)
    return float(span_of(text))


def unix_s_of(text: str | None, flag: str, now_s: float) -> float | None:
    """Return the Unix time, in seconds, that a flag's text means, see TIME_HELP. An age counts back from `now_s`.

    Raises RequestError.
    """
    if text is None:
        return None
    if text[:-1].isdecimal() and text[-1] in _UNIT_S:
        return max(0.0, now_s - int(text[:-1]) * _UNIT_S[text[-1]])
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(f"{flag}: {text[:32]!r} is not a time. {TIME_HELP}", param=flag) from None
    return (given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp()


# The help texts of settings are the docstrings of their fields. Pydantic can read these too, but only when it creates
# the class. That would take 20 ms at the start of every process that has the settings, even if it prints no help.


def docstrings_of(settings: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a class's fields by name, without line breaks. Empty if there is no source code."""
    found: dict[str, str] = {}
    for parent in reversed(settings.__mro__):
        if issubclass(parent, BaseModel) and not parent.__module__.startswith("pydantic"):
            found |= _docstrings_in(parent.__module__).get(parent.__qualname__, {})
    return {name: text for name, text in found.items() if name in settings.model_fields}


def with_default(text: str, field: FieldInfo) -> str:
    """Return a help text that names the field's default, if it has one."""
    has_default = not field.is_required() and field.default_factory is None and field.default not in (None, ())
    return f"{text} Default: {default_in_words(field.default)}." if has_default else text


# Of one user, or of our own code and files.
@cache
def _docstrings_in(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings of all fields in a module: by the name of the class, and by that of the field."""
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:
        return {}
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {each.name: _docstrings_of_class(each) for each in classes}


def _docstrings_of_class(definition: ast.ClassDef) -> dict[str, str]:
    return {
        field.target.id: " ".join(after.value.value.split())
        for field, after in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


T = TypeVar("T")
AnySettings = TypeVar("AnySettings", bound=Settings)
Command = TypeVar("Command", bound=Callable[..., None])
REDIS_URL_HELP = "URL of the pools' Redis. Default: $PENSTOCK_REDIS_URL, or the Redis of penstock serve."
DURABILITY_HELP = (
    "What a call waits for: Redis, its disk or a replica. Default: $PENSTOCK_CLIENT_DURABILITY, or memory."
)
RedisUrl = Annotated[str | None, typer.Option(help=REDIS_URL_HELP)]
"""The option of commands that read or write the queue."""


def options_of(
    settings: type[BaseModel],
    names: Iterable[str] | None = None,
    *,
    flags: Mapping[str, Sequence[str]] | None = None,
    shows_defaults: bool = True,
    shown: Container[str] | None = None,
) -> list[Parameter]:
    """Return an option for each of these settings (None: for all), or of other fields with docstrings.

    They come in the order of the headings in `help_page.py`.

    `flags` maps a setting to its flags if they differ from its name. Without `shows_defaults`, the help texts name no
    defaults, because an option that is not given changes nothing. `shown` has the settings that `--help` lists (None:
    all of them); `--help-all` lists the others too.
    """
    fields, panels = settings.model_fields, panel_by_setting(settings)
    flags = flags or {}
    rank = {name: number for number, name in enumerate(panels)}
    wanted = sorted(names or fields, key=lambda name: rank.get(name, len(rank)))
    texts = docstrings_of(settings)
    if shows_defaults:
        texts = {name: with_default(text, fields[name]) for name, text in texts.items()}
    return [
        _option(
            name,
            fields[name],
            flags.get(name, ()),
            help=texts.get(name),
            rich_help_panel=panels.get(name),
            hidden=shown is not None and name not in shown,
        )
        for name in wanted
    ]


_BOUNDS = {"ge": "min", "le": "max"}
"""Marks of a field → what typer calls them."""


def sampling_flags() -> Iterator[Parameter]:
    """Yield a flag for each sampling option that has a help text."""
    for name, field in SamplingParams.model_fields.items():
        if not (text := option_of(SamplingParams, name).flag):
            continue
        kind: Any = list[str] if get_origin(field.annotation) is tuple else field.annotation
        marks = [(bound, getattr(mark, ours, None)) for mark in field.metadata for ours, bound in _BOUNDS.items()]
        limits = {bound: limit for bound, limit in marks if limit is not None}
        flag = Annotated[kind | None, sampling_option(help=text, **limits)]
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=flag)


def given_flags(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the sampling flags that the command line has."""
    return {name: value for name, value in sampling.items() if value not in (None, [])}


def takes(
    *options: Parameter,
    before: str | None = None,
    problems: Callable[[Mapping[str, Any]], Sequence[PenstockError]] | None = None,
) -> Callable[[Command], Command]:
    """Return a decorator that replaces a command's `**given` with these options.

    They come after its own parameters, or before the one that `before` names. `problems` returns all that is wrong with
    their values, so that it is said together with unknown options and values of a wrong type.
    """

    def decorated(command: Command) -> Command:
        parameters = signature(command, eval_str=True).parameters.values()
        own = [parameter for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
        at = next((at for at, parameter in enumerate(own) if parameter.name == before), len(own))
        listed = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (*own[:at], *options, *own[at:])]
        command.__signature__ = Signature(listed)  # type: ignore[attr-defined]
        if problems is not None:
            command.problems = problems  # type: ignore[attr-defined]
        return command

    return decorated


class Problems:
    """The errors of several checks, which are told together."""

    def __init__(self) -> None:
        self.found: list[PenstockError] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Return what a check returns, or note its error and return None."""
        try:
            return check()
        except (ConfigError, RequestError) as error:
            self.found.append(error)
            return None

    def settings(self, kind: type[AnySettings], given: Mapping[str, Any]) -> AnySettings | None:
        """Return settings. Wrong ones are noted, and have their defaults, so that the others can be checked further."""
        if (loaded := self.of(lambda: kind.load(**given))) is not None:
            return loaded
        error = self.found[-1]
        wrong = {re.split(r"[.\[]", param or "")[0] for param in (error.param, *error.also)}
        try:
            return kind.load(**{name: value for name, value in given.items() if name not in wrong})
        except ConfigError:
            return None


def taken_for(settings: type[BaseModel], given: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of these settings from `given`, and return them."""
    return {name: given.pop(name) for name in settings.model_fields}


def words_of(given: Mapping[str, object], flags: Mapping[str, Sequence[str]] | None = None) -> tuple[str, ...]:
    """Return the given options as arguments for another process. Options that are None are left out.

    `flags` as in `options_of`. The flag of a list is repeated.
    """
    words: list[str] = []
    for name, value in given.items():
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
            continue
        values = value if isinstance(value, list) else [] if value is None else [value]
        flag = (flags or {}).get(name, (f"--{name.replace('_', '-')}",))[0]
        words += [word for one in values for word in (flag, str(one))]
    return tuple(words)


def _option(name: str, field: FieldInfo, flags: Sequence[str], **settings: Any) -> Parameter:
    kind: Any = list[str] if get_origin(field.annotation) is tuple else field.annotation
    option = typer.Option(*flags, **settings)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])
