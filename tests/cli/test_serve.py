"""What `penstock serve` shows."""

from __future__ import annotations

import pytest

from penstock.cli.serve import without_password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:s3cret@host:1/2", "redis://:***@host:1/2"),
        ("rediss://me:s3cret@host", "rediss://me:***@host"),
        ("rediss://me:s3:c@r/et@host", "rediss://me:***@host"),
        ("redis://host/0?password=s3cret&db=1", "redis://host/0?password=***&db=1"),
        ("unix:///tmp/a:b@c/redis.sock", "unix:///tmp/a:b@c/redis.sock"),
        ("unix://me:s3cret@/tmp/redis.sock", "unix://me:***@/tmp/redis.sock"),
    ],
)
def test_passwords_of_redis_are_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown
