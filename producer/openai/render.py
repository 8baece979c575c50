"""Rendering of results as OpenAI's objects: the pieces of a stream and whole answers, for chats and completions.

An answer contains the log-probabilities of a prompt once, in the prompt's first choice.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from penstock.contract.calls.reading import Call, warning_of
from penstock.contract.job import SamplingParams, lowered_max_tokens
from penstock.contract.output import Choice, FinishReason, Result, TokenLogprobs, Usage, WaitUpdate, members_of
from penstock.producer.openai.json_parts import (
    CompletionTokens,
    PromptEcho,
    Rows,
    ShownText,
    Text,
    TokenIds,
    chat_logprobs,
    plain,
    prompt_ids_of,
    prompt_logprobs,
    whole_chat_logprobs,
    whole_completion_logprobs,
)
from penstock.producer.parsing.parsed_text import PLAIN, AnswerFormat, ParsedText, joined
from penstock.queue.results import PackedChoice, PackedResult

_FINISH_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length"}
"""OpenAI's finish reasons. Jobs with any other reason end in an error."""

AnyResult = Result | PackedResult
AnyChoice = Choice | PackedChoice


class Chained:
    """Several sequences of tokens as one that can be iterated again."""

    def __init__(self, *parts: Iterable[TokenLogprobs]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return chain.from_iterable(self._parts)


def finish_reason_of(reason: FinishReason | None, *, calls: bool = False) -> str | None:
    """Return OpenAI's finish reason. `calls`: the choice holds tool calls that the model itself chose to make."""
    if reason == "stop" and calls:
        return "tool_calls"
    return None if reason is None else _FINISH_REASONS.get(reason)


def is_cut(reason: FinishReason | None) -> bool:
    """Return whether a choice's text might have gone on: a limit ended it, or an error."""
    return reason != "stop"


def usage_of(usages: Iterable[Usage | None]) -> dict[str, Any]:
    """Return OpenAI's usage object, the sum over the jobs of one request."""
    used = [u for u in usages if u is not None]
    prompt_tokens = sum(u.prompt_tokens for u in used)
    completion_tokens = sum(u.completion_tokens for u in used)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in used)},
        "completion_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for u in used)},
    }


def limit_member(
    max_tokens: int | None, max_total_tokens: int | None, usages: Iterable[Usage | None]
) -> dict[str, int]:
    """Return the member of a usage with the limit to which the context lowered `max_tokens`, if it did.

    Of several jobs of one request, it is the smallest limit.
    """
    longest = max((usage.prompt_tokens for usage in usages if usage is not None), default=0)
    lowered = lowered_max_tokens(max_tokens, max_total_tokens, longest)
    return {} if lowered is None else {"max_tokens": lowered}


