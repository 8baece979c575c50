"""The JSON of calls is checked as the doors check theirs, and no check holds an event loop for long."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.calls.checking import MAX_CONTAINERS, object_of, value_of
from penstock.contract.calls.writing import written_calls
from penstock.contract.tool_formats import BY_NAME, FALLBACK, FORMATS, ToolFormat
from penstock.contract.tools import json_of
from penstock.producer.parsing.parsed_text import AnswerFormat, joined
from penstock.runtime.process_memory import no_collection

_pieces = st.sampled_from(
    [
        *"[]{},:-.1",
        '"a"',
        '"\\ud83d\\ude00"',
        '"\\ud83d"',
        '"\\\\ud83d"',
        '"\\\\\\ud83d"',
        "\ud83d",
        "1e400",
        "-1e400",
        "1e100",
        "0.5",
        "9" * 310 + ".0",
        '"1e400"',
        "NaN",
        "Infinity",
        "null",
        " ",
    ]
)


def accepts(text: str) -> bool:
    try:
        json_of(text)
    except ValueError:
        return False
    return True


@given(st.lists(_pieces, max_size=6).map("".join) | st.lists(_pieces, max_size=4).map(lambda one: f"[{','.join(one)}]"))
def test_a_check_refuses_what_the_doors_refuse(text: str) -> None:
    try:
        value_of(text)
    except ValueError:
        assert not accepts(text)
    else:
        assert accepts(text)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "1", ""])
def test_what_is_no_object_or_too_deep_is_none(text: str) -> None:
    assert object_of(text) is None


def test_brackets_inside_strings_are_no_lists() -> None:
    inside = '\\"[{' * MAX_CONTAINERS
    assert object_of(f'{{"a": "{inside}"}}') is not None
    assert object_of('{"a": [' + ",".join(["[]"] * MAX_CONTAINERS) + "]}") is None


_SIZE = 1 << 20
_MAX_HELD_S, _MAX_WHOLE_S = 0.05, 1.0
_DEEP = "[" * 400 + "]" * 400


def long_texts(form: ToolFormat) -> Iterator[str]:
    """Yield texts of a megabyte that are much work for a reader: marks, brackets, numbers, texts without end."""
    call = written_calls(form, [("f", {"text": "a", "parts": [1]})])
    mark, head, tail = form.section or form.call, call[: call.index("1")], call[call.index("1") + 1 :]
    if mark:
        yield mark * (_SIZE // len(mark))
        yield mark + " \n" * (_SIZE // 2)
    yield call[: call.index("1") + 1] * (_SIZE // len(call))
    yield call * (_SIZE // len(call))
    for values in ("[" * _SIZE, '{"a":' * (_SIZE // 5), "<" * _SIZE):
        yield head + values
    for values in (
        ",".join([_DEEP] * (_SIZE // 801)),
        ",".join([_DEEP] * 320) + ", 1" * (_SIZE // 4),
        ",".join(["1.5"] * (_SIZE // 4)),
        ",".join(["None"] * (_SIZE // 6)),
        '"' + "\\n" * (_SIZE // 2) + '"',
    ):
        yield head + values + tail


def times_of(form: ToolFormat, text: str) -> tuple[float, float]:
    """Return the CPU time of the longest part between two of which an event loop runs other tasks, and that of all."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    parts, longest_s, start_s = [], 0.0, time.process_time()
    began_s = start_s
    for more in AnswerFormat(form, functions=json.dumps(tools)).parts_of(text):
        parts += more
        now_s = time.process_time()
        longest_s, began_s = max(longest_s, now_s - began_s), now_s
    joined(parts)
    end_s = time.process_time()
    return max(longest_s, end_s - began_s), end_s - start_s


def check_held(form: ToolFormat, text: str) -> None:
    with no_collection():  # A gateway freezes what it has loaded, and full collections are rare.
        times = [times_of(form, text) for _ in range(3)]
    assert min(held_s for held_s, _ in times) < _MAX_HELD_S, text[:100]
    assert min(whole_s for _, whole_s in times) < _MAX_WHOLE_S, text[:100]


@pytest.mark.parametrize("name", ["hermes", "glm45"])
def test_a_megabyte_of_nested_values_holds_no_event_loop(name: str) -> None:
    form = BY_NAME[name]
    call = written_calls(form, [("f", {"text": "a", "parts": [1]})])
    check_held(form, call.replace("1", ",".join([_DEEP] * 320)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FORMATS, FALLBACK.name])
def test_a_megabyte_of_anything_holds_no_event_loop(name: str) -> None:
    for text in long_texts(BY_NAME[name]):
        check_held(BY_NAME[name], text)
