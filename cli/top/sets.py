"""Sets of jobs in `penstock top`: open batches, flows and bulk actions of all tenants, and tags that its user names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from rich.table import Table
from rich.text import Text

from penstock.cli.top.reader import Frame, SetRow
from penstock.contract.errors import DamagedRecordError, NotFoundError
from penstock.contract.job_counts import JobCounts, counts_of_batch, counts_of_bulk
from penstock.queue.broker.connection import connect
from penstock.queue.broker.steering import Steering, report_of
from penstock.queue.files.batch_records import BatchRecords
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from penstock.producer.client import AsyncClient

MAX_BATCHES = 8
"""Open batches and flows in a view: those with the most rows left of MAX_LOOKED."""
MAX_LOOKED = 64
MAX_BULKS = 4
"""Bulk actions in a view: the oldest of each pool."""


class _Reader(Protocol):
    async def read(self) -> Frame: ...


class SetReader:
    """Adds sets to the frames of another reader."""

    def __init__(
        self,
        reader: _Reader,
        batches: BatchRecords | None,
        steering: Steering,
        client: AsyncClient | None,
        tags: Sequence[str],
    ) -> None:
        """`batches`: None shows none. `steering` of bulk actions. `client`: that of the tenant whose tags are shown."""
        self._reader = reader
        self._batches = batches
        self._steering = steering
        self._client = client
        self._tags = tags

    async def read(self) -> Frame:
        """Return the next frame. Raises UnavailableError while no Redis is reachable."""
        frame = await self._reader.read()
        batches = [] if self._batches is None else await self._open_batches(self._batches)
        tags = [] if self._client is None else [await self._client.sets.counts(tag=tag) for tag in self._tags]
        shown = sorted(batches, key=lambda row: -row.counts.num_open)[:MAX_BATCHES]
        bulks = [] if self._batches is None else await self._open_bulks([pool.pool for pool in frame.pools])
        rows = (*(SetRow("tag", counts) for counts in tags), *bulks, *shown)
        return replace(frame, sets=rows, num_batches_left_out=len(batches) - len(shown))

    async def _open_batches(self, records: BatchRecords) -> list[SetRow]:
        rows, now_ms = list[SetRow](), round(1000 * records.now_s())
        for one in await records.several(await records.open_ids(MAX_LOOKED)):
            if one.is_open:
                of_rows = one.num_rows, one.num_completed, one.num_failed
                counts = counts_of_batch(one.batch_id, one.tenant, of_rows, one.rows_per_s or None, now_ms=now_ms)
                rows.append(SetRow("flow" if one.is_flow else "batch", counts))
        return rows

    async def _open_bulks(self, pools: Sequence[str]) -> list[SetRow]:
        found = dict.fromkeys([one for pool in pools for one in await self._steering.open_bulks(pool)])
        rows = list[SetRow]()
        for bulk_id in [*found][:MAX_BULKS]:
            with suppress(NotFoundError, DamagedRecordError):
                report = report_of(bulk_id, await self._steering.parts_of(bulk_id), None)
                rows.append(SetRow("bulk", counts_of_bulk(report)))
        return rows


@dataclass(frozen=True, slots=True)
class AskedSets:
    """Which sets a user sees."""

    tags: Sequence[str]
    tenant: str
    """That of the tags."""
    redis_url: str | None
    has_batches: bool

    async def beside(self, reader: _Reader, url: str, stack: AsyncExitStack) -> SetReader:
        """Return a reader of these sets and of what `reader` reads. `url`: the Redis that has the batches."""
        redis = await stack.enter_async_context(connect(url))
        records = BatchRecords(redis) if self.has_batches else None
        client = None
        if self.tags:
            from penstock.producer.client import AsyncClient  # It is large.

            client = await stack.enter_async_context(AsyncClient(redis_url_of(self.redis_url), tenant=self.tenant))
        return SetReader(reader, records, Steering(redis), client, self.tags)


_NAME_CHARS, _WIDE_NAME_CHARS = 28, 48


def table_of(rows: Sequence[SetRow], *, is_wide: bool) -> Table:
    """Return a table of sets: what has ended, how fast, and when the last job probably will."""
    num_chars = _WIDE_NAME_CHARS if is_wide else _NAME_CHARS
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("set", no_wrap=True, overflow="ellipsis", max_width=num_chars)
    table.add_column("tenant", no_wrap=True, overflow="ellipsis", max_width=12)
    for name in ("ended", "of", "failed", "rate/s", "ends"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        counts = row.counts
        rate = "–" if counts.rate_per_s is None else f"{counts.rate_per_s:,.1f}"
        failed = sum(num for state, num in counts.states.items() if state in ("failed", "expired", "dead"))
        cells = f"{counts.num_ended:,}", f"{counts.total:,}", f"{failed:,}", rate, _end_of(counts)
        name = f"{row.kind} {row.name}"
        if len(name) > num_chars:
            # Ids begin with their time, so those of one day begin alike.
            name = f"{name[:10]}…{name[11 - num_chars :]}"
        table.add_row(Text(name), Text(counts.tenant), *cells)
    return table


def _end_of(counts: JobCounts) -> str:
    """Return when the last job ends, in local time."""
    if not counts.num_open:
        return "over" if counts.total else "–"
    if (end_ms := counts.expected_end_ms) is None:
        return "–"
    with suppress(ValueError, OverflowError, OSError):  # A slow rate ends after the last date that there is.
        is_soon = end_ms - counts.now_ms < 86_400_000
        return time.strftime("%H:%M:%S" if is_soon else "%Y-%m-%d", time.localtime(end_ms / 1000))
    return "–"
