"""Encoders on the native kernels: what transformers computes, and the same bits whatever shares a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fakes.native import ISAS, built
from fixtures.small_transformers import quiet
from fixtures.tiny_encoder import write_of_type, write_wide
from safetensors.numpy import load_file, save_file

from penstock.contract.errors import ConfigError, JobFailedError
from penstock.gpu_node.engine.encoder.engine import EncoderEngine
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.encoders.load import load_encoder
from penstock.gpu_node.model.encoders.native import PASS_TOKENS
from penstock.gpu_node.model.native import load as native_load
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.text_protocol import TextBatch, TextRunner
from penstock.kernels.cpu.probe import Isa

FAMILIES = (
    *("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "electra", "distilbert"),
    *("modernbert", "nomic_bert", "gte", "eurobert", "gemma3_text"),
)
_KINDS = ["full_attention", "sliding_attention"]
WINDOWS: dict[str, dict[str, Any]] = {
    "modernbert": {"local_attention": 16, "layer_types": _KINDS},
    "gemma3_text": {
        "use_bidirectional_attention": True,
        "sliding_window": 16,
        "layer_types": _KINDS,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 16,
    },
}
"""A window that texts exceed on both sides."""
TEXTS = [[7 + (at * 5 + length) % 40 for at in range(length)] for length in (12, 1, 30, 60, 16, 17)]
MAX_ERROR = 0.02
"""Of all numbers together, relative to their size: activations are rounded to bfloat16 before each product."""
Load = Callable[..., EncoderEngine]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    """An instruction set, for which the kernels are those of the tests."""
    library = built(request.param)
    with mock.patch.object(native_load, "library_path", lambda *_: library), quiet():
        yield request.param


@pytest.fixture
def load(isa: Isa) -> Load:
    """Load a folder on the native kernels of an instruction set."""
    given: dict[str, Any] = {"runner": "native", "cpu_isa": isa, "num_threads": 1, "weight_cache": False}
    return lambda folder, **settings: EncoderEngine(str(folder), **(given | settings))


@pytest.fixture
def runner_of(isa: Isa) -> Callable[..., TextRunner]:
    """Load the runner of a folder."""
    options = RunnerOptions(runner="native", cpu_isa=isa, num_threads=1, weight_cache=False)
    return lambda folder, **settings: (
        load_encoder(ModelSource(folder), options.model_copy(update=settings), lambda *_: None).runner
    )


def written(folder: Path, model_type: str, kind: str = "Model", **changes: Any) -> Any:
    with quiet():
        return write_wide(folder, model_type, kind, **{**WINDOWS.get(model_type, {}), **changes})


def means_of(module: Any) -> np.ndarray:
    with torch.inference_mode():
        states = [module(input_ids=torch.tensor([text])).last_hidden_state[0] for text in TEXTS]
    return np.stack([one.mean(0).numpy() for one in states])


def packed(texts: list[list[int]]) -> TextBatch:
    ids = np.concatenate([np.array(text, np.int32) for text in texts])
    starts = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    return TextBatch(ids, starts, np.zeros(len(ids), np.int32))


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_vectors_are_those_of_the_module_alone(model_type: str, tmp_path: Path, load: Load) -> None:
    module = written(tmp_path, model_type)
    assert error_of(load(tmp_path).embed(TEXTS), means_of(module)) < MAX_ERROR


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "gemma3_text"])
def test_int8_is_near_the_module(model_type: str, tmp_path: Path, load: Load) -> None:
    module = written(tmp_path, model_type)
    engine = load(tmp_path, quantization="int8")
    assert "int8_group" in engine.stats().arithmetic
    assert error_of(engine.embed(TEXTS), means_of(module)) < 2 * MAX_ERROR


@pytest.mark.parametrize("model_type", FAMILIES)
def test_scores_of_labels_are_those_of_the_module(model_type: str, tmp_path: Path, load: Load) -> None:
    pooling = {"classifier_pooling": "bos"} if model_type == "eurobert" else {}
    module = written(tmp_path, model_type, "ForSequenceClassification", num_labels=3, **pooling)
    engine = load(tmp_path)
    with torch.inference_mode():
        expected = np.concatenate([module(input_ids=torch.tensor([text])).logits.numpy() for text in TEXTS])
    assert error_of(engine.classify(TEXTS, raw=True), expected) < MAX_ERROR


@pytest.mark.parametrize("model_type", ["modernbert", "eurobert"])
def test_a_head_may_read_the_mean_of_a_text(model_type: str, tmp_path: Path, load: Load) -> None:
    module = written(tmp_path, model_type, "ForSequenceClassification", num_labels=3, classifier_pooling="mean")
    engine = load(tmp_path)
    with torch.inference_mode():
        expected = np.concatenate([module(input_ids=torch.tensor([text])).logits.numpy() for text in TEXTS])
    assert error_of(engine.classify(TEXTS, raw=True), expected) < MAX_ERROR


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "modernbert"])
def test_labels_of_tokens_are_those_of_the_module(
    model_type: str, tmp_path: Path, runner_of: Callable[..., TextRunner]
) -> None:
    module = written(tmp_path, model_type, "ForTokenClassification", num_labels=3)
    runner = runner_of(tmp_path)
    found = runner.submit(packed(TEXTS)).result().hidden
    with torch.inference_mode():
        expected = np.concatenate([module(input_ids=torch.tensor([text])).logits[0].numpy() for text in TEXTS])
    assert error_of(found, expected) < MAX_ERROR


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "gemma3_text"])
def test_a_text_has_the_same_bits_alone_and_in_any_batch(
    model_type: str, quantization: str, tmp_path: Path, load: Load
) -> None:
    written(tmp_path, model_type)
    engine = load(tmp_path, quantization=quantization)
    # More than one pass holds, in steps and passes that begin with other texts.
    many = TEXTS * (2 * PASS_TOKENS // sum(map(len, TEXTS)) + 1)
    together = engine.embed(many)
    alone = np.concatenate([engine.embed([text]) for text in TEXTS])
    assert np.array_equal(together, np.tile(alone, (len(many) // len(TEXTS), 1)))
    for num_threads in (2, 3):
        assert np.array_equal(load(tmp_path, quantization=quantization, num_threads=num_threads).embed(many), together)


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "gemma3_text"])
def test_scores_have_the_same_bits_alone_and_in_any_batch(model_type: str, tmp_path: Path, load: Load) -> None:
    written(tmp_path, model_type, "ForSequenceClassification", num_labels=3)
    engine = load(tmp_path)
    together = engine.classify(TEXTS * 7, raw=True)
    alone = np.concatenate([engine.classify([text], raw=True) for text in TEXTS])
    assert np.array_equal(together, np.tile(alone, (7, 1)))


def test_types_of_tokens_count(tmp_path: Path, runner_of: Callable[..., TextRunner]) -> None:
    module = written(tmp_path, "bert")
    runner = runner_of(tmp_path)
    batch = packed(TEXTS)
    batch.types[3:9] = 1
    found = runner.submit(batch).result().hidden[:12]
    types = torch.zeros(1, 12, dtype=torch.long)
    types[0, 3:9] = 1
    with torch.inference_mode():
        expected = module(input_ids=torch.tensor(TEXTS[:1]), token_type_ids=types).last_hidden_state[0].numpy()
    assert error_of(found, expected) < MAX_ERROR


def renamed(folder: Path, rename: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> None:
    path = folder / "model.safetensors"
    save_file({name: np.ascontiguousarray(one) for name, one in rename(load_file(path)).items()}, path)


def test_a_single_type_of_tokens_is_that_of_all(tmp_path: Path, runner_of: Callable[..., TextRunner]) -> None:
    written(tmp_path, "xlm-roberta", type_vocab_size=1)
    runner, batch = runner_of(tmp_path), packed(TEXTS)
    expected = runner.submit(batch).result().hidden
    batch.types[3:9] = 1
    assert np.array_equal(runner.submit(batch).result().hidden, expected)


Tensors = dict[str, np.ndarray]


def as_in_the_class(module: Any) -> Tensors:
    """Return the tensors under the names that transformers' class has; it writes published names to files."""
    return {name: one.numpy() for name, one in module.state_dict().items()}


