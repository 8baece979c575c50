"""The public engine, request by request: `add_request`, `step`, `stream`, `abort` and timings, also with asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fakes.engine_runs import check_idle
from fakes.waiting import until

from penstock import (
    AsyncEngine,
    ConfigError,
    ConflictError,
    Engine,
    JobCancelledError,
    NotFoundError,
    RequestError,
    RequestTimings,
    SamplingParams,
    UnavailableError,
)
from penstock.gpu_node.engine.timings import MAX_ENDED

MakeEngine = Callable[..., Engine]
PROMPT = [number % 200 + 3 for number in range(40)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_requests_are_streamed_and_one_is_aborted_meanwhile(make_engine: MakeEngine) -> None:
    engine = make_engine()
    kept, dropped = engine.add_request(PROMPT, PARAMS), engine.add_request([5, 6, 7], PARAMS, request_id="mine")
    seen: dict[str, list[int]] = {kept: [], dropped: []}
    for output in engine.stream():
        seen[output.request_id] += output.token_ids
        if len(seen[dropped]) == 2:
            engine.abort(dropped)
    assert (kept, dropped) == ("request-1", "mine")
    (whole,) = make_engine().generate([PROMPT], PARAMS)
    assert (len(seen[kept]), len(seen[dropped])) == (6, 2)
    assert seen[kept] == list(whole.token_ids)
    check_idle(engine)


def test_timings_say_where_the_time_went(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=1)
    first, second = engine.add_request(PROMPT, PARAMS), engine.add_request(PROMPT, PARAMS)
    waiting = engine.timings(second)
    assert waiting == RequestTimings(None, None, None, (), 0, 0)
    assert sum(len(output.token_ids) for output in engine.stream()) == 12
    for request_id, cached in ((first, 0), (second, 32)):
        times = engine.timings(request_id)
        assert times.queued_ms is not None and times.first_token_ms is not None and times.ended_ms is not None
        ends = [step.ended_ms for step in times.steps]
        assert 0 < times.queued_ms < ends[0] and ends[-6] < times.first_token_ms < ends[-5]
        assert all(before < after for before, after in pairwise(ends)) and ends[-1] < times.ended_ms
        assert all(0 < step.took_ms < 1e3 for step in times.steps)
        assert times.cached_tokens == cached
        assert sum(step.num_tokens for step in times.steps) == len(PROMPT) - cached + 5
    # The second one waits while the first one runs.
    assert (engine.timings(second).queued_ms or 0) > engine.timings(first).steps[0].ended_ms


def test_timings_count_preemptions(make_engine: MakeEngine) -> None:
    engine = make_engine(num_kv_blocks=8, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    names = [engine.add_request([token] * 20, params) for token in (5, 6, 7)]
    assert sum(len(output.token_ids) for output in engine.stream()) == 120
    counted = [engine.timings(name).num_preemptions for name in names]
    assert 0 < sum(counted) == engine.stats().num_preemptions


def test_requests_that_are_unknown_or_wrong_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(NotFoundError, match="no times of request x"):
        engine.timings("x")
    with pytest.raises(RequestError, match="prompt must have at least one token"):
        engine.add_request([])
    with pytest.raises(TypeError, match="colour"):
        engine.add_request([5], colour="red")  # type: ignore[call-arg]
    engine.add_request([5], PARAMS, request_id="x")
    with pytest.raises(ConflictError):
        engine.add_request([6], PARAMS, request_id="x")
    engine.abort("x")
    aborted = engine.timings("x")
    assert aborted.ended_ms is not None and aborted.first_token_ms is None
    check_idle(engine)


def test_times_of_many_ended_requests_are_dropped(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for number in range(MAX_ENDED + 1):
        engine.add_request([5], request_id=str(number))
        engine.abort(str(number))
    assert engine.timings("1").ended_ms is not None
    with pytest.raises(NotFoundError):
        engine.timings("0")


def settings(model: Path, **more: Any) -> dict[str, Any]:
    usual = {"model": str(model), "dtype": "bfloat16", "num_kv_blocks": 256, "num_threads": 1, "weight_cache": False}
    return usual | more


def test_asynchronous_streams_share_one_engine(tiny_model: Path, make_engine: MakeEngine) -> None:
    async def tokens_of(engine: AsyncEngine, token: int) -> list[int]:
        return [one async for output in engine.stream([token, 9], PARAMS) for one in output.token_ids]

    async def main() -> None:
        async with AsyncEngine(**settings(tiny_model)) as engine:
            streams = await asyncio.gather(*(tokens_of(engine, token) for token in (5, 6, 7)))
            whole = [one.token_ids for one in make_engine().generate([[5, 9], [6, 9], [7, 9]], PARAMS)]
            assert [tuple(stream) for stream in streams] == whole
            generation = await engine.generate([5, 9], PARAMS, request_id="whole")
            assert generation.token_ids == whole[0]
            assert len((await engine.timings("whole")).steps) == 6
            assert (await engine.stats()).num_running == 0
        with pytest.raises(UnavailableError, match="stopped at the end of its `async with`: enter a new AsyncEngine"):
            await engine.stats()

    asyncio.run(main())


def test_asynchronous_requests_end_by_abort_by_closing_and_with_the_engine(tiny_model: Path) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)

    async def main() -> None:
        async with AsyncEngine(**settings(tiny_model)) as engine:
            stream = engine.stream([5], long, request_id="closed")
            await anext(stream)
            with pytest.raises(ConflictError):
                await engine.generate([5], long, request_id="closed")
            await stream.aclose()
            aborted = engine.stream([5], long, request_id="aborted")
            await anext(aborted)
            await engine.abort("aborted")
            rest = [output async for output in aborted]
            assert all(output.usage is None for output in rest)
            whole = asyncio.create_task(engine.generate([5], long, request_id="task"))
            await until(engine.stats, lambda seen: seen.num_running != 0)
            await engine.abort("task")
            with pytest.raises(JobCancelledError, match="request task was aborted"):
                await whole
            assert (await engine.stats()).num_running == 0
            left_open = engine.stream([5], long)
            await anext(left_open)
        async for output in left_open:
            assert output.usage is None

    asyncio.run(main())


def test_a_wrong_setting_is_refused_when_the_engine_is_entered(tiny_model: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(**settings(tiny_model, num_kv_blocks=0)):
            pass

    with pytest.raises(ConfigError, match="num_kv_blocks"):
        asyncio.run(main())
