"""The `penstock` command: finds the subcommand, and turns our errors into one clear line and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli import audit, batch, dead, demo, doctor, gateway, keys, node, pools, serve, submit
from penstock.contract.errors import (
    EXIT_WRONG_USE,
    BusyError,
    ConfigError,
    PenstockError,
    RequestError,
    UnavailableError,
)

EXIT_FAILED = 1
EXIT_TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h."""
EXIT_INTERRUPTED = 130


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            print(f"penstock: {error.message}", file=sys.stderr)
            raise typer.Exit(exit_code_of(error)) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


def exit_code_of(error: PenstockError) -> int:
    """2: the command was wrong; 75: the same command may work later; 1: the rest."""
    if isinstance(error, RequestError | ConfigError):
        return EXIT_WRONG_USE
    if isinstance(error, BusyError | UnavailableError):
        return EXIT_TRY_AGAIN
    return EXIT_FAILED


app = typer.Typer(
    cls=_Group,
    help="LLM inference behind a message queue.",
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
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


for _command in (demo.demo, serve.serve, submit.submit, node.node, gateway.gateway, doctor.doctor, audit.audit):
    app.command()(_command)
app.add_typer(batch.app, name="batch")
app.add_typer(pools.app, name="pools")
app.add_typer(keys.app, name="keys")
app.add_typer(dead.app, name="dead")
