"""The endpoints of rows: their bodies, which are those over HTTP without what a row cannot say, and their answers.

A new endpoint has a schema, an answer, and an entry in `ENDPOINTS`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field
from pydantic_core import from_json

from penstock.contract.errors import RequestError
from penstock.contract.fields import BATCH_ROWS, Wire, given_options, only, with_option_fields
from penstock.contract.job import QueueFields, QueueOptions
from penstock.contract.output import Result
from penstock.contract.pool import PoolRecord
from penstock.contract.tasks import GENERATE, SCORE, TextRows
from penstock.producer.anthropic.bodies import SHOWS_THINKING, MessageBody
from penstock.producer.anthropic.message import WholeMessage
from penstock.producer.client.request import answer_format, with_defaults
from penstock.producer.client.text_calls import embeddings_of, scores_of, similarity_of
from penstock.producer.openai.bodies import ECHO_ALONE, ChatBody, CompletionBody
from penstock.producer.openai.embeddings import EmbeddingFields, embedding_parts, embeddings_head, list_tail
from penstock.producer.openai.render import ChatRenderer, CompletionRenderer
from penstock.producer.openai.scores import (
    ClassifyFields,
    RerankFields,
    ScoreFields,
    entity_part,
    label_parts,
    list_head,
    ranked_parts,
    rerank_head,
    score_part,
    shown_entity,
)
from penstock.producer.parsed_body import ParsedBody
from penstock.producer.parsing.parsed_text import PLAIN, AnswerFormat
from penstock.producer.responses.answer import (
    SHOWN_SAMPLING,
    ResponseHead,
    echo_of,
    end_of,
    output_parts,
    response_parts,
)
from penstock.producer.responses.body import ResponseFields
from penstock.producer.responses.conversation import messages_of
from penstock.producer.responses.output import OutputReader
from penstock.producer.responses.tools import CalledTool
from penstock.queue.files.batch import MESSAGES_ENDPOINT

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
EMBEDDINGS_URL = "/v1/embeddings"
RESPONSES_URL = "/v1/responses"
RERANK_URL = "/v1/rerank"
SCORE_URL = "/v1/score"
CLASSIFY_URL = "/v1/classify"


if TYPE_CHECKING:
    _Queued = Wire
else:
    _Queued = with_option_fields(Wire, BATCH_ROWS, QueueFields)


class QueuedRow(_Queued):
    """Fields of a row beside those of its endpoint. A row cannot stream and cannot choose its priority class.

    Durations count from the submission of the row.
    """

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: Annotated[Any, only(None, False)] = None
    service_tier: Annotated[Any, only(None, "auto", "default", "flex")] = None
    # The jobs of rows are background work, which waits for as long as it takes and has no reader.
    max_wait_s: Annotated[Any, only(None)] = None
    return_progress: Annotated[Any, only(None, False)] = None

    @property
    def asked_class(self) -> None:
        """The class that the body asks for: none, because rows are work of the class batch."""
        return None

    def queueing(self) -> QueueOptions:
        """Return how to queue the row's jobs. Raises pydantic's ValidationError."""
        if given := given_options(self, QueueFields, BATCH_ROWS):
            QueueFields.model_validate(given)
        return cast(QueueOptions, given)


class ChatRow(QueuedRow, ChatBody):
    """A body of `/v1/chat/completions`."""

    stream_options: Annotated[Any, only(None)] = None


class CompletionRow(QueuedRow, CompletionBody):
    """A body of `/v1/completions`."""

    stream_options: Annotated[Any, only(None)] = None


class MessageRow(MessageBody, QueuedRow):
    """A body of `/v1/messages`."""

    stream: Annotated[Any, only(None, False)] = None


class EmbeddingRow(QueuedRow, EmbeddingFields):
    """A body of `/v1/embeddings`."""

    channel: Annotated[Any, only(None, False)] = None


class RerankRow(QueuedRow, RerankFields):
    """A body of `/v1/rerank`."""

    channel: Annotated[Any, only(None, False)] = None


class ScoreRow(QueuedRow, ScoreFields):
    """A body of `/v1/score`."""

    channel: Annotated[Any, only(None, False)] = None


class ClassifyRow(QueuedRow, ClassifyFields):
    """A body of `/v1/classify`."""

    channel: Annotated[Any, only(None, False)] = None


class ResponseRow(QueuedRow, ResponseFields):
    """A body of `/v1/responses` whose response is not stored, so it neither continues one nor is continued."""

    store: Annotated[Any, only(None, False)] = None
    background: Annotated[Any, only(None, False)] = None
    previous_response_id: Annotated[Any, only(None)] = None
    stream_options: Annotated[Any, only(None)] = None

    def prompts(self) -> list[list[dict[str, Any]]]:
        """Return a list with the conversation. Raises RequestError for items that stand for stored ones."""
        found = messages_of(self.input)
        if found.references or found.seals:
            message = "input: a row cannot have items of type item_reference or compaction: they stand for stored ones"
            raise RequestError(message, code="unsupported_value", param="input")
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [system + found.messages]

    def options(self) -> dict[str, Any]:
        """Return how to show the response. It ran as work of the class batch."""
        echo = self.echo() | {"store": False, "service_tier": "flex"}
        return {"echo": json.dumps(echo).encode(), "called": self.called()}


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """The results of a row's jobs, one for each prompt."""

    request: ParsedBody
    model: str
    """The model's name, as the answer shows it."""
    results: Sequence[Result]
    record: PoolRecord | None
    """That of the pool, or None if it has gone. Its context is what `max_tokens` was lowered to."""

    @property
    def form(self) -> AnswerFormat:
        """How to parse the text."""
        request = self.request
        return answer_format(request.tool_use, request.params, request.template_kwargs, self.record)

    @property
    def max_total_tokens(self) -> int | None:
        """The most tokens of prompt and output together, to which `max_tokens` is lowered."""
        return (self.record.max_model_len or None) if self.record else None


