"""Releases N and N+1 as wheels in environments of their own. N is this tree; N+1 is the same with stated changes.

Until a next release exists, these changes stand for what it may bring. That is: fields on the wire, other and further
settings of the pool, packed weights under another key, and another arithmetic with another name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fakes.processes.child_process import ChildProcess

from penstock import __version__
from penstock.runtime.cache_folders import cache_folder

ROOT = Path(__file__).parents[3]
NEXT = f"{__version__}.post1"
TAG = "later"
"""Jobs of a client of N+1 with this tag have a field that N does not know."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A text in a file of the tree that stands in N+1 as another text."""

    path: str
    old: str
    new: str

    def apply(self, tree: Path) -> None:
        """Edit the file. Raises AssertionError if the text is not there exactly once."""
        path = tree / self.path
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.path} has {self.old!r} {text.count(self.old)} times"
        path.write_text(text.replace(self.old, self.new))


def _after(path: str, text: str, added: str) -> Edit:
    return Edit(path, text, text + added)


_SETTINGS, _WIRE, _POOL = "gpu_node/settings.py", "src/penstock/queue/wire.py", "src/penstock/contract/pool.py"
_LOAD = "gpu_node/model/native/load.py"
VERSION = (
    Edit("pyproject.toml", f'version = "{__version__}"', f'version = "{NEXT}"'),
    Edit("src/penstock/__init__.py", f'__version__ = "{__version__}"', f'__version__ = "{NEXT}"'),
)
FIELDS = (
    # Chunks, results, and the records of pool and node.
    _after(_WIRE, '"s": chunk.text', ', "later": [1]'),
    Edit(
        "src/penstock/queue/results.py", 'pack({"v": PROTOCOL_VERSION})', 'pack({"v": PROTOCOL_VERSION, "later": {}})'
    ),
    _after(
        _POOL, "    sampling_defaults: dict[str, int | float] = field(default_factory=dict)\n", "    later: int = 1\n"
    ),
    _after(_POOL, "    draining: bool = False\n", "    later_ms: float = 0.5\n"),
    # The job's record, so that the scripts differ too.
    Edit(
        "src/penstock/queue/scripts/submit.lua",
        "job_key(job.id), unpack(fields)",
        "job_key(job.id), 'later', '1', unpack(fields)",
    ),
    # A request, if the caller wants what the new field says.
    _after(
        _WIRE,
        "    given = job.model_fields_set\n",
        f'    fields |= {{"later": True}} if "{TAG}" in job.tags else {{}}\n',
    ),
    _after(_WIRE, '_KNOWN = frozenset(("v", ', '"later", '),
)
DEFAULTS = (
    Edit(_SETTINGS, "lease_ms: int = Field(default=15_000", "lease_ms: int = Field(default=21_000"),
    Edit(_SETTINGS, "progress_chunks: int = Field(default=64", "progress_chunks: int = Field(default=32"),
    Edit(_SETTINGS, 'scheduling_policy: PolicyName = "fair"', 'scheduling_policy: PolicyName = "fcfs"'),
    # A setting that N does not have.
    Edit(_SETTINGS, '*("share_window_ms", ', '*("later_ms", "share_window_ms", '),
    Edit(_SETTINGS, "    share_window_ms: int", "    later_ms: int = Field(default=7, ge=0)\n    share_window_ms: int"),
)
CACHES = (Edit(_LOAD, 'layout = f"{library.stem}', 'layout = f"later-{library.stem}'),)
ARITHMETIC = (
    Edit(_LOAD, "norm_eps=spec.norm_eps,", "norm_eps=spec.norm_eps + 0.01,"),
    Edit(_LOAD, 'arithmetic = f"native-', 'arithmetic = f"native2-'),
)
CHANGES: Mapping[str, Sequence[Edit]] = {
    "fields": FIELDS,
    "defaults": DEFAULTS,
    "caches": CACHES,
    "arithmetic": ARITHMETIC,
}


@dataclass(frozen=True, slots=True)
class Release:
    """A release that is installed in an environment of its own."""

    name: str
    python: Path
    cache: Path
    """The cache folder of its machine, which N and N+1 share."""

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> ReleasedProcess:
        """Start `python <command>` of this release."""
        return ReleasedProcess(self, command, env)

    @property
    def version(self) -> str:
        """What `penstock --version` says."""
        words = [str(self.python), "-P", "-m", "penstock", "--version"]
        return subprocess.run(words, env=_clean_env(), capture_output=True, text=True, check=True).stdout.split()[-1]


class ReleasedProcess(ChildProcess):
    """A process of a release."""

    def __init__(self, release: Release, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.release = release
        super().__init__(command, {**env, "PENSTOCK_CACHE": str(release.cache)})

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        words = [str(self.release.python), "-P", *command]
        env = {name: value for name, value in env.items() if name != "PYTHONPATH"}
        return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=self._log)


def install(folder: Path, name: str, changes: Iterable[Edit], cache: Path) -> Release:
    """Build a wheel of this tree with these changes, and install it."""
    tree, wheels = folder / f"{name}-tree", folder / f"{name}-wheels"
    _copy_tracked(tree)
    for change in changes:
        change.apply(tree)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(wheels), str(tree)], check=True, env=_clean_env())
    (wheel,) = wheels.iterdir()
    python = _environment(folder / name)
    into = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*into, str(wheel)], check=True, env=_clean_env())
    return Release(name, python, cache)


def new_cache(folder: Path) -> Path:
    """Return a cache folder without packed weights. It has the compiled kernels of this machine, if there are any."""
    folder.mkdir()
    (cache_folder() / "native").mkdir(parents=True, exist_ok=True)
    (folder / "native").symlink_to(cache_folder() / "native")
    return folder


def _environment(folder: Path) -> Path:
    """Make an environment that has the other packages of this one, and not its penstock. Return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A line of a path adds the folder alone: what makes our own package editable there does not count here.
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin/python"


def _copy_tracked(tree: Path) -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0"):
        if name and not re.match(r"(tests|docs|ops)/", name) and os.path.lexists(ROOT / name):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)


def _clean_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
