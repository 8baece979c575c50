"""Bodies of message batches are split the same way wherever they are cut, and wrong ones are refused by name."""

from __future__ import annotations

import json

import pytest

from penstock.contract.errors import RequestError, TooLargeError
from penstock.gateway.apis.message_batches.splitting import RequestSplitter

TRICKY = (
    ' \n{ "requests" :\n[ {"custom_id": "a", "params": {"text": "}]{[\\"\\\\", "n": [1, {"b": {}}], "x": 1e3}} ,'
    '\r\n{"params": {"t": "\\u00e9 – \\\\"}, "custom_id":"b-_9"},{"custom_id":"c","params":{"big":'
    "123456789012345678901234567890}}\t] }\n "
).encode()


def lines_of(pieces: list[bytes]) -> list[dict[str, object]]:
    splitter = RequestSplitter(10)
    lines = b"".join(splitter.push(piece) for piece in pieces).splitlines()
    splitter.end()
    assert splitter.num_rows == len(lines)
    return [json.loads(line) for line in lines]


def test_any_cut_gives_the_same_lines() -> None:
    asked = json.loads(TRICKY)["requests"]
    whole = lines_of([TRICKY])
    assert whole == [{"custom_id": one["custom_id"], "body": one["params"]} for one in asked]
    for at in range(len(TRICKY)):
        assert lines_of([TRICKY[:at], TRICKY[at:]]) == whole
    assert lines_of([bytes([byte]) for byte in TRICKY]) == whole


ROW = '{"custom_id":"a","params":{}}'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[]", "one member, the list requests"),
        ('{"request": []}', "one member"),
        ('{"requests": {}}', "one member"),
        (f'{{"requests": [{ROW}], "more": 1}}', "one member"),
        (f'{{"requests": [{ROW}]}} x', "one member"),
        ('{"requests": []}', "requests: must have at least 1 item"),
        (f'{{"requests": [{ROW}', "ends early"),
        (f'{{"requests": [{ROW}]}}\\', "ends early"),
        ("", "ends early"),
        (f'{{"requests": [{ROW} {ROW}]}}', r"requests\[1\]: the list must have objects"),
        (f'{{"requests": [{ROW},]}}', r"requests\[1\]: the list must have objects"),
        ('{"requests": [1]}', r"requests\[0\]: the list must have objects"),
        ('{"requests": [{"custom_id":"a","params":{]}]}', r"requests\[0\]: not valid JSON"),
        (
            '{"requests": [{"custom_id":"a","params":{"t":"\\ud800"}}]}',
            r"requests\[0\].params.t: must be valid Unicode",
        ),
        ('{"requests": [{"custom_id":"a","params":{"t":1e999}}]}', r"requests\[0\].params: a number is too large"),
        (f'{{"requests": [{{"custom_id":"a","params":{"[" * 300}{"]" * 300}}}]}}', r"requests\[0\]: not valid JSON"),
        (f'{{"requests": [{ROW},{ROW}]}}', r"requests\[1\].custom_id: a is also that of requests\[0\]"),
        ('{"requests": [{"params":{}}]}', r"requests\[0\].custom_id: must be a string that matches"),
        ('{"requests": [{"custom_id":"a b","params":{}}]}', r"requests\[0\].custom_id: must be"),
        (f'{{"requests": [{{"custom_id":"{"x" * 65}","params":{{}}}}]}}', r"requests\[0\].custom_id: must be"),
        ('{"requests": [{"custom_id":"a"}]}', r"requests\[0\].params: must be an object"),
        ('{"requests": [{"custom_id":"a","params":{},"url":1}]}', r"requests\[0\].url: unknown field"),
        (
            f'{{"requests": [{",".join(ROW.replace("a", str(i), 1) for i in range(11))}]}}',
            "requests: must have at most",
        ),
    ],
)
def test_wrong_bodies_are_refused(body: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        lines_of([body.encode()])


def test_a_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.apis.message_batches.splitting.MAX_ROW_BYTES", 1000)
    start = '{"requests": [{"custom_id":"a","params":{"t":"'
    for pieces in ([start.encode() + b"x" * 2000], [start.encode(), b"x" * 2000 + b'"}}]}']):
        with pytest.raises(RequestError, match=r"requests\[0\]: larger than 1000 bytes"):
            lines_of(pieces)


def test_the_values_of_a_request_are_bounded() -> None:
    """Many small values take twenty times the memory of their text."""
    with pytest.raises(TooLargeError, match="parsed values"):
        lines_of([f'{{"requests":[{{"custom_id":"a","params":{{"t":[{"[]," * 400_000}[]]}}}}]}}'.encode()])
