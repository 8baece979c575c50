"""Base classes of all settings. Settings are frozen; an entry point reads them once from flags and the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self, cast

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
from penstock.contract.fields import NAME_PATTERN
from penstock.contract.problems import config_error
from penstock.runtime.local_redis import running_url

_SHARED_PREFIX = "PENSTOCK_"
_SHARED_NAMES = frozenset({"redis_url"})
"""Settings with one environment variable for all packages, instead of one per package prefix."""
_PARTS = ("NODE", "GATEWAY", "CLIENT", "CELERY", "FILES", "RANK")
"""First words of the names that packages have for themselves."""
_WITHOUT_PART = (
    *("REDIS_URL", "REDIS_URL_FILE", "POOLS", "POOLS_FILE", "KEY_PEPPER", "KEY_PEPPER_FILE", "REDIS_SERVER"),
    *("RUNTIME_DIR", "LOG_LEVEL", "LOG_FORMAT", "CACHE", "CACHE_GROUP", "URL", "API_KEY"),
)
"""All other names. Variables of other programs may begin like ours, so only what resembles one of these is refused."""
_SIMILAR = 0.75
_NEARLY_EQUAL = 0.85


# Variables that Kubernetes injects for a namespace's services, such as `penstock-gateway`. Their names begin like our
# settings. https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables

_SERVICE = r"(?:[A-Z0-9_]+_)?"
"""The rest of a service's name after our prefix: empty for `penstock-node`, METRICS_ for `penstock-node-metrics`."""
_PROTOCOL = r"(?:TCP|UDP|SCTP)"
_NUMBER = re.compile(r"\d{1,5}")
_ADDRESS = re.compile(r"[0-9A-Fa-f.:]+")
_ORIGIN = re.compile(r"(?:tcp|udp|sctp)://\S+")
_FORMS = tuple(
    (re.compile(_SERVICE + name), value)
    for name, value in (
        (r"SERVICE_HOST", _ADDRESS),
        (r"SERVICE_PORT(?:_[A-Z0-9_]+)?", _NUMBER),
        (r"PORT", _ORIGIN),
        (rf"PORT_\d+_{_PROTOCOL}", _ORIGIN),
        (rf"PORT_\d+_{_PROTOCOL}_PROTO", re.compile(r"tcp|udp|sctp")),
        (rf"PORT_\d+_{_PROTOCOL}_PORT", _NUMBER),
        (rf"PORT_\d+_{_PROTOCOL}_ADDR", _ADDRESS),
    )
)


def _is_injected(name: str, value: str) -> bool:
    """Return whether a variable looks injected by Kubernetes. `name` is the part after the prefix of our settings.

    The value distinguishes ports: Kubernetes sets PENSTOCK_GATEWAY_PORT to `tcp://10.0.0.1:8000`, an operator to
    `8000`.
    """
    return any(form.fullmatch(name) and known.fullmatch(value) for form, known in _FORMS)


class _Environment(EnvSettingsSource):
    """The process's environment variables, without those that Kubernetes injects, and without empty secrets."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return a setting's value, its name, and whether it is JSON; value None if no operator set it."""
        value, key, is_complex = super().get_field_value(field, field_name)
        secrets: frozenset[str] = cast(Any, self.settings_cls).secrets
        # docker-compose sets a variable that has no value to "", which must not hide a file with the secret.
        is_empty = value == "" and field_name in secrets
        injected = isinstance(value, str) and _is_injected(field_name.upper(), value)
        return None if injected or is_empty else value, key, is_complex


