"""Retries, checks and keys while nodes and Redis are killed; `make attempts` runs more of it."""

from __future__ import annotations

import pytest
from faults.attempts import parser, run

pytestmark = pytest.mark.timeout(300)
SHORT = ("--jobs", "24", "--keys", "2", "--kills", "2", "--every", "0.7", "--step-s", "0.005", "--seed", "7")
LONG = ("--jobs", "600", "--keys", "10", "--kills", "8", "--seed", "7")


@pytest.mark.parametrize("arguments", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
async def test_each_job_ends_once_within_the_limits_of_its_key(arguments: tuple[str, ...]) -> None:
    assert await run(parser().parse_args(arguments)) == []
