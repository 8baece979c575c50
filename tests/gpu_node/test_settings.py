"""A node's settings reach its engine by their names, so both records must say the same of what they share."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.settings import NodeSettings

OF_ENGINES_ALONE = {"kv_cache_tokens"}
DIFFER = {
    "scheduling_policy": "an engine by itself has one caller, so it is fcfs",
    "max_prefill_ms_beside_decode": "a node's callers read along, so it has a limit",
    "max_num_seqs": "a node tells Redis of each sequence, so it has a bound",
    "lora": "variables and flags are texts",
}


def meaning(field: FieldInfo) -> tuple[Any, ...]:
    """What it accepts and what it is by default."""
    return field.annotation, field.metadata, field.default


def test_every_setting_of_an_engine_is_one_of_a_node_and_means_the_same() -> None:
    engine, node = EngineConfig.model_fields, NodeSettings.model_fields
    assert engine.keys() - node.keys() == OF_ENGINES_ALONE
    shared = engine.keys() & node.keys()
    assert {name for name in shared if meaning(engine[name]) != meaning(node[name])} == DIFFER.keys()
