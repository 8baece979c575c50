"""The classes of all commands and groups: `-h`, help pages in sections, and errors that name the option."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, TypeVar

import typer
from typer import _completion_classes
from typer.core import TyperCommand, TyperGroup

from penstock.cli.command_line import help_page
from penstock.cli.command_line.error_lines import with_names_of
from penstock.contract.errors import EXIT_WRONG_USE

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
        help_page.write_text(formatter, ctx.command.help or "")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        help_page.write_parameters(formatter, ctx, ctx.command.get_params(ctx))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        help_page.write_examples(formatter, ctx.command.help or "")

    @staticmethod
    def _arguments(ctx: Any) -> Iterator[str]:
        for parameter in ctx.command.params:
            if parameter.param_type_name == "argument":
                name = help_page.argument_name(parameter)
                yield name if parameter.required else f"[{name}]"


class Command(_Page, TyperCommand):
    """One command."""

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
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that `args` begin with. An unknown one is refused with the nearest known name."""
        known = self.list_commands(ctx)
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
        rows = [(name, help_page.first_sentence(one.help or "")) for name, one in self.commands.items()]
        help_page.write_section(formatter, "Commands", rows)
