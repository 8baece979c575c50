"""Answers whose jobs return a row of numbers for each text, or for each pair of texts."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.contract.errors import InvariantError
from penstock.contract.output import Usage
from penstock.gateway.stream.dialect import AnswerHead, WholeEncoder
from penstock.producer.openai.embeddings import list_tail
from penstock.producer.openai.scores import list_head
from penstock.queue.results import PackedOutput, PackedResult


class RowEncoder(WholeEncoder):
    """The base of encoders for requests whose jobs return a row of numbers for each text, or for each pair."""

    def __init__(self, head: AnswerHead) -> None:
        self.answer = head
        self.num_texts = 0

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the parts of the answer that follow from the texts of job `index`."""
        if result.output is None:
            raise InvariantError(f"the result of job {result.job_id} has no output")
        found = result.output.entities()
        for entities in found:
            yield self.entities_part(self.num_texts, entities, result.output)
            self.num_texts += 1
        for values in () if found else result.output.rows():
            yield from self.row_parts(self.num_texts, values, result.output)
            self.num_texts += 1

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the end of the list, and the usage of all jobs."""
        return list_tail(usages)

    @property
    def list_head(self) -> bytes:
        """The part before the list of vLLM's answers."""
        created_s = self.answer.created_s
        return list_head(self.answer.job_ids[0], created_s, self.answer.model)

    def entities_part(self, index: int, entities: list[dict[str, Any]], output: PackedOutput) -> bytes:
        """Return the part of the answer that follows from what a model of token labels found in text `index`."""
        raise InvariantError(f"this answer has no place for labels of tokens: {output.kind}")

    @abstractmethod
    def row_parts(self, index: int, values: array[float], output: PackedOutput) -> Iterator[bytes]:
        """Yield the parts of the answer that follow from the row of text or pair `index`."""
