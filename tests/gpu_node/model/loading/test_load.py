"""Finding, checking and converting models."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fixtures.gguf_file import write_gguf
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.contract.errors import ConfigError
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.served_model import load
from penstock.gpu_node.model.architecture.families import family_of
from penstock.gpu_node.model.architecture.rope import Llama3Scaling, Rope
from penstock.gpu_node.model.checkpoint import source
from penstock.gpu_node.model.checkpoint.description import revision_of
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile
from penstock.gpu_node.model.checkpoint.mapped_file import PageFaults
from penstock.gpu_node.model.checkpoint.source import ModelSource, resolve_model
from penstock.gpu_node.model.checkpoint.tokenizer_export import plain_tokenizer
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.protocol import LoadedModel
from penstock.gpu_node.model.torch_common.positions import rope_angles


def _load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(str(folder), runner_options(**options), lambda stage, fraction: None)


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*FalconForCausalLM.*LlamaForCausalLM"),
        ({"attention_bias": True}, r"q_proj\.bias"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_parameters": {"rope_type": "axial", "factor": 2.0}}, "axial.*longrope"),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 9}}, "no 'short_factor'"),
        ({"intermediate_size": 100}, r"gate_proj.*compare config.* intermediate_size"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2"),
        ({"num_hidden_layers": "two"}, r"num_hidden_layers is 'two' but must be a whole number from 1 to 1,024"),
        ({"num_attention_heads": 0, "head_dim": None}, r"config\.json: num_attention_heads is 0"),
        ({"architectures": 5}, "architecture none is not supported"),
        ({"rope_parameters": "far"}, r"config\.json: rope_parameters is 'far' but must be an object"),
        ({"hidden_size": "a", "head_dim": 16}, "hidden_size is 'a'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None but must be a number from 0 to 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4 but must be a multiple of num_key_value_heads .* is 3"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -5}, "sliding_window is -5"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 2.5}, r"sliding_window is 2\.5"),
        ({"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 8.0}, r"rotary_pct is 8\.0"),
        (
            {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.2},
            "RoPE turns 3 channels .* from 0 to 16: head_dim .* rotary_pct",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(model_copy: Path, changes: dict[str, Any], named: str) -> None:
    _edit_config(model_copy, **changes)
    with pytest.raises(ConfigError, match=named):
        _load(model_copy)


@pytest.mark.parametrize("eos", ["</s>", [2, "</s>"]])
def test_an_end_of_text_that_is_no_id_is_refused_by_name(model_copy: Path, eos: Any) -> None:
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match=r"eos_token_id is .*</s>"):
        _load(model_copy)


def test_pickled_weights_are_refused(model_copy: Path) -> None:
    (model_copy / "model.safetensors").rename(model_copy / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickle"):
        _load(model_copy)


def test_sharded_weights_load_and_a_missing_shard_is_named(model_copy: Path) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, model_copy / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (model_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model_copy / "model.safetensors").unlink()
    assert _load(model_copy).vocab_size == tensors["lm_head.weight"].shape[0]
    (model_copy / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors"):
        _load(model_copy)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a.safetensors"]}, {"weight_map": {"a": 1}}])
def test_an_index_that_names_no_files_is_refused(model_copy: Path, index: dict[str, Any]) -> None:
    (model_copy / "model.safetensors").unlink()
    (model_copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"index\.json(: weight_map has| has no weight_map)"):
        _load(model_copy)


def test_the_cache_is_as_large_as_asked_and_never_larger_than_useful(tiny_model: Path) -> None:
    block_bytes = 2 * 2 * 2 * 16 * 4 * 16
    assert _load(tiny_model, num_kv_blocks=8).runner.cache_sizes.num_blocks == 9
    assert (
        _load(tiny_model, num_kv_blocks=None, kv_cache_gib=20 * block_bytes / 2**30).runner.cache_sizes.num_blocks == 21
    )
    assert _load(tiny_model, num_kv_blocks=None, max_model_len=64).runner.cache_sizes.num_blocks == 4 * 4 + 1
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        _load(tiny_model, num_kv_blocks=None, kv_cache_gib=1e-9)


def test_all_end_tokens_of_the_generation_config_count(model_copy: Path) -> None:
    assert _load(model_copy).eos_token_ids == {2}
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert _load(model_copy).eos_token_ids == {2, 5}


def test_a_generation_config_that_names_no_end_leaves_it_to_the_config(model_copy: Path) -> None:
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert _load(model_copy).eos_token_ids == {2}
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert _load(model_copy).eos_token_ids == {0}


def test_a_context_beyond_the_models_own_is_refused(tiny_model: Path) -> None:
    assert _load(tiny_model, max_model_len=2048).max_model_len == 2048
    with pytest.raises(ConfigError, match=r"max_model_len 2049.*2048"):
        _load(tiny_model, max_model_len=2049)


def test_a_device_that_is_left_idle_is_warned_about(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for visible in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda visible=visible: visible)
        caplog.clear()
        _load(tiny_model)
        assert [record.levelname for record in caplog.records if "CUDA" in record.message] == ["WARNING"] * visible


def test_auto_dtype_is_the_checkpoints_or_float32(model_copy: Path) -> None:
    assert _load(model_copy, dtype="auto").arithmetic == "torch-float32"
    _edit_config(model_copy, dtype="bfloat16")
    fast = torch.cpu._is_avx512_bf16_supported()
    assert _load(model_copy, dtype="auto").arithmetic == ("torch-bfloat16" if fast else "torch-float32")


def test_revision_changes_with_any_of_the_files(model_copy: Path) -> None:
    revisions = [_load(model_copy).revision, _load(model_copy).revision]
    assert revisions[0] == revisions[1]
    weights = load_file(model_copy / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] + 1}, model_copy / "model.safetensors")
    revisions.append(_load(model_copy).revision)
    (model_copy / "chat_template.jinja").write_text("{{ messages }}")
    revisions.append(_load(model_copy).revision)
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    revisions.append(_load(model_copy).revision)
    (model_copy / "special_tokens_map.json").write_text(json.dumps({"eos_token": "a"}))
    revisions.append(_load(model_copy).revision)
    assert len(set(revisions)) == 5


def test_revision_does_not_depend_on_the_version_that_wrote_the_configs(model_copy: Path) -> None:
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    before = _load(model_copy).revision
    _edit_config(model_copy, transformers_version="0.0")
    (model_copy / "generation_config.json").write_text(
        json.dumps({"transformers_version": "0.0", "eos_token_id": 5}, indent=2)
    )
    assert _load(model_copy).revision == before


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100_000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rope_angles_equal_those_of_transformers(rope: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope, num_hidden_layers=1
    )
    raw = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    spec = family_of(raw).spec_of(raw)
    want = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512)[None])
    for ours, theirs in zip(rope_angles(spec.ropes[0], 512), want, strict=True):
        # A frequency's last bit counts once a position.
        np.testing.assert_allclose(np.concatenate((ours, ours), axis=1), theirs[0].numpy(), rtol=0, atol=512 * 2**-23)


def test_configs_of_older_transformers_are_read() -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    spec = family_of(raw).spec_of(raw)
    (attention,) = spec.attentions
    assert (attention.num_kv_heads, attention.head_dim) == (2, 4)
    assert attention.rope == Rope(500_000.0, 4, Llama3Scaling(8.0, 1.0, 4.0, 8192))


def test_names_of_missing_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    for name in (str(tmp_path / "none"), "./none", "missing.gguf", str(tmp_path / "broken.gguf"), "not a/valid/id"):
        with pytest.raises(ConfigError):
            resolve_model(name, lambda stage, fraction: None)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("num_bytes", [0, 10, 1000, 90_000_000])
def test_a_gguf_file_that_was_cut_short_is_named_as_that(
    demo_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    cut = tmp_path / "cut.gguf"
    with demo_gguf.open("rb") as whole:
        cut.write_bytes(whole.read(num_bytes))
    with pytest.raises(ConfigError, match=f"^cannot read {cut}: .*(cut short|empty)"):
        _described(cut)


@pytest.mark.parametrize("chosen", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_folder_without_a_vocabulary_is_refused(model_copy: Path, chosen: str) -> None:
    (model_copy / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": chosen}))
    (model_copy / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=f"^no tokenizer in {model_copy}: it has no tokenizer.json$"):
        plain_tokenizer(model_copy)


def test_unusable_tokenizer_is_one_line(model_copy: Path) -> None:
    (model_copy / "tokenizer.json").rename(model_copy / "vocab.txt")
    with pytest.raises(ConfigError, match=f"^no usable tokenizer in {model_copy}: [^\n]+$"):
        plain_tokenizer(model_copy)


def _described(gguf: Path) -> Path:
    return resolve_model(str(gguf), lambda stage, fraction: None).folder


@pytest.fixture
def some_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is not valid GGUF, and an empty cache."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(100_000))
    return tmp_path / "m.gguf"


def test_two_processes_may_convert_one_file_at_once(some_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(gguf: GgufFile, folder: Path, progress: Any) -> None:
        """The other process is done first, and this one finds its place taken."""
        monkeypatch.setattr(source, "describe_gguf", write)
        resolve_model(str(gguf.path), progress)
        write(gguf, folder, progress)

    def write(gguf: GgufFile, folder: Path, progress: Any) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(source, "describe_gguf", describe)
    folder = _described(some_gguf)
    assert (folder / "config.json").is_file()
    assert list(folder.parent.iterdir()) == [folder]


def test_folder_of_a_dead_conversion_is_removed_and_of_a_running_one_kept(
    some_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "describe_gguf", lambda gguf, folder, progress: folder.mkdir())
    models = some_gguf.parent / "cache/models"
    dead, running = (models / name for name in (".m-dead", ".m-running"))
    for folder in (dead, running):
        (folder / "model").mkdir(parents=True)
    two_days_ago = time.time() - 2 * 24 * 60 * 60
    os.utime(dead, (two_days_ago, two_days_ago))
    assert set(models.iterdir()) == {dead, running}
    folder = _described(some_gguf)
    assert set(models.iterdir()) == {running, folder}


def test_another_converter_converts_again(some_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "describe_gguf", lambda gguf, folder, progress: folder.mkdir())
    older = _described(some_gguf)
    assert _described(some_gguf) == older
    monkeypatch.setattr(source, "_CONVERTER_VERSION", source._CONVERTER_VERSION + 1)
    assert _described(some_gguf) != older


def test_a_file_that_was_changed_is_converted_again(some_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "describe_gguf", lambda gguf, folder, progress: folder.mkdir())
    # A thread that reads a mapped file while it is cut short ends the process (SIGBUS).
    monkeypatch.setattr(PageFaults, "take_ahead", lambda faults: None)
    folders = [_described(some_gguf)]
    some_gguf.write_bytes(b"GGUF" + bytes(100_001))
    folders.append(_described(some_gguf))
    changed_at = some_gguf.stat().st_mtime_ns
    some_gguf.write_bytes(b"GGUF" + bytes(99_996) + b"other")
    os.utime(some_gguf, ns=(changed_at, changed_at))
    folders.append(_described(some_gguf))
    os.utime(some_gguf, ns=(changed_at + 1, changed_at + 1))
    folders.append(_described(some_gguf))
    assert len(set(folders)) == 4


def test_a_folder_is_its_own_source(tiny_model: Path) -> None:
    assert resolve_model(str(tiny_model), lambda stage, fraction: None) == ModelSource(tiny_model)


def test_revision_of_a_gguf_file_depends_on_content_and_arithmetic_and_not_on_its_path(
    tiny_model: Path, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    for path in files:
        path.write_bytes(bytes(50_000) + (b"c" if path.name == "c.gguf" else b"a"))
    folder = Path(shutil.copytree(tiny_model, tmp_path / "elsewhere"))
    first = revision_of(ModelSource(tiny_model, files[0]), "x")
    assert revision_of(ModelSource(folder, files[1]), "x") == first
    assert revision_of(ModelSource(tiny_model, files[2]), "x") != first
    assert revision_of(ModelSource(tiny_model, files[0]), "y") != first


def test_a_given_chat_template_is_part_of_the_revision(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ 1 }}")

    def revision(chat_template: str | None) -> str:
        config = EngineConfig(model=str(tiny_model), chat_template=chat_template, dtype="bfloat16")
        return load(config, lambda stage, fraction: None)[0].revision

    own, given, of_file, other = map(revision, (None, "{{ 1 }}", str(file), "{{ 2 }}"))
    assert given == of_file
    assert len({own, given, other}) == 3


def test_a_chat_template_that_is_no_file_is_refused(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), chat_template="chatml", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"chat_template: cannot read chatml .*a file with a Jinja template"):
        load(config, lambda stage, fraction: None)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_model_whose_files_are_replaced_while_it_loads_is_refused(tiny_model: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    new = Path(shutil.copy(folder / name, tmp_path / "new"))

    def replace(stage: str, fraction: float) -> None:
        if new.exists():
            new.replace(folder / name)

    with pytest.raises(ConfigError, match="replaced while"):
        load_model(str(folder), runner_options(), replace)
    assert load_model(str(folder), runner_options(), replace).revision


def test_gguf_file_that_is_replaced_after_it_was_opened_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    gguf, new = (write_gguf(tiny_model, tmp_path / name, "llama") for name in ("m.gguf", "new.gguf"))

    def replace(stage: str, fraction: float) -> None:
        if new.exists() and stage == "convert":
            new.replace(gguf)

    with pytest.raises(ConfigError, match="replaced while"):
        load_model(str(gguf), runner_options(), replace)
    assert load_model(str(gguf), runner_options(), replace).revision


@pytest.mark.model
def test_gguf_file_is_described_once_and_as_by_transformers(demo_gguf: Path) -> None:
    stages: list[str] = []
    resolve_model(str(demo_gguf), lambda stage, fraction: None)
    found = resolve_model(str(demo_gguf), lambda stage, fraction: stages.append(stage))
    assert stages == [] and found.gguf == demo_gguf
    assert not list(found.folder.glob("*.safetensors"))
    config = LlamaConfig.from_pretrained(found.folder)
    assert (config.architectures, config.num_key_value_heads, config.tie_word_embeddings) == (
        ["LlamaForCausalLM"],
        3,
        True,
    )
    # <|endoftext|>, <|im_end|> and <reponame>, as in llama.cpp; transformers knows the second alone.
    assert json.loads((found.folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2, 4]
