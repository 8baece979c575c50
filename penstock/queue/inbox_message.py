"""Messages on the inbox of a reading process: chunks, and the progress of prompts that nodes compute.

A progress message is published and stored nowhere. It has no index, so it changes no reader's position in a log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.contract.output import Chunk
from penstock.contract.waiting import PrefillProgress
from penstock.queue.msgpack_codec import WireError, checked_map, pack, unpack_all
from penstock.queue.protocol_version import PROTOCOL_VERSION
from penstock.queue.wire import chunk_of

_PROGRESS = "g"
_NO_INDEX = -1
"""Stands for the index. Readers of earlier releases take the message for a chunk that they already have."""


@dataclass(frozen=True, slots=True)
class ProgressMessage:
    """The progress of a job's prompt: how many of its tokens are computed."""

    job_id: str
    progress: PrefillProgress


def encode_progress(job_id: str, progress: PrefillProgress) -> bytes:
    """Encode a progress message."""
    numbers = [progress.total, progress.cached, progress.processed, progress.time_ms]
    return pack({"v": PROTOCOL_VERSION, "j": job_id, "i": _NO_INDEX, _PROGRESS: numbers})


def decode_message(data: bytes) -> tuple[list[Chunk], list[ProgressMessage]]:
    """Decode the chunks and the progress in a message on an inbox. Raises WireError."""
    values = unpack_all(data)
    try:
        chunks = [chunk_of(value) for value in values if _PROGRESS not in value]
        if len(chunks) == len(values):
            return chunks, []
        return chunks, [_progress_of(value) for value in values if _PROGRESS in value]
    except (KeyError, TypeError) as error:
        raise WireError(f"not a chunk: {error!r}") from error


def _progress_of(value: Any) -> ProgressMessage:
    fields = checked_map(value)
    if (version := fields.get("v")) != PROTOCOL_VERSION:
        raise WireError(f"protocol version {version!r} is not {PROTOCOL_VERSION}")
    numbers, job_id = fields[_PROGRESS], fields["j"]
    if type(job_id) is not str or type(numbers) is not list or [*map(type, numbers)] != [int] * 4:
        raise WireError("not a progress message")
    return ProgressMessage(job_id, PrefillProgress(*numbers))
