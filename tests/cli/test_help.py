"""Every command's help at 80 columns: no name is cut off, and options are grouped by purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes.command import run_command
from typer.main import get_command

from penstock.cli.command_line import Command, Group
from penstock.cli.help_page import panel_by_setting
from penstock.cli.main import ENTRIES, PANELS, app
from penstock.contract.tenant import Terms
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.settings import POOL_WIDE, NodeSettings


def commands(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command and group with the words that call it."""
    yield path, found
    for name, command in getattr(found, "commands", {}).items():
        yield from commands(command, (*path, name))


COMMANDS = dict(commands(get_command(app)))
NAMES = [" ".join(path) or "penstock" for path in COMMANDS]


@pytest.mark.parametrize(("path", "command"), COMMANDS.items(), ids=NAMES)
def test_help_fits_80_columns_and_names_every_option_in_full(path: tuple[str, ...], command: Any) -> None:
    shown = run_command(*path, "--help", COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    if any(getattr(parameter, "hidden", False) for parameter in command.params):
        shown = run_command(*path, "--help-all", COLUMNS="80").stdout
        assert max(map(len, shown.splitlines())) <= 80
    words = set(shown.replace(",", " ").replace("[", " ").replace("]", " ").split())
    for parameter in command.params:
        names = {*parameter.opts, *parameter.secondary_opts}
        assert (names if parameter.param_type_name == "option" else {parameter.name.upper()}) <= {
            word.removesuffix("...") for word in words
        }


@pytest.mark.parametrize(("path", "command"), COMMANDS.items(), ids=NAMES)
def test_every_command_has_the_common_behavior_and_a_help_text(path: tuple[str, ...], command: Any) -> None:
    assert isinstance(command, Command | Group)
    assert command.help
    assert all(getattr(parameter, "help", "") for parameter in command.params)
    assert run_command(*path, "-h").stdout == run_command(*path, "--help").stdout


def test_commands_are_grouped_by_purpose() -> None:
    shown = run_command("--help").stdout
    at = [shown.index(f"\n{title}:\n") for title in PANELS]
    assert at == sorted(at)
    for entry in ENTRIES.values():
        assert f"  {entry.name} " in shown and " ".join(entry.summary.split()) in " ".join(shown.split())


@pytest.mark.parametrize("settings", [NodeSettings, GatewaySettings, Terms])
def test_every_setting_has_a_heading(settings: Any) -> None:
    options = set(settings.model_fields) - {"model", "account"}
    assert options == set(panel_by_setting(settings)), "give each setting a heading in cli/command_line.py"


def test_settings_that_nodes_of_a_pool_share_are_under_headings_that_say_so() -> None:
    headings = panel_by_setting(NodeSettings)
    assert {name for name, title in headings.items() if "equal on all nodes" in title} == set(POOL_WIDE)


def test_options_of_a_node_are_grouped_by_purpose() -> None:
    shown = run_command("node", "--help").stdout
    assert shown.index("\nModel:\n") < shown.index("  --runner, --device ") < shown.index("\nMemory:\n")
    assert shown.index("\nMemory:\n") < shown.index("  --swap-space, --swap-space-gib ") < shown.index("\nBatching:\n")


def test_options_that_change_a_key_name_no_defaults() -> None:
    assert "Default: 0." in run_command("keys", "add", "--help").stdout
    assert "Default: " not in run_command("keys", "set", "--help").stdout.partition("\nLimits of the tenant:\n")[2]


@pytest.mark.parametrize("path", [(), ("jobs",), ("keys",)])
def test_a_group_without_a_command_shows_its_help_as_an_error(path: tuple[str, ...]) -> None:
    done = run_command(*path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == run_command(*path, "-h").stdout


def test_examples_can_be_copied_from_the_help() -> None:
    assert '\nExamples:\n  penstock submit "Name three rivers." --max-tokens 64\n' in run_command("submit", "-h").stdout


@pytest.mark.parametrize(("path", "command"), COMMANDS.items(), ids=NAMES)
def test_examples_call_the_command_with_known_options(path: tuple[str, ...], command: Any) -> None:
    from penstock.cli.help_page import examples_in

    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for example in examples_in(command.help):
        assert example.startswith(" ".join(("penstock", *path)))
        assert {word for word in example.split() if word.startswith("--")} <= known
