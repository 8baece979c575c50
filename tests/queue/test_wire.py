"""The bytes on the wire: pinned, and the same value again when read."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, fields, replace
from typing import Any, get_args

import msgpack
import pytest
from fakes.queue.harness import new_job
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.contract.adapters import NAME_PATTERN, AdapterRef
from penstock.contract.errors import InvariantError, UnsupportedKindError
from penstock.contract.job import Message, PackedPrompt, SamplingParams
from penstock.contract.output import Choice, Chunk, Outcome, Result, TokenLogprobs, Usage
from penstock.contract.pool import NodePressure, PoolRecord
from penstock.contract.sampling import StructuredOutputs
from penstock.contract.tasks import Detokenize, Detokenized, Embed, Embedding, Task, Tokenize, Tokenized
from penstock.contract.tool_formats import BY_NAME, ToolFormat
from penstock.contract.tools import ReasoningParserName, ToolCall, WantedCalls, WantedFunction
from penstock.queue import results, wire
from penstock.queue.results import PackedResult, encode_detokenized, encode_embedding, encode_tokenized
from penstock.queue.wire import Request, WireError, decode_chunks, encode_chunk

JOB_ID = "m.01890a5d-ac96-774b-bcce-b302099a8057"
HEAD = b"\x87\xa1v\x01\xa1j\xd9&" + JOB_ID.encode()
CALLED = Message(role="assistant", content="", tool_calls=(ToolCall(id="c", name="f", arguments="{}"),))
TOOLS = '[{"function":{"name":""}}]'
CUTS = [(0, 1, 2), (1, 0, 300)]

# Golden bytes


def test_chunk_bytes() -> None:
    chunk = Chunk(JOB_ID, 7, 1, 300, (5, 70_000), "hé")
    assert encode_chunk(chunk) == (
        HEAD
        + b"\xa1i\x07"
        + b"\xa1c\x01"
        + b"\xa1p\xcd\x01\x2c"
        + b"\xa1t\x92\x05\xce\x00\x01\x11\x70"
        + b"\xa1s\xa3h\xc3\xa9"
    )


def test_chunk_bytes_with_every_optional_field() -> None:
    chunk = Chunk(JOB_ID, 0, finish_reason="stop", usage=Usage(3, 2, 1))
    assert encode_chunk(chunk) == (
        b"\x89"
        + HEAD[1:]
        + b"\xa1i\x00\xa1c\x00\xa1p\x00\xa1t\x90\xa1s\xa0"
        + b"\xa1f\xa4stop"
        + b"\xa1u\x93\x03\x02\x01"
    )


def test_terminal_chunk_is_never_encoded_here() -> None:
    # test_scripts_end pins the bytes that the scripts make.
    with pytest.raises(InvariantError, match="by the scripts"):
        encode_chunk(Chunk(JOB_ID, 0, outcome=Outcome("succeeded")))


@pytest.mark.parametrize(
    ("prompt", "golden"),
    [
        ({"prompt": "hi"}, b"\xa6prompt\xa2hi"),
        ({"prompt_token_ids": (1, 2)}, b"\xa6tokens\x92\x01\x02"),
        ({"messages": (Message(role="user", content="hi"),)}, b"\xa8messages\x91\x82\xa4role\xa4user\xa7content\xa2hi"),
        (
            {"messages": (CALLED, Message(role="tool", content="", tool_call_id="c")), "tools": TOOLS},
            b"\xa8messages\x92\x83\xa4role\xa9assistant\xa7content\xa0\xaatool_calls\x91\x83\xa2id\xa1c\xa4name\xa1f"
            b"\xa9arguments\xa2{}\x83\xa4role\xa4tool\xa7content\xa0\xactool_call_id\xa1c\xa5tools\xba"
            + TOOLS.encode(),
        ),
        (
            {"prompt": "hi", "adapter": AdapterRef(name="a", digest="0" * 32)},
            b"\xa6prompt\xa2hi\xa7adapter\x82\xa4name\xa1a\xa6digest\xd9\x20" + b"0" * 32,
        ),
    ],
)
def test_request_bytes(prompt: dict[str, Any], golden: bytes) -> None:
    job = new_job(**prompt, params=SamplingParams(n=2, stop=("x",)), tenant="acme", deadline_ms=5)
    params = b"\xa6params\x82\xa1n\x02\xa4stop\x91\xa1x"
    num_fields = bytes([0x83 + len(prompt)])
    assert wire.encode_request(job) == num_fields + b"\xa1v\x01\xa4kind\xa8generate" + golden + params


@pytest.mark.parametrize(
    ("prompt", "task", "golden"),
    [
        ({"prompt": "hi"}, Tokenize(), b"\xa8tokenize\xa6prompt\xa2hi\xa7options\x80"),
        (
            {"prompt": "hi"},
            Tokenize(add_special_tokens=False, return_token_strs=True),
            b"\xa8tokenize\xa6prompt\xa2hi\xa7options\x82\xb2add_special_tokens\xc2\xb1return_token_strs\xc3",
        ),
        ({"prompt_token_ids": (1, 2)}, Detokenize(), b"\xaadetokenize\xa6tokens\x92\x01\x02\xa7options\x80"),
        ({"prompt_token_ids": (1, 2)}, Embed(), b"\xa5embed\xa6tokens\x92\x01\x02\xa7options\x80"),
        (
            {"prompt": "hi"},
            Embed(pooling="last", dimensions=2),
            b"\xa5embed\xa6prompt\xa2hi\xa7options\x82\xa7pooling\xa4last\xaadimensions\x02",
        ),
    ],
)
def test_request_bytes_of_a_task(prompt: dict[str, Any], task: Task, golden: bytes) -> None:
    data = wire.encode_request(new_job(**prompt, task=task))
    assert data == b"\x84\xa1v\x01\xa4kind" + golden
    assert wire.decode_request(data) == Request(SamplingParams(**task.sampling()), **prompt, task=task)


def test_embedding_takes_one_greedy_token_and_may_have_an_adapter() -> None:
    adapter = AdapterRef(name="sql", digest="0" * 32)
    job = new_job(prompt="hi", task=Embed(truncate_prompt_tokens=3), adapter=adapter)
    request = wire.decode_request(wire.encode_request(job))
    assert request.params == job.sampling == SamplingParams(temperature=0.0, max_tokens=1, truncate_prompt_tokens=3)
    assert request.adapter == adapter
    with pytest.raises(ValidationError, match="has no sampling parameters"):
        new_job(prompt="hi", task=Embed(), params=SamplingParams(max_tokens=2))
    with pytest.raises(ValidationError, match="has no adapter"):
        new_job(prompt="hi", task=Tokenize(), adapter=adapter)


def test_packed_prompt_of_a_task_gives_the_same_bytes() -> None:
    job = new_job(prompt_token_ids=(1, 2), task=Detokenize())
    packed = job.model_copy(update={"prompt_token_ids": None, "packed_prompt": PackedPrompt("tokens", b"\x92\x01\x02")})
    assert wire.encode_request(packed) == wire.encode_request(job)


def test_result_bytes_of_a_task() -> None:
    data = results.encode_result((), Usage(0, 0), [], output=encode_tokenized(2, 9, [1, 70_000], ["a", "é"]))
    assert data == (
        b"\x85\xa1v\x01\xa7choices\x90\xa1u\x93\x00\x00\x00\xa4cuts\x90\xa1o\x86\xa4kind\xa8tokenize\xa3num\x02"
        b"\xa7max_len\x09\xa6tokens\xc4\x08\x01\x00\x00\x00\x70\x11\x01\x00"
        b"\xa4strs\xc4\x03a\xc3\xa9\xa4ends\xc4\x08\x01\x00\x00\x00\x03\x00\x00\x00"
    )


def test_result_bytes_of_an_embedding() -> None:
    vector = struct.pack("<2f", 1.0, -0.5)
    data = results.encode_result((), Usage(3, 0), [], output=encode_embedding(vector, 3))
    assert data == (
        b"\x85\xa1v\x01\xa7choices\x90\xa1u\x93\x03\x00\x00\xa4cuts\x90\xa1o\x83\xa4kind\xa5embed\xa3num\x03"
        b"\xa6vector\xc4\x08\x00\x00\x80\x3f\x00\x00\x00\xbf"
    )
    assert results.decode_result(data, JOB_ID, Outcome("succeeded"), (1, 2, 3, 4)).output == Embedding((1.0, -0.5), 3)
    torn = results.encode_result((), Usage(3, 0), [], output=encode_embedding(vector[:-1], 3))
    with pytest.raises(WireError, match="7 bytes"):
        results.decode_result(torn, JOB_ID, Outcome("succeeded"), (1, 2, 3, 4))


def test_options_stand_in_a_request_in_their_order_and_only_where_they_ask_for_something() -> None:
    params = SamplingParams(frequency_penalty=-2, presence_penalty=0.5, min_p=0.25, top_k=5, temperature=1, top_p=1.0)
    golden = (
        b"\x84\xa5top_k\x05\xa5min_p\xcb\x3f\xd0\x00\x00\x00\x00\x00\x00"
        b"\xb0presence_penalty\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00"
        b"\xb1frequency_penalty\xcb\xc0\x00\x00\x00\x00\x00\x00\x00"
    )
    assert wire.encode_request(new_job(params=params)).endswith(b"\xa6params" + golden)
    neutral = SamplingParams(min_p=0, presence_penalty=-0.0, frequency_penalty=0, repetition_penalty=1)
    assert wire.encode_request(new_job(params=neutral)).endswith(b"\xa6params\x80")


def test_bytes_of_log_probabilities() -> None:
    entry = TokenLogprobs((5, 300), (-0.5, -2.0), (b"a", "<s>"))
    data = encode_chunk(Chunk(JOB_ID, 0, 0, 3, (5,), "a", logprobs=(entry,), prompt_logprobs=(entry,)))
    golden = b"\x91\x93\x92\x05\xcd\x01\x2c\xc4\x08\x00\x00\x00\xbf\x00\x00\x00\xc0\x92\xc4\x01a\xa3<s>"
    assert data.endswith(b"\xa1s\xa1a\xa1l" + golden + b"\xa1q" + golden)


def test_result_bytes() -> None:
    data = results.encode_result((Choice(0, "hi", (5, 6), "stop"),), Usage(1, 2), [(0, 2, 2)])
    assert data == (
        b"\x84\xa1v\x01\xa7choices\x91\x84\xa1c\x00\xa1s\xa2hi\xa1t\x92\x05\x06\xa1f\xa4stop"
        b"\xa1u\x93\x01\x02\x00\xa4cuts\x91\x93\x00\x02\x02"
    )


def test_pool_record_bytes() -> None:
    data = wire.encode_record(
        PoolRecord(
            "m",
            "acme/model",
            ("alias",),
            2048,
            7,
            "r1",
            32,
            ToolFormat("x", "json"),
            "think",
            {"sql": "02"},
            ("generate", "x"),
            ("thinking=true",),
            {"top_k": 40},
            ("chat", "completion"),
        )
    )
    assert data == (
        b"\xde\x00\x15\xa1v\x01\xa4pool\xa1m\xa5model\xaaacme/model\xa7aliases\x91\xa5alias\xadmax_model_len\xcd\x08\x00"
        b"\xa9created_s\x07\xa8revision\xa2r1"
        b"\xafmax_token_bytes\x20\xabtool_format"
        + msgpack.packb(asdict(ToolFormat("x", "json")))
        + b"\xb0reasoning_parser\xa5think\xa8adapters\x81\xa3sql\xa202"
        b"\xa5kinds\x92\xa8generate\xa1x\xb1thinking_switches\x91\xadthinking=true"
        b"\xb1sampling_defaults\x81\xa5top_k\x28\xaccapabilities\x92\xa4chat\xaacompletion\xactakes_effort\xc2"
        b"\xaemoved_messages\x90\xb2tool_format_reason\xa0\xadtexts_per_job\x01\xaadimensions\x00\xaasimilarity\xa6cosine"
    )


def test_pressure_record_names_its_fields() -> None:
    record = msgpack.unpackb(wire.encode_record(NodePressure("n1", kv_blocks_free=3)))
    assert set(record) == {"v", *(one.name for one in fields(NodePressure))}
    assert (record["node_id"], record["kv_blocks_free"], record["draining"]) == ("n1", 3, False)


# Round trips

small_ints = st.integers(0, 2**31 - 1)
texts = st.text(max_size=40)
reasons = st.none() | st.sampled_from(["stop", "length", "cancelled", "error"])
token_lists = st.lists(small_ints, max_size=20).map(tuple)
usages = st.builds(Usage, small_ints, small_ints, small_ints)
singles = st.floats(max_value=0, width=32)
named = st.lists(st.tuples(small_ints, singles, st.binary(max_size=9) | texts), min_size=1, max_size=4)
likely = named.map(lambda entries: TokenLogprobs(*zip(*entries, strict=True)))
chunks = st.builds(
    Chunk, texts, small_ints, small_ints, small_ints, token_lists, texts, reasons, st.none() | usages, st.none()
).flatmap(
    lambda chunk: st.builds(
        replace,
        st.just(chunk),
        logprobs=st.just(()) | st.tuples(*[likely] * len(chunk.token_ids)),
        prompt_logprobs=st.just(()) | st.tuples(st.just(TokenLogprobs((7,), (), (b"a",))), likely, likely),
    )
)
sampling = st.builds(
    SamplingParams,
    n=st.integers(1, 16),
    temperature=st.floats(0, 10),
    top_k=st.integers(-1, 1000),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
    stop_token_ids=st.lists(small_ints, max_size=3).map(tuple),
    include_stop_str_in_output=st.booleans(),
    logit_bias=st.dictionaries(small_ints, st.floats(-100, 100), max_size=3),
    bad_words=st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
)
functions = st.builds(
    WantedFunction,
    name=st.text(min_size=1, max_size=9),
    parameters=st.dictionaries(texts, texts, max_size=2).map(json.dumps),
)
wanted_calls = st.builds(
    WantedCalls,
    form=st.sampled_from([*BY_NAME.values()]),
    reasoning=st.sampled_from(get_args(ReasoningParserName)),
    functions=st.lists(functions, min_size=1, max_size=3).map(tuple),
    required=st.booleans(),
    answer=st.none() | st.just('{"type": "object"}'),
    parallel=st.booleans(),
)
forms = st.one_of(
    st.builds(StructuredOutputs, json=st.dictionaries(texts, st.dictionaries(texts, texts, max_size=2), max_size=2)),
    st.builds(StructuredOutputs, choice=st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3)),
    st.builds(StructuredOutputs, regex=st.text(min_size=1, max_size=9)),
    st.just(StructuredOutputs(json_object=True)),
    st.builds(StructuredOutputs, calls=wanted_calls),
)
formed = st.builds(SamplingParams, structured_outputs=forms)
messages = st.lists(
    st.builds(Message, role=st.sampled_from(["system", "user", "assistant"]), content=texts), min_size=1
)
calls = st.builds(
    ToolCall,
    id=st.text(min_size=1, max_size=9),
    name=st.text(min_size=1, max_size=9),
    arguments=st.dictionaries(texts, texts, max_size=2).map(json.dumps),
)
called = st.builds(Message, role=st.just("assistant"), content=texts, tool_calls=st.lists(calls, max_size=3).map(tuple))
gave = st.builds(Message, role=st.just("tool"), content=texts, tool_call_id=st.text(min_size=1, max_size=9))
tools = st.lists(
    st.builds(lambda name: {"type": "function", "function": {"name": name}}, texts), min_size=1, max_size=3
)
prompts = st.one_of(
    st.fixed_dictionaries({"prompt": texts}),
    st.fixed_dictionaries(
        {"prompt": texts, "adapter": st.builds(AdapterRef, name=st.from_regex(NAME_PATTERN, fullmatch=True))}
    ),
    st.fixed_dictionaries({"prompt_token_ids": st.lists(small_ints, min_size=1).map(tuple)}),
    st.fixed_dictionaries({"messages": messages.map(tuple)}),
    st.fixed_dictionaries(
        {"messages": st.lists(called | gave, min_size=1).map(tuple), "tools": tools.map(json.dumps)},
        optional={"chat_template_kwargs": st.just('{"enable_thinking": false}')},
    ),
)


@given(st.lists(chunks, max_size=5))
def test_chunks_round_trip_back_to_back(sent: list[Chunk]) -> None:
    assert decode_chunks(b"".join(map(encode_chunk, sent))) == sent


@given(prompts, sampling | formed)
def test_request_round_trips_and_its_bytes_are_a_function_of_it(prompt: dict[str, Any], params: SamplingParams) -> None:
    data = wire.encode_request(new_job(**prompt, params=params))
    assert wire.decode_request(data) == Request(params, **prompt)
    assert wire.encode_request(new_job(**prompt, params=params, tenant="other", background=False)) == data


@given(st.lists(chunks, max_size=3), usages)
def test_result_round_trips(said: list[Chunk], usage: Usage) -> None:
    choices = tuple(Choice(c.choice, c.text, c.token_ids, c.finish_reason, c.logprobs) for c in said)
    prompt = said[0].prompt_logprobs if said else ()
    data = results.encode_result(choices, usage, CUTS, prompt)
    result = results.decode_result(data, JOB_ID, Outcome("succeeded"), (1, 2, 3, 4))
    told = Result(JOB_ID, Outcome("succeeded"), choices, usage, 1, 2, 3, 4, cuts=tuple(CUTS), prompt_logprobs=prompt)
    assert result == told


@given(token_lists, st.none() | st.lists(texts, max_size=20).map(tuple))
def test_output_of_a_task_round_trips(token_ids: tuple[int, ...], strs: tuple[str, ...] | None) -> None:
    data = results.encode_result((), Usage(0, 0), [], output=encode_tokenized(len(token_ids), 9, token_ids, strs))
    result = results.decode_result(data, JOB_ID, Outcome("succeeded"), (1, 2, 3, 4))
    assert result.output == Tokenized(len(token_ids), 9, token_ids, strs)


@given(texts)
def test_text_of_tokens_round_trips(text: str) -> None:
    data = results.encode_result((), Usage(0, 0), [], output=encode_detokenized(text))
    assert results.decode_result(data, JOB_ID, Outcome("succeeded"), (1, 2, 3, 4)).output == Detokenized(text)


def test_long_output_reads_the_same_in_parts_and_whole() -> None:
    text, ids = "水門 🌊 " * 10_000, range(100_000)
    for output in (encode_detokenized(text), encode_tokenized(len(ids), 9, ids, [str(one) for one in ids])):
        data = results.encode_result((), Usage(0, 0), [], output=output)
        packed = PackedResult(data, JOB_ID, Outcome("succeeded")).output
        assert packed is not None
        assert packed.whole() == results.decode_result(data, JOB_ID, Outcome("succeeded"), (1, 2, 3, 4)).output
        assert "".join(packed.text_parts()) in ("", text)
        assert [*packed.token_ids()] in ([], [*ids])


@given(st.builds(NodePressure), st.builds(PoolRecord))
def test_records_round_trip(pressure: NodePressure, record: PoolRecord) -> None:
    assert wire.decode_pressure(wire.encode_record(pressure)) == pressure
    assert wire.decode_pool(wire.encode_record(record)) == record


def test_keys_of_a_later_version_are_ignored() -> None:
    chunk = {"v": 1, "j": JOB_ID, "i": 0, "x": {"new": [1]}, "lp": [0.5], "zz": None}
    assert decode_chunks(msgpack.packb(chunk)) == [Chunk(JOB_ID, 0)]
    record = msgpack.unpackb(wire.encode_record(PoolRecord("m", "x"))) | {"new": 1}
    assert wire.decode_pool(msgpack.packb(record)) == PoolRecord("m", "x")


def test_a_field_of_a_later_version_s_request_is_refused_by_name() -> None:
    request = msgpack.unpackb(wire.encode_request(new_job())) | {"new": 1}
    with pytest.raises(UnsupportedKindError, match="'new'"):
        wire.decode_request(msgpack.packb(request))
