"""A short campaign of deaths of Redis's machine: no token that was shown at `fsync` is lost, and others are."""

from __future__ import annotations

import os
import shutil

import pytest
from faults.machine_deaths import is_as_promised, parse, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"),
]


@pytest.mark.parametrize("level", ["fsync", "memory"])
async def test_tokens_that_were_shown_survive_the_death_of_the_machine_of_redis_as_their_level_says(level: str) -> None:
    found = await run(parse(["--deaths", "3", "--chunks", "200", "--seed", "1", "--token-durability", level]))
    assert found["deaths"] == 3 and found["readers"]["chunks"] >= 600
    assert is_as_promised(found), found
