"""Settings come from flags, then the environment, and refuse what they do not know."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict

from penstock.contract.errors import ConfigError
from penstock.contract.settings import RedisSettings, Settings, redis_url_of


class RoomSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_ROOM_")

    size: int = 3
    name: str = "room"
    doors: tuple[str, ...] = ()


def test_a_given_value_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RoomSettings.load().size == 3
    monkeypatch.setenv("PENSTOCK_ROOM_SIZE", "4")
    assert RoomSettings.load(size=None).size == 4
    assert RoomSettings.load(size=5).size == 5


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RoomSettings.load().size = 9  # type: ignore[misc]


def test_unknown_flag_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="siez") as caught:
        RoomSettings.load(siez=1)
    assert caught.value.param == "siez"


def test_unknown_variable_of_the_room_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROOM_SIEZ", "1")
    with pytest.raises(ConfigError, match="PENSTOCK_ROOM_SIEZ"):
        RoomSettings.load()


def test_progress_variable_is_known_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROOM_PROGRESS", "json")
    assert RoomSettings.load().name == "room"


def test_wrong_value_names_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROOM_SIZE", "many")
    with pytest.raises(ConfigError, match="size") as caught:
        RoomSettings.load()
    assert caught.value.param == "size"


def test_a_list_that_is_not_json_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROOM_DOORS", "front")
    with pytest.raises(ConfigError, match="PENSTOCK_ROOM_DOORS must be JSON") as caught:
        RoomSettings.load()
    assert caught.value.param == "doors"
    monkeypatch.setenv("PENSTOCK_ROOM_DOORS", '["front"]')
    assert RoomSettings.load().doors == ("front",)


def test_redis_url_has_one_variable_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://somewhere/0")
    assert RedisSettings.load().redis_url == "redis://somewhere/0"
    assert redis_url_of(None) == "redis://somewhere/0"
    assert redis_url_of("unix:///given") == "unix:///given"


def test_a_room_has_no_redis_url_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Connected(RoomSettings):
        redis_url: str | None = None

    assert Connected.load(redis_url="unix:///given").redis_url == "unix:///given"
    monkeypatch.setenv("PENSTOCK_ROOM_REDIS_URL", "redis://elsewhere")
    with pytest.raises(ConfigError, match="PENSTOCK_ROOM_REDIS_URL"):
        Connected.load(redis_url="unix:///given")


def test_no_redis_url_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match="PENSTOCK_REDIS_URL"):
        redis_url_of(None)
