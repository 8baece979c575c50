"""Shell completion, in bash itself, and what completing loads."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.processes.child_process import ChildProcess
from fakes.processes.fork_client import command_of
from fakes.processes.python_process import run_python

PENSTOCK = Path(sys.executable).parent / "penstock"
BASH = """
set -eu
eval "$(penstock --show-completion)"
for line in "$@"; do
    IFS='|'; COMP_WORDS=($line); unset IFS
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    _penstock_completion penstock
    printf '%s\\n' "${COMPREPLY[*]}"
    PATH="$FORKS:$PATH"
done
"""
"""Its arguments are lines of words, each with a bar behind it. For each it prints what is offered for the last word.

The first line is completed by the installed command, the others by forks: each command takes 0.3 s of CPU time.
"""
COMPLETE = "from penstock.cli.main import app; app(prog_name='penstock')"
OFFERED = {
    ("penstock", "j"): ["jobs"],
    ("penstock", "--ver"): ["--version"],
    ("penstock", "jobs", "c"): ["cancel", "change"],
    ("penstock", "jobs", "list", "--st"): ["--state"],
    ("penstock", "jobs", "list", "--state", "q"): ["queued"],
    ("penstock", "node", "--kv-cache-d"): ["--kv-cache-dtype"],
    ("penstock", "chat", "--priority", ""): ["interactive", "standard", "batch"],
}


def loaded_by(*words: str, **env: str) -> set[str]:
    """Return the packages that `penstock <words>` loads."""
    code = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    code += f"sys.argv = ['penstock', *{list(words)!r}]; from penstock.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=60
    )
    return {name.partition(".")[0] for name in done.stderr.split()} | set(done.stderr.split())


@pytest.mark.skipif(
    shutil.which("bash") is None or not PENSTOCK.exists(), reason="needs bash and an installed penstock"
)
def test_bash_completes_commands_options_and_their_values(tmp_path: Path) -> None:
    forked = tmp_path / "penstock"
    fork = command_of(ChildProcess.session_server().address, "-c", COMPLETE)
    forked.write_text(f'#!/bin/sh\nexec {shlex.join(fork)} "$@"\n')
    forked.chmod(0o700)
    path = f"{PENSTOCK.parent}{os.pathsep}{os.environ['PATH']}"
    lines = ["".join(f"{word}|" for word in words) for words in OFFERED]
    command = ["bash", "-c", BASH, "bash", *lines]
    env = os.environ | {"PATH": path, "FORKS": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    offered = [line.split() for line in done.stdout.splitlines()]
    assert dict(zip(OFFERED, offered, strict=True)) == OFFERED


def test_zsh_and_fish_get_completions_with_descriptions() -> None:
    env = {"_PENSTOCK_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "penstock do"}
    zsh = run_python("-c", COMPLETE, env=os.environ | env).stdout
    assert '"doctor":"Check this machine, its Redis and its nodes, with advice"' in zsh
    env |= {"_PENSTOCK_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    fish = run_python("-c", COMPLETE, env=os.environ | env).stdout
    assert fish == "doctor\tCheck this machine, its Redis and its nodes, with advice\n"


def test_completing_a_command_loads_no_command() -> None:
    env = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock ", "COMP_CWORD": "1"}
    loaded = loaded_by(**env)
    assert "penstock.cli.main" in loaded
    assert not loaded & {"penstock.cli.services", "penstock.cli.jobs", "torch", "redis", "rich", "fastapi"}


@pytest.mark.parametrize(
    "env",
    [
        {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock node --", "COMP_CWORD": "2"},
        {"_PENSTOCK_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "penstock node --"},
    ],
    ids=["bash", "zsh"],
)
def test_completing_an_option_loads_neither_torch_nor_redis_nor_rich(env: dict[str, str]) -> None:
    loaded = loaded_by(**env)
    assert "penstock.cli.services" in loaded
    assert not loaded & {"torch", "numpy", "redis", "rich", "fastapi", "transformers"}


def test_help_loads_no_command_and_a_list_only_its_own() -> None:
    assert not loaded_by("--help") & {"pydantic", "redis", "asyncio", "rich", "penstock.cli.services"}
    loaded = loaded_by("jobs", "list", "--redis-url", "redis://127.0.0.1:1")
    assert "penstock.cli.jobs" in loaded
    assert not loaded & {
        "torch",
        "numpy",
        "rich",
        "fastapi",
        "httpx",
        "penstock.cli.services",
        "penstock.producer.client",
    }
