"""Jobs whose tokens are known in advance, and assertions about their streams, logs and pools at the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fakes.processes.reference_engine import reference_choice, reference_prompt_logprobs
from redis.asyncio import Redis
from uuid_utils import uuid7

from penstock.contract.job import SamplingParams
from penstock.contract.output import Choice, Chunk, Outcome, TokenLogprobs, Usage
from penstock.queue import keys, results
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import Finding, audit
from penstock.queue.broker.producer import JobStatus, ProducerBroker
from penstock.queue.wire import decode_chunks

PROMPT = "the gate opens by pressure"
MAX_COUNTED = 500
"""Jobs of a pool whose used tokens are added up."""


@dataclass
class Work:
    """One job: the options of `AsyncClient.submit` after the prompt, and what its readers have received."""

    options: dict[str, Any]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] | None = None
    """Kept by readers that see chunks."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: str = ""
    last_index: int = -1
    """Of the chunks seen."""

    @property
    def id(self) -> str:
        """The job's id."""
        return str(self.options["job_id"])

    @property
    def num_seen(self) -> int:
        """The number of tokens of all choices that have arrived."""
        return sum(map(len, self.tokens.values()))

    @property
    def num_expected(self) -> int:
        """The number of tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.expected())

    def expected(self) -> list[Choice]:
        """The choices of a run without faults."""
        return [reference_choice(self.id, self.params, list(PROMPT.encode()), i) for i in range(self.params.n)]

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters among the options."""
        names = self.options.keys() & SamplingParams.model_fields.keys()
        return SamplingParams(**{name: self.options[name] for name in names})

    def see(self, index: int, choice: int, tokens: Sequence[int], text: str, finish: str | None, end: str = "") -> None:
        """Add a chunk that a reader received."""
        self.last_index = index
        self.tokens.setdefault(choice, []).extend(tokens)
        self.texts[choice] = self.texts.get(choice, "") + text
        if finish:
            assert choice not in self.finishes, "a choice ends once"
            self.finishes[choice] = finish
        assert not self.end, "nothing comes behind the end"
        self.end = end

    def see_chunk(self, chunk: Chunk) -> None:
        """Add a chunk as the client returns it."""
        end = chunk.outcome.state if chunk.outcome else ""
        self.logprobs = self.logprobs or {}
        self.logprobs.setdefault(chunk.choice, []).extend(chunk.logprobs)
        self.prompt_logprobs += chunk.prompt_logprobs
        self.see(chunk.index, chunk.choice, chunk.token_ids, chunk.text, chunk.finish_reason, end)

    async def read(self, chunks: AsyncIterator[Chunk]) -> None:
        """Read a whole stream."""
        async for chunk in chunks:
            self.see_chunk(chunk)

    def check(self) -> None:
        """Assert that readers received the same tokens and characters as in a run without faults."""
        assert self.end == "succeeded", (self.id, self.end, self.num_seen)
        for choice in self.expected():
            seen = (self.tokens[choice.index], self.texts[choice.index], self.finishes.get(choice.index))
            assert seen == (list(choice.token_ids), choice.text, choice.finish_reason), self.id
            if self.logprobs is not None:
                assert self.logprobs[choice.index] == list(choice.logprobs), self.id
        if self.logprobs is not None:
            assert self.prompt_logprobs == list(reference_prompt_logprobs(self.params, PROMPT.encode())), self.id


def new_work(pool: str, num_tokens: int, *, stops_at: float = 0.0, **options: Any) -> Work:
    """Return a job with this many tokens per choice. `stops_at`: where choice 0 meets its stop string, from 0 to 1."""
    work = Work({"job_id": f"{pool}.{uuid7()}", "max_tokens": num_tokens, **options})
    if stops_at:
        text = work.expected()[0].text
        at = int(stops_at * (num_tokens - STOP_CHARS))
        work.options["stop"] = (text[at : at + STOP_CHARS],)
    return work


STOP_CHARS = 3
SETTLE_ATTEMPTS = 600
SETTLE_PAUSE_S = 0.1
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "n": 3, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "stops_at": 0.7},
    {"temperature": 1.0, "n": 2, "stops_at": 0.5},
)
"""Plain, sampled, several choices with how likely tokens were, with a stop string, and with one that ends one choice
before the other."""


async def check_logs(redis: Redis, works: Sequence[Work]) -> None:
    """Assert that each log, until it expires, equals what readers received. Only its last chunk has the outcome."""
    broker = ProducerBroker(redis)
    for work in works:
        chunks = list[Chunk]()
        while page := await broker.log(work.id, len(chunks)):
            chunks += page
        logged = Work(work.options)
        for chunk in chunks:
            logged.see_chunk(chunk)
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        logged.check()


async def statuses(redis: Redis, works: Sequence[Work]) -> list[JobStatus]:
    """Return the jobs' states."""
    broker = ProducerBroker(redis)
    return [await broker.status(work.id, "default") for work in works]


async def holder(redis: Redis, job_id: str) -> str:
    """Return the name of the node that runs a job, empty if none does."""
    node = await cast(Any, redis.hget(keys.job(job_id), "node"))
    return (node or b"").decode().rpartition("-")[0]


async def check_settled(redis: Redis, pool: str) -> None:
    """Assert that no job is open and that, after the next heartbeats, every key agrees with the jobs' records."""
    findings: list[Finding] = []
    for _ in range(SETTLE_ATTEMPTS):
        if not (findings := await audit(AdminBroker(redis), pool)):
            break
        await asyncio.sleep(SETTLE_PAUSE_S)
    assert findings == [], findings
    assert await cast(Any, redis.scard(f"{keys.prefix(pool)}:open")) == 0
    await check_usage(redis, pool)


async def check_usage(redis: Redis, pool: str) -> None:
    """Assert that every job's tokens were counted once, by its result, or by its log if a script ended it."""
    start = f"{keys.prefix(pool)}:job:"
    job_ids = [key.decode().removeprefix(start) async for key in redis.scan_iter(f"{start}*", count=1000)]
    if len(job_ids) > MAX_COUNTED:
        return
    expected = Counter(jobs=len(job_ids))
    for job_id in job_ids:
        data = await redis.get(keys.result(job_id))
        log = decode_chunks(b"".join(await cast(Any, redis.lrange(keys.log(job_id), 0, -1))))
        usage = Usage(0, sum(len(chunk.token_ids) for chunk in log))
        if data is None and not log:
            # Its reader has acknowledged it, or it is long over: only the record is left.
            used = await cast(Any, redis.hget(keys.job(job_id), "used"))
            usage = Usage(*map(int, (used or b"0 0 0").split()[:3]))
        if data is not None:
            usage = results.decode_result(data, job_id, Outcome("succeeded"), (0, 0, 0, 0)).usage or usage
        tokens = {"prompt": usage.prompt_tokens, "completion": usage.completion_tokens, "cached": usage.cached_tokens}
        expected.update(tokens)
    counted = Counter[str]()
    async for key in redis.scan_iter(f"{keys.prefix(pool)}:usage:*"):
        for name, count in (await cast(Any, redis.hgetall(key))).items():
            counted[name.decode().rpartition(":")[2]] += int(count)
    assert +counted == +expected
