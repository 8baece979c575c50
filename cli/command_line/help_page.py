"""Help pages: options grouped by purpose, in two columns. No name and no metavar is ever cut off."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import typer

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
