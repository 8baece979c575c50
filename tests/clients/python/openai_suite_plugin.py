"""Adapts the tests of the `openai` package to a real server.

They name OpenAI's models and a response that a mock server invents, and they omit `input`. The plugin adds these, skips
the tests of features that penstock does not have, and reports each test as a check.
"""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import openai._base_client
import pytest
from clients.python.checks import API, MODEL, STORY, say_check

MAX_TOKENS = 16
LIMITS: dict[str, dict[str, Any]] = {
    "/chat/completions": {"max_tokens": MAX_TOKENS},
    "/completions": {"max_tokens": MAX_TOKENS},
    "/embeddings": {},
    "/responses": {"max_output_tokens": MAX_TOKENS, "input": "string"},
    "/responses/input_tokens": {"input": "string"},
}
"""What is added to the bodies of these routes, unless a test sets it."""
INVENTED_RESPONSE = re.compile(r"resp_\w+|(?<=/responses/)response_id")
LEFT_OUT = {
    "^(?!.*test_embeddings).*with_all_params": "they send audio, images and other fields that penstock refuses by name",
    "test_embeddings(?!.*with_all_params).*strict": "the client asks for base64, and validates it as numbers undecoded",
    "test_responses.py.*compact": "the client's types know no message of the user in an output, which the API returns",
    "aiohttp": "another HTTP library of the same client",
    "chat/test_completions.py.*(retrieve|update|list|delete)": "stored chat completions are not supported",
    "test_models.py.*delete": "models are not deleted over HTTP",
}
"""Patterns of test ids, with the reason."""


class SuitePlugin:
    """A pytest plugin."""

    def pytest_configure(self, config: pytest.Config) -> None:
        """Adapt each request just before it is built, for the sync and the async client."""
        base_client: Any = openai._base_client.BaseClient
        build = base_client._build_request

        def build_adapted(client: Any, options: Any, **more: Any) -> Any:
            return build(client, adapted(options), **more)

        base_client._build_request = build_adapted

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests of what penstock does not have."""
        left_out = re.compile("|".join(f"(?:{pattern})" for pattern in LEFT_OUT))
        config.hook.pytest_deselected(items=[item for item in items if left_out.search(item.nodeid)])
        items[:] = [item for item in items if not left_out.search(item.nodeid)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report a test that ran, or that could not be set up, as a check."""
        if report.when == "call" or report.failed:
            name = report.nodeid.removeprefix("tests/api_resources/")
            say_check(name, report.duration, report.longreprtext if report.failed else None)


def adapted(options: Any) -> Any:
    """Return the options of a request with the fields that a mock server does not need."""
    url = re.sub(r"(?<=^/models/).+", MODEL, options.url)
    if INVENTED_RESPONSE.search(url):
        url = INVENTED_RESPONSE.sub(new_response(), url)
    options.url = url
    if url in LIMITS and isinstance(options.json_data, dict):
        options.json_data = {**LIMITS[url], **options.json_data, "model": MODEL}
    return options


def new_response() -> str:
    """Return the id of a new response that runs in the background."""
    body = {"model": MODEL, "input": STORY, "background": True, "max_output_tokens": 200, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{API}/responses", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["id"])
