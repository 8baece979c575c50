"""Calls beside the event loop: one that hangs delays no other call, nor the end of the process."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fakes.processes.node_process import NodeProcess
from fakes.waiting import until
from redis.asyncio import Redis
from uuid_utils import uuid7

from penstock.contract.job import JobDef
from penstock.gpu_node.taking.preparation import MAX_CHARS_ON_LOOP
from penstock.queue.broker.producer import ProducerBroker, Submission
from penstock.runtime.event_loop import Threads


async def test_a_call_answers_or_raises_on_a_thread_of_its_own() -> None:
    beside = Threads()
    assert await beside.run(threading.current_thread) is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        await beside.run(lambda: 1 / 0)


async def test_number_of_running_calls_is_limited_and_a_canceled_call_does_not_count() -> None:
    beside, hangs, is_over = Threads(max_at_once=1), threading.Event(), threading.Event()

    def hang() -> bool:
        hangs.set()
        return is_over.wait()

    hung = asyncio.create_task(beside.run(hang))
    waits = asyncio.create_task(beside.run(lambda: 1))
    await until(hangs.is_set)
    assert not waits.done()
    hung.cancel()
    assert await waits == 1
    is_over.set()


async def test_a_prompt_at_which_the_tokenizer_hangs_is_given_back_and_keeps_no_process(
    redis_url: str, redis: Redis
) -> None:
    broker = ProducerBroker(redis)
    with NodeProcess(redis_url, pool="hung", drain_s=0.1, tokenizer_hangs=True) as node:
        job = JobDef(id=f"hung.{uuid7()}", prompt="x" * (MAX_CHARS_ON_LOOP + 1))
        await broker.submit(Submission(job, 50))
        await asyncio.to_thread(node.wait_event, "hangs")
        assert await asyncio.to_thread(node.stop) == 0
    assert (await broker.status(job.id, "default")).state == "queued"
