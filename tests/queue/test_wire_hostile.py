"""Bytes that are not our wire data are refused with one error, without a crash or a large allocation."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgpack
import pytest
from fakes.queue.harness import POOL, new_job
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.errors import UnsupportedKindError
from penstock.contract.job import SamplingParams
from penstock.contract.output import Choice, Chunk, Outcome, PrefillProgress, TokenLogprobs, Usage
from penstock.contract.pool import NodePressure, PoolRecord
from penstock.contract.tasks import Tokenize
from penstock.queue import results, wire
from penstock.queue.results import encode_tokenized
from penstock.queue.wire import MAX_BYTES, WireError, decode_chunks, decode_message, encode_chunk, encode_progress

JOB_ID = "m.01890a5d-ac96-774b-bcce-b302099a8057"
DECODERS = {
    "chunks": decode_chunks,
    "message": decode_message,
    "request": wire.decode_request,
    "result": lambda data: results.decode_result(data, JOB_ID, Outcome("succeeded"), (0, 0, 0, 0)),
    "task": wire.decode_request,
    "output": lambda data: results.decode_result(data, JOB_ID, Outcome("succeeded"), (0, 0, 0, 0)),
    "pool": wire.decode_pool,
    "pressure": wire.decode_pressure,
}
LIKELY = (TokenLogprobs((9, 8), (-0.5, -1.0), (b"a", "<s>")),)
WHOLE = {
    "chunks": encode_chunk(
        Chunk(JOB_ID, 3, 0, 3, (9,), "word", "stop", Usage(1, 2), logprobs=LIKELY, prompt_logprobs=LIKELY)
    ),
    "message": encode_progress(JOB_ID, PrefillProgress(9, 0, 3, 1)),
    "request": wire.encode_request(new_job(prompt="a prompt", params=SamplingParams(temperature=0.5, stop=("x",)))),
    "result": results.encode_result((Choice(0, "x", (1,), "stop", LIKELY),), Usage(1, 2), [(0, 1, 1)], LIKELY),
    "task": wire.encode_request(new_job(prompt="a prompt", task=Tokenize(add_special_tokens=True))),
    "output": results.encode_result((), Usage(0, 0), [], output=encode_tokenized(2, 9, [1, 2], ["a", "b"])),
    "pool": wire.encode_record(PoolRecord(POOL, "acme/model", ("alias",))),
    "pressure": wire.encode_record(NodePressure("n1")),
}
NUM_INPUTS = 100_000 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 2_000
texts = st.text(max_size=40)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts | st.binary(max_size=9)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))


def decode_or_refuse(kind: str, data: bytes) -> None:
    with suppress(WireError, UnsupportedKindError):
        DECODERS[kind](data)


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused_by_name_or_read(kind: str, data: bytes) -> None:
    decode_or_refuse(kind, data)


@pytest.mark.parametrize("kind", DECODERS)
@given(key=st.integers(0, 10), value=values)
def test_any_value_in_any_field_is_refused_by_name_or_read(kind: str, key: int, value: Any) -> None:
    fields = msgpack.unpackb(WHOLE[kind])
    fields[list(fields)[key % len(fields)]] = value
    decode_or_refuse(kind, msgpack.packb(fields))


@pytest.mark.parametrize("kind", DECODERS)
def test_truncated_data_is_refused_at_every_byte(kind: str) -> None:
    whole = WHOLE[kind]
    for cut in range(1, len(whole)):
        with pytest.raises(WireError):
            DECODERS[kind](whole[:cut])
    with pytest.raises(WireError):
        DECODERS[kind](whole + whole[:-1])


def test_empty_data_is_no_chunks_and_is_refused_as_a_record() -> None:
    assert decode_chunks(b"") == []
    with pytest.raises(WireError, match="one msgpack map, found 0"):
        wire.decode_request(b"")


@pytest.mark.parametrize("version", [0, 2, 4, None, "1"])
@pytest.mark.parametrize("kind", DECODERS)
def test_another_version_is_refused(kind: str, version: object) -> None:
    fields = msgpack.unpackb(WHOLE[kind]) | {"v": version}
    with pytest.raises(WireError, match="version"):
        DECODERS[kind](msgpack.packb(fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": None}, "kind of a job is a NoneType"),
        ({"kind": "tokenize"}, "expected a msgpack map"),
        ({"tokens": [1]}, "exactly one prompt"),
        ({"prompt": None}, "exactly one prompt"),
        ({"prompt": 5}, "prompt: "),
        ({"prompt": None, "tokens": [-1]}, r"prompt_token_ids\[0\]: "),
        ({"prompt": None, "messages": [{"role": "function", "content": "x"}]}, r"messages\[0\]\.role: "),
        ({"params": None}, "params: "),
        ({"tools": "[1]"}, "tools: "),
        ({"tools": "[" * 100_000}, "tools: "),
        ({"params": {"temperature": 99}}, "params.temperature: "),
    ],
)
def test_request_that_cannot_be_honoured_is_refused(change: dict[str, Any], message: str) -> None:
    fields = msgpack.unpackb(WHOLE["request"]) | change
    with pytest.raises(WireError, match=message):
        wire.decode_request(msgpack.packb(fields))


def test_unknown_kind_of_job_is_refused_by_name() -> None:
    fields = msgpack.unpackb(WHOLE["request"]) | {"kind": "translate"}
    with pytest.raises(UnsupportedKindError, match="kind 'translate'"):
        wire.decode_request(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"from_later": 1}, "from_later"),
        ({"params": {"top_a": 0.1}}, r"params\.top_a"),
        ({"kind": "tokenize", "options": {"n": 2}}, r"tokenize\.n"),
    ],
)
def test_a_field_of_a_later_release_is_refused_by_name_and_not_ignored(change: dict[str, Any], name: str) -> None:
    fields = msgpack.unpackb(WHOLE["request"]) | change
    with pytest.raises(UnsupportedKindError, match=f"field '{name}'"):
        wire.decode_request(msgpack.packb(fields))


def test_refusal_does_not_repeat_the_prompt() -> None:
    fields = msgpack.unpackb(WHOLE["request"]) | {"prompt": ["my secret"]}
    with pytest.raises(WireError) as caught:
        wire.decode_request(msgpack.packb(fields))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("end", [{"state": "running"}, {"code": "x"}, {"state": None}, {}])
def test_end_without_a_terminal_state_is_refused_or_no_end(end: dict[str, Any]) -> None:
    data = msgpack.packb({"v": 1, "j": JOB_ID, "i": 0, "e": end})
    if not end:
        assert decode_chunks(data)[0].outcome is None
        return
    with pytest.raises(WireError):
        decode_chunks(data)


@pytest.mark.parametrize("ext", [msgpack.ExtType(5, b"x"), msgpack.ExtType(5, b""), msgpack.Timestamp(1, 2)])
def test_extension_types_are_refused(ext: object) -> None:
    with pytest.raises(WireError):
        decode_chunks(msgpack.packb({"v": 1, "j": JOB_ID, "i": 0, "x": ext}))


@pytest.mark.parametrize(("levels", "fine"), [(7, True), (8, False), (400, False), (5000, False)])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x"])
def test_depth_is_bounded(opening: bytes, levels: int, fine: bool) -> None:
    data = b"\x84\xa1v\x01\xa1j\xa1j\xa1i\x00\xa1x" + opening * levels + b"\x00"
    if fine:
        assert decode_chunks(data) == [Chunk("j", 0)]
        return
    with pytest.raises(WireError, match=r"nested deeper than 8|StackError"):
        decode_chunks(data)


def test_oversized_message_is_refused_unread() -> None:
    with pytest.raises(WireError, match="exceeds"):
        decode_chunks(b"\xc1" * (MAX_BYTES + 1))


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x05",
        (b"\xdd" + struct.pack(">I", 60_000)) * 500,
    ],
)
def test_declared_lengths_reserve_no_memory(bomb: bytes) -> None:
    data = (b"\x84\xa1v\x01\xa1j\xa1j\xa1i\x00\xa1x" + bomb).ljust(64 * 1024, b"\x00")
    with traced() as peak:
        with pytest.raises(WireError):
            decode_chunks(data)
        assert peak() < 1 << 20


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """A function that returns the peak of allocated bytes since its last call."""
    tracemalloc.start()
    try:

        def peak() -> int:
            now, most = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            before, peak.before = peak.before, now  # type: ignore[attr-defined]
            return most - before

        peak.before = tracemalloc.get_traced_memory()[0]  # type: ignore[attr-defined]
        yield peak
    finally:
        tracemalloc.stop()


def noise(chance: random.Random, _: bytes) -> bytes:
    return chance.randbytes(chance.randint(0, 300))


def flipped(chance: random.Random, whole: bytes) -> bytes:
    data = bytearray(whole)
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def spliced(chance: random.Random, whole: bytes) -> bytes:
    """A piece of it elsewhere, twice or not at all."""
    first, second, third = sorted(chance.randrange(len(whole) + 1) for _ in range(3))
    return chance.choice((whole[:first] + whole[second:], whole[:third] + whole[first:], whole * 2, whole[:second]))


def boastful(chance: random.Random, whole: bytes) -> bytes:
    """Headers of long things, where they do not belong."""
    at = chance.randrange(len(whole))
    header = bytes((chance.choice(range(0xC4, 0xE0)),)) + chance.choice(
        (b"\xff\xff\xff\xff", b"\x00\x00\xff\xff", b"\xff\xff")
    )
    return whole[:at] + header * chance.choice((1, 1, 30)) + whole[at:]


def nested(chance: random.Random, whole: bytes) -> bytes:
    opening = chance.choice((b"\x91", b"\x81\xa1x", b"\xdc\x00\x05", b"\xdd\x00\x00\x00\x40"))
    return whole[:-1] + opening * chance.randint(1, 600) + whole[-1:]


@pytest.mark.timeout(900)
def test_no_input_crashes_a_decoder_or_makes_it_reserve_memory() -> None:
    """Whatever comes is read or refused by name, and takes no more than some times its own size."""
    chance, refused = random.Random(20), 0
    changes = (noise, flipped, flipped, spliced, boastful, nested)
    with traced() as peak:
        for number in range(NUM_INPUTS):
            kind = chance.choice(sorted(DECODERS))
            data = chance.choice(changes)(chance, WHOLE[kind])
            peak()
            try:
                DECODERS[kind](data)
            except (WireError, UnsupportedKindError) as error:
                refused += 1
                assert 0 < len(error.message) < 500
            most = 64 * 1024 + 100 * len(data)
            if peak() > most:
                # The interpreter's own tables grow now and then, not twice in a row.
                decode_or_refuse(kind, data)
                assert peak() < most, (number, kind, data)
    assert NUM_INPUTS / 2 < refused < NUM_INPUTS


def test_map_keys_are_strings() -> None:
    with pytest.raises(WireError):
        decode_chunks(msgpack.packb({"v": 1, "j": "j", "i": 0, 5: 6}))
    with pytest.raises(WireError, match="expected a msgpack map"):
        decode_chunks(b"\x01")


@pytest.mark.parametrize(
    "entry",
    [
        7,
        [],
        [[], b"", []],
        [[9], b"1234", ["a"], 1],
        [[9], b"12345", ["a"]],
        [[9, 8], b"1234", ["a", "b"]],
        [[9, 8], b"", ["a", "b"]],
        [[9], b"1234", ["a", "b"]],
        [["9"], b"1234", ["a"]],
        [[9], b"1234", [9]],
        [[9], "1234", ["a"]],
    ],
)
@pytest.mark.parametrize("key", ["l", "q"])
def test_log_probabilities_of_another_form_are_refused(key: str, entry: Any) -> None:
    fields = msgpack.unpackb(WHOLE["chunks"]) | {key: [entry]}
    with pytest.raises(WireError, match="log-probabilities"):
        decode_chunks(msgpack.packb(fields))


def test_log_probabilities_of_other_tokens_are_refused() -> None:
    fields = msgpack.unpackb(WHOLE["chunks"]) | {"t": [9, 9]}
    with pytest.raises(WireError, match="of 1 tokens come with 2 tokens"):
        decode_chunks(msgpack.packb(fields))
