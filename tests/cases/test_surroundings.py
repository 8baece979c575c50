"""Settings of the surroundings: proxies, full disks, a second event loop, a user without a name or a home."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.command import restored_process, run_command

from penstock import AsyncClient
from penstock.cli.main import app
from penstock.cli.output import problem_of_output
from penstock.contract.errors import ConfigError, UnavailableError
from penstock.gpu_node.model.checkpoint.hub import HubModel, downloaded
from penstock.runtime import cache_folders
from penstock.runtime.proxies import is_loopback

DEAD = {"http": "http://127.0.0.1:1", "socks": "socks5://user:hidden@127.0.0.1:1", "wrong": "socks4a://127.0.0.1:1"}
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


def behind(proxy: str) -> dict[str, str]:
    return dict.fromkeys(PROXIES, DEAD[proxy]) | dict.fromkeys(("NO_PROXY", "no_proxy"), "")


@pytest.mark.parametrize("proxy", DEAD)
def test_commands_reach_this_machine_without_the_proxy(door: httpx.Client, proxy: str) -> None:
    done = run_command("batch", "list", "--base-url", str(door.base_url), **behind(proxy))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("proxy", DEAD)
def test_metrics_of_this_machine_are_read_without_the_proxy(
    door: httpx.Client, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.cli.machine.support_bundle import _scraped

    for name, value in behind(proxy).items():
        monkeypatch.setenv(name, value)
    assert "# not read" not in _scraped(f"{door.base_url}/metrics")


@pytest.mark.parametrize(
    ("proxy", "said"),
    [("socks", "PROXY: socks5://127.0.0.1:1 is a SOCKS proxy.*pip install socksio"), ("wrong", "PROXY: .* no URL of")],
)
def test_a_proxy_that_cannot_be_used_is_named_where_one_is_needed(
    proxy: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = run_command("batch", "list", "--base-url", "http://192.0.2.1", **behind(proxy))
    assert done.returncode == 2 and done.stderr.startswith("penstock: ") and done.stderr.count("\n") == 1
    for name, value in behind(proxy).items():
        monkeypatch.setenv(name, value)
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    set_client_factory(_http.default_client_factory)  # A client of before the change has no proxy.
    with pytest.raises(ConfigError, match=said) as raised:
        downloaded(HubModel.parse("org/model", None), lambda *_: None)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000", True), ("http://localhost", True), ("http://[::1]:8000/v1", True),
        ("http://0.0.0.0:8000", True), ("http://a.localhost", True), ("http://127.9.9.9", True),
        ("http://10.0.0.1", False), ("https://localhost.example.com", False), ("http://[::1", False),
    ],
)  # fmt: skip
def test_addresses_of_this_machine(url: str, is_here: bool) -> None:
    assert is_loopback(url) is is_here


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("submit", "--help"), ("config", "show")])
def test_a_full_disk_behind_stdout_is_one_sentence(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full, restored_process():
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            app(words, prog_name="penstock")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "penstock: the output cannot be written: No space left on device\n"


def test_the_end_of_python_adds_nothing() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "penstock", "config", "show"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr


def test_only_an_output_that_cannot_be_written_is_a_problem_of_the_output() -> None:
    full = OSError(errno.ENOSPC, "full", "out.jsonl")
    assert (
        problem_of_output(ExceptionGroup("", [ValueError(), full])) == "the output cannot be written: out.jsonl: full"
    )
    assert problem_of_output(OSError(errno.ENOENT, "none")) is None


CALLS: dict[str, Callable[[AsyncClient], Coroutine[Any, Any, Any]]] = {
    "connect": lambda client: client.connect(),
    "submit": lambda client: client.submit("Hi"),
    "generate": lambda client: client.generate("Hi"),
    "ack": lambda client: client.ack("pool.1"),
    "tokenize": lambda client: client.tokenize("Hi"),
    "close": lambda client: client.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_client_of_another_event_loop_says_what_to_do(redis_url: str, name: str) -> None:
    client = AsyncClient(redis_url)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(client.connect())
        with pytest.raises(UnavailableError, match=r"another event loop: each asyncio\.run needs its own AsyncClient"):
            second.run(CALLS[name](client))
        first.run(client.close())


@pytest.mark.parametrize("home", [None, "/proc/1", "other"])
def test_a_user_without_a_home_has_private_folders(home: str | None, tmp_path: Path) -> None:
    """What `docker run --user 1000680000` does: no entry in /etc/passwd, and HOME unset, / or another user's."""
    script = (
        "import os, sys; os.setgroups([]); os.setgid(0); os.setuid(1000680000)\n"
        "from penstock.runtime.cache_folders import cache_folder, state_folder; print(cache_folder(), state_folder())"
    )
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    (tmp_path / "other").mkdir(mode=0o700)
    env = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "PENSTOCK_CACHE", "XDG_STATE_HOME")
    }
    if home is not None:
        env["HOME"] = str(tmp_path / home)
    # Imported before: the user may not read this folder.
    words = [sys.executable, "-c", f"import penstock.runtime.cache_folders\n{script}"]
    said = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert said.stdout.split() == ["/tmp/penstock-1000680000/cache", "/tmp/penstock-1000680000/state"], said.stderr


def test_a_folder_that_another_user_made_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    strange = Path("/tmp/penstock-4000000000")
    strange.mkdir(mode=0o700, exist_ok=True)
    try:
        assert cache_folders._temporary("cache") == Path("/dev/null/penstock")
    finally:
        strange.rmdir()


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_paths_and_texts_may_have_any_letters_in_any_locale(demo_file: Path, tmp_path: Path, locale: str) -> None:
    model = tmp_path / "größe" / "模型.GGUF"
    model.parent.mkdir()
    model.symlink_to(demo_file)
    env = os.environ | {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = (sys.executable, "-m", "penstock", "plan", str(model))
    done = subprocess.run(words, env=env, capture_output=True, encoding="utf-8", timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert "runner native" in done.stdout
