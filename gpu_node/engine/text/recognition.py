"""Recognition of a model's tool calls by trial chats: a format counts only if it reads back what is rendered."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.contract.calls.messages import MessageReader
from penstock.contract.calls.reader import reader_of
from penstock.contract.calls.reading import Call
from penstock.contract.errors import RequestError, TooCostlyError, UnavailableError
from penstock.contract.tool_formats import FALLBACK, FORMATS, ToolFormat, tokens_in
from penstock.contract.tools import GENERATION_PROMPT
from penstock.gpu_node.engine.text import derivation
from penstock.gpu_node.engine.text.chat import ChatTemplate
from penstock.gpu_node.engine.text.repairs import NO_REFUSALS, Refusals, repaired_calls

_NAME, _OTHER = "find_trains_q7", "list_stations_q8"
_TYPES = {"city": "string", "days": "integer", "exact": "boolean", "tags": "array", "note": "string"}
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Find.", "parameters": parameters}}
    for name, parameters in (
        (
            _NAME,
            {
                "type": "object",
                "properties": {key: {"type": kind, "description": "A value."} for key, kind in _TYPES.items()},
                "required": ["city"],
            },
        ),
        (_OTHER, {"type": "object", "properties": {}}),
    )
]
_VALUES = {
    "city": 'Zürich "北京" <b>',
    "days": 3,
    "exact": True,
    "tags": ["q9", {"k": [1.5, True]}],
    "note": "two\nlines",
}
_FULL, _EMPTY = (_NAME, _VALUES), (_OTHER, dict[str, Any]())
_QUESTION, _SAID, _RESULT = "Which trains q1?", "I look them up q2.", "The 8:15 q3."
_LEAST_MARK_CHARS = 7
"""A format without any longer mark is not recognized by its marks alone."""
_TRIALS: tuple[tuple[tuple[tuple[str, Mapping[str, Any]], ...], str], ...] = (
    ((_FULL,), ""),
    ((_EMPTY,), ""),
    ((_FULL, _EMPTY), ""),
    ((_FULL,), _SAID),
)
"""Calls and the text before them. The first one must be rendered; others that the template refuses do not count."""


OfferedAs = Literal["tools", "functions", "xml_tools", "message"]
"""A variable with tools, with functions as JSON text, or with functions; or a member of the system message with them as
JSON text."""
_PLACES: tuple[OfferedAs, ...] = ("functions", "xml_tools", "message")


@dataclass(frozen=True, slots=True)
class ToolUseOfTemplate:
    """How a chat template is used for tools: what it does itself, and what the node writes into the messages."""

    form: ToolFormat
    reason: str
    """Why this format was chosen."""
    offers_tools: bool = True
    """Whether the template tells the model of the tools."""
    shows_calls: bool = True
    """Whether it shows the calls of earlier messages."""
    shows_results: bool = True
    """Whether it shows messages of the role `tool`."""
    has_system_role: bool = True
    offered_as: OfferedAs = "tools"
    """Where the template finds the tools."""

    def offer(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None, dict[str, Any]]:
        """Return the messages, tools and further variables with which the template offers tools."""
        return offered(messages, tools, self.offered_as)


def offered(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], place: OfferedAs
) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None, dict[str, Any]]:
    """Return the messages, tools and further variables that put tools where a template finds them."""
    kept = [dict(one) for one in messages]
    functions = [tool["function"] for tool in tools]
    if place == "functions":
        return kept, None, {"functions": json.dumps(functions, ensure_ascii=False)}
    if place == "xml_tools":
        return kept, None, {"xml_tools": functions}
    if place == "message":
        if kept[0]["role"] != "system":
            kept.insert(0, {"role": "system", "content": ""})
        kept[0]["tools"] = json.dumps(functions, ensure_ascii=False)
        return kept, None, {}
    return kept, tools, {}


def recognized(
    template: ChatTemplate, added_tokens: Collection[str], override: str | None = None, refusals: Refusals = NO_REFUSALS
) -> ToolUseOfTemplate:
    """Return how to use a template for tools. `override`: the name of a format that the operator gave. `refusals`: what
    the template was seen to refuse.

    Raises ConfigError if the template does not compile.
    """
    trials = _Trials(template, refusals)
    takes_tools = template.takes_tools or trials.find_place()
    texts = trials.texts() if takes_tools else []
    forced = None if override is None else {**FORMATS, FALLBACK.name: FALLBACK}[override]
    if forced is not None and not forced.is_told and takes_tools:
        shows = bool(texts) and _NAME in texts[0][1]
        return trials.used(forced, f"--tool-parser {override}", shows_calls=shows)
    if forced is None and texts:
        if _NAME not in texts[0][1]:
            form = _by_marks(template, added_tokens)
            if form is not None:
                return trials.used(form, "the marks in the template and its tokens", shows_calls=False)
        elif (form := _best(texts)) is not None:
            return trials.used(form, "reads back the calls that the template renders", shows_calls=True)
        elif (form := trials.derived(texts)) is not None:
            why = "derived from what the template renders; no known format reads it back"
            return trials.used(form, why, shows_calls=True)
    why = f"--tool-parser {override}" if forced else "no known format reads back what the template renders"
    why = why if takes_tools or forced else "the template takes no tools"
    return trials.told(replace(forced or FALLBACK, is_told=True), why)


def _by_marks(template: ChatTemplate, added_tokens: Collection[str]) -> ToolFormat | None:
    """Return the format all of whose marks are special tokens, if the template names one of them or has them all."""
    for form in FORMATS.values():
        marks = [mark for mark in (form.section, form.section_end, form.call, form.call_end, form.name_end) if mark]
        marks = [part for mark in marks for part in tokens_in(mark) if len(part.strip()) > 2]
        if form.is_bare or form.header or not any(len(mark) > _LEAST_MARK_CHARS for mark in marks):
            continue
        if all(mark in template.source or mark in added_tokens for mark in marks):
            return form
    return None


def _best(texts: Sequence[tuple[int, str, str]]) -> ToolFormat | None:
    """Return the format that reads the trials' calls back and leaves the least of the texts as plain text."""
    return _least_left(FORMATS.values(), texts)


