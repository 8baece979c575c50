"""Messages on an inbox: chunks and prompt progress."""

from __future__ import annotations

import msgpack
import pytest

from penstock.contract.output import Chunk, PrefillProgress
from penstock.producer.client.stream import ChunkVerdict, StreamCursor
from penstock.queue.wire import ProgressMessage, WireError, decode_chunks, decode_message, encode_chunk, encode_progress

JOB_ID = "m.01890a5d-ac96-774b-bcce-b302099a8057"
PROGRESS = PrefillProgress(total=5_000, cached=16, processed=512, time_ms=70)


def test_bytes_of_a_progress_message() -> None:
    head = b"\x84\xa1v\x01\xa1j\xd9&" + JOB_ID.encode()
    assert encode_progress(JOB_ID, PROGRESS) == head + b"\xa1i\xff\xa1g\x94\xcd\x13\x88\x10\xcd\x02\x00\x46"


def test_chunks_and_progress_are_told_apart() -> None:
    chunk = Chunk(JOB_ID, 0, 0, 0, (7,), "g")
    message = encode_progress(JOB_ID, PROGRESS) + encode_chunk(chunk)
    assert decode_message(message) == ([chunk], [ProgressMessage(JOB_ID, PROGRESS)])


def test_a_reader_of_an_earlier_release_drops_progress_as_a_chunk_that_it_has() -> None:
    (seen,) = decode_chunks(encode_progress(JOB_ID, PROGRESS))
    assert StreamCursor().offer(seen) is ChunkVerdict.DROP


@pytest.mark.parametrize(
    "value",
    [
        {"v": 1, "j": JOB_ID, "g": [1, 2, 3]},
        {"v": 1, "j": JOB_ID, "g": [1, 2, 3, "4"]},
        {"v": 1, "j": JOB_ID, "g": [1, 2, 3, True]},
        {"v": 1, "j": JOB_ID, "g": 4},
        {"v": 1, "j": 5, "g": [1, 2, 3, 4]},
        {"v": 1, "g": [1, 2, 3, 4]},
        {"v": 2, "j": JOB_ID, "g": [1, 2, 3, 4]},
        {"v": 1, "j": JOB_ID, "g": [1, 2, 3, 4], "x": [[[[[[[[[]]]]]]]]]},
        "g",
        7,
    ],
)
def test_malformed_progress_is_refused(value: object) -> None:
    with pytest.raises(WireError):
        decode_message(msgpack.packb(value))
