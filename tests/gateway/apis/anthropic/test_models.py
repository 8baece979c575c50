"""`/v1/models` in Anthropic's shape, which the header `anthropic-version` asks for."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

VERSION = {"anthropic-version": "2023-06-01"}


def listed(http: httpx.Client, **query: Any) -> dict[str, Any]:
    answer = http.get("/v1/models", headers=VERSION, params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_both_shapes_list_the_same_models(http: httpx.Client) -> None:
    usual, found = http.get("/v1/models").json(), listed(http)
    assert usual["object"] == "list"
    ids = [model["id"] for model in usual["data"]]
    assert [model["id"] for model in found["data"]] == ids
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, ids[0], ids[-1])
    for model in found["data"]:
        assert model.keys() == {"type", "id", "display_name", "created_at"}
        assert (model["type"], model["display_name"]) == ("model", model["id"])
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", model["created_at"])
        assert http.get(f"/v1/models/{model['id']}", headers=VERSION).json() == model
        assert http.get(f"/v1/models/{model['id']}").json()["object"] == "model"


def test_pages_follow_one_another_in_both_directions(http: httpx.Client) -> None:
    ids = [model["id"] for model in listed(http)["data"]]
    assert len(ids) >= 3
    forth, after = list[str](), dict[str, Any]()
    while True:
        page = listed(http, limit=1, **after)
        forth += [model["id"] for model in page["data"]]
        after = {"after_id": page["last_id"]}
        if not page["has_more"]:
            break
    assert forth == ids
    back = listed(http, limit=1, before_id=ids[2])
    assert ([model["id"] for model in back["data"]], back["has_more"]) == ([ids[1]], True)
    none = listed(http, after_id=ids[-1])
    assert none == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 1001}, {"limit": "x"}, {"after_id": "nope"}, {"after_id": "a", "before_id": "b"}]
)
def test_wrong_pages_are_refused_by_name(http: httpx.Client, query: dict[str, Any]) -> None:
    answer = http.get("/v1/models", headers=VERSION, params=query)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["message"].split(":")[0] in query


def test_an_unknown_model_is_an_error_of_the_same_shape(http: httpx.Client) -> None:
    answer = http.get("/v1/models/nope", headers=VERSION)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert http.get("/v1/models/nope").json()["error"]["code"] == "model_not_found"
