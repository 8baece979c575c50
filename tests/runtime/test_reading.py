"""What reading a model's file raises becomes a sentence that names the file; a bug of ours stays what it is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from penstock.contract.errors import ConfigError, InvariantError
from penstock.runtime.reading import reading

FILE = Path("/models/one/config.json")


def _panic() -> None:
    split: Any = pre_tokenizers.Split(Regex("(a+a+)+b"), "isolated")
    split.pre_tokenize_str("a" * 40 + "c")


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: list[int]().pop(), "cannot load /models/one: pop from empty list in config.json"),
        (lambda: dict[str, int]()["rope"], "cannot load /models/one: there is no 'rope' in config.json"),
        (lambda: 10.0**400, "cannot load /models/one: (34, 'Numerical result out of range') in config.json"),
        (lambda: _raise(ValueError("two\nlines")), "cannot load /models/one: two lines in config.json"),
        (lambda: _raise(ValueError()), "cannot load /models/one: ValueError in config.json"),
        (_panic, "cannot load /models/one: Onig: Regex search error: retry-limit-in-match over in config.json"),
        (lambda: _raise(ConfigError("a is 1; use 2")), "cannot load /models/one: a is 1 in config.json; use 2"),
        (lambda: _raise(ConfigError("merges.txt has no merges")), "cannot load /models/one: merges.txt has no merges"),
        (lambda: _raise(ConfigError("lora_dir is no folder", param="lora_dir")), "lora_dir is no folder"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(act: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised, reading(FILE):
        act()
    assert raised.value.message == sentence


def test_the_model_is_named_as_its_user_names_it() -> None:
    with (
        pytest.raises(ConfigError, match=r"^cannot load org/one: no in /models/one/config\.json$"),
        reading(FILE, "org/one"),
    ):
        raise ValueError("no")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), InvariantError("a bug"), ImportError("torch")])
def test_what_no_file_causes_stays(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, reading(FILE):
        raise error
    assert raised.value is error


def test_the_cause_is_in_the_log_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "penstock")
    with pytest.raises(ConfigError), reading(FILE):
        raise IndexError("list index out of range")
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG and record.exc_info is not None
