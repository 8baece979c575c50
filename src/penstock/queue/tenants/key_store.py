"""Storage of API keys in `penstock:keys`. An operator writes it and gateways read it.

A copy without digests is among the keys of batches, because workers run batches on the terms of an API key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from pydantic import ValidationError
from redis.asyncio import Redis

from penstock.contract.durability import MEMORY, Durability
from penstock.contract.errors import ConflictError, NotFoundError, PenstockError, RequestError
from penstock.contract.priority import ClassName
from penstock.contract.problems import request_error
from penstock.contract.tenant import ANONYMOUS, OPENED, ApiKey, Terms, keys_in_use, mint
from penstock.queue import keys
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.broker.durable_calls import confirmed_writes

_LOG = logging.getLogger(__package__)
MAX_SHOWN = 64
"""Characters of a name, and ids, that an error message shows."""
MAX_NAMED = 3
"""Keys that an error message names."""


class KeyStore:
    """The installation's API keys. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis = cast(Any, redis)

    async def all(self) -> dict[str, ApiKey]:
        """Return all keys by id, revoked ones included. An unreadable record becomes a revoked key without a tenant."""
        return {key_id: key for key_id, key in (await self.records()).items() if key_id != OPENED}

    @retried
    async def records(self) -> dict[str, ApiKey]:
        """Return what `all` returns, and the record OPENED if there is one."""
        with translated():
            found = await self._redis.hgetall(keys.API_KEYS)
        known = {}
        for key_id, data in found.items():
            try:
                known[key_id.decode()] = ApiKey.model_validate_json(data)
            except (ValidationError, UnicodeDecodeError):
                _LOG.warning("unreadable key record", extra={"key_id": repr(key_id)})
                known[repr(key_id)] = ApiKey(key_id=repr(key_id), digest="", tenant="nobody", is_revoked=True)
        return known

    async def add(
        self,
        tenant: str,
        scopes: Iterable[str],
        terms: Terms,
        *,
        highest_class: ClassName = "standard",
        label: str = "",
        models: Iterable[str] = (),
        pepper: str = "",
    ) -> tuple[str, ApiKey]:
        """Create a key. Returns the key, which cannot be read again later, and its record.

        Raises RequestError that names the invalid field.
        """
        if tenant == ANONYMOUS:
            raise RequestError(f"tenant {tenant!r} is that of callers without a key; choose another", param="tenant")
        key, key_id, digest = mint(pepper)
        record = _checked(
            {
                "key_id": key_id,
                "digest": digest,
                "tenant": tenant,
                "scopes": frozenset(scopes),
                "terms": terms,
                "highest_class": highest_class,
                "label": label,
                "models": frozenset(models),
                "created_s": int(time.time()),
            }
        )
        with translated():
            # Not as a transaction, to which a gateway that makes the first key has no right.
            await self._redis.hset(keys.key_terms(), key_id, record.public_json())
            await self._redis.hset(keys.API_KEYS, key_id, record.model_dump_json())
            if await self._redis.hexists(keys.API_KEYS, OPENED):
                await self._redis.hdel(keys.API_KEYS, OPENED)
        return key, record

    async def open(self) -> None:
        """Let gateways on a loopback address serve callers without a key, until a key is added.

        Raises ConflictError while a key is in use.
        """
        if in_use := keys_in_use(await self.all()):
            named = ", ".join(f"{key.key_id} of {key.tenant}" for key in in_use[:MAX_NAMED])
            message = f"{len(in_use)} API keys are in use ({named}): first end each with `penstock keys revoke ID`"
            raise ConflictError(message, code="keys_in_use")
        record = ApiKey(key_id=OPENED, digest="", tenant="default", created_s=int(time.time()), is_revoked=True)
        with translated():
            await self._redis.hset(keys.API_KEYS, OPENED, record.model_dump_json())

    async def add_given(self, record: ApiKey) -> None:
        """Store the record of a key that an operator brings, unless it is there; what was set later stays.

        Raises ConflictError if the key is revoked.
        """
        found = (await self.all()).get(record.key_id)
        if found is not None and found.is_revoked:
            message = f"the given API key {record.key_id} is revoked; give another one"
            raise ConflictError(message, code="key_revoked", param="api_key")
        if found is None:
            record = record.model_copy(update={"created_s": int(time.time())})
            with translated():
                await self._redis.hset(keys.key_terms(), record.key_id, record.public_json())
                await self._redis.hset(keys.API_KEYS, record.key_id, record.model_dump_json())

    async def find(self, name: str, *, or_revoked: bool = False) -> ApiKey:
        """Return the key with this id, or the only key in use with this label or tenant.

        With `or_revoked`, if no key in use has the name, the only revoked one that has it. Raises NotFoundError, and
        RequestError if several keys have the name.
        """
        known = await self.all()
        if name in known:
            return known[name]
        named = [key for key in known.values() if name and name in (key.label, key.tenant)]
        found = [key for key in named if not key.is_revoked] or (named if or_revoked else [])
        if not found:
            raise NotFoundError(f"no API key in use has the id, label or tenant {name[:MAX_SHOWN]!r}", param="name")
        if len(found) > 1:
            ids = ", ".join(sorted(key.key_id for key in found)[:MAX_SHOWN])
            message = f"{len(found)} API keys have the label or tenant {name[:MAX_SHOWN]!r}; name one by its id: {ids}"
            raise RequestError(message, code="ambiguous_name", param="name")
        return found[0]

    async def change(self, key_id: str, changes: Mapping[str, Any], terms: Mapping[str, Any]) -> ApiKey:
        """Change fields of a key and of its terms, and return the new record. The secret stays valid.

        Raises NotFoundError, ConflictError for a revoked key, and RequestError that names the invalid field.
        """

        def changed(record: ApiKey) -> ApiKey:
            if record.is_revoked:
                raise ConflictError(f"the API key {key_id} is revoked; add a new one", code="key_revoked", param="name")
            new_terms = _checked_terms({**record.terms.model_dump(), **terms})
            return _checked({**record.model_dump(exclude={"terms"}), **changes, "terms": new_terms})

        return await self._update(key_id, changed)

    async def revoke(self, key_id: str, durability: Durability = MEMORY) -> None:
        """Revoke a key. Gateways may accept it until their cached copy expires. Raises NotFoundError.

        With another durability than `memory`, the call waits until the disk or a replica has it. A repeated call waits
        again. Raises UnsupportedDurabilityError, and NotOnDiskError or NotReplicatedError if the key is revoked and
        that was not confirmed in time.
        """
        await self._update(key_id, lambda record: record.model_copy(update={"is_revoked": True}), durability)

    async def _update(
        self, key_id: str, changed: Callable[[ApiKey], ApiKey], durability: Durability = MEMORY
    ) -> ApiKey:
        """Replace a key's record by `changed(record)`; it runs again if the keys have changed meanwhile."""
        done = f"the API key {key_id} is changed"
        with translated():
            async with confirmed_writes(self._redis, durability, done) as connection:
                while True:
                    await connection.call("WATCH", keys.API_KEYS)
                    new = changed(_record_of(key_id, await connection.call("HGET", keys.API_KEYS, key_id)))
                    commands = [
                        ("MULTI",),
                        ("HSET", keys.API_KEYS, key_id, new.model_dump_json()),
                        ("HSET", keys.key_terms(), key_id, new.public_json()),
                        ("EXEC",),
                    ]
                    *_, written = await asyncio.gather(*connection.call_all(commands))
                    if written is not None:
                        return new


