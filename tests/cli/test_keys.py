"""`penstock keys` creates API keys that gateways accept, lists them without the secret, and revokes them."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
import os
import re
import subprocess
import sys

import pytest
from fakes.command import run_command
from fakes.queue.harness import Queue, new_job

from penstock.contract.errors import ConflictError, UnauthorizedError
from penstock.contract.output import Outcome, Usage
from penstock.contract.tenant import Terms, identify
from penstock.queue.broker.connection import connect
from penstock.queue.broker.node import Emission
from penstock.queue.broker.producer import Submission
from penstock.queue.tenants.key_store import KeyStore


def keys(redis_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("keys", *arguments, "--redis-url", redis_url)


async def known_of(redis_url: str):
    redis = connect(redis_url)
    try:
        return await KeyStore(redis).all()
    finally:
        await redis.aclose()


def test_key_is_added_listed_and_revoked(redis_url: str) -> None:
    made = keys(redis_url, "add", "acme", "--max-open-jobs", "7", "--label", "for tests")
    key = made.stdout.strip()
    record = identify(key, asyncio.run(known_of(redis_url)), "")
    assert (record.tenant, record.terms.max_open_jobs, record.scopes) == ("acme", 7, {"infer"})

    listed = keys(redis_url, "list").stdout
    assert listed == f"{record.key_id} acme infer highest_class=standard max_open_jobs=7 for tests\n"
    assert keys(redis_url, "revoke", record.key_id).returncode == 0
    assert keys(redis_url, "list").stdout.startswith(f"{record.key_id} acme revoked")


def test_a_new_key_is_printed_as_json_with_what_it_may_do(redis_url: str) -> None:
    options = ("--max-open-jobs", "7", "--scope", "infer", "--scope", "metrics", "--models", "small", "--label", "web")
    made = json.loads(keys(redis_url, "add", "acme", *options, "--json").stdout)
    record = identify(made["key"], asyncio.run(known_of(redis_url)), "")
    assert (made["id"], made["state"], made["limits"]["max_open_jobs"]) == (record.key_id, "active", 7)
    shown = json.loads(keys(redis_url, "show", "web", "--json").stdout)
    assert {name: value for name, value in made.items() if name != "key"} == {
        name: value for name, value in shown.items() if name not in ("tenant_kept_bytes", "usage")
    }
    assert "digest" not in str(made)


def test_rights_and_usage_are_shown(redis_url: str) -> None:
    keys(redis_url, "add", "acme", "--highest-class", "interactive", "--memory-percent", "20")
    listed = keys(redis_url, "list").stdout
    assert " acme infer highest_class=interactive memory_percent=20 " in listed
    asyncio.run(use(redis_url))
    assert keys(redis_url, "list").stdout.split()[-1].startswith("kept_bytes=")
    (line,) = keys(redis_url, "usage", "--days", "2").stdout.splitlines()
    assert line.split(maxsplit=1)[1] == "m acme k1 jobs=1 prompt=11 cached=4 completion=7"
    assert "highest" in keys(redis_url, "add", "acme", "--highest-class", "urgent").stderr


async def use(redis_url: str, account: str = "k1") -> None:
    async with connect(redis_url) as redis:
        queue = Queue(redis)
        node = await queue.node(f"of-{account}")
        await queue.producer.submit(Submission(new_job(tenant="acme"), 1, terms=Terms(account=account)))
        taken = await node.take_one()
        last = Emission(taken.job_id, taken.lease, 0, ())
        await node.broker.finish(last, Outcome("succeeded"), b"result", usage=Usage(11, 7, 4))


def test_limits_scopes_and_label_change_and_the_key_stays(redis_url: str) -> None:
    key = keys(redis_url, "add", "acme", "--max-open-jobs", "7", "--label", "old").stdout.strip()
    before = identify(key, asyncio.run(known_of(redis_url)), "")
    options = ("--tokens-per-minute", "600", "--weight", "2.5", "--scope", "metrics", "--scope", "admin")
    done = keys(redis_url, "set", before.key_id, *options, "--highest-class", "batch")
    changed = "admin,metrics highest_class=batch max_open_jobs=7 tokens_per_minute=600 weight=2.5 old"
    assert done.stdout == f"{before.key_id} acme {changed}\n"
    assert keys(redis_url, "set", "old", "--label", "new", "--max-open-jobs", "0").returncode == 0
    after = identify(key, asyncio.run(known_of(redis_url)), "")
    terms = Terms(tokens_per_minute=600, weight=2.5)
    changes = {"terms": terms, "scopes": {"admin", "metrics"}, "highest_class": "batch", "label": "new"}
    assert after == before.model_copy(update=changes)


def test_key_is_named_by_its_id_label_or_tenant(redis_url: str) -> None:
    one, other = [
        keys(redis_url, "add", "acme", "--label", label).stdout.split("-")[1] for label in ("web app", "nightly")
    ]
    for name in (one, "web app"):
        assert json.loads(keys(redis_url, "show", name, "--json").stdout)["id"] == one
    refused = keys(redis_url, "set", "acme", "--max-open-jobs", "1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert all(text in refused.stderr for text in ("2 API keys", "acme", one, other))
    assert keys(redis_url, "revoke", "nightly").returncode == 0
    assert json.loads(keys(redis_url, "show", "acme", "--json").stdout)["id"] == one
    assert json.loads(keys(redis_url, "show", other, "--json").stdout)["state"] == "revoked"
    for name in ("nightly", "nobody", ""):
        done = keys(redis_url, "show", name)
        assert (done.returncode, repr(name) in done.stderr) == (2, True)


def test_show_prints_limits_stored_bytes_and_usage(redis_url: str) -> None:
    key_id = keys(redis_url, "add", "acme", "--tokens-per-minute", "600", "--scope", "infer").stdout.split("-")[1]
    asyncio.run(use(redis_url, key_id))
    shown = json.loads(keys(redis_url, "show", key_id, "--json").stdout)
    assert shown["limits"] == Terms(tokens_per_minute=600).model_dump(exclude={"account"})
    assert shown["usage"] == {"days": 31, "jobs": 1, "prompt_tokens": 11, "cached_tokens": 4, "completion_tokens": 7}
    assert shown["tenant_kept_bytes"] > 0
    assert (shown["tenant"], shown["state"], shown["scopes"]) == ("acme", "active", ["infer"])
    lines = dict(line.split(maxsplit=1) for line in keys(redis_url, "show", key_id).stdout.splitlines() if " " in line)
    assert lines["tokens_per_minute"] == "600"
    assert lines["max_open_jobs"] == "no limit"
    assert lines["memory_percent"] == "as set for the pool"
    assert lines["usage"].startswith("jobs=1 prompt_tokens=11 ")
    assert "digest" not in str(shown)


def test_list_adds_up_the_usage_of_each_key(redis_url: str) -> None:
    used, unused = [keys(redis_url, "add", "acme").stdout.split("-")[1] for _ in range(2)]
    asyncio.run(use(redis_url, used))
    lines = {line.split()[0]: line for line in keys(redis_url, "list").stdout.splitlines()}
    assert " jobs=1 tokens=18 " in lines[used]
    assert "jobs=" not in lines[unused]
    listed = json.loads(keys(redis_url, "list", "--json").stdout)
    assert {key["id"]: key["usage"]["jobs"] for key in listed} == {used: 1, unused: 0}


def test_usage_of_one_key_is_printed_by_hour_and_as_csv(redis_url: str) -> None:
    key_id = keys(redis_url, "add", "acme").stdout.split("-")[1]
    for account in (key_id, "other"):
        asyncio.run(use(redis_url, account))
    (line,) = keys(redis_url, "usage", key_id, "--by", "hour").stdout.splitlines()
    hour, rest = line.split(maxsplit=1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d", hour)
    assert rest == f"m acme {key_id} jobs=1 prompt=11 cached=4 completion=7"
    rows = list(csv.DictReader(io.StringIO(keys(redis_url, "usage", "--csv").stdout)))
    assert {row["key_id"]: row["completion_tokens"] for row in rows} == {key_id: "7", "other": "7"}
    text = keys(redis_url, "usage", "--json", "--start", hour[:10], "--end", hour[:10], "--pool", "m").stdout
    assert [row["date"] for row in json.loads(text)] == [hour[:10]] * 2
    keys(redis_url, "add", "idle")
    assert json.loads(keys(redis_url, "usage", "idle", "--json").stdout) == []


def test_characters_outside_the_terminals_encoding_are_escaped(redis_url: str) -> None:
    keys(redis_url, "add", "acme", "--label", "Zoë's")
    command = [sys.executable, "-m", "penstock", "keys", "list", "--redis-url", redis_url]
    listed = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert listed.stdout.endswith(" Zo\\xeb's\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "no spaces"), "penstock: TENANT: "),
        (("add", "acme", "--burst-s", "4000"), "penstock: --burst-s: must be at most 3600"),
        (("add", "acme", "--max-open-jobs", "-1"), "penstock: --max-open-jobs: must be at least 0"),
        (("add", "acme", "--scope", "root"), "'infer', 'metrics' or 'admin'"),
        (("add", "acme", "--highest-class", "urgent"), "--highest-class"),
        (("add", "acme", "--max-jobs", "1"), "--max-jobs"),
        (("set", "known"), "penstock: nothing to change"),
        (("set", "known", "--weight", "0"), "penstock: --weight: must be at least 0.001"),
        (("set", "known", "--weight", "nan"), "penstock: --weight: must be at most 1000"),
        (("set", "known", "--memory-percent", "91"), "penstock: --memory-percent: must be at most 90"),
        (("set", "known", "--tokens-per-minute", "1000000000001"), "must be at most 1000000000000"),
        (("set", "known", "--label", "x" * 201), "penstock: --label: must have at most 200 characters"),
        (("set", "known", "--scope", "root"), "'infer', 'metrics' or 'admin'"),
        (("set", "known", "--tenant", "other"), "--tenant"),
        (("set", "unknown", "--weight", "2"), "penstock: no API key in use has the id, label or tenant 'unknown'"),
        (("revoke", "nobody"), "'nobody'"),
        (("usage", "--csv", "--start", "yesterday"), "penstock: --start: must be a date such as"),
        (("usage", "--days", "93"), "--days"),
        (("usage", "--csv", "--json"), "give --csv or --json, not both"),
        (("usage", "--by", "hour", "--days", "4"), "penstock: --days: must be from 1 to 3"),
        (("usage", "--pool", "none"), "penstock: no pool 'none'"),
    ],
    ids=" ".join,
)
def test_wrong_use_is_refused_by_name(redis_url: str, arguments: tuple[str, ...], said: str) -> None:
    keys(redis_url, "add", "acme", "--label", "known")
    before = asyncio.run(known_of(redis_url))
    done = keys(redis_url, *arguments)
    assert (done.returncode, done.stdout, said in done.stderr) == (2, "", True), done.stderr
    assert asyncio.run(known_of(redis_url)) == before


def test_revoked_key_cannot_be_changed(redis_url: str) -> None:
    key_id = keys(redis_url, "add", "acme").stdout.split("-")[1]
    keys(redis_url, "revoke", key_id)
    done = keys(redis_url, "set", key_id, "--max-open-jobs", "1")
    assert (done.returncode, "is revoked" in done.stderr) == (2, True)


async def test_changes_at_the_same_time_are_all_kept(redis_url: str) -> None:
    async with connect(redis_url) as redis:
        store = KeyStore(redis)
        key, record = await store.add("acme", ["infer"], Terms())
        limits = [name for name in Terms.model_fields if name.startswith(("max_", "jobs_", "tokens_"))]
        await asyncio.gather(
            *(store.change(record.key_id, {}, {name: 5}) for name in limits), store.change(record.key_id, {}, {})
        )
        assert (await store.all())[record.key_id].terms == Terms(**dict.fromkeys(limits, 5))
        with contextlib.suppress(ConflictError):
            await asyncio.gather(store.revoke(record.key_id), store.change(record.key_id, {"label": "x"}, {}))
        with pytest.raises(UnauthorizedError):
            identify(key, await store.all(), "")


def test_models_of_a_key_are_set_shown_and_removed(redis_url: str) -> None:
    key = keys(redis_url, "add", "acme", "--models", "small", "--models", "sql-adapter").stdout.strip()
    record = identify(key, asyncio.run(known_of(redis_url)), "")
    assert {*record.models} == {"small", "sql-adapter"}
    assert "small" in keys(redis_url, "list").stdout and "sql-adapter" in keys(redis_url, "list").stdout
    assert keys(redis_url, "set", record.key_id, "--models", "large").returncode == 0
    assert {*identify(key, asyncio.run(known_of(redis_url)), "").models} == {"large"}
