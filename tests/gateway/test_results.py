"""Results of several jobs that wait for each other: how much is fetched before rendering starts."""

from __future__ import annotations

from typing import cast

from penstock.contract.output import Outcome, Usage
from penstock.gateway.stream.event_stream import MAX_KEPT_BYTES, ends_of
from penstock.producer.client import AsyncJob
from penstock.queue.broker.producer import LARGE_RESULT_BYTES
from penstock.queue.results import Fetches, PackedResult, encode_result

DONE = Outcome("succeeded")
SMALL = encode_result((), Usage(1, 1), [])


class EndedJob:
    """An ended job with a result of that size."""

    def __init__(self, num_bytes: int) -> None:
        self.id = f"job-{num_bytes}"
        self._num_bytes = num_bytes
        self.is_fetched = False

    async def packed_result(self, fetches: Fetches | None = None) -> PackedResult:
        is_large = self._num_bytes > LARGE_RESULT_BYTES
        if is_large and fetches is not None and not fetches(self._num_bytes):
            return PackedResult(None, self.id, DONE, num_left_bytes=self._num_bytes)
        self.is_fetched = True
        result = PackedResult(SMALL, self.id, DONE)
        result.num_bytes = self._num_bytes
        return result


async def test_results_are_fetched_as_far_as_they_are_kept() -> None:
    sizes = [MAX_KEPT_BYTES // 2, MAX_KEPT_BYTES, 16 << 20, MAX_KEPT_BYTES // 2 - 100, 100, 100]
    jobs = [EndedJob(size) for size in sizes]
    ends = await ends_of(cast("list[AsyncJob]", jobs))
    assert [end.num_bytes for end in ends] == sizes
    assert [job.is_fetched for job in jobs] == [True, False, False, True, True, True]
    assert [end.result is not None for end in ends] == [True, False, False, True, True, False]
