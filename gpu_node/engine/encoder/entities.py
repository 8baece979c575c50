"""Labels of tokens, joined to parts of a text: neighbors of one kind are one part."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.texts import Offsets

OUTSIDE = "O"
"""The label of tokens that belong to nothing."""
MAX_ENTITIES = 1024
"""Parts of one text that are reported."""


@dataclass(slots=True)
class _Part:
    label: str
    start: int
    end: int
    scores: list[float]


def entities_of(scores: NDArray[np.float32], labels: tuple[str, ...], offsets: Offsets, text: str) -> str:
    """Return what the labels of a text's tokens say, as a JSON list of objects.

    scores: [num_tokens, num_labels], probabilities. Each token has its likeliest label. Neighbors are joined if their
    labels are alike without `B-` and `I-`, but a token whose label begins with `B-` begins a new part. The score of a
    part is the mean of its tokens'. Marks around a text have no part.
    """
    best = scores.argmax(axis=1)
    parts, last = list[_Part](), None
    for at, (start, end) in enumerate(offsets):
        if start == end:
            continue
        prefix, kind = _divided(labels[best[at]])
        score = float(scores[at, best[at]])
        if last is not None and last.label == kind and prefix != "B":
            last.end = end
            last.scores.append(score)
            continue
        last = _Part(kind, start, end, [score])
        parts.append(last)
    found = [
        {
            "entity_group": part.label,
            "score": sum(part.scores) / len(part.scores),
            "word": text[part.start : part.end],
            "start": part.start,
            "end": part.end,
        }
        for part in parts
        if part.label != OUTSIDE
    ]
    return json.dumps(found[:MAX_ENTITIES], ensure_ascii=False)


def _divided(label: str) -> tuple[str, str]:
    """Return a label's prefix, B or I, and its kind. A label without a prefix continues a part of its kind."""
    prefix, dash, kind = label.partition("-")
    return (prefix, kind) if dash and prefix in ("B", "I") else ("I", label)
