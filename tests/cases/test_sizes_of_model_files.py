"""Model files that name absurd sizes and factors: a sentence names file and field, before memory is taken for them.

Each case runs in a fork that may add a few hundred megabytes.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.limited_memory import said_within
from fakes.runners.runner_options import runner_options
from fixtures.gguf_file import write_gguf
from fixtures.random_adapters import make_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock import ConfigError
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.served_model import plan
from penstock.gpu_node.model.architecture.families import families
from penstock.gpu_node.model.architecture.limits import CONFIG_LIMITS, GGUF_FIELDS, ROPE_LIMITS
from penstock.gpu_node.model.checkpoint.gguf_file import read_header
from penstock.gpu_node.model.loading.load import find_model, load_model
from penstock.gpu_node.model.plan_records import Devices

MIB = 700


def _edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _find(model: Path, **options: Any) -> object:
    return find_model(str(model), runner_options(**options), lambda stage, done: None)


def _load(model: Path, **options: Any) -> object:
    return load_model(str(model), runner_options(**options), lambda stage, done: None)


# --- config.json

BAD: tuple[Any, ...] = (0.5, -7, 1 << 62, math.inf, math.nan, 10**400, True, "many", [[]], {"a": 1})


def test_each_number_of_a_config_has_a_range_in_each_family(tiny: Path, tmp_path: Path) -> None:
    """Families differ in the fields that they read. The table comes first, so their code sees no absurd number."""
    config = json.loads((tiny / "config.json").read_text())

    def not_refused() -> list[str]:
        found = []
        for at, family in enumerate(families()):
            for field, value in ((field, value) for field in CONFIG_LIMITS for value in (BAD if at == 0 else BAD[1:3])):
                if CONFIG_LIMITS[field].allows(value):
                    continue
                changed = config | {"architectures": [family], field: value}
                (tmp_path / "config.json").write_text(json.dumps(changed))
                try:
                    _find(tmp_path, load_format="dummy")
                    found.append(f"{family} {field} {value}")
                except ConfigError as error:
                    if not ("config.json" in error.message and field in error.message):
                        found.append(error.message)
        return found

    assert said_within(MIB, not_refused, cpu_s=60) == "[]"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None but must be a whole number from 1 to 1,024"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5 but"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None but"),
        ({"num_attention_heads": 3, "head_dim": None}, "num_attention_heads is 3 but must be a multiple of num_key"),
        (
            {"num_attention_heads": 128, "head_dim": None},
            "head_dim (without it hidden_size / num_attention_heads) is 0",
        ),
        ({"hidden_size": 60}, "metadata: vocab_size, hidden_size"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false' but must be true or false"),
        ({"attention_bias": []}, "attention_bias is [] but must be true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types is ['full_attention'] but must have full_attention or"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types is ['chunked_attention', 'chunked_attention'] but"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            "no_rope_layers is [1] but must have 0 or 1",
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0 but"),
        ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 0}, "final_logit_softcapping is 0 but"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0 but"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type is ['yarn'] but must be a text"),
        ({"rope_parameters": {"rope_type": "linear", "factor": None}}, "no 'factor'"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention is 3 but must be an object"),
        ({"architectures": ["MixtralForCausalLM"]}, "num_local_experts (or num_experts) is missing"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 64},
            "num_local_experts (or num_experts) is",
        ),
        ({"quantization_config": {"quant_method": {}}}, "quantization_config.quant_method is {} but must be a text"),
    ],
    ids=str,
)
def test_each_wrong_value_is_refused_by_the_name_of_its_field(folder: Path, fields: Any, named: str) -> None:
    _edit(folder / "config.json", **fields)
    with pytest.raises(ConfigError) as refused:
        _find(folder)
    assert named in refused.value.message
    assert "config.json" in refused.value.message


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 2.0}, {"rope_theta": None}, {"layer_types": None}], ids=str)
def test_values_that_mean_what_others_do_are_taken(folder: Path, fields: Any) -> None:
    _edit(folder / "config.json", **fields)
    assert _find(folder)


@pytest.mark.parametrize("fields", [{"rope_theta": 0}, {"rope_theta": math.inf}, {"rope_theta": 1}])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_base_of_positions_that_is_none_is_refused(folder: Path, fields: Any, load_format: str) -> None:
    _edit(folder / "config.json", rope_parameters=None, **fields)
    assert "config.json: rope_theta is" in said_within(MIB, partial(_find, folder, load_format=load_format))


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_each_number_of_scaled_positions_has_a_range(folder: Path, field: str) -> None:
    """Also those of one kind of layer, as Gemma 3 has them."""
    _edit(folder / "config.json", rope_parameters=None)
    for name in ROPE_LIMITS:
        for value in (0, -1, math.inf, math.nan, "far", 1e40):
            if ROPE_LIMITS[name].allows(value):
                continue
            for rope in ({name: value}, {"sliding_attention": {name: value}}):
                _edit(folder / "config.json", **{field: rope})
                with pytest.raises(ConfigError, match=rf"config\.json: {field}\.(sliding_attention\.)?{name} is"):
                    _find(folder)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "linear", "factor": 1e6}, "positions"),
        ({"rope_type": "dynamic", "factor": 1000.0}, "positions"),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            "high_freq_factor is 4.0",
        ),
        ({"rope_type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}, "short_factor is 0.0"),
    ],
)
def test_scaled_positions_that_cannot_be_computed_are_refused(folder: Path, rope: Any, named: str) -> None:
    _edit(folder / "config.json", rope_parameters=None, rope_scaling=rope, max_position_embeddings=1 << 17)
    said = said_within(MIB, partial(_find, folder))
    assert "ConfigError" in said
    assert "config.json" in said
    assert named in said


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 1000},
        {"vocab_size": 1 << 20},
        {"hidden_size": 1 << 16},
        {"intermediate_size": 1 << 18},
        {"num_attention_heads": 1024, "num_key_value_heads": 1024},
        {"head_dim": 1024, "max_position_embeddings": 1 << 19},
    ],
)
def test_tensors_bound_the_sizes_of_a_config(folder: Path, fields: dict[str, int]) -> None:
    """Each number alone is below its limit. A model without tensors would be of that size."""
    _edit(folder / "config.json", **fields)
    said = said_within(MIB, partial(_load, folder, num_kv_blocks=64))
    assert "ConfigError" in said
    assert "tensor" in said


def test_random_weights_must_fit_the_memory(folder: Path) -> None:
    sizes = {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "num_hidden_layers": 1000, "head_dim": None}
    _edit(folder / "config.json", **sizes, num_attention_heads=512, num_key_value_heads=512)
    said = said_within(MIB, partial(_load, folder, load_format="dummy", runner="native"))
    assert "load_format dummy: the weights take at least" in said


def test_a_plan_takes_no_memory_for_layers_that_are_not_there(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64, "num_hidden_layers": 10**9}))
    wanted = EngineConfig(model=str(tmp_path), load_format="dummy")
    said = said_within(MIB, lambda: plan(wanted, Devices("cpu", 2, None, 1 << 33), [(1, 1, 1)]))
    assert said.startswith("ConfigError")
    assert "config.json: num_hidden_layers is 1000000000 but must be a whole number from 1 to 1,024" in said


@pytest.mark.parametrize(
    ("words", "status"), [(["plan", "--load-format", "dummy"], 2), (["serve", "--ephemeral", "--port", "0"], 2)]
)
def test_a_command_ends_with_a_sentence(folder: Path, tmp_path: Path, words: list[str], status: int) -> None:
    _edit(folder / "config.json", num_hidden_layers=10**9)
    command = [sys.executable, "-P", "-m", "penstock", *words, str(folder)]
    env = os.environ | {"PENSTOCK_RUNTIME_DIR": str(tmp_path / "run")}
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (6 << 30, 6 << 30))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit, check=False, env=env)
    assert done.returncode == status, done.stderr
    assert "num_hidden_layers is 1000000000" in done.stderr
    assert "Traceback" not in done.stderr


# --- GGUF


def _value(value: Any) -> bytes:
    """Return a value of the metadata with its type."""
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value)) + value.encode()
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    return struct.pack("<IQ", 10, value) if value >= 0 else struct.pack("<Iq", 11, value)


def _header(metadata: Mapping[str, Any], tensors: bytes = b"", *, num_tensors: int = 0, more: bytes = b"") -> bytes:
    """Return a header. more: a last entry of the metadata, whose key and value are given as bytes."""
    entries = b"".join(struct.pack("<Q", len(key)) + key.encode() + _value(value) for key, value in metadata.items())
    num_entries = len(metadata) + bool(more)
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries) + entries + more + tensors


def _entry(key: str, *value: int) -> bytes:
    kinds = "<" + "IIQ"[: len(value)]
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack(kinds, *value)


def test_each_size_of_a_gguf_file_has_a_range() -> None:
    for key, field in GGUF_FIELDS.items():
        for value in ((1 << 62), math.nan, math.inf, -5):
            if CONFIG_LIMITS[field].allows(value):
                continue
            content = _header({"general.architecture": "llama", f"llama.{key}": value})
            with pytest.raises(ConfigError, match=rf"llama\.{key} is .* but must be a"):
                read_header(memoryview(content))


def test_a_gguf_file_of_an_absurd_context_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny, tmp_path / "m.gguf", "llama")
    content, key = bytearray(path.read_bytes()), b"llama.context_length"
    at = content.index(key) + len(key)
    content[at : at + 8] = struct.pack("<II", 4, (1 << 32) - 1)
    path.write_bytes(content)
    said = said_within(MIB, partial(_find, path))
    assert "m.gguf: llama.context_length is 4294967295 but must be a whole number from 1 to 4,194,304" in said


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("vocab_size", 9, "llama.vocab_size is 9, but token_embd.weight has the shape"),
        ("embedding_length", 128, "llama.embedding_length is 128, but token_embd.weight has the shape"),
        ("block_count", 1, "llama.block_count is 1, but the file has the tensors of 2 layers"),
        (
            "attention.head_count",
            3,
            "llama.attention.head_count is 3 but must be a multiple of llama.attention.head_count",
        ),
        ("attention.head_count_kv", 0, "llama.attention.head_count_kv is 0 but must be a whole number from 1 to 1,024"),
        ("attention.head_count_kv", 64, "must be a multiple of llama.attention.head_count_kv, which is 64"),
        ("feed_forward_length", 0, "llama.feed_forward_length is 0 but"),
    ],
)
def test_each_wrong_size_of_a_gguf_file_is_named(tiny: Path, tmp_path: Path, key: str, value: int, named: str) -> None:
    path = write_gguf(tiny, tmp_path / "m.gguf", "llama")
    content, name = bytearray(path.read_bytes()), f"llama.{key}".encode()
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    content[at : at + 8] = struct.pack("<II", 4, value)
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        _find(path)
    assert named in refused.value.message
    assert "m.gguf" in refused.value.message


def test_a_special_token_outside_of_a_gguf_vocabulary_is_named(tiny: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny, tmp_path / "m.gguf", "llama")
    content, key = bytearray(path.read_bytes()), b"tokenizer.ggml.eos_token_id"
    at = content.index(key) + len(key) + 4
    content[at : at + 4] = struct.pack("<I", (1 << 32) - 1)
    path.write_bytes(content)
    assert "tokenizer.ggml.eos_token_id is 4294967295, but the file has" in said_within(MIB, partial(_find, path))


_NAME = struct.pack("<Q", 1) + b"t"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (_header({}, num_tensors=1 << 40), "1,099,511,627,776 tensors"),
        (_header({}, more=_entry("tokenizer.ggml.tokens", 9, 8, 10_000_000)), "tokens has 10,000,000 values"),
        (_header({}, more=_entry("tokenizer.ggml.scores", 9, 6, 1 << 60)), "scores has 1,152,921,504,606,846,976"),
        (_header({}, more=_entry("x", 9, 0, 1 << 60)), "x has 1,152,921,504,606,846,976 values"),
        (_header({}, _NAME + struct.pack("<IQQIQ", 2, 0, 1 << 60, 0, 0), num_tensors=1), "tensor t has the shape"),
    ],
    ids=("tensors", "tokens", "scores", "another list", "dimensions"),
)
def test_counts_of_a_gguf_file_have_limits(content: bytes, named: str) -> None:
    assert named in said_within(MIB, lambda: read_header(memoryview(content), ("tokenizer.ggml.tokens",)))


# --- safetensors and their names


@pytest.mark.parametrize(
    ("shape", "named"), [([0, 1 << 60], "one above 281,474,976,710,656"), ([1] * 100_000, "more than 8 sizes")]
)
def test_shapes_of_safetensors_have_limits(folder: Path, shape: list[int], named: str) -> None:
    header = json.dumps({"t": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * math.prod(shape)]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    assert named in said_within(MIB, partial(_find, folder))


def test_a_header_of_safetensors_has_a_limit(folder: Path) -> None:
    header = b"{" + b" " * (33 << 20) + b"}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "model.safetensors has a header of 34,603,010 bytes" in said_within(MIB, partial(_find, folder))


@pytest.mark.parametrize("name", ["model-00001-of-999999999999.safetensors", "m-00001-of-99999.gguf"])
def test_a_file_that_says_it_is_one_of_too_many_is_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    assert "files; a checkpoint has at most 10,000" in said_within(MIB, partial(_find, folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_description_of_many_megabytes_is_not_read(folder: Path, name: str) -> None:
    """Each `[]` takes 64 bytes in Python."""
    (folder / name).write_text('{"a": [' + "[]," * (20 << 20) + "[]]}")

    def load() -> None:
        from penstock.gpu_node.engine.text.tokenizer_files import read_tokenizer_files

        _load(folder, num_kv_blocks=8)
        read_tokenizer_files(folder)

    assert f"{name} has more than 16,777,216 bytes" in said_within(1200, load)


@pytest.mark.parametrize(
    ("content", "named"),
    [("[1]", "is not a JSON object"), ('{"eos_token_id": 1e300}', "eos_token_id is"), ("{", "is not JSON")],
)
def test_what_is_wrong_in_a_generation_config_is_named(folder: Path, content: str, named: str) -> None:
    (folder / "generation_config.json").write_text(content)
    said = said_within(MIB, partial(_load, folder, num_kv_blocks=8))
    assert said.startswith("ConfigError")
    assert "generation_config.json" in said
    assert named in said


# --- adapters


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    return make_adapter(tmp_path_factory.mktemp("adapters") / "one", model)


@pytest.mark.parametrize("field", ["r", "lora_alpha"])
@pytest.mark.parametrize(
    "value", [1 << 62, math.inf, math.nan, 10**400, "high", None, True], ids=lambda value: str(value)[:8]
)
def test_each_number_of_an_adapter_has_a_range(
    tiny: Path, adapter: Path, tmp_path: Path, field: str, value: Any
) -> None:
    own = Path(shutil.copytree(adapter, tmp_path / "own"))
    _edit(own / "adapter_config.json", **{field: value})
    said = said_within(MIB, partial(_load, tiny, lora={"one": own}, num_kv_blocks=8))
    assert said.startswith("ConfigError")
    assert f"adapter_config.json: {field} is" in said


def test_a_pipe_in_place_of_a_description_is_refused_without_waiting(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    """To open it waits until another process writes."""
    own = Path(shutil.copytree(adapter, tmp_path / "own"))
    (own / "adapter_config.json").unlink()
    os.mkfifo(own / "adapter_config.json")
    with pytest.raises(ConfigError, match=r"adapter_config\.json is a device or a pipe, not a file"):
        _load(tiny, lora={"one": own}, num_kv_blocks=8)


def test_an_adapter_larger_than_its_matrices_is_not_read(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(adapter, tmp_path / "own"))
    with (own / "adapter_model.safetensors").open("ab") as file:
        file.truncate(40 << 30)
    said = said_within(MIB, partial(_load, tiny, lora={"one": own}, num_kv_blocks=8))
    assert "adapter_model.safetensors has 42,949,672,960 bytes" in said


def test_a_quantized_block_is_no_larger_than_its_matrix(folder: Path) -> None:
    """One scale for a million rows stays one for the rows that there are."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    weight = tensors[f"{name}.weight"]
    stored = {f"{name}.weight": weight.to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": torch.ones(1, 1)}
    save_file(tensors | stored, folder / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [1 << 20, 1 << 20]}
    _edit(folder / "config.json", quantization_config=settings)
    assert "LoadedModel" in said_within(MIB, partial(_load, folder, num_kv_blocks=8))
