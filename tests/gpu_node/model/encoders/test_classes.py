"""Each type of encoder computes what its module of transformers computes for each text alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.small_transformers import quiet
from fixtures.tiny_encoder import write_of_type

from penstock.gpu_node.engine.encoder.engine import EncoderEngine

SAMPLE = ("roberta", "distilbert", "modernbert", "deberta-v2")
"""Those that each run of the tests computes: positions with an offset, other names, windows, relative positions."""
OTHERS = (
    *("albert", "camembert", "data2vec-text", "deberta", "electra", "ernie", "eurobert", "flaubert", "gte"),
    *("jina_embeddings_v3", "longformer", "megatron-bert", "mobilebert", "mpnet", "nomic_bert", "rembert"),
    *("roberta-prelayernorm", "roformer", "squeezebert", "xlm", "xlm-roberta", "xlm-roberta-xl"),
)
TEXTS = [[7 + (at * 5 + length) % 40 for at in range(length)] for length in (12, 5, 30)]
TYPES = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in (*SAMPLE, *OTHERS)]


@pytest.mark.parametrize("model_type", TYPES)
def test_vectors_are_those_of_the_module_alone(model_type: str, tmp_path: Path) -> None:
    with quiet():
        module = write_of_type(tmp_path, model_type)
        found = EncoderEngine(str(tmp_path), num_threads=1).embed(TEXTS)
    with torch.inference_mode():
        states = [module(input_ids=torch.tensor([text])).last_hidden_state[0].mean(0).numpy() for text in TEXTS]
    assert np.linalg.norm(found - states) < 1e-5 * np.linalg.norm(states)


@pytest.mark.parametrize("model_type", ["roberta", "modernbert", "electra"])
def test_labels_are_those_of_the_module_alone(model_type: str, tmp_path: Path) -> None:
    with quiet():
        module = write_of_type(tmp_path, model_type, "ForSequenceClassification")
        found = EncoderEngine(str(tmp_path), num_threads=1).classify(TEXTS, raw=True)
    with torch.inference_mode():
        logits = [module(input_ids=torch.tensor([text])).logits[0].numpy() for text in TEXTS]
    assert np.abs(found - logits).max() < 1e-5
