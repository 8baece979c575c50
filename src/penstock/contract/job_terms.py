"""What a job and the options of its submission share: limits, names, and the record that is stored with a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from penstock.contract.fields import NAME_PATTERN
from penstock.contract.sampling import encodable


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """Bytes that are stored in the same step as a job, and for how long they and the job's result are kept."""

    data: bytes = field(repr=False)
    keep_ms: int
    """Milliseconds after the job's end. While the job is open, its record does not expire."""


NO_RESPONSE = ResponseRecord(b"", 0)
"""Stands for the absence of a record."""


MAX_DEADLINE_S = 366 * 24 * 3600
"""Longest time for which a job may wait for its start, or live: a year."""
MAX_READER_GRACE_S = 600
"""Longest time for which a job that needs a reader may be without one. sweep.lua forgets readers after that time."""
MAX_TAGS = 4
MAX_TAG_CHARS = 64
TAG_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:=/@+-]*$"
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TAG_CHARS, pattern=TAG_PATTERN)]
"""A name by which its tenant's jobs can be listed."""
MAX_CUSTOM_ID_CHARS = 256
Metadata = dict[
    Annotated[str, StringConstraints(min_length=1, max_length=MAX_METADATA_KEY_CHARS), AfterValidator(encodable)],
    Annotated[str, StringConstraints(max_length=MAX_METADATA_VALUE_CHARS), AfterValidator(encodable)],
]

MAX_KEY_CONCURRENCY = 100_000
"""Most jobs of a concurrency key that may be queued or running at once."""
MIN_KEY_RATE, MAX_KEY_RATE = 0.001, 1000.0
"""Jobs of a concurrency key that may join the queue in a second, at least and at most."""
