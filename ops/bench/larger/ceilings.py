"""What this machine's cores reach together: reading memory, and products of bfloat16 and of 8-bit integers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import peers
from bench.contestants import CORES

SOURCE = Path(__file__).parent / "ceilings.cpp"
_FLAGS = ("-std=c++20", "-O3", "-pthread", "-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")


@dataclass(frozen=True)
class Ceilings:
    """In units of 1e9 per second, all cores together; a multiplication and an addition are two operations."""

    read_gb_per_s: float
    bf16_gop_per_s: float
    int8_gop_per_s: float


def measured(cores: list[int] = CORES) -> Ceilings:
    """Measure all three, some seconds. Raises OSError if there is no compiler or no AVX-512."""
    return Ceilings(**_run(map(str, cores)))


def read_gb_per_s(cores: list[int] = CORES) -> float:
    """Measure only how fast all cores read memory now, about a second. Raises OSError as `measured` does."""
    return _run(["--read", *map(str, cores)])["read_gb_per_s"]


def _run(arguments: Iterable[str]) -> dict[str, float]:
    """Return what the program prints; compile it first if its source is newer."""
    program = peers.BUILD / "bench" / "ceilings"
    program.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
            subprocess.run(["g++", *_FLAGS, "-o", program, SOURCE], check=True)
        done = subprocess.run([program, *arguments], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"the machine's ceilings were not measured: {error}") from error
    found: dict[str, float] = json.loads(done.stdout)
    return found


def best(path: Path, runs: int = 3) -> Ceilings | None:
    """Measure, and keep the highest of all measurements of a campaign in a file: what else runs only lowers them.

    Without `runs`, only read the file. Returns None if nothing was measured.
    """
    found = [Ceilings(**json.loads(path.read_text()))] if path.exists() else []
    found += [measured() for _ in range(runs)]
    if not found:
        return None
    highest = Ceilings(*(max(values) for values in zip(*(asdict(one).values() for one in found), strict=True)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(highest)))
    return highest
