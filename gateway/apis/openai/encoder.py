"""Answers of OpenAI's chats and completions: token chunks as server-sent events, and whole answers as JSON in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import to_json

from penstock.contract.output import Chunk, Usage, WaitUpdate
from penstock.gateway.stream.dialect import AnswerHead, ChunkEncoder, Dialect, StreamEncoder, WholeEncoder, event_id
from penstock.gateway.stream.writer import DONE, event
from penstock.producer.openai.bodies import ECHO_ALONE
from penstock.producer.openai.json_parts import TokenIds, json_parts
from penstock.producer.openai.render import ChatRenderer, CompletionRenderer, Renderer, finish_reason_of, is_cut
from penstock.producer.parsing.parsed_text import PLAIN, AnswerReader, ParsedText
from penstock.queue.results import PackedResult

# Encoding of OpenAI's answers: token chunks as server-sent events, and whole answers as JSON in parts.
#
# The events of one choice differ only in numbers and text, so the rest of the event is rendered once and reused.

_MARK_ID = "\ue000"
_MARK_TEXT = "\ue001"
"""Characters from Unicode's private-use area, used as placeholders for the id and text of an event."""
_END = b"}\n\n"
"""The end of an event."""


class _Frame(NamedTuple):
    """The constant bytes of an event: before the numbers of its id, between these and the text, and after the text.

    Without event ids, the first part is empty. If each event has the usage, the last part ends before it.
    """

    head: bytes
    middle: bytes
    tail: bytes


class _OpenAIEncoder(ChunkEncoder):
    """The base of both encoders."""

    __slots__ = ("_has_ids", "_has_usage", "_indices", "_num_prompt_tokens", "_renderer")

    def __init__(self, renderer: Renderer, head: AnswerHead) -> None:
        super().__init__(head.cut_at)
        self._renderer = renderer
        self._indices = head.indices
        self._has_ids = head.event_ids
        self._has_usage = bool(head.options.get("continuous_usage_stats"))
        # Of one request.
        self._num_prompt_tokens: dict[str, int] = {}
        """Job → tokens of its prompt, if each event has the usage."""

    def waiting(self, job_id: str, update: WaitUpdate) -> bytes:
        """Return the event with a waiting job's queue position or prompt progress."""
        return event(self._renderer.waiting_piece(self._indices[job_id], update))

    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return the event with the usage, if the caller asked for it, and the stream's last line."""
        return (event(self._renderer.last_piece(usages)) if self._renderer.includes_usage else b"") + DONE

    def _encoded(self, piece: dict[str, Any], chunk: Chunk, *, is_first_of_two: bool = False) -> bytes:
        """Return the event with this piece of this chunk."""
        if self._has_usage:
            piece["usage"] = self._usage_so_far(chunk)
        if not self._has_ids:
            return event(piece)
        return event(piece, event_id(chunk, self._progress, is_first_of_two=is_first_of_two))

    def _note_prompt(self, chunk: Chunk) -> None:
        if chunk.num_prompt_tokens is not None:
            self._num_prompt_tokens[chunk.job_id] = chunk.num_prompt_tokens

    def _usage_so_far(self, chunk: Chunk) -> dict[str, int]:
        """Return the tokens of the prompt, and those of this chunk's choice so far."""
        num_prompt = self._num_prompt_tokens.get(chunk.job_id, 0)
        is_of_prompt = chunk.prompt_logprobs or self._renderer.echoes_alone
        num_completion = 0 if is_of_prompt else chunk.position + len(chunk.token_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }


