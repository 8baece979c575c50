"""The `penstock` command: finds the subcommand, and turns our errors into one clear line and an exit code."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli import audit, batch, dead, demo, doctor, gateway, keys, node, pools, serve, submit
from penstock.cli.exit_codes import exit_code_of as exit_code_of
from penstock.contract.errors import EXIT_INTERRUPTED, PenstockError


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        _take_any_text()
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            print(f"penstock: {error.message}", file=sys.stderr)
            raise typer.Exit(exit_code_of(error)) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


def _take_any_text() -> None:
    """Shows what the terminal's encoding lacks as escapes, and reads what is not text so that the door refuses it by
    name; both would end the command half way otherwise.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


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
