"""Only the holder of a batch's present lease changes it, and each of its rows is committed once."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from penstock.contract.errors import BusyError, ConflictError, InvariantError, NotFoundError
from penstock.queue import keys
from penstock.queue.files.batch import BatchLease, BatchSpec, Part, PartCounts, new_batch_id, new_message_batch_id
from penstock.queue.files.batch_records import BatchRecords, BatchTakenError, CheckedRows
from penstock.queue.files.file_records import FileLimits, FileRecords, NewFile, new_file_id
from penstock.queue.files.records_audit import audit_files

F = keys.prefix(keys.FILES)
DAY_MS = 86_400_000


async def stored_file(redis: Redis, *, num_bytes: int = 10, tenant: str = "ann", **limits: int) -> str:
    files, file_id = FileRecords(redis), new_file_id()
    await files.begin_upload(file_id, tenant, num_bytes, FileLimits(**limits))
    return await files.save(NewFile(file_id, "rows.jsonl", "batch", num_bytes, DAY_MS), tenant)


async def taken(redis: Redis, *, num_rows: int = 20) -> tuple[BatchRecords, BatchLease]:
    """Return a started batch's lease."""
    batches = BatchRecords(redis)
    spec = BatchSpec(await stored_file(redis), "/v1/chat/completions", "24h")
    await batches.create(new_batch_id(), "ann", spec, window_ms=DAY_MS, max_open=9)
    (lease,), _ = await batches.take(5, 6.0, 0.0)
    await batches.start(lease, num_rows, 0)
    return batches, lease


async def pass_on(redis: Any, batches: BatchRecords, lease: BatchLease) -> BatchLease:
    """Let the lease end, and another process take the batch."""
    await redis.zadd(f"{F}:open_batches", {lease.batch_id: 0})
    (other,), _ = await batches.take(5, 6.0, 0.0)
    assert other.token > lease.token
    return other


async def test_a_lease_that_was_given_back_is_not_renewed(redis: Redis) -> None:
    batches, lease = await taken(redis)
    await batches.release(lease)
    await batches.keep([lease], 6.0, 1.0)
    (other,), _ = await batches.take(5, 6.0, 0.0)
    assert other.batch_id == lease.batch_id


async def test_a_lease_ends_in_time_although_redis_clock_jumped_back(redis: Any) -> None:
    batches, lease = await taken(redis)
    assert (await batches.take(5, 6.0, 0.0))[0] == []
    await redis.zincrby(f"{F}:open_batches", 600_000, lease.batch_id)
    (other,), _ = await batches.take(5, 6.0, 0.0)
    assert other.token > lease.token


def part(lease: BatchLease, number: int, rows: int) -> tuple[str, list[Part], PartCounts]:
    name = f"parts/{lease.batch_id}/{lease.token}-{number}"
    return name, [Part(f"{name}.output", "output", 100)], PartCounts(completed=rows, output_tokens=3 * rows)


async def commit(batches: BatchRecords, lease: BatchLease, number: int, rows: range) -> None:
    name, files, counts = part(lease, number, len(rows))
    await batches.commit(lease, name, files, rows, counts)


async def test_a_holder_that_slept_through_its_lease_changes_nothing(redis: Redis) -> None:
    batches, old = await taken(redis)
    await commit(batches, old, 0, range(5))
    new = await pass_on(redis, batches, old)
    before = await redis.hgetall(keys.batch(old.batch_id))
    for call in (
        commit(batches, old, 1, range(5, 9)),
        batches.start(old, 99, 0),
        batches.fail(old, [], DAY_MS),
        batches.finalize(old, "completed"),
        batches.finish(old, "completed", {}, DAY_MS),
    ):
        old.is_lost = False
        with pytest.raises(BatchTakenError):
            await call
        assert old.is_lost
    await batches.release(old)
    await batches.keep([old, new], 6.0, 1.0)
    assert (old.is_lost, new.is_lost, new.status) == (True, False, "in_progress")
    after = await redis.hgetall(keys.batch(old.batch_id))
    assert {**before, b"rate": b"0.000"} == after
    assert (await batches.take(5, 6.0, 0.0))[0] == []
    await commit(batches, new, 0, range(5, 20))
    assert [one.name for one in await batches.parts(new.batch_id)] == [
        f"parts/{new.batch_id}/{old.token}-0.output",
        f"parts/{new.batch_id}/{new.token}-0.output",
    ]


