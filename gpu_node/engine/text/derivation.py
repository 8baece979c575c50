"""Derivation of a format of tool calls from the differences between renderings, for templates that no record fits.

The same chats are rendered with no argument, two texts, a number, and two calls. Where these texts differ stand names,
keys and values; what stays the same between them are marks. Several cuts may explain a text, so each kind yields
candidates, of which the trial chats of `recognition.py` choose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.contract.tool_formats import CDATA, DERIVED, FENCE, FENCE_END, ToolFormat

FIRST, SECOND = "probe_fn_w1", "other_fn_w2"
IDS = ("abcdefgh1", "abcdefgh2")
"""The ids of the first and the second call of a message."""
_KEYS = ("alpha_k1", "beta_k2")
_TEXTS = ("one v1", "two v2")
_NUMBER = 734159
TEXTS: Mapping[str, Any] = dict(zip(_KEYS, _TEXTS, strict=True))
NUMBER: Mapping[str, Any] = {_KEYS[0]: _NUMBER}
_ID = "\0"
"""Stands for the id of a call."""
_MIN_MARK_CHARS = 3
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template writes of an assistant's message, without the marks around messages."""

    texts: str
    """One call with the arguments TEXTS."""
    two: str | None
    """The same call, and one of the second function with the same arguments; None: the template refuses it."""
    number: str | None
    """One call with the argument NUMBER."""
    empty: str | None
    """One call without arguments."""


def candidates(rendered: Rendered) -> Iterator[ToolFormat]:
    """Yield the formats that may explain what a template renders."""
    one = replace(rendered, texts=_without_ids(rendered.texts))
    one = replace(one, two=None if one.two is None else _without_ids(one.two))
    found = (form for of_kind in (_json, _named, _tagged, _expressions) for form in of_kind(one))
    seen = set[ToolFormat]()
    for form in found:
        if form not in seen and _has_mark(form):
            seen.add(form)
            yield form


def _without_ids(text: str) -> str:
    for call_id in IDS:
        text = text.replace(call_id, _ID)
    return text


def _has_mark(form: ToolFormat) -> bool:
    """Whether the mark before the calls can be told from words. Without one, only a position would tell a call."""
    first = min(form.beginnings, key=len, default="").strip()
    return len(first) >= _MIN_MARK_CHARS and not re.fullmatch(r"[\w\s]*", first) and _ID not in "".join(form.marks)


# The marks around calls.


@dataclass(frozen=True, slots=True)
class _Around:
    """The text before the first call, between two calls, and behind the last one."""

    before: str
    between: str | None
    after: str


def _framed(around: _Around) -> Iterator[dict[str, Any]]:
    """Yield the marks of lists and calls by which the texts around calls can be explained, the most likely first."""
    before, between, after = around.before, around.between, around.after
    is_list = before.rstrip().endswith("[") and after.lstrip().startswith("]")
    if is_list:
        inner = _Around(before.rstrip()[:-1], between, after.lstrip()[1:])
        yield from _listed(inner)
    if between is None:
        padding = _blank_end(before)
        yield _marks(call=before, call_end=after) | {"padding": padding, "between": padding}
        return
    for call in _ends_in_both(before, between):
        ends = _begins_in_both(after, between[: len(between) - len(call)])
        for call_end in reversed(ends) if ends[0] == "" else ends:
            rest = between[len(call_end) : len(between) - len(call)]
            section, section_end = before[: len(before) - len(call)], after[len(call_end) :]
            padding = _blank_end(before)
            framed = _marks(section, section_end, call, call_end) | {"padding": padding, "between": rest}
            if section.strip():
                yield framed
            elif call.strip():
                yield from _split_frames(call, call_end, rest)
                outer = call_end.rstrip()
                yield framed | {"between": call_end[len(outer) :] + rest + call[: len(call) - len(call.lstrip())]}
    yield _marks(before, after) | {"padding": _blank_end(before), "between": between}


