"""What the node and its grammar processes share: messages, limits, and the status of a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack

# The status of a mask, as workers report it to the node.

WRITTEN, MISFIT, PAST_LIMITS, UNKNOWN, EMPTY = range(5)
"""The mask is there; the tokens do not fit the grammar; the matcher hit a limit; the worker does not have the grammar;
no token can follow."""


_MASK_WORD_BITS = 32


def mask_bytes_of(vocab_size: int) -> int:
    """Return the bytes of a mask: one bit a token, in words of 32 bits."""
    return -(-vocab_size // _MASK_WORD_BITS) * 4


# Limits of what a grammar may cost. Limits of work apply first and are equal on every node; time and memory kill.

STEP_LEXER_FUEL = 20_000
"""Regular expressions that one mask may build. Ordinary schemas need fewer than 5,000 at any token."""
INITIAL_LEXER_FUEL = 200_000
"""The same for the compilation. Ordinary grammars need fewer than 50,000."""
MAX_LEXER_STATES = 50_000
"""Lexer states of a grammar, over all of its choices."""
STEP_MAX_ITEMS = 20_000
"""Parser items that one mask may create."""
MAX_ITEMS_IN_ROW = 20_000
"""Parser items that one byte of the text may have. An object has about four for each optional property."""

TRIAL_CPU_S = 1.0
"""Processor time in which a new grammar must compile and compute its first masks, in seconds."""
TRIAL_MEMORY_MIB = 256
CHEAP_TRIAL_CPU_S = 0.06
CHEAP_MASK_CPU_S = 0.02
"""A grammar is costly if its trial or one of its first masks took longer: the worker for costly grammars serves it."""
FAST_TASK_CPU_S = 0.1
"""A longer task kills the worker for cheap grammars, and its grammar counts as costly from then on."""
SLOW_TASK_CPU_S = 1.0
"""A longer task kills the worker for costly grammars, and the choices of its grammar fail."""
GUIDE_CPU_S = 5.0
"""Processor time that the masks of one choice may take, besides GUIDE_CPU_PER_TOKEN_S for each of its tokens."""
GUIDE_CPU_PER_TOKEN_S = 0.02
MAX_CALLS_MIB = 2
"""Text of the grammar of a request's calls: the schemas of all functions, and of an answer without calls."""
MAX_GRAMMAR_MIB = 64
"""Memory that a tenant's grammar and its choices may take in a worker."""
ACCOUNT_S = 600.0
"""After this time a grammar's account of memory, slow masks and kills begins anew."""
WORKER_MEMORY_MIB = 384
"""Address space that a worker may add to what it had when it was forked."""
MAX_WORKER_MIB = 192
"""A worker with more memory in use is replaced when it is idle. What it held is rebuilt on demand."""
TASK_WALL_S = 60.0
"""Longest time without a reply from a busy worker; the last defense, for a worker that is stopped.

On a core with two other busy processes, a worker of niceness SLOW_NICENESS gets a twentieth of the processor time. A
trial that needs TRIAL_CPU_S then takes 20 s.
"""
TEMPLATE_WALL_S = 120.0
"""Longest time that loading the tokenizer may take."""
SLOW_NICENESS = 10
"""Niceness of trials and of the worker for costly grammars, so that they do not slow down steps and cheap masks."""


# Messages between the node and its grammar processes: msgpack after a four-byte length.

_LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 28


def frame(message: Any) -> bytes:
    """Encode a message."""
    body: bytes = msgpack.packb(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class FrameReader:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that these bytes complete. Raises ValueError for an impossible length."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
            if end > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {end} bytes")
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield msgpack.unpackb(body, strict_map_key=False)