def _least_left(forms: Iterable[ToolFormat], texts: Sequence[tuple[int, str, str]]) -> ToolFormat | None:
    left = {form: num_left for form in forms if (num_left := _num_left(form, texts)) is not None}
    return min(left, key=left.__getitem__) if left else None


def _num_left(form: ToolFormat, texts: Sequence[tuple[int, str, str]]) -> int | None:
    """Return the characters of all trials that are plain text by a format; None if it does not read the calls back."""
    num_left = 0
    for trial, text, answer in texts:
        calls, said = _TRIALS[trial]
        reader = reader_of(form, json.dumps(_TOOLS))
        found: dict[int, Call] = {}
        plain, thought, shown = "", "", answer if form.is_bare or form.header else text
        if form.header:
            messages = MessageReader(form)
            (thought, shown), (_, rest) = messages.push(shown), messages.end()
            shown += rest
        for part in (*reader.push(shown), *reader.end()):
            if isinstance(part, str):
                plain += part
            else:
                found[part.index] = found.get(part.index, Call(part.index)) + part
        is_whole = all(call.end == "whole" for call in found.values())
        if not is_whole or [(one.name, json.loads(one.arguments)) for one in found.values()] != list(calls):
            return None
        is_lost = said in text and said not in plain + thought
        if is_lost or any(word in plain for word in (_NAME, _OTHER, "Zürich", "q9")):
            return None
        num_left += len(plain)
    return num_left


