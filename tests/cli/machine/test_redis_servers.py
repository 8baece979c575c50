"""`penstock doctor` asks each server of a Redis, and names what differs before a fail-over shows it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis as sync_redis
from fakes.waiting import until
from faults.tools.redis_process import free_port

from penstock.cli.machine.check import Check
from penstock.cli.machine.redis_servers import check_servers, judge_sentinels, judge_servers
from penstock.queue.broker.server_facts import SentinelFacts, ServerFacts
from tests.ops.test_acl_replication import start

SETTINGS = {"appendfsync": "everysec", "maxmemory-policy": "noeviction", "masteruser": "replica", "aclfile": "/u.acl"}
USERS = {"default": " off &* ", "node": " on #1 ~* ", "gateway": " on #2 ~* "}
PRIMARY = ServerFacts("one:1", "7.2.4", SETTINGS, USERS)
REPLICA = replace(PRIMARY, name="two:2")


def said(checks: list[Check]) -> list[str]:
    return [f"{check.finding} | {check.advice}" for check in checks if check.level == "warn"]


def test_equal_servers_have_one_good_line_each() -> None:
    (check,) = judge_servers(PRIMARY, [REPLICA])
    assert (check.level, check.subject) == ("ok", "servers")


@pytest.mark.parametrize(
    ("changes", "finding", "advice"),
    [
        (
            {"users": {"default": " off &* ", "node": " on #1 ~* "}},
            "lacks users of the primary: gateway",
            "ACL SETUSER",
        ),
        ({"users": USERS | {"node": " on #9 ~* "}}, "passwords or rights of node differ", "ACL SAVE"),
        ({"users": USERS | {"old": " on #1 "}}, "users that the primary lacks: old", "ACL DELUSER"),
        ({"version": "7.0.1"}, "has version 7.0.1, and the primary 7.2.4", "upgrade"),
        (
            {"settings": SETTINGS | {"appendfsync": "always"}},
            "appendfsync is always",
            "CONFIG SET appendfsync everysec",
        ),
        ({"settings": SETTINGS | {"maxmemory-policy": "allkeys-lru"}}, "maxmemory-policy is allkeys-lru", "CONFIG SET"),
        ({"settings": SETTINGS | {"masteruser": ""}}, "no masteruser", "CONFIG SET masteruser"),
        ({"settings": SETTINGS | {"aclfile": ""}}, "no aclfile", "aclfile in its configuration"),
        ({"is_linked": False}, "not connected to its primary", "masterauth"),
        ({"lag_s": 9}, "is 9 s and 0.0 MiB behind", "wait before a planned fail-over"),
        ({"lag_bytes": 5 << 20}, "is 0 s and 5.0 MiB behind", "wait before a planned fail-over"),
        ({"problem": "WRONGPASS"}, "cannot be asked: WRONGPASS", "ACL SETUSER"),
    ],
)
def test_what_differs_is_named_with_its_remedy(changes: dict[str, Any], finding: str, advice: str) -> None:
    (line,) = said([*judge_servers(PRIMARY, [replace(REPLICA, **changes)])])
    assert "two:2" in line and finding in line.split(" | ")[0] and advice in line.split(" | ")[1]


def test_the_primary_needs_a_masteruser_too() -> None:
    (line,) = said([*judge_servers(replace(PRIMARY, settings=SETTINGS | {"masteruser": ""}), [])])
    assert line.startswith("primary one:1: no masteruser")


def test_sentinels_that_are_away_disagree_or_are_too_few_are_named() -> None:
    three = [SentinelFacts(name, "one:1") for name in ("a:1", "b:1", "c:1")]
    (check,) = judge_sentinels(three, "one:1")
    assert (check.level, check.finding) == ("ok", "3 name the primary one:1")
    away, other = replace(three[0], primary="", problem="refused"), replace(three[1], primary="two:2")
    lines = said([*judge_sentinels([away, other, three[2]], "one:1")])
    assert [line.split(" | ")[0] for line in lines] == [
        "a:1 cannot be asked: refused",
        "b:1 names the primary two:2, and others one:1",
    ]
    assert said([*judge_sentinels(three[:1], "one:1")])[0].startswith("the URL names 1")


async def test_a_real_replica_without_a_rotated_password_is_found(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    users = "user default on nopass ~* &* +@all\nuser node on >old ~* +@all\nuser operator on >op ~* &* +@all\n"
    (tmp_path / "users.acl").write_text(users)
    shared = ("--aclfile", str(tmp_path / "users.acl"), "--save", "", "--repl-diskless-sync-delay", "0")
    with ExitStack() as stack:
        start(stack, tmp_path / "one", "--port", str(ports[0]), *shared)
        start(stack, tmp_path / "two", "--port", str(ports[1]), "--replicaof", "127.0.0.1", str(ports[0]), *shared)
        url = f"redis://operator:op@127.0.0.1:{ports[0]}"
        await linked(ports[1])
        assert [check.level for check in await check_servers(url)] == ["ok"]
        with sync_redis.Redis(port=ports[0]) as primary, sync_redis.Redis(port=ports[1]) as replica:
            primary.acl_setuser("node", reset_passwords=True, passwords="+new", enabled=True)
            replica.config_set("appendfsync", "always")
            lines = said(await check_servers(url))
            assert [line.partition(": ")[2].split(" | ")[0] for line in lines] == [
                "passwords or rights of node differ from the primary's",
                "appendfsync is always, and on the primary everysec",
            ]
            primary.acl_setuser("admin", passwords="+a", enabled=True, keys=["*"], commands=["+info", "+ping", "+time"])
            (check,) = await check_servers(f"redis://admin:a@127.0.0.1:{ports[0]}")
            assert "not compared" in check.finding and "operator" in check.advice


async def linked(port: int) -> None:
    with sync_redis.Redis(port=port) as replica:
        await until(lambda: replica.info("replication")["master_link_status"] == "up", but=sync_redis.ConnectionError)


async def test_a_redis_alone_has_no_line(redis_url: str) -> None:
    assert await check_servers(redis_url) == []
