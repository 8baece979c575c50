"""A packed prompt gives the same request and the same cost as an unpacked one."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.queue.harness import new_job

from penstock.contract.job import Message
from penstock.contract.pool import PoolRecord
from penstock.contract.tools import ToolCall
from penstock.producer.client.request import pack_prompt_of
from penstock.queue.job_cost import estimate_cost
from penstock.queue.wire import decode_request, encode_request

RECORD = PoolRecord("m", "acme/model", max_model_len=1000)
CALL = ToolCall(id="c", name="look", arguments='{"at": 1}')
PROMPTS: dict[str, Any] = {
    "prompt": "héllo",
    "prompt_token_ids": tuple(range(300)),
    "messages": (Message(role="user", content="hé"), Message(role="assistant", content="", tool_calls=(CALL,))),
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("options", [{}, {"max_tokens": 7, "logit_bias": {3: 1.5}}])
def test_packed_prompt_gives_the_same_bytes_and_cost(name: str, options: dict[str, Any]) -> None:
    plain = new_job(**{name: PROMPTS[name]}, params=options)
    if name == "messages":
        plain = plain.model_copy(update={"tools": '[{"type":"function","function":{"name":"look"}}]'})
    packed = plain.model_copy(update={name: None, "packed_prompt": pack_prompt_of(PROMPTS[name])})
    assert encode_request(packed) == encode_request(plain)
    assert estimate_cost(packed, RECORD) == estimate_cost(plain, RECORD)
    assert getattr(decode_request(encode_request(packed)), name) == PROMPTS[name]
