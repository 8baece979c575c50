"""Adapters in PEFT's format on the torch runner equal merged weights, in batches with several adapters."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fixtures.plans import Track, logits_of_step
from fixtures.random_adapters import make_adapter, merge
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError, NotFoundError, RequestError
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.lora import library as adapter_library
from penstock.gpu_node.model.lora.library import WEIGHTS_FILE, read_adapter

MAX_LOGIT_ERROR = 2e-4
Family = Callable[[str], Path]


def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.inference_mode()
def _logits(model: Any, token_ids: list[int]) -> NDArray[np.float32]:
    return np.asarray(model(torch.tensor([token_ids])).logits[0])


def _load(folder: Path, **options: Any) -> Any:
    wanted = runner_options(num_kv_blocks=60, max_loras=4, max_lora_rank=8, **options)
    return load_model(str(folder), wanted, lambda stage, fraction: None)


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "falcon 40b", "falcon rw", "gpt-neox"),
        *("phi3 with windows", "cohere2", "gemma4", "gemma4 moe"),
    ],
)
def test_mixed_batch_generates_what_each_merged_model_generates(
    family_folder: Family, tmp_path: Path, name: str
) -> None:
    base = _model(family_folder(name))
    only = next((part for part in ("query_key_value", "qkv_proj") if part in str(base)), "v_proj")
    folders = [
        # No adapter changes a router.
        make_adapter(tmp_path / "all", base, seed=1, only="_proj" if name == "gemma4 moe" else ""),
        make_adapter(tmp_path / "some", base, seed=2, rank=8, dtype="bfloat16", only=only, use_rslora=True),
    ]
    loaded = _load(family_folder(name), lora_dir=tmp_path)
    for place, folder in enumerate(folders):
        loaded.runner.set_adapter(place, loaded.adapters.find(AdapterRef(name=folder.name)))
    token_ids = [random.Random(seed).choices(range(384), k=60) for seed in range(4)]
    tracks = [Track(ids, range(1 + 4 * i, 5 + 4 * i), adapter=i % 3 - 1) for i, ids in enumerate(token_ids)]
    cut = [logits_of_step(loaded.runner, [(track, count) for track in tracks]) for count in (41, 1, 18)]
    models = [base, *(merge(_model(family_folder(name)), folder) for folder in folders)]
    for i, ids in enumerate(token_ids):
        want = _logits(models[i % 3], ids)
        np.testing.assert_allclose(np.concatenate([part[i] for part in cut]), want, rtol=0, atol=MAX_LOGIT_ERROR)
    assert np.abs(_logits(models[0], token_ids[0]) - _logits(models[1], token_ids[0])).max() > 1


def test_slot_can_load_another_adapter(family_folder: Family, tmp_path: Path) -> None:
    base = _model(family_folder("llama"))
    folders = [
        make_adapter(tmp_path / str(seed), base, seed=seed, only=only) for seed, only in ((1, ""), (2, "o_proj"))
    ]
    loaded = _load(family_folder("llama"), lora={folder.name: folder for folder in folders})
    ids = random.Random(0).choices(range(384), k=20)
    for folder in folders:
        loaded.runner.set_adapter(2, loaded.adapters.find(AdapterRef(name=folder.name)))
        (got,) = logits_of_step(loaded.runner, [(Track(ids, (1, 2), adapter=2), 20)])
        np.testing.assert_allclose(got, _logits(merge(_model(family_folder("llama")), folder), ids), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"r": 9}, "max_lora_rank 8"),
        ({"r": 2}, "has shape"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": "high"}, "lora_alpha is 'high'"),
    ],
)
def test_unsupported_adapter_is_refused_by_name(
    family_folder: Family, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = make_adapter(tmp_path / "one", _model(family_folder("llama")), only="q_proj")
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        _load(family_folder("llama"), lora={"one": folder})
    with pytest.raises(RequestError, match=message) as caught:
        _load(family_folder("llama"), lora_dir=tmp_path).adapters.find(AdapterRef(name="one"))
    assert caught.value.code == "adapter_unusable"


def _rename(folder: Path, old: str, new: str) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("base", ["model.language_model", "language_model.model"])
def test_an_adapter_of_a_model_for_images_changes_its_text_model(
    family_folder: Family, tmp_path: Path, base: str
) -> None:
    folder, named = (make_adapter(tmp_path / name, _model(family_folder("llama"))) for name in ("plain", "named"))
    _rename(named, "base_model.model.model.", f"base_model.model.{base}.")
    loaded, ids = _load(family_folder("llama"), lora={"plain": folder, "named": named}), list(range(20))
    for place, name in enumerate(("plain", "named")):
        loaded.runner.set_adapter(place, loaded.adapters.find(AdapterRef(name=name)))
    tracks = [(Track(ids, (1 + 2 * place, 2 + 2 * place), adapter=place), 20) for place in (0, 1)]
    plain, renamed = logits_of_step(loaded.runner, tracks)
    np.testing.assert_array_equal(plain, renamed)


def test_a_broken_file_is_refused_and_others_are_not(family_folder: Family, tmp_path: Path) -> None:
    base = _model(family_folder("llama"))
    for name in ("good", "lost", "foreign", "half", "pickled", "cut"):
        make_adapter(tmp_path / name, base, only="q_proj")
    _rename(tmp_path / "foreign", "q_proj", "w_proj")
    _rename(tmp_path / "half", "layers.1.self_attn.q_proj.lora_A", "layers.1.self_attn.k_proj.lora_A")
    (tmp_path / "lost" / "adapter_model.safetensors").unlink()
    (tmp_path / "pickled" / "adapter_model.safetensors").rename(tmp_path / "pickled" / "adapter_model.bin")
    with (tmp_path / "cut" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1000)
    library = _load(family_folder("llama"), lora_dir=tmp_path).adapters
    messages = {"lost": "there is no", "foreign": "w_proj", "half": "has no", "pickled": "pickle", "cut": "cut short"}
    for name, message in messages.items():
        with pytest.raises(RequestError, match=message):
            library.find(AdapterRef(name=name))
    assert library.find(AdapterRef(name="good")).rank == 4
    with pytest.raises(
        NotFoundError, match=r"'other' is unknown; known adapters: cut, foreign, good, half, lost, pickled"
    ):
        library.find(AdapterRef(name="other"))


def test_folder_that_is_no_adapter_is_logged_once(
    family_folder: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = _load(family_folder("llama"), lora_dir=tmp_path).adapters
    make_adapter(tmp_path / "whole", _model(family_folder("llama")), only="q_proj")
    make_adapter(tmp_path / "half", _model(family_folder("llama")), only="q_proj")
    (tmp_path / "half" / "adapter_model.safetensors").unlink()
    for _ in range(3):
        assert library.digests().keys() == {"whole"}
    (said,) = (vars(record) for record in caplog.records if record.message == "an adapter is left out")
    assert said["folder"] == str(tmp_path / "half") and "adapter_model.safetensors" in said["reason"]


def test_folders_that_cannot_be_read_leave_the_others_usable(
    family_folder: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = _load(family_folder("llama"), lora_dir=tmp_path).adapters
    for name in ("deep", "locked", "whole"):
        make_adapter(tmp_path / name, _model(family_folder("llama")), only="q_proj")
    (tmp_path / "deep" / "adapter_config.json").write_text("[" * 100_000)
    is_file = Path.is_file

    def allowed(path: Path) -> bool:
        if path.parent == tmp_path / "locked":
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    # Root may enter any folder.
    monkeypatch.setattr(Path, "is_file", allowed)
    assert library.digests().keys() == {"whole"}
    records = [vars(record) for record in caplog.records if "folder" in vars(record)]
    said = [(Path(record["folder"]).name, record["reason"]) for record in records]
    assert {name: "nested too deeply" in why or "denied" in why for name, why in said} == {"deep": True, "locked": True}


def test_adapter_is_identified_by_its_content(family_folder: Family, tmp_path: Path) -> None:
    base = _model(family_folder("llama"))
    library = _load(family_folder("llama"), lora_dir=tmp_path).adapters
    assert library.digests() == {}
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        make_adapter(tmp_path / name, base, seed=seed, only="q_proj")
    digests = library.digests()
    assert digests["one"] == digests["same"] != digests["other"]
    kept = library.find(AdapterRef(name="one", digest=digests["one"]))
    (tmp_path / "one" / "adapter_model.safetensors").unlink()
    (tmp_path / "other" / "adapter_model.safetensors").rename(tmp_path / "one" / "adapter_model.safetensors")
    assert library.digests()["one"] == digests["other"]
    assert library.find(AdapterRef(name="one", digest=digests["one"])) is kept, "for jobs that began with it"
    with pytest.raises(RequestError, match="has changed since the job was submitted") as caught:
        library.find(AdapterRef(name="one", digest="0" * 32))
    assert caught.value.code == "adapter_changed"


def test_adapter_that_changes_while_it_is_read_is_refused(
    family_folder: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = _model(family_folder("llama"))
    library = _load(family_folder("llama"), lora_dir=tmp_path).adapters
    one, other = (
        make_adapter(tmp_path / name, base, seed=seed, only="q_proj") for name, seed in (("one", 1), ("x", 2))
    )
    before = library.digests()["one"]

    def read_late(folder: Path, *rest: Any) -> Any:
        (one / WEIGHTS_FILE).write_bytes((other / WEIGHTS_FILE).read_bytes())
        return read_adapter(folder, *rest)

    with monkeypatch.context() as patch, pytest.raises(RequestError) as caught:
        patch.setattr(adapter_library, "read_adapter", read_late)
        library.find(AdapterRef(name="one", digest=before))
    assert caught.value.code == "adapter_unusable"
    assert library.find(AdapterRef(name="one")).digest == library.digests()["x"] != before
