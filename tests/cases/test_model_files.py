"""Model files as people bring them: stale and split weights, other names, several chat templates, links to nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fakes.served_model import served
from fixtures.gguf_file import write_gguf
from fixtures.tiny_model import make_tiny_model
from safetensors.torch import load_file, save_file

from penstock import ConfigError, Engine, RequestError, SamplingParams
from penstock.gpu_node.settings import pool_of_model

SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
INDEX = "model.safetensors.index.json"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the model, for the test to change."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def _engine(model: Path, **settings: Any) -> Engine:
    return Engine(str(model), dtype="bfloat16", num_threads=1, num_kv_blocks=64, max_num_seqs=1, **settings)


def _answer(model: Path) -> list[int]:
    (generation,) = _engine(model).generate(["the gate"], GREEDY)
    return list(generation.token_ids)


def _shard(folder: Path, weights: Path) -> None:
    """Write the weights of a model as two shards with an index."""
    tensors = load_file(weights / "model.safetensors")
    names = sorted(tensors)
    parts = (names[: len(names) // 2], names[len(names) // 2 :])
    for shard, part in zip(SHARDS, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / shard)
    owners = {name: shard for shard, part in zip(SHARDS, parts, strict=True) for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": owners}))


def _edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# --- weights


def test_a_stale_index_beside_the_single_file_does_not_count(tiny: Path, other: Path, folder: Path) -> None:
    _shard(folder, other)
    assert _answer(folder) == _answer(tiny) != _answer(other)


def test_an_index_says_which_file_has_a_tensor(tiny: Path, other: Path, folder: Path) -> None:
    """The second file has an old copy of a tensor of the first."""
    _shard(folder, tiny)
    (folder / "model.safetensors").unlink()
    (stale,) = (name for name in load_file(folder / SHARDS[0]) if name == "lm_head.weight")
    save_file(
        load_file(folder / SHARDS[1]) | {stale: load_file(other / "model.safetensors")[stale]}, folder / SHARDS[1]
    )
    assert _answer(folder) == _answer(tiny)


def _two_checkpoints(folder: Path) -> None:
    _shard(folder, folder)
    shutil.copy(folder / "model.safetensors", folder / "model-00003-of-00003.safetensors")
    (folder / INDEX).unlink()
    (folder / "model.safetensors").unlink()


def _lost_shard(folder: Path) -> None:
    _shard(folder, folder)
    for name in ("model.safetensors", INDEX, SHARDS[1]):
        (folder / name).unlink()


def _two_copies(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model.fp16.safetensors")
    (folder / "model.safetensors").rename(folder / "model.fp32.safetensors")


def _link_of(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("../blobs/0123")

    return make


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


def _adapter(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def _indexed(name: str) -> Callable[[Path], None]:
    """Let the index name this file, which has the weights; a test's folder is inside another one."""

    def make(folder: Path) -> None:
        _shard(folder, folder)
        (folder / "model.safetensors").rename((folder / name).resolve())
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(index, name)}))

    return make


def _text_in(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (_indexed("../outside.safetensors"), r"weight_map has '\.\./outside\.safetensors' for \S+; it must be"),
        (_indexed("../copy/inside.safetensors"), "index.json: weight_map has"),
        (_text_in("generation_config.json", "[1]"), r"generation_config\.json is not a JSON object"),
        (_text_in("chat_template.jinja", "{% if"), r"cannot load .*/copy: the model's chat template .* in chat_temp"),
        (_text_in("tokenizer_config.json", '{"tokenizer_class": [1]}'), r"tokenizer_config\.json: tokenizer_class is"),
        (_text_in("tokenizer.json", "{}"), r"tokenizer\.json: the field model is"),
        (_two_checkpoints, r"shards of several checkpoints.*model-\*-of-2, model-\*-of-3"),
        (_lost_shard, "lacks shards of its checkpoint: model-00002-of-00002.safetensors"),
        (_two_copies, r"tensor \S+ is in both model.fp16.safetensors and model.fp32.safetensors"),
        (_link_of("model.safetensors"), "model.safetensors is a link to ../blobs/0123, which is not there"),
        (_link_of("config.json"), "config.json is a link to ../blobs/0123, which is not there"),
        (_link_of("tokenizer.json"), "tokenizer.json is a link to ../blobs/0123, which is not there"),
        (_link_of("generation_config.json"), "generation_config.json is a link to"),
        (_link_of("chat_template.jinja"), "chat_template.jinja is a link to"),
        (_pointer, "model.safetensors is a pointer of Git LFS"),
        (_adapter, "is a LoRA adapter of org/base, not a model"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_files_that_cannot_be_used_are_named(break_it: Callable[[Path], None], problem: str, folder: Path) -> None:
    break_it(folder)
    with pytest.raises(ConfigError, match=problem):
        _engine(folder)


def test_a_model_that_is_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to("gone.gguf")
    with pytest.raises(ConfigError, match=r"m\.gguf is a link to gone\.gguf, which is not there"):
        _engine(tmp_path / "m.gguf")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaModel"])
def test_names_may_lack_their_first_part(architecture: str, tiny: Path, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): value for name, value in tensors.items()}, folder / "model.safetensors")
    _edit(folder / "config.json", architectures=[architecture])
    assert _answer(folder) == _answer(tiny)


