"""Bad words: which tokens they ban, and the cost of the search per step."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_node.engine.text.output import BadWords

TOKENS = st.lists(st.integers(250, 260), min_size=1, max_size=6)


@given(words=st.lists(TOKENS.map(tuple), max_size=12), text=TOKENS)
def test_a_sequence_bans_its_last_token_where_the_text_ends_with_the_others(
    words: list[tuple[int, ...]], text: list[int]
) -> None:
    want = [
        word[-1] for word in words if text[len(text) - len(word) + 1 :] == [*word[:-1]] and len(word) <= len(text) + 1
    ]
    bad_words = BadWords(words)
    assert sorted(bad_words.banned_after(np.array(text, dtype=np.int32))) == sorted(want)
    assert bool(bad_words) == bool(words)


def test_many_long_sequences_cost_a_step_a_few_microseconds() -> None:
    text = np.full(4000, 7, dtype=np.int32)
    for newest in (7, 8):
        text[-1] = newest
        bad_words = BadWords((i, *[7] * 200, 8) for i in range(128))
        took_s = min(_time_of(bad_words, text) for _ in range(20))
        assert took_s < 200e-6  # Each of them compared as a tuple took 500 µs; it takes ten.


def _time_of(bad_words: BadWords, text: np.ndarray) -> float:
    began_s = time.perf_counter()
    bad_words.banned_after(text)
    return time.perf_counter() - began_s
