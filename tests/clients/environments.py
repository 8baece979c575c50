"""Install clients under build/clients/: a virtual environment for each Python client, one folder for most of Node's.

An installation is kept until its requirements change. Node clients need Node 20 or later with npm.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from clients.catalog import Client

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "clients"
INSTALLED = "installed.txt"


class InstallationError(Exception):
    """A client could not be installed."""


def install(client: Client) -> list[str]:
    """Install a client, unless it is installed. Return the command that runs its script. Raises InstallationError."""
    folder = FOLDER / client.environment
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _install_node(client, folder) if client.is_node else _install_python(client, folder)
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stdout", None) or ""
        raise InstallationError(f"{client.name} could not be installed: {error}\n{output[-2000:]}") from error


def _install_python(client: Client, folder: Path) -> list[str]:
    requirements = HERE / "requirements" / f"{client.environment}.txt"
    python = folder / "bin" / "python"
    if not _is_current(folder, requirements):
        _run(client.python or sys.executable, "-m", "venv", "--clear", folder)
        # uv installs in a fraction of the time; pip is always there.
        uv = shutil.which("uv")
        pip = (uv, "pip", "install", "--python", python) if uv else (python, "-m", "pip", "install")
        alone = () if client.has_dependencies else ("--no-deps",)
        _run(*pip, "--quiet", *alone, "--requirement", requirements)
        if client.without:
            _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *client.without)
        _mark_current(folder, requirements)
    return [str(python), "-m", f"clients.python.{Path(client.script).stem}"]


def _install_node(client: Client, folder: Path) -> list[str]:
    """Node finds packages beside the script, so the scripts are copied to where the packages are."""
    for source in dict.fromkeys(("node", client.folder)):
        shutil.copytree(HERE / source, folder, dirs_exist_ok=True)
    lock = folder / "package-lock.json"
    if not _is_current(folder, lock):
        _run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=folder)
        _mark_current(folder, lock)
    return ["node", str(folder / client.script)]


def _is_current(folder: Path, requirements: Path) -> bool:
    stamp = folder / INSTALLED
    return stamp.exists() and stamp.read_text() == _digest(requirements)


def _mark_current(folder: Path, requirements: Path) -> None:
    (folder / INSTALLED).write_text(_digest(requirements))


def _digest(requirements: Path) -> str:
    return hashlib.sha256(requirements.read_bytes()).hexdigest()


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(
        command, cwd=cwd, env=env, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800
    )
