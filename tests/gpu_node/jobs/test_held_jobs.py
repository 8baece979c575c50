"""What a node remembers of a job: chunks in order, kept until acknowledged, coalesced when Redis lags."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.errors import InvariantError
from penstock.contract.job import SamplingParams
from penstock.contract.output import PROMPT_TOKENS_PER_CHUNK, Chunk, Outcome, TokenLogprobs, Usage
from penstock.contract.priority import NUM_LEVELS
from penstock.gpu_node.engine.records import StepOutput
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.held_jobs import MAX_REPORTED_TENANTS, HeldJobs
from penstock.queue import results
from penstock.queue.broker.node import Taken
from penstock.queue.wire import decode_chunks

JOB_ID = "ref.01a1f828-c1b5-77c1-a5ef-a4b69d8f094c"


def held(*, n: int = 1, lease: str = "1:x:1", job_id: str = JOB_ID, cost: int = 99) -> HeldJob:
    job = HeldJob(Taken(job_id, lease, losses=0, num_chunks=0, cost=cost, deadline_in_ms=0))
    job.open(SamplingParams(n=n, max_tokens=10))
    job.num_prompt_tokens = 5
    return job


def decoded(chunks: tuple[bytes, ...]) -> list[Chunk]:
    return [chunk for data in chunks for chunk in decode_chunks(data)]


def test_steps_that_piled_up_leave_as_one_chunk_per_choice() -> None:
    job = held(n=2)
    for position in range(3):
        job.add_tokens(StepOutput("", 0, position, (10 + position,), f"a{position}", None))
    job.add_tokens(StepOutput("", 1, 0, (20,), "b", None))
    emission = job.emission()
    assert [(c.choice, c.position, c.token_ids, c.text) for c in decoded(emission.chunks)] == [
        (0, 0, (10, 11, 12), "a0a1a2"),
        (1, 0, (20,), "b"),
    ]
    assert job.emission() == emission, "what was tried once keeps its bytes"


def test_usage_comes_with_the_last_token_of_the_job_only() -> None:
    job = held(n=2)
    job.add_tokens(StepOutput("", 0, 0, (1,), "a", "stop"))
    job.acknowledge(job.emission())
    job.add_tokens(StepOutput("", 1, 0, (2,), "b", "length"))
    job.usage = Usage(5, 2, 1)
    first, last = decoded(job.emission().chunks[:1]), decoded(job.emission().chunks)
    assert not first or first[0].choice == 1
    assert [c.usage for c in last] == [Usage(5, 2, 1)]
    assert job.is_complete


def test_a_step_that_does_not_follow_the_last_one_is_an_invariant_error() -> None:
    job = held()
    with pytest.raises(InvariantError, match="token 3 after 0 tokens"):
        job.add_tokens(StepOutput("", 0, 3, (1,), "a", None))


def test_expected_kv_tokens_are_the_estimate_until_the_prompt_is_known_then_grow() -> None:
    job = HeldJob(Taken(JOB_ID, "1:x:1", losses=0, num_chunks=0, cost=777, deadline_in_ms=0))
    assert job.expected_kv_tokens == 777
    job.open(SamplingParams(n=2, max_tokens=3))
    job.num_prompt_tokens = 5
    assert (job.expected_kv_tokens, job.num_sequences) == (5 + 2 * 3, 2)
    job.add_tokens(StepOutput("", 0, 0, (1,), "a", "stop"))
    assert (job.expected_kv_tokens, job.num_sequences) == (5 + 3, 1), "an ended choice needs nothing"


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3), st.sampled_from(["send", "wait", "lose"]))))
def test_the_log_that_redis_ends_up_with_is_what_was_generated(steps: list[tuple[int, int, str]]) -> None:
    job = held(n=2)
    log: list[bytes] = []
    generated: list[list[int]] = [[], []]
    for choice, count, event in steps:
        tokens = tuple(range(len(generated[choice]), len(generated[choice]) + count))
        job.add_tokens(StepOutput("", choice, tokens[0], tokens, "x" * count, None))
        generated[choice] += tokens
        if event == "wait":
            continue
        if event == "lose" and log:
            del log[len(log) // 2 :]
            job.send_again_from(len(log))
        emission = job.emission()
        assert emission.index == len(log)
        log += emission.chunks
        job.acknowledge(emission)
    log += job.emission().chunks
    chunks = decoded(tuple(log))
    assert [c.index for c in chunks] == list(range(len(chunks)))
    for choice in (0, 1):
        assert [t for c in chunks if c.choice == choice for t in c.token_ids] == generated[choice]


def test_a_replayed_job_goes_on_at_the_next_index_and_position() -> None:
    first = held()
    first.add_tokens(StepOutput("", 0, 0, (1, 2), "ab", None))
    logged = decoded(first.emission().chunks)
    second = held(lease="2:y:1")
    second.open(SamplingParams(max_tokens=10), logged)
    assert second.choice_so_far(0) == ((1, 2), "ab", None)
    assert second.emission().chunks == ()
    second.add_tokens(StepOutput("", 0, 2, (3,), "c", "stop"))
    (chunk,) = decoded(second.emission().chunks)
    assert (chunk.index, chunk.position, chunk.token_ids) == (1, 2, (3,))
    result = results.decode_result(second.result(), JOB_ID, Outcome("succeeded"), (0, 0, 0, 0))
    assert result.choices[0].text == "abc"
    assert result.cuts == ((0, 2, 2), (0, 1, 1))


def test_new_lease_of_a_job_replaces_the_old_one_and_removing_the_old_one_has_no_effect() -> None:
    held_jobs, old, new = HeldJobs(), held(lease="1:x:1"), held(lease="2:y:1")
    held_jobs.add(old)
    held_jobs.add(new)
    assert held_jobs.of_lease("1:x:1") is None
    held_jobs.remove(old)
    assert held_jobs.get(JOB_ID) is new
    held_jobs.remove(new)
    assert len(held_jobs) == 0


def test_job_that_ends_before_its_log_was_read_has_no_result() -> None:
    job = HeldJob(Taken(JOB_ID, "1:x:1", losses=1, num_chunks=3, cost=9, deadline_in_ms=0))
    assert job.result() == b""
    job.open(SamplingParams(), [Chunk(JOB_ID, 0, 0, 0, (7,), "a")])
    result = results.decode_result(job.result(), JOB_ID, Outcome("cancelled"), (0, 0, 0, 0))
    assert result.choices[0].token_ids == (7,)


def test_a_job_that_was_all_logged_keeps_the_usage_that_its_reader_was_told() -> None:
    job, told = held(), Usage(5, 1, 4)
    job.open(SamplingParams(), [Chunk(JOB_ID, 0, 0, 0, (7,), "a", "stop", told)])
    assert results.decode_result(job.result(), JOB_ID, Outcome("succeeded"), (0, 0, 0, 0)).usage == told


def scored(num_tokens: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs((i, i + 1), (-0.5, -2.0), (b"a", b"b")) for i in range(num_tokens))


def test_a_prompts_log_probabilities_are_packed_a_bounded_part_at_a_time() -> None:
    job, entries = held(), scored(1000)
    job.add_tokens(StepOutput("", 0, 0, (1,), "a", "stop", prompt_logprobs=entries))
    num_parts = 0
    while job.has_unsealed_prompt:
        job.seal_part()
        num_parts += 1
    assert num_parts == -(-1000 // PROMPT_TOKENS_PER_CHUNK)
    chunks = decoded(job.emission().chunks)
    assert max(len(chunk.prompt_logprobs) for chunk in chunks) == PROMPT_TOKENS_PER_CHUNK
    result = results.decode_result(job.result(), JOB_ID, Outcome("succeeded"), (1, 2, 3, 4))
    assert result.prompt_logprobs == entries == tuple(e for chunk in chunks for e in chunk.prompt_logprobs)


def test_tokens_with_log_probabilities_that_pile_up_leave_in_bounded_chunks() -> None:
    job, entries = held(), scored(1000)
    for i, entry in enumerate(entries):
        job.add_tokens(StepOutput("", 0, i, (i,), "a", None, logprobs=(entry,)))
    chunks = decoded(job.emission().chunks)
    assert max(len(chunk.logprobs) for chunk in chunks) == PROMPT_TOKENS_PER_CHUNK
    result = results.decode_result(job.result(), JOB_ID, Outcome("succeeded"), (1, 2, 3, 4))
    assert result.choices[0].logprobs == entries == tuple(e for chunk in chunks for e in chunk.logprobs)


def test_the_next_node_keeps_what_an_earlier_one_logged_of_a_prompt() -> None:
    first, entries = held(), scored(300)
    first.add_tokens(StepOutput("", 0, 0, (1,), "a", None, prompt_logprobs=entries))
    logged = decoded(first.emission().chunks)
    second = held()
    second.open(SamplingParams(max_tokens=10), logged[:2])
    second.add_tokens(StepOutput("", 0, 0, (1,), "a", "stop", prompt_logprobs=entries))
    assert decoded(second.emission().chunks)[0].position == 2 * PROMPT_TOKENS_PER_CHUNK
    result = results.decode_result(second.result(), JOB_ID, Outcome("succeeded"), (1, 2, 3, 4))
    assert result.prompt_logprobs == entries


def test_bytes_are_summed_while_another_thread_adds_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    held_jobs = HeldJobs()
    held_jobs.add(held())

    def unsent_bytes(_job: HeldJob) -> int:
        if len(held_jobs) == 1:
            held_jobs.add(held(job_id="another", lease="1:x:2"))
        return 7

    monkeypatch.setattr(HeldJob, "unsent_bytes", property(unsent_bytes))
    assert (held_jobs.unsent_bytes, held_jobs.unsent_bytes) == (7, 14)


def test_held_jobs_are_counted_by_level_and_for_the_largest_tenants() -> None:
    held_jobs = HeldJobs()
    counts = {f"t{number}": number + 1 for number in range(MAX_REPORTED_TENANTS + 2)}
    for tenant, count in counts.items():
        for number in range(count):
            job_id = f"{tenant}.{number}"
            taken = Taken(job_id, job_id, 0, 0, 1, 0, tenant=tenant, level=number % NUM_LEVELS)
            held_jobs.add(HeldJob(taken))
    largest = dict(sorted(counts.items(), key=lambda row: -row[1])[:MAX_REPORTED_TENANTS])
    assert held_jobs.jobs_by_tenant == largest
    assert sum(held_jobs.jobs_by_level) == len(held_jobs) == sum(counts.values())
    assert held_jobs.jobs_by_level == tuple(
        sum(len(range(level, count, NUM_LEVELS)) for count in counts.values()) for level in range(NUM_LEVELS)
    )
