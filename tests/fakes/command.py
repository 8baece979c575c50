"""The `penstock` command run in the test's own process, which saves starting another one."""

from __future__ import annotations

import logging
import subprocess

from typer.testing import CliRunner

from penstock.cli.main import app


def run_command(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Return exit status, stdout and stderr of `penstock <arguments>`.

    `env` is added to the environment, in which PENSTOCK_REDIS_URL is otherwise unset. Some commands set the level of
    penstock's logger for their process. It is restored.
    """
    logger = logging.getLogger("penstock")
    level = logger.level
    changes = {"PENSTOCK_REDIS_URL": None, **env}
    try:
        done = CliRunner().invoke(
            app, arguments, input=stdin, env=changes, prog_name="penstock", catch_exceptions=False
        )
    finally:
        logger.setLevel(level)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)
