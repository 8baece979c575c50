"""The error for pydantic's findings names the field as the caller wrote it, and does not repeat the input."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from penstock.contract.errors import ConfigError, RequestError
from penstock.contract.problems import (
    MAX_NAME_CHARS,
    MAX_PROBLEMS,
    config_error,
    problem_of,
    put_under,
    rename,
    request_error,
)


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int = Field(1, ge=1)


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid")

    parts: tuple[Part, ...] = ()
    name: str = ""

    @field_validator("name")
    @classmethod
    def _named(cls, name: str) -> str:
        if name == "wrong":
            raise ValueError("is wrong")
        return name


def refusal(given: object) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(given)
    return caught.value


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"parts": [{}, {"size": 0}]}, "parts[1].size", None),
        ({"name": "wrong"}, "name", None),
        ({"nmae": 1}, "nmae", "unknown_field"),
        ({"parts": [{"sise": 1}]}, "parts[0].sise", "unknown_field"),
        ({"x" * 1000: 1}, "x" * MAX_NAME_CHARS, "unknown_field"),
        (7, None, None),
    ],
)
def test_the_field_is_named(given: object, param: str | None, code: str | None) -> None:
    problem = problem_of(refusal(given))
    assert (problem.param, problem.code) == (param, code)
    assert str(problem) == (f"{param}: {problem.message}" if param else problem.message)


def test_errors_use_the_callers_field_names() -> None:
    error = request_error(refusal({"parts": [{"size": 0}]}), {"parts": "pieces"})
    assert isinstance(error, RequestError)
    assert error.param == "pieces[0].size" and error.message.startswith("pieces[0].size: ")


def test_settings_are_named_too() -> None:
    error = config_error(refusal({"name": "wrong"}))
    assert isinstance(error, ConfigError)
    assert (error.message, error.param, error.code) == ("name: is wrong", "name", "bad_config")


def test_the_input_is_not_repeated() -> None:
    assert "s3cret" not in str(problem_of(refusal({"parts": [{"size": "s3cret"}]})))


def test_renaming_a_field_keeps_the_rest_of_its_path() -> None:
    error = RequestError("prompt[1]: is wrong", param="prompt[1]")
    rename(error, {"prompt": "messages"})
    assert (error.param, error.message) == ("messages[1]", "messages[1]: is wrong")
    rename(error, {"prompt": "other"})
    assert error.param == "messages[1]"


def test_every_field_is_named_once_and_renamed() -> None:
    error = request_error(refusal({"parts": [{"size": 0}, {"size": "x"}], "name": 7}), {"parts": "pieces"})
    rename(error, {"name": "label"})
    assert error.message == (
        "pieces[0].size: must be at least 1; pieces[1].size: must be an integer; label: must be a string"
    )
    assert (error.param, [*error.also]) == ("pieces[0].size", ["pieces[1].size", "label"])
    put_under(error, "body")
    assert error.message.count("body.") == 3 and error.also[-1] == "body.label"


def test_the_names_of_a_long_list_of_problems_are_limited() -> None:
    error = request_error(refusal({f"x{number}": 1 for number in range(100)}))
    assert error.message.count("unknown field") == MAX_PROBLEMS
