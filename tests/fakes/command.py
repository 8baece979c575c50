"""The `penstock` command run in the test's own process, which saves starting another one."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from typer.testing import CliRunner

from penstock.cli.main import app


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore after the block what commands set for their whole process: loggers, and the hook for exceptions."""
    root, hook = logging.getLogger(), sys.excepthook
    loggers = [root, *(one for one in root.manager.loggerDict.values() if isinstance(one, logging.Logger))]
    handlers, levels = root.handlers[:], [one.level for one in loggers]
    try:
        yield
    finally:
        root.handlers[:], sys.excepthook = handlers, hook
        for one, level in zip(loggers, levels, strict=True):
            if one.level != level:
                one.setLevel(level)


def run_command(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Return exit status, stdout and stderr of `penstock <arguments>`.

    `env` is added to the environment, in which PENSTOCK_REDIS_URL is otherwise unset.
    """
    changes = {"PENSTOCK_REDIS_URL": None, **env}
    with restored_process():
        done = CliRunner().invoke(
            app, arguments, input=stdin, env=changes, prog_name="penstock", catch_exceptions=False
        )
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)
