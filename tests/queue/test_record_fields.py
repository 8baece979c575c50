"""Numbers of records, as they are read one by one and several at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.queue.record_fields import all_whole, whole

TEXTS = st.one_of(
    st.integers(-(10**17), 10**17).map(str), st.text(max_size=4), st.sampled_from(["", "1 2", " 3", "4 ", "007", "٣"])
)


@given(st.lists(TEXTS, max_size=6))
def test_several_numbers_are_read_as_one_by_one(texts: list[str]) -> None:
    assert all_whole(texts) == [whole(text) for text in texts]
