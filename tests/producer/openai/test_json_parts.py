"""JSON encoded in parts equals the JSON of the whole object."""

from __future__ import annotations

import json
from typing import Any

from fakes.cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from penstock.producer.openai.json_parts import CHARS_PER_PART, ROWS_PER_PART, Items, Rows, Text, json_parts, plain

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
PLAIN = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
LAZY = st.recursive(
    PLAIN,
    lambda inner: (
        st.dictionaries(st.text(), inner)
        | st.lists(inner).map(lambda items: Items(lambda: items))
        | st.lists(PLAIN).map(lambda rows: Rows(lambda: rows))
        | st.lists(st.text()).map(lambda texts: Text(lambda: texts))
    ),
    max_leaves=8,
)


@settings(max_examples=examples(100))
@given(LAZY)
def test_joined_parts_are_the_whole_json(value: Any) -> None:
    whole = to_json(plain(value))
    for _ in range(2):
        assert json.loads(b"".join(json_parts(value))) == json.loads(whole)


def test_parts_are_small() -> None:
    value = {"rows": Rows(lambda: ({"n": n} for n in range(10_000))), "text": Text(lambda: ("é" * 1_000_000,))}
    parts = [*json_parts(value)]
    assert max(map(len, parts)) <= max(2 * CHARS_PER_PART, ROWS_PER_PART * 20)
    assert json.loads(b"".join(parts)) == {"rows": [{"n": n} for n in range(10_000)], "text": "é" * 1_000_000}