class _SecretFiles(PydanticBaseSettingsSource):
    """Files with secrets: a setting's variable with `_FILE` names one, else systemd's credential of that name is read.

    `PENSTOCK_KEY_PEPPER_FILE` names the file of the setting key_pepper, and its credential is `penstock_key_pepper`.

    A secret in a file is neither in the list of processes nor in their environment. A line end at its end is dropped.
    """

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return a secret, its name, and whether it is JSON; value None without a file."""
        setting = cast(Any, self.settings_cls).variable_of(field_name)
        variable = f"{setting}_FILE"
        if given := os.environ.get(variable):
            return _secret_in(Path(given), variable), field_name, False
        folder = os.environ.get("CREDENTIALS_DIRECTORY")
        credential = Path(folder, setting.lower()) if folder else None
        if credential is None or not credential.is_file():
            return None, field_name, False
        return _secret_in(credential, "CREDENTIALS_DIRECTORY"), field_name, False

    def __call__(self) -> dict[str, Any]:
        """Return the secrets that files give."""
        secrets: frozenset[str] = cast(Any, self.settings_cls).secrets
        found = {name: self.get_field_value(self.settings_cls.model_fields[name], name)[0] for name in secrets}
        return {name: value for name, value in found.items() if value is not None}


def _secret_in(path: Path, variable: str) -> str:
    try:
        secret = path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{variable}: cannot read {path}: {why}", param=variable) from None
    if not secret:
        raise ConfigError(f"{variable}: {path} is empty", param=variable)
    return secret


class Settings(BaseSettings):
    """Base of a package's settings. The package sets its own `env_prefix`, such as `PENSTOCK_NODE_`."""

    model_config = SettingsConfigDict(env_prefix=_SHARED_PREFIX, extra="forbid", frozen=True)

    unchecked_env: ClassVar[frozenset[str]] = frozenset({"PROGRESS"})
    """Names after the prefix that are not fields. PROGRESS: a supervisor requests progress lines from its children."""
    secrets: ClassVar[frozenset[str]] = frozenset()
    """Settings that a file may give (`_SecretFiles`)."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources by precedence: given values, the environment, files with secrets. Nothing else is read."""
        return init_settings, _Environment(settings_cls), _SecretFiles(settings_cls)

    @model_validator(mode="after")
    def _no_unknown_variables(self) -> Self:
        prefix = str(self.model_config.get("env_prefix", ""))
        if prefix == _SHARED_PREFIX:
            _refuse_misspelled()
            return self
        own = type(self).model_fields.keys() - _SHARED_NAMES
        known = {name.upper() for name in own} | self.unchecked_env
        for variable, value in os.environ.items():
            name = variable.removeprefix(prefix)
            if variable.startswith(prefix) and name not in known and not _is_injected(name, value):
                raise ValueError(_unknown(variable, prefix, get_close_matches(name, known, 1, _SIMILAR)))
        return self

    @classmethod
    def variable_of(cls, name: str) -> str:
        """Return the environment variable of a setting."""
        return f"{cls.model_config.get('env_prefix', '')}{name.upper()}"

    @classmethod
    def origins(cls) -> dict[str, str]:
        """Return what sets each setting that does not have its default: a variable, or a file with a secret."""
        of_files = {}
        for name in _SecretFiles(cls)():
            folder, setting = os.environ.get("CREDENTIALS_DIRECTORY", ""), cls.variable_of(name)
            of_files[name] = os.environ.get(f"{setting}_FILE") or str(Path(folder, setting.lower()))
        return of_files | {name: cls.variable_of(name) for name in _Environment(cls)() if name in cls.model_fields}

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Read settings from the given values (None: not given), then the environment, then the defaults.

        Raises ConfigError that names the first unknown or invalid setting.
        """
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise config_error(error) from None
        except SettingsError as error:
            # Only the text of a SettingsError names the field.
            name = str(error).split('"')[1]
            raise ConfigError(f'{cls.variable_of(name)} must be JSON, such as ["one", "two"]', param=name) from None


def _refuse_misspelled() -> None:
    """Raise ValueError for a variable that nearly has the name of a shared one, or of a part."""
    for variable, value in os.environ.items():
        name = variable.removeprefix(_SHARED_PREFIX)
        part, _, rest = name.partition("_")
        if name in (variable, *_WITHOUT_PART) or part in _PARTS or _is_injected(name, value):
            continue
        if meant := get_close_matches(name, _WITHOUT_PART, 1, _NEARLY_EQUAL):
            raise ValueError(_unknown(variable, _SHARED_PREFIX, meant))
        if rest and (meant := get_close_matches(part, _PARTS, 1, _NEARLY_EQUAL)):
            raise ValueError(_unknown(variable, _SHARED_PREFIX, (f"{meant[0]}_{rest}",)))


def _unknown(variable: str, prefix: str, meant: Iterable[str]) -> str:
    hint = "".join(f"; did you mean {prefix}{name}?" for name in meant)
    return f"unknown environment variable {variable}{hint}"


class RedisSettings(Settings):
    """The Redis to use; None where not set."""

    secrets: ClassVar[frozenset[str]] = frozenset({"redis_url", "pools"})

    redis_url: str | None = None
    """redis://, rediss:// or unix://; behind Sentinel redis+sentinel:// or rediss+sentinel:// (docs/CLI.md)."""
    pools: str | None = Field(default=None, repr=False)
    """Pools with a Redis of their own: `POOL=URL`, separated by spaces or line ends (`pool_urls`)."""
    redis_server: Path | None = None
    """The server program to start if no URL is given."""
    runtime_dir: Path | None = None
    """Folder of the socket of `penstock serve`'s own Redis; default: /tmp/penstock-UID."""


