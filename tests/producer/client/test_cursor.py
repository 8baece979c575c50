"""A stream's cursor, without I/O: every chunk once and in order, whatever arrives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.errors import StreamDivergedError
from penstock.contract.output import (
    PROMPT_TOKENS_PER_CHUNK,
    Choice,
    Chunk,
    FinishReason,
    Outcome,
    Result,
    TokenLogprobs,
    Usage,
)
from penstock.producer.client.stream import ChunkVerdict, StreamCursor, rest_of

JOB = "pool.01a1f820-1cd2-775c-94d6-dde870154e3c"
DONE = Outcome("succeeded")
TOKENS = {choice: tuple(range(1000 * choice, 1000 * choice + 40)) for choice in range(3)}
NUM_CHOICES = len(TOKENS)
PROMPT = tuple(TokenLogprobs((token,), (-1.0,), (b"p",)) for token in range(PROMPT_TOKENS_PER_CHUNK + 9))


def logprobs_of(tokens: Iterable[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs((token,), (-float(token),), (b"t",)) for token in tokens)


def text_of(tokens: Iterable[int]) -> str:
    return "".join(f"{token}," for token in tokens)


def log_of(sizes: Sequence[tuple[int, int]], lag: int = 0) -> list[Chunk]:
    """Return a log: the prompt's chunk, chunks of (choice, number of tokens), the rest. `lag`: tokens without text."""
    first, rest = PROMPT[:PROMPT_TOKENS_PER_CHUNK], PROMPT[PROMPT_TOKENS_PER_CHUNK:]
    chunks = [
        Chunk(JOB, 0, prompt_logprobs=first, num_prompt_tokens=7),
        Chunk(JOB, 1, position=len(first), prompt_logprobs=rest),
    ]
    said = dict.fromkeys(range(NUM_CHOICES), 0)

    def say(choice: int, num_tokens: int) -> None:
        start, tokens = said[choice], TOKENS[choice]
        end = said[choice] = min(start + num_tokens, len(tokens))
        text_end = end if end == len(tokens) else max(0, end - lag)
        text = text_of(tokens[max(0, start - lag) : text_end])
        finish: FinishReason | None = "length" if end == len(tokens) else None
        chunks.append(
            Chunk(
                JOB,
                len(chunks),
                choice,
                start,
                tokens[start:end],
                text,
                finish,
                logprobs=logprobs_of(tokens[start:end]),
            )
        )

    for choice, num_tokens in sizes:
        if said[choice] < len(TOKENS[choice]):
            say(choice, num_tokens)
    for choice, tokens in TOKENS.items():
        if said[choice] < len(tokens):
            say(choice, len(tokens))
    chunks[-1] = replace(chunks[-1], usage=Usage(7, 120))
    return [*chunks, Chunk(JOB, len(chunks), outcome=DONE)]


def take(cursor: StreamCursor, chunks: Iterable[Chunk]) -> list[Chunk]:
    return [fresh for chunk in chunks if isinstance(fresh := cursor.offer(chunk), Chunk)]


def contents(chunks: Iterable[Chunk]) -> dict[int, tuple[tuple[int, ...], str]]:
    """Return tokens and text of each choice. Assert that token positions have no gaps."""
    tokens: dict[int, list[int]] = {c: [] for c in TOKENS}
    text = dict.fromkeys(TOKENS, "")
    for chunk in chunks:
        if chunk.token_ids:
            assert chunk.position == len(tokens[chunk.choice])
        assert chunk.logprobs == logprobs_of(chunk.token_ids)
        tokens[chunk.choice] += chunk.token_ids
        text[chunk.choice] += chunk.text
    return {choice: (tuple(tokens[choice]), text[choice]) for choice in TOKENS}


WHOLE = {choice: (tokens, text_of(tokens)) for choice, tokens in TOKENS.items()}
sizes = st.lists(st.tuples(st.integers(0, NUM_CHOICES - 1), st.integers(0, 4)), max_size=60)
lags = st.integers(0, 2)


@given(sizes, lags, st.data())
def test_arrivals_in_any_order_give_the_log(cuts: list[tuple[int, int]], lag: int, data: st.DataObject) -> None:
    log = log_of(cuts, lag)
    start = data.draw(st.integers(0, len(log) - 1))
    cursor, delivered = StreamCursor(start), []
    for index in data.draw(st.lists(st.integers(0, len(log) - 1))):
        fresh = cursor.offer(log[index])
        if fresh is ChunkVerdict.GAP:
            assert index > cursor.next_index
            delivered += take(cursor, log[cursor.next_index : index + 1])
        elif isinstance(fresh, Chunk):
            delivered.append(fresh)
    delivered += take(cursor, log[cursor.next_index :])
    assert delivered == log[start:]
    assert cursor.outcome == DONE
    assert take(cursor, log) == []


