"""What identifies a job: its id, which names its pool and its time, and its caller's idempotency key."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.contract.sampling import SamplingParams

_UUID7_PATTERN = r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
JOB_ID_PATTERN = rf"^[A-Za-z0-9_-]{{1,64}}(~[0-9]{{1,4}})?\.{_UUID7_PATTERN}$"


def pool_of(job_id: str) -> str:
    """Return the pool that a job id names."""
    return job_id.partition(".")[0]


def is_job_id(text: str) -> bool:
    """Return whether `text` has the form of a job id."""
    return re.fullmatch(JOB_ID_PATTERN, text) is not None


def created_at(job_id: str) -> datetime:
    """Return the time in a job's id, in UTC. A UUIDv7 begins with the Unix time in milliseconds."""
    uuid = job_id.rpartition(".")[2].replace("-", "")
    return datetime.fromtimestamp(int(uuid[:12], 16) / 1000, UTC)


def seed_of(job_id: str, params: SamplingParams) -> int:
    """Return the job's 64-bit seed: the caller's, else one derived from the job id."""
    if params.seed is not None:
        return params.seed & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class JobKey:
    """An idempotency key and the tenant that it belongs to."""

    tenant: str
    key: str

    def rank_of(self, pool: str) -> bytes:
        """Return the rank of a pool for this key. Every process computes the same one (rendezvous hashing)."""
        text = "\0".join((pool, self.tenant, self.key))
        return hashlib.blake2b(text.encode(), digest_size=8).digest()
