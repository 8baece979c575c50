"""Shared code of the scripts: the server's address, the list of checks, and the lines that the runner reads.

It needs only Python, because each client has its own virtual environment.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

URL = os.environ["PENSTOCK_URL"]
API = f"{URL}/v1"
MODEL = os.environ["PENSTOCK_MODEL"]
KEY = "none"
QUESTION = "What does a water turbine do?"
STORY = "Tell me a very long story about a river, with many chapters."
"""The answer to it is long enough to be canceled."""
LONG_STORY_TOKENS = 6000
TOO_LONG = "water " * 9000
"""More tokens than the context of the demo model, 8,192."""
CANCEL_TIMEOUT_S = 30.0

Check = Callable[[], Any]
_checks: list[Check] = []


def check(function: Check) -> Check:
    """Register a check. Its name states the behavior; it raises an exception if the behavior differs."""
    _checks.append(function)
    return function


def error_of(kind: type[Exception], call: Check) -> Any:
    """Return the error with which a call fails. Any other outcome is a failed check."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"the call succeeded, instead of failing with {kind.__name__}")


def user(text: str) -> list[Any]:
    """Return a chat that begins with a user's message."""
    return [{"role": "user", "content": text}]


def main(*packages: str) -> None:
    """Run the registered checks, and print a line of JSON for the versions and for each check."""
    say_versions(*packages)
    problems = [_problem_of(function) for function in _checks]
    sys.exit(any(problems))


def say_versions(*packages: str) -> None:
    """Print the line that tells the runner the versions of these packages."""
    print(json.dumps({"versions": {package: importlib.metadata.version(package) for package in packages}}), flush=True)


def say_check(name: str, seconds: float, problem: str | None) -> None:
    """Print the line that tells the runner how a check ended."""
    print(json.dumps({"check": name, "seconds": round(seconds, 2), "problem": problem}), flush=True)


def wait_until_newest_job_is_cancelled() -> None:
    """Wait until the job that was created last has ended. Fail if it ended otherwise than by its cancellation."""
    until = time.monotonic() + CANCEL_TIMEOUT_S
    while (state := newest_job()["state"]) in ("queued", "running"):
        if time.monotonic() > until:
            raise AssertionError(f"the job is still {state} after {CANCEL_TIMEOUT_S:.0f} s")
        time.sleep(0.1)
    assert state == "cancelled", f"the job ended as {state}"


def newest_job() -> dict[str, Any]:
    """Return the job that was created last, as the jobs API shows it."""
    with urllib.request.urlopen(f"{API}/jobs?limit=1", timeout=30) as answer:
        page: dict[str, Any] = json.load(answer)
    job: dict[str, Any] = page["data"][0]
    return job


def _problem_of(function: Check) -> str | None:
    started = time.monotonic()
    try:
        result = function()
        if inspect.iscoroutine(result):
            asyncio.run(result)
        problem = None
    except Exception:
        problem = traceback.format_exc()
    say_check(function.__name__.replace("_", " "), time.monotonic() - started, problem)
    return problem
