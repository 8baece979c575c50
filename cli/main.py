"""The `penstock` command: its subcommands, and the translation of errors to one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import CompletionItem  # type: ignore[attr-defined]
from typer.main import get_command

from penstock import __version__
from penstock.cli.command_line import App, Group, usage_line
from penstock.cli.help_page import write_section
from penstock.cli.output import EXIT_FAILED, give_up_stdout, problem_of_output, write_error, write_line
from penstock.cli.output import exit_code_of as exit_code_of
from penstock.contract.errors import EXIT_INTERRUPTED, PenstockError
from penstock.runtime.process_memory import no_collection


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """One command as the help of `penstock` shows it."""

    name: str
    home: str
    """Module and attribute: a function, or the `App` of a group."""
    summary: str


class LazyCommands(Mapping[str, Any]):
    """The commands by name. Looking up a command imports its module."""

    def __init__(self, entries: Mapping[str, CommandEntry]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Any:
        return _load(self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


# Of one user, or of our own code and files.
@cache
def _load(entry: CommandEntry) -> Any:
    module, _, attribute = entry.home.partition(":")
    with no_collection():  # Modules are no garbage, and looking for some takes a seventh of the time.
        target = getattr(import_module(module), attribute)
    if isinstance(target, typer.Typer):
        return get_command(target)
    app = App()
    app.command(entry.name)(target)
    return get_command(app)


PANELS: Mapping[str, tuple[CommandEntry, ...]] = {
    "Run": (
        CommandEntry("serve", "penstock.cli.serve:serve", "Serve a model on this machine: Redis, a node and a gateway"),
        CommandEntry("node", "penstock.cli.services:node", "Run a node with one model"),
        CommandEntry("rank", "penstock.cli.machine.rank:rank", "Compute a part of a model for a node on another host"),
        CommandEntry("gateway", "penstock.cli.services:gateway", "Run an HTTP gateway"),
        CommandEntry("demo", "penstock.cli.demo:demo", "Start everything, stream one answer, and stop everything"),
    ),
    "Ask": (
        CommandEntry("chat", "penstock.cli.chat:chat", "Chat with a served model in the terminal"),
        CommandEntry("submit", "penstock.cli.submit:submit", "Submit one prompt and print its answer"),
        CommandEntry("embed", "penstock.cli.texts:embed", "Embed each line of a file"),
        CommandEntry("rerank", "penstock.cli.texts:rerank", "Order the lines of a file by how well they fit a query"),
        CommandEntry("batch", "penstock.cli.batch.commands:app", "Answer a file of requests"),
        CommandEntry("flows", "penstock.cli.flows.commands:app", "Run rows that wait for rows and have their texts"),
        CommandEntry("schedules", "penstock.cli.schedules:app", "Start jobs and batches at times that come again"),
    ),
    "Look": (
        CommandEntry("jobs", "penstock.cli.jobs:app", "List, show, cancel or follow jobs"),
        CommandEntry("why", "penstock.cli.jobs:why", "Say what a job waits for, or where its time went"),
        CommandEntry("pools", "penstock.cli.pools:app", "List the served models with their load; remove a pool"),
        CommandEntry("dead", "penstock.cli.dead:app", "Show, retry or delete jobs that lost too many nodes"),
        CommandEntry("top", "penstock.cli.top.commands:top", "Show nodes, queues and tenants live"),
        CommandEntry(
            "doctor", "penstock.cli.machine.doctor:doctor", "Check this machine, its Redis and its nodes, with advice"
        ),
        CommandEntry("config", "penstock.cli.machine.config:app", "Show settings, and what sets each of them"),
        CommandEntry(
            "support-bundle",
            "penstock.cli.machine.support_bundle:support_bundle",
            "Collect what a bug report needs in one archive, without secrets",
        ),
    ),
    "Measure": (
        CommandEntry("plan", "penstock.cli.machine.plan:plan", "Say which ranks and replicas of a model fit devices"),
        CommandEntry("bench", "penstock.cli.bench.commands:app", "Put load on a server and measure it"),
        CommandEntry("profile", "penstock.cli.profile:profile", "Record where the time of a running node goes"),
    ),
    "Administer": (
        CommandEntry("keys", "penstock.cli.keys:app", "Manage the API keys of the gateways"),
        CommandEntry("tenants", "penstock.cli.tenants:app", "Delete all data of a tenant"),
        CommandEntry("audit", "penstock.cli.audit:audit", "Check that all data in Redis agrees with the jobs"),
    ),
}
"""The subcommands under the headings of the help."""
ENTRIES = {entry.name: entry for entries in PANELS.values() for entry in entries}
LOGGING_COMMANDS = frozenset(("serve", "node", "rank", "gateway"))
"""The commands that write a log."""


class _Root(Group):
    """`penstock` itself. It runs the subcommand and translates its errors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"commands": LazyCommands(ENTRIES)})
        self._asks_for_json = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all subcommands without importing them."""
        return list(ENTRIES)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the subcommands under their headings."""
        for title, entries in PANELS.items():
            write_section(formatter, title, [(entry.name, entry.summary) for entry in entries])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the completions of an option or a subcommand's name. No subcommand's module is imported."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        items = [CompletionItem(entry.name, help=entry.summary) for entry in ENTRIES.values()]
        return [item for item in items if item.value.startswith(incomplete)]

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand. An error ends it with one line and an exit code."""
        # Text that the terminal's encoding cannot represent would raise a UnicodeError and abort the command. So it is
        # printed as escapes. Invalid bytes of the input become surrogates, which a request's checks refuse by name.
        for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors=errors)
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            write_error(error.reason, as_json=self._asks_for_json)
            raise typer.Exit(exit_code_of(error)) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the command line. A wrong use ends with one line on stderr."""
        standalone_mode = options.get("standalone_mode", True)
        words = options.get("args") or (arguments[0] if arguments else None) or sys.argv[1:]
        self._asks_for_json = _asks_for_json([*words])
        try:
            status = super().main(*arguments, **options | {"standalone_mode": False})
            # What is still in the buffer may not fit on a disk, which must not go unnoticed.
            sys.stdout.flush()
        except typer.TyperException as error:
            if not standalone_mode:
                raise
            write_error(usage_line(error), as_json=self._asks_for_json)
            sys.exit(error.exit_code)
        except (OSError, ExceptionGroup) as error:
            if not standalone_mode or (problem := problem_of_output(error)) is None:
                raise
            write_error(problem)
            give_up_stdout()
            sys.exit(EXIT_FAILED)
        if not standalone_mode:
            return status
        sys.exit(status or 0)


def _asks_for_json(words: Sequence[str]) -> bool:
    """Return whether a command line starts a process whose log is to be JSON: then its errors are, too."""
    if not words or words[0] not in LOGGING_COMMANDS:
        return False
    given = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--log-format"]
    given += [word.removeprefix("--log-format=") for word in words if word.startswith("--log-format=")]
    return (given or [os.environ.get("PENSTOCK_LOG_FORMAT", "")])[-1] == "json"


app = App(cls=_Root, add_completion=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        write_line(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """LLM inference backed by a Redis message queue."""