async def test_a_row_is_committed_once_and_a_repeated_commit_counts_once(redis: Redis) -> None:
    batches, lease = await taken(redis)
    await commit(batches, lease, 0, range(5))
    await commit(batches, lease, 0, range(5))
    with pytest.raises(InvariantError, match="row 4"):
        await commit(batches, lease, 1, range(4, 8))
    record = await batches.find(lease.batch_id)
    assert (record.num_completed, record.output_tokens, len(await batches.parts(lease.batch_id))) == (5, 15, 1)
    assert await batches.committed_rows(lease.batch_id) == b"\xf8"
    assert await batches.num_rows_left() == 15


async def test_the_end_saves_the_files_and_frees_all_else(redis: Any) -> None:
    batches, lease = await taken(redis)
    record = await batches.find(lease.batch_id)
    files = FileRecords(redis)
    with pytest.raises(ConflictError, match="open batch"):
        await files.delete(record.spec.input_file_id, "ann")
    await commit(batches, lease, 0, range(20))
    await batches.finalize(lease, "completed")
    output = new_file_id()
    await files.begin_upload(output, "ann", 100)
    for _ in range(2):
        await batches.finish(lease, "completed", {"output": NewFile(output, "o", "batch_output", 100, DAY_MS)}, DAY_MS)
    record = await batches.find(lease.batch_id)
    assert (record.status, record.output_file_id, record.error_file_id) == ("completed", output, None)
    await files.delete(record.spec.input_file_id, "ann")
    assert (await files.find(output, "ann")).num_bytes == 100
    with pytest.raises(NotFoundError):
        await files.find(output, "bob")
    await files.delete(output, "ann")
    _, ends = await batches.take(5, 6.0, 0.0)
    assert ends == [(lease.batch_id, "completed", "ann")], "until its webhook endpoints are told"
    await batches.note_told(ends)
    assert (await batches.take(5, 6.0, 0.0))[1] == []
    await redis.zadd(f"{F}:expiry", {f"batch:{lease.batch_id}": 1})
    num_expired, garbage = await files.expire(10)
    assert (num_expired, f"parts/{lease.batch_id}/" in garbage) == (1, True)
    await files.forget(garbage)
    left = {name.decode() for name in await redis.keys("*")}
    assert left == set(), "nothing of a batch or a file outlives it"


async def test_tenants_cannot_change_the_batches_of_others(redis: Redis) -> None:
    batches, lease = await taken(redis)
    for call in (
        batches.find(lease.batch_id, "bob"),
        batches.cancel(lease.batch_id, "bob"),
        batches.pause(lease.batch_id, "bob", paused=True),
        batches.create(new_batch_id(), "bob", (await batches.find(lease.batch_id)).spec, window_ms=1, max_open=9),
    ):
        with pytest.raises(NotFoundError):
            await call
    assert await batches.ids("bob") == []


async def test_limits_count_what_is_stored_and_what_arrives(redis: Redis) -> None:
    await stored_file(redis, num_bytes=60)
    await FileRecords(redis).begin_upload(new_file_id(), "ann", 30, FileLimits())
    with pytest.raises(BusyError, match="MAX_TENANT_MIB"):
        await stored_file(redis, num_bytes=20, max_tenant_bytes=100)
    with pytest.raises(BusyError, match="MAX_TENANT_FILES"):
        await stored_file(redis, max_tenant_files=2)
    with pytest.raises(BusyError, match="PENSTOCK_FILES_MAX_FILES"):
        await stored_file(redis, tenant="bob", max_files=2)
    with pytest.raises(BusyError, match="PENSTOCK_FILES_MAX_MIB"):
        await stored_file(redis, num_bytes=20, tenant="bob", max_bytes=100)
    await stored_file(redis, num_bytes=20, tenant="bob", max_tenant_bytes=100)


