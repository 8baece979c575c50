"""`GET /v1/jobs/counts`, and lists by custom_id and metadata."""

from __future__ import annotations

import httpx
import pytest

from tests.gateway.apis.jobs.test_jobs import TEXT, ended, error_of, submit
from tests.gateway.conftest import MODEL


def test_jobs_of_a_tag_are_counted_and_found(http: httpx.Client) -> None:
    ids = [submit(http, prompt=TEXT, tags=["set"], custom_id=f"row {n}", metadata={"user": f"u{n}"}) for n in range(2)]
    submit(http, prompt=TEXT, tags=["set"], not_before_s=600)
    for job_id in ids:
        ended(http, job_id)
    counts = http.get("/v1/jobs/counts", params={"tag": "set"}).json()
    assert (counts["total"], counts["open"]) == (3, 1)
    assert counts["states"] == {"scheduled": 1, "succeeded": 2}
    assert counts["classes"] == [{"priority": "batch", "background": True, "states": {"scheduled": 1, "succeeded": 2}}]

    def listed(**params: str) -> list[str]:
        return [job["id"] for job in http.get("/v1/jobs", params=params).json()["data"]]

    assert listed(custom_id="row 1") == [ids[1]]
    assert listed(**{"tag": "set", "metadata[user]": "u0", "limit": "1000"}) == [ids[0]]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/jobs/counts?tag=a%20b", "tag"),
        ("/v1/jobs/counts?state=failed", "state"),
        ("/v1/jobs/counts?tag=a&batch=b", "batch"),
        ("/v1/jobs?metadata[user]=u", "metadata"),
        ("/v1/jobs?limit=1001", "limit"),
        ("/v1/jobs?custom_id=", "custom_id"),
    ],
)
def test_wrong_sets_are_named(http: httpx.Client, path: str, param: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


def test_a_prompt_that_cannot_fit_is_refused_by_every_door(http: httpx.Client) -> None:
    """Of 512 tokens, each of which has at most 64 bytes."""
    text, messages = "x" * 64 * 513, [{"role": "user", "content": "x" * 64 * 513}]
    doors = {
        "/v1/jobs": {"prompt": text},
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": messages},
        "/v1/messages": {"messages": messages, "max_tokens": 2},
        "/v1/responses": {"input": text},
        "/v1/embeddings": {"input": text},
        "/v1/schedules": {"every_s": 3600, "job": {"model": MODEL, "tokens": [1] * 513}},
    }
    for path, body in doors.items():
        answer = http.post(path, json=body if path == "/v1/schedules" else {"model": MODEL, **body})
        assert answer.status_code == 400, (path, answer.text)
        assert "context length" in answer.text or "too long" in answer.text, (path, answer.text)
    lines = [{"model": MODEL, "prompt": text}, {"model": MODEL, "tokens": [1] * 513}, {"model": MODEL, "prompt": "a"}]
    found = http.post("/v1/jobs", json=lines).json()["data"]
    assert [one["status"] for one in found] == [400, 400, 202]
