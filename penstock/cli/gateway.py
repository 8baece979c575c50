"""`penstock gateway`: run an HTTP gateway in this process."""

from __future__ import annotations

from typing import Any

from penstock.cli.options import options_of, taken_for, takes
from penstock.contract.errors import ConfigError
from penstock.gateway.settings import GatewaySettings
from penstock.runtime.logging import LogSettings, configure_logging
from penstock.runtime.settings import redis_url_of

_FLAGS = {"cors_origins": ("--cors-origin",), "allowed_hosts": ("--allowed-host",)}


@takes(*options_of(GatewaySettings, flags=_FLAGS), *options_of(LogSettings))
def gateway(**given: Any) -> None:
    """Serve the OpenAI API for the pools of one Redis.

    Each option can also be set with the environment variable PENSTOCK_GATEWAY_<NAME>, and the Redis with
    PENSTOCK_REDIS_URL.

    Examples:
        penstock gateway --redis-url redis://localhost --host 0.0.0.0 --port 8000
    """
    try:
        from penstock.gateway.app import run
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock[gateway]'") from error

    logs = LogSettings.load(**taken_for(LogSettings, given))
    settings = GatewaySettings.load(**given | {"redis_url": redis_url_of(given["redis_url"])})
    configure_logging(logs)
    run(settings)
