"""Recurrent layers on the torch runner: the logits of transformers, however a text is cut and with whatever company."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fakes.transformers_logits import error_of
from fixtures.plans import Track, logits_alone, logits_of_step, tokens_of_step
from fixtures.random_adapters import make_adapter, merge
from fixtures.random_families import RECURRENT_FAMILIES, make_family_model
from fixtures.sampling import rows_of
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.loading.load import find_model, load_model

Family = Callable[[str], Path]
TOKEN_IDS = [(7919 * i) % 384 for i in range(1, 131)]
OTHER_IDS = TOKEN_IDS[::-1]
MAX_ERROR = 2e-4


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Folder of a random model of a family, in float32."""
    return cache(lambda name: make_family_model(tmp_path_factory.mktemp("family"), name))


@cache
def _runner(folder: Path) -> Any:
    options = runner_options(runner="torch", dtype="float32", num_kv_blocks=64, state_slots=8)
    return load_model(str(folder), options, lambda stage, done: None).runner


@cache
def _want(folder: Path, token_ids: tuple[int, ...]) -> NDArray[np.float32]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].numpy()


@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_logits_of_a_whole_prompt_are_those_of_transformers(family: Family, name: str) -> None:
    want = _want(family(name), tuple(TOKEN_IDS))
    assert error_of(logits_alone(_runner(family(name)), TOKEN_IDS), want) < MAX_ERROR


@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
@pytest.mark.parametrize("parts", [[1] * 130, [1, 2, 3, 64, 1, 59], [128, 1, 1]], ids=["tokens", "parts", "decode"])
def test_a_text_in_parts_beside_others_has_the_logits_of_transformers(
    family: Family, name: str, parts: list[int]
) -> None:
    want, runner = _want(family(name), tuple(TOKEN_IDS)), _runner(family(name))
    track, other = Track(TOKEN_IDS, range(1, 10), state=3), Track(OTHER_IDS, range(20, 30), state=5)
    found = [logits_of_step(runner, [(other, 1), (track, count)]) for count in parts]
    assert error_of(np.concatenate([step[-1] for step in found]), want) < MAX_ERROR
    others = np.concatenate([step[0] for step in found])
    assert error_of(others, _want(family(name), tuple(OTHER_IDS))[: len(others)]) < MAX_ERROR


@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_saved_states_are_continued_by_several_sequences_at_once(family: Family, name: str) -> None:
    """Two sequences of one step read the slot in which the state of their common tokens was saved."""
    runner, branches = _runner(family(name)), (TOKEN_IDS[:70], TOKEN_IDS[:64] + OTHER_IDS[:6])
    first = Track(TOKEN_IDS, range(1, 10), state=0, saves={0: 4, 31: 5, 63: 6})
    logits_of_step(runner, [(first, 40)])
    logits_of_step(runner, [(first, 90)])
    tracks = [
        Track(ids, [1, 2, 3, 4, 20 + slot], done=64, state=slot, read=6)
        for slot, ids in zip((1, 2), branches, strict=True)
    ]
    found = logits_of_step(runner, [(track, 6) for track in tracks])
    for ids, logits in zip(branches, found, strict=True):
        assert error_of(logits, _want(family(name), tuple(ids))[64:]) < MAX_ERROR
    for slot, at in ((4, 1), (5, 32)):
        track = Track(TOKEN_IDS, range(1, 10), done=at, state=7, read=slot)
        want = _want(family(name), tuple(TOKEN_IDS))
        assert error_of(logits_of_step(runner, [(track, 3)])[0], want[at : at + 3]) < MAX_ERROR


@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_a_new_sequence_does_not_see_what_its_slot_held(family: Family, name: str) -> None:
    runner, want = _runner(family(name)), _want(family(name), tuple(OTHER_IDS))
    logits_alone(runner, TOKEN_IDS)
    assert error_of(logits_alone(runner, OTHER_IDS), want) < MAX_ERROR


@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_the_runner_says_its_slots_and_samples(family: Family, name: str) -> None:
    runner = _runner(family(name))
    assert (runner.state_sizes.num_slots, runner.verifies_drafts) == (8, False)
    track = Track(TOKEN_IDS, range(1, 10), state=1)
    (token,) = tokens_of_step(runner, [(track, len(TOKEN_IDS))], rows_of(1, temperature=0.0))
    assert token == _want(family(name), tuple(TOKEN_IDS))[-1].argmax()


@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_a_model_without_slots_is_refused(family: Family, name: str) -> None:
    options = runner_options(runner="torch", num_kv_blocks=64)
    with pytest.raises(ConfigError, match=r"state_slots is 0 but must be at least 1: .* takes [\d,]+ bytes"):
        load_model(str(family(name)), options, lambda stage, done: None)


