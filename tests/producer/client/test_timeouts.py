"""`result(timeout=)`: the caller stops waiting, and the error tells whether the job continues."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fakes.fake_node import FakeNode, fake_text, fake_tokens

from penstock.contract.errors import RequestError, ResultTimeoutError
from penstock.producer.client import AsyncClient


async def test_a_result_that_takes_too_long_leaves_the_job_running(client: AsyncClient, told_node: FakeNode) -> None:
    job = await client.submit("hello", max_tokens=2)
    for result in (job.result, lambda timeout: client.result(job.id, timeout=timeout)):
        for timeout in (0, 0.2):
            with pytest.raises(TimeoutError) as caught:
                await result(timeout=timeout)
            assert isinstance(caught.value, ResultTimeoutError)
            assert re.search(rf"{job.id} has not ended after .* goes on.* client.cancel\(job_id\)", str(caught.value))
    (taken,) = await told_node.take()
    await taken.say(2)
    await taken.finish()
    assert (await job.result(timeout=0)).text == fake_text(fake_tokens(job.id, 2))


@pytest.mark.parametrize("wrong", [-1, float("nan"), "soon"])
async def test_a_wrong_timeout_is_refused(client: AsyncClient, told_node: FakeNode, wrong: Any) -> None:
    job = await client.submit("hello")
    with pytest.raises(RequestError) as caught:
        await job.result(timeout=wrong)
    assert caught.value.param == "timeout"


async def test_a_timeout_says_that_a_job_without_readers_ends(client: AsyncClient, told_node: FakeNode) -> None:
    job = await client.submit("hello", background=False)
    with pytest.raises(ResultTimeoutError, match="canceled soon unless it is read again"):
        await job.result(timeout=0)
