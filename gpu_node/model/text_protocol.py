"""The interface between the engine of whole texts and an encoder: packed texts go in, rows of numbers come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.protocol import Placement

if TYPE_CHECKING:
    from penstock.contract.tasks import TextTask

RowKind = Literal["vectors", "labels", "token_labels"]
"""What a model makes of a text: one vector, a score of each label, or that for each token."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Whole texts of one step, packed without padding."""

    token_ids: NDArray[np.int32]
    """[num_tokens]"""
    starts: NDArray[np.int32]
    """[num_texts + 1]: text i has the tokens from starts[i] to starts[i + 1]."""
    types: NDArray[np.int32]
    """[num_tokens]: 1 for the tokens of the second text of a pair, else 0."""


@dataclass(frozen=True, slots=True)
class TextResult:
    """What a runner computed of a step."""

    hidden: NDArray[np.float32]
    """[num_tokens, width]: the last hidden state of each token, in the order of the batch. With a head of labels for
    whole texts it is [num_texts, num_labels], and for tokens [num_tokens, num_labels]."""
    forward_ms: float


class TextHandle(Protocol):
    """A step that may still be running."""

    def result(self) -> TextResult:
        """Wait for the step and return its result. Raises the error that made the step fail."""


class TextRunner(Protocol):
    """Owns an encoder's weights, and computes steps of whole texts one after another."""

    @property
    def placement(self) -> Placement:
        """Where the weights are."""

    def submit(self, batch: TextBatch) -> TextHandle:
        """Start a step and return at once. The caller must not change the arrays before the result is available."""


class TextHead(Protocol):
    """Float32 arithmetic from what the runner returned to the rows of a task."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of jobs that it can answer."""

    @property
    def row_kind(self) -> RowKind:
        """What its rows are."""

    @property
    def width(self) -> int:
        """Numbers in a row: dimensions, or labels."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels; empty for vectors."""

    def rows(self, hidden: NDArray[np.float32], lengths: NDArray[np.int32], task: TextTask) -> NDArray[np.float32]:
        """Return a row for each text, or for each token if labels are of tokens.

        hidden: the part of `TextResult.hidden` for these texts; lengths: [num_texts], their tokens.
        """


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """A runner with its head, and the facts about the model that the engine needs."""

    runner: TextRunner
    head: TextHead
    folder: Path
    """The folder with the tokenizer's files."""
    vocab_size: int
    max_tokens: int
    """Most tokens of a text, with the marks around it."""
    lowercases: bool
    """Whether texts are put into lower case before they are tokenized."""
    prompts: Mapping[str, str]
    """Texts that the model expects before others, by name."""
    default_prompt: str | None
    """The name of the prompt of requests that name none."""
    similarity: str
    """How two embeddings are compared: `cosine`, `dot`, `euclidean` or `manhattan`."""
    architecture: str
    arithmetic: str
    revision: str
