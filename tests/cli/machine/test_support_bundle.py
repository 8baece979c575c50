"""`penstock support-bundle`: one archive with every part, and no secret in any of them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import httpx
import pytest
from fakes.command import run_command
from fakes.processes.node_process import NodeProcess
from fakes.waiting import wait_until
from faults.tools.processes import GatewayProcess

from penstock.cli.machine.support_bundle import effective_settings, without_secrets

SECRETS = ("gUessMe", "pk-abcdef0123456789", "hf_0123456789abcdef", "pePPer")


def read(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {one.name.removeprefix("penstock-support/"): archive.extractfile(one) for one in archive}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_archive_has_every_part_of_a_running_system(redis_url: str, tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("a line\nredis://node:gUessMe@redis:6379/0 refused\n")
    target = tmp_path / "bundle.tar.gz"
    with NodeProcess(redis_url, name="bundled") as node, GatewayProcess(redis_url) as gateway:
        wait_until(lambda: "penstock_nodes" in httpx.get(f"{gateway.url}/metrics", timeout=60).text)
        done = run_command(
            *("support-bundle", "--output", str(target), "--log", str(log), "--metrics", f"{gateway.url}/metrics"),
            *("--redis-url", redis_url),
            PENSTOCK_KEY_PEPPER="pePPer",
            PENSTOCK_NODE_METRICS_PORT="9100",
        )
        assert done.returncode == 0, done.stderr
        files = read(target)
        stacks = {files[f"stacks/{process.pid}.txt"] for process in (node, gateway)}
        assert node.stop() == gateway.stop() == 0
    assert target.stat().st_mode & 0o777 == 0o600
    assert json.loads(files["versions.json"])["packages"]["redis"]
    settings = json.loads(files["settings.json"])
    assert settings["node"]["metrics_port"] == {"value": 9100, "from": "given"}
    assert settings["keys"]["key_pepper"] == {"value": "***", "from": "given"}
    assert settings["gateway"]["port"] == {"value": 8000, "from": "default"}
    assert "Redis" in {check["subject"] for check in json.loads(files["doctor.json"])}
    assert json.loads(files["redis.json"])["maxmemory_policy"] == "noeviction"
    (pool,) = json.loads(files["pools.json"])
    assert pool["nodes"][0]["node_id"].startswith("bundled-")
    assert all(one["found"] == [] for one in json.loads(files["audit.json"]))
    assert "penstock_nodes" in files["metrics/0.txt"]
    assert files["logs/0-node.log"] == "a line\nredis://***@redis:6379/0 refused\n"
    for text in stacks:
        assert "most recent call first" in text and "asyncio" in text
    assert not [name for name, text in files.items() for secret in SECRETS if secret in text]


def test_parts_that_fail_are_replaced_by_their_error(tmp_path: Path) -> None:
    target = tmp_path / "bundle.tar.gz"
    gone = f"unix://{tmp_path}/none.sock"
    done = run_command(
        *("support-bundle", "--output", str(target), "--metrics", "http://127.0.0.1:1/metrics"),
        *("--redis-url", gone),
        PENSTOCK_GATEWAY_PROT="1",
    )
    assert done.returncode == 0, done.stderr
    files = read(target)
    assert "Redis is unreachable" in json.loads(files["pools.json"])["error"]
    assert (
        "unknown environment variable PENSTOCK_GATEWAY_PROT" in json.loads(files["settings.json"])["gateway"]["error"]
    )
    assert "# not read: " in files["metrics/0.txt"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:gUessMe@redis/0", "redis://***@redis/0"),
        ("redis://redis/0?password=gUessMe&db=1", "redis://redis/0?password=***&db=1"),
        ("key pk-abcdef0123456789.", "key pk-***."),
        ("Authorization: Bearer abc.def-0123456789", "Authorization: Bearer ***"),
        ("HF_TOKEN=hf_0123456789abcdef", "HF_TOKEN=hf_***"),
        ("penstock serve --api-key abc --port 1", "penstock serve --api-key *** --port 1"),
        ("http://localhost:8000/metrics", "http://localhost:8000/metrics"),
    ],
)
def test_secrets_are_known_by_their_form(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_variables_with_secret_names_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "any form")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=any form")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "one")
    variables = effective_settings()["variables"]
    shown = {variables[name] for name in ("HF_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_SERVICE_NAME")}
    assert shown == {"***", "one"}


def test_an_archive_is_never_written_over_and_a_wrong_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    done = run_command("support-bundle", "--output", str(tmp_path / "there"))
    assert (done.returncode, done.stderr) == (2, f"penstock: --output: {tmp_path / 'there'}: File exists\n")
    done = run_command("support-bundle", "--log", str(tmp_path / "none"))
    assert (done.returncode, done.stderr) == (2, f"penstock: --log: {tmp_path / 'none'} is no file\n")
