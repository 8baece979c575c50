"""`penstock gateway`: the HTTP door, in this process."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.contract.errors import ConfigError
from penstock.contract.settings import redis_url_of


def gateway(
    redis_url: Annotated[str | None, typer.Option(help="Redis of the pools; default: $PENSTOCK_REDIS_URL.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
) -> None:
    """Serve the OpenAI API over the pools of one Redis."""
    try:
        from penstock.gateway.app import run
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock[gateway]'") from error
    from penstock.gateway.settings import GatewaySettings

    run(GatewaySettings.load(redis_url=redis_url_of(redis_url), host=host, port=port))
