"""Processes as containers and shells start them: as process 1, beside another server, as a user without a name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from penstock import Client
from penstock.runtime.embedded_redis import find_or_start_redis
from penstock.runtime.local_redis import leads_to
from penstock.runtime.settings import redis_url_of
from tests.cli.test_serve_restarts import Serving

PENSTOCK = (sys.executable, "-m", "penstock")
ORPHANS = """
import os, signal, subprocess, sys, time
from penstock.runtime.init_process import reap_orphans_if_first
reap_orphans_if_first()
assert os.getpid() != 1 and os.getppid() == 1
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
# A child whose children end after it: they belong to process 1 then.
if os.fork() == 0:
    for _ in range(4):
        if os.fork() == 0:
            time.sleep(0.2)
            break
    os._exit(0)
os.wait()
time.sleep(0.6)
states = [open(f"/proc/{p}/stat").read().rpartition(")")[2].split()[0] for p in os.listdir("/proc") if p.isdigit()]
print("zombies:", states.count("Z"), flush=True)
time.sleep(60)
"""
NEW_PIDS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def needs_namespaces() -> None:
    if shutil.which("unshare") is None or subprocess.run([*NEW_PIDS, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a namespace of processes")


def test_process_1_reaps_orphans_passes_a_signal_on_and_exits_as_the_command_does() -> None:
    needs_namespaces()
    with subprocess.Popen([*NEW_PIDS, sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "zombies: 0\n"
        (first,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert outer.wait(60) == 7


def test_a_command_as_process_1_ends_with_its_own_exit_status() -> None:
    needs_namespaces()
    done = subprocess.run([*NEW_PIDS, *PENSTOCK, "no-such-command"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, "penstock")


def models_at(url: str) -> set[str]:
    return {model["id"] for model in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]}


@pytest.mark.parametrize("first", ["durable", "ephemeral"])
def test_an_ephemeral_server_and_a_durable_one_share_nothing(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    options = {"durable": (), "ephemeral": ("--ephemeral",)}
    shown: dict[str, list[str]] = {}
    servers = {kind: Serving(tmp_path, *options[kind], pool=kind) for kind in sorted(options, key=lambda k: k != first)}
    for kind, server in servers.items():
        assert server.process.stdout is not None
        shown[kind] = [server.process.stdout.readline() for _ in range(5)]
        assert models_at(server.url) == {kind}
    address = f"unix://{tmp_path}/run/redis.sock"
    assert redis_url_of() == shown["durable"][0].split()[1] == address
    said = shown["ephemeral"][0].split()[1]
    assert said != address
    if first == "durable":
        assert f"PENSTOCK_REDIS_URL={said} penstock submit 'Hello!'" in "".join(shown["ephemeral"])
    with Client(said) as client:
        assert set(client.pools()) == {"ephemeral"}
    with Client() as client:
        assert set(client.pools()) == {"durable"}
    for server in servers.values():
        server.close()


def test_commands_find_an_ephemeral_server_that_is_alone_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with find_or_start_redis(None, data_dir=None, maxmemory_mib=64, alone=True) as (url, _):
        assert leads_to(tmp_path / "run", url) and redis_url_of() == f"unix://{tmp_path}/run/redis.sock"
        with find_or_start_redis(None, data_dir=None, maxmemory_mib=64, alone=True) as (other, _):
            assert other != url and not leads_to(tmp_path / "run", other)
        assert leads_to(tmp_path / "run", url)
    assert not os.path.lexists(tmp_path / "run/redis.sock")


def test_a_second_durable_server_says_whose_redis_it_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with find_or_start_redis(None, data_dir=None, maxmemory_mib=64):
        second = Serving(tmp_path)
        assert second.process.stdout is not None
        assert f"(of process {os.getpid()}: its models and jobs are shown here too)" in second.process.stdout.readline()
        second.close()