def _listed(around: _Around) -> Iterator[dict[str, Any]]:
    section, section_end = around.before.strip(), around.after.strip()
    listed: dict[str, Any] = {"is_list": True, "between": ", " if around.between is None else around.between}
    if section.endswith(FENCE) and section_end.startswith(FENCE_END):
        fenced = _marks(section.removesuffix(FENCE), section_end.removeprefix(FENCE_END))
        yield fenced | listed | {"is_fenced": True}
    yield _marks(section, section_end) | listed


def _split_frames(call: str, call_end: str, rest: str) -> Iterator[dict[str, Any]]:
    """Yield the marks of calls of which each stands in a list of its own."""
    opening = re.match(r"(\s*\S*?[>\]}|:])(\s*)(\S.*)\Z", call, re.DOTALL)
    closing = re.match(r"(.*?[>\]}|:])(\s*)(\S+\s*)\Z", call_end, re.DOTALL)
    if opening and closing:
        marks = _marks(opening[1], closing[3], opening[3], closing[1])
        blank = call_end[len(call_end.rstrip()) :] + rest + call[: len(call) - len(call.lstrip())]
        yield marks | {"section_per_call": True, "padding": opening[2], "between": blank}


def _marks(section: str = "", section_end: str = "", call: str = "", call_end: str = "") -> dict[str, Any]:
    found = {"section": section, "section_end": section_end, "call": call, "call_end": call_end}
    return {name: mark.strip() for name, mark in found.items()}


def _blank_end(text: str) -> str:
    return text[len(text.rstrip()) :]


_OPENS = frozenset("<[{(\u25c1\u3010\u27e8\u00ab\u300a\u300c")
_CLOSES = frozenset(">]})\u25b7\u3011\u27e9\u00bb\u300b\u300d")
"""The characters with which marks begin and end, as far as any do."""


_MAX_CUTS = 5
"""Places in a text that two renderings share at which a mark may begin or end."""


def _ends_in_both(one: str, other: str) -> list[str]:
    """Return the ends that two texts share: those that begin like marks, the longest first, then the whole end."""
    longest = _common_end(one, other)
    found = [longest[i:] for i, char in enumerate(longest) if char in _OPENS or char.isspace()]
    return list(dict.fromkeys((*found[:_MAX_CUTS], longest)))


def _begins_in_both(one: str, other: str) -> list[str]:
    """Return the beginnings that two texts share: those that end like marks, the longest first, then the others."""
    longest = common_start(one, other)
    found = [longest[: i + 1] for i, char in enumerate(longest) if char in _CLOSES or char.isspace()]
    return list(dict.fromkeys((*found[: -_MAX_CUTS - 1 : -1], longest) if found else ("", longest)))


def common_start(one: str, other: str) -> str:
    """Return the beginning that two texts share."""
    num_shared = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return one[:num_shared]


def _common_end(one: str, other: str) -> str:
    return common_start(one[::-1], other[::-1])[::-1]


# JSON objects.


def _json(rendered: Rendered) -> Iterator[ToolFormat]:
    first = _object_in(rendered.texts, FIRST, 0)
    if first is None:
        return
    keys: dict[str, Any] = {"name_key": first.name_key, "arguments_key": first.arguments_key}
    for framed in _framed(_around_objects(rendered, first)):
        yield ToolFormat(DERIVED, "json", **framed, **keys)


@dataclass(frozen=True, slots=True)
class _Object:
    start: int
    end: int
    name_key: str
    arguments_key: str


