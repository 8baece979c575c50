"""Files and batches in a bucket of a real S3 server, through a gateway: also while the server is away for a while."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import boto3  # type: ignore[import-untyped]
import httpx
import pytest
from fakes.command import run_command
from fakes.waiting import wait_until
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from penstock.producer.client import AsyncClient
from penstock.producer.files.service import Files
from penstock.producer.files.storage import FilesSettings
from tests.gateway.conftest import MODEL, EchoEngine, Stack

URL = "s3://penstock-test/here"
CHAT = "/v1/chat/completions"
MIB = 1 << 20


class S3Server:
    """An S3 server that can be stopped and started again; its objects stay."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (
            ("AWS_ENDPOINT_URL", server.url),
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_MAX_ATTEMPTS", "1"),
            ("PENSTOCK_FILES_URL", URL),
        ):
            patched.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="penstock-test")
        yield server
    server.stop()


def objects() -> set[str]:
    """The names of the bucket's objects, without the storage's id."""
    found = boto3.client("s3").list_objects_v2(Bucket="penstock-test").get("Contents", [])
    return {one["Key"].removeprefix("here/").partition("/")[2] for one in found}


@pytest.fixture(scope="module")
def http(stack: Stack, shared_engine: EchoEngine, s3: S3Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as client:
        yield client


def upload(http: httpx.Client, content: bytes) -> str:
    answer = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("rows.jsonl", content)})
    assert answer.is_success, answer.text
    return str(answer.json()["id"])


def test_a_file_in_a_bucket(http: httpx.Client) -> None:
    content = bytes(range(256)) * (12 * MIB // 256)
    file_id = upload(http, content)
    assert objects() == {"penstock-storage", f"files/{file_id}"}
    path = f"/v1/files/{file_id}/content"
    assert http.get(path).content == content
    assert http.get(path, headers={"range": f"bytes={6 * MIB}-{6 * MIB + 9}"}).content == content[:10]
    cut = http.post(
        "/v1/files",
        content=b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(7 * MIB),
        headers={"content-type": "multipart/form-data; boundary=x"},
    )
    assert cut.json()["error"]["code"] == "body_incomplete"
    assert http.delete(f"/v1/files/{file_id}").is_success
    assert objects() == {"penstock-storage"}
    assert boto3.client("s3").list_multipart_uploads(Bucket="penstock-test").get("Uploads", []) == []


def rows(num_rows: int) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "some text"}]}
    lines = [{"custom_id": f"{i}", "method": "POST", "url": CHAT, "body": body} for i in range(num_rows)]
    return "\n".join(map(json.dumps, lines)).encode()


def batch_of(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    return dict(http.get(f"/v1/batches/{batch_id}").json())


def wait(http: httpx.Client, batch_id: str, what: str) -> dict[str, Any]:
    return wait_until(lambda: batch_of(http, batch_id), lambda batch: what in json.dumps(batch))


def test_an_outage_pauses_a_batch_and_loses_nothing(
    http: httpx.Client, s3: S3Server, shared_engine: EchoEngine
) -> None:
    shared_engine.step_s = 0.05
    file_id = upload(http, rows(100))
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch_id = http.post("/v1/batches", json=body).json()["id"]
    wait(http, batch_id, '"in_progress"')
    s3.stop()
    batch = wait(http, batch_id, "the storage of files is unreachable")
    assert batch["status"] == "in_progress"
    refused = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x")})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "files_unavailable")
    s3.start()
    shared_engine.step_s = 0.0
    batch = wait(http, batch_id, '"completed_at": 1')
    assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
    lines = http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    assert sorted(int(json.loads(line)["custom_id"]) for line in lines) == [*range(100)]
    # The parts are deleted after the batch has ended.
    left = {"penstock-storage", f"files/{file_id}", f"files/{batch['output_file_id']}"}
    wait_until(objects, lambda found: found == left)


def test_the_audit_compares_a_bucket_with_the_records(
    http: httpx.Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, lost = upload(http, b"kept"), upload(http, b"lost")
    storage = storage_id()
    s3 = boto3.client("s3")
    s3.delete_object(Bucket="penstock-test", Key=f"here/{storage}/files/{lost}")
    strays = (f"files/file-{'0' * 32}", "parts/batch_0/00000001-000000.output")
    for name in strays:
        s3.put_object(Bucket="penstock-test", Key=f"here/{storage}/{name}", Body=b"x")
    # Young objects may be about to get their records.
    said = run_command("audit", "--redis-url", redis_url).stdout
    assert f"I5 missing: storage files/{lost}" in said and "stray" not in said
    monkeypatch.setattr("penstock.producer.files.service.ORPHAN_AGE_S", -1.0)
    found = run_command("audit", "--redis-url", redis_url)
    assert found.returncode == 1
    for name in (strays[0], "parts/batch_0/"):
        assert f"I5 stray: storage {name}: no record of it" in found.stdout
    mended = run_command("audit", "--redis-url", redis_url, "--repair")
    assert mended.returncode == 0, mended.stdout
    assert "stored contents: all contents match the records" in mended.stdout
    assert not objects() & set(strays) and f"files/{kept}" in objects()
    shown = http.get(f"/v1/files/{lost}").json()
    assert (shown["status"], shown["status_details"]) == ("error", "the storage has lost the content of this file")
    assert http.get(f"/v1/files/{lost}/content").json()["error"]["code"] == "file_not_found"
    body = {"input_file_id": lost, "endpoint": CHAT, "completion_window": "24h"}
    assert http.post("/v1/batches", json=body).json()["error"]["code"] == "file_not_found"
    assert http.delete(f"/v1/files/{lost}").is_success and http.delete(f"/v1/files/{kept}").is_success


def storage_id() -> str:
    (storage,) = {
        one["Key"].split("/")[1] for one in boto3.client("s3").list_objects_v2(Bucket="penstock-test")["Contents"]
    }
    return str(storage)


def test_orphans_of_a_bucket_are_deleted(http: httpx.Client, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = objects()
    storage = storage_id()
    boto3.client("s3").put_object(Bucket="penstock-test", Key=f"here/{storage}/files/file-{'0' * 32}", Body=b"x")
    monkeypatch.setattr("penstock.producer.files.service.ORPHAN_AGE_S", -1.0)

    async def delete() -> int:
        async with AsyncClient(redis_url) as client:
            files = Files(FilesSettings.load(), client.files)
            num_deleted = await files.delete_orphans()
            files.close()
            return num_deleted

    assert asyncio.run(delete()) == 1
    assert objects() == kept
    assert threading.active_count() < 100
