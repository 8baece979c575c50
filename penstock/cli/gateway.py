"""`penstock gateway`: the HTTP door, in this process."""

from __future__ import annotations

from typing import Any

from penstock.cli.options import options_of, takes
from penstock.contract.errors import ConfigError
from penstock.gateway.settings import GatewaySettings
from penstock.runtime.settings import redis_url_of


@takes(*options_of(GatewaySettings, flags={"cors_origins": ("--cors-origin",)}))
def gateway(**given: Any) -> None:
    """Serve the OpenAI API over the pools of one Redis.

    Each option is a setting, also read from PENSTOCK_GATEWAY_<NAME>; the Redis from PENSTOCK_REDIS_URL.
    """
    try:
        from penstock.gateway.app import run
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock[gateway]'") from error

    run(GatewaySettings.load(**given | {"redis_url": redis_url_of(given["redis_url"])}))
