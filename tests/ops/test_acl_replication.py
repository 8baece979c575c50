"""The users of a replica and of Sentinel in ops/acl: with them alone a replica follows, and Sentinel promotes it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import redis
from fakes.acl_users import ACL, all_rules, with_passwords
from fakes.waiting import wait_until
from faults.tools.redis_process import free_port

from penstock.runtime.embedded_redis import find_redis_server

NAME = "main"
OBSERVER = "user watcher on >watcher ~* &* +@all\n"


def start(stack: ExitStack, folder: Path, *words: str) -> None:
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen([find_redis_server(), *words, "--dir", str(folder)], stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)


def until(is_reached: Callable[[], object]) -> None:
    wait_until(is_reached, but=(redis.ConnectionError, redis.ResponseError))  # Sentinel may know no replica yet.


def test_replica_follows_and_sentinel_promotes_it_with_their_users_alone(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text(with_passwords(all_rules() + (ACL / "replication/users.acl").read_text()) + OBSERVER)
    primary, replica, sentinel = free_port(), free_port(), free_port()
    shared = ("--aclfile", str(users), "--masteruser", "replica", "--masterauth", "replica", "--save", "")
    (tmp_path / "sentinel.conf").write_text(
        f"port {sentinel}\nsentinel monitor {NAME} 127.0.0.1 {primary} 1\n"
        f"sentinel auth-user {NAME} sentinel\nsentinel auth-pass {NAME} sentinel\n"
        f"sentinel down-after-milliseconds {NAME} 1000\n"
    )

    def watching(port: int) -> redis.Redis:
        return redis.Redis(port=port, username="watcher", password="watcher")

    with ExitStack() as stack:
        start(stack, tmp_path / "primary", "--port", str(primary), *shared)
        start(stack, tmp_path / "replica", "--port", str(replica), "--replicaof", "127.0.0.1", str(primary), *shared)
        of_primary, of_replica = (stack.enter_context(watching(port)) for port in (primary, replica))
        until(lambda: of_replica.info("replication")["master_link_status"] == "up")
        start(stack, tmp_path / "sentinel", str(tmp_path / "sentinel.conf"), "--sentinel")
        asked = stack.enter_context(redis.Redis(port=sentinel))
        until(lambda: asked.sentinel_master(NAME)["num-slaves"] == 1)
        until(lambda: asked.execute_command("SENTINEL", "FAILOVER", NAME))
        until(lambda: of_replica.role()[0] == b"master")
        # The old primary follows with the same user.
        until(lambda: of_primary.info("replication").get("master_link_status") == "up")
        assert [one.acl_log() for one in (of_primary, of_replica)] == [[], []]