def _chat(row: AnsweredRow) -> dict[str, Any]:
    return _rendered(ChatRenderer, row, row.form)


def _completion(row: AnsweredRow) -> dict[str, Any]:
    return _rendered(CompletionRenderer, row, PLAIN)


def _rendered(made: type[ChatRenderer | CompletionRenderer], row: AnsweredRow, form: AnswerFormat) -> dict[str, Any]:
    first = row.results[0]
    renderer = made(
        job_id=first.job_id,
        model=row.model,
        created_s=first.submitted_ms // 1000,
        params=row.request.params,
        include_usage=False,
        form=form,
        echoes=row.request.echoes,
    )
    renderer.max_total_tokens = row.max_total_tokens
    renderer.echoes_alone = bool(row.request.options.get(ECHO_ALONE))
    return renderer.whole(row.results)


def _message(row: AnsweredRow) -> dict[str, Any]:
    (result,) = row.results
    shows_thinking, limit = row.request.options[SHOWS_THINKING], row.max_total_tokens
    message = WholeMessage(
        result.job_id, row.model, row.request.params, row.form, shows_thinking=shows_thinking, max_total_tokens=limit
    )
    return message.object_of(result)


def _response(row: AnsweredRow) -> dict[str, Any]:
    (result,), request, options = row.results, row.request, row.request.options
    (choice,) = result.choices
    params = request.params if row.record is None else with_defaults(request.params, row.record)
    learned = {"model": row.model} | {name: getattr(params, name) for name in SHOWN_SAMPLING}
    max_tokens, max_total_tokens = params.max_tokens, row.max_total_tokens
    limits = (max_tokens, max_total_tokens) if max_tokens and max_total_tokens else None
    head = ResponseHead(result.submitted_ms // 1000, echo_of(options["echo"], learned), limits)
    reader = OutputReader(result.job_id, row.form, {name: CalledTool(*called) for name, *called in options["called"]})
    for _ in reader.push(choice.text, choice.finish_reason):
        pass
    end = end_of(head, result.outcome, result.finished_ms // 1000, result.usage, reader)
    return _joined(*response_parts(result.job_id, head, end.members, output_parts(reader.items, choice.logprobs)))


def _embeddings(row: AnsweredRow) -> dict[str, Any]:
    parts = [embeddings_head(row.model)]
    found = (one for result in row.results for one in embeddings_of(result.output))
    for index, embedding in enumerate(found):
        values = array("f", embedding.values)
        parts += embedding_parts(index, values, as_base64=row.request.options["base64"])
    return _joined(*parts, _usage_of(row))


def _rerank(row: AnsweredRow) -> dict[str, Any]:
    options, documents = row.request.options, cast("list[str]", [*row.request.prompts[1:]])
    ranked = ranked_parts(_scores_of(row), documents if options["has_documents"] else None, options["top_n"])
    return _joined(rerank_head(row.results[0].job_id, row.model), *ranked, _usage_of(row))


def _score(row: AnsweredRow) -> dict[str, Any]:
    return _joined(_list_head(row), *(score_part(*one) for one in enumerate(_scores_of(row))), _usage_of(row))


def _scores_of(row: AnsweredRow) -> list[float]:
    """Return the scores of pairs of a row's texts: those that a model gave, or else of their embeddings."""
    outputs = [result.output for result in row.results]
    if all(isinstance(output, TextRows) and output.kind == SCORE for output in outputs):
        return [score for output in outputs for score in scores_of(output)]
    vectors = [embedding.values for output in outputs for embedding in embeddings_of(output)]
    firsts, seconds = vectors[:1] * (len(vectors) - 1), vectors[1:]
    if row.request.options.get("pairs"):
        firsts, seconds = vectors[::2], vectors[1::2]
    kind = "cosine" if row.record is None else row.record.similarity
    return [similarity_of(first, second, kind) for first, second in zip(firsts, seconds, strict=True)]


def _classify(row: AnsweredRow) -> dict[str, Any]:
    parts, at = [_list_head(row)], 0
    for result in row.results:
        output = cast("TextRows", result.output)
        for found in output.entities:
            parts.append(entity_part(at, [shown_entity(one) for one in found], len(output.labels)))
            at += 1
        for values in () if output.entities else output.rows:
            parts += label_parts(at, array("f", values), output.labels)
            at += 1
    return _joined(*parts, _usage_of(row))


def _list_head(row: AnsweredRow) -> bytes:
    first = row.results[0]
    return list_head(first.job_id, first.submitted_ms // 1000, row.model)


def _usage_of(row: AnsweredRow) -> bytes:
    return list_tail([result.usage for result in row.results])


def _joined(*parts: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = from_json(b"".join(parts))
    return answer


@dataclass(frozen=True, slots=True)
class RowEndpoint:
    """What rows of an endpoint ask, and what they get."""

    schema: type[QueuedRow]
    answer_of: Callable[[AnsweredRow], dict[str, Any]]
    """Returns the answer over HTTP. The same results always give the same object."""
    kinds: tuple[str, ...] = (GENERATE,)
    """The kinds of jobs that can answer them, the best one first."""
    texts_field: str = ""
    """The field with a row's texts, where each text becomes a job, or each few texts."""


ENDPOINTS = {
    CHAT_URL: RowEndpoint(ChatRow, _chat),
    COMPLETIONS_URL: RowEndpoint(CompletionRow, _completion),
    EMBEDDINGS_URL: RowEndpoint(EmbeddingRow, _embeddings, ("embed",), "input"),
    RERANK_URL: RowEndpoint(RerankRow, _rerank, (SCORE, "embed"), "documents"),
    SCORE_URL: RowEndpoint(ScoreRow, _score, (SCORE, "embed"), "text_2"),
    CLASSIFY_URL: RowEndpoint(ClassifyRow, _classify, ("classify",), "input"),
    RESPONSES_URL: RowEndpoint(ResponseRow, _response),
    MESSAGES_ENDPOINT: RowEndpoint(MessageRow, _message),
}
"""By the url that a row names."""
