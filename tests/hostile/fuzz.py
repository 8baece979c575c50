"""Sends requests generated from numbers to a running stack and checks each answer against the documented ones."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from hostile.bodies import JOBS, Case, case_of
from hostile.costs import MemoryWatch
from hostile.stack import POOL, Hold, Stack

from penstock.queue.broker.connection import connect
from penstock.queue.broker.producer import ProducerBroker

DOCUMENTED = frozenset((200, 400, 401, 403, 404, 405, 409, 413, 429, 431, 503, 504))
"""Statuses that a caller may get; 499 and 500 are none of them."""
NAMES_NO_FIELD = frozenset(
    (
        *("unsupported_media_type", "invalid_http", "body_incomplete", "body_too_large", "head_too_large"),
        *("invalid_api_key", "pool_busy", "id_conflict", "not_found", "job_not_found", "no_node"),
        *("body_too_complex", "memory_share_exceeded", "rate_limit_exceeded"),
    )
)
"""Codes of what is wrong with something other than a field of the body."""
NAMELESS = "unknown_field"
"""A field may be called "", which an error cannot tell from none."""
_NOT_JSON = re.compile("not valid JSON|must be an object")
BUGS = frozenset(("internal_error", "model_error", "node_lost", "stream_diverged", "job_failed"))
AT_ONCE = 12
HANG_S = 300.0
"""An answer without `max_tokens` fills the context. The demo model needs minutes for `AT_ONCE` of them at a time."""
MAX_LISTED = 40


@dataclass
class Fuzzed:
    """The results of a run."""

    num_bodies: int = 0
    seconds: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    growth: dict[str, int] = field(default_factory=dict)
    num_jobs: int = 0

    def complain(self, case: Case, what: str) -> None:
        """Record an answer that no caller may get."""
        shown = case.body[:400].decode(errors="replace")
        self.complaints.append(f"{case.number} {case.path} {what}\n    {case.headers} {len(case.body)} bytes: {shown}")


class Fuzzer:
    """Sends several requests at once, in the order of their numbers."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._stack = stack
        self._seed = seed
        self._jobs: set[str] = set()
        self.found = Fuzzed()

    async def run(self, count: int, *, first: int = 0) -> Fuzzed:
        """Send `count` requests. Return after all accepted jobs have ended."""
        began_s, found = time.monotonic(), self.found
        watch = MemoryWatch(self._stack.pids)
        watching = asyncio.create_task(watch.run())
        numbers = iter(range(first, first + count))
        limits = httpx.Limits(max_connections=None)
        async with self._stack.client("attacker", limits=limits, timeout=HANG_S) as http:
            await self._send(http, case_of(self._seed, first, POOL))
            watch.start_anew()
            await asyncio.gather(*(self._lane(http, numbers) for _ in range(AT_ONCE)))
            await self._wait_for_ends(http)
        watching.cancel()
        found.seconds, found.growth = time.monotonic() - began_s, watch.growth()
        found.holds = sorted(self._stack.holds(began_s, time.monotonic()), key=lambda hold: -hold.held_s)
        found.complaints += [f"audit: {finding}" for finding in await self._stack.audit()]
        found.complaints += [f"{name} ended with {status}" for name, status in self._stack.ended().items()]
        return found

    async def _lane(self, http: httpx.AsyncClient, numbers: object) -> None:
        for number in numbers:  # type: ignore[attr-defined]
            if self._stack.ended():
                return
            case = case_of(self._seed, number, POOL)
            try:
                await self._send(http, case)
            except httpx.TimeoutException:
                self.found.complain(case, f"no answer within {HANG_S:g} s")
            except httpx.TransportError as error:
                # A head or a body that is refused unread may end its connection before it is sent whole.
                if not case.must_refuse:
                    self.found.complain(case, f"the connection broke: {error!r}")
            self.found.num_bodies += 1

    async def _send(self, http: httpx.AsyncClient, case: Case) -> None:
        headers = {"content-type": "application/json", **case.headers}
        async with http.stream("POST", case.path, content=case.body, headers=headers) as answer:
            self._jobs.update(filter(None, answer.headers.get("x-penstock-job", "").split(", ")))
            if case.hangs_up and answer.status_code == 200:
                self.found.answers["left"] += 1
                return
            content = await answer.aread()
        self._judge(case, answer, content)

    def _judge(self, case: Case, answer: httpx.Response, content: bytes) -> None:
        status, found = answer.status_code, self.found
        if status in (202, 207) and case.path == JOBS:
            found.answers[str(status)] += 1
            self._judge_jobs(case, status, json.loads(content))
            return
        if status not in DOCUMENTED:
            found.complain(case, f"status {status}: {content[:300]!r}")
        if case.must_refuse and not 400 <= status < 500:
            found.complain(case, f"is above a limit and got {status}: {content[:200]!r}")
        if status != 200:
            found.answers[f"{status} {self._refusal(case, content)}"] += 1
        elif answer.headers["content-type"].startswith("text/event-stream"):
            found.answers[f"200 stream {self._stream(case, content)}"] += 1
        else:
            found.answers["200"] += 1
            if not json.loads(content).keys() & {"choices", "output", "tokens", "prompt", "input_tokens"}:
                found.complain(case, f"an answer without choices or tokens: {content[:200]!r}")

    def _judge_jobs(self, case: Case, status: int, answer: dict[str, Any]) -> None:
        """Judge an accepted job, or the outcomes of a list."""
        if answer["object"] != "list":
            if answer["id"] not in self._jobs:
                self.found.complain(case, f"an accepted job without its id: {answer}")
            return
        outcomes = answer["data"]
        self._jobs.update(one["id"] for one in outcomes if one["status"] == 202)
        if (status == 202) != all(one["status"] == 202 for one in outcomes) or not outcomes:
            self.found.complain(case, f"a list of these outcomes got {status}: {str(outcomes)[:200]}")
        for one in outcomes:
            if one["status"] != 202:
                self._refusal(case, json.dumps({"error": one["error"]}).encode())

    def _refusal(self, case: Case, content: bytes) -> str:
        try:
            error = json.loads(content)["error"]
            is_formed = set(error) == {"message", "type", "param", "code"} and error["message"] and error["code"]
        except (ValueError, KeyError, TypeError):
            is_formed = False
        if not is_formed:
            self.found.complain(case, f"an error that is no error object: {content[:200]!r}")
            return "?"
        return self._check_error(case, error)

    def _check_error(self, case: Case, error: dict[str, str | None]) -> str:
        code, param = str(error["code"]), error["param"]
        if code in BUGS:
            self.found.complain(case, f"{code}: {error['message']}")
        if (
            not param
            and code not in NAMES_NO_FIELD
            and not (_NOT_JSON.search(str(error["message"])) or code == NAMELESS)
        ):
            self.found.complain(case, f"an error that names no field: {error}")
        return code

    def _stream(self, case: Case, content: bytes) -> str:
        events = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
        last = events[-1] if events else b""
        if last == b"[DONE]":
            return "done"
        try:
            return self._check_error(case, json.loads(last)["error"])
        except (ValueError, KeyError, TypeError):
            self.found.complain(case, f"a stream that ends neither with [DONE] nor with an error: {last[:200]!r}")
            return "?"

    async def _wait_for_ends(self, http: httpx.AsyncClient) -> None:
        """Wait until every accepted job has one outcome and no job is open."""
        redis = connect(self._stack.redis.url)
        broker = ProducerBroker(redis)
        try:
            async with asyncio.timeout(HANG_S):
                while await self._num_open(http):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            self.found.complaints.append(f"{await self._num_open(http)} jobs are still open after {HANG_S:g} s")
        for job_id in sorted(self._jobs):
            status = await broker.status(job_id, "attacker")
            if status.outcome is None:
                self.found.complaints.append(f"{job_id} has no terminal record")
            elif status.outcome.code in BUGS:
                self.found.complaints.append(f"{job_id} ended as {status.outcome}")
        self.found.num_jobs = len(self._jobs)
        await redis.aclose()

    async def _num_open(self, http: httpx.AsyncClient) -> int:
        headers = {"authorization": f"Bearer {self._stack.keys['admin']}"}
        text = (await http.get("/metrics", headers=headers)).text
        return sum(int(float(number)) for number in re.findall(r"^penstock_open_jobs{.*} (\S+)", text, re.MULTILINE))
