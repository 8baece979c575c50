"""The URL of the server that a command asks over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterable

from penstock.contract.errors import ConfigError
from penstock.runtime.local_redis import running_gateway
from penstock.runtime.settings import RedisSettings

DEFAULT_URL = "http://127.0.0.1:8000"
OWN_VARIABLE = "PENSTOCK_URL"
URL_VARIABLES = (OWN_VARIABLE, "OPENAI_BASE_URL")


def usual_url(variables: Iterable[str] = URL_VARIABLES) -> str:
    """Return the URL that the environment names, else that of this user's `penstock serve`, else the default one."""
    named = next((os.environ[name] for name in variables if os.environ.get(name)), None)
    return named or running_gateway(RedisSettings.load().runtime_dir) or DEFAULT_URL


def address_of(base_url: str | None) -> str:
    """Return the given URL of a server, or the usual one, without `/v1`. Raises ConfigError."""
    found = base_url or usual_url()
    url = found.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url must begin with http:// or https://, not {found[:64]!r}", param="base_url")
    return url
