"""A small rolling upgrade and its way back; `make upgrades` runs each kind of change under 200 streams."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from faults.tools.releases import CHANGES, NEXT, VERSION, install, new_cache
from faults.upgrades import OLD, SCENARIOS, run
from fixtures.tiny_model import make_tiny_model

from penstock import __version__
from penstock.kernels.cpu.probe import best_isa, cpu_flags

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(best_isa(cpu_flags()) is None, reason="no native kernels on this CPU"),
]


@pytest.mark.parametrize("name", ["fields", "arithmetic"])
async def test_a_rolling_upgrade_and_its_rollback_leave_every_stream_as_it_was(name: str, tmp_path: Path) -> None:
    model, cache = make_tiny_model(tmp_path / "tiny"), new_cache(tmp_path / "cache")
    old = await asyncio.to_thread(install, tmp_path, OLD, (), cache)
    new = await asyncio.to_thread(install, tmp_path, "N1", (*VERSION, *CHANGES[SCENARIOS[name].change]), cache)
    assert (old.version, new.version) == (__version__, NEXT)
    counts = await run(SCENARIOS[name], (old, new), model, tmp_path / "run", num_streams=16, seed=1)
    assert counts["streams"] == sum(count for what, count in counts.items() if what.startswith("equal"))
    assert counts["processes replaced"] == 8