class KeySettings(Settings):
    """Settings that gateways and `penstock keys` must share, besides Redis."""

    secrets: ClassVar[frozenset[str]] = frozenset({"key_pepper"})

    key_pepper: str = Field(default="", repr=False)
    """Secret that is part of every API key's digest."""


def pool_urls(given: str | None = None) -> dict[str, str]:
    """Return the URL of each pool that has a Redis of its own: as in `given`, else as in PENSTOCK_POOLS.

    An entry is `POOL=URL`; spaces or line ends separate entries. A pool that is not named is in the Redis of
    PENSTOCK_REDIS_URL. Raises ConfigError that names the wrong entry.
    """
    found: dict[str, str] = {}
    for entry in (RedisSettings.load(pools=given).pools or "").split():
        pool, _, url = entry.partition("=")
        if "://" in pool or "://" not in url:
            raise ConfigError(f"pools: {without_password(entry)[:100]!r} is not POOL=URL", param="pools")
        if not re.fullmatch(NAME_PATTERN, pool):
            message = f"pools: {pool[:100]!r} is not the name of a pool, as `penstock pools list` shows it"
            raise ConfigError(message, param="pools")
        if pool in found:
            raise ConfigError(f"pools: pool {pool} is named twice", param="pools")
        found[pool] = url
    return found


def redis_url_of(given: str | None = None, *, pool: str | None = None) -> str:
    """Return the given URL, else PENSTOCK_REDIS_URL, else the address of this user's running `penstock serve`.

    Without a given URL, that of the Redis which PENSTOCK_POOLS names for `pool` goes first. Raises ConfigError if none
    of them exists.
    """
    if given is None and pool is not None and (of_pool := pool_urls().get(pool)) is not None:
        return of_pool
    settings = RedisSettings.load(redis_url=given)
    url = settings.redis_url or running_url(settings.runtime_dir)
    if not url:
        raise ConfigError(
            "no Redis: start `penstock serve` on this machine, or name a Redis with --redis-url (in Python: "
            "redis_url) or PENSTOCK_REDIS_URL",
            param="redis_url",
        )
    return url


def redis_urls_of(given: str | None = None) -> list[str]:
    """Return the URLs of all Redis: the given one alone, else the directory's and those that PENSTOCK_POOLS names."""
    return [given] if given else list(dict.fromkeys((redis_url_of(), *pool_urls().values())))


DIRECTORY = "directory"
"""What the Redis of PENSTOCK_REDIS_URL is called."""


def redis_names_of(given: str | None = None) -> dict[str, str]:
    """Return the URLs of all Redis, each with its name: `directory`, or the pools that PENSTOCK_POOLS puts there."""
    own = {} if given else pool_urls()
    names = {url: ", ".join(pool for pool, of_pool in own.items() if of_pool == url) for url in redis_urls_of(given)}
    return names | {redis_url_of(given): DIRECTORY}


def without_password(redis_url: str) -> str:
    """The URL as it may be shown."""
    shown = re.sub(r"(://[^:/?#@]*):.*@", r"\1:***@", redis_url)
    return re.sub(r"([?&](?:sentinel_)?password=)[^&#]*", r"\1***", shown)
