"""Tenants' weights inside the engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes.policy_bench import Bench

from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.engine.records import EngineRequest

MakeEngine = Callable[..., Engine]


@pytest.mark.parametrize(("max_num_seqs", "num_blocks"), [(1, 12), (4, 24), (8, 12)])
def test_a_tenant_of_twice_the_weight_gets_twice_as_much_of_the_cache(max_num_seqs: int, num_blocks: int) -> None:
    bench = Bench("fair", num_blocks, max_num_seqs=max_num_seqs)
    two = [bench.add(f"a{i}", 8, 16, tenant="two", weight=2.0) for i in range(60)]
    one = [bench.add(f"b{i}", 8, 16, tenant="one") for i in range(60)]
    while any(seq.row < 0 and seq.kv_token_ms == 0 for seq in two):
        bench.step()
    used = [sum(seq.kv_token_ms for seq in seqs) for seqs in (two, one)]
    assert used[0] / used[1] == pytest.approx(2, rel=0.15)
    bench.run()


def test_weights_count_before_anything_has_ended() -> None:
    bench = Bench("fair", num_blocks=200, max_num_seqs=12)
    for i in range(20):
        bench.add(f"a{i}", 8, 16, tenant="two", weight=2.0)
        bench.add(f"b{i}", 8, 16, tenant="one")
    while len(bench.scheduler.running) < 12:
        bench.step()
    assert sorted(seq.tenant for seq in bench.scheduler.running) == ["one"] * 4 + ["two"] * 8
    bench.run()


def test_weights_count_in_the_engine(make_engine: MakeEngine) -> None:
    """So far apart that it does not matter how long a step takes."""
    engine = make_engine(scheduling_policy="fair", max_num_seqs=1)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for i in range(8):
        engine.add(EngineRequest(f"light{i}", [5, 6, 7], params, seed=1, tenant="light", weight=0.001))
        engine.add(EngineRequest(f"heavy{i}", [5, 6, 7], params, seed=1, tenant="heavy", weight=1000.0))
    served: dict[str, None] = {}
    while engine.has_work():
        served |= dict.fromkeys(output.request_id for output in engine.step())
    assert "".join(name[0] for name in served) == "l" + 8 * "h" + 7 * "l"


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_weight_is_refused(make_engine: MakeEngine, weight: float) -> None:
    with pytest.raises(RequestError, match="weight") as refused:
        make_engine().add(EngineRequest("a", [5], SamplingParams(), seed=1, weight=weight))
    assert refused.value.param == "weight"
