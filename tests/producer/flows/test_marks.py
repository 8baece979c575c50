"""Marks in prompts: what they name, and that the texts in their places are never read again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.errors import RequestError
from penstock.producer.flows.marks import (
    MAX_FILLED_BYTES,
    Mark,
    answer_text,
    filled,
    mark_of,
    marks_in,
    shown,
    value_at,
)


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("a.text", Mark("a")),
        ("a.b.text", Mark("a.b")),
        ("row 7.text", Mark("row 7")),
        ("*.text", Mark("*")),
        ("item", Mark("item")),
        ("item.json.name", Mark("item", ("name",))),
        ("a.json", Mark("a", ())),
        ("a.json.list[12].x", Mark("a", ("list", 12, "x"))),
        ("a.json[0][1]", Mark("a", (0, 1))),
        ("a", None),
        ("a.texts", None),
        ("a.json.", None),
        ("a.json[x]", None),
        (".text", None),
    ],
)
def test_marks_name_a_row_and_a_place(text: str, mark: Mark | None) -> None:
    assert mark_of(text) == mark
    found = [one for _, one in marks_in({"prompt": f"x {{{{{text}}}}} y {{{{ {text} }}}}"})]
    assert found == ([] if mark is None else [mark, mark])


def test_every_text_of_a_prompt_is_filled_and_nothing_else() -> None:
    body = {
        "model": "{{a.text}}",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one {{a.text}}{{b.text}}"}]}],
        "prompt": "{{ a.text }} {{x}} {a.text} {{}}",
        "instructions": ["{{a.text}}", 7, None],
    }
    assert filled(body, lambda mark: f"<{mark.name}>") == {
        "model": "{{a.text}}",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one <a><b>"}]}],
        "prompt": "<a> {{x}} {a.text} {{}}",
        "instructions": ["<a>", 7, None],
    }


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["{{a.text}}", "{{b.text}}", "{{", "}}", "a.text", "{previous}", "\n", "x"]), max_size=6)
)
def test_a_text_in_the_place_of_a_mark_is_not_read_again(pieces: list[str]) -> None:
    written = "".join(pieces)
    assert filled({"prompt": "{{a.text}}|{{b.text}}"}, lambda _: written) == {"prompt": f"{written}|{written}"}


def test_the_filled_texts_of_a_row_have_a_limit() -> None:
    half = "ä" * (MAX_FILLED_BYTES // 4)
    assert len(filled({"prompt": "{{a.text}}{{b.text}}"}, lambda _: half)["prompt"]) == 2 * len(half)
    with pytest.raises(RequestError) as caught:
        filled({"prompt": "{{a.text}}{{b.text}}{{c.text}}"}, lambda _: half)
    assert caught.value.code == "filled_text_too_long" and str(MAX_FILLED_BYTES) in caught.value.message


@settings(max_examples=30, deadline=None)
@given(
    st.recursive(
        st.integers(-9, 9) | st.text(max_size=4) | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        max_leaves=8,
    ),
    st.lists(st.sampled_from("abc") | st.integers(0, 3), max_size=3),
    st.booleans(),
)
def test_a_path_finds_what_python_finds(value: Any, path: list[str | int], is_fenced: bool) -> None:
    text = f"```json\n{json.dumps(value)}\n```" if is_fenced else json.dumps(value)
    mark, wanted, is_there = Mark("a", tuple(path)), value, True
    for step in path:
        is_there = is_there and isinstance(wanted, list if isinstance(step, int) else dict)
        is_there = is_there and (step in wanted if isinstance(step, str) else step < len(wanted))
        wanted = wanted[step] if is_there else None
    if is_there:
        assert value_at(mark, text) == wanted
        return
    with pytest.raises(RequestError) as caught:
        value_at(mark, text)
    assert caught.value.code == "path_not_found" and str(mark) in caught.value.message


def test_a_text_that_is_no_json_has_no_path() -> None:
    with pytest.raises(RequestError, match="is not JSON"):
        value_at(Mark("a", ("b",)), "Of course! Here is the list:")
    assert [shown(one) for one in ("x", 1, [1, "ä"], None)] == ["x", "1", '[1,"ä"]', "null"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"choices": [{"text": "a"}]}, "a"),
        ({"choices": [{"message": {"content": "b"}}]}, "b"),
        ({"choices": [{"message": {"content": None, "tool_calls": []}}]}, None),
        (
            {
                "object": "response",
                "output": [
                    {"type": "reasoning"},
                    {"type": "message", "content": [{"type": "output_text", "text": "c"}]},
                ],
            },
            "c",
        ),
        ({"type": "message", "content": [{"type": "thinking"}, {"type": "text", "text": "d"}]}, "d"),
        ({"object": "list", "data": [{"embedding": [1.0]}]}, None),
        (7, None),
    ],
)
def test_the_text_of_an_answer(body: Any, text: str | None) -> None:
    assert answer_text(body) == text
