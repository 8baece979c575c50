"""A Redis server whose machine dies: of its files remains what was synced, and no byte more."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from faults.tools.redis_process import RedisProcess

SOURCE = Path(__file__).with_name("synced_files.cpp")


def compiled(folder: Path) -> Path:
    """Compile the library that notes what was synced."""
    library = folder / "synced_files.so"
    words = ["-std=c++20", "-O1", "-fPIC", "-shared", "-o", str(library), str(SOURCE)]
    subprocess.run([os.environ.get("CXX", "g++"), *words], check=True)
    return library


class MachineRedis(RedisProcess):
    """A server with an append-only file. Names of files count as synced at once, so the file is never rewritten."""

    def __init__(self, folder: Path, *, sync_us: int = 0, **options: Any) -> None:
        """`sync_us`: how many microseconds longer each sync takes."""
        folder.mkdir(parents=True, exist_ok=True)
        self._notes = folder / "synced"
        variables = {"LD_PRELOAD": str(compiled(folder)), "SYNCED_FILES": str(self._notes), "SYNC_US": str(sync_us)}
        options = {"auto-aof-rewrite-percentage": 0, **options}
        super().__init__(folder / "redis", variables=variables, **options)

    def die(self) -> int:
        """Let the machine die. Return how many bytes were written and not synced."""
        self.kill()
        sizes: dict[int, int] = {}
        for line in self._notes.read_text().splitlines():
            inode, size = map(int, line.split())
            sizes[inode] = size
        num_lost = 0
        for file in self.folder.glob("appendonly*/*"):
            known = file.stat()
            size = sizes.get(known.st_ino, 0)
            num_lost += max(0, known.st_size - size)
            os.truncate(file, min(size, known.st_size))
        return num_lost

    def copy_of(self, folder: Path) -> RedisProcess:
        """Return a server with a copy of the files."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("redis.sock", "redis.log"))
        return RedisProcess(folder)
