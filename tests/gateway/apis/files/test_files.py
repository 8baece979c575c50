"""`/v1/files` through OpenAI's official client and plain HTTP: a file arrives whole, or not at all."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import redis as sync_redis
from fakes.command import run_command
from fakes.waiting import wait_until

from penstock.contract.errors import UnavailableError
from penstock.producer.client import AsyncClient
from penstock.producer.files.service import Files
from penstock.producer.files.storage import FilesSettings, Storage
from tests.gateway.conftest import EchoEngine, Stack

MIB = 1 << 20
F = "penstock:{.files}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def url(stack: Stack, shared_engine: EchoEngine, folder: Path) -> str:
    """A gateway that stores files in a folder, of at most 8 MiB each."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_FILES_URL", str(folder))
        patched.setenv("PENSTOCK_FILES_MAX_FILE_MIB", "8")
        patched.setenv("PENSTOCK_FILES_MAX_TENANT_MIB", "24")
        patched.setenv("PENSTOCK_FILES_MIN_FREE_MIB", "1")
        return str(stack.start_gateway(body_timeout_s=2.0))


@pytest.fixture(autouse=True)
def _empty(api: openai.OpenAI) -> Iterator[None]:
    yield
    for file in api.files.list():
        api.files.delete(file.id)


def stored(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/files/*") if path.is_file())


def test_a_file_comes_back_byte_for_byte(api: openai.OpenAI) -> None:
    content = os.urandom(5 * MIB + 17) + b"\r\n--boundary\r\n" * 1000
    made = api.files.create(file=("rows.jsonl", content), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(content), "rows.jsonl", "batch", "processed")
    assert made.expires_at is not None and abs(made.expires_at - made.created_at - 30 * 86_400) <= 1
    assert api.files.content(made.id).read() == content
    assert api.files.retrieve(made.id) == made
    assert [file.id for file in api.files.list()] == [made.id]
    assert api.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="no file"):
        api.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError, match="no file"):
        api.files.content(made.id)


def test_pages_order_and_purposes(api: openai.OpenAI) -> None:
    made = [api.files.create(file=(f"{i}", b"x"), purpose="batch" if i % 2 else "user_data").id for i in range(5)]
    assert [file.id for file in api.files.list(limit=2)] == made[::-1]
    assert [file.id for file in api.files.list(order="asc", limit=2, after=made[1])] == made[2:]
    assert [file.id for file in api.files.list(purpose="batch")] == [made[3], made[1]]
    with pytest.raises(openai.BadRequestError, match="no object"):
        api.files.list(after="file-unknown")


def test_ranges(api: openai.OpenAI, http: httpx.Client) -> None:
    file_id = api.files.create(file=("a.txt", b"0123456789"), purpose="user_data").id

    def part(wanted: str) -> httpx.Response:
        return http.get(f"/v1/files/{file_id}/content", headers={"range": wanted})

    assert (part("bytes=2-4").status_code, part("bytes=2-4").content) == (206, b"234")
    assert part("bytes=2-4").headers["content-range"] == "bytes 2-4/10"
    assert part("bytes=7-").content == b"789"
    assert part("bytes=-3").content == b"789"
    assert part("bytes=8-99").content == b"89"
    assert part("bytes=10-").status_code == 416
    assert part("bytes=1-2,4-5").json()["error"]["param"] == "range"
    head = http.head(f"/v1/files/{file_id}/content")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "10", b"")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "lunch"}, "purpose"),
        ({"purpose": "batch", "colour": "red"}, "colour"),
        ({"purpose": "batch", "expires_after[seconds]": "7200"}, "expires_after[anchor]"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "0"}, "expires_after"),
    ],
)
def test_wrong_forms_are_refused_by_name(http: httpx.Client, folder: Path, fields: dict[str, str], param: str) -> None:
    answer = http.post("/v1/files", data=fields, files={"file": ("a", b"x" * 100)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)
    assert stored(folder) == []


def test_a_form_may_name_its_purpose_behind_the_file(http: httpx.Client) -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nhello\r\n'
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    )
    answer = http.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=x"})
    assert answer.json()["bytes"] == 5
    cut = http.post("/v1/files", content=body[:-20], headers={"content-type": "multipart/form-data; boundary=x"})
    assert cut.json()["error"]["code"] == "body_incomplete"
    other = http.post("/v1/files", json={"file": "x"})
    assert other.json()["error"]["code"] == "unsupported_media_type"


def test_a_key_makes_one_file(api: openai.OpenAI, folder: Path, redis_url: str) -> None:
    def make(content: bytes) -> str:
        file = ("a.jsonl", content)
        return api.files.create(file=file, purpose="batch", extra_headers={"Idempotency-Key": "once"}).id

    first = make(b"same")
    assert make(b"same") == first
    with pytest.raises(openai.ConflictError, match="Idempotency-Key belongs to file"):
        make(b"other")
    assert [file.id for file in api.files.list()] == [first]
    with sync_redis.Redis.from_url(redis_url) as redis:
        assert redis.hget(f"{F}:stored", "default") == b"4"
        assert redis.hlen(f"{F}:uploading") == 0
    api.files.delete(first)
    assert make(b"same") != first


def test_too_large_files_and_full_tenants_are_refused(api: openai.OpenAI, http: httpx.Client, folder: Path) -> None:
    with pytest.raises(openai.APIStatusError, match="MAX_FILE_MIB") as refused:
        api.files.create(file=("a", bytes(9 * MIB)), purpose="batch")
    assert refused.value.status_code == 413

    def unannounced() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(9):
            yield bytes(MIB)

    answer = http.post("/v1/files", content=unannounced(), headers={"content-type": "multipart/form-data; boundary=x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")
    assert stored(folder) == []
    for _ in range(3):
        api.files.create(file=("a", bytes(7 * MIB)), purpose="batch")
    with pytest.raises(openai.RateLimitError, match="PENSTOCK_FILES_MAX_TENANT_MIB"):
        api.files.create(file=("a", bytes(7 * MIB)), purpose="batch")


def test_slow_and_interrupted_uploads_leave_nothing(url: str, http: httpx.Client, folder: Path, redis_url: str) -> None:
    host, port = str(urlsplit(url).hostname), int(urlsplit(url).port or 0)
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        "Content-Length: 4000000\r\n\r\n--x\r\nContent-Disposition: form-data; "
        'name="file"; filename="a"\r\n\r\n'
    ).encode()
    with socket.create_connection((host, port)) as gone, socket.create_connection((host, port)) as slow:
        began_s = time.monotonic()
        for one in (gone, slow):
            one.sendall(head + bytes(30_000))
        wait_until(lambda: len(stored(folder)) >= 2)
        gone.close()
        slow.settimeout(60)
        # 2 s as for any body, and 1.8 s more for 30,000 bytes at 16 KiB/s. The whole body may take four minutes.
        answer = b""
        while b"body_timeout" not in answer:
            piece = slow.recv(65536)
            assert piece, answer
            answer += piece
        assert 3 < time.monotonic() - began_s < 60
    assert stored(folder) == []
    with sync_redis.Redis.from_url(redis_url) as redis:
        assert not redis.exists(f"{F}:uploads", f"{F}:uploading")


def test_expired_files_and_dropped_uploads_vanish(api: openai.OpenAI, folder: Path, redis_url: str) -> None:
    expiring: Any = {"anchor": "created_at", "seconds": 1}
    file_id = api.files.create(file=("a", b"x"), purpose="batch", expires_after=expiring).id
    kept = api.files.create(file=("a", b"x"), purpose="batch").id
    orphan = stored(folder)[0].parent / ("file-" + "0" * 32)
    orphan.write_bytes(b"of an earlier Redis")
    os.utime(orphan, (0, 0))
    time.sleep(1.1)

    async def clean() -> None:
        async with AsyncClient(redis_url) as client:
            files = Files(FilesSettings(url=str(folder)), client.files)
            # An upload whose gateway was killed: its lease has passed.
            upload = await files.begin("default", 100)
            await upload.write(b"x" * 100)
            upload._writer._file.close()  # type: ignore[attr-defined]
            with sync_redis.Redis.from_url(redis_url) as redis:
                redis.zadd(f"{F}:uploads", {upload.file_id: 1})
            await files.clean()
            assert await files.delete_orphans() == 1
            files.close()

    asyncio.run(clean())
    assert [path.name for path in stored(folder)] == [kept]
    assert file_id not in [file.id for file in api.files.list()]


def test_a_process_that_sees_another_storage_serves_no_files(
    api: openai.OpenAI, redis_url: str, tmp_path: Path
) -> None:
    api.files.create(file=("a", b"x"), purpose="batch")

    async def look() -> None:
        async with AsyncClient(redis_url) as client:
            for files, code in (
                (Files(FilesSettings(url=str(tmp_path)), client.files), "other_file_storage"),
                (Files(FilesSettings(), client.files), "no_file_storage"),
            ):
                with pytest.raises(UnavailableError) as refused:
                    await files.begin("default", 1)
                assert (refused.value.code, "PENSTOCK_FILES_URL" in refused.value.message) == (code, True)
                files.close()

    asyncio.run(look())


def test_a_content_that_the_storage_lost_is_not_an_empty_file(api: openai.OpenAI, folder: Path) -> None:
    file_id = api.files.create(file=("a", b"x"), purpose="batch").id
    for path in stored(folder):
        path.unlink()
    with pytest.raises(openai.NotFoundError, match="no file"):
        api.files.content(file_id)


def test_a_gateway_without_a_storage_names_the_setting(stack: Stack, engine: EchoEngine) -> None:
    with openai.OpenAI(base_url=f"{stack.start_gateway()}/v1", api_key="none", max_retries=0) as api:
        with pytest.raises(openai.InternalServerError, match="PENSTOCK_FILES_URL") as refused:
            api.files.create(file=("a", b"x"), purpose="batch")
        assert refused.value.status_code == 503
        with pytest.raises(openai.InternalServerError, match="PENSTOCK_FILES_URL"):
            api.files.list()


def test_a_full_disk_refuses_by_name(api: openai.OpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Storage, "free_bytes", lambda _: MIB)
    with pytest.raises(openai.RateLimitError, match="PENSTOCK_FILES_MIN_FREE_MIB"):
        api.files.create(file=("a", b"x"), purpose="batch")
    assert stored(folder) == []


def test_the_audit_compares_a_folder_with_the_records(api: openai.OpenAI, folder: Path, redis_url: str) -> None:
    kept, lost, cut = (api.files.create(file=("a", content), purpose="batch").id for content in (b"a", b"b", b"cut"))
    path = next(folder.glob(f"*/files/{kept}"))
    path.with_name(lost).unlink()
    path.with_name(cut).write_bytes(b"c")
    old, young, part = (
        path.with_name(f"file-{'0' * 32}"),
        path.with_name(f"file-{'1' * 32}"),
        path.parents[1] / "parts/x/y",
    )
    part.parent.mkdir(parents=True, exist_ok=True)
    for stray in (old, young, part):
        stray.write_bytes(b"x")
    for stray in (old, part):
        os.utime(stray, (time.time() - 7200,) * 2)
    found = run_command("audit", "--redis-url", redis_url, PENSTOCK_FILES_URL=str(folder))
    contents = [line for line in found.stdout.splitlines() if line.startswith("stored contents")]
    assert (found.returncode, sorted(line.split(": ", 2)[1] for line in contents)) == (
        1,
        ["I5 missing", "I5 stray", "I5 stray", "I5 wrong_size"],
    )
    mended = run_command("audit", "--redis-url", redis_url, "--repair", PENSTOCK_FILES_URL=str(folder))
    # A content of another size is no orphan, and nothing can restore it.
    assert mended.returncode == 1 and mended.stdout.count("wrong_size") == 2
    assert (old.exists(), young.exists(), part.exists(), path.exists()) == (False, True, False, True)
    assert [api.files.retrieve(one).status for one in (kept, lost)] == ["processed", "error"]
    young.unlink()
    api.files.delete(cut)
    whole = run_command("audit", "--redis-url", redis_url, PENSTOCK_FILES_URL=str(folder))
    assert (whole.returncode, whole.stdout.splitlines()[-1]) == (0, "stored contents: all contents match the records")
    elsewhere = run_command("audit", "--redis-url", redis_url, PENSTOCK_FILES_URL=str(folder / "elsewhere"))
    assert (elsewhere.returncode, "stored contents: not compared: " in elsewhere.stderr) == (0, True)
