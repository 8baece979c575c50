"""The fixed address of the Redis of `penstock serve`: clients find it, and only its own user may use it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from fakes.processes.python_process import PythonProcess

from penstock import Client
from penstock.cli import processes
from penstock.cli.serve import keep_redis, watch_joined_redis
from penstock.cli.server_url import DEFAULT_URL, URL_VARIABLES, address_of
from penstock.contract.errors import ConfigError
from penstock.runtime.embedded_redis import EmbeddedRedis, find_or_start_redis
from penstock.runtime.local_redis import (
    LocalAddress,
    RunningRedis,
    local_folder,
    note_files,
    note_gateway,
    running_files,
    running_gateway,
    running_url,
)
from penstock.runtime.settings import redis_url_of

SERVE = """
import time
from penstock.runtime.embedded_redis import find_or_start_redis
with find_or_start_redis(None, data_dir=None, maxmemory_mib=64) as (url, server):
    print(url, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the address, which does not exist yet."""
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    with tempfile.TemporaryDirectory(prefix="local") as parent:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", f"{parent}/run")
        yield Path(parent) / "run"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """Another process that runs the Redis."""
    process = PythonProcess("-c", SERVE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("unix://")
    yield process
    process.kill()
    process.communicate()


def test_clients_find_the_redis_that_serve_started(folder: Path) -> None:
    with find_or_start_redis(None, data_dir=None, maxmemory_mib=64) as (url, server):
        assert isinstance(server, EmbeddedRedis)
        assert url == f"unix://{folder}/redis.sock" == redis_url_of()
        assert folder.stat().st_mode & 0o777 == 0o700
        with Client() as client:
            assert client.pools() == {}
    with pytest.raises(ConfigError, match=r"no Redis: start `penstock serve`.*PENSTOCK_REDIS_URL") as refused:
        redis_url_of()
    assert refused.value.param == "redis_url"


def test_a_given_url_and_the_variable_come_before_the_local_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    with find_or_start_redis(None, data_dir=None, maxmemory_mib=64):
        monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://variable:1")
        assert redis_url_of() == "redis://variable:1"
        assert redis_url_of("redis://given:1") == "redis://given:1"
        with find_or_start_redis(None, data_dir=None, maxmemory_mib=64) as (url, server):
            assert (url, server) == ("redis://variable:1", None)


def test_the_default_folder_is_the_users_own() -> None:
    assert local_folder(None) == Path(f"/tmp/penstock-{os.getuid()}")


def test_a_second_serve_joins_the_first(other: subprocess.Popen[str]) -> None:
    with find_or_start_redis(None, data_dir=None, maxmemory_mib=64) as (url, server):
        assert server == RunningRedis(url, other.pid)
        assert url == redis_url_of()


def test_a_second_serve_joins_the_first_although_the_lock_file_was_deleted(folder: Path) -> None:
    with find_or_start_redis(None, data_dir=None, maxmemory_mib=64) as (url, first):
        (folder / "serve.lock").unlink()
        with find_or_start_redis(None, data_dir=None, maxmemory_mib=64) as (_, second):
            assert second == RunningRedis(url, None)
        assert isinstance(first, EmbeddedRedis) and first.has_socket


def _fail(error: Exception) -> None:
    raise error


async def test_a_redis_whose_socket_was_deleted_starts_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)
    said: asyncio.Queue[str] = asyncio.Queue()
    with find_or_start_redis(None, data_dir=None, maxmemory_mib=64) as (url, server):
        assert isinstance(server, EmbeddedRedis)
        start_again, failures = server.start_again, [OSError(12, "Cannot allocate memory")]
        monkeypatch.setattr(server, "start_again", lambda: _fail(failures.pop()) if failures else start_again())
        keeper, heard = asyncio.create_task(keep_redis(server, said.put_nowait)), list[str]()
        (folder / "redis.sock").unlink()
        async with asyncio.timeout(60):
            while not heard or heard[-1] != "redis serves again":
                heard.append(await said.get())
        assert running_url(folder) == url
        assert "redis does not start: [Errno 12] Cannot allocate memory" in heard
        keeper.cancel()


async def test_a_serve_that_joined_says_when_that_redis_ends_and_when_one_is_there_again(
    other: subprocess.Popen[str],
) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    async with asyncio.timeout(60):
        with find_or_start_redis(None, data_dir=None, maxmemory_mib=64) as (_, joined):
            assert isinstance(joined, RunningRedis)
            watch = asyncio.create_task(watch_joined_redis(joined, said.put_nowait))
            other.kill()
            assert (await said.get()).startswith(f"the Redis of process {other.pid} has ended")
            with find_or_start_redis(None, data_dir=None, maxmemory_mib=64):
                assert await said.get() == "redis serves again"
            watch.cancel()


def test_a_second_serve_with_a_data_folder_is_refused(other: subprocess.Popen[str], tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=f"data_dir: .*process {other.pid} already runs a Redis"),
        find_or_start_redis(None, data_dir=tmp_path, maxmemory_mib=64),
    ):
        pass


def test_the_redis_of_a_killed_serve_is_not_joined(other: subprocess.Popen[str], folder: Path) -> None:
    """It ends soon after. The new server waits for that, and the old one does not remove the new one's socket."""
    other.send_signal(signal.SIGKILL)
    other.wait()
    with find_or_start_redis(None, data_dir=None, maxmemory_mib=64) as (url, server):
        assert isinstance(server, EmbeddedRedis)
        with redis.Redis.from_url(url) as client:
            assert client.info("server")["process_id"] != other.pid
            assert client.ping()
    assert not (folder / "redis.sock").exists()


def test_redis_that_is_too_busy_to_accept_is_found(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as server, ExitStack() as waiting:
        server.bind(str(folder / "redis.sock"))
        server.listen(0)
        for _ in range(3):
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(str(folder / "redis.sock"))
        assert running_url(folder) == f"unix://{folder}/redis.sock"


def test_a_socket_that_nothing_listens_on_is_replaced(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "redis.sock").touch()
    assert running_url(folder) is None
    with find_or_start_redis(None, data_dir=None, maxmemory_mib=64) as (url, _), redis.Redis.from_url(url) as client:
        assert client.ping()


def make_open(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


def make_link(folder: Path) -> None:
    target = folder.with_name("target")
    target.mkdir(mode=0o700)
    folder.symlink_to(target)


def make_anothers(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)


@pytest.mark.parametrize("make", [make_open, make_link, make_anothers])
def test_a_folder_that_another_user_could_have_prepared_is_refused(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder)
    for use in (redis_url_of, lambda: LocalAddress.take(folder)):
        with pytest.raises(ConfigError, match=f"runtime_dir: {folder}") as refused:
            use()
        assert refused.value.param == "runtime_dir"


def test_a_folder_whose_path_is_too_long_for_a_socket_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="too long a path"):
        LocalAddress.take(folder / ("long" * 25))


def test_clients_find_where_serve_stores_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert running_files(folder) is None
    folder.mkdir(mode=0o700)
    assert running_files(folder) is None
    note_files(folder, "/data/files")
    note_files(folder, "s3://bucket/files")
    assert running_files(folder) == "s3://bucket/files"
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        running_files(folder)


def test_commands_that_ask_a_gateway_find_that_of_the_running_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in URL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert address_of(None) == DEFAULT_URL
    with find_or_start_redis(None, data_dir=None, maxmemory_mib=64) as (url, _):
        assert address_of(None) == DEFAULT_URL
        note_gateway(folder, url, "http://127.0.0.1:8123")
        assert address_of(None) == "http://127.0.0.1:8123"
        assert address_of("http://127.0.0.1:9/v1") == "http://127.0.0.1:9"
        note_gateway(folder, "redis://elsewhere", "http://127.0.0.1:2")
        assert running_gateway(folder) == "http://127.0.0.1:8123"
        (folder / "gateway.url").write_text("/another/redis.sock\nhttp://127.0.0.1:3\n")
        assert running_gateway(folder) is None
    note = (folder / "gateway.url").write_text(f"{folder}/redis.sock\nhttp://127.0.0.1:8123\n")
    assert note and address_of(None) == DEFAULT_URL
