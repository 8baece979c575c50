"""`penstock schedules`: make, list, show, pause, resume, run and delete schedules; each answer says how to go on."""

from __future__ import annotations

import json
import subprocess

from fakes.command import run_command
from fakes.fake_node import MODEL

from tests.producer.client.conftest import node_on_thread


def schedules(redis_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("schedules", *arguments, "--redis-url", redis_url)


def test_a_schedule_is_made_listed_paused_resumed_run_and_deleted(redis_url: str) -> None:
    assert "`penstock schedules create` makes one" in schedules(redis_url, "list").stderr
    with node_on_thread(redis_url):
        when = ("--cron", "0 3 * * 1-5", "--zone", "Europe/Berlin", "--overlap", "wait", "--name", "report")
        refused = schedules(redis_url, "create", "Say hello.", "--batch", "file-1", *when)
        assert (refused.returncode, "give either a prompt or --batch" in refused.stderr) == (2, True)
        made = json.loads(schedules(redis_url, "create", "Say hello.", "--model", MODEL, *when, "--json").stdout)
    assert (made["cron"], made["overlap"], made["job"]["words"]) == ("0 3 * * 1-5", "wait", "Say hello.")
    line = schedules(redis_url, "list").stdout
    assert made["id"] in line and "0 3 * * 1-5 Europe/Berlin" in line and f"next {made['next_runs'][0]}" in line
    paused = schedules(redis_url, "pause", made["id"]).stdout
    assert f"`penstock schedules resume {made['id']}` lets it go on" in paused
    assert f"next run {made['next_runs'][0]}" in schedules(redis_url, "resume", made["id"]).stdout
    ran = schedules(redis_url, "run", made["id"]).stdout
    assert f"`penstock schedules show {made['id']}` shows the run" in ran
    shown = json.loads(schedules(redis_url, "show", made["id"], "--next-runs", "2", "--json").stdout)
    assert (len(shown["next_runs"]), len(shown["waiting_runs"]), shown["runs"]) == (2, 1, [])
    assert schedules(redis_url, "delete", made["id"]).stdout == f"{made['id']}: deleted\n"
    assert schedules(redis_url, "show", made["id"]).returncode == 2
