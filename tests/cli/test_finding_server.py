"""Every command that asks a server finds that of this user's `penstock serve`, without an option or a variable."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.command import run_command
from fakes.served_model import served
from fixtures.tiny_model import make_tiny_model
from typer.main import get_command

from penstock.cli.main import app
from penstock.cli.server_url import URL_VARIABLES

STARTING = {"serve", "node", "gateway", "demo"}
"""Commands whose --redis-url names a Redis to serve."""
POOL, TAG = "found-model", "found"
ROW = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello", "max_tokens": 2}}
NO_JOB = f"{POOL}.00000000-0000-7000-8000-000000000000"
NO_BATCH = "batch_000000000000000000000000"
NO_SCHEDULE = "sched_000000000000000000000000"
SAID: dict[str, tuple[str, int, str]] = {
    "chat": ("--max-tokens 2", 0, "."),
    "submit": ("hello --raw --max-tokens 2", 0, "."),
    "embed": ("texts.txt", 0, "embedding"),
    "rerank": ("hello texts.txt", 0, "hello"),
    "batch run": ("rows.jsonl run.jsonl", 0, "1 answered"),
    "batch retry": ("rows.jsonl run.jsonl", 0, "0 "),
    "batch submit": ("rows.jsonl", 0, "batch_"),
    "batch list": ("", 0, "batch_"),
    "batch status": (NO_BATCH, 2, NO_BATCH),
    "batch wait": (NO_BATCH, 2, NO_BATCH),
    "batch cancel": (NO_BATCH, 2, NO_BATCH),
    "batch pause": (NO_BATCH, 2, NO_BATCH),
    "batch resume": (NO_BATCH, 2, NO_BATCH),
    "batch results": (f"{NO_BATCH} x.jsonl", 2, NO_BATCH),
    "flows run": ("rows.jsonl flow.jsonl", 0, "1 answered"),
    "flows show": (NO_BATCH, 2, NO_BATCH),
    "schedules create": ("hello --every 3600", 0, "sched_"),
    "schedules list": ("", 0, "sched_"),
    "schedules show": (NO_SCHEDULE, 2, NO_SCHEDULE),
    "schedules pause": (NO_SCHEDULE, 2, NO_SCHEDULE),
    "schedules resume": (NO_SCHEDULE, 2, NO_SCHEDULE),
    "schedules run": (NO_SCHEDULE, 2, NO_SCHEDULE),
    "schedules delete": (NO_SCHEDULE, 2, NO_SCHEDULE),
    "jobs list": ("", 0, "succeeded"),
    "jobs show": (NO_JOB, 2, NO_JOB),
    "jobs cancel": (NO_JOB, 2, NO_JOB),
    "jobs retry": (NO_JOB, 2, NO_JOB),
    "jobs change": (f"{NO_JOB} --not-before 0", 2, NO_JOB),
    "jobs bulk": (f"cancel --tag {TAG} --dry-run", 0, "changed"),
    "jobs tail": (NO_JOB, 2, NO_JOB),
    "jobs watch": ("--after wrong", 2, "after"),
    "jobs progress": (f"--tag {TAG} --once --json", 0, "{"),
    "jobs export": (f"export.jsonl --tag {TAG} --no-wait", 0, "1"),
    "why": (NO_JOB, 2, NO_JOB),
    "pools list": ("", 0, POOL),
    "pools pause": (f"{POOL} --tenant nobody", 0, POOL),
    "pools resume": (f"{POOL} --tenant nobody", 0, POOL),
    "pools declare": ("later", 0, "later"),
    "pools forget": ("later", 0, "later is forgotten"),
    "pools allow": (POOL, 0, f"{POOL} is listed"),
    "pools repair": ("", 0, ""),
    "dead list": ("", 0, ""),
    "dead show": (NO_JOB, 2, NO_JOB),
    "dead retry": (NO_JOB, 2, NO_JOB),
    "dead purge": (NO_JOB, 0, "0 deleted"),
    "top": ("--once", 0, POOL),
    "doctor": ("", 0, POOL),
    "support-bundle": ("--output bundle.tar.gz", 0, ""),
    "bench serve": ("--num-prompts 1 --random-input-len 4 --random-output-len 2", 0, POOL),
    "profile": ("--seconds 0.2", 0, ""),
    "tenants delete": ("nobody --dry-run", 0, "nobody"),
    "audit": ("", 0, POOL),
    # From the first key on, the gateway wants one.
    "keys list": ("", 0, ""),
    "keys add": ("acme --label mine", 0, "pk-"),
    "keys show": ("mine", 0, "acme"),
    "keys set": ("mine --max-open-jobs 3", 0, "acme"),
    "keys usage": ("mine", 0, ""),
    "keys revoke": ("mine", 0, "no API key is in use now"),
    "keys open": ("", 0, ""),
}
"""Command → words, exit status, and a pattern of what it says, in an order in which one may need those before it."""


def commands_that_ask() -> set[str]:
    """Return the commands with the URL of a Redis or of a gateway."""
    root: Any = get_command(app)

    def asking(command: Any, context: Any, path: tuple[str, ...]) -> Iterator[str]:
        if not hasattr(command, "list_commands"):
            if any(one.name in ("redis_url", "base_url") for one in command.params):
                yield " ".join(path)
            return
        for name in command.list_commands(context):
            yield from asking(command.get_command(context, name), context, (*path, name))

    with root.make_context("penstock", ["top"]) as context:
        return set(asking(root, context, ()))


def test_the_table_has_every_command_that_asks_a_server() -> None:
    assert set(SAID) == commands_that_ask() - STARTING


@pytest.mark.filterwarnings("ignore:the model's files say")
def test_each_command_finds_the_running_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime_dir = tmp_path / "run"
    runtime_dir.mkdir(mode=0o700)
    model = make_tiny_model(tmp_path / POOL)
    for name in URL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(ROW) + "\n")
    Path("texts.txt").write_text("hello\n")
    wrong = {}
    with served(model, runtime_dir=runtime_dir, dtype="bfloat16"):
        assert run_command("submit", "hello", "--raw", "--max-tokens", "2", "--tag", TAG).returncode == 0
        for command, (words, status, pattern) in SAID.items():
            done = run_command(*command.split(), *words.split(), stdin="hello\n")
            said = done.stdout + done.stderr
            if done.returncode != status or not re.search(pattern, said, re.DOTALL):
                wrong[command] = done.returncode, said[-600:]
    assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong.items())
