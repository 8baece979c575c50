"""The beginning of a call, from its mark to the function's name."""

from __future__ import annotations

import pytest

from penstock.contract.calls.opening import CallOpening, names_in
from penstock.contract.calls.writing import written_calls
from penstock.contract.tool_formats import FORMATS, ToolFormat

NAMES = ("weather", "weather_at", "now")


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_each_beginning_of_a_written_call_is_undecided_until_the_name_is_whole(form: ToolFormat) -> None:
    opening = CallOpening.of(form, NAMES)
    if opening is None:
        assert form.header or form.id_end or form.is_fenced or form.kind == "none"
        return
    for name in NAMES:
        text = written_calls(form, [(name, {"city": "Rome"})])
        if form.is_bare and opening.mark not in text:
            text = opening.mark + text
        call = text[text.index(opening.mark) :]
        said = [opening.is_at_start(call[:n]) for n in range(len(opening.mark), len(call) + 1)]
        num_undecided = said.index(True)
        assert said[:num_undecided] == [None] * num_undecided and all(said[num_undecided:])
        assert num_undecided + len(opening.mark) == call.index(name) + len(name) + 1
        other = call.replace(name, "unknown", 1)
        assert opening.is_at_start(other) is False


def test_a_megabyte_behind_a_mark_is_no_call() -> None:
    opening = CallOpening.of(FORMATS["hermes"], NAMES)
    assert opening is not None
    assert opening.is_at_start("<tool_call>" + " " * 1_000_000) is False


def test_names_of_offered_functions() -> None:
    assert names_in('[{"type": "function", "function": {"name": "a"}}, {"function": {"name": "b"}}]') == ("a", "b")
