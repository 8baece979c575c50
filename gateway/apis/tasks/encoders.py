"""What encoders of answers share whose jobs have a task: the output of one job, and scores of texts for each other."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence

from penstock.contract.errors import InvariantError
from penstock.contract.job import PackedPrompt
from penstock.contract.output import Usage
from penstock.contract.tasks import SCORE
from penstock.gateway.stream.dialect import AnswerHead, WholeEncoder
from penstock.gateway.stream.rows import RowEncoder
from penstock.producer.client.request import Prompt
from penstock.producer.client.text_calls import similarity_of
from penstock.queue.results import PackedOutput, PackedResult
from penstock.queue.wire import unpack_all


class OneJobEncoder(WholeEncoder):
    """Encodes the output of a request's only job."""

    def __init__(self, head: AnswerHead) -> None:
        pass

    def head(self) -> bytes:
        """Return nothing: the output is the whole answer."""
        return b""

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the parts of the answer."""
        if result.output is None:
            raise InvariantError(f"the result of job {result.job_id} has no output")
        return self.output_parts(result.output)

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return nothing."""
        return b""

    @abstractmethod
    def output_parts(self, output: PackedOutput) -> Iterator[bytes]:
        """Yield the parts of the answer."""


class ComparedEncoder(RowEncoder):
    """The base of answers with scores of texts for each other: of pairs, or else of their embeddings."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._first = array("f")
        """The embedding that the next ones are compared with."""
        self._num_scores = 0

    def row_parts(self, index: int, values: array[float], output: PackedOutput) -> Iterator[bytes]:
        # An empty part lets the writer serve other requests: each comparison takes part of a millisecond.
        yield b""
        if output.kind == SCORE:
            score = values[0]
        elif index % 2 == 0 if self.answer.options.get("pairs") else index == 0:
            self._first = values
            return
        else:
            score = similarity_of(self._first, values, self.answer.similarity)
        yield from self.score_parts(self._num_scores, score)
        self._num_scores += 1

    @abstractmethod
    def score_parts(self, at: int, score: float) -> Iterator[bytes]:
        """Yield the parts of the answer that follow from the score at `at`."""


def text_of(prompt: Prompt) -> str:
    """Return the text of a prompt, which the parser process may have packed."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, PackedPrompt):
        raise InvariantError("a document is not a text")
    (text,) = unpack_all(prompt.data)
    return str(text)
