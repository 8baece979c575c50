"""Tokens to text: whole characters only, stop strings withheld, ends found."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_node.engine.text.output import ChoiceOutput, Detokenizer, EndRule, StopStrings

BYTES = [bytes((i,)) for i in range(256)] + [b""]
EOS = 256


def _output(
    *,
    end_ids: frozenset[int] = frozenset((EOS,)),
    max_tokens: int = 1000,
    min_tokens: int = 0,
    stop: tuple[str, ...] = (),
    includes_stop: bool = False,
) -> ChoiceOutput:
    rule = EndRule(end_ids, min_tokens, max_tokens)
    return ChoiceOutput(rule, stop, Detokenizer(BYTES), includes_stop=includes_stop)


def _say(output: ChoiceOutput, text: str | bytes) -> list[str]:
    """Push bytes one by one until the choice ends. Return the text that each released."""
    pieces = []
    for token_id in text.encode() if isinstance(text, str) else text:
        output.push(token_id)
        pieces.append(output.take_text())
        if output.finish_reason is not None:
            break
    return pieces


@given(st.text())
def test_detokenizer_returns_all_text_and_only_whole_characters(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    pieces = [detokenizer.push((byte,)) for byte in text.encode()]
    assert "".join(pieces) == text and detokenizer.flush() == ""


@given(st.binary())
def test_invalid_bytes_decode_as_they_do_in_one_piece(data: bytes) -> None:
    detokenizer = Detokenizer(BYTES)
    text = "".join(detokenizer.push((byte,)) for byte in data) + detokenizer.flush()
    assert text == data.decode(errors="replace")


def test_first_space_that_the_model_adds_is_stripped_once() -> None:
    detokenizer = Detokenizer([b" a", b" b"], strip_first_space=True)
    assert detokenizer.push((0,)) + detokenizer.push((1,)) == "a b"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.randoms())
def test_stop_strings_cut_at_the_first_and_release_everything_else(
    text: str, stops: list[str], rng: random.Random
) -> None:
    checker, shown, rest, stopped = StopStrings(tuple(stops)), "", text, False
    while rest and not stopped:
        size = rng.randint(1, 3)
        released, stopped = checker.push(rest[:size])
        shown, rest = shown + released, rest[size:]
        assert not any(stop in shown for stop in stops)
    seen = text[: len(text) - len(rest)]
    ends = [at for at in (seen.find(stop) for stop in stops) if at >= 0]
    assert stopped == bool(ends)
    assert shown + checker.flush() == (seen[: min(ends)] if stopped else text)


def test_stop_string_stays_in_the_text_on_request() -> None:
    output = _output(stop=("stop", "op", "stopped"), includes_stop=True)
    assert "".join(_say(output, "we stopped")) == "we stop" and output.finish_reason == "stop"
    for included, text in ((False, "a"), (True, "a!")):
        output = _output(end_ids=frozenset((ord("!"),)), includes_stop=included)
        assert "".join(_say(output, "a!b")) == text and output.finish_reason == "stop"
        # What stands for no text cannot be seen either way.
        output = _output(includes_stop=included)
        output.push(ord("a"))
        output.push(EOS)
        assert output.take_text() == "a" and output.finish_reason == "stop"


def test_possible_start_of_a_stop_string_is_held_back() -> None:
    output = _output(stop=("</end>",))
    assert _say(output, "a </e b") == ["a", " ", "", "", "", "</e ", "b"]
    assert output.finish_reason is None
    assert _say(output, "</end>x")[-1] == "" and output.finish_reason == "stop"


def test_held_text_is_released_when_the_limit_ends_it() -> None:
    output = _output(stop=("</end>",), max_tokens=4)
    assert "".join(_say(output, "ab</")) == "ab</"
    assert output.finish_reason == "length"


def test_eos_releases_held_text_and_adds_none() -> None:
    output = _output(stop=("xyz",))
    _say(output, "ax")
    output.push(EOS)
    assert (output.take_text(), output.finish_reason, output.num_tokens) == ("x", "stop", 3)


def test_a_failed_choice_ends_with_an_error_even_where_its_last_text_is_a_stop_string() -> None:
    output = _output(stop=("\ufffd",))
    _say(output, b"a" + "🌊".encode()[:1])
    output.fail()
    assert output.finish_reason == "error"


def test_a_character_cut_by_the_limit_becomes_one_replacement() -> None:
    output = _output(max_tokens=3)
    assert _say(output, "🌊") == ["", "", "\ufffd"]
    assert output.finish_reason == "length"


def test_stop_strings_are_not_looked_for_below_min_tokens() -> None:
    output = _output(stop=("b",), min_tokens=4)
    assert "".join(_say(output, "abcbxb")) == "abc"
    assert output.num_tokens == 4 and output.finish_reason == "stop"


def test_an_end_id_below_min_tokens_does_not_end() -> None:
    output = _output(min_tokens=2, end_ids=frozenset((ord("z"),)))
    assert "".join(_say(output, "zzz")) == "zz"
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("cut", range(8))
def test_the_same_tokens_give_the_same_text_however_they_are_split(cut: int) -> None:
    whole, parts = _output(stop=("lo w",)), _output(stop=("lo w",))
    text = "".join(_say(whole, "hellö lo world"))
    assert "".join(_say(parts, "hellö lo world".encode()[:cut]) + _say(parts, "hellö lo world".encode()[cut:])) == text
    assert text == "hellö "
