"""Reads a completion's events over HTTP until the end or a disconnect."""

from __future__ import annotations

import json
from typing import Any

import httpx
from fakes.processes.reference_engine import reference_prompt_logprobs
from faults.tools.work import PROMPT, Work

from penstock.contract.job import pool_of
from penstock.producer.openai.json_parts import prompt_logprobs

TIMEOUT_S = 60.0
JOB_HEADER = "x-penstock-job"
_ASKED = ("temperature", "n", "stop", "max_tokens", "prompt_logprobs")


def http_client() -> httpx.AsyncClient:
    """Return a client to be shared by readings: each new one would load certificates again."""
    return httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))


_COME_BACK = (429, 503)
"""No capacity, or all nodes were killed at once: retry, as after a cut connection."""


class HttpReading:
    """One request and the text that it received, until its end or a disconnect."""

    def __init__(self) -> None:
        self.job_id = ""
        self.texts: dict[int, str] = {}
        self.finishes: dict[int, str] = {}
        self.of_prompt: dict[int, list[Any]] = {}
        self.num_events = 0
        self.is_whole = False
        self.error = ""
        """The code of the error that the last request ended with."""
        self._last_id = ""

    async def read(
        self, http: httpx.AsyncClient, url: str, work: Work, *, key: str, max_events: int | None = None
    ) -> None:
        """Request with an idempotency key, disconnect after `max_events`. A second call continues the stream."""
        self.error = ""
        asked = {name: work.options[name] for name in _ASKED if name in work.options}
        body: dict[str, Any] = {"model": pool_of(work.id), "prompt": PROMPT, "stream": True, **asked}
        try:
            path, headers = f"{url}/v1/completions", {"Idempotency-Key": key, "Last-Event-ID": self._last_id}
            async with http.stream("POST", path, json=body, headers=headers) as response:
                if response.status_code in _COME_BACK:
                    return
                response.raise_for_status()
                if JOB_HEADER not in response.headers:
                    # The port of a gateway that was killed is another's by now.
                    return
                self.job_id, next_id = response.headers[JOB_HEADER], ""
                async for line in response.aiter_lines():
                    if line.startswith("id: "):
                        next_id = line.removeprefix("id: ")
                    if line.startswith("data: "):
                        self._last_id = next_id
                        self._take_in(line.removeprefix("data: "))
                    if max_events is not None and self.num_events >= max_events:
                        return
        except httpx.TransportError:
            return

    def check(self, work: Work) -> None:
        """Assert that the whole answer arrived, equal to that of a run without faults."""
        assert self.is_whole
        choices = Work(work.options | {"job_id": self.job_id}).expected()
        of_prompt = list(prompt_logprobs(reference_prompt_logprobs(work.params, PROMPT.encode())))
        want = {choices[0].index: of_prompt} if of_prompt else {}
        assert self.of_prompt == want, f"{str(self.of_prompt)[:300]} is not {str(want)[:300]}"
        assert self.texts == {choice.index: choice.text for choice in choices}
        assert self.finishes == {choice.index: choice.finish_reason for choice in choices}

    def is_part_of(self, other: HttpReading) -> bool:
        """Whether it is a prefix of the other reading."""
        return all(other.texts[choice].startswith(text) for choice, text in self.texts.items())

    def _take_in(self, data: str) -> None:
        self.num_events += 1
        if data == "[DONE]":
            self.is_whole = not self.error
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]["code"]
            return
        for said in event["choices"]:
            choice = said["index"]
            self.texts[choice] = self.texts.get(choice, "") + said["text"]
            if "prompt_logprobs" in said:
                self.of_prompt.setdefault(choice, []).extend(said["prompt_logprobs"])
            if said["finish_reason"]:
                self.finishes[choice] = said["finish_reason"]
