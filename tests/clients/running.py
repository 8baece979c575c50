"""Run the script of a client against a server, and read what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clients.catalog import Client
from clients.environments import FOLDER, InstallationError, install
from clients.recording import recorded
from clients.server import LOGS, Server, scripted_server

TESTS = Path(__file__).resolve().parents[1]
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "TERM")
"""Others could change a client's behavior: keys, addresses, settings of the tools."""


@dataclass(frozen=True)
class Report:
    """What a script reported."""

    client: Client
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    num_passed: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    """The failed checks, with their reasons. A script that did not run to its end is one too."""

    @property
    def num_checks(self) -> int:
        """How many checks the script made."""
        return self.num_passed + len(self.problems)

    @property
    def passed(self) -> bool:
        """Whether every check passed, and there was one."""
        return self.num_passed > 0 and not self.problems


def run_client(client: Client, server: Server | None, *, records: bool = False, tool_format: str = "hermes") -> Report:
    """Install a client and run its script.

    server: that of the demo model, or of encoders; None if the client needs only the scripted one. records: keep its
    requests (`recording.py`). tool_format: that of the scripted model.
    """
    try:
        command = install(client)
    except InstallationError as error:
        return Report(client, problems={"installation": str(error)})
    with ExitStack() as stack:
        if client.is_scripted:
            server = stack.enter_context(scripted_server(tool_format))
        assert server is not None, f"{client.name} needs a server"
        if records:
            server = stack.enter_context(recorded(server, client.name))
        log = stack.enter_context((LOGS / f"{client.name}.log").open("w"))
        started = time.monotonic()
        output, problem = _output_of(command, client, server, log)
    return _report_of(client, output, problem, time.monotonic() - started)


def _output_of(command: list[str], client: Client, server: Server, log: Any) -> tuple[str, str | None]:
    """Return what the script printed, and why it did not run to its end."""
    try:
        done = subprocess.run(
            command,
            env=_environment_of(server),
            cwd=FOLDER / client.environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=client.timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        return printed.decode(errors="replace"), f"it ran longer than {client.timeout_s:.0f} s"
    return done.stdout, f"it ended with the status {done.returncode}" if done.returncode else None


def _environment_of(server: Server) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    ours = {"PENSTOCK_URL": server.url, "PENSTOCK_MODEL": server.model, "PENSTOCK_RERANKER": server.reranker}
    ours["PENSTOCK_MODEL_FOLDER"] = str(server.model_folder)
    return {**kept, **ours, "PYTHONPATH": str(TESTS), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def _report_of(client: Client, output: str, problem: str | None, seconds: float) -> Report:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith(('{"versions"', '{"check"'))]
    versions: dict[str, str] = next((line["versions"] for line in lines if "versions" in line), {})
    checks = [line for line in lines if "check" in line]
    problems = {line["check"]: line["problem"] for line in checks if line["problem"]}
    if not problems and (problem or not checks):
        problems["the script"] = f"{problem or 'it made no check'}; see {LOGS / client.name}.log"
    num_passed = sum(not line["problem"] for line in checks)
    return Report(client, seconds, versions, num_passed, problems)
