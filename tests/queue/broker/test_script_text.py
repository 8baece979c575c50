"""A script has the shared definitions that it uses, and Redis can compile it."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from redis.asyncio import Redis

from penstock.queue.broker.script_text import SHARED_PARTS, shared_text, source, whole_source

SCRIPTS = sorted(
    path.name.removesuffix(".lua")
    for path in files("penstock.queue").joinpath("scripts").iterdir()
    if path.name.endswith(".lua")
)


def _defined_in(text: str) -> set[str]:
    functions = re.findall(r"^(?:local )?function ([\w.]+)\(", text, re.MULTILINE)
    names = re.findall(r"^local ([\w, ]+?)(?: =|$)", text, re.MULTILINE)
    return {*functions, *(name for found in names for name in found.split(", "))}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_each_shared_definition_that_it_names(name: str) -> None:
    text = source(name)
    left_out = _defined_in(whole_source(name)) - _defined_in(text)
    used = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*(?:\.\w+)?", text))
    assert not left_out & {*used, *(word.partition(".")[0] for word in used)}


@pytest.mark.parametrize("part", SHARED_PARTS)
def test_a_block_defines_what_is_declared_before_it(part: str) -> None:
    text = re.sub(r"^ *--.*\n", "", shared_text(part), flags=re.MULTILINE)
    blocks = re.findall(r"^local (?!function)([\w, ]+?)(?: = [^\n]*)?\ndo\n(.*?)^end$", text, re.MULTILINE | re.DOTALL)
    for declared, body in blocks:
        defined = {name.partition(".")[0] for name in re.findall(r"^  function ([\w.]+)\(", body, re.MULTILINE)}
        assert defined <= set(declared.split(", "))


async def test_redis_compiles_every_script(redis: Redis) -> None:
    for name in SCRIPTS:
        await redis.script_load(source(name))


def test_a_script_of_every_step_has_no_function_that_ends_jobs() -> None:
    assert "end_job" not in source("emit")
