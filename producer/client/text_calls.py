"""Calls for many texts: embeddings, the order of documents for a query, and labels."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from operator import mul, sub
from typing import Any, Protocol, cast

from penstock.contract.errors import InvariantError, PenstockError, RequestError
from penstock.contract.pool import PoolRecord, notice_of
from penstock.contract.tasks import Classification, Embed, Embedding, Ranked, Score, TaskOutput, TextRows
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.many import GenerateOptions, Runs, Submit
from penstock.producer.client.pool_choice import NOT_ABLE
from penstock.producer.client.request import Prompt
from penstock.producer.client.tasks import (
    ClassifyOptions,
    EmbedOptions,
    RerankOptions,
    submit_classify,
    submit_embed,
    submit_score,
)
from penstock.producer.client.text_jobs import TextJob, require_no_own_limits, score_jobs, text_jobs

NUMBERED = re.compile(r"prompt\[(\d+)\]")
"""How a node names one of several texts of a job."""
_OF_PAIRS = "raw", "max_tokens_per_query", "max_tokens_per_doc"
"""Options of `rerank` for models that score pairs."""


class ServedPools(Protocol):
    """A client's `served_pool`."""

    def __call__(self, model: str | None, *, kind: str) -> Awaitable[PoolRecord]:
        """Return the pool of a model that can run jobs of a kind."""


class TextCalls:
    """The calls of a client for many texts."""

    def __init__(self, runs: Runs, submit: Submit, served_pool: ServedPools) -> None:
        self._runs = runs
        self._submit = submit
        self._served_pool = served_pool

    async def embed(self, prompts: Sequence[Prompt], options: EmbedOptions) -> list[Embedding]:
        """Return the embeddings of prompts in their order. If one job fails, the others are canceled.

        Warns if the model's files do not say that it is for embeddings. Python shows that once in a process.
        """
        _require_list(prompts, "prompts")
        wanted = cast("dict[str, Any]", submit_embed(options))
        record = await self._record(options.get("model"), "embed")
        jobs = text_jobs(prompts, wanted.pop("task"), 1 if record is None else record.texts_per_job)
        outputs = await self._outputs(jobs, wanted)
        notice = ""
        with suppress(PenstockError):
            notice = notice_of(await self._served_pool(options.get("model"), kind="embed"), Embed())
        if notice:
            warnings.warn(notice, stacklevel=3)
        return [one for output in outputs for one in embeddings_of(output)]

    async def classify(self, texts: Sequence[str], options: ClassifyOptions) -> list[Classification]:
        """Return the labels of texts in their order. If one job fails, the others are canceled."""
        _require_list(texts, "texts")
        wanted = cast("dict[str, Any]", submit_classify(options))
        record = await self._record(options.get("model"), "classify")
        jobs = text_jobs(texts, wanted.pop("task"), 1 if record is None else record.texts_per_job)
        return [one for output in await self._outputs(jobs, wanted) for one in classifications_of(output)]

    async def rerank(self, query: str, documents: Sequence[str], options: RerankOptions) -> list[Ranked]:
        """Return the documents by how well they fit a query, the best first."""
        _require_list(documents, "documents")
        top_n = options.get("top_n")
        if top_n is not None and (type(top_n) is not int or top_n < 1):
            raise RequestError(f"top_n must be a whole number from 1, not {top_n!r}", param="top_n")
        of_jobs = {name: value for name, value in options.items() if name != "top_n"}
        record = await self._scoring(options.get("model"))
        if record is not None and "score" in record.kinds:
            wanted = cast("dict[str, Any]", submit_score(of_jobs))
            task: Score = wanted.pop("task")
            with _naming_documents(0):
                outputs = await self._outputs(score_jobs(query, documents, task, record.texts_per_job), wanted)
            scores = [score for output in outputs for score in scores_of(output)]
        else:
            require_no_own_limits(cast("Score", submit_score(of_jobs)["task"]))
            of_texts = {name: value for name, value in of_jobs.items() if name not in _OF_PAIRS}
            with _naming_documents(1):
                first, *others = await self.embed([query, *documents], cast("EmbedOptions", of_texts))
            kind = "cosine" if record is None else record.similarity
            scores = [similarity_of(first.values, other.values, kind) for other in others]
        order = sorted(range(len(scores)), key=lambda at: -scores[at])
        return [Ranked(at, scores[at]) for at in order[:top_n]]

    async def _scoring(self, model: str | None) -> PoolRecord | None:
        """Return a pool that scores pairs of texts, or else one that embeds. Raises RequestError that names models."""
        try:
            return await self._served_pool(model, kind="score")
        except RequestError as error:
            if error.code != NOT_ABLE:
                raise
        return await self._served_pool(model, kind="embed")

    async def _record(self, model: str | None, kind: str) -> PoolRecord | None:
        """Return the record of a model's pool; None if there is none now, so that the submissions say why."""
        try:
            return await self._served_pool(model, kind=kind)
        except RequestError:
            raise
        except PenstockError:
            return None

    async def _outputs(self, jobs: Sequence[TextJob], options: dict[str, Any]) -> list[TaskOutput]:
        """Run jobs, and return their outputs in their order."""

        async def submit(job: TextJob, **given: Any) -> AsyncJob:
            return await self._submit(job.prompt, task=job.task, **given)

        run = self._runs.new(submit, cast(GenerateOptions, options), in_order=False)
        async with aclosing(run.answers(cast("Sequence[Prompt]", jobs))) as answers:
            found = {answer.index: answer.result.output async for answer in answers}
        return [cast("TaskOutput", found[index]) for index in range(len(found))]