class _Trials:
    """Renders the trial chats of a template."""

    def __init__(self, template: ChatTemplate, refusals: Refusals) -> None:
        self._template, self._refusals = template, refusals
        self._place: OfferedAs = "tools"

    def find_place(self) -> bool:
        """Find where a template without a variable `tools` takes them from. Return whether it takes any."""
        question: list[dict[str, Any]] = [{"role": "system", "content": _SAID}, {"role": "user", "content": _QUESTION}]
        for place in _PLACES:
            if ("tools" if place == "message" else place) in self._template.source:
                self._place = place
                if _NAME in (self._rendered(question, _TOOLS, begins_answer=True) or ""):
                    return True
        self._place = "tools"
        return False

    def _repaired(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        # Several calls stay in one message: their template refuses this trial, which then does not count.
        return repaired_calls([message], replace(self._refusals, several_calls=False))

    def texts(self) -> list[tuple[int, str, str]]:
        """Return for each accepted trial its number, the text after the question, and that after the answer's begin."""
        question = [{"role": "user", "content": _QUESTION}]
        begin = self._rendered(question, _TOOLS, begins_answer=True)
        found = list[tuple[int, str, str]]()
        for number, (calls, said) in enumerate(_TRIALS):
            text = self._rendered([*question, *self._repaired(_message(calls, said))], _TOOLS)
            if text is None and number == 0:
                return []
            after = "" if text is None else text.rpartition(_QUESTION)[2]
            # Some templates show only one call of a message.
            if text is None or (number and not all(name in after for name, _ in calls)):
                continue
            answer = text[len(begin) :] if begin is not None and text.startswith(begin) else ""
            found.append((number, after, answer))
        return found

    def derived(self, texts: Sequence[tuple[int, str, str]]) -> ToolFormat | None:
        """Return the format that explains what the template writes, if the trials' calls can be read back by it."""
        opening, closing = self._frame()

        def written(*calls: tuple[str, Mapping[str, Any]]) -> str | None:
            question = {"role": "user", "content": _QUESTION}
            text = self._rendered([question, *self._repaired(_message(calls, ""))], _TOOLS)
            if text is None:
                return None
            after = text.rpartition(_QUESTION)[2]
            shared = len(derivation.common_start(after, opening))
            return after[shared:].removesuffix(closing)

        of_texts = written((derivation.FIRST, derivation.TEXTS))
        if of_texts is None:
            return None
        rendered = derivation.Rendered(
            of_texts,
            written((derivation.FIRST, derivation.TEXTS), (derivation.SECOND, derivation.TEXTS)),
            written((derivation.FIRST, derivation.NUMBER)),
            written((derivation.FIRST, {})),
        )
        return _least_left(derivation.candidates(rendered), texts)

    def _frame(self) -> tuple[str, str]:
        """Return what stands before and behind the text of an answer."""
        question = {"role": "user", "content": _QUESTION}
        text = self._rendered([question, {"role": "assistant", "content": _SAID}], _TOOLS) or ""
        opening, _, closing = text.rpartition(_QUESTION)[2].partition(_SAID)
        return opening, closing

    def used(self, form: ToolFormat, reason: str, *, shows_calls: bool) -> ToolUseOfTemplate:
        """Return how to use a template that offers tools itself."""
        asked: list[dict[str, Any]] = [{"role": "user", "content": _QUESTION}]
        asked += self._repaired(_message((_FULL,), "")) if shows_calls else [{"role": "assistant", "content": _SAID}]
        shows = self._shows_result(asked, _TOOLS)
        return ToolUseOfTemplate(form, reason, True, shows_calls, shows, self._has_system_role(), self._place)

    def told(self, form: ToolFormat, reason: str) -> ToolUseOfTemplate:
        """Return how to use a template to which the node tells the tools."""
        asked = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _SAID}]
        return ToolUseOfTemplate(form, reason, False, False, self._shows_result(asked, None), self._has_system_role())

    def _shows_result(self, asked: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
        result = {"role": "tool", "content": _RESULT, "tool_call_id": "abcdefgh1", "name": _NAME}
        return _RESULT in (self._rendered([*asked, result], tools, begins_answer=True) or "")

    def _has_system_role(self) -> bool:
        chat = [{"role": "system", "content": _SAID}, {"role": "user", "content": _QUESTION}]
        return _SAID in (self._rendered(chat, None, begins_answer=True) or "")

    def _rendered(
        self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, begins_answer: bool = False
    ) -> str | None:
        try:
            variables: dict[str, Any] = {} if begins_answer else {GENERATION_PROMPT: False}
            if tools is not None:
                chat, given, more = offered(chat, tools, self._place)
                return self._template.render(chat, given, variables | more)
            return self._template.render(chat, None, variables)
        except TooCostlyError:
            raise  # It would take as long again.
        except (RequestError, UnavailableError):
            return None


def _message(calls: Sequence[tuple[str, Mapping[str, Any]]], said: str) -> dict[str, Any]:
    written = [
        {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls, 1)
    ]
    return {"role": "assistant", "content": said, "tool_calls": written}
