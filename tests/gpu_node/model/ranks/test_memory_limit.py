"""A model that is larger than the memory of one process's control group, and that two ranks hold together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes.command import run_command
from fakes.waiting import wait_until
from fixtures.random_families import make_family_model

from penstock.gpu_node.model.checkpoint.conversion_cache import cache_folder

ROOT = Path(__file__).parents[4]
CGROUPS = Path("/sys/fs/cgroup")
SHAPES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def _new_groups(count: int) -> tuple[list[Path], str]:
    """Make control groups of memory. Return them and the name of their limit; skip the test where that is not allowed.

    They are of version 1 or 2. Groups of version 2 limit memory once their parent, here the root, says so.
    """
    for parent, limit in ((CGROUPS / "memory", "memory.limit_in_bytes"), (CGROUPS, "memory.max")):
        groups = [parent / f"penstock-test-{os.getpid()}-{number}" for number in range(count)]
        with suppress(OSError):
            if limit == "memory.max":
                (parent / "cgroup.subtree_control").write_text("+memory")
            for group in groups:
                group.mkdir()
            if all((group / limit).exists() for group in groups):
                return groups, limit
        _remove(groups)
    pytest.skip("no control group of memory can be made here")


def _remove(groups: Sequence[Path]) -> None:
    def is_gone(group: Path) -> bool:
        # A process that has ended may be in its group for a moment yet.
        with suppress(OSError):
            group.rmdir()
        return not group.exists()

    wait_until(lambda: all(map(is_gone, groups)))


@pytest.fixture
def groups() -> Iterator[tuple[list[Path], str]]:
    found = _new_groups(2)
    yield found
    _remove(found[0])


def _run(model: Path, num_ranks: int, num_tokens: int, groups: Sequence[Path] = ()) -> dict[str, Any]:
    words = [str(model), str(num_ranks), str(num_tokens), *map(str, groups)]
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'ops'}"}
    command = [sys.executable, "-P", "-m", "fakes.runners.limited_ranks", *words]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _out_of_page_cache(file: Path) -> None:
    """Drop its pages: the group of the process that reads them next is charged for them."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_two_ranks_serve_a_model_that_one_cannot_hold(
    groups: tuple[list[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = cache_folder() / "native"
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(compiled)
    model = make_family_model(tmp_path / "model", "llama", "bfloat16", **SHAPES)
    wanted = _run(model, 1, 12)
    (weights,) = (tmp_path / "cache" / "weights").glob("*.weights")
    limit_bytes = weights.stat().st_size * 95 // 100
    for group in groups[0]:
        (group / groups[1]).write_text(str(limit_bytes))

    one, two = _planned(model, limit_bytes)
    assert "a rank's weights take" in one and "GiB of memory" in one
    assert two == ""
    _out_of_page_cache(weights)
    found = _run(model, 2, 12, groups[0])
    assert found["tokens"] == wanted["tokens"]
    assert found["faults"] == [0, 0]
    _out_of_page_cache(weights)
    assert _run(model, 1, 3, groups[0][:1])["faults"][0] > 0, "the limit is too large to show anything"


def _planned(model: Path, rank_bytes: int) -> list[str]:
    """Return why one rank does not fit, and why two do not."""
    words = "--devices", "cpu", "--cores", "2", "--memory", str(rank_bytes / 2**30), "--kv-cache-gib", "0.01"
    done = run_command("plan", str(model), *words, "--runner", "native", "--dtype", "bfloat16", "--json")
    shapes = json.loads(done.stdout)["shapes"]
    return [shape["problem"] for shape in shapes if shape["replicas"] == 1]
