"""Bases of all settings: frozen, read once in an entry point from flags and the environment, strict about names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from penstock.contract.errors import ConfigError
from penstock.contract.problems import config_error

_SHARED_PREFIX = "PENSTOCK_"
_SHARED_NAMES = frozenset({"redis_url"})
"""Have one variable for all rooms, so none of a room's own."""


class Settings(BaseSettings):
    """Base of a room's settings; the room sets its own `env_prefix`, such as `PENSTOCK_NODE_`."""

    model_config = SettingsConfigDict(
        env_prefix=_SHARED_PREFIX, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    unchecked_env: ClassVar[frozenset[str]] = frozenset({"PROGRESS"})
    """Variables under the prefix that are no fields: a supervisor asks its children for progress lines."""

    @model_validator(mode="after")
    def _no_unknown_variables(self) -> Self:
        prefix = str(self.model_config.get("env_prefix", ""))
        if prefix == _SHARED_PREFIX:
            return self
        own = type(self).model_fields.keys() - _SHARED_NAMES
        known = {name.upper() for name in own} | self.unchecked_env
        for variable in os.environ:
            if variable.startswith(prefix) and variable.removeprefix(prefix) not in known:
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

    key_pepper: str = Field("", repr=False)
    """A secret that all API keys' digests depend on."""


def redis_url_of(given: str | None) -> str:
    """The given URL, else PENSTOCK_REDIS_URL; raises ConfigError that says what to set."""
    url = RedisSettings.load(redis_url=given).redis_url
    if not url:
        raise ConfigError("which Redis? Give --redis-url or set PENSTOCK_REDIS_URL", param="redis_url")
    return url
