"""Storage of API keys in `penstock:keys`. An operator writes it and gateways read it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any, cast

from pydantic import ValidationError
from redis.asyncio import Redis

from penstock.contract import api_keys
from penstock.contract.api_keys import ApiKey
from penstock.contract.errors import NotFoundError
from penstock.contract.priority import ClassName
from penstock.contract.problems import request_error
from penstock.contract.terms import Terms
from penstock.queue import keys
from penstock.queue.broker.connection import translated

_LOG = logging.getLogger(__name__)


class KeyStore:
    """The installation's API keys. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)

    async def all(self) -> dict[str, ApiKey]:
        """Return all keys by id, revoked ones included. An unreadable record becomes a revoked key without a tenant."""
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
        pepper: str = "",
    ) -> tuple[str, ApiKey]:
        """Create a key. Returns the key, which cannot be read again later, and its record.

        Raises RequestError that names the invalid field.
        """
        key, key_id, digest = api_keys.mint(pepper)
        try:
            record = ApiKey(
                key_id=key_id,
                digest=digest,
                tenant=tenant,
                scopes=cast(Any, frozenset(scopes)),
                terms=terms,
                highest_class=highest_class,
                label=label,
                created_s=int(time.time()),
            )
        except ValidationError as error:
            raise request_error(error) from error
        await self._put(record)
        return key, record

    async def revoke(self, key_id: str) -> None:
        """Revoke a key. Gateways may accept it until their cached copy expires. Raises NotFoundError."""
        record = (await self.all()).get(key_id)
        if record is None:
            raise NotFoundError(f"no API key {key_id}", param="key_id")
        await self._put(record.model_copy(update={"is_revoked": True}))

    async def _put(self, record: ApiKey) -> None:
        with translated():
            await self._redis.hset(keys.API_KEYS, record.key_id, record.model_dump_json())
