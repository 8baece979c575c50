"""`POST /v1/responses/compact`: a conversation becomes the user's messages and a summary of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fastapi import Request
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import InvariantError, JobFailedError, PromptTooLongError
from penstock.contract.output import Usage
from penstock.gateway.request.generation import ParsedBody
from penstock.gateway.request.reading import RequestReader
from penstock.gateway.responses.body import CompactBody
from penstock.gateway.responses.compaction import MIN_SUMMARY_TOKENS, sealed, summary_limit
from penstock.gateway.responses.create import ConversationReader, naming_fields
from penstock.gateway.responses.encoder import usage_of
from penstock.gateway.responses.output import OutputReader, reading_of
from penstock.gateway.responses.record import compaction_id, input_item_id, response_id_of
from penstock.gateway.route_doc import NUMBER, TEXT, RouteDoc, list_of, object_of
from penstock.gateway.stream.answer import Answers, WholeAnswer
from penstock.gateway.stream.dialect import AnswerHead, Dialect, StreamEncoder, WholeEncoder
from penstock.gateway.stream.writer import PIECE_BYTES
from penstock.queue.results import PackedResult

_ANSWER = object_of(
    id=TEXT,
    object={"const": "response.compaction"},
    created_at=NUMBER,
    output=list_of({"type": "object"}),
    usage={"type": "object"},
)


class Compact:
    """The ASGI app of the route. The summary is an ordinary job, whose text the answer seals. Nothing is stored."""

    schema = CompactBody
    doc = RouteDoc("Shorten a conversation to the user's messages and a sealed summary of the rest.", _ANSWER)

    def __init__(self, reader: RequestReader, conversations: ConversationReader, answers: Answers) -> None:
        self._reader = reader
        self._conversations = conversations
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        async with self._reader.held(request, self.schema) as body:
            answer = await self._answer_to(request, body)
            del body
        await answer(scope, receive, send)

    async def _answer_to(self, request: Request, body: ParsedBody) -> WholeAnswer:
        generation = replace(self._reader.generation_of(request, body), lowers_max_tokens=True)
        with naming_fields(body):
            conversations = self._conversations.conversations_of(generation.tenant, keeps_user=True)
            _, prompt = await self._conversations.conversation_of(generation, body, conversations)
            key, model = await self._conversations.seal_of(generation)
        max_tokens = summary_limit(prompt.num_text_bytes + prompt.num_tool_bytes)
        params = generation.content.params.model_copy(update={"max_tokens": max_tokens})
        content = replace(generation.content, prompts=[prompt], params=params)
        kept = [(item_id, text.encode()) for item_id, text in body.options["kept"]]
        seal = {"key": key, "tenant": generation.tenant, "model": model}
        options = {"kept": [*conversations.user_items, *kept], "seal": seal}
        plan = self._answers.plan(replace(generation, content=content), CompactionDialect(), options, body.ignored)
        return self._answers.whole(plan)


class CompactionDialect(Dialect):
    """Answers of `/v1/responses/compact`."""

    def stream(self, head: AnswerHead) -> StreamEncoder:
        """Raise InvariantError, because no body of this route asks for a stream."""
        raise InvariantError("a compaction has no stream")

    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of the answer."""
        return CompactionEncoder(head)


class CompactionEncoder(WholeEncoder):
    """Encodes the messages of the user and the sealed summary."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._kept: Sequence[tuple[str, bytes]] = head.options["kept"]
        self._reasoning_share = 0.0

    def head(self) -> bytes:
        """Return nothing: an error must come before the first part."""
        return b""

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the answer up to the usage. Raises what `_summary_of` raises before the first part."""
        job_id = result.job_id
        summary = self._summary_of(result)
        begun = {"id": response_id_of(job_id), "object": "response.compaction", "created_at": self._head.created_s}
        yield to_json(begun)[:-1] + b',"output":['
        for number, (item_id, text) in enumerate(self._kept):
            yield b'{"id":' + to_json(item_id or input_item_id(number, job_id)) + b","
            for at in range(1, len(text), PIECE_BYTES):
                yield text[at : at + PIECE_BYTES]
            yield b","
        content = sealed(summary, **self._head.options["seal"])
        yield to_json({"id": compaction_id(job_id), "type": "compaction", "encrypted_content": content})

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the usage."""
        (usage,) = usages
        used = None if usage is None else usage_of(usage, self._reasoning_share)
        return b'],"usage":' + to_json(used) + b"}"

    def _summary_of(self, result: PackedResult) -> str:
        """Return the summary. Raises PromptTooLongError if none fits, and JobFailedError if there is none."""
        reader = OutputReader(result.job_id, self._head.format)
        for _ in reading_of(result, reader):
            pass
        self._reasoning_share = reader.reasoning_share
        summary = "".join(text for item in reader.items if item.kind == "message" for text in item.texts).strip()
        num_tokens = 0 if result.usage is None else result.usage.completion_tokens
        if reader.finish_reason == "length" and num_tokens < MIN_SUMMARY_TOKENS:
            message = (
                f"input: the conversation leaves {num_tokens} tokens of the model's context, too few for its summary; "
                f"it must leave at least {MIN_SUMMARY_TOKENS}, so leave out its longest items"
            )
            raise PromptTooLongError(message, param="input")
        if not summary:
            message = "the model wrote no summary; the conversation is unchanged, so send it again"
            raise JobFailedError(message, code="no_summary")
        return summary
