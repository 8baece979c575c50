"""Newer releases of the pinned packages, as the configured registries of npm and PyPI name them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from clients.catalog import Client
from clients.environments import HERE
from packaging.version import Version

NUM_QUESTIONS_AT_ONCE = 4
TIMEOUT_S = 60.0
_PINNED = re.compile(r"([\w.-]+)(?:\[[\w,.-]+\])?==(\S+)")
_NEWEST = re.compile(r"^\S+ \((\S+)\)$", re.MULTILINE)


class RegistryError(Exception):
    """A registry did not name a release. The text is the reason."""


@dataclass(frozen=True)
class Pin:
    """A pinned package."""

    registry: str
    """npm or PyPI."""
    package: str
    version: str
    python: str = ""
    """The release of Python that the package needs, if it does not run with ours."""


def pins_of(clients: Iterable[Client]) -> list[Pin]:
    """Return the pinned packages of clients, each one once."""
    pins: dict[Pin, None] = {}
    for client in clients:
        if client.is_node:
            named = json.loads((HERE / client.folder / "package.json").read_text())["dependencies"]
            pins |= dict.fromkeys(Pin("npm", package, version) for package, version in named.items())
        else:
            lines = (HERE / "requirements" / f"{client.environment}.txt").read_text()
            pins |= dict.fromkeys(
                Pin("PyPI", package, version, client.python.removeprefix("python"))
                for package, version in _PINNED.findall(lines)
            )
    return [*pins]


def newest_release(pin: Pin) -> str:
    """Ask a registry for the newest release of a package. Raises RegistryError."""
    if pin.registry == "npm":
        command = ["npm", "view", pin.package, "version"]
    else:
        options = ["--disable-pip-version-check", "--retries", "0", "--timeout", "15"]
        command = [sys.executable, "-m", "pip", *options, "index", "versions", pin.package]
        command += ["--python-version", pin.python, "--only-binary=:all:"] if pin.python else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RegistryError(str(error)) from error
    found = [done.stdout.strip()] if pin.registry == "npm" else _NEWEST.findall(done.stdout)
    if done.returncode or not found or not found[0]:
        reasons = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise RegistryError(reasons[0] if reasons else f"{command[0]} ended with the status {done.returncode}")
    return found[0]


def lines_of(clients: Iterable[Client], ask: Callable[[Pin], str] = newest_release) -> list[str]:
    """Return the lines of the report: a newer release each, and one line for each registry that gave no answer."""
    pins = pins_of(clients)
    with ThreadPoolExecutor(NUM_QUESTIONS_AT_ONCE) as threads:
        answers = [*threads.map(lambda pin: _asked(ask, pin), pins)]
    lines = []
    unanswered: dict[str, list[tuple[str, RegistryError]]] = defaultdict(list)
    for pin, answer in zip(pins, answers, strict=True):
        if isinstance(answer, RegistryError):
            unanswered[pin.registry].append((pin.package, answer))
        elif Version(answer) > Version(pin.version):
            lines.append(f"{pin.registry}: {pin.package} {pin.version} is pinned, {answer} is out")
    if not lines and not unanswered:
        lines = [f"none: the {len(pins)} pinned packages are the newest"]
    for registry, failures in unanswered.items():
        packages = ", ".join(package for package, _ in failures)
        lines.append(f"{registry} did not answer for {packages}: {failures[0][1]}")
    return lines


def _asked(ask: Callable[[Pin], str], pin: Pin) -> str | RegistryError:
    try:
        return ask(pin)
    except RegistryError as error:
        return error
