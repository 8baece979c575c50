"""Stored files: their records, purposes and ids."""

from __future__ import annotations

import re
from dataclasses import dataclass

import uuid_utils

BATCH = "batch"
BATCH_OUTPUT = "batch_output"
PURPOSES = ("assistants", BATCH, "evals", "fine-tune", "user_data", "vision")
"""Purposes of uploads. Only a file of the purpose `batch` can be the input of a batch."""
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
MAX_NAME_CHARS = 255


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is whole and kept."""

    file_id: str
    tenant: str
    name: str
    purpose: str
    num_bytes: int
    created_ms: int
    expires_ms: int | None
    is_lost: bool = False
    """Whether an audit has found that the storage lost its content."""

    @property
    def object_name(self) -> str:
        """The name of its content in the storage."""
        return object_of(self.file_id)


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is to be kept, with the life that its owner wants; 0: no end."""

    file_id: str
    name: str
    purpose: str
    num_bytes: int
    life_ms: int


def new_file_id() -> str:
    """Return the id of a new file. Ids sort by the time when they were made."""
    return f"file-{uuid_utils.uuid7().hex}"


def is_file_id(text: str) -> bool:
    """Return whether `text` has the form of a file's id."""
    return _FILE_ID.fullmatch(text) is not None


def object_of(file_id: str) -> str:
    """Return the name of a file's content in the storage."""
    return f"files/{file_id}"