async def test_the_audit_finds_what_no_record_explains(redis: Any) -> None:
    assert await audit_files(redis) is None
    batches, lease = await taken(redis)
    await commit(batches, lease, 0, range(5))
    await FileRecords(redis).begin_upload(new_file_id(), "ann", 30, FileLimits())
    assert await audit_files(redis) == []
    record = await batches.find(lease.batch_id)
    await redis.hincrby(f"{F}:stored", "ann", 3)
    await redis.zrem(f"{F}:files:ann", record.spec.input_file_id)
    await redis.zadd(f"{F}:open_batches", {"batch_gone": 1})
    await redis.hincrby(keys.stored_file(record.spec.input_file_id), "readers", 1)
    await redis.set(f"{F}:rows:batch_ended", b"\xff")
    found = await audit_files(redis)
    assert found is not None
    assert [(one.name, one.key.partition(":")[0], one.invariant) for one in found] == [
        ("lives_for_ever", "rows", "I10"),
        ("missing", "files", "I5"),
        ("stray", "open_batches", "I5"),
        ("wrong_sum", "file", "I5"),
        ("wrong_sum", "stored", "I5"),
    ]


async def with_input(redis: Redis, *, max_open: int = 0, max_rows: int = 0) -> tuple[BatchRecords, str]:
    """Make a batch together with its input, an upload of 10 bytes and 20 rows."""
    files, batches, file_id = FileRecords(redis), BatchRecords(redis), new_file_id()
    await files.begin_upload(file_id, "ann", 10)
    spec, rows = BatchSpec(file_id, "/v1/messages", "24h", output_life_s=9), CheckedRows(20, DAY_MS, max_open, max_rows)
    upload = NewFile(file_id, "input", "message_batch", 10, 0)
    return batches, await batches.create_with_input(new_message_batch_id(), spec, upload, tenant="ann", rows=rows)


async def test_a_batch_with_its_input_begins_and_ends_in_one_step_each(redis: Any) -> None:
    batches, batch_id = await with_input(redis)
    record = await batches.find(batch_id)
    assert (record.status, record.num_rows, await batches.num_rows_left()) == ("in_progress", 20, 20)
    with pytest.raises(ConflictError, match="has not ended"):
        await batches.delete(batch_id, "ann")
    with pytest.raises(BusyError, match="1 open batches"):
        await with_input(redis, max_open=1)
    with pytest.raises(BusyError, match="more than 39 rows"):
        await with_input(redis, max_rows=39)
    assert await audit_files(redis) == []
    (lease,), _ = await batches.take(5, 6.0, 0.0)
    await commit(batches, lease, 0, range(20))
    output = new_file_id()
    await FileRecords(redis).begin_upload(output, "ann", 100)
    await batches.finish(lease, "completed", {"output": NewFile(output, "o", "batch_output", 100, DAY_MS)}, DAY_MS)
    held = await FileRecords(redis).held_by("ann")
    assert (held.num_batches, held.num_files, held.num_bytes) == (1, 1, 100), "the input has ended with the batch"
    with pytest.raises(NotFoundError):
        await batches.delete(batch_id, "bob")
    await batches.delete(batch_id, "ann")
    assert await FileRecords(redis).held_by("ann") == (0, 0, 0)
    assert await audit_files(redis) == []
    _, garbage = await FileRecords(redis).expire(10)
    assert {f"files/{output}", f"files/{record.spec.input_file_id}"} <= {*garbage}


async def test_all_of_a_tenant_is_erased_also_an_open_batch(redis: Any) -> None:
    batches, lease = await taken(redis)
    await commit(batches, lease, 0, range(5))
    kept, files = await stored_file(redis, tenant="bob"), FileRecords(redis)
    await files.begin_upload(new_file_id(), "ann", 30, FileLimits())
    assert await files.held_by("ann") == (1, 1, 10)
    await with_input(redis)
    await files.erase("ann")
    assert await files.held_by("ann") == (0, 0, 0)
    await batches.keep([lease], 6.0, 1.0)
    assert lease.is_lost
    _, garbage = await files.expire(10)
    assert sorted(one.partition("/")[0] for one in garbage) == ["files", "files", "files", "parts", "parts"]
    await files.forget(garbage)
    assert await audit_files(redis) == []
    assert (await files.find(kept, "bob")).num_bytes == 10
    assert [name async for name in redis.scan_iter("*ann*")] == []
