"""Look-ahead becomes patterns that match the same texts, or the pattern stays as it is."""

from __future__ import annotations

import itertools
import re
from decimal import Decimal

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


DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"


def test_zods_durations_are_the_same_texts() -> None:
    rest, besides = without_look_ahead(DURATION)
    assert not besides and "(?=" not in rest
    for parts in itertools.product(
        ("", "1Y"), ("", "2M"), ("", "3D"), ("", "4W"), ("", "T"), ("", "5H"), ("", "6M"), ("", "7.5S")
    ):
        text = "P" + "".join(parts)
        assert bool(re.search(DURATION, text)) == bool(re.search(rest, text)), text


@pytest.mark.parametrize(("digits", "places"), [(6, 2), (3, 3), (2, 4), (5, 0), (4, None), (1, None)])
def test_pydantics_decimals_keep_to_their_digits(digits: int, places: int | None) -> None:
    whole = digits if places is None else max(0, digits - places)
    tail = r"\d*\.\d*" if places is None else rf"\d{{0,{whole}}}\.\d{{0,{places}}}"
    pattern = rf"^(?!^[-+.]*$)[+-]?0*(?:\d{{0,{whole}}}|(?=[\d.]{{1,{digits + 1}}}0*$){tail}0*$)"
    rest, besides = without_look_ahead(pattern)
    assert not besides and "(?=" not in rest
    matched = 0
    for text in ("".join(chars) for n in range(8) for chars in itertools.product("10.-", repeat=n)):
        if re.search(rest, text):
            matched += 1
            number = Decimal(text).as_tuple()
            assert re.search(pattern, text) and len(number.digits) <= max(digits, 1)
            assert places is None or -int(number.exponent) <= places
    assert matched
