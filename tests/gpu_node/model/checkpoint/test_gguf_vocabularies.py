"""llama.cpp's vocabularies give the tokens that its texts expect (`make vocabularies`).

Its repository has them as `models/ggml-vocab-*.gguf`, beside files with texts (`.inp`) and with their ids (`.out`). The
source archive of llama-cpp-python on PyPI has them too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.gpu_node.model.checkpoint.gguf_file import read_header
from penstock.gpu_node.model.checkpoint.gguf_tokenizer import TOKENIZER_LISTS
from penstock.gpu_node.model.checkpoint.gguf_vocabulary import tokenizer_of

pytestmark = pytest.mark.slow

FOLDER = Path(os.environ.get("VOCABULARIES") or "/nonexistent")
NAMES = sorted(path.name.removesuffix(".inp") for path in FOLDER.glob("ggml-vocab-*.gguf.inp"))
SEPARATOR = "\n__ggml_vocab_test__\n"
LARGE = 200_000
"""Tokens of a vocabulary that may take `MOST_S` of a core's time."""
MOST_S, MOST_S_OF_OTHERS = 5.0, 2.0


def texts_of(name: str) -> Iterator[tuple[str, list[int]]]:
    """Yield the texts of a vocabulary, and the ids of their tokens."""
    texts = (FOLDER / f"{name}.inp").read_bytes().decode().split(SEPARATOR)
    for text, ids in zip(texts, (FOLDER / f"{name}.out").read_text().split("\n"), strict=False):
        yield text, [int(one) for one in ids.split()]


@pytest.mark.skipif(not NAMES, reason="VOCABULARIES names no folder with llama.cpp's vocabularies")
@pytest.mark.parametrize("name", NAMES or ["none"])
def test_texts_have_llama_cpps_tokens(name: str) -> None:
    content = (FOLDER / name).read_bytes()
    # The files have no tensors, so a count of layers is wrong of them.
    header = read_header(memoryview(content.replace(b".block_count", b".other_count", 1)), TOKENIZER_LISTS)
    begun_s = time.process_time()
    backend = tokenizer_of(header.metadata).backend
    took_s = time.process_time() - begun_s
    pairs = list(texts_of(name))
    assert len(pairs) >= 46
    assert [backend.encode(text, add_special_tokens=False).ids for text, _ in pairs] == [ids for _, ids in pairs]
    is_large = len(header.metadata[TOKENIZER_LISTS[0]]) > LARGE
    assert took_s <= (MOST_S if is_large else MOST_S_OF_OTHERS)
