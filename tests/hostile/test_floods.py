"""A tenant that fills every sequence slot of a node delays no other tenant's first token for long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile.floods import SHAPES, compare
from hostile.stack import Stack, running_stack

MAX_FIRST_TOKEN_S = 10.0
"""2 s on a quiet machine (`python -m hostile.floods`); without shares it was 61 to 107 s."""


@pytest.fixture(scope="module")
def stack(demo_file: Path) -> Iterator[Stack]:
    with running_stack(model=demo_file, tenants=1, is_probed=False) as stack:
        yield stack


def test_wide_jobs_of_one_tenant_hold_back_no_other_tenant(stack: Stack) -> None:
    _, beside = asyncio.run(compare(stack, ["flood-0"], SHAPES["wide"], 2))
    assert beside.worst_first_token < MAX_FIRST_TOKEN_S
