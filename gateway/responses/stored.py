"""Reading of stored responses. A large record claims memory from the budget of results before it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from penstock.contract.errors import NotFoundError
from penstock.gateway.responses.ids import no_response, response_id_of
from penstock.gateway.responses.record import StoredResponse, decode_stored_response
from penstock.gateway.shared_budget import Claim
from penstock.producer.client import AsyncClient

LARGE_RECORD_BYTES = 256 << 10
"""A larger record claims its memory."""
MAX_BYTES_ON_LOOP = 16 << 10
"""A larger record or result is decoded on a thread."""


def bytes_to_claim(num_bytes: int) -> int:
    """Return how many bytes to claim for so many bytes of a record or result."""
    return num_bytes if num_bytes > LARGE_RECORD_BYTES else 0


def decoding_bytes_to_claim(num_bytes: int) -> int:
    """Return how many bytes to claim while a record of so many bytes is decoded: for its bytes and for the record."""
    return 2 * bytes_to_claim(num_bytes)


async def record_of(client: AsyncClient, claim: Claim, job_id: str, tenant: str) -> StoredResponse:
    """Return the record of a stored response, for whose memory the claim grows.

    Raises NotFoundError that names the response, and UnavailableError if there is no memory for too long.
    """
    try:
        num_bytes = (await client.responses.num_bytes(job_id, tenant)).record
        claim.shrink_to(0)
        await claim.grow_to(decoding_bytes_to_claim(num_bytes))
        return await decoded_record(await client.responses.read(job_id, tenant))
    except NotFoundError:
        raise no_response(response_id_of(job_id)) from None


async def record_without_input_of(client: AsyncClient, claim: Claim, job_id: str, tenant: str) -> StoredResponse:
    """Return a record without its input, and keep memory for that only. Raises what `record_of` raises."""
    record = (await record_of(client, claim, job_id, tenant)).without_input()
    claim.shrink_to(bytes_to_claim(len(record.echo)))
    return record


async def decoded_record(data: bytes) -> StoredResponse:
    """Decode a record without holding the event loop."""
    if len(data) <= MAX_BYTES_ON_LOOP:
        return decode_stored_response(data)
    return await asyncio.to_thread(decode_stored_response, data)


RecordSource = Callable[[Claim], Awaitable[StoredResponse]]
"""Returns the record of an answer without its input. The claim, or an earlier one, covers the memory that is kept."""


async def new_record(record: StoredResponse, claim: Claim) -> RecordSource:
    """Return the source of a new response's record, for whose memory `claim` grows. It outlives the answer."""
    kept = record.without_input()
    await claim.grow_to(bytes_to_claim(len(kept.echo)))

    async def bring(_: Claim) -> StoredResponse:
        return kept

    return bring


def stored_record(client: AsyncClient, job_id: str, tenant: str) -> RecordSource:
    """Return the source of a stored record. Raises what `record_of` raises when it is called."""
    return lambda claim: record_without_input_of(client, claim, job_id, tenant)
