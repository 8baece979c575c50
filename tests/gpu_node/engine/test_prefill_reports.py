"""A request may ask for reports on how much of its prompt is computed, in outputs without tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from fakes.engine_runs import check_idle

from penstock.contract.job import SamplingParams
from penstock.contract.output import PrefillProgress
from penstock.gpu_node.engine import Engine, StepOutput
from penstock.gpu_node.engine.records import EngineRequest

MakeEngine = Callable[..., Engine]
PROMPT = [number % 200 + 3 for number in range(100)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def salted(params: SamplingParams, salt: str) -> SamplingParams:
    return params.model_copy(update={"cache_salt": salt})


def request(name: str = "r", **fields: Any) -> EngineRequest:
    given: dict[str, Any] = {"reports_prefill": True, "params": PARAMS, "seed": 1} | fields
    return EngineRequest(name, PROMPT, given.pop("params"), **given)


def outputs_of(engine: Engine, *requests: EngineRequest) -> list[StepOutput]:
    """Run requests to their end."""
    for one in requests:
        engine.add(one)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def progress_of(outputs: list[StepOutput], name: str = "r") -> list[PrefillProgress]:
    return [one.prefill for one in outputs if one.prefill is not None and one.request_id == name]


def test_each_chunk_of_a_prompt_is_reported_before_the_first_token(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=32, max_num_seqs=4)
    outputs = outputs_of(engine, request())
    found = progress_of(outputs)
    assert [(one.total, one.cached, one.processed) for one in found] == [(100, 0, end) for end in (32, 64, 96, 100)]
    assert all(before.time_ms <= after.time_ms for before, after in pairwise(found))
    kinds = ["progress" if one.prefill else "token" for one in outputs]
    assert kinds == ["progress"] * 4 + ["token"] * 4
    assert all(one.token_ids == () and one.text == "" for one in outputs if one.prefill)
    check_idle(engine)


def test_cached_tokens_count_as_processed(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=32, max_num_seqs=4)
    outputs_of(engine, request("before"))
    (only,) = progress_of(outputs_of(engine, request()))
    assert (only.total, only.cached, only.processed) == (100, 96, 100)


@pytest.mark.parametrize("n", [1, 3])
def test_tokens_are_the_same_with_and_without_reports(make_engine: MakeEngine, n: int) -> None:
    engine = make_engine(max_num_batched_tokens=32, max_num_seqs=4)
    params = PARAMS.model_copy(update={"n": n})
    silent = outputs_of(engine, request(reports_prefill=False, params=salted(params, "a")))
    assert progress_of(silent) == []
    told = outputs_of(engine, request(params=salted(params, "b")))
    assert [one.processed for one in progress_of(told)] == [32, 64, 96, 100]
    tokens = [[(one.choice, one.token_ids) for one in outputs if one.prefill is None] for outputs in (silent, told)]
    assert tokens[0] == tokens[1]


def test_an_aborted_request_reports_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=32, max_num_seqs=4)
    engine.add(request("gone"))
    outputs = [*engine.step(), *engine.step()]
    assert progress_of(outputs, "gone")
    engine.abort("gone")
    after = outputs_of(engine, request(params=salted(PARAMS, "x")))
    assert progress_of(after, "gone") == []
    assert [one.processed for one in progress_of(after)] == [32, 64, 96, 100]
    assert not engine._prefill_reports._begun_s
