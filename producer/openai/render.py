"""Tokens as OpenAI's objects: pieces of a stream and whole answers, in the two dialects.

Log-probabilities of a prompt stand once in an answer, in the prompt's first choice.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from penstock.contract.job import Choice, FinishReason, Result, SamplingParams, Usage
from penstock.contract.logprobs import TokenLogprobs
from penstock.producer.openai.json_parts import Rows, Text, plain
from penstock.producer.openai.logprobs import (
    CompletionTokens,
    PromptEcho,
    ShownText,
    chat_logprobs,
    prompt_logprobs,
    whole_chat_logprobs,
    whole_completion_logprobs,
)
from penstock.producer.openai.parsed_text import PLAIN, AnswerFormat, ParsedText
from penstock.producer.openai.tool_calls import Call
from penstock.queue.packed_result import PackedChoice, PackedResult

_FINISH_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length"}
"""The other reasons end in an error, and OpenAI has no word for them."""

AnyResult = Result | PackedResult
AnyChoice = Choice | PackedChoice


class Chained:
    """Rows of one kind before those of another."""

    def __init__(self, *parts: Iterable[TokenLogprobs]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return chain.from_iterable(self._parts)


def finish_reason_of(reason: FinishReason | None, *, calls: bool = False) -> str | None:
    """OpenAI's word; `calls`: the choice ended by calls of its own choosing."""
    if reason == "stop" and calls:
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
        params: SamplingParams,
        include_usage: bool,
        form: AnswerFormat = PLAIN,
        echoes: bool = False,
    ) -> None:
        """`echoes`: the text begins with the prompt."""
        self.form = form
        self._job_id = job_id
        self._head = {"id": self.id_prefix + job_id, "created": created_s, "model": model}
        self._tail = {"usage": None} if include_usage else {}
        self._params = params
        self._echoes = echoes
        self._begun: set[int] = set()
        self._prompts: defaultdict[int, ShownText] = defaultdict(ShownText)

    def go_on(self) -> None:
        """The answer's only choice began in a stream of before."""
        self._begun.add(0)

    def piece(
        self,
        job_index: int,
        choice: int,
        said: ParsedText,
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> dict[str, Any]:
        """The next piece of one choice of one job; choices count on over the jobs."""
        rendered = self._piece_choice(job_index, choice, said, finish_reason, logprobs)
        return {**self._head, "object": self.piece_object, "choices": [rendered], **self._tail}

    def prompt_piece(self, job_index: int, prompt: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens of a job's prompt: as text at the head of each choice if it is echoed, else beside the first.

        Their log-probabilities stand in the prompt's first choice alone.
        """
        first = job_index * self._params.n
        if not self._echoes:
            piece = self._piece_choice(job_index, 0, ParsedText(""), None, ())
            piece["prompt_logprobs"] = [*prompt_logprobs(prompt)]
            return {**self._head, "object": self.piece_object, "choices": [piece], **self._tail}
        said = ParsedText(self._prompts[job_index].take_text(prompt))
        shown = prompt if self._params.logprobs is not None else ()
        choices = [self._piece_choice(job_index, 0, said, None, shown)]
        for choice in range(1, self._params.n):
            self._skip(first + choice, shown)
            choices.append(self._piece_choice(job_index, choice, said, None, ()))
        return {**self._head, "object": self.piece_object, "choices": choices, **self._tail}

    def _piece_choice(
        self,
        job_index: int,
        choice: int,
        said: ParsedText,
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprobs],
    ) -> dict[str, Any]:
        number = job_index * self._params.n + choice
        is_first = number not in self._begun
        self._begun.add(number)
        piece = self._piece_of(number, said, is_first)
        likely = self._logprobs_of(number, logprobs)
        return {**piece, "index": number, "logprobs": likely, "finish_reason": finish_reason}

    def last_piece(self, usages: Iterable[Usage]) -> dict[str, Any]:
        """What follows all choices when the usage was asked for."""
        return {**self._head, "object": self.piece_object, "choices": [], "usage": usage_of(usages)}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer at once."""
        usage = usage_of(result.usage for result in results)
        choices = [
            plain(choice) for index, result in enumerate(results) for choice in self.whole_choices(index, result)
        ]
        return {**self.whole_head(), "choices": choices, "usage": usage}

    def whole_head(self) -> dict[str, Any]:
        """What stands before the choices of a whole answer; `choices` and `usage` follow it."""
        return {**self._head, "object": self.whole_object}

    def whole_choices(self, job_index: int, result: AnyResult) -> Iterator[dict[str, Any]]:
        """The choices of one job of a whole answer; what is large in them is made when it is written."""
        echo = PromptEcho(result.prompt_logprobs if self._echoes else ())
        for choice in result.choices:
            whole = self._whole_choice(job_index * self._params.n + choice.index, choice, echo)
            if choice.index == 0 and result.prompt_logprobs and not self._echoes:
                whole["prompt_logprobs"] = Rows(partial(prompt_logprobs, result.prompt_logprobs))
            yield whole

    def _whole_choice(self, number: int, choice: AnyChoice, echo: PromptEcho) -> dict[str, Any]:
        said = self.form.read(choice.text)
        reason = finish_reason_of(choice.finish_reason, calls=bool(said.calls) and not self.form.is_named)
        likely = self._whole_logprobs_of(choice, echo) if choice.logprobs else None
        return {**self._whole_of(number, said, echo), "index": number, "logprobs": likely, "finish_reason": reason}

    def _skip(self, number: int, entries: Sequence[TokenLogprobs]) -> None:
        """Tokens of a choice's text whose log-probabilities are not shown."""

    def _whole_logprobs_of(self, choice: AnyChoice, echo: PromptEcho) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs_of(self, number: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _piece_of(self, number: int, said: ParsedText, is_first: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_of(self, number: int, said: ParsedText, echo: PromptEcho) -> dict[str, Any]:
        raise NotImplementedError


class ChatRenderer(Renderer):
    """`/v1/chat/completions`: the first piece of each choice says who speaks."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def _piece_of(self, number: int, said: ParsedText, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.content or (is_first and not said):
            delta["content"] = said.content
        if said.calls:
            delta["tool_calls"] = [{"index": call.index, **self._call(number, call)} for call in said.calls]
        return {"delta": delta}

    def _whole_of(self, number: int, said: ParsedText, echo: PromptEcho) -> dict[str, Any]:
        content = Text(lambda: (said.content,))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["content"] = content if said.content else None
            message["tool_calls"] = [self._call(number, call) for call in said.calls]
        return {"message": message}

    def _logprobs_of(self, number: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(entries)

    def _whole_logprobs_of(self, choice: AnyChoice, echo: PromptEcho) -> dict[str, Any]:
        return whole_chat_logprobs(choice.logprobs)

    def _call(self, number: int, call: Call) -> dict[str, Any]:
        # The same whenever the answer is read. Mistral's chat templates want nine letters and digits.
        call_id = hashlib.blake2b(f"{self._job_id}:{number}:{call.index}".encode()).hexdigest()[:9]
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionRenderer(Renderer):
    """`/v1/completions`: pieces and whole choices look the same."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    piece_object = "text_completion"

    def __init__(self, **head: Any) -> None:
        super().__init__(**head)
        self._tokens: defaultdict[int, CompletionTokens] = defaultdict(CompletionTokens)

    def _logprobs_of(self, number: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return self._tokens[number].take(entries)

    def _whole_logprobs_of(self, choice: AnyChoice, echo: PromptEcho) -> dict[str, Any]:
        if choice.index:
            return whole_completion_logprobs(choice.logprobs, len(echo))
        return whole_completion_logprobs(Chained(echo.entries, choice.logprobs), 0)

    def _skip(self, number: int, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            self._tokens[number].skip(entry)

    def _piece_of(self, number: int, said: ParsedText, is_first: bool) -> dict[str, Any]:
        return {"text": said.content}

    def _whole_of(self, number: int, said: ParsedText, echo: PromptEcho) -> dict[str, Any]:
        return {"text": Text(lambda: chain(echo.parts(), (said.content,)))}