@given(sizes, sizes, lags, st.data())
def test_log_with_other_chunk_borders_is_read_again_without_repetition(
    first: list[tuple[int, int]], second: list[tuple[int, int]], lag: int, data: st.DataObject
) -> None:
    """Redis lost the log, and the job was run again: same tokens, other chunks."""
    lost, log = log_of(first, lag), log_of(second, lag)
    cursor = StreamCursor()
    delivered = take(cursor, lost[: data.draw(st.integers(0, len(lost) - 1))])
    cursor.rewind()
    delivered += take(cursor, log)
    assert contents(delivered) == WHOLE
    assert [entry for chunk in delivered for entry in chunk.prompt_logprobs] == [*PROMPT]
    assert sum(chunk.finish_reason is not None for chunk in delivered) == NUM_CHOICES
    assert [chunk.usage for chunk in delivered if chunk.usage] == [Usage(7, 120)]
    assert delivered[-1].outcome == DONE


@given(sizes, sizes, st.data())
def test_another_log_is_noticed_by_its_old_chunks(
    first: list[tuple[int, int]], second: list[tuple[int, int]], data: st.DataObject
) -> None:
    """The cursor is not told: it finds out from what arrives, and never repeats or skips a token."""
    lost, log = log_of(first), log_of(second)
    cursor = StreamCursor()
    delivered = take(cursor, lost[: data.draw(st.integers(0, len(lost) - 1))])
    for chunk in log:
        fresh = cursor.offer(chunk)
        if fresh is ChunkVerdict.GAP:
            delivered += take(cursor, log[cursor.next_index : chunk.index + 1])
        elif isinstance(fresh, Chunk):
            delivered.append(fresh)
    if cursor.outcome is None:  # the lost log was longer: its reader is told by the broker
        cursor.rewind()
        delivered += take(cursor, log)
    assert contents(delivered) == WHOLE


@given(sizes, st.integers(1, 60), st.data())
def test_other_tokens_than_those_delivered_are_refused(
    cuts: list[tuple[int, int]], num_had: int, data: st.DataObject
) -> None:
    log = log_of(cuts)
    cursor = StreamCursor()
    had = [chunk for chunk in take(cursor, log[:num_had]) if chunk.token_ids]
    if not had:
        return
    chunk = data.draw(st.sampled_from(had))
    at = data.draw(st.integers(0, len(chunk.token_ids) - 1))
    changed = (*chunk.token_ids[:at], chunk.token_ids[at] + 1, *chunk.token_ids[at + 1 :])
    if cursor.outcome is not None:
        return
    with pytest.raises(StreamDivergedError):
        cursor.offer(replace(chunk, token_ids=changed))


def test_a_log_that_skips_tokens_is_walked_again_and_refused() -> None:
    log = [Chunk(JOB, 0, 0, 0, (1, 2), "ab"), Chunk(JOB, 1, 0, 3, (4,), "d")]
    cursor = StreamCursor()
    assert cursor.offer(log[0]) == log[0]
    assert cursor.offer(log[1]) is ChunkVerdict.GAP
    with pytest.raises(StreamDivergedError):
        take(cursor, log)


def test_tokens_that_the_log_repeats_at_another_index_are_dropped() -> None:
    log = [Chunk(JOB, 0, 0, 0, (1, 2), "ab"), Chunk(JOB, 1, 0, 1, (2,), "b"), Chunk(JOB, 2, 0, 2, (3,), "c")]
    cursor = StreamCursor()
    assert cursor.offer(log[0]) == log[0]
    assert cursor.offer(log[1]) is ChunkVerdict.GAP
    assert take(cursor, log) == [log[2]]


def result_of(log: Sequence[Chunk]) -> Result:
    choices = tuple(Choice(c, text_of(tokens), tokens, "length", logprobs_of(tokens)) for c, tokens in TOKENS.items())
    cuts = tuple((chunk.choice, len(chunk.token_ids), len(chunk.text)) for chunk in log[:-1])
    return Result(JOB, DONE, choices, Usage(7, 120), cuts=cuts, prompt_logprobs=PROMPT)


@given(sizes, lags, st.data())
def test_the_result_gives_exactly_the_rest_of_the_log(
    cuts: list[tuple[int, int]], lag: int, data: st.DataObject
) -> None:
    # A choice whose last chunk moved nothing but its text has its finish reason there.
    log = log_of([cut for cut in cuts if cut[1]], lag)
    start = data.draw(st.integers(0, len(log) - 1))
    assert list(rest_of(result_of(log), start)) == log[start:]


def test_a_reader_past_the_end_still_gets_the_end() -> None:
    log = log_of([])
    assert list(rest_of(result_of(log), 99)) == [Chunk(JOB, 99, outcome=DONE)]


def test_a_job_that_never_ran_has_nothing_but_its_end() -> None:
    result = Result(JOB, Outcome("cancelled", "cancelled"))
    assert list(rest_of(result, 0)) == [Chunk(JOB, 0, outcome=result.outcome)]
