"""A model file with a hostile chat template, over HTTP: each of its chats is refused by name, and others go on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import pytest
from fixtures.tiny_model import make_tiny_model
from hostile.costs import MemoryWatch
from hostile.stack import POOL, Stack, running_stack

DOUBLED = (
    "{% set kept = namespace(it=start) %}{% for a in range(60 * n) %}{% set kept.it = kept.it + kept.it %}{% endfor %}"
)
NESTED = "{% set kept = namespace(it=[]) %}{% for a in range(99999 * n) %}{% set kept.it = [kept.it] %}{% endfor %}"
HOSTILE = {
    "empty loops": 3 * "{% for a in range(99999 * n) %}" + 3 * "{% endfor %}",
    "a range": "{% for a in range(n * 10 ** 12) %}{% endfor %}",
    "a macro without an end": "{% macro m(x) %}{{ m(x + 1) }}{% endmacro %}{{ m(n) }}",
    "a tree of macros": "{% macro m(x) %}{% if x %}{{ m(x - 1) ~ m(x - 1) }}{% endif %}{% endmacro %}{{ m(n * 60) }}",
    "a multiplied text": "{{ 'x' * (n * 10 ** 10) }}",
    "a text of 900 MB": "{{ 'x' * (n * 9 * 10 ** 8) }}",
    "a doubled text": DOUBLED.replace("start", "'x'"),
    "a doubled list": DOUBLED.replace("start", "[n]"),
    "an error of 900 MB": "{{ raise_exception('x' * (n * 9 * 10 ** 8)) }}",
    "center": "{{ 'x'|center(n * 10 ** 10) }}",
    "format": "{{ '%%%dd'|format(n * 10 ** 10)|format(1) }}",
    "a width of a format": "{{ '{:>99999999999}'.format(n) }}",
    "replace": "{{ ('a' * (n * 10 ** 5))|replace('', 'x' * 10 ** 5) }}",
    "indent": "{{ ('a\n' * (n * 10 ** 5))|indent(10 ** 5) }}",
    "tojson": "{{ messages|tojson(indent=n * 10 ** 9) }}",
    "batch": "{{ range(9)|batch(n * 10 ** 10, 'x')|list }}",
    "strftime_now": "{{ strftime_now('%A' * (n * 10 ** 8)) }}",
    "a nested list": NESTED + "{{ kept.it }}",
    "a nested list as JSON": NESTED + "{{ kept.it|tojson }}",
    "a power": "{{ (n * 10) ** (10 ** 6) }}",
    "the class of a value": "{{ messages.__class__.__mro__ }}",
    "a file": "{% include '/etc/passwd' %}",
}
"""`n` is 1, which Jinja does not know when it compiles the template: it would evaluate constants there."""
MAX_RENDER_CPU_S = 1
"""Five times less than usual: some of the templates reach it."""
LIMITS = (
    f"{MAX_RENDER_CPU_S} s of CPU time",
    "1024 MiB of memory",
    "33554432 characters",
    "the model's chat template refuses",
)
MAX_HOLD_S = 1.0
"""Of a crowded machine."""
MAX_GROWTH = 128 << 20
"""Bytes by which the node itself may grow; the processes of the template have a limit of their own."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose model has a template with all of it. A chat's text chooses one, or is shown."""
    folder = make_tiny_model(tmp_path_factory.mktemp("hostile"))
    config = folder / "tokenizer_config.json"
    branches = "".join(f"{{% elif asked == '{name}' %}}{text}" for name, text in HOSTILE.items())
    template = "{% set n, asked = messages|length, messages[0].content %}{% if false %}" + branches
    template += "{% else %}{{ asked }}{% endif %}"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MAX_RENDER_CPU_S", str(MAX_RENDER_CPU_S))
        with running_stack(model=folder, dtype="bfloat16") as stack:
            yield stack


async def chat(http: httpx.AsyncClient, text: str) -> httpx.Response:
    """Ask for the answer to one message."""
    body = {"model": POOL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return await http.post("/v1/chat/completions", json=body)


async def test_hostile_templates_are_refused_by_name_and_other_tenants_chats_go_on(stack: Stack) -> None:
    async with stack.client("attacker", timeout=200.0) as attacker, stack.client("neighbor") as neighbor:
        assert (await chat(neighbor, "hello")).status_code == 200
        watch = MemoryWatch(stack.pids)
        watch.start_anew()
        watching = asyncio.create_task(watch.run())
        began_s, num_beside = time.monotonic(), 0
        asked = {name: asyncio.create_task(chat(attacker, name)) for name in HOSTILE}
        while not all(one.done() for one in asked.values()):
            answer = await chat(neighbor, f"hello {num_beside}")
            assert answer.status_code == 200, answer.text
            num_beside += 1
            await asyncio.sleep(0.1)  # More chats would only take cores from the templates.
        ended_s = time.monotonic()
        assert (await chat(attacker, "hello")).status_code == 200
        watching.cancel()
    for name, task in asked.items():
        answer = task.result()
        assert answer.status_code in (400, 422), (name, answer.status_code, answer.text)
        error = answer.json()["error"]
        assert error["code"] in ("too_costly", "invalid_request") and error["param"] == "messages", (name, error)
        assert any(limit in error["message"] for limit in LIMITS), (name, error)
    assert num_beside > 10, "the neighbor's chats wait for none of these"
    assert stack.ended() == {}
    assert [hold for hold in stack.holds(began_s, ended_s) if hold.held_s > MAX_HOLD_S] == []
    assert watch.growth()["node"] <= MAX_GROWTH
    assert await stack.audit() == []