class Renderer(ABC):
    """Renders one answer. Subclasses implement the two dialects, chats and completions."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    piece_object: ClassVar[str]
    prompt_ids_in_choices: ClassVar[bool] = False
    """Whether each choice holds the token ids of its prompt, rather than the answer."""
    empty_choice: ClassVar[dict[str, Any]]
    """The members of a stream's choice in an event that adds no text to it."""

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
        service_tier: str | None = None,
    ) -> None:
        """`form`: how to parse the text. `echoes`: the text begins with the prompt. `service_tier`: one to report."""
        self.form = form
        self._job_id = job_id
        self._head = {"id": self.id_prefix + job_id, "created": created_s, "model": model}
        if service_tier is not None:
            self._head["service_tier"] = service_tier
        self.includes_usage = include_usage
        self._tail = {"usage": None} if include_usage else {}
        self._params = params
        self.max_total_tokens: int | None = None
        """The most tokens of prompt and output together, to which `max_tokens` of `params` is lowered."""
        self._echoes = echoes
        self.echoes_alone = False
        """Whether the text is the prompt alone: the job's only token is not shown."""
        self._begun: set[int] = set()
        self._prompts: defaultdict[int, ShownText] = defaultdict(ShownText)

    def mark_resumed(self) -> None:
        """Skip what only the first event of a choice has, because an earlier stream has sent it."""
        self._begun.add(0)

    def piece(
        self,
        job_index: int,
        choice: int,
        parsed: ParsedText,
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprobs] = (),
        ids: TokenIds | None = None,
    ) -> dict[str, Any]:
        """Return the next stream object for one choice of one job. `ids` are token ids to report.

        Choices are numbered over all jobs of the request.
        """
        if self.echoes_alone:
            parsed, logprobs, finish_reason = ParsedText(""), (), finish_reason and "length"
            ids = None if ids is None else TokenIds((), ids.of_prompt)
        rendered = self._piece_choice(job_index, choice, parsed, finish_reason, logprobs)
        if ids is None:
            return {**self._head, "object": self.piece_object, "choices": [rendered], **self._tail}
        rendered["token_ids"] = ids.of_choice
        of_prompt = {} if ids.of_prompt is None else {"prompt_token_ids": ids.of_prompt}
        if self.prompt_ids_in_choices:
            rendered |= of_prompt
            of_prompt = {}
        return {**self._head, "object": self.piece_object, **of_prompt, "choices": [rendered], **self._tail}

    def waiting_piece(self, job_index: int, update: WaitUpdate) -> dict[str, Any]:
        """Return the stream object with a waiting job's queue position or prompt progress. Its choice adds no text."""
        number = job_index * self._params.n
        choice = {**self.empty_choice, "index": number, "logprobs": None, "finish_reason": None}
        return {**self._head, "object": self.piece_object, "choices": [choice], **self._tail, **members_of(update)}

    def prompt_piece(self, job_index: int, prompt: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the stream object for the next tokens of a job's prompt.

        If the prompt is echoed, its text begins each choice. Its log-probabilities appear only in the first choice.
        """
        first = job_index * self._params.n
        if not self._echoes:
            piece = self._piece_choice(job_index, 0, ParsedText(""), None, ())
            piece["prompt_logprobs"] = [*prompt_logprobs(prompt)]
            return {**self._head, "object": self.piece_object, "choices": [piece], **self._tail}
        echoed = ParsedText(self._prompts[job_index].take_text(prompt))
        shown = prompt if self._params.logprobs is not None else ()
        choices = [self._piece_choice(job_index, 0, echoed, None, shown)]
        for choice in range(1, self._params.n):
            self._skip(first + choice, shown)
            choices.append(self._piece_choice(job_index, choice, echoed, None, ()))
        return {**self._head, "object": self.piece_object, "choices": choices, **self._tail}

    def _piece_choice(
        self,
        job_index: int,
        choice: int,
        parsed: ParsedText,
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprobs],
    ) -> dict[str, Any]:
        number = job_index * self._params.n + choice
        is_first = number not in self._begun
        self._begun.add(number)
        piece = self._piece_of(number, parsed, is_first)
        rendered = self._logprobs_of(number, logprobs) if logprobs else None
        return {**piece, "index": number, "logprobs": rendered, "finish_reason": finish_reason}

    def usage(self, usages: Sequence[Usage | None]) -> dict[str, Any]:
        """Return the usage of an answer, with the limit of its tokens if the context lowered it."""
        if self.echoes_alone:
            usages = [usage and replace(usage, completion_tokens=0) for usage in usages]
        return usage_of(usages) | limit_member(self._params.max_tokens, self.max_total_tokens, usages)

    def last_piece(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Return the stream object with the usage, which follows all choices if the caller asked for it."""
        return {**self._head, "object": self.piece_object, "choices": [], "usage": self.usage(usages)}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return a whole answer as one plain object."""
        usage = self.usage([result.usage for result in results])
        choices = [
            plain(choice)
            for index, result in enumerate(results)
            for choice in self.whole_choices(index, result)
            if choice is not None
        ]
        of_prompt = {name: plain(ids) for name, ids in self.whole_prompt_ids(results[0]).items()} if results else {}
        return {**self.whole_head(), **of_prompt, "choices": choices, "usage": usage}

    def whole_head(self) -> dict[str, Any]:
        """Return the members of a whole answer that come before `choices` and `usage`."""
        return {**self._head, "object": self.whole_object}

    def whole_prompt_ids(self, result: AnyResult) -> dict[str, Any]:
        """Return the member of a whole answer with the prompt's token ids, if it is not part of the choices."""
        wanted = self._params.return_token_ids and not self.prompt_ids_in_choices
        return {"prompt_token_ids": prompt_ids_of(result)} if wanted else {}

    def whole_choices(self, job_index: int, result: AnyResult) -> Iterator[dict[str, Any] | None]:
        """Yield the choices of one job for a whole answer. Their large members are lazy (see `json_parts`).

        While a text is parsed, which may take long, None is yielded after every few kilobytes.
        """
        echo = PromptEcho(result.prompt_logprobs if self._echoes else ())
        for choice in map(self._shown, result.choices):
            parts = list[ParsedText]()
            for more in self.form.parts_of(choice.text, is_cut=is_cut(choice.finish_reason)):
                parts += more
                yield None
            has_any = choice.logprobs or (self.echoes_alone and self._params.logprobs is not None)
            parsed, number = joined(parts), job_index * self._params.n + choice.index
            whole = {
                **self._whole_of(number, parsed, echo),
                "index": number,
                "logprobs": self._whole_logprobs_of(choice, echo) if has_any else None,
                "finish_reason": finish_reason_of(
                    choice.finish_reason, calls=bool(parsed.calls) and not self.form.is_named
                ),
            }
            if self._params.return_token_ids:
                whole["token_ids"] = Rows(partial(iter, choice.token_ids))
                if self.prompt_ids_in_choices:
                    whole["prompt_token_ids"] = prompt_ids_of(result)
            has_logprobs = self._params.prompt_logprobs is not None and result.prompt_logprobs
            if choice.index == 0 and has_logprobs and not self._echoes:
                whole["prompt_logprobs"] = Rows(partial(prompt_logprobs, result.prompt_logprobs))
            yield whole

    def _shown(self, choice: AnyChoice) -> AnyChoice:
        """Return the choice without its output, if the prompt alone is shown."""
        return Choice(choice.index, "", (), "length") if self.echoes_alone else choice

    @abstractmethod
    def _skip(self, number: int, entries: Sequence[TokenLogprobs]) -> None:
        """Advance a choice's text offset past tokens whose log-probabilities are not shown."""

    @abstractmethod
    def _whole_logprobs_of(self, choice: AnyChoice, echo: PromptEcho) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs_of(self, number: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None: ...

    @abstractmethod
    def _piece_of(self, number: int, parsed: ParsedText, is_first: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _whole_of(self, number: int, parsed: ParsedText, echo: PromptEcho) -> dict[str, Any]: ...


class ChatRenderer(Renderer):
    """Renders answers of `/v1/chat/completions`. The first piece of each choice holds the role."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"
    empty_choice: ClassVar[dict[str, Any]] = {"delta": {}}

    def _piece_of(self, number: int, parsed: ParsedText, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if parsed.reasoning:
            delta["reasoning_content"] = parsed.reasoning
        if parsed.content or (is_first and not parsed):
            delta["content"] = parsed.content
        calls = [call for call in parsed.calls if call.name or call.arguments]
        if calls:
            delta["tool_calls"] = [{"index": call.index, **self._part_of(number, call)} for call in calls]
        return {"delta": delta, **_warnings(parsed)}

    def _whole_of(self, number: int, parsed: ParsedText, echo: PromptEcho) -> dict[str, Any]:
        content = Text(lambda: (parsed.content,))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["content"] = content if parsed.content else None
            message["tool_calls"] = [self._call(number, call) for call in parsed.calls]
        return {"message": message, **_warnings(parsed)}

    def _skip(self, number: int, entries: Sequence[TokenLogprobs]) -> None:
        """Do nothing: a chat's log-probabilities have no text offsets."""

    def _logprobs_of(self, number: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(entries)

    def _whole_logprobs_of(self, choice: AnyChoice, echo: PromptEcho) -> dict[str, Any]:
        return whole_chat_logprobs(choice.logprobs)

    def _part_of(self, number: int, call: Call) -> dict[str, Any]:
        """Return a part of a call. Only the first part of a call has its name and its id."""
        return self._call(number, call) if call.name else {"function": {"arguments": call.arguments}}

    def _call(self, number: int, call: Call) -> dict[str, Any]:
        call_id = call_id_of(self._job_id, number, call.index)
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_id_of(job_id: str, choice: int, number: int) -> str:
    """Return the id of a call by its number, the same in every reading of the answer.

    Mistral's chat templates require nine letters or digits.
    """
    return hashlib.blake2b(f"{job_id}:{choice}:{number}".encode()).hexdigest()[:9]


def _warnings(parsed: ParsedText) -> dict[str, list[str]]:
    warnings = [warning for call in parsed.calls if (warning := warning_of(call)) is not None]
    return {"warnings": warnings} if warnings else {}


class CompletionRenderer(Renderer):
    """Renders answers of `/v1/completions`. Stream pieces and whole choices have the same shape."""

    prompt_ids_in_choices = True
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    piece_object = "text_completion"
    empty_choice: ClassVar[dict[str, Any]] = {"text": ""}

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

    def _piece_of(self, number: int, parsed: ParsedText, is_first: bool) -> dict[str, Any]:
        return {"text": parsed.content}

    def _whole_of(self, number: int, parsed: ParsedText, echo: PromptEcho) -> dict[str, Any]:
        return {"text": Text(lambda: chain(echo.parts(), (parsed.content,)))}
