"""Batches whose rows are texts to embed or pairs to score, by a small encoder whose numbers are known bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from faults.tools.backlog_entries import Requests
from faults.tools.batch_kills import Line, OpenAIEntry
from fixtures.tiny_encoder import write_wide
from numpy.typing import NDArray

from penstock.gpu_node.engine.encoder.engine import EncoderEngine

QUERY = "query cat"
_WORDS = ("the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far", "away", "hello", "world")
_FEWEST, _MOST = 8, 50
"""Words of a text."""
_AT_ONCE = 512
_SHAPE = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 128,
}
"""That of all-MiniLM-L6-v2, so that a batch lasts long enough to be disturbed."""


def text_of(index: int) -> str:
    """Return the text of a row. No two rows have the same one."""
    length = _FEWEST + index * 7919 % (_MOST - _FEWEST)
    words = (_WORDS[(index + at * at) % len(_WORDS)] for at in range(length))
    return f"{index} {' '.join(words)}"


class EncoderRequests(Requests):
    """Requests whose answers are numbers, written as the hexadecimal digits of their bits."""

    def __init__(self, pool: str, number: int, folder: Path, *, scores: bool) -> None:
        """folder: where the model is written. The numbers of all rows are computed at once."""
        super().__init__(pool, number, 0)
        folder.mkdir()
        if scores:
            write_wide(folder, "bert", "ForSequenceClassification", num_labels=1, **_SHAPE)
        else:
            write_wide(folder, "bert", **_SHAPE)
        engine = EncoderEngine(str(folder), runner="native", num_threads=2, weight_cache=False)
        texts = [text_of(index) for index in range(number)]
        rows: list[NDArray[np.float32]] = []
        for first in range(0, number, _AT_ONCE):
            some = texts[first : first + _AT_ONCE]
            rows.extend(engine.score(QUERY, some)[:, None] if scores else engine.embed(some))
        self._expected = [bits_of(row) for row in rows]

    def is_right(self, index: int, text: str) -> bool:
        """Whether the numbers of a row are those that an undisturbed engine computes."""
        return text == self._expected[index]


def bits_of(numbers: Any) -> str:
    """Return the bits of numbers in float32."""
    return np.asarray(numbers, "<f4").tobytes().hex()


@dataclass(slots=True)
class EmbeddingsEntry(OpenAIEntry):
    """`/v1/batches` with texts to embed."""

    endpoint: ClassVar[str] = "/v1/embeddings"

    def body_of(self, index: int) -> dict[str, Any]:
        """Return the body of a row."""
        return {"model": self.requests.pool, "input": text_of(index)}

    def line_of(self, row: dict[str, Any]) -> Line:
        """Return a row of a result as its reader sees it."""
        if row["error"] is not None:
            return Line(row["custom_id"], None)
        (one,) = row["response"]["body"]["data"]
        return Line(row["custom_id"], bits_of(one["embedding"]))


@dataclass(slots=True)
class ScoresEntry(OpenAIEntry):
    """`/v1/batches` with pairs to score."""

    endpoint: ClassVar[str] = "/v1/score"

    def body_of(self, index: int) -> dict[str, Any]:
        """Return the body of a row."""
        return {"model": self.requests.pool, "text_1": QUERY, "text_2": text_of(index)}

    def line_of(self, row: dict[str, Any]) -> Line:
        """Return a row of a result as its reader sees it."""
        if row["error"] is not None:
            return Line(row["custom_id"], None)
        (one,) = row["response"]["body"]["data"]
        return Line(row["custom_id"], bits_of([one["score"]]))
