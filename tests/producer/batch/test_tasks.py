"""What a Celery task says on its way holds nothing up."""

from __future__ import annotations

import threading
import time

from penstock.contract.errors import UnavailableError
from penstock.producer.batch.records import BatchProgress
from penstock.producer.batch.tasks import reporting


def test_progress_that_cannot_be_stored_neither_fails_nor_blocks_the_run() -> None:
    release, stored = threading.Event(), []

    def store(progress: BatchProgress) -> None:
        stored.append(progress)
        release.wait(10)
        raise UnavailableError("Redis is unreachable")

    started_s = time.monotonic()
    with reporting(store) as report:
        for num_rows in range(1000):
            report(BatchProgress(num_rows))
        assert time.monotonic() - started_s < 5
        release.set()
    assert stored == [BatchProgress(0)]


def test_the_last_report_is_stored_before_the_block_ends() -> None:
    stored = []

    def store(progress: BatchProgress) -> None:
        time.sleep(0.1)
        stored.append(progress)

    with reporting(store) as report:
        report(BatchProgress(1))
    assert stored == [BatchProgress(1)]