@pytest.mark.parametrize("runner", ["auto", "torch", "native"])
@pytest.mark.parametrize("setting", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_ranks_are_refused(family: Family, name: str, setting: str, runner: str) -> None:
    """No runner is recommended, because none has ranks for such a model; nor does a rank on another host change it."""
    options = runner_options(runner=runner, num_kv_blocks=64, state_slots=2, remote_ranks=1, **{setting: 2})
    with pytest.raises(ConfigError, match=f"{setting} 2: a model with recurrent layers.* is computed by one rank"):
        load_model(str(family(name)), options, lambda stage, done: None)


ADAPTED = {
    "falcon h1": ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "gate_proj", "up_proj", "down_proj"),
    "lfm3": ("q_proj", "v_proj", "o_proj", "in_proj", "out_proj", "w1", "w2"),
    "granite hybrid": ("q_proj", "k_proj", "in_proj", "out_proj", "input_linear", "output_linear"),
    "qwen3 next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"),
    "qwen3.5": ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "down_proj"),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_is_as_merged_weights(family: Family, tmp_path: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(family(name), dtype=torch.float32)
    adapter = make_adapter(tmp_path / "adapter", model, rank=4, seed=1, only=ADAPTED[name])
    with torch.inference_mode():
        want = merge(model, adapter)(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    settings = {"num_kv_blocks": 64, "state_slots": 2, "max_num_seqs": 1, "lora": {"adapter": adapter}, "max_loras": 1}
    options = runner_options(runner="torch", dtype="float32", **settings)
    loaded = load_model(str(family(name)), options, lambda stage, done: None)
    loaded.runner.set_adapter(0, loaded.adapters.find(AdapterRef(name="adapter")))
    track = Track(TOKEN_IDS, range(1, 10), state=0, adapter=0)
    found = [logits_of_step(loaded.runner, [(track, count)])[0] for count in (70, 1, 59)]
    assert error_of(np.concatenate(found), want) < MAX_ERROR
    assert error_of(want, _want(family(name), tuple(TOKEN_IDS))) > 0.01


def test_an_adapter_of_the_gate_of_shared_experts_is_refused_by_its_name(family: Family, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(family("qwen3.5 moe"), dtype=torch.float32)
    adapter = make_adapter(tmp_path / "adapter", model, only=("q_proj", "shared_expert_gate"))
    options = runner_options(runner="torch", num_kv_blocks=64, state_slots=2, lora={"adapter": adapter}, max_loras=1)
    refused = r"has \S+shared_expert_gate\S+: adapters of the gate of shared experts are not supported; train"
    with pytest.raises(ConfigError, match=refused):
        load_model(str(family("qwen3.5 moe")), options, lambda stage, done: None)


def test_the_text_part_of_a_model_with_images_is_read(family: Family, tmp_path: Path) -> None:
    """Its names have a further part, and the tensors of the image encoder are skipped."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = json.loads((family("qwen3.5") / "config.json").read_text())
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    whole = Qwen3_5ForConditionalGeneration(config)
    inner = AutoModelForCausalLM.from_pretrained(family("qwen3.5"), dtype=torch.float32)
    whole.model.language_model.load_state_dict(inner.model.state_dict())
    whole.lm_head.load_state_dict(inner.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((family("qwen3.5") / name).read_bytes())
    got = logits_alone(_runner(tmp_path), TOKEN_IDS)
    np.testing.assert_array_equal(got, logits_alone(_runner(family("qwen3.5")), TOKEN_IDS))


def test_experts_may_lie_in_one_tensor(family: Family, tmp_path: Path) -> None:
    """As the published checkpoints have them: gates and up projections together."""
    folder, pattern = family("qwen3.5 moe"), re.compile(r"(.*experts)\.(\d+)\.(\w+)_proj\.weight")
    tensors, experts = {}, dict[tuple[str, str], dict[int, torch.Tensor]]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        if (found := pattern.fullmatch(name)) is None:
            tensors[name] = tensor
        else:
            experts.setdefault((found[1], found[3]), {})[int(found[2])] = tensor
    assert experts
    for prefix in {prefix for prefix, _ in experts}:
        gate, up, down = (
            torch.stack([matrix for _, matrix in sorted(experts[prefix, kind].items())])
            for kind in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}.down_proj": down}
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    got = logits_alone(_runner(tmp_path), TOKEN_IDS)
    np.testing.assert_array_equal(got, logits_alone(_runner(folder), TOKEN_IDS))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["linear_attention", "rwkv"] * 2}, "layer 1 has 'rwkv'"),
        ({"layer_types": ["linear_attention", "conv"] * 2}, r"layer_types\[1\] is 'conv', but this family has only"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3 but must be a multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1 but must be"),
    ],
    ids=str,
)
def test_a_wrong_config_is_refused_by_its_field(
    family: Family, tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    config = json.loads((family("qwen3.5") / "config.json").read_text()) | fields
    for path in family("qwen3.5").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=named):
        find_model(str(tmp_path), runner_options(), lambda stage, done: None)
