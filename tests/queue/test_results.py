"""A packed result gives, part by part, what decoding it as a whole gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.output import Choice, Outcome, TokenLogprobs, Usage
from penstock.queue.results import PackedResult, decode_result, encode_result
from penstock.queue.wire import WireError

DONE = Outcome("succeeded")


@st.composite
def rows(draw: st.DrawFn, count: int) -> tuple[TokenLogprobs, ...]:
    made = []
    for at in range(count):
        ids = draw(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=4))
        values = () if at == 0 else tuple(-float(i) for i in range(len(ids)))
        ids = ids if values else ids[:1]
        texts = tuple(draw(st.one_of(st.binary(max_size=5), st.text(max_size=3))) for _ in ids)
        made.append(TokenLogprobs(tuple(ids), values, texts))
    return tuple(made)


@given(st.data(), st.lists(st.text(max_size=30), max_size=4))
def test_its_parts_are_those_of_the_decoded_result(data, texts):
    tokens = [data.draw(st.lists(st.integers(0, 1 << 30), max_size=4)) for _ in texts]
    choices = tuple(
        Choice(i, text, tuple(ids), "stop", data.draw(rows(len(ids))))
        for i, (text, ids) in enumerate(zip(texts, tokens, strict=True))
    )
    packed = encode_result(choices, Usage(3, 4, 1), [(0, 1, 2)], data.draw(rows(data.draw(st.integers(0, 4)))))
    whole, parts = decode_result(packed, "j", DONE, (0, 0, 0, 0)), PackedResult(packed, "j", DONE)
    assert (parts.usage, parts.num_bytes) == (whole.usage, len(packed))
    assert [(c.index, c.text, c.finish_reason) for c in parts.choices] == [
        (c.index, c.text, c.finish_reason) for c in whole.choices
    ]
    for _ in range(2):
        assert tuple(parts.prompt_logprobs) == whole.prompt_logprobs
        assert [tuple(c.logprobs) for c in parts.choices] == [c.logprobs for c in whole.choices]
    assert bool(parts.prompt_logprobs) == bool(whole.prompt_logprobs)
    assert [bool(c.logprobs) for c in parts.choices] == [bool(c.logprobs) for c in whole.choices]


def test_rows_that_do_not_fit_a_window_come_whole():
    entries = tuple(TokenLogprobs((i, 7), (-1.0, -2.0), (b"x" * 100, b"y" * i)) for i in range(1, 3000))
    packed = PackedResult(encode_result((), Usage(1, 1), [], entries), "j", DONE)
    assert sum(1 for _ in packed.prompt_logprobs) == 2999
    assert [len(entry.tokens[1]) for entry in packed.prompt_logprobs][-1] == 2999


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x81\xa1v\x01", b"\x82\xa1v\x01\xa1u\x90", b"\xdf\xff\xff\xff\xff"])
def test_bytes_that_are_no_result_are_refused(data):
    with pytest.raises(WireError):
        PackedResult(data, "j", DONE)


def test_a_job_without_a_result_has_nothing():
    packed = PackedResult(None, "j", DONE)
    assert (packed.choices, packed.usage, [*packed.prompt_logprobs], packed.num_bytes) == ((), None, [], 0)
