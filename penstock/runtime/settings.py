"""Bases of all settings: frozen, read once in an entry point from flags and the environment, strict about names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from penstock.contract.errors import ConfigError
from penstock.contract.problems import config_error
from penstock.runtime.kubernetes import is_injected

_SHARED_PREFIX = "PENSTOCK_"
_SHARED_NAMES = frozenset({"redis_url"})
"""Have one variable for all rooms, so none of a room's own."""


class _Environment(EnvSettingsSource):
    """The process's variables, without those that Kubernetes injects."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """A setting's value, its name, and whether it is JSON; None where no operator set it."""
        value, key, is_complex = super().get_field_value(field, field_name)
        injected = isinstance(value, str) and is_injected(field_name.upper(), value)
        return None if injected else value, key, is_complex


class Settings(BaseSettings):
    """Base of a room's settings; the room sets its own `env_prefix`, such as `PENSTOCK_NODE_`."""

    model_config = SettingsConfigDict(
        env_prefix=_SHARED_PREFIX, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    unchecked_env: ClassVar[frozenset[str]] = frozenset({"PROGRESS"})
    """Variables under the prefix that are no fields: a supervisor asks its children for progress lines."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What was given, then the environment; nothing else is read."""
        return init_settings, _Environment(settings_cls)

    @model_validator(mode="after")
    def _no_unknown_variables(self) -> Self:
        prefix = str(self.model_config.get("env_prefix", ""))
        if prefix == _SHARED_PREFIX:
            return self
        own = type(self).model_fields.keys() - _SHARED_NAMES
        known = {name.upper() for name in own} | self.unchecked_env
        for variable, value in os.environ.items():
            name = variable.removeprefix(prefix)
            if variable.startswith(prefix) and name not in known and not is_injected(name, value):
                raise ValueError(f"unknown environment variable {variable}")
        return self

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Settings from what was given (None: not given), then the environment, then the defaults.

        Raises ConfigError naming the first that is unknown or cannot work.
        """
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise config_error(error) from error
        except SettingsError as error:
            # No more than its text says which field it is about.
            name = str(error).split('"')[1]
            variable = f"{cls.model_config.get('env_prefix', '')}{name.upper()}"
            raise ConfigError(f'{variable} must be JSON, such as ["one", "two"]', param=name) from error


class RedisSettings(Settings):
    """Which Redis; None where it was not said."""

    redis_url: str | None = None
    """redis://, rediss:// or unix://."""
    redis_server: Path | None = None
    """The program that is started where there is no URL."""


class KeySettings(Settings):
    """What gateways and `penstock keys` must agree on beside Redis."""

    key_pepper: str = Field(default="", repr=False)
    """A secret that all API keys' digests depend on."""


def redis_url_of(given: str | None) -> str:
    """The given URL, else PENSTOCK_REDIS_URL; raises ConfigError that says what to set."""
    url = RedisSettings.load(redis_url=given).redis_url
    if not url:
        raise ConfigError("which Redis? Give --redis-url or set PENSTOCK_REDIS_URL", param="redis_url")
    return url


def without_password(redis_url: str) -> str:
    """The URL as it may be shown."""
    shown = re.sub(r"(://[^:/?#@]*):.*@", r"\1:***@", redis_url)
    return re.sub(r"([?&]password=)[^&#]*", r"\1***", shown)
