"""The sampling that a model recommends: where it is read, and what happens to values that no request may have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from penstock.cli.demo_model import demo_model
from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.generation_config import FILE, sampling_defaults
from penstock.gpu_node.model.checkpoint.source import resolve_model

GIVEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": [2], "min_p": None}
WANTED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def write(folder: Path, content: object) -> Path:
    (folder / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_the_models_own_file_is_read_and_only_for_sampling(tmp_path: Path) -> None:
    assert sampling_defaults("auto", tmp_path) == {}
    assert sampling_defaults("auto", write(tmp_path, GIVEN)) == WANTED
    assert sampling_defaults("none", tmp_path) == {}


def test_a_file_its_folder_or_json_may_be_named(tmp_path: Path) -> None:
    write(tmp_path, GIVEN)
    elsewhere = tmp_path / "nothing"
    for setting in (str(tmp_path), str(tmp_path / FILE), json.dumps(GIVEN)):
        assert sampling_defaults(setting, elsewhere) == WANTED


def test_a_wrong_value_of_the_model_is_ignored_and_the_others_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert sampling_defaults("auto", write(tmp_path, GIVEN | {"temperature": -1})) == {"top_p": 0.95, "top_k": 20}
    assert "temperature: must be at least 0" in caplog.records[0].__dict__["reason"]
    assert sampling_defaults("auto", write(tmp_path, "{")) == {}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('{"temperature": 11}', "temperature: must be at most 10"),
        ('{"top_k": "many"}', "top_k: must be an integer"),
        ("{", "is not JSON"),
        ("/nowhere/at/all", "generation_config: cannot read /nowhere/at/all"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        sampling_defaults(setting, tmp_path)
    assert caught.value.param == "generation_config"


def test_a_gguf_file_may_recommend_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    reader, path = GGUFReader(demo_model()), tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    for name, value in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            is_list = value.types[0] == GGUFValueType.ARRAY
            writer.add_key_value(name, value.contents(), value.types[0], sub_type=value.types[-1] if is_list else None)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 7)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = resolve_model(str(path), lambda *_: None).folder
    assert sampling_defaults("auto", folder) == {"temperature": 0.5, "top_k": 7}
    assert json.loads((folder / FILE).read_text())["eos_token_id"] == 2
