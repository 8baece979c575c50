"""The audit beside damaged records: it names what it cannot read and goes on, and its lock ends with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fakes.queue.damage_cells import Snapshot
from fakes.queue.harness import POOL, P, Queue

from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.pool_scan import TYPES, TYPES_BY_TENANT
from tests.queue.broker.test_audit import Scene

NUM_PARTS = 25
_PAGE = Path(__file__).parents[3].joinpath("docs", "CLI.md").read_text()
_ROWS = re.findall(r"^\| (`.+?) \|", _PAGE.partition("### What a repair leaves")[2].partition("## ")[0], re.MULTILINE)
NOT_RESTORED = {name for row in _ROWS for name in re.findall(r"`(\w+)`", row.partition(" of ")[0])} - {"lives_for_ever"}
"""What CLI.md lists as findings that a repair leaves."""


def test_types_of_keys_are_those_of_the_table() -> None:
    kinds = "string|hash|list|set|zset|stream"
    table = re.findall(rf"^    P:(\w+)(\S*) +({kinds}) ", keys.__doc__ or "", re.MULTILINE)
    found = {(name, bool(rest)): kind for name, rest, kind in table}
    assert len(found) > 50
    for (name, has_rest), kind in found.items():
        assert kind == (TYPES_BY_TENANT[name][has_rest] if name in TYPES_BY_TENANT else TYPES[name]), name


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_PARTS))])
async def test_an_audit_goes_on_and_a_second_repair_finds_only_what_is_listed(
    queue: Queue, redis_url: str, part: int
) -> None:
    await Scene(queue, await queue.node()).fill()
    broker = AdminBroker(queue.redis)
    with Snapshot(redis_url, P) as snapshot:
        wrong = list[str]()
        for cell in list(snapshot.cells())[part::NUM_PARTS]:
            if cell.field == b"version" or (cell.key.endswith(b":config") and cell.way == "absent" and not cell.field):
                continue  # A pool of another protocol version is left alone, and a pool without a config is none.
            snapshot.restore()
            snapshot.damage(cell)
            try:
                await audit(broker, POOL)
                await audit(broker, POOL, repair=True)
                left = [one for one in await audit(broker, POOL, repair=True) if one.name not in NOT_RESTORED]
            except Exception as error:
                wrong.append(f"{cell}: {error!r}"[:300])
                continue
            if left or await queue.redis.exists(f"{P}:audit"):
                wrong.append(f"{cell}: {left}"[:300])
        assert not wrong, "\n".join(wrong)