class SseEncoder(_OpenAIEncoder):
    """Encodes the chunks of one answer as events, for answers that need only the text.

    A chunk without text or finish reason gives no event.
    Encoding raises StreamDivergedError if the log no longer contains the position `cut_at`.
    """

    __slots__ = ("_frames", "_has_one_job", "_has_position", "_is_bare")

    def __init__(self, renderer: Renderer, head: AnswerHead) -> None:
        super().__init__(renderer, head)
        self._is_bare = not self._has_ids and not self._has_usage
        self._has_position = self._has_ids or head.cut_at is not None
        """Whether anything depends on how many tokens came before."""
        self._has_one_job = len(head.job_ids) == 1
        # Of one request.
        self._frames: dict[int | tuple[str, int], _Frame | None] = {}
        """By choice, and by job if there are several."""

    def _event_of(self, chunk: Chunk) -> bytes:
        if self._has_position and not self._progress.is_new(chunk):
            return b""
        key: int | tuple[str, int] = chunk.choice if self._has_one_job else (chunk.job_id, chunk.choice)
        if chunk.text and chunk.finish_reason is None:
            frame = self._frames.get(key)
            if frame is not None:
                text = to_json(chunk.text, ensure_ascii=True)
                return frame.middle + text + frame.tail if self._is_bare else self._framed(frame, text, chunk)
        self._note_prompt(chunk)
        finish_reason = finish_reason_of(chunk.finish_reason)
        if not chunk.text and finish_reason is None:
            return b""
        rendered = self._encoded(self._piece(chunk, chunk.text, finish_reason), chunk)
        if key not in self._frames:
            # The first event of a choice differs in shape, so the frame is built after it.
            self._frames[key] = self._frame_of(chunk)
        return rendered

    def _framed(self, frame: _Frame, text: bytes, chunk: Chunk) -> bytes:
        numbers = b"%d:%d" % (chunk.index, self._progress.num_tokens) if self._has_ids else b""
        usage = b',"usage":' + to_json(self._usage_so_far(chunk)) + _END if self._has_usage else b""
        return b"".join((frame.head, numbers, frame.middle, text, frame.tail, usage))

    def _piece(self, chunk: Chunk, text: str, finish_reason: str | None) -> dict[str, Any]:
        return self._renderer.piece(self._indices[chunk.job_id], chunk.choice, ParsedText(text), finish_reason)

    def _frame_of(self, chunk: Chunk) -> _Frame | None:
        """Return the constant bytes of a choice's events, or None if they contain a placeholder character.

        The model's name, for example, may contain one.
        """
        piece = self._piece(chunk, _MARK_TEXT, None)
        if self._has_usage:
            piece.pop("usage", None)
        rendered = event(piece, f"{chunk.job_id}:{_MARK_ID}" if self._has_ids else "")
        if self._has_usage:
            rendered = rendered.removesuffix(_END)
        head, *rest = rendered.split(_MARK_ID.encode()) if self._has_ids else (b"", rendered)
        parts = b"".join(rest).split(to_json(_MARK_TEXT, ensure_ascii=True))
        return _Frame(head, *parts) if len(rest) == 1 and len(parts) == 2 else None


class ParsedSseEncoder(_OpenAIEncoder):
    """Encodes the chunks of one answer whose text is parsed, or which has log-probabilities or token ids.

    The parser looks for tool calls and reasoning in a chat. A chunk gives an event only for content that the parser
    has recognized by then.
    """

    def __init__(self, renderer: Renderer, head: AnswerHead) -> None:
        """Create the parsers. A resumed stream is parsed again from its start to restore their state."""
        super().__init__(renderer, head)
        # Of one request.
        self._readers: dict[tuple[str, int], AnswerReader] = {}
        self._have_called: set[tuple[str, int]] = set()
        self._reports_ids = head.params.return_token_ids
        self._shows_prompt = head.params.prompt_logprobs is not None
        # Of one request.
        self._prompt_ids: dict[str, list[int]] = {}
        """Job → the ids of its prompt, if they are reported."""
        self._have_begun: set[tuple[str, int]] = set()
        """(job, choice) of the choices that have reported the ids of their prompt."""

    def _event_of(self, chunk: Chunk) -> bytes:
        index, is_new = self._indices[chunk.job_id], self._progress.is_new(chunk)
        self._note_prompt(chunk)
        piece = None
        if chunk.prompt_logprobs:
            if self._reports_ids:
                ids = self._prompt_ids.setdefault(chunk.job_id, [])
                ids += [entry.token_ids[0] for entry in chunk.prompt_logprobs]
            piece = self._renderer.prompt_piece(index, chunk.prompt_logprobs) if self._shows_prompt else None
        if chunk.text or chunk.finish_reason or chunk.logprobs or (self._reports_ids and chunk.token_ids):
            piece = self._piece_of(chunk, index)
        if not piece or not (is_new or self._progress.lacks_end_of(chunk)):
            return b""
        *first, last = _with_end_apart(piece)
        events = [self._encoded(one, chunk, is_first_of_two=True) for one in first if is_new]
        return b"".join([*events, self._encoded(last, chunk)])

    def _piece_of(self, chunk: Chunk, index: int) -> dict[str, Any] | None:
        key = chunk.job_id, chunk.choice
        reader = self._readers.setdefault(key, AnswerReader(self._renderer.form))
        parsed = reader.push(chunk.text)
        if chunk.finish_reason is not None:
            parsed += reader.end(is_cut=is_cut(chunk.finish_reason))
        if any(parsed.calls) and not self._renderer.form.is_named:
            self._have_called.add(key)
        finish_reason = finish_reason_of(chunk.finish_reason, calls=key in self._have_called)
        if not parsed and finish_reason is None and not chunk.logprobs and not self._reports_ids:
            return None
        ids = self._ids_of(chunk) if self._reports_ids else None
        return self._renderer.piece(index, chunk.choice, parsed, finish_reason, chunk.logprobs, ids)

    def _ids_of(self, chunk: Chunk) -> TokenIds:
        """Return the ids that the event of this chunk reports. The first event of a choice or answer has the prompt."""
        key = chunk.job_id, chunk.choice if self._renderer.prompt_ids_in_choices else 0
        if key in self._have_begun:
            return TokenIds(chunk.token_ids)
        self._have_begun.add(key)
        return TokenIds(chunk.token_ids, self._prompt_ids.get(chunk.job_id, []))