def under(base: str, tensors: Tensors) -> Tensors:
    return {f"{base}.{name}": one for name, one in tensors.items()}


def as_in_old_files(tensors: Tensors) -> Tensors:
    renamed_norms = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    made = {}
    for name, one in tensors.items():
        for end, old in renamed_norms.items():
            name = name.replace(end, old)
        made[name] = one
    return made


@pytest.mark.parametrize(
    ("model_type", "rename"),
    [
        ("nomic_bert", lambda stored, module: as_in_the_class(module)),
        ("nomic_bert", lambda stored, module: under("nomic_bert", stored)),
        ("gte", lambda stored, module: as_in_the_class(module)),
        ("gte", lambda stored, module: {name.removeprefix("new."): one for name, one in stored.items()}),
        ("bert", lambda stored, module: under("bert", as_in_old_files(stored))),
        ("modernbert", lambda stored, module: under("model", stored)),
    ],
)
def test_tensors_are_found_under_all_their_names(model_type: str, rename: Any, tmp_path: Path, load: Load) -> None:
    module = written(tmp_path, model_type)
    expected = load(tmp_path).embed(TEXTS)
    renamed(tmp_path, lambda stored: rename(stored, module))
    assert np.array_equal(load(tmp_path).embed(TEXTS), expected)


