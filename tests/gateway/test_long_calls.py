"""Both APIs of chats parse a long text of tool calls in parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.contract.job import SamplingParams
from penstock.contract.output import Choice, Usage
from penstock.contract.tool_formats import FORMATS
from penstock.contract.tools import MAX_CALLS
from penstock.gateway.apis.anthropic.encoder import MessagesDialect
from penstock.gateway.apis.openai.encoder import ChatDialect
from penstock.gateway.stream.dialect import AnswerHead, Dialect
from penstock.producer.parsing.parsed_text import AnswerFormat


@pytest.mark.parametrize("dialect", [ChatDialect(), MessagesDialect()])
def test_a_long_text_of_calls_is_parsed_a_kilobyte_at_a_time(dialect: Dialect) -> None:
    """Other requests get their turn at each part, as `BodyWriter.send_all` sees to."""
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    text = call * (64 * 1024 // len(call))
    encoder = dialect.whole(
        AnswerHead(["pool.job"], "m", 1, SamplingParams(max_tokens=9), AnswerFormat(FORMATS["hermes"]))
    )
    result: Any = SimpleNamespace(job_id="pool.job", choices=(Choice(0, text, (), "stop"),), usage=Usage(5, 9, 2))
    parts = [encoder.head(), *encoder.parts_of(0, result), encoder.tail([Usage(5, 9, 2)])]
    assert parts.count(b"") >= len(text) // 1024
    assert b"".join(parts).count(b'"name":"f"') == MAX_CALLS
