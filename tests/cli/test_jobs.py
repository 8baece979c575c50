"""`penstock jobs`: an operator lists, shows, cancels and follows the jobs of all tenants."""

from __future__ import annotations

import importlib
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.command import run_command
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import PythonProcess
from fakes.terminal import ENTER, TerminalProcess
from fakes.waiting import wait_until
from faults.tools.redis_process import RedisProcess, find_libfaketime

from penstock.producer.client import Client
from penstock.runtime.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="module")
def pool() -> Iterator[str]:
    """URL of a Redis with a running node."""
    with EmbeddedRedis() as server, NodeProcess(server.url, step_s=0.01):
        yield server.url


def jobs(redis_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("jobs", *arguments, "--redis-url", redis_url)


def test_jobs_are_listed_newest_first_with_filters(pool: str) -> None:
    with Client(pool) as client:
        one = client.submit("hello", max_tokens=3, tenant="acme")
        one.result()
        two = client.submit("two\n " + "字" * 40, tenant="rival", not_before_s=600, tags=["cli"])
        ids = [job.id.rpartition(".")[2] for job in (one, two)]
        table = jobs(pool, "list").stdout.splitlines()
        assert max(map(len, table)) < 80
        assert table[0].split() == ["STATE", "MODEL", "IN", "OUT", "WAITED", "TOOK", "AGE", "FIRST", "WORDS"]
        assert re.fullmatch(r"scheduled  reference +\d+s two 字{9}…", table[1])
        assert re.fullmatch(r"succeeded  reference +\d+ +3 +\d\.\ds +\d\.\ds +\d+s hello", table[2])
        wide = [line.split() for line in jobs(pool, "list", "--wide").stdout.splitlines()]
        assert wide[0][-5:] == ["CLASS", "TENANT", "ID", "FIRST", "WORDS"]
        assert wide[1][-5:] == ["batch", "rival", ids[1], "two", "字" * 19 + "…"]
        assert wide[2][-4:] == ["batch", "acme", ids[0], "hello"]
        for options, expected in (
            (("--tenant", "acme"), ["ID", ids[0]]),
            (("--state", "scheduled", "--state", "running"), ["ID", ids[1]]),
            (("--state", "succeeded"), ["ID", ids[0]]),
            (("--tag", "cli"), ["ID", ids[1]]),
            (("--priority", "batch", "--background", "--since", "1h", "--tenant", "acme"), ["ID", ids[0]]),
            (("--until", "2026-01-01"), []),
            (("--limit", "1"), ["ID", ids[1]]),
            (("--pool", "other"), []),
        ):
            done = jobs(pool, "list", "--wide", *options)
            assert re.findall(r"ID|[0-9a-f]{8}-[0-9a-f-]{27}", done.stdout) == expected
            assert ("no jobs" in done.stderr) == (not expected)
        assert jobs(pool, "show", ids[0]).stdout == jobs(pool, "show", one.id).stdout
        assert jobs(pool, "show", ids[0][:-1] + "x").stderr.startswith("penstock: no job ")
        two.cancel()


def test_job_is_shown_with_its_ledger_and_on_request_with_its_text(pool: str) -> None:
    with Client(pool) as client:
        job = client.submit("hello", max_tokens=3, seed=1, tenant="acme")
        result = job.result()
    shown = json.loads(jobs(pool, "show", job.id, "--json").stdout)
    assert (shown["state"], shown["tenant"], shown["outcome"]["state"]) == ("succeeded", "acme", "succeeded")
    assert "result" not in shown
    assert [event["event"] for event in shown["ledger"]["events"]] == ["queued", "taken", "first_token", "finished"]
    with_text = json.loads(jobs(pool, "show", job.id, "--result", "--json").stdout)
    assert with_text["result"]["choices"][0]["text"] == result.choices[0].text
    text = jobs(pool, "show", job.id).stdout
    assert text.startswith(f"id                 {job.id}\n")
    assert re.search(r"^  finished           2\d{3}-\d\d-\d\dT[\d:.]+\+00:00$", text, re.MULTILINE)
    assert re.search(r"^    taken  2\d{3}-\S+  \w+", text, re.MULTILINE)


def test_why_says_where_the_time_of_a_job_went(pool: str) -> None:
    with Client(pool) as client:
        job = client.submit("hello", max_tokens=3, seed=1, tenant="acme")
        job.result()
        late = client.submit("late", not_before_s=600, tenant="acme")
    lines = run_command("why", job.id, "--redis-url", pool).stdout.splitlines()
    assert re.fullmatch(rf"{re.escape(job.id)}: succeeded, \d+\.\d s since it was accepted", lines[0])
    parts = [
        re.fullmatch(r" +\d+\.\d s  (waited in the queue|until the first token on \S+|ran on \S+)", one)
        for one in lines[1:]
    ]
    assert len(parts) == 3 and all(parts), lines
    told = json.loads(run_command("why", job.id, "--json", "--redis-url", pool).stdout)
    assert [part["part"] for part in told["parts"]] == ["queue", "first_token", "rest"]
    text = run_command("why", late.id, "--redis-url", pool).stdout
    assert "waits for its start time, in " in text and "what helps: `penstock jobs change" in text


@pytest.mark.skipif(find_libfaketime() is None, reason="libfaketime is not installed (Debian's libfaketime)")
def test_ages_are_those_of_redis_clock(tmp_path: Path) -> None:
    with RedisProcess(tmp_path / "redis", clock_s=-7200) as server, NodeProcess(server.url):
        with Client(server.url) as client:
            client.submit("hello", max_tokens=3).result()
        (_, row) = jobs(server.url, "list", "--since", "1h").stdout.splitlines()
        assert "no jobs" in jobs(server.url, "list", "--until", "1h").stderr
        states = ("--state", "succeeded", "--dry-run")
        found = [
            json.loads(jobs(server.url, "bulk", "cancel", flag, "1h", *states).stdout)
            for flag in ("--since", "--until")
        ]
        assert [one["already_over"] for one in found] == [1, 0]
        assert re.search(r" \d+s hello$", row), row


def test_list_as_json_has_the_objects_of_the_http_api(pool: str) -> None:
    with Client(pool) as client:
        job = client.submit("hello", max_tokens=3, tenant="json")
        job.result()
    (shown,) = json.loads(jobs(pool, "list", "--tenant", "json", "--json").stdout)
    assert (shown["id"], shown["state"], shown["object"]) == (job.id, "succeeded", "job")
    assert shown == json.loads(jobs(pool, "show", job.id, "--json").stdout)
    assert json.loads(jobs(pool, "list", "--tenant", "none", "--json").stdout) == []


def test_jobs_are_changed_retried_and_acted_on_in_bulk(pool: str) -> None:
    with Client(pool) as client:
        waiting = [client.submit("hello", max_tokens=2, tenant="bulk", not_before_s=600, tags=["b"]) for _ in range(3)]
        first = waiting[0]
        changed = jobs(pool, "change", first.id, "--priority", "standard", "--foreground")
        assert changed.stdout == f"{first.id} scheduled\n", changed.stderr
        assert client.status(first.id, tenant="bulk").priority.label == "standard"
        assert jobs(pool, "change", first.id).returncode == 2
        dry = json.loads(jobs(pool, "bulk", "cancel", "--tag", "b", "--dry-run").stdout)
        assert (dry["changed"], dry["dry_run"], first.status().state) == (3, True, "scheduled")
        for options, reason in ((("--tag", "b"), "add --yes"), (("--tenant", "bulk", "--yes"), "--all")):
            refused = jobs(pool, "bulk", "cancel", *options)
            assert (refused.returncode, reason in refused.stderr, first.status().state) == (2, True, "scheduled")
        assert "Cancel 3 jobs of all tenants, 0 of them running?" in jobs(pool, "bulk", "cancel", "--tag", "b").stderr
        done = json.loads(jobs(pool, "bulk", "cancel", "--tag", "b", "--yes").stdout)
        assert [done[name] for name in ("state", "changed", "already_over", "failed")] == ["ended", 3, 0, 0]
        old, new = jobs(pool, "retry", first.id).stdout.split()
        assert (old, client.result(new, tenant="bulk").outcome.state) == (first.id, "succeeded")
        refused = jobs(pool, "bulk", "cancel", "--state", "unknown")
        assert (refused.returncode, "state: 'unknown' is not one of" in refused.stderr) == (2, True)


def test_bulk_cancel_asks_on_a_terminal_and_says_how_many(pool: str) -> None:
    words = ("-m", "penstock", "jobs", "bulk", "cancel", "--tag", "asked", "--redis-url", pool)
    with Client(pool) as client:
        waiting = [client.submit("hello", tenant="asked", tags=["asked"], not_before_s=600) for _ in range(3)]
        for keys, status, state in (("n", 1, "scheduled"), ("", 1, "scheduled"), ("y", 0, "cancelled")):
            with TerminalProcess(*words) as terminal:
                terminal.wait_for("Cancel 3 jobs of all tenants, 0 of them running? [y/N]: ")
                assert {job.status().state for job in waiting} == {"scheduled"}
                terminal.press(keys + ENTER)
                assert terminal.wait() == status, terminal.screen
            assert {job.status().state for job in waiting} == {state}
        with TerminalProcess(*words) as terminal:
            terminal.wait_for("Cancel 0 jobs of all tenants, 0 of them running? [y/N]: ")
            assert terminal.leave() != 0


def test_pools_are_paused_and_resumed(pool: str) -> None:
    def pools(*arguments: str) -> list[dict[str, str]]:
        found = run_command("pools", *arguments, "--redis-url", pool)
        assert found.returncode == 0, found.stderr
        return list(json.loads(found.stdout))

    with Client(pool) as client:
        name = next(iter(client.pools()))
        assert pools("pause", name, "--tenant", "still")[0]["tenant"] == "still"
        job = client.submit("hello", max_tokens=2, tenant="still")
        client.submit("hello", max_tokens=2, tenant="acme").result()
        assert job.status().state == "queued"
        resumed = run_command("pools", "resume", name, "--tenant", "still", "--redis-url", pool)
        assert (json.loads(resumed.stdout), resumed.stderr) == ([], f"{name}: nodes take jobs of: tenant still\n")
        assert job.result().outcome.state == "succeeded"


def test_jobs_are_canceled_whatever_their_tenant(pool: str) -> None:
    with Client(pool) as client:
        waiting = [client.submit("hello", tenant=name, not_before_s=600) for name in ("acme", "rival")]
        done = jobs(pool, "cancel", *(job.id for job in waiting))
        assert done.stdout.splitlines() == [f"{job.id} cancelled" for job in waiting]
        assert {job.status().state for job in waiting} == {"cancelled"}


def test_tail_prints_the_text_until_the_end_from_any_chunk(pool: str) -> None:
    with Client(pool) as client:
        job = client.submit("hello", max_tokens=40, seed=3, tenant="acme")
        assert jobs(pool, "tail", job.id).stdout == job.result().choices[0].text + "\n"
        chunks = list(job.chunks())
        rest = "".join(chunk.text for chunk in chunks[3:])
        assert jobs(pool, "tail", job.id, "--after", "2").stdout == rest + "\n"


def test_failures_are_one_line(pool: str) -> None:
    for arguments in (("show", "m.none"), ("cancel", "m.none"), ("tail", "m.none")):
        done = jobs(pool, *arguments)
        assert (done.returncode, done.stderr) == (2, "penstock: no job m.none\n")
    with Client(pool) as client:
        job = client.submit("hello", not_before_s=600)
        job.cancel()
        done = jobs(pool, "tail", job.id)
    assert (done.returncode, "cancelled" in done.stderr) == (1, True)


def test_ended_jobs_are_printed_after_a_cursor(pool: str) -> None:
    with Client(pool) as client:
        cursor = client.completions_cursor(tenant="acme")
        ids = [client.submit("hello", max_tokens=2, tenant="acme").id for _ in range(2)]
        for job_id in ids:
            client.result(job_id, tenant="acme")
        words = ["--tenant", "acme", "--after", cursor, "--redis-url", pool]
        shown = _lines_of_watch([*words, "--json"], 2)
        rows = [json.loads(line) for line in shown]
        assert {row["id"] for row in rows} == {*ids} and {row["state"] for row in rows} == {"succeeded"}
        (line,) = _lines_of_watch([*words[:2], "--after", rows[0]["cursor"], *words[4:]], 1)
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d succeeded {re.escape(rows[1]['id'])}\n", line)
    refused = jobs(pool, "watch", "--after", cursor)
    assert refused.stderr.startswith("penstock: --after: this cursor belongs to another tenant")
    assert jobs(pool, "watch", "--tag", "two words").stderr.startswith("penstock: --tag must have")


def _lines_of_watch(words: list[str], count: int) -> list[str]:
    """Return the first lines of `penstock jobs watch`, which then gets Ctrl-C and says where to continue."""
    with PythonProcess("-m", "penstock", "jobs", "watch", *words) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline() for _ in range(count)]
        process.send_signal(signal.SIGINT)
        assert "continue with --after " in process.stderr.read()
    return lines