def embeddings_of(output: TaskOutput | None) -> list[Embedding]:
    """Return the embeddings that a job's output has. Raises InvariantError for another output."""
    if isinstance(output, Embedding):
        return [output]
    found = _rows_of(output)
    return [Embedding(row, num_tokens) for row, num_tokens in zip(found.rows, found.num_tokens, strict=True)]


def scores_of(output: TaskOutput | None) -> list[float]:
    """Return the scores of pairs that a job's output has."""
    return [row[0] for row in _rows_of(output).rows]


def classifications_of(output: TaskOutput) -> list[Classification]:
    """Return what a job's output says of each text."""
    found = _rows_of(output)
    if found.entities:
        pairs = zip(found.entities, found.num_tokens, strict=True)
        return [Classification("", {}, num_tokens, entities) for entities, num_tokens in pairs]
    classified = list[Classification]()
    for row, num_tokens in zip(found.rows, found.num_tokens, strict=True):
        scores = dict(zip(found.labels, row, strict=True))
        classified.append(Classification(max(scores, key=lambda label: scores[label]), scores, num_tokens))
    return classified


def similarity_of(first: Sequence[float], second: Sequence[float], kind: str = "cosine") -> float:
    """Return how alike two embeddings are, by the measure that the model's files name (`PoolRecord.similarity`).

    A cosine lies between -1 and 1, and is 0 for a vector of zeros. Distances are negative: the closer, the higher.
    """
    if kind == "euclidean":
        return -math.dist(first, second)
    if kind == "manhattan":
        return -float(sum(map(abs, map(sub, first, second))))
    product = float(sum(map(mul, first, second)))
    if kind == "dot":
        return product
    size = math.hypot(*first) * math.hypot(*second)
    return max(-1.0, min(1.0, product / size)) if size else 0.0


def _rows_of(output: TaskOutput | None) -> TextRows:
    if not isinstance(output, TextRows):
        raise InvariantError(f"the output of a job is a {type(output).__name__}, not rows of texts")
    return output


@contextmanager
def _naming_documents(num_before: int) -> Iterator[None]:
    """Let an error that names one of several texts name the document. `num_before`: the texts before the documents."""
    try:
        yield
    except PenstockError as error:
        if (found := NUMBERED.fullmatch(before := error.param or "")) is not None:
            at = int(found[1]) - num_before
            error.param = "query" if at < 0 else f"documents[{at}]"
            if error.message.startswith(before):
                error.message = error.param + error.message.removeprefix(before)
        raise


def _require_list(texts: object, name: str) -> None:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise RequestError(f"{name} must be a list of texts", param=name)
