"""Pages of the reference that are written from the code. The interfaces are in `api_reference.py`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined
from typer.main import get_command

from docs_site.api_reference import http_page, line, metrics_page, python_page, table
from penstock.cli.machine.config import PARTS
from penstock.cli.main import PANELS, app
from penstock.cli.options import docstrings_of
from penstock.contract import errors
from penstock.contract.errors import PenstockError
from penstock.queue import keys
from penstock.runtime.settings import KeySettings, RedisSettings, Settings

_PARTS = {
    "shared": "Settings of several processes",
    "node": "A node: `penstock node`, `penstock serve`",
    "rank": "A rank on another host: `penstock rank`",
    "gateway": "A gateway: `penstock gateway`, `penstock serve`",
    "client": "A Python client, and the client inside a gateway or worker",
    "files": "Stored files and batches: gateways and workers",
    "worker": "A Celery worker",
}


def reference_pages() -> dict[str, str]:
    """Return the pages by their file names."""
    return {
        "commands.md": _commands(),
        "settings.md": _settings(),
        "errors.md": _errors(),
        "redis_keys.md": _redis_keys(),
        "http.md": http_page(),
        "metrics.md": metrics_page(),
        "python.md": python_page(),
    }


def _commands() -> str:
    lines = ["# Commands", "", "Made from the code. [CLI](../docs/CLI.md) explains how they are used.", ""]
    group: Any = get_command(app)
    for title, entries in PANELS.items():
        lines += [f"## {title}", ""]
        for entry in entries:
            for path, command in _walk(group.commands[entry.name], (entry.name,)):
                lines += _command(path, command)
    return "\n".join(lines)


def _walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield path, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from _walk(sub, (*path, name))


def _command(path: tuple[str, ...], command: Any) -> list[str]:
    text, _, examples = inspect.cleandoc(command.help or "").partition("Examples:")
    lines = [f"### `penstock {' '.join(path)}`", "", text.strip(), ""]
    if examples.strip():
        lines += ["```sh", inspect.cleandoc(examples), "```", ""]
    rows = [
        (f"`{'`, `'.join((*parameter.opts, *parameter.secondary_opts))}`", getattr(parameter, "help", ""))
        for parameter in command.params
        if "--help" not in parameter.opts
    ]
    return lines + table(("option", "meaning"), rows)


def _settings() -> str:
    lines = ["# Settings", "", "Made from the code. `penstock config show` says what each one is, and what set it.", ""]
    lines += [
        'A variable with several values is JSON, such as `["one", "two"]`. A process refuses a misspelled name.',
        "",
        "Secrets may be in files: "
        + ", ".join(f"`PENSTOCK_{name.upper()}_FILE`" for name in sorted(RedisSettings.secrets | KeySettings.secrets))
        + " name a file each. The variable without `_FILE` goes first.",
        "",
    ]
    for part, kinds in PARTS.items():
        lines += [f"## {_PARTS[part]}", ""]
        rows = [
            row for kind in kinds for row in _rows_of(kind) if part == "shared" or not row[0].endswith("_REDIS_URL`")
        ]
        lines += table(("variable", "default", "meaning"), rows)
    return "\n".join(lines)


def _rows_of(kind: type[Settings]) -> Iterator[tuple[str, str, str]]:
    texts = docstrings_of(kind)
    for name, field in kind.model_fields.items():
        is_stated = field.default is not PydanticUndefined and field.default not in (None, "", ())
        default = f"`{field.default}`" if is_stated else ""
        yield f"`{kind.variable_of(name)}`", default, texts.get(name, "")


def _errors() -> str:
    head = "Made from the code. [HTTP](../docs/HTTP.md#errors) says when each one is the answer, and what to do."
    lines = ["# Errors", "", head, ""]
    found = {error.code: error for error in _errors_of(PenstockError)}
    rows = [(f"`{code}`", f"`{found[code].__name__}`", line(found[code].__doc__ or "")) for code in sorted(found)]
    return "\n".join([*lines, *table(("code", "class in Python", "meaning"), rows)])


def _errors_of(kind: type[PenstockError]) -> Iterator[type[PenstockError]]:
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield one
            yield from _errors_of(one)


def _redis_keys() -> str:
    intro, table = inspect.cleandoc(keys.__doc__ or "").split("\n\n", 1)
    lines = ["# Keys in Redis", "", intro, "", "This is the table at the head of `src/penstock/queue/keys.py`.", ""]
    return "\n".join([*lines, "```text", table, "```", ""])
