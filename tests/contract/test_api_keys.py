"""API keys: only the whole key is accepted, and Redis stores nothing that would be accepted."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis

from penstock.contract.errors import ConflictError, ForbiddenError, NotFoundError, RequestError, UnauthorizedError
from penstock.contract.tenant import UNLIMITED, ApiKey, Terms, given_keys, given_record, identify, identify_given
from penstock.queue import keys
from penstock.queue.tenants.key_store import KeyStore

TERMS = Terms(max_open_jobs=3, tokens_per_minute=600)


async def test_key_identifies_its_tenant_and_terms(redis: Redis) -> None:
    store = KeyStore(redis)
    key, made = await store.add("acme", ["infer"], TERMS, label="tests")
    record = identify(key, await store.all(), "")
    assert record == made
    assert (record.tenant, record.terms, record.label) == ("acme", TERMS, "tests")
    record.require("infer")
    with pytest.raises(ForbiddenError, match="admin"):
        record.require("admin")


async def test_redis_never_holds_a_key_or_its_secret(redis: Redis) -> None:
    key, record = await KeyStore(redis).add("acme", ["infer"], UNLIMITED)
    kept = b"".join((await cast(Any, redis.hgetall(keys.API_KEYS))).values()).decode()
    assert record.key_id in kept
    assert key.split("-", 2)[2] not in kept


async def test_anything_but_the_key_is_refused(redis: Redis) -> None:
    store = KeyStore(redis)
    key, record = await store.add("acme", ["infer"], UNLIMITED)
    other, _ = await store.add("other", ["infer"], UNLIMITED)
    known = await store.all()
    mixed = f"pk-{record.key_id}-{other.split('-', 2)[2]}"
    forged = f"pk-{record.key_id}-{record.digest}"
    wrong = [key[:-1], key + "x", key.upper(), mixed, forged, f"pk-{'0' * 16}-{key.split('-', 2)[2]}", "", "x" * 10_000]
    for said in wrong:
        with pytest.raises(UnauthorizedError):
            identify(said, known, "")


async def test_pepper_is_part_of_every_key(redis: Redis) -> None:
    store = KeyStore(redis)
    key, _ = await store.add("acme", ["infer"], UNLIMITED, pepper="salt mine")
    known = await store.all()
    assert identify(key, known, "salt mine").tenant == "acme"
    with pytest.raises(UnauthorizedError):
        identify(key, known, "")


async def test_revoked_key_is_refused_and_its_record_stays(redis: Redis) -> None:
    store = KeyStore(redis)
    key, record = await store.add("acme", ["infer"], UNLIMITED)
    await store.revoke(record.key_id)
    known = await store.all()
    assert known[record.key_id].is_revoked
    with pytest.raises(UnauthorizedError):
        identify(key, known, "")
    with pytest.raises(NotFoundError):
        await store.revoke("0" * 16)


def test_record_without_a_digest_accepts_no_key() -> None:
    empty = ApiKey(key_id="0" * 16, digest="", tenant="acme", is_revoked=True)
    with pytest.raises(UnauthorizedError):
        identify(f"pk-{'0' * 16}-x", {"0" * 16: empty}, "")


async def test_unreadable_key_record_does_not_hide_other_keys(redis: Redis) -> None:
    store = KeyStore(redis)
    key, _ = await store.add("acme", ["infer"], UNLIMITED)
    await cast(Any, redis.hset(keys.API_KEYS, "broken", b"{"))
    known = await store.all()
    assert len(known) == 2
    assert identify(key, known, "").tenant == "acme"


@pytest.mark.parametrize(("tenant", "label", "param"), [("a b", "", "tenant"), ("acme", "x" * 300, "label")])
async def test_wrong_field_of_a_new_key_is_named(redis: Redis, tenant: str, label: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        await KeyStore(redis).add(tenant, ["infer"], UNLIMITED, label=label)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("text", "keys_in_it"),
    [
        ("token-abc123", ("token-abc123",)),
        ("one,two three\nfour\n# a comment\n  five, one", ("one", "two", "three", "four", "five")),
    ],
)
def test_keys_of_an_operator_are_separated(text: str, keys_in_it: tuple[str, ...]) -> None:
    assert given_keys(text) == keys_in_it


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (" , ", "has no key"),
        ("secret\N{EURO SIGN}", "printable ASCII"),
        ("x" * 257, "1 to 256"),
        (f"pk-{'0' * 16}-x", "keys add"),
    ],
)
def test_a_wrong_key_of_an_operator_is_refused_and_not_shown(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        given_keys(text)
    assert text not in str(refused.value)


async def test_a_key_of_an_operator_has_a_record_with_terms_and_can_be_revoked(redis: Redis) -> None:
    store, record = KeyStore(redis), given_record("token-abc123", "salt")
    given = {record.key_id: record}
    await store.add_given(record)
    await store.change(record.key_id, {}, {"max_open_jobs": 3})
    await store.add_given(record)  # as a restarted gateway does
    known = await store.all()
    found = identify_given("token-abc123", given, known, "salt")
    assert found is not None and found.terms.max_open_jobs == 3
    assert b"token-abc123" not in b"".join((await cast(Any, redis.hgetall(keys.API_KEYS))).values())

    assert identify_given("token-abc123", given, {}, "salt") == record, "Redis may have lost it"
    assert identify_given("token-abc124", given, known, "salt") is None
    assert identify_given("token-abc123", given, known, "pepper") is None
    assert identify_given("token-abc123", {}, known, "salt") is None, "a gateway without it does not accept it"

    await store.revoke(record.key_id)
    assert identify_given("token-abc123", given, await store.all(), "salt") is None
    with pytest.raises(ConflictError, match="is revoked; give another one"):
        await store.add_given(record)
