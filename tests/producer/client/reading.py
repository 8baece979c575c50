"""Helpers that read and check streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from fakes.fake_node import fake_text, fake_tokens

from penstock.contract.output import Chunk
from penstock.producer.client import AsyncJob


async def read_all(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    """Read the whole stream."""
    return [chunk async for chunk in chunks]


async def read_some(chunks: AsyncIterator[Chunk], num_chunks: int) -> list[Chunk]:
    """Read this many chunks."""
    return [await anext(chunks) for _ in range(num_chunks)]


def check_whole(
    chunks: Iterable[Chunk], job: AsyncJob, num_tokens: int, *, num_choices: int = 1, ended: bool = True
) -> None:
    """Assert that the stream equals the fake node's tokens: in order, none lost or repeated, the outcome last."""
    seen = list(chunks)
    assert [chunk.index for chunk in seen] == list(range(num_tokens * num_choices + ended))
    for choice in range(num_choices):
        said = [chunk for chunk in seen if chunk.choice == choice and chunk.outcome is None]
        assert [t for chunk in said for t in chunk.token_ids] == fake_tokens(job.id, num_tokens, choice)
        assert "".join(chunk.text for chunk in said) == fake_text(fake_tokens(job.id, num_tokens, choice))
        assert [chunk.finish_reason for chunk in said] == [None] * (num_tokens - 1) + ["length"]
    assert [chunk.index for chunk in seen if chunk.outcome is not None] == [len(seen) - 1] * ended
