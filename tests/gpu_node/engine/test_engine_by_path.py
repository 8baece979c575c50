"""`Engine` from a model's path and keywords, as a script builds one."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import ConfigError, Engine, EngineConfig, SamplingParams


def test_engine_of_a_path_generates_what_an_engine_of_a_config_generates(tiny_model: Path) -> None:
    settings = {"runner": "torch", "num_kv_blocks": 40}
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    by_path = Engine(tiny_model, **settings)
    by_config = Engine(EngineConfig(model=str(tiny_model), runner="torch", num_kv_blocks=40))
    assert by_path.generate(["hello there"], greedy) == by_config.generate(["hello there"], greedy)
    assert repr(by_path) == f"<Engine {tiny_model} max_model_len={by_path.max_model_len}>"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"kv_cache_dytpe": "int8"}, "kv_cache_dytpe"),
        ({"block_size": 7}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_a_wrong_setting_is_named_before_the_model_is_loaded(settings: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError, match=param) as refused:
        Engine("/nonexistent/model.gguf", **settings)
    assert refused.value.param == param


def test_settings_are_given_once() -> None:
    with pytest.raises(ConfigError, match="not both") as refused:
        Engine(EngineConfig(model="/nonexistent/model.gguf"), block_size=8)
    assert refused.value.param == "block_size"
