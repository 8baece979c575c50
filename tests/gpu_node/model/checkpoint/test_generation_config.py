"""The sampling that a model recommends: where it is read, and what happens to values that no request may have."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from gguf import GGUFValueType
from gguf.constants import GGUF_DEFAULT_ALIGNMENT

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


def _entry(key: str, kind: GGUFValueType, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def _with_entries(gguf: bytes, entries: list[bytes]) -> bytes:
    """Return a GGUF file with further metadata before its own, which the package gguf takes seconds to read."""
    bare = _entry("padding", GGUFValueType.STRING, struct.pack("<Q", 0))
    # The tensors stay aligned.
    num_blank = -len(bare + b"".join(entries)) % GGUF_DEFAULT_ALIGNMENT
    padding = _entry("padding", GGUFValueType.STRING, struct.pack("<Q", num_blank) + b" " * num_blank)
    # Magic and version, the number of tensors, and that of entries.
    start, (num_entries,) = gguf[:16], struct.unpack_from("<Q", gguf, 16)
    return b"".join([start, struct.pack("<Q", num_entries + 1 + len(entries)), padding, *entries, gguf[24:]])


def test_a_gguf_file_may_recommend_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    recommended = [
        _entry("general.sampling.temp", GGUFValueType.FLOAT32, struct.pack("<f", 0.5)),
        _entry("general.sampling.top_k", GGUFValueType.INT32, struct.pack("<i", 7)),
    ]
    path.write_bytes(_with_entries(demo_model().read_bytes(), recommended))
    folder = resolve_model(str(path), lambda *_: None).folder
    assert sampling_defaults("auto", folder) == {"temperature": 0.5, "top_k": 7}
    assert json.loads((folder / FILE).read_text())["eos_token_id"] == [0, 2, 4]
