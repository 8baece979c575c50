"""Files of JSON Lines: characters at which some readers end a line, and files as editors write them."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from fakes.waiting import wait_until

from penstock.contract.errors import RequestError
from penstock.producer.batch.lines import check_file
from penstock.producer.openai.json_parts import json_line

ENDS = "\u2028\u2029\x85"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def row(custom_id: str) -> str:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": BODY}
    return json.dumps(line, ensure_ascii=False)


FILES = {
    "mark": ("\ufeff" + row("a") + "\n" + row("b") + "\n").encode(),
    "crlf": f"{row('a')}\r\n{row('b')}\r\n".encode(),
    "blank lines": f"\n\r\n{row('a')}\n \t\n{row('b')}\n\n".encode(),
    "no last end": f"{row('a')}\n{row('b')}".encode(),
    "ends inside": f"{row('a')}\n{row('b' + ENDS)}\n".encode(),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_any_editor_is_run(door: httpx.Client, tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(FILES[name])
    assert check_file(path).num_rows == 2
    file = door.post("/v1/files", files={"file": ("rows.jsonl", FILES[name])}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = door.post("/v1/batches", json=asked).json()
    batch_path = f"/v1/batches/{batch['id']}"
    batch = wait_until(lambda: door.get(batch_path).json(), lambda one: one["status"] in ("completed", "failed"))
    assert batch["status"] == "completed", batch
    text = door.get(f"/v1/files/{batch['output_file_id']}/content").text
    found = sorted(json.loads(line)["custom_id"] for line in text.splitlines())
    assert found == ["a", "b" + ENDS if name == "ends inside" else "b"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_file_in_another_encoding_is_refused_by_its_name(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f"{row('a')}\n".encode(encoding))
    with pytest.raises(RequestError, match=f"line 1: the JSON is encoded as {encoding[:6].upper()}"):
        check_file(path)


@pytest.mark.parametrize("character", ENDS)
def test_a_line_holds_no_character_at_which_a_reader_ends_it(character: str) -> None:
    line = json_line({"text": f"a{character}é"})
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"text": f"a{character}é"}
    assert "é" in line.decode()
