"""A well-behaved tenant with several streams, which records the arrival times of events."""

from __future__ import annotations

import asyncio
import bisect
import math
import time
from dataclasses import dataclass, field

import httpx

PROMPT = "The gate opens by pressure, and the turbine never starves."
TOKENS_PER_STREAM = 400
RETRY_S = 0.5


@dataclass
class StreamGaps:
    """Gaps between the events of streams: the end and the length of each."""

    ends_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    began_waiting_s: float | None = None
    """While a stream waits for its next event."""
    asked_s: float | None = None
    """While a request waits for its first event."""
    first_waits: list[tuple[float, float]] = field(default_factory=list)
    """When a request was sent, and how long it waited for its first event."""

    def ask(self, now_s: float) -> None:
        """Note that a request was sent."""
        if self.asked_s is None:
            self.asked_s = now_s

    def note(self, now_s: float) -> None:
        """Note that an event arrived."""
        if self.asked_s is not None:
            self.first_waits.append((self.asked_s, now_s - self.asked_s))
            self.asked_s = None
        if self.began_waiting_s is not None:
            self.ends_s.append(now_s)
            self.gaps_s.append(now_s - self.began_waiting_s)
        self.began_waiting_s = now_s

    def stop(self) -> None:
        """Note that the stream has ended: the time until the next request is no gap."""
        self.began_waiting_s = None

    def between(self, since_s: float, until_s: float) -> list[float]:
        """Return the gaps that ended between two times, and the one open at the second time."""
        first, behind = bisect.bisect(self.ends_s, since_s), bisect.bisect(self.ends_s, until_s)
        gaps = self.gaps_s[first:behind]
        still_open = self.began_waiting_s if behind == len(self.ends_s) else self.ends_s[behind] - self.gaps_s[behind]
        if still_open is not None and still_open < until_s:
            gaps.append(until_s - still_open)
        return gaps

    def waits(self, since_s: float, until_s: float) -> list[float]:
        """Return how long requests waited for their first event between two times."""
        known = list(self.first_waits) if self.asked_s is None else [*self.first_waits, (self.asked_s, math.inf)]
        return [min(wait, until_s - asked) for asked, wait in known if asked < until_s and asked + wait > since_s]


IDS = {"X-Penstock-Event-Ids": "true"}


class Neighbor:
    """Keeps `num_streams` streams open until it is cancelled."""

    def __init__(self, http: httpx.AsyncClient, model: str, *, num_streams: int = 2) -> None:
        self._http = http
        self._model = model
        self._streams = [StreamGaps() for _ in range(num_streams)]
        self.num_events = 0
        self.last_event_id = ""
        self.troubles: list[tuple[float, str]] = []
        """When something other than events came, and what it was."""

    async def run(self) -> None:
        """Stream until canceled."""
        await asyncio.gather(*(self._keep_reading(stream, i) for i, stream in enumerate(self._streams)))

    def gaps(self, since_s: float, until_s: float) -> list[float]:
        """Return the gaps of all streams."""
        return [gap for stream in self._streams for gap in stream.between(since_s, until_s)]

    def waits(self, since_s: float, until_s: float) -> list[float]:
        """Return how long requests waited for their first event."""
        return [wait for stream in self._streams for wait in stream.waits(since_s, until_s)]

    async def _keep_reading(self, stream: StreamGaps, number: int) -> None:
        round_ = 0
        while True:
            try:
                await self._read(stream, f"{number}.{round_}. {PROMPT}")
            except httpx.TransportError as error:
                self._trouble(repr(error))
                await asyncio.sleep(RETRY_S)
            round_ += 1

    async def _read(self, stream: StreamGaps, prompt: str) -> None:
        body = {"model": self._model, "prompt": prompt, "stream": True, "ignore_eos": True, "temperature": 0}
        stream.ask(time.monotonic())
        sent = self._http.stream("POST", "/v1/completions", json=body | {"max_tokens": TOKENS_PER_STREAM}, headers=IDS)
        async with sent as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._trouble(f"{answer.status_code} {answer.text[:200]}")
                await asyncio.sleep(RETRY_S)
                return
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    self.last_event_id = line.removeprefix("id: ")
                if not line.startswith("data: "):
                    continue
                if '"error"' in line:
                    self._trouble(line[:200])
                    return
                if line == "data: [DONE]":
                    stream.stop()
                    return
                self.num_events += 1
                stream.note(time.monotonic())

    def _trouble(self, what: str) -> None:
        self.troubles.append((time.monotonic(), what))


def p99(gaps_s: list[float], expected_s: float) -> float:
    """Return the 99th percentile of gaps over time: a gap of many times the expected length counts as often.

    Otherwise a stream that pauses for ten seconds would add one long gap to hundreds of short ones, and no percentile
    would show it. This is HdrHistogram's correction for coordinated omission.
    """
    seen: list[float] = []
    for gap in gaps_s:
        seen.append(gap)
        rest = gap - expected_s
        while rest >= expected_s:
            seen.append(rest)
            rest -= expected_s
    seen.sort()
    return seen[min(len(seen) - 1, int(0.99 * len(seen)))] if seen else 0.0
