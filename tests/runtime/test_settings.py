"""Settings come from flags, then the environment, and refuse what they do not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict

from penstock.cli.processes import gateway_command, node_command
from penstock.contract.errors import ConfigError
from penstock.runtime.settings import KeySettings, RedisSettings, Settings, redis_url_of


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


def test_unknown_variable_of_the_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_package_has_no_redis_url_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
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


def injected(service: str, port: int = 8000) -> dict[str, str]:
    """What Kubernetes sets in each container of a namespace for a service, as its documentation shows it."""
    name, host = service.upper().replace("-", "_"), "10.0.0.11"
    return {
        f"{name}_SERVICE_HOST": host,
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_SERVICE_PORT_HTTP_API": str(port),
        f"{name}_PORT": f"tcp://{host}:{port}",
        f"{name}_PORT_{port}_TCP": f"tcp://{host}:{port}",
        f"{name}_PORT_{port}_TCP_PROTO": "tcp",
        f"{name}_PORT_{port}_TCP_PORT": str(port),
        f"{name}_PORT_{port}_TCP_ADDR": host,
        f"{name}_PORT_53_UDP": "udp://[fd00::11]:53",
        f"{name}_PORT_53_UDP_ADDR": "fd00::11",
    }


@pytest.mark.parametrize("service", ["penstock-room", "penstock-room-2", "penstock-room-port"])
def test_what_kubernetes_injects_for_a_service_is_ignored(monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    for variable, value in injected(service).items():
        monkeypatch.setenv(variable, value)
    assert HouseSettings.load() == HouseSettings.load(port=8000)
    monkeypatch.setenv("PENSTOCK_ROOM_PORT", "9000")
    assert HouseSettings.load().port == 9000


class HouseSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_ROOM_")

    port: int = 8000
    metrics_port: int | None = None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PENSTOCK_ROOM_PROT", "tcp://10.0.0.11:8000"),
        ("PENSTOCK_ROOM_SERVICE", "10.0.0.11"),
        ("PENSTOCK_ROOM_SERVICE_HOSTS", "10.0.0.11"),
        ("PENSTOCK_ROOM_SERVICE_HOST", "a name"),
        ("PENSTOCK_ROOM_PORT_8000_TCP_ADR", "10.0.0.11"),
        ("PENSTOCK_ROOM_METRIC_PORT", "9100"),
        ("PENSTOCK_ROOM_service_host", "10.0.0.11"),
    ],
)
def test_what_only_resembles_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"unknown environment variable {variable}"):
        HouseSettings.load()


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("PENSTOCK_REDIS_URL_FLIE", "PENSTOCK_REDIS_URL_FILE"),
        ("PENSTOCK_KEY_PEPER_FILE", "PENSTOCK_KEY_PEPPER_FILE"),
        ("PENSTOCK_GATWAY_PORT", "PENSTOCK_GATEWAY_PORT"),
        ("PENSTOCK_NODES_MAX_NUM_SEQS", "PENSTOCK_NODE_MAX_NUM_SEQS"),
    ],
)
def test_a_misspelled_name_is_refused_with_the_right_one(
    monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    monkeypatch.setenv(variable, "8000")
    with pytest.raises(ConfigError, match=rf"unknown environment variable {variable}; did you mean {meant}\?"):
        KeySettings.load()


@pytest.mark.parametrize("variable", ["PENSTOCK_SCREENSHOTS", "PENSTOCK_LINK", "PENSTOCK_SITE_URL"])
def test_a_variable_of_another_program_is_ignored(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "8000")
    assert KeySettings.load().key_pepper == ""


@pytest.mark.parametrize("value", ["many", "http://10.0.0.11:8000", "tcp:8000"])
def test_a_port_that_is_neither_ours_nor_theirs_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PENSTOCK_ROOM_PORT", value)
    with pytest.raises(ConfigError, match="port"):
        HouseSettings.load()


def test_secrets_come_from_files_that_variables_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("redis://:secret@queue:6379\n")
    (tmp_path / "pepper").write_text("salt and pepper")
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    monkeypatch.setenv("PENSTOCK_REDIS_URL_FILE", str(tmp_path / "url"))
    monkeypatch.setenv("PENSTOCK_KEY_PEPPER_FILE", str(tmp_path / "pepper"))
    assert redis_url_of() == "redis://:secret@queue:6379"
    assert KeySettings.load().key_pepper == "salt and pepper"
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://other")
    assert redis_url_of() == "redis://other"
    assert redis_url_of("redis://given") == "redis://given"


def test_an_empty_variable_hides_no_file_with_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docker-compose sets a variable without a value to ""."""
    for name, secret in (("REDIS_URL", "redis://:secret@queue:6379"), ("KEY_PEPPER", "salt and pepper")):
        (tmp_path / name).write_text(secret)
        monkeypatch.setenv(f"PENSTOCK_{name}", "")
        monkeypatch.setenv(f"PENSTOCK_{name}_FILE", str(tmp_path / name))
    assert redis_url_of() == "redis://:secret@queue:6379"
    assert KeySettings.load().key_pepper == "salt and pepper"


def test_secrets_come_from_credentials_of_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "penstock_redis_url").write_text("redis://:secret@queue:6379")
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert redis_url_of() == "redis://:secret@queue:6379"
    assert KeySettings.load().key_pepper == ""


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"\n", "is empty"), (b"\xff", "not UTF-8")])
def test_a_file_without_a_secret_is_refused(
    content: bytes | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pepper"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.delenv("PENSTOCK_KEY_PEPPER", raising=False)
    monkeypatch.setenv("PENSTOCK_KEY_PEPPER_FILE", str(path))
    with pytest.raises(ConfigError, match=f"PENSTOCK_KEY_PEPPER_FILE: .*{why}"):
        KeySettings.load()


def test_children_get_no_url_that_a_file_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("redis://:secret@queue:6379")
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    monkeypatch.setenv("PENSTOCK_REDIS_URL_FILE", str(tmp_path / "url"))
    for command in (node_command("m", redis_url_of()), gateway_command(redis_url_of())):
        assert "secret" not in str(command.env) + str(command)
    assert gateway_command("redis://own").env["PENSTOCK_REDIS_URL"] == "redis://own"
