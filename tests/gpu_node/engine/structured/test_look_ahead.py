"""Look-ahead becomes patterns that match the same texts, or the pattern stays as it is."""

from __future__ import annotations

import itertools
import re

import pytest

from penstock.gpu_node.engine.structured.schema.look_ahead import without_look_ahead

SAID = [
    r"^(?!a)[a-c]{2}$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!\.)(?!.*\.\.)[a\.]*a@([ab]+\.)+[ab]{2,}$",
    r"^(?=.*[a-c])(?=.*\d)[a-z\d]{3,}$",
    r"^(?=.{1,3}$)a+b*$",
    r"^(?=a|b$)[ab]+",
    r"^(?!ab$)[ab]+$",
    r"^(?!.*ab)[abc]*$",
    r"^(?!.*aa)[ab]*$",
    r"^(?!(?:a|bc))[abc]+$",
    r"^(?!b|[^a]c)[abc]+$",
    r"^(?!$)a*$",
    r"^(?![ab]+$)[abc]*$",
    r"^(?!.*[.@])[a.@]*$",
    r"^(?!0$)\d+$",
    r"^(?!\d\d)[\da]+$",
]
TEXTS = [
    "".join(chars)
    for alphabet in ("ab0.", "abc@-")
    for n in range(6)
    for chars in itertools.product(alphabet, repeat=n)
]


@pytest.mark.parametrize("pattern", SAID)
def test_the_patterns_match_the_same_texts(pattern: str) -> None:
    rest, besides = without_look_ahead(pattern)
    assert besides and "(?=" not in rest and not any("(?!" in one for one in besides)
    wanted, found = re.compile(pattern), [re.compile(one) for one in (rest, *besides)]
    for text in TEXTS:
        assert bool(wanted.search(text)) == all(one.search(text) for one in found), text


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)b", "^(?=a)b|c", "^(?!a.c)b", r"^(?!\ba)a", "^(?!a{2})a", "^a(?=b)b", "^(?!a", "^(?!.*abc)a", "a", ""],
)
def test_another_pattern_stays_as_it_is(pattern: str) -> None:
    assert without_look_ahead(pattern) == (pattern, [])
