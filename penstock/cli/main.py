"""The `penstock` command: its subcommands, and the translation of errors to one line and an exit code."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli import audit, batch, dead, demo, doctor, gateway, jobs, node, pools, serve, submit
from penstock.cli.exit_codes import exit_code_of as exit_code_of
from penstock.cli.keys import commands as keys
from penstock.cli.profile.command import profile
from penstock.contract.errors import EXIT_INTERRUPTED, PenstockError


class _Group(TyperGroup):
    """Runs the subcommand and translates its errors."""

    def invoke(self, ctx: Any) -> Any:
        _accept_any_text()
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            print(f"penstock: {error.message}", file=sys.stderr)
            raise typer.Exit(exit_code_of(error)) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


def _accept_any_text() -> None:
    """Make stdin and stdout accept text that the terminal's encoding cannot represent.

    Such characters are printed as escapes. Invalid input bytes are read as surrogates, which the checks of a request
    refuse by name. Otherwise a UnicodeError would abort the command.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


app = typer.Typer(
    cls=_Group,
    help="LLM inference backed by a Redis message queue.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


for _command in (demo.demo, serve.serve, submit.submit, node.node, gateway.gateway, doctor.doctor, audit.audit):
    app.command()(_command)
app.command()(profile)
app.add_typer(batch.app, name="batch")
app.add_typer(pools.app, name="pools")
app.add_typer(keys.app, name="keys")
app.add_typer(jobs.app, name="jobs")
app.add_typer(dead.app, name="dead")
