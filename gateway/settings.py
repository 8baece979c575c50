"""Settings of a gateway process: flags, then `PENSTOCK_GATEWAY_*`, then these defaults."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.contract.settings import Settings


class GatewaySettings(Settings):
    """Frozen for the life of the process. None means `$PENSTOCK_REDIS_URL` and `$PENSTOCK_KEY_PEPPER`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_GATEWAY_")

    redis_url: str | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 takes a free port")
    max_body_bytes: int = Field(8 << 20, ge=1 << 10)
    body_timeout_s: float = Field(30.0, gt=0, description="a request's body must have arrived by then")
    first_chunk_wait_s: float = Field(10.0, ge=0, description="how long a stream's HTTP status waits for the queue")
    keep_alive_s: float = Field(10.0, gt=0, description="silence on a stream after which a comment goes out")
    send_timeout_s: float = Field(60.0, gt=0, description="a reader that takes nothing for so long is cut off")
    drain_s: int = Field(30, ge=0, description="how long open answers may go on after SIGTERM")
    require_keys: bool = Field(False, description="let nobody in without an API key, even while there are none")
    key_pepper: str | None = Field(None, repr=False)
    cors_origins: tuple[str, ...] = ()