def _object_in(text: str, name: str, at: int) -> _Object | None:
    """Return the JSON object of a call."""
    while (at := text.find("{", at)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        keys = {key for key, one in value.items() if one == name}
        arguments = {key for key, one in value.items() if one == TEXTS}
        if len(keys) == len(arguments) == 1:
            return _Object(at, end, *keys, *arguments)
        at += 1
    return None


def _around_objects(rendered: Rendered, first: _Object) -> _Around:
    text, two = rendered.texts, rendered.two
    between = None
    if two is not None and (one := _object_in(two, FIRST, 0)) and (other := _object_in(two, SECOND, one.end)):
        between = two[one.end : other.start]
    return _Around(text[: first.start], between, text[first.end :])


# A name, then a JSON object.


def _named(rendered: Rendered) -> Iterator[ToolFormat]:
    text = rendered.texts
    first = _named_in(text, FIRST, 0)
    if first is None:
        return
    start, head, end = first
    between, other_head = None, head
    if rendered.two is not None and (one := _named_in(rendered.two, FIRST, 0)):
        other = _named_in(rendered.two, SECOND, one[2])
        if other is not None:
            between, other_head = rendered.two[one[2] : other[0]], other[1]
    ending = _ending_of(head, other_head)
    for framed in _framed(_Around(text[:start], between, text[end:])):
        call, has_id, id_end = framed["call"].partition(_ID)
        before = {"call": call, "id_end": id_end} if has_id else {}
        yield ToolFormat(DERIVED, "named", **framed | before | ending)


def _named_in(text: str, name: str, at: int) -> tuple[int, str, int] | None:
    """Return where a name begins, what stands between it and its arguments, and where these end."""
    start = text.find(name, at)
    brace = text.find("{", start)
    while start >= 0 and brace >= 0:
        try:
            value, end = _DECODER.raw_decode(text, brace)
        except ValueError:
            value, end = None, 0
        if value == TEXTS:
            return start, text[start + len(name) : brace], end
        brace = text.find("{", brace + 1)
    return None


def _ending_of(head: str, other: str) -> dict[str, Any]:
    """Return the marks between a name and its arguments. Numbers of calls differ between both."""
    one, two = (re.match(r"(\D+)(\d+)(.*)\Z", text, re.DOTALL) for text in (head, other))
    if one and two and one[2] != two[2] and (one[1], one[3]) == (two[1], two[3]):
        return {"number_mark": one[1], "name_end": one[3]}
    mark, has_id, end = head.partition(_ID)
    return {"id_mark": mark, "name_end": end} if has_id else {"name_end": head}


# Tagged arguments and expressions: each argument has its own name and value.


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The texts around the name, the keys and the values of calls."""

    before: str
    """Up to the name."""
    name_to_key: str
    key_to_value: str
    value_to_key: str
    after_value: str
    """Behind the last value."""
    value_to_name: str | None
    """Between the last value of a call and the next call's name."""
    key_to_number: str
    after_name: str
    """Behind the name, in a call without arguments."""
    number_mark: str = ""
    """Between the name and the number of the call. The others of these texts begin behind the number."""


def _pieces_of(rendered: Rendered) -> _Pieces | None:
    if rendered.number is None or rendered.empty is None:
        return None
    key, other = _KEYS
    words = (FIRST, key, _TEXTS[0], other, _TEXTS[1])
    cut = _cut(rendered.texts, words)
    number = _cut(rendered.number, (FIRST, key, str(_NUMBER)))
    empty = _cut(rendered.empty, (FIRST,))
    if cut is None or number is None or empty is None or cut[2] != cut[4]:
        return None
    two = None if rendered.two is None else _cut(rendered.two, (*words, SECOND, key))
    before, to_key, to_value, to_next_key, _, after = cut
    to_name = None if two is None else two[5]
    pieces = _Pieces(before, to_key, to_value, to_next_key, after, to_name, number[2], empty[1])
    ending = None if two is None else _ending_of(cut[1], two[6])
    if ending is None or "number_mark" not in ending:
        return pieces
    num_chars = len(cut[1]) - len(ending["name_end"])
    return replace(
        pieces, name_to_key=cut[1][num_chars:], after_name=empty[1][num_chars:], number_mark=ending["number_mark"]
    )


def _cut(text: str, words: tuple[str, ...]) -> list[str] | None:
    """Return what stands before, between and behind words; None if they are not there in this order."""
    parts = list[str]()
    for word in words:
        before, found, text = text.partition(word)
        if not found:
            return None
        parts.append(before)
    return [*parts, text]


def _tagged(rendered: Rendered) -> Iterator[ToolFormat]:
    cut = _pieces_of(rendered)
    if cut is None:
        return
    more: dict[str, Any] = {"number_mark": cut.number_mark}
    if _KEYS[0] in cut.value_to_key:
        cut, more = _without_end_keys(cut), more | {"ends_with_key": True}
    for name_end in _begins_in_both(cut.name_to_key, cut.after_name):
        argument = cut.name_to_key[len(name_end) :]
        if not argument.strip() or not cut.value_to_key.endswith(argument):
            continue
        value_end = cut.value_to_key[: len(cut.value_to_key) - len(argument)]
        more |= {"name_end": name_end.strip(), "argument": argument.strip(), "padding": _blank_end(value_end)}
        yield from _tagged_with(cut, value_end.rstrip(), more)


def _without_end_keys(cut: _Pieces) -> _Pieces:
    """Return the texts without the keys that are repeated behind values."""

    def without(text: str, key: str) -> str:
        return text.replace(key + cut.key_to_value, "", 1)

    return replace(
        cut,
        value_to_key=without(cut.value_to_key, _KEYS[0]),
        after_value=without(cut.after_value, _KEYS[1]),
        value_to_name=cut.value_to_name and without(cut.value_to_name, _KEYS[1]),
    )


def _tagged_with(cut: _Pieces, end: str, marks: dict[str, Any]) -> Iterator[ToolFormat]:
    """Yield formats whose values end with a mark."""
    if not end.strip() or not cut.after_value.startswith(end):
        return
    between = None if cut.value_to_name is None else cut.value_to_name[len(end) :]
    around = _Around(cut.before, between, cut.after_value[len(end) :])
    for keyed in _key_marks(cut.key_to_value, cut.key_to_number, end):
        last = "value" if keyed["value"] else "key_end"
        if end.startswith("\n") and keyed[last].endswith("\n"):
            keyed |= {"has_newlines": True, "value_end": end[1:], last: keyed[last].removesuffix("\n")}
        for framed in _framed(around):
            yield ToolFormat(DERIVED, "tagged", **framed | keyed | marks)


_WORDS_OF_TYPES = (("true", ("false",), "tells_text"), ("string", ("number", "integer", "object"), "tells_type"))


def _key_marks(text: str, number: str, end: str) -> Iterator[dict[str, Any]]:
    """Yield the marks between a key and a value, by those before a text and before a number, and the value's end."""
    if text == number:
        parts = re.match(r"(.*?[>\]}|:])\s*([<\[{].*)\Z", text, re.DOTALL)
        if parts:
            yield {"key_end": parts[1], "value": parts[2], "value_end": end}
        yield {"key_end": text, "value": "", "value_end": end}
    if text == number + CDATA[0] and end.startswith(CDATA[1]):
        yield {"key_end": number, "value": "", "value_end": end.removeprefix(CDATA[1]), "has_cdata": True}
    for word, others, tells in _WORDS_OF_TYPES:
        key_end, found, value = text.partition(word)
        if found and number in [key_end + other + value for other in others]:
            yield {"key_end": key_end, "value": value, "value_end": end, tells: True}


_CLOSING = {"(": ")", "{": "}", "[": "]", "<": ">"}
_QUOTES = ('"', "'")


def _expressions(rendered: Rendered) -> Iterator[ToolFormat]:
    cut = _pieces_of(rendered)
    if cut is None or not cut.name_to_key or not cut.key_to_value.startswith(cut.key_to_number):
        return
    assigns, mark = cut.key_to_number, cut.key_to_value[len(cut.key_to_number) :]
    closing = _CLOSING.get(cut.name_to_key[-1])
    if not mark or closing is None or not cut.value_to_key.startswith(mark) or not cut.after_value.startswith(mark):
        return
    after = cut.after_value[len(mark) :]
    if not after.startswith(closing):
        return
    between = None if cut.value_to_name is None else cut.value_to_name[len(mark) + len(closing) :]
    marks = {"name_end": cut.name_to_key, "arguments_end": closing, "assigns": assigns}
    marks |= {"comma": cut.value_to_key[len(mark) :], "text_mark": "" if mark in _QUOTES else mark}
    for framed in _framed(_Around(cut.before, between, after[len(closing) :])):
        yield ToolFormat(DERIVED, "expressions", **framed | marks | {"padding": ""})
