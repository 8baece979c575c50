"""`POST /v1/jobs` with a list: an outcome for each job, in order; a refused job refuses no other one."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.gateway.request.encoding import MAX_LIST_ITEMS
from tests.gateway.apis.jobs.test_jobs import TEXT, ended, error_of
from tests.gateway.conftest import MODEL, EchoEngine, Stack

GOOD = {"model": MODEL, "prompt": TEXT, "max_tokens": 2}
LINE = {"custom_id": "b", "url": "/v1/completions", "body": {"model": MODEL, "prompt": TEXT, "max_tokens": 3}}


def post_list(http: httpx.Client, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return http.post("/v1/jobs", content=content, headers={"content-type": "application/json", **headers})


def outcomes_of(answer: httpx.Response, status: int) -> list[dict[str, Any]]:
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"object", "data"}
    return list(answer.json()["data"])


@pytest.mark.parametrize("is_object", [False, True])
def test_each_job_of_a_list_is_queued(http: httpx.Client, is_object: bool) -> None:
    jobs = [{**GOOD, "custom_id": "a"}, LINE, GOOD]
    found = outcomes_of(post_list(http, {"jobs": jobs} if is_object else jobs), 202)
    assert [one["status"] for one in found] == [202] * 3
    assert [one.get("custom_id") for one in found] == ["a", "b", None]
    assert [one["links"]["self"] for one in found] == [f"/v1/jobs/{one['id']}" for one in found]
    texts = [ended(http, one["id"])["result"]["choices"][0]["text"] for one in found]
    assert texts == ["ab", "abc", "ab"]


def test_a_wrong_job_refuses_only_itself(http: httpx.Client) -> None:
    wrong = [
        3,
        {**GOOD, "heat": 1, "custom_id": "w"},
        {**GOOD, "tokens": [1]},
        {**GOOD, "deadline_s": -1},
        {**GOOD, "model": "nobody"},
        {**GOOD, "priority": "interactive"},
        {**LINE, "body": {"prompt": TEXT, "n": 17}},
        {**LINE, "body": {"prompt": TEXT, "deadline_s": -1}},
    ]
    found = outcomes_of(post_list(http, [GOOD, *wrong, LINE]), 207)
    assert [one["status"] for one in found] == [202, 400, 400, 400, 400, 404, 403, 400, 400, 202]
    refused = [one["error"]["param"] for one in found if "error" in one]
    assert refused == [None, "heat", None, "deadline_s", "model", "priority", "body.n", "body.deadline_s"]
    assert found[2]["custom_id"] == "w"
    assert (found[9]["custom_id"], ended(http, found[9]["id"])["state"]) == ("b", "succeeded")


def test_each_job_has_its_own_idempotency_key(http: httpx.Client) -> None:
    keyed = [{**GOOD, "idempotency_key": "own"}, GOOD, GOOD]
    first = outcomes_of(post_list(http, keyed, **{"Idempotency-Key": "list"}), 202)
    again = outcomes_of(post_list(http, keyed, **{"Idempotency-Key": "list"}), 202)
    assert [one["id"] for one in again] == [one["id"] for one in first]
    assert len({one["id"] for one in first}) == 3
    alone = http.post("/v1/jobs", json=GOOD, headers={"Idempotency-Key": "list:1"})
    assert alone.json()["id"] == first[1]["id"]
    other = outcomes_of(post_list(http, [{**GOOD, "prompt": "other", "idempotency_key": "own"}, GOOD]), 207)
    assert [one["status"] for one in other] == [409, 202]
    assert other[0]["error"]["code"] == "idempotency_conflict"


def test_the_longest_list_is_accepted_in_order(http: httpx.Client, engine: EchoEngine) -> None:
    jobs = [
        {**GOOD, "prompt": f"{number:04d}", "max_tokens": 4, "custom_id": str(number)}
        for number in range(MAX_LIST_ITEMS)
    ]
    found = outcomes_of(post_list(http, jobs), 202)
    assert [one["custom_id"] for one in found] == [job["custom_id"] for job in jobs]
    for at in (0, 1, 500, 999):
        assert ended(http, found[at]["id"])["result"]["choices"][0]["text"] == f"{at:04d}"
    refused = post_list(http, [*jobs, GOOD])
    assert (refused.status_code, error_of(refused)["param"]) == (400, "jobs")
    assert "1000" in error_of(refused)["message"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ([], 400, "jobs"),
        ({"jobs": []}, 400, "jobs"),
        ({"jobs": GOOD}, 400, "jobs"),
        ({"jobs": [GOOD], "model": MODEL}, 400, "model"),
        (b"[{]", 400, None),
        (b'[{"prompt": ' + b'"' + b"x" * (8 << 20) + b'"}]', 413, None),
    ],
)
def test_what_is_no_list_of_jobs_is_refused_whole(
    http: httpx.Client, body: Any, status: int, param: str | None
) -> None:
    answer = post_list(http, body)
    assert (answer.status_code, error_of(answer)["param"]) == (status, param)


def test_a_limit_refuses_the_rest_of_a_list(stack: Stack, http: httpx.Client, engine: EchoEngine) -> None:
    """A 429 of one job says when to send it again."""
    engine.may_go_on.clear()
    later = [{**GOOD, "not_before_s": 600, "custom_id": str(number)} for number in range(3)]
    found = outcomes_of(post_list(http, [*later, {**GOOD, "background": False, "model": "nobody"}]), 207)
    assert [one["status"] for one in found] == [202, 202, 202, 404]
    engine.may_go_on.set()
    for one in found[:3]:
        http.delete(f"/v1/jobs/{one['id']}")
