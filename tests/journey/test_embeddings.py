"""Embeddings of the real small model, through OpenAI's official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from fakes.served_model import served
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

TEXTS = [
    "The cat sleeps on the sofa.",
    "A kitten naps on the couch.",
    "Stock markets fell sharply on Monday.",
    "Shares dropped at the start of the week. " * 40,
]


@pytest.fixture(scope="module")
def api(demo_folder: Path) -> Iterator[openai.OpenAI]:
    with served(demo_folder) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def states(demo_folder: Path) -> list[Any]:
    """Return the final hidden states of each text by transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_folder)
    with torch.inference_mode():
        return [model.model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0].numpy() for text in TEXTS]


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize("encoding", ["float", openai.NOT_GIVEN], ids=["float", "base64"])
def test_vectors_are_those_of_transformers(api: openai.OpenAI, states: list[Any], pooling: str, encoding: Any) -> None:
    """By default, the client asks for base64 and decodes it."""
    model = api.models.list().data[0].id
    found = api.embeddings.create(model=model, input=TEXTS, encoding_format=encoding, extra_body={"pooling": pooling})
    for one, hidden in zip(found.data, states, strict=True):
        wanted = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
        # Weights, activations and keys are rounded to bfloat16 or eight bits.
        assert one.embedding @ wanted / np.linalg.norm(wanted) > 0.98
    assert found.usage.prompt_tokens == sum(map(len, states))


def test_similar_texts_have_similar_vectors(api: openai.OpenAI) -> None:
    cat, kitten, markets, _ = (
        np.array(one.embedding) for one in api.embeddings.create(model=api.models.list().data[0].id, input=TEXTS).data
    )
    assert cat @ kitten > 0.05 + cat @ markets
