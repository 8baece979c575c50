"""Paths as clients build them from a base URL, with a slash too many."""

from __future__ import annotations

import httpx
import pytest


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
def test_a_list_of_models_with_a_slash_at_its_end_is_the_list(door: httpx.Client, headers: dict[str, str]) -> None:
    """vLLM and llama.cpp redirect or answer; here it asked for a model without a name."""
    want, got = (door.get(path, headers=headers) for path in ("/v1/models", "/v1/models/"))
    assert got.status_code == 200, got.text
    assert got.json() == want.json()
    assert door.get("/v1/models/nope").json()["error"]["message"] == "no model 'nope' is served"
