"""The commands of `penstock`, each imported when it is first used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.main import get_command

from penstock.cli.command_line.commands import App


@dataclass(frozen=True, slots=True)
class Entry:
    """One command as the help of `penstock` shows it."""

    name: str
    home: str
    """Module and attribute: a function, or the `App` of a group."""
    summary: str


class LazyCommands(Mapping[str, Any]):
    """The commands by name. Looking one up imports its module."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(self._entries[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _load(entry: Entry) -> Any:
    module, _, attribute = entry.home.partition(":")
    target = getattr(import_module(module), attribute)
    if isinstance(target, typer.Typer):
        return get_command(target)
    app = App()
    app.command(entry.name)(target)
    return get_command(app)
