"""Encoders from GGUF files: the vectors of the folder a file was made of, to the bit where no weight is rounded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from fakes.native import ISAS, built
from fixtures.encoder_gguf import write_encoder_gguf
from fixtures.small_transformers import quiet
from fixtures.tiny_encoder import write_dense, write_modules, write_wide
from gguf import PoolingType

from penstock.contract.errors import ConfigError
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.encoder.engine import EncoderEngine
from penstock.gpu_node.engine.opening import open_engine
from penstock.gpu_node.model.native import load as native_load

TYPES: dict[str, dict[str, Any]] = {
    "bert": {"intermediate_size": 64},
    "distilbert": {"hidden_dim": 64},
    "roberta": {"intermediate_size": 64},
    "nomic_bert": {"intermediate_size": 64},
    "modernbert": {
        "intermediate_size": 64,
        "local_attention": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    # A file of EmbeddingGemma implies that every sixth layer has no window.
    "gemma3_text": {
        "use_bidirectional_attention": True,
        "sliding_window": 16,
        "layer_types": None,
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
    },
}
TEXTS = [[7 + (at * 5 + length) % 40 for at in range(length)] for length in (12, 1, 30, 60, 16, 17)]
WORDS = ["The cat sat on a mat.", "hello, world! 7", "dogs ran far away", "query"]
Load = Callable[..., EncoderEngine]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a folder or a file on the native kernels."""
    library = built(ISAS[-1])
    # What is made of a file is kept there; the kernels lie elsewhere.
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    given: dict[str, Any] = {"runner": "native", "cpu_isa": ISAS[-1], "num_threads": 1, "weight_cache": False}

    def make(model: Path, **settings: Any) -> EncoderEngine:
        with mock.patch.object(native_load, "library_path", lambda *_: library), quiet():
            return EncoderEngine(str(model), **(given | settings))

    return make


def written(folder: Path, model_type: str) -> None:
    folder.mkdir()
    with quiet():
        write_wide(folder, model_type, **TYPES[model_type])


def normalized(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("model_type", TYPES)
def test_vectors_are_those_of_the_folder(model_type: str, tmp_path: Path, load: Load) -> None:
    folder = tmp_path / "model"
    written(folder, model_type)
    # llama.cpp's programs return vectors of length 1.
    write_modules(folder, "Pooling", "Normalize", max_tokens=None)
    expected = load(folder).embed(TEXTS)
    exact = load(write_encoder_gguf(folder, tmp_path / "f32.gguf"))
    assert np.array_equal(exact.embed(TEXTS), expected)
    # Matrices stay as the file has them.
    small = load(write_encoder_gguf(folder, tmp_path / "q8.gguf", "q8_0"))
    assert "int8_group" in small.stats().arithmetic
    assert (small.embed(TEXTS) * expected).sum(axis=1).min() > 0.999


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(PoolingType.CLS, "cls_token"), (PoolingType.LAST, "lasttoken"), (PoolingType.NONE, "mean_tokens")],
)
def test_the_file_says_how_vectors_are_pooled(kind: int, mode: str, tmp_path: Path, load: Load) -> None:
    folder = tmp_path / "model"
    written(folder, "bert")
    write_modules(folder, "Pooling", "Normalize", pooling={f"pooling_mode_{mode}": True}, max_tokens=None)
    file = write_encoder_gguf(folder, tmp_path / "m.gguf", pooling=kind)
    assert np.array_equal(load(file).embed(TEXTS), load(folder).embed(TEXTS))


def test_texts_have_the_tokens_of_the_folder(tmp_path: Path, load: Load) -> None:
    folder = tmp_path / "model"
    written(folder, "bert")
    write_modules(folder, "Pooling", "Normalize", max_tokens=None)
    file, whole = load(write_encoder_gguf(folder, tmp_path / "m.gguf")), load(folder)
    for text in WORDS:
        assert file.tokenizer.encode(text) == whole.tokenizer.encode(text)
    assert np.array_equal(file.embed(WORDS), whole.embed(WORDS))


def test_dense_layers_of_a_file_follow_the_pooling(tmp_path: Path, load: Load) -> None:
    folder = tmp_path / "model"
    written(folder, "gemma3_text")
    matrix = np.ascontiguousarray(write_dense(folder, 32, 12)[:, :-1])
    means = load(folder).embed(TEXTS)
    found = load(write_encoder_gguf(folder, tmp_path / "m.gguf", dense=[matrix])).embed(TEXTS)
    assert np.abs(found - normalized(means @ matrix.T)).max() < 1e-6


def test_a_node_opens_the_engine_of_encoders_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(ISAS[-1])
    monkeypatch.setattr(native_load, "library_path", lambda *_: library)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    written(tmp_path / "model", "bert")
    file = write_encoder_gguf(tmp_path / "model", tmp_path / "m.gguf")
    config = EngineConfig(model=str(file), num_threads=1, weight_cache=False, cpu_isa=ISAS[-1])
    with quiet():
        engine = open_engine(config, lambda *_: None)
    assert isinstance(engine, EncoderEngine)
    assert engine.max_model_len == 256


@pytest.mark.parametrize(
    ("settings", "pooling", "said"),
    [
        (
            {"runner": "torch", "cpu_isa": "auto"},
            PoolingType.MEAN,
            "only the native kernels compute encoders of GGUF files",
        ),
        ({"dtype": "float32", "runner": "cpu"}, PoolingType.MEAN, "the kernels compute in bfloat16, not float32"),
        ({}, PoolingType.RANK, r"pooling_type 4 \(rank\) is not supported"),
    ],
)
def test_what_a_file_cannot_be_is_named(
    settings: dict[str, Any], pooling: int, said: str, tmp_path: Path, load: Load
) -> None:
    written(tmp_path / "model", "bert")
    file = write_encoder_gguf(tmp_path / "model", tmp_path / "m.gguf", pooling=pooling)
    with pytest.raises(ConfigError, match=said):
        load(file, **settings)


LLAMA_CPP = os.environ.get("LLAMA_CPP", "")
"""The folder of llama.cpp's sources, whose converter is run with this interpreter."""


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA_CPP, reason="LLAMA_CPP does not name the folder of llama.cpp's sources")
def test_a_file_of_llama_cpps_converter_has_the_vectors_of_minilm(tmp_path: Path, load: Load) -> None:
    import subprocess
    import sys

    from fixtures.minilm import MAX_TOKENS, has_minilm, write_minilm

    if not has_minilm():
        pytest.skip("the package with all-MiniLM-L6-v2 is not installed")
    folder, file = tmp_path / "model", tmp_path / "minilm.gguf"
    write_minilm(folder)
    converter = Path(LLAMA_CPP) / "convert_hf_to_gguf.py"
    words = [str(converter), str(folder), "--outfile", str(file), "--outtype", "f32"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    subprocess.run([sys.executable, *words], check=True, timeout=300, env=env)
    texts = [f"The kettle of house {at} is descaled with vinegar, {'again ' * (at % 60)}" for at in range(200)]
    whole, made = load(folder), load(file, max_model_len=MAX_TOKENS)
    assert np.array_equal(made.embed(texts), whole.embed(texts))
