"""The line about a process's user of Redis, and the warnings of another role's user and of settings that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.runtime.redis_source import tell_redis_source, user_of
from penstock.runtime.settings import redis_url_of

OTHER_ROLE, DIFFER = "this process is another role's user of redis", "settings name different redis urls"


@pytest.mark.parametrize(
    ("url", "user"),
    [
        ("redis://queue:6379", "default"),
        ("redis://:secret@queue:6379", "default"),
        ("rediss://node:s%40cret@queue:6379/0", "node"),
        ("redis+sentinel://gate%2Dway:x@one:26379,two:26379/0?master_name=m", "gate-way"),
        ("unix://admin:x@/run/redis.sock", "admin"),
    ],
)
def test_user_of_a_url(url: str, user: str) -> None:
    assert user_of(url) == user


@pytest.mark.parametrize(("user", "warned"), [("node", []), ("tenant-7", []), ("admin", [OTHER_ROLE])])
def test_a_process_says_which_user_it_is(
    user: str, warned: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("PENSTOCK_REDIS_URL", f"redis://{user}:secret@queue:6379")
    tell_redis_source(redis_url_of(), "node")
    first, *others = map(vars, caplog.records)
    assert (first["message"], first["user"], first["source"]) == ("redis user", user, "PENSTOCK_REDIS_URL")
    assert "secret" not in str(first)
    assert [line["message"] for line in others] == warned


def test_an_inherited_file_that_beats_the_credential_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    (tmp_path / "inherited").write_text("redis://admin:x@queue:6379\n")
    (tmp_path / "penstock_redis_url").write_text("redis://gateway:x@queue:6379\n")
    monkeypatch.setenv("PENSTOCK_REDIS_URL_FILE", str(tmp_path / "inherited"))
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    tell_redis_source(redis_url_of(), "gateway")
    told = {record.message: vars(record) for record in caplog.records}
    assert told[OTHER_ROLE]["user"] == "admin"
    assert (told[DIFFER]["used"], told[DIFFER]["ignored"]) == ("PENSTOCK_REDIS_URL_FILE", "CREDENTIALS_DIRECTORY")
    caplog.clear()
    (tmp_path / "penstock_redis_url").write_text("redis://admin:x@queue:6379")
    tell_redis_source(redis_url_of(), "gateway")
    assert DIFFER not in caplog.text
