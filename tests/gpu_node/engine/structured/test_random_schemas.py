"""Numbers and formats of schemas: no grammar accepts a text that the package jsonschema refuses, and few are lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bench.random_schemas import COUNT, SEED, Campaign, Judge, accepts, compiler_of_bytes
from fakes.cover import FULL

pytest.importorskip("jsonschema")

DATES = ("0001-01-01", "1900-02-28", "2000-02-29", "2024-02-29", "9999-12-31")
NO_DATES = ("0000-01-01", "1900-02-29", "2023-02-29", "2100-02-29", "2023-04-31", "2023-13-01", "2023-1-1")


@pytest.mark.timeout(1800 if FULL else 120)
def test_what_the_grammar_of_a_random_schema_accepts_is_valid() -> None:
    num_schemas = COUNT if FULL else 300
    found = Campaign(SEED).run(num_schemas)
    assert found.failures == [], found.report()
    assert found.num_enforced > num_schemas // 2 and found.num_accepted > num_schemas


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"enum": [1098765432109876543]}, "1098765432109876480"),
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "number", "exclusiveMaximum": 0.1}, "0.09999999999999999999999"),
        ({"type": "number", "multipleOf": 0.1}, "0.25"),
    ],
)
def test_the_judge_of_random_schemas_finds_wrong_texts(schema: Any, text: str) -> None:
    assert Judge(json.dumps(schema)).problem(text)


Case = tuple[Any, list[str], list[str]]
CASES: dict[str, Case] = {
    "int64": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        ["0", "-9223372036854774784", "9223372036854774784", "1098765432109876543"],
        ["9223372036854775808", "-9223372036854775809"],
    ),
    "uint64": ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", "9007199254740993"], ["-1"]),
    "above 2^53": (
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9},
        ["9007199254740994", "9007199254741000"],
        ["9007199254740992", "9007199254741002"],
    ),
    "doubles": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        ["0", "-1.5", "123456789012345678.25"],
        ["1" + "0" * 309],
    ),
    "an open end at a whole number": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        ["0.5", "0.001"],
        ["0", "0.0", "0.6"],
    ),
    "an open end of draft 4": (
        {"type": "number", "minimum": 5, "exclusiveMinimum": True, "maximum": 5.5},
        ["5.25", "5.5"],
        ["5", "5.0"],
    ),
    "digits that a double rounds to the open end": (
        {"type": "number", "exclusiveMaximum": 0.1},
        ["0.0999", "0.09", "-3"],
        ["0.1", "0.09999999999999999999999"],
    ),
    "open ends of both sides": (
        {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 100},
        ["-0.9", "-0.999", "0", "99", "99.9", "99.99", "99.95"],
        ["-1", "-1.0", "100", "100.0", "-0.99999999999999999999", "99.99999999999999999999"],
    ),
    "a bound that begins like the number": (
        {"type": "number", "minimum": 0, "maximum": 0.95},
        ["0.9", "0.90", "0.95", "0.1"],
        ["0.951", "0.96", "-0.1"],
    ),
    "multiples above 2^53": (
        {"type": "number", "minimum": 2**53 + 1, "maximum": 2**60, "multipleOf": 3},
        ["9007199254740996", "900719925474099600"],
        ["9007199254740993", "9007199254740995", "9007199254740996.0"],
    ),
    "multiples of hundredths": ({"type": "number", "multipleOf": 0.07}, ["0.14", "7"], ["0.15", "0.1"]),
    "whole multiples of a fraction": ({"type": "integer", "multipleOf": 1.5}, ["3", "-6"], ["1", "2"]),
    "listed int64": ({"enum": [2**62, {"a": [0.1]}]}, ["4611686018427387904", '{"a": [0.1]}'], ["4611686018427387905"]),
    "sizes with a fraction of zeros": (
        {"type": "string", "minLength": 1.0, "maxLength": 2.0},
        ['"ab"'],
        ['""', '"abc"'],
    ),
    "sizes above uint32": ({"type": "array", "maxItems": 2**64, "items": {"maxLength": 2**63 - 1}}, ['["a"]'], ['"a"']),
    "date": ({"type": "string", "format": "date"}, list(map(json.dumps, DATES)), list(map(json.dumps, NO_DATES))),
    "date-time": (
        {"format": "date-time"},
        [json.dumps(f"{date}T23:59:59.5+23:59") for date in DATES],
        [json.dumps(f"{date}T00:00:00Z") for date in NO_DATES] + ['"2016-12-31T23:59:60Z"'],
    ),
    "time": ({"type": "string", "format": "time"}, ['"23:59:59Z"', '"00:00:00-00:00"'], ['"23:59:60Z"', '"12:00:00"']),
    "a format beside a pattern": (
        {"type": "string", "format": "date", "pattern": "-29$"},
        ['"2024-02-29"', '"2023-03-29"'],
        ['"2023-02-29"', '"2024-02-28"'],
    ),
    "hostname": ({"format": "hostname"}, ['"a.b"'], [json.dumps(".".join(["a" * 62] * 4) + ".bb")]),
}


@pytest.mark.parametrize("name", CASES)
def test_bounds_move_inward_and_no_further(name: str) -> None:
    schema, right, wrong = CASES[name]
    matcher = compiler_of_bytes().matcher("json", json.dumps(schema))
    assert [text for text in right if not accepts(matcher, text)] == []
    assert [text for text in wrong if accepts(matcher, text)] == []


def test_steps_of_several_schemas_that_would_overflow_are_refused_by_name() -> None:
    schema = {"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}], "type": "integer"}
    with pytest.raises(ValueError, match="multipleOf at #: values of several schemas"):
        compiler_of_bytes().matcher("json", json.dumps(schema))
