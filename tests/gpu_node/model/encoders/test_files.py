"""What the files of sentence-transformers may say of an encoder, and what is refused by its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fixtures.small_transformers import quiet
from fixtures.tiny_encoder import HIDDEN, states_of, tokens_of, write_dense, write_encoder, write_modules

from penstock.contract.errors import ConfigError
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.early import check_early
from penstock.gpu_node.engine.encoder.engine import EncoderEngine
from penstock.gpu_node.engine.engine import Engine

TEXTS = ["the cat sat", "hello world a dog ran away"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    with quiet():
        write_encoder(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "encoder"))


def embed(folder: Path, **options: object) -> np.ndarray:
    return EncoderEngine(str(folder), num_threads=1).embed(TEXTS, **options)  # type: ignore[arg-type]


def module_of(folder: Path) -> object:
    import transformers

    with quiet():
        return transformers.BertModel.from_pretrained(folder).eval()


def test_without_files_a_vector_is_the_mean_of_all_tokens(folder: Path) -> None:
    expected = [states.mean(axis=0) for states in states_of(module_of(folder), folder, TEXTS)]
    assert np.allclose(embed(folder), expected, atol=1e-5)


def test_a_dense_layer_follows_the_pooling(folder: Path) -> None:
    matrix = write_dense(folder, HIDDEN, 12)
    write_modules(folder, "Pooling", "Dense", "Normalize", pooling={"pooling_mode_cls_token": True})
    first = np.stack([states[0] for states in states_of(module_of(folder), folder, TEXTS)])
    rows = np.tanh(first @ matrix[:, :-1].T + matrix[:, -1])
    found = embed(folder)
    assert np.allclose(found, rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-5)


def test_a_prompt_stands_before_each_text(folder: Path) -> None:
    write_modules(folder, "Pooling", prompts={"query": "query ", "other": "a "})
    expected = [s.mean(axis=0) for s in states_of(module_of(folder), folder, [f"query {text}" for text in TEXTS])]
    assert np.allclose(embed(folder, prompt_name="query"), expected, atol=1e-5)
    settings = folder / "config_sentence_transformers.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"default_prompt_name": "query"}))
    assert np.allclose(embed(folder), expected, atol=1e-5)


def test_other_files_are_another_revision(folder: Path) -> None:
    def revision() -> str:
        return EncoderEngine(str(folder), num_threads=1).revision

    found = {revision()}
    for kinds in (("Pooling",), ("Pooling", "Normalize")):
        write_modules(folder, *kinds)
        found.add(revision())
    assert len(found) == 2 + 1


def unknown_module(folder: Path) -> None:
    write_modules(folder, "Pooling", "WordWeights")


def dense_of_another_size(folder: Path) -> None:
    write_dense(folder, HIDDEN + 1, 4)
    write_modules(folder, "Pooling", "Dense")


def path_outside(folder: Path) -> None:
    write_modules(folder, "Pooling")
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["path"] = "../1_Pooling"
    (folder / "modules.json").write_text(json.dumps(listed))


def without_a_tensor(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def of_questions(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForQuestionAnswering"]}))


def with_pooling_of_no_kind(folder: Path) -> None:
    write_modules(folder, "Pooling", pooling={"pooling_mode": "median"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (unknown_module, "module 'sentence_transformers.models.WordWeights' is not supported"),
        (dense_of_another_size, "linear.weight has shape .* but its input has 32 numbers"),
        (path_outside, r"module 1 has path '\.\./1_Pooling'"),
        (without_a_tensor, "has no tensors encoder.layer.1.output.dense.weight, which BertModel needs"),
        (of_questions, "architecture BertForQuestionAnswering is not supported"),
        (with_pooling_of_no_kind, "pooling_mode 'median' is not one of"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_a_file_must_not_say_is_refused_by_its_name(
    folder: Path, change: Callable[[Path], None], said: str
) -> None:
    change(folder)
    with quiet(), pytest.raises(ConfigError, match=said):
        EncoderEngine(str(folder), num_threads=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"runner": "gpu"}, "runner gpu does not compute encoders"),
        ({"max_model_len": 65}, "max_model_len 65 is more than the model's own limit of 64"),
        ({"lora": {"a": "b"}}, "lora is not supported"),
    ],
    ids=["runner", "length", "adapter"],
)
def test_settings_that_an_encoder_does_not_have_are_refused(
    whole: Path, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        EncoderEngine(str(whole), num_threads=1, **settings)


def test_the_engine_of_text_names_the_engine_of_encoders(whole: Path) -> None:
    with pytest.raises(ConfigError, match=r"is an encoder \(BertModel\) .* EncoderEngine computes it"):
        Engine(str(whole))
    check_early(EngineConfig(model=str(whole)))


def test_a_longer_limit_is_a_setting(whole: Path) -> None:
    text = "the cat " * 20
    engine = EncoderEngine(str(whole), num_threads=1, max_model_len=32)
    assert len(tokens_of(whole, [text], 64)[0]["input_ids"][0]) > engine.max_model_len == 32
    assert len(engine.embed([text], truncate_prompt_tokens=-1)) == 1