def _with_end_apart(piece: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the piece, or two pieces if it has both a part of a tool call and the finish reason.

    OpenAI's API never sends both in one event, and its Python client does not report the end of such a call.
    """
    # An echoed prompt begins several choices in one piece, without tool calls.
    choice = piece["choices"][0]
    if choice["finish_reason"] is None or "tool_calls" not in choice.get("delta", ()):
        return [piece]
    end = {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    return [piece | {"choices": [choice | {"finish_reason": None}]}, piece | {"choices": [end]}]


class OpenAIWholeEncoder(WholeEncoder):
    """Encodes a whole answer. The choices of all results form one list."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._num_choices = 0

    def head(self) -> bytes:
        """Return the members before those of the results."""
        return to_json(self._renderer.whole_head())[:-1]

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the choices of one result. The first result also yields the answer's members about its prompt.

        Empty parts come while a text is parsed.
        """
        if index == 0:
            for name, value in self._renderer.whole_prompt_ids(result).items():
                yield b"," + to_json(name) + b":"
                yield from json_parts(value)
            yield b',"choices":['
        for choice in self._renderer.whole_choices(index, result):
            if choice is None:
                yield b""
                continue
            if self._num_choices:
                yield b","
            yield from json_parts(choice)
            self._num_choices += 1

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the usage, which follows the choices."""
        return b'],"usage":' + to_json(self._renderer.usage(usages)) + b"}"


# OpenAI's chats and completions as dialects of the gateway.


class _OpenAIDialect(Dialect):
    renderer: type[Renderer]

    def needs_whole_log(self, options: Mapping[str, Any]) -> bool:
        """Return whether each event has the usage, since the first chunk alone knows the prompt's tokens."""
        return bool(options.get("continuous_usage_stats"))

    def stream(self, head: AnswerHead) -> StreamEncoder:
        """Return the cheapest encoder that can encode this answer."""
        renderer = self._renderer(head)
        if head.cut_at is not None and not head.replays:
            renderer.mark_resumed()
        needs_details = head.echoes or head.params.needs_token_details
        if head.format == PLAIN and not needs_details and not head.replays:
            return SseEncoder(renderer, head)
        return ParsedSseEncoder(renderer, head)

    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of a whole answer."""
        return OpenAIWholeEncoder(self._renderer(head))

    def _renderer(self, head: AnswerHead) -> Renderer:
        renderer = self.renderer(
            job_id=head.job_ids[0],
            model=head.model,
            created_s=head.created_s,
            params=head.params,
            include_usage=bool(head.options.get("include_usage")),
            form=head.format,
            echoes=head.echoes,
            service_tier=head.options.get("service_tier"),
        )
        renderer.max_total_tokens = head.max_total_tokens
        renderer.echoes_alone = bool(head.options.get(ECHO_ALONE))
        return renderer


class ChatDialect(_OpenAIDialect):
    """Answers of `/v1/chat/completions`."""

    renderer = ChatRenderer


class CompletionDialect(_OpenAIDialect):
    """Answers of `/v1/completions`."""

    renderer = CompletionRenderer
    parses_text = False
