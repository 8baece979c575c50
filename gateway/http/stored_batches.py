"""What the APIs of batches share: the task that runs all batches, and the members that tell the progress of one."""

from __future__ import annotations

from typing import Any

from penstock.gateway.http.dialect import Services
from penstock.producer.stored_batches.holder import BatchHolder
from penstock.queue.files.batch import BatchRecord


async def _run_batches(services: Services) -> None:
    await BatchHolder(services.client, services.files, services.client.batches).run()


RUN_BATCHES = {"penstock batches": _run_batches}
"""What runs the batches of all APIs."""


def progress_of(batch: BatchRecord, now_s: float) -> dict[str, Any]:
    """Return our own fields of a batch: whether it is paused, why it waits, its speed and its expected end."""
    left = batch.num_rows - batch.num_completed - batch.num_failed
    is_measured = batch.status == "in_progress" and batch.rows_per_s > 0 and not batch.is_paused
    return {
        "paused": batch.is_paused,
        "waiting": batch.waiting or None,
        "rows_per_second": batch.rows_per_s if is_measured else None,
        "expected_end_at": int(now_s + left / batch.rows_per_s) if is_measured else None,
    }
