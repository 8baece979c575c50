"""Tokens as OpenAI's objects: pieces of a stream and whole answers, in the two dialects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from penstock.contract.job import Choice, FinishReason, Result, Usage
from penstock.producer.openai.reading import PLAIN, AnswerForm, Said
from penstock.producer.openai.tool_calls import Call

_FINISH_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length"}
"""The other reasons end in an error, and OpenAI has no word for them."""


def finish_reason_of(reason: FinishReason | None, *, has_calls: bool = False) -> str | None:
    """OpenAI's word."""
    if reason == "stop" and has_calls:
        return "tool_calls"
    return None if reason is None else _FINISH_REASONS.get(reason)


def usage_of(usages: Iterable[Usage | None]) -> dict[str, Any]:
    """OpenAI's usage object: the sum over the jobs of one request."""
    used = [u for u in usages if u is not None]
    prompt_tokens = sum(u.prompt_tokens for u in used)
    completion_tokens = sum(u.completion_tokens for u in used)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in used)},
    }


class Renderer:
    """What both dialects share. One for each answer: it knows the answer's head."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    piece_object: ClassVar[str]

    def __init__(
        self,
        *,
        job_id: str,
        model: str,
        created_s: int,
        choices_per_job: int,
        include_usage: bool,
        form: AnswerForm = PLAIN,
    ) -> None:
        self.form = form
        self._job_id = job_id
        self._head = {"id": self.id_prefix + job_id, "created": created_s, "model": model}
        self._tail = {"usage": None} if include_usage else {}
        self._choices_per_job = choices_per_job
        self._begun: set[int] = set()

    def piece(self, job_index: int, choice: int, said: Said, finish_reason: str | None) -> dict[str, Any]:
        """The next piece of one choice of one job; choices count on over the jobs."""
        number = job_index * self._choices_per_job + choice
        is_first = number not in self._begun
        self._begun.add(number)
        piece = self._piece_of(number, said, is_first)
        rendered = {**piece, "index": number, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": self.piece_object, "choices": [rendered], **self._tail}

    def last_piece(self, usages: Iterable[Usage]) -> dict[str, Any]:
        """What follows all choices when the usage was asked for."""
        return {**self._head, "object": self.piece_object, "choices": [], "usage": usage_of(usages)}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer at once."""
        choices = [
            self._whole_choice(job_index * self._choices_per_job + choice.index, choice)
            for job_index, result in enumerate(results)
            for choice in result.choices
        ]
        usage = usage_of(result.usage for result in results)
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}

    def _whole_choice(self, number: int, choice: Choice) -> dict[str, Any]:
        said = self.form.read(choice.text)
        reason = finish_reason_of(choice.finish_reason, has_calls=bool(said.calls))
        return {**self._whole_of(number, said), "index": number, "logprobs": None, "finish_reason": reason}

    def _piece_of(self, number: int, said: Said, is_first: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_of(self, number: int, said: Said) -> dict[str, Any]:
        raise NotImplementedError


class ChatRenderer(Renderer):
    """`/v1/chat/completions`: the first piece of each choice says who speaks."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def _piece_of(self, number: int, said: Said, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.content or (is_first and not said):
            delta["content"] = said.content
        if said.calls:
            delta["tool_calls"] = [{"index": call.index, **self._call(number, call)} for call in said.calls]
        return {"delta": delta}

    def _whole_of(self, number: int, said: Said) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["content"] = said.content or None
            message["tool_calls"] = [self._call(number, call) for call in said.calls]
        return {"message": message}

    def _call(self, number: int, call: Call) -> dict[str, Any]:
        # The same whenever the answer is read. Mistral's chat templates want nine letters and digits.
        call_id = hashlib.blake2b(f"{self._job_id}:{number}:{call.index}".encode()).hexdigest()[:9]
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionRenderer(Renderer):
    """`/v1/completions`: pieces and whole choices look the same."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    piece_object = "text_completion"

    def _piece_of(self, number: int, said: Said, is_first: bool) -> dict[str, Any]:
        return {"text": said.content}

    def _whole_of(self, number: int, said: Said) -> dict[str, Any]:
        return {"text": said.content}