@pytest.mark.parametrize("kind", [{"llama": 1}, ["llama"], 7])
def test_a_kind_that_is_no_text_is_named(kind: object, folder: Path) -> None:
    _edit(folder / "config.json", model_type=kind)
    with pytest.raises(ConfigError, match=r"cannot load .*: model_type must be a text in config\.json"):
        _engine(folder)


# --- GGUF


@pytest.fixture(scope="module")
def gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny, tmp_path_factory.mktemp("gguf") / "m.gguf", "llama")


@pytest.fixture
def parts(tiny: Path, tmp_path: Path) -> list[Path]:
    """The same model as a GGUF file in several parts."""
    write_gguf(tiny, tmp_path / "s.gguf", "llama", split_max_tensors=8)
    return sorted(tmp_path.glob("s-*.gguf"))


@pytest.mark.parametrize("given", ["first", "last", "folder"])
def test_a_split_model_is_given_by_any_part_or_by_its_folder(given: str, gguf: Path, parts: list[Path]) -> None:
    assert len(parts) > 2
    model = {"first": parts[0], "last": parts[-1], "folder": parts[0].parent}[given]
    (parts[0].parent / "mmproj-s.gguf").touch()
    assert _answer(model) == _answer(gguf)


def test_all_parts_of_a_model_have_one_name() -> None:
    assert {pool_of_model(f"/models/m-0000{i}-of-00003.gguf") for i in (1, 2, 3)} == {"m"}


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ConfigError, match=f"one of {len(parts)} parts of a model; missing: {parts[1].name}"):
        _engine(parts[0])


def test_parts_of_different_models_are_refused(parts: list[Path]) -> None:
    shutil.copy(parts[0], parts[1])
    with pytest.raises(ConfigError, match=f"{parts[1].name}: its metadata says that it is part 0 of {len(parts)}"):
        _engine(parts[0])


def test_a_renamed_part_is_refused(parts: list[Path]) -> None:
    alone = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(ConfigError, match=rf"its name must end in -00001-of-0000{len(parts)}\.gguf"):
        _engine(alone)


def test_a_folder_with_several_gguf_models_asks_for_one(gguf: Path, parts: list[Path]) -> None:
    shutil.copy(gguf, parts[0].parent / "a.gguf")
    with pytest.raises(ConfigError, match=f"several models; name the file of one: a.gguf, {parts[0].name}"):
        _engine(parts[0].parent)


@pytest.mark.parametrize("token_id", [0, 2])
def test_an_answer_of_a_gguf_model_ends_at_each_token_that_ends_one_in_llama_cpp(token_id: int, gguf: Path) -> None:
    """The file names token 2 alone, <|im_end|>. Token 0 is <|endoftext|>."""
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={token_id: 100.0})
    (generation,) = _engine(gguf).generate(["the gate"], params)
    assert generation.finish_reason == "stop"


def test_a_gguf_file_needs_no_ending_of_its_name(gguf: Path, tmp_path: Path) -> None:
    assert _answer(Path(shutil.copy(gguf, tmp_path / "sha256-0123"))) == _answer(gguf)


@pytest.mark.parametrize("given", ["M.GGUF", "."])
def test_the_ending_of_a_gguf_file_may_be_in_capitals(given: str, gguf: Path, tmp_path: Path) -> None:
    shutil.copy(gguf, tmp_path / "M.GGUF")
    assert _answer(tmp_path / given) == _answer(gguf)
    assert pool_of_model("/models/M-00001-of-00002.Gguf") == "M"


def test_a_split_model_may_be_in_capitals(gguf: Path, parts: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "capitals"
    folder.mkdir()
    for part in parts:
        (folder / part.name.upper()).symlink_to(part)
    assert _answer(folder) == _answer(gguf)


def test_a_piece_that_was_cut_by_bytes_is_named(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf.part00").write_bytes(gguf.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"is a piece of a GGUF file.*cat m\.gguf\.part\* > m\.gguf"):
        _engine(tmp_path / "m.gguf.part00")


# --- adapters


@pytest.mark.parametrize(
    ("config", "name", "problem"),
    [
        ({}, "model.embed_tokens.weight", "has base_model.model.model.embed_tokens.weight: adapters of the embedding"),
        ({}, "lm_head.lora_A.weight", "adapters of the embedding or of the head are not supported; merge"),
        ({}, "model.embed_tokens.lora_embedding_A", "adapters of the embedding"),
        ({"modules_to_save": ["lm_head"]}, "", r"modules_to_save is not supported; it is \['lm_head'\]"),
    ],
)
def test_an_adapter_of_the_embedding_or_head_is_refused_by_name(
    config: dict[str, Any], name: str, problem: str, tiny: Path, tmp_path: Path
) -> None:
    tensors = {f"base_model.model.{name}": torch.zeros(4, 64)} if name else {}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config))
    with pytest.raises(ConfigError, match=f"lora sql: .*{problem}"):
        _engine(tiny, lora={"sql": tmp_path})