def test_a_set_is_counted_found_and_exported(pool: str, tmp_path: Path) -> None:
    with Client(pool) as client:
        for at in range(2):
            client.submit("hello", max_tokens=3, tags=["set"], custom_id=f"c{at}", metadata={"user": f"u{at}"}).result()
    told = jobs(pool, "progress", "--tag", "set")
    assert (told.returncode, told.stdout) == (0, "2 of 2 ended\n")
    counts = json.loads(jobs(pool, "progress", "--tag", "set", "--once", "--json").stdout)
    assert (counts["total"], counts["states"]) == (2, {"succeeded": 2})
    (found,) = json.loads(jobs(pool, "list", "--tag", "set", "--metadata", "user=u1", "--json").stdout)
    assert found["custom_id"] == "c1"
    refused = jobs(pool, "list", "--metadata", "user")
    assert (refused.returncode, "NAME=TEXT" in refused.stderr) == (2, True)
    path = tmp_path / "out.jsonl"
    assert jobs(pool, "export", str(path), "--tag", "set").stdout == f"2 jobs in {path}, 2 of them new\n"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["custom_id"] for line in lines] == ["c0", "c1"]


WAVE = 40
"""Jobs that end between two kills of their export."""


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_an_export_that_is_killed_three_times_has_each_job_once(pool: str, tmp_path: Path, name: str) -> None:
    path, tag = tmp_path / name, f"killed:{name}"
    lines = path if path.suffix == ".jsonl" else tmp_path / f"{name}.jsonl"
    words = ("jobs", "export", str(path), "--tag", tag, "--redis-url", pool)
    if path != lines:
        pytest.importorskip("pyarrow")
    with Client(pool) as client:
        held = client.submit("hello", tags=[tag], not_before_s=3600)  # The set is open until it is canceled.
        ids = [held.id]
        for wave in range(3):
            prompts = [{"prompt": "hello", "max_tokens": 3 + at % 7, "tags": [tag]} for at in range(WAVE)]
            ids += [job.id for job in client.submit_many(prompts)]
            with PythonProcess("-m", "penstock", *words) as process:
                _wait_for_lines(lines, wave * WAVE + 1 + wave * WAVE // 3, process)
                process.kill()
        noted = json.loads(lines.with_name(f"{lines.name}.cursor").read_text(encoding="utf-8"))
        assert path == lines or not path.exists()
        with lines.open("a", encoding="utf-8") as file:
            file.write('{"id": "a line that a kill cut')
        held.cancel()
        told = run_command(*words)
        assert told.stdout == f"{len(ids)} jobs in {path}, {len(ids) - noted['jobs']} of them new\n", told.stderr
        texts = {one: client.result(one, check=False).choices[0].text for one in ids[1:]}
    rows = _rows_of(path)
    assert sorted(one["id"] for one in rows) == sorted(ids)
    assert {one["id"]: one["text"] for one in rows if one["id"] != held.id} == texts
    before = path.read_bytes()
    assert run_command(*words).stdout == f"{len(ids)} jobs in {path}, 0 of them new\n"
    assert path.read_bytes() == before


def _wait_for_lines(path: Path, least: int, process: PythonProcess) -> None:
    wait_until(
        lambda: path.exists() and path.read_bytes().count(b"\n") >= least,
        what=process.communicate,
        meanwhile=lambda: process.poll() is None,
    )


def _rows_of(path: Path) -> list[Any]:
    if path.suffix != ".jsonl":
        return list(importlib.import_module("pyarrow.parquet").read_table(path).to_pylist())
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        choices = row["result"]["choices"] if row["result"] else []
        row["text"] = choices[0]["text"] if choices else None
    return rows
