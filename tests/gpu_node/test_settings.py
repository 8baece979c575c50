"""A node's settings reach its engine by name, so both classes must agree on shared fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.fake_node import FakeNode
from pydantic.fields import FieldInfo

from penstock.contract.errors import ConfigError
from penstock.contract.priority import Priority
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.model import options
from penstock.gpu_node.process import _with_config_of_pool as of_pool
from penstock.gpu_node.settings import NodeSettings, engine_config
from penstock.queue import keys

OF_ENGINES_ALONE = {"kv_cache_tokens", "state_slots"}
DIFFER = {
    "scheduling_policy": "an engine by itself has one caller, so it is fcfs",
    "max_prefill_ms_beside_decode": "a node's callers read along, so it has a limit",
    "max_num_seqs": "a node tells Redis of each sequence, so it has a bound",
    "lora": "variables and flags are texts",
    "lease_ms": "an engine by itself has no lease, so its ranks may end at any time after it",
}


def meaning(field: FieldInfo) -> tuple[Any, ...]:
    """What it accepts and what it is by default."""
    return field.annotation, field.metadata, field.default


def test_every_setting_of_an_engine_is_one_of_a_node_and_means_the_same() -> None:
    engine, node = EngineConfig.model_fields, NodeSettings.model_fields
    assert engine.keys() - node.keys() == OF_ENGINES_ALONE
    shared = engine.keys() & node.keys()
    assert {name for name in shared if meaning(engine[name]) != meaning(node[name])} == DIFFER.keys()


@pytest.mark.parametrize(
    ("runner", "has_driver", "want"),
    [
        ("auto", False, (64, 512, None)),
        ("auto", True, (256, 8192, 2048)),
        ("native", True, (64, 512, None)),
        ("gpu", False, (256, 8192, 2048)),
    ],
)
def test_defaults_depend_on_the_runner(
    runner: str, has_driver: bool, want: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidiactl"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(options, "_NVIDIA_DRIVER", driver)
    given: dict[str, Any] = {"model": "m", "runner": runner}
    for made in (EngineConfig(**given), engine_config(NodeSettings.load(redis_url="unix://x", **given))):
        assert (made.max_num_seqs, made.max_num_batched_tokens, made.max_prefill_beside_decode) == want
        assert EngineConfig(**given, max_num_seqs=9).max_num_seqs == 9


@pytest.mark.parametrize(
    ("device", "runner", "number"),
    [
        ("auto", "auto", None),
        ("cpu", "cpu", None),
        ("cuda", "gpu", None),
        ("cuda:1", "gpu:1", 1),
        ("gpu:0", "gpu:0", 0),
    ],
)
def test_a_device_may_be_a_gpu_by_its_number(device: str, runner: str, number: int | None) -> None:
    config = EngineConfig.of("m", {"device": device})
    assert (config.runner, config.gpu_number) == (runner, number)
    assert config.max_num_seqs == (256 if device.startswith(("cuda", "gpu")) else 64)
    assert engine_config(NodeSettings.load(model="m", redis_url="unix://x", runner=device)).runner == runner


@pytest.mark.parametrize("device", ["cuda:", "cuda:-1", "cuda:x", "cuda1", "mps", ""])
def test_an_unknown_device_is_refused_with_the_ones_that_exist(device: str) -> None:
    said = r"^runner: must be auto, cpu, native, torch, gpu, transformers, cuda, or .* cuda:1$"
    with pytest.raises(ConfigError, match=said):
        EngineConfig.of("m", {"device": device})


@pytest.mark.parametrize(("given", "read"), [("8", 8), ("32", 32)])
def test_the_block_size_may_be_an_environment_variable(monkeypatch: pytest.MonkeyPatch, given: str, read: int) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_BLOCK_SIZE", given)
    assert NodeSettings.load(model="m", redis_url="redis://localhost").block_size == read
    monkeypatch.setenv("PENSTOCK_NODE_BLOCK_SIZE", f"{given}.5")
    with pytest.raises(ConfigError, match="block_size: must be 8, 16, 32 or 64"):
        NodeSettings.load(model="m", redis_url="redis://localhost")


@pytest.mark.parametrize("name", ["max_wait_ms", *(f"max_wait_ms_{one.label}" for one in Priority)])
def test_a_limit_of_waits_below_a_second_is_refused_by_its_name(name: str) -> None:
    given: dict[str, Any] = {"model": "m", "redis_url": "unix://x"}
    with pytest.raises(ConfigError, match=rf"^{name}: .*1000") as refused:
        NodeSettings.load(**given, **{name: -5})
    assert refused.value.param == name
    assert NodeSettings.load(**given, **{name: 1000}).pool_config[name] == 1000


def test_a_limit_of_waits_of_an_unknown_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_MAX_WAIT_MS_URGENT", "5000")
    with pytest.raises(ConfigError, match="unknown environment variable PENSTOCK_NODE_MAX_WAIT_MS_URGENT"):
        NodeSettings.load(model="m", redis_url="unix://x")


async def test_a_node_takes_the_config_of_a_live_pool_for_all_that_is_not_set(redis_url: str) -> None:
    """As in a rolling upgrade: an earlier release had other defaults, and nodes of both run beside each other."""
    given: dict[str, Any] = {"model": "m", "redis_url": redis_url, "pool": "fake"}
    own = NodeSettings.load(**given, max_losses=5)
    async with FakeNode(redis_url, lease_ms=7000, policy="fcfs", max_model_len=999, max_losses=4) as node:  # type: ignore[arg-type]
        taken = await of_pool(own)
        assert (taken.lease_ms, taken.scheduling_policy, taken.max_model_len) == (7000, "fcfs", 999)
        assert taken.max_wait_ms_batch is None
        with pytest.raises(ConfigError, match="pool fake runs with max_losses=4, this node with 5"):
            await node.broker.join(taken.pool_config, node.record)
        unset = await of_pool(NodeSettings.load(**given))
        await node.broker.join(unset.pool_config, node.record)
        await node.redis.zadd(keys.nodes("fake"), {node.node_id: 0})
        # No node lives.
        assert await of_pool(own) == own


async def test_a_config_that_this_release_refuses_is_named(redis_url: str) -> None:
    async with FakeNode(redis_url, lease_ms=10**9):
        with pytest.raises(ConfigError, match="lease_ms"):
            await of_pool(NodeSettings.load(model="m", redis_url=redis_url, pool="fake"))


async def test_without_redis_a_node_keeps_its_own_settings(tmp_path: Path) -> None:
    own = NodeSettings.load(model="m", redis_url=f"unix://{tmp_path}/none.sock")
    assert await of_pool(own) == own