def test_names_of_an_adapter_may_lack_their_first_part(tiny: Path, tmp_path: Path) -> None:
    """As PEFT writes them for a model without its head, or if they keep the adapter's own name."""
    name = "base_model.model.layers.0.mlp.down_proj.lora_"
    tensors = {f"{name}A.weight": torch.ones(4, 128), f"{name}B.default.weight": torch.ones(64, 4)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    engine = _engine(tiny, lora={"sql": tmp_path})
    answers = [engine.generate(["the gate"], GREEDY, adapters=one)[0].token_ids for one in (None, "sql")]
    assert answers[0] != answers[1]


# --- through the gateway

NAMED = [
    {"name": "default", "template": "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"},
    {"name": "tool_use", "template": "{{ tools | length }} tools<tool_call></tool_call>{{ messages[0].content }}"},
]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def door(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A model with named chat templates, more added tokens than logits, and a turn that no other file ends."""
    folder = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("served") / "m"))
    (folder / "chat_template.jinja").unlink()
    _edit(folder / "config.json", eos_token_id=0)
    _edit(folder / "generation_config.json", eos_token_id=[0])
    _edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>", chat_template=NAMED)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    more = {**tokenizer["added_tokens"][0], "id": len(tokenizer["model"]["vocab"]), "content": "<|more|>"}
    tokenizer["added_tokens"].append(more)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with served(folder, dtype="bfloat16") as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def _chat(door: httpx.Client, **fields: Any) -> Any:
    model = door.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "the gate"}], "temperature": 0, **fields}
    return door.post("/v1/chat/completions", json=body)


def test_structured_output_needs_no_logit_for_each_added_token(door: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    answer = _chat(door, response_format=wanted, max_tokens=200)
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"a": "x"}


def test_a_prompt_with_a_token_without_a_row_is_refused(door: httpx.Client) -> None:
    answer = _chat(door, messages=[{"role": "user", "content": "<|more|>"}])
    assert answer.status_code == 400
    assert "outside the vocabulary" in answer.json()["error"]["message"]


def test_chats_with_tools_use_the_template_for_them(door: httpx.Client) -> None:
    def prompt(**fields: Any) -> str:
        body = {"messages": [{"role": "user", "content": "the gate"}], **fields}
        model = door.get("/v1/models").json()["data"][0]["id"]
        tokens = door.post("/tokenize", json={"model": model, **body}).json()["tokens"]
        return str(door.post("/detokenize", json={"model": model, "tokens": tokens}).json()["prompt"])

    assert prompt() == "the gate<|im_end|>"
    assert prompt(tools=[TOOL]) == "1 tools<tool_call></tool_call>the gate"


def test_an_answer_ends_where_the_template_ends_a_turn(door: httpx.Client) -> None:
    """Neither config nor tokenizer says that <|im_end|>, token 2, ends an answer."""
    answer = _chat(door, max_tokens=64, logit_bias={"2": 100}).json()["choices"][0]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("stop", "")


def test_a_shard_may_be_a_link_out_of_the_folder(tiny: Path, folder: Path) -> None:
    """So are all files in the cache of huggingface_hub."""
    _shard(folder, tiny)
    (folder / "model.safetensors").unlink()
    (folder / SHARDS[0]).rename(folder.parent / "blob")
    (folder / SHARDS[0]).symlink_to("../blob")
    assert _answer(folder) == _answer(tiny)


def test_a_tensor_of_another_shape_names_the_shard_that_has_it(tiny: Path, folder: Path) -> None:
    _shard(folder, tiny)
    (folder / "model.safetensors").unlink()
    tensors = load_file(folder / SHARDS[1])
    (name,) = (name for name in tensors if name == "model.norm.weight")
    save_file(tensors | {name: tensors[name][:32].clone()}, folder / SHARDS[1])
    with pytest.raises(ConfigError, match=rf"tensor {name} has shape \[32\], .* in {SHARDS[1]}"):
        _engine(folder)


def test_a_text_at_which_the_tokenizer_panics_is_refused_and_others_are_not(folder: Path) -> None:
    """A pattern of a model's file that backtracks is a panic in Rust, which is no Exception in Python."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+a+)+b"}, "behavior": "Isolated", "invert": False}
    own = tokenizer["pre_tokenizer"] | {"use_regex": False}
    _edit(folder / "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [split, own]})
    engine = _engine(folder)
    with pytest.raises(RequestError, match=r"tokenizer cannot encode this text: .*retry-limit") as refused:
        engine.generate(["a" * 40 + "c"], GREEDY)
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert engine.generate(["the gate"], GREEDY)