def test_nan_in_one_text_ends_only_its_job(tmp_path: Path, load: Load) -> None:
    written(tmp_path, "bert")
    clean = load(tmp_path).embed([TEXTS[0]])

    def poisoned(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors["embeddings.word_embeddings.weight"][50] = np.nan
        return tensors

    renamed(tmp_path, poisoned)
    engine = load(tmp_path)
    with pytest.raises(JobFailedError, match="NaN or infinity"):
        engine.embed([TEXTS[0], [50, 8, 9]])
    assert np.array_equal(engine.embed([TEXTS[0]]), clean)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_nan_in_one_text_leaves_the_rows_of_others(
    quantization: str, tmp_path: Path, runner_of: Callable[..., TextRunner]
) -> None:
    """Rows of both texts are encoded together, as inputs of the next product."""
    written(tmp_path, "bert")

    def poisoned(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors["embeddings.word_embeddings.weight"][50] = np.nan
        return tensors

    renamed(tmp_path, poisoned)
    runner = runner_of(tmp_path, quantization=quantization)
    clean = runner.submit(packed([TEXTS[0], TEXTS[1]])).result().hidden
    beside = runner.submit(packed([TEXTS[0], [50, 8, 9], TEXTS[1]])).result().hidden
    assert np.isnan(beside[12:15]).all()
    assert np.array_equal(np.delete(beside, range(12, 15), axis=0), clean)


def test_a_packed_file_is_shared_and_gives_the_same_bits(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    written(folder, "bert")
    expected = load(folder).embed(TEXTS)
    for _ in range(2):
        assert np.array_equal(load(folder, weight_cache=True).embed(TEXTS), expected)
    assert list((tmp_path / "cache").rglob("*.weights"))


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("mpnet", {}, "model_type mpnet is not supported"),
        ("bert", {"dtype": "float32"}, "not float32"),
        ("bert", {"quantization": "int4"}, "quantization int4"),
    ],
)
def test_what_the_kernels_lack_is_named(
    model_type: str, settings: dict[str, Any], reason: str, tmp_path: Path, load: Load
) -> None:
    written(tmp_path, model_type)
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path, **settings)


@pytest.mark.parametrize(
    ("model_type", "settings"), [("mpnet", {}), ("bert", {"dtype": "float32"}), ("bert", {"runner": "torch"})]
)
def test_transformers_computes_what_the_kernels_lack(
    model_type: str, settings: dict[str, Any], tmp_path: Path, load: Load
) -> None:
    module = written(tmp_path, model_type)
    engine = load(tmp_path, **{"runner": "cpu", "cpu_isa": "auto"} | settings)
    assert engine.stats().arithmetic.startswith("transformers-")
    assert error_of(engine.embed(TEXTS), means_of(module)) < 1e-5


def test_narrow_heads_are_left_to_transformers(tmp_path: Path, load: Load) -> None:
    with quiet():
        write_of_type(tmp_path, "bert")
    assert load(tmp_path, runner="cpu").stats().arithmetic.startswith("transformers-")


def test_quantization_needs_the_kernels(tmp_path: Path, load: Load) -> None:
    written(tmp_path, "mpnet")
    with pytest.raises(ConfigError, match="quantization is not supported"):
        load(tmp_path, runner="cpu", quantization="int8")
