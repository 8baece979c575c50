"""The texts of a job for an encoder, tokenized and packed, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.contract.tasks import Classify, Embed, Score

EncoderTask: TypeAlias = Embed | Score | Classify
Offsets: TypeAlias = tuple[tuple[int, int], ...]
"""For each token of a text its first character, and the one after its last. Marks around a text have equal ones."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedTexts:
    """The tokens of a job's texts, one after another, each with the marks that the model expects around it."""

    task: EncoderTask
    token_ids: NDArray[np.int32]
    """[num_tokens]"""
    starts: NDArray[np.int32]
    """[num_texts + 1]: text i has the tokens from starts[i] to starts[i + 1]."""
    types: NDArray[np.int32]
    """[num_tokens]: 1 for the tokens of the second text of a pair, else 0."""
    texts: tuple[str, ...] = ()
    """The texts themselves, where a model labels their tokens. Likewise `offsets`."""
    offsets: tuple[Offsets, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_texts(self) -> int:
        """The number of texts, or of pairs."""
        return len(self.starts) - 1


@dataclass(frozen=True, slots=True)
class TextResults:
    """The rows of a job's texts."""

    kind: str
    rows: bytes
    """float32, little-endian: [num_texts, width]; empty for labels of tokens."""
    num_tokens: tuple[int, ...]
    """The tokens of each text."""
    labels: tuple[str, ...] = ()
    entities: str = ""
    """Where the labels are those of tokens: for each text a list of what was found, as JSON."""


class TextEncoding(Protocol):
    """How an encoder's texts are tokenized; safe on any thread."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of jobs that the encoder can run."""

    @property
    def dimensions(self) -> int:
        """Numbers of an embedding; 0 if the model makes none."""

    @property
    def similarity(self) -> str:
        """How two embeddings are compared."""

    def encode(self, task: EncoderTask, prompt: str | Sequence[int]) -> PackedTexts:
        """Tokenize a job's texts. Raises RequestError that names a text by its number, and PromptTooLongError."""
