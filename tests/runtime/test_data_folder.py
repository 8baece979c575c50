"""The folder of a durable queue: an older or another server is refused, and damage is told or survived."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import time
from pathlib import Path

import pytest
import redis

from penstock.contract.errors import ConfigError
from penstock.runtime import embedded_redis
from penstock.runtime.embedded_redis import (
    PACKAGE,
    EmbeddedRedis,
    ServerVersion,
    claim_for,
    default_data_folder,
    find_or_start_redis,
    find_redis_server,
    packaged_server,
)
from tests.source_tree import OLD_REDIS

RECORD = "penstock-server.json"


def program(folder: Path, says: str) -> Path:
    """Return a server program that only tells its version."""
    path = folder / "server"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def redis_of(folder: Path, version: str) -> Path:
    return program(folder, f"Redis server v={version} sha=00000000:0 malloc=libc bits=64")


def valkey_of(folder: Path, version: str) -> Path:
    return program(folder, f"Valkey server v={version} sha=00000000:0 malloc=libc bits=64")


def client_of(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def test_the_folder_names_the_server_that_wrote_it(tmp_path: Path) -> None:
    with EmbeddedRedis(data_dir=tmp_path) as server, client_of(server) as client:
        told = str(client.info("server")["redis_version"])
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["server"] in ("redis", "valkey")
    if record["server"] == "redis":
        assert told.startswith(f"{record['major']}.{record['minor']}.")
    assert not (tmp_path / f"{RECORD}.new").exists()


def test_an_older_server_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    claim_for(tmp_path, redis_of(tmp_path, "7.2.4"))
    before = (tmp_path / RECORD).read_bytes()
    with pytest.raises(
        ConfigError, match=r"was written by redis 7\.2, which redis 6\.2 .*set PENSTOCK_REDIS_SERVER"
    ) as caught:
        claim_for(tmp_path, redis_of(tmp_path, "6.2.14"))
    assert caught.value.param == "data_dir"
    assert (tmp_path / RECORD).read_bytes() == before


def test_a_newer_server_takes_the_folder_over(tmp_path: Path) -> None:
    claim_for(tmp_path, redis_of(tmp_path, "6.2.14"))
    claim_for(tmp_path, redis_of(tmp_path, "7.2.4"))
    assert json.loads((tmp_path / RECORD).read_text()) == {"server": "redis", "major": 7, "minor": 2}


def test_a_folder_of_redis_7_without_a_record_is_refused_by_6(tmp_path: Path) -> None:
    # The worst case: 6.2 ignores this folder and starts empty.
    (tmp_path / "appendonlydir").mkdir()
    with pytest.raises(ConfigError, match=r"written by redis 7\.0, which redis 6\.2 "):
        claim_for(tmp_path, redis_of(tmp_path, "6.2.14"))
    claim_for(tmp_path, valkey_of(tmp_path, "8.0.1"))


@pytest.mark.parametrize(
    ("reader", "writer", "reads"),
    [
        (("valkey", 8, 0), ("redis", 7, 2), True),
        (("valkey", 8, 0), ("redis", 6, 2), True),
        (("valkey", 8, 0), ("redis", 7, 4), False),
        (("redis", 8, 0), ("valkey", 8, 0), False),
        (("redis", 7, 2), ("redis", 7, 2), True),
        (("redis", 7, 0), ("redis", 7, 2), False),
        (("redis", 10, 0), ("redis", 9, 9), True),
    ],
)
def test_which_server_reads_whose_files(
    reader: tuple[str, int, int], writer: tuple[str, int, int], reads: bool
) -> None:
    assert ServerVersion(*reader).reads_files_of(ServerVersion(*writer)) is reads


def test_the_installed_valkey_takes_over_a_folder_of_the_redis_6_of_earlier_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [OLD_REDIS / "redis-server", packaged_server(PACKAGE)]
    if not servers[0].is_file() or servers[1] is None:
        pytest.skip("one of the servers is not installed")
    for server in servers:
        monkeypatch.setenv("PENSTOCK_REDIS_SERVER", str(server))
        with EmbeddedRedis(data_dir=tmp_path) as running, client_of(running) as client:
            if server == servers[0]:
                client.set("kept", "yes")
                client.xadd("log", {"token": "1"})
                client.hset("job", mapping={"state": "queued", "cost": 3})
                client.zadd("queue", {"job": 1.5})
            assert client.get("kept") == "yes"
            assert [fields for _, fields in client.xrange("log")] == [{"token": "1"}]
            assert client.hgetall("job") == {"state": "queued", "cost": "3"}
            assert client.zrange("queue", 0, -1, withscores=True) == [("job", 1.5)]
    assert json.loads((tmp_path / RECORD).read_text())["server"] == "valkey"
    monkeypatch.setenv("PENSTOCK_REDIS_SERVER", str(servers[0]))
    with pytest.raises(ConfigError, match="was written by valkey 9"), EmbeddedRedis(data_dir=tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"server": "redis", "major": "x", "minor": 2}'])
def test_an_unreadable_record_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(ConfigError, match=f"{RECORD} is not readable"):
        claim_for(tmp_path, redis_of(tmp_path, "7.2.4"))


def test_a_program_that_is_no_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no Redis or Valkey: 'hello'"):
        claim_for(tmp_path, program(tmp_path, "hello"))


def test_a_truncated_file_still_starts_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedRedis(data_dir=tmp_path) as server, client_of(server) as client:
        client.set("first", "kept")
        client.set("last", "x" * 100)
    newest = max((path for path in tmp_path.rglob("*.aof") if path.stat().st_size), key=os.path.getmtime)
    os.truncate(newest, newest.stat().st_size - 20)
    with caplog.at_level(logging.WARNING), EmbeddedRedis(data_dir=tmp_path) as server, client_of(server) as client:
        assert (client.get("first"), client.get("last")) == ("kept", None)
    assert "the last write to the append-only file was incomplete; redis dropped it" in caplog.messages


def test_a_load_that_outlasts_the_start_timeout_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedRedis(data_dir=tmp_path) as server, client_of(server) as client:
        with client.pipeline(transaction=False) as pipeline:
            for number in range(20_000):
                pipeline.set(f"key:{number}", "x" * 50)
            pipeline.execute()
        # A load that pauses after each key takes seconds.
        monkeypatch.setattr(embedded_redis, "_START_TIMEOUT_S", 3.5)
        plain = EmbeddedRedis._options
        slow = ["--key-load-delay", "250"]
        monkeypatch.setattr(EmbeddedRedis, "_options", lambda self, folder: [*plain(self, folder), *slow])
    started_s = time.monotonic()
    with caplog.at_level(logging.WARNING), EmbeddedRedis(data_dir=tmp_path) as server, client_of(server) as client:
        assert time.monotonic() - started_s > embedded_redis._START_TIMEOUT_S
        assert client.dbsize() == 20_000
    assert "redis loads its jobs from disk" in caplog.messages


def test_the_default_folder_is_joined_and_a_second_redis_on_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    folder = default_data_folder()
    assert folder == tmp_path / "state" / "penstock" / "redis"
    with find_or_start_redis(None, data_dir=None, default_dir=folder, maxmemory_mib=64) as (_, server):
        assert isinstance(server, EmbeddedRedis) and server.keeps_jobs and server.data_dir == folder
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run2"))
        with (
            pytest.raises(ConfigError, match="in use by another penstock; --data-dir chooses another folder"),
            find_or_start_redis(None, data_dir=None, default_dir=folder, maxmemory_mib=64),
        ):
            pass


def test_a_full_disk_refuses_writes_with_a_reason(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        with EmbeddedRedis(data_dir=folder) as server, client_of(server) as client:
            client.set("kept", "here")
            with pytest.raises(redis.RedisError, match=os.strerror(errno.ENOSPC)):
                for number in range(200):
                    client.set(f"key:{number}", "x" * 50_000)
                    time.sleep(0.02)
            assert client.get("kept") == "here"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_the_program_of_this_machine_tells_its_version() -> None:
    assert ServerVersion.of(find_redis_server()).major >= 6
