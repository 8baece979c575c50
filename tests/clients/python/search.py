"""Texts of a search, and what scripts of encoders expect: what plain HTTP returns for the same texts."""

from __future__ import annotations

import json
import math
import os
import urllib.request
from collections.abc import Iterable, Sequence
from typing import Any

from clients.python.checks import MODEL, URL

RERANKER = os.environ["PENSTOCK_RERANKER"]
QUERY = "How do I descale the kettle?"
DOCUMENTS = [
    "The boiler is in the cellar.",
    "Descale the kettle with vinegar, and rinse it twice.",
    "Stock markets fell sharply on Monday.",
    "Rivers carry less water in summer.",
]
NEAREST = 1
"""The document that answers the query."""
DIMENSIONS = 384
LONG = "water " * 600
"""More tokens than the model takes."""
TOLERANCE = 1e-5


def post(path: str, **body: Any) -> Any:
    """Return what a route answers."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def vectors_of(texts: Sequence[str], **options: Any) -> list[list[float]]:
    """Return the embeddings of texts."""
    answer = post("v1/embeddings", model=MODEL, input=texts, **options)
    return [one["embedding"] for one in answer["data"]]


def scores_of(model: str = RERANKER) -> list[float]:
    """Return how well each document fits the query."""
    return [one["score"] for one in post("score", model=model, text_1=QUERY, text_2=DOCUMENTS)["data"]]


def require_equal(found: Iterable[float], expected: Iterable[float]) -> None:
    """Compare numbers."""
    pairs = list(zip(found, expected, strict=True))
    assert pairs
    worst = max(abs(float(a) - b) for a, b in pairs)
    assert worst <= TOLERANCE, f"the numbers differ by {worst}"


def require_vectors(found: Iterable[Iterable[float]], texts: Sequence[str], **options: Any) -> None:
    """Compare the vectors of texts."""
    for vector, expected in zip(found, vectors_of(texts, **options), strict=True):
        require_equal(vector, expected)


def require_ranking(found: Sequence[tuple[int, float]], model: str = RERANKER, top_n: int | None = None) -> None:
    """Compare places of documents and their scores, the best first."""
    scores = scores_of(model)
    best = sorted(range(len(scores)), key=lambda at: -scores[at])[:top_n]
    assert [at for at, _ in found] == best, f"the documents are {found}, of scores {scores}"
    require_equal([score for _, score in found], [scores[at] for at in best])


def nearest(query: Sequence[float], documents: Sequence[Sequence[float]]) -> int:
    """Return the place of the vector that is most like the query's."""
    products = [sum(float(a) * float(b) for a, b in zip(query, one, strict=True)) for one in documents]
    return products.index(max(products))


def require_unit_length(vector: Sequence[float]) -> None:
    """Require that a vector has the length 1."""
    assert abs(math.hypot(*map(float, vector)) - 1) < TOLERANCE
