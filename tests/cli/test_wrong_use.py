"""A usage error prints one line, which names the option or command and the remedy."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes.command import run_command
from fakes.queue.harness import Queue

from penstock.queue.broker.connection import connect


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nod", "no command 'nod'; did you mean node? (see penstock --help)"),
        ("xyzzy", "no command 'xyzzy': serve, node, "),
        ("jobs lst", "no command 'lst'; did you mean list? (see penstock jobs --help)"),
        ("jobs list --limt 3", "no option --limt; did you mean --limit? (see penstock jobs list --help)"),
        ("--verson", "no option --verson; did you mean --version? (see penstock --help)"),
        ("serve m --max-num-sqs 8", "no option --max-num-sqs; did you mean --max-num-seqs? (example: penstock serve)"),
        ("serve m --swap-space -1", "--swap-space-gib: must be at least 0"),
        ("serve m --root-path /v", "no option --root-path: a proxy before the gateway adds a path "),
        ("node m --port 1", "no option --port: --port is an option of `penstock gateway` "),
        ("submit", 'PROMPT is missing (example: penstock submit "Name three rivers." --max-tokens 64)'),
        ("batch run in.jsonl", "OUTPUT is missing (example: penstock batch run "),
        ("keys add", "TENANT is missing (example: penstock keys add acme "),
        ("jobs show", "JOB_ID is missing (example: penstock jobs show JOB_ID)"),
        ("jobs list --limit", "--limit needs a value"),
        ("jobs list --limit x", "--limit: must be an integer (see penstock jobs list --help)"),
        ("jobs list --limit 0", "--limit: must be at least 1 (see penstock jobs list --help)"),
        ("jobs list --state lost", "--state: 'lost' is not one of scheduled, queued, "),
        ("submit x --temperature warm", "--temperature: must be a number (example: penstock submit "),
        ("pools list one two", "unexpected argument one (see penstock pools list --help)"),
        (
            "node --redis-url unix://x",
            "MODEL is missing (example: penstock node ORG/MODEL --redis-url redis://localhost)",
        ),
        ("node m --redis-url unix://x --lease-ms 1", "--lease-ms: must be at least 3000"),
        ("node m --redis-url unix://x --swap-space -1", "--swap-space-gib: must be at least 0"),
        ("gateway --redis-url unix://x --max-sockets=-1", "--max-sockets: must be at least 0"),
    ],
)
def test_wrong_use_is_one_line_that_says_what_to_do(line: str, said: str) -> None:
    done = run_command(*line.split(), COLUMNS="40")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"penstock: {said}")
    assert done.stderr.count("\n") == 1


def test_error_names_the_wrong_environment_variable() -> None:
    done = run_command("node", "m", "--redis-url", "unix://x", PENSTOCK_NODE_LEASE_MS="1")
    assert (done.returncode, done.stderr) == (2, "penstock: PENSTOCK_NODE_LEASE_MS: must be at least 3000\n")


def test_the_option_of_a_field_with_a_unit_is_named(redis_url: str) -> None:
    async def announce() -> None:
        async with connect(redis_url) as redis:
            await Queue(redis).node()

    asyncio.run(announce())
    done = run_command("submit", "x", "--deadline", "-1", "--redis-url", redis_url)
    assert done.stderr.startswith("penstock: --deadline must be ")


@pytest.mark.parametrize(
    "line", ["submit hello", "jobs list", "jobs show m.x", "pools list", "dead list", "keys list", "audit"]
)
def test_a_redis_that_does_not_answer_is_named_with_the_remedy(line: str) -> None:
    done = run_command(*line.split(), "--redis-url", "redis://user:secret@127.0.0.1:1/0")
    assert done.returncode == 75
    address = "redis://user:***@127.0.0.1:1/0"
    assert done.stderr == f"penstock: no Redis answers at {address}: Connection refused; `penstock serve` starts one\n"


@pytest.mark.parametrize(
    ("line", "env", "reason"),
    [
        ("node m --log-format json --lease-ms 1 --redis-url unix://x", {}, "--lease-ms: must be at least 3000"),
        ("gateway --max-socket=1 --log-format=json", {}, "no option --max-socket; did you mean --max-sockets?"),
        ("node m --redis-url unix://x", {"PENSTOCK_NODE_LEASE_MS": "1"}, "PENSTOCK_NODE_LEASE_MS: must be"),
        ("serve m --port x", {}, "--port: must be an integer"),
    ],
)
def test_wrong_use_of_a_process_whose_log_is_json_is_json(line: str, env: dict[str, str], reason: str) -> None:
    given = {} if "json" in line else {"PENSTOCK_LOG_FORMAT": "json"}
    done = run_command(*line.split(), **env, **given)
    (said,) = done.stderr.splitlines()
    event = json.loads(said)
    assert (done.returncode, event["level"], event["message"]) == (2, "ERROR", "the process ends")
    assert event["reason"].startswith(reason)


def test_a_command_for_people_has_no_json_although_processes_log_it() -> None:
    done = run_command("jobs", "show", PENSTOCK_LOG_FORMAT="json")
    assert done.stderr.startswith("penstock: JOB_ID is missing")
