"""Random models: the folder and the GGUF file are one model, with a text for each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.larger import models
from gguf import GGUFReader

from penstock import Engine, SamplingParams
from penstock.gpu_node.model.checkpoint.dummy import SHAPES

VOCAB = 49_216
PROMPT = list(range(1000, 1012))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("random")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "MODEL_SHAPES", {"small": "small"})
        patch.setattr(models, "SHAPES", {"small": {**SHAPES["tiny"], "vocab_size": VOCAB, "tie_word_embeddings": True}})
        models.write_folder("small", place / "hf")
        models.write_gguf("small", place / "m.gguf")
    return place / "hf", place / "m.gguf"


@pytest.mark.slow
def test_the_folder_and_the_file_are_one_model(made: tuple[Path, Path]) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"num_kv_blocks": 16, "max_num_seqs": 2, "num_threads": 1, "quantization": "none"}
    [folder], [file] = (Engine(str(path), **settings).generate([PROMPT], params) for path in made)
    assert folder.token_ids == file.token_ids
    assert len(set(folder.token_ids)) > 1


@pytest.mark.slow
def test_each_token_has_a_text(made: tuple[Path, Path]) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(made[0] / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB
    assert tokenizer.decode([VOCAB - 1]) == f" w{VOCAB - 1}"
    tokens = GGUFReader(made[1]).fields["tokenizer.ggml.tokens"].contents()
    assert [tokenizer.id_to_token(i) for i in (5, 40_000, VOCAB - 1)] == [tokens[i] for i in (5, 40_000, VOCAB - 1)]


@pytest.mark.parametrize(("shape", "billions"), [("1b", 1.24), ("3b", 3.21)])
def test_a_token_reads_all_weights_of_the_shape(shape: str, billions: float) -> None:
    assert round(models.num_weights(SHAPES[models.MODEL_SHAPES[shape]]) / 1e9, 2) == billions
