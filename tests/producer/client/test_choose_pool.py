"""Which pool a job goes to: those with a live node first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.other_version import OTHER, REFUSAL
from uuid_utils import uuid7

from penstock.contract.errors import NotFoundError, PenstockError, ProtocolVersionError, RequestError, UnavailableError
from penstock.producer.client.pool_choice import choose_pool
from penstock.queue.broker.producer import ServedPool


def pool(name: str, model: str = "", *, is_alive: bool = True) -> ServedPool:
    return ServedPool(name, model or f"acme/{name}", ("alias",), is_alive=is_alive)


def test_a_shard_without_a_node_is_passed_over() -> None:
    shards = [pool("dead", "acme/m", is_alive=False), pool("live", "acme/m")]
    assert {choose_pool(shards, wanted).pool for wanted in ("acme/m", "alias", None) for _ in range(20)} == {"live"}


def test_the_only_live_model_needs_no_name() -> None:
    assert choose_pool([pool("old", is_alive=False), pool("new")], None).pool == "new"


@pytest.mark.parametrize("wanted", ["dead", "acme/dead"])
def test_a_model_whose_nodes_are_all_away_is_still_known(wanted: str) -> None:
    pools = [pool("dead", is_alive=False), pool("live")]
    assert choose_pool(pools, wanted).pool == "dead"
    assert choose_pool(pools, None, f"dead.{uuid7()}").pool == "dead"
    assert choose_pool(pools[:1], None).pool == "dead"


def test_errors_name_what_is_served_now() -> None:
    pools = [replace(pool("dead", is_alive=False), adapters={"gone": "0" * 32}), pool("a"), pool("b")]
    with pytest.raises(NotFoundError, match=r"served: acme/a, acme/b$"):
        choose_pool(pools, "other")
    with pytest.raises(NotFoundError, match=r"served: none$"):
        choose_pool(pools, None, adapter="other")
    with pytest.raises(RequestError, match=r"served: acme/a, acme/b$"):
        choose_pool(pools, None)
    with pytest.raises(UnavailableError):
        choose_pool([], "a")


def test_errors_hide_the_served_models_on_request() -> None:
    pools = [pool("one"), pool("two")]
    for name, adapter in (("unknown", None), (None, None), ("acme/one", "unknown")):
        with pytest.raises(PenstockError) as shown:
            choose_pool(pools, name, adapter=adapter)
        with pytest.raises(PenstockError) as hidden:
            choose_pool(pools, name, adapter=adapter, hides_models=True)
        assert hidden.value.message == shown.value.message.partition("; served: ")[0] != shown.value.message


def test_a_pool_of_another_protocol_version_is_refused_by_name() -> None:
    older = replace(pool("m", is_alive=False), protocol_version=OTHER)
    for name in (None, "m", "acme/m", "alias"):
        with pytest.raises(ProtocolVersionError, match=REFUSAL.format(pool="m")):
            choose_pool([older], name)


def test_another_pool_of_the_model_serves_beside_one_of_another_protocol_version() -> None:
    older, live = replace(pool("old", "acme/m", is_alive=False), protocol_version=OTHER), pool("new", "acme/m")
    assert choose_pool([older, live], "acme/m").pool == "new"
