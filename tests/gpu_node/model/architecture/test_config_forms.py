"""Configs in the forms in which they are published mean what transformers 5 writes, and what no runner has is named."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures.random_families import FAMILIES, RECURRENT_FAMILIES, WHOLE_FAMILIES

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.families import family_of, needs_transformers
from penstock.gpu_node.model.architecture.spec import ModelSpec

PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 200_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10_000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "sliding_window": 262_144,
    "tie_word_embeddings": True,
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    return family_of(config).spec_of(config)


def _gemma4(name: str, **changes: Any) -> dict[str, Any]:
    return WHOLE_FAMILIES[name][1] | {"architectures": ["Gemma4ForCausalLM"]} | changes


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("name", WHOLE_FAMILIES)
def test_heads_of_gemma_4_by_layer_are_those_of_its_kinds_of_layers(name: str, digits: int) -> None:
    """A model with more than ten layers has them under 00, 01 and so on."""
    config = _gemma4(name)
    own = {"head_dim": 64} | ({"num_key_value_heads": 1} if config.get("attention_k_eq_v") else {})
    full = [f"{at:0{digits}}" for at, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    by_layer = config | {"per_layer_config": dict.fromkeys(full, own)}
    by_layer.pop("global_head_dim")
    assert _spec(by_layer) == _spec(config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers leaves no full_attention layer with keys before layer 1"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"hidden_size_per_layer_input": -1}, "size is -1 but must be a whole number of at least 1"),
        ({"enable_moe_block": True, "num_experts": 4}, "top_k_experts and moe_intermediate_size must be at least 1"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 32},
            "num_experts_per_tok is 5 but must be from 1 to 4 experts",
        ),
    ],
)
def test_what_gemma_4_cannot_be_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        _spec(_gemma4("gemma4 small", **changes))


def test_phi_4_mini_turns_three_quarters_of_a_head_also_beyond_the_original_length() -> None:
    new = {name: value for name, value in PHI4_MINI.items() if name not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {
        **PHI4_MINI["rope_scaling"],  # type: ignore[dict-item]
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096,
    }
    spec = _spec(PHI4_MINI)
    assert spec == _spec(new)
    assert [(rope.dim, spec.max_position) for rope in spec.ropes] == [(96, 131_072)]
    # The model that is compared with transformers has the same shares.
    assert FAMILIES["phi3"][1]["rope_parameters"]["partial_rotary_factor"] == 0.75


def test_gpt_2_heads_that_do_not_divide_its_width_are_named() -> None:
    with pytest.raises(ConfigError, match="n_embd is 64 but must be a multiple of n_head, which is 5"):
        _spec({"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 5})


def _falcon_h1(**changes: Any) -> dict[str, Any]:
    return RECURRENT_FAMILIES["falcon h1"][1] | {"architectures": ["FalconH1ForCausalLM"]} | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"projectors_bias": True},
        {"mamba_proj_bias": True},
        {"mamba_rms_norm": True},
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
    ],
    ids=str,
)
def test_what_the_family_of_falcon_h1_does_not_compute_is_left_to_transformers(changes: dict[str, Any]) -> None:
    assert not needs_transformers(_falcon_h1())
    assert needs_transformers(_falcon_h1(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers is .* but must have 5 numbers"),
        ({"mlp_multipliers": [1.0, "two"]}, "mlp_multipliers is 'two' but must be a number"),
        ({"ssm_in_multiplier": 0.0}, r"ssm_multipliers \(ssm_in_multiplier, ssm_out_multiplier\) have 0.0"),
        ({"mlp_multipliers": [1.0, -1.0]}, r"mlp_multipliers\[1\] .* is -1.0 but must be a finite number above 0"),
        ({"mamba_d_head": 17}, "mamba_d_head 17 times mamba_n_heads 6 must be mamba_d_ssm, 96"),
        ({"time_step_limit": [0.1, 1.0]}, "only durations without limits are supported"),
        ({"mamba_n_groups": 4}, "is 6 but must be a multiple of 4 groups"),
    ],
    ids=str,
)
def test_what_falcon_h1_cannot_be_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        _spec(_falcon_h1(**changes))


def test_a_config_of_lfm3_without_kinds_and_ropes_has_those_of_transformers() -> None:
    from transformers import Lfm3Config

    known = Lfm3Config(num_hidden_layers=9, hidden_size=64, intermediate_size=96).to_dict()
    config = {**known, "architectures": ["Lfm3ForCausalLM"]}
    less = {name: value for name, value in config.items() if name not in ("layer_types", "rope_parameters")}
    assert _spec(less) == _spec(config)
    with pytest.raises(ConfigError, match=r"layer_types\[3\] is 'mamba', but this family has only conv"):
        _spec({**config, "layer_types": ["conv"] * 3 + ["mamba"] + ["conv"] * 5})
    with pytest.raises(ConfigError, match=r"rope_parameters has .* for layers of the kind full_attention"):
        _spec({**config, "rope_parameters": {"sliding_attention": {"rope_type": "default"}}})