_REVOKE = """if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[4])
return 1"""


class SeenKeys:
    """All keys as a gateway reads them. A key that was seen revoked stays so, also if Redis lost the revocation.

    A revoked key is never valid again: `KeyStore.change` refuses it. So a record that says otherwise is an older one.
    """

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self._redis = cast(Any, redis)
        self._store = KeyStore(redis, patience)
        self._revoked = set[str]()

    async def all(self) -> dict[str, ApiKey]:
        """Return all keys as `KeyStore.records` does. A lost revocation is written again."""
        known = await self._store.records()
        for key_id in [key_id for key_id in known if key_id in self._revoked and not known[key_id].is_revoked]:
            known[key_id] = await self._revoke_again(known[key_id])
        self._revoked = {key_id for key_id, key in known.items() if key.is_revoked} | self._revoked
        return known

    async def _revoke_again(self, found: ApiKey) -> ApiKey:
        revoked = found.model_copy(update={"is_revoked": True})
        facts = {"key_id": found.key_id}
        try:
            with translated():
                data = await self._redis.hget(keys.API_KEYS, found.key_id)
                revoked = _record_of(found.key_id, data).model_copy(update={"is_revoked": True})
                records = data, revoked.model_dump_json(), revoked.public_json()
                await self._redis.eval(_REVOKE, 2, keys.API_KEYS, keys.key_terms(), found.key_id, *records)
            _LOG.warning("redis had lost the revocation of an API key; it is revoked again", extra=facts)
        except PenstockError as error:
            _LOG.warning("a revocation cannot be repeated", extra={**facts, "reason": error.reason})
        return revoked


def _record_of(key_id: str, data: bytes | None) -> ApiKey:
    if data is None:
        raise NotFoundError(f"no API key {key_id[:MAX_SHOWN]}", param="key_id")
    try:
        return ApiKey.model_validate_json(data)
    except ValidationError:
        message = f"the record of the API key {key_id} cannot be read; add a new key"
        raise ConflictError(message, code="unreadable_key", param="key_id") from None


def _checked(fields: Mapping[str, Any]) -> ApiKey:
    try:
        return ApiKey.model_validate(fields)
    except ValidationError as error:
        raise request_error(error) from error


def _checked_terms(fields: Mapping[str, Any]) -> Terms:
    try:
        return Terms.model_validate(fields)
    except ValidationError as error:
        raise request_error(error) from error
