"""Settings of a gateway process: flags, then `PENSTOCK_GATEWAY_*`, then these defaults."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.contract.priority import ClassName
from penstock.runtime.settings import Settings


class GatewaySettings(Settings):
    """Frozen for the life of the process."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_GATEWAY_")

    redis_url: str | None = None
    """Redis of the pools; else that of PENSTOCK_REDIS_URL."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    max_body_bytes: int = Field(default=8 << 20, ge=1 << 10)
    """A longer body is refused."""
    max_logprobs: int = Field(default=1 << 18, ge=0)
    """A request for more log-probabilities, over all prompts and choices, is refused."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """A request's body must have arrived by then."""
    first_chunk_wait_s: float = Field(default=10.0, ge=0)
    """How long a stream's HTTP status waits for the queue."""
    keep_alive_s: float = Field(default=10.0, gt=0)
    """Silence on a stream after which a comment goes out."""
    send_timeout_s: float = Field(default=60.0, gt=0)
    """A reader that takes nothing for so long is cut off."""
    drain_s: int = Field(default=30, ge=0)
    """How long open answers may go on after SIGTERM."""
    require_keys: bool = False
    """Let nobody in without an API key, even while there are none."""
    open_highest_class: ClassName = "standard"
    """The most urgent class that callers may ask for while there are no API keys."""
    loop_watch_ms: float = Field(default=20.0, ge=1, le=1000)
    """How often the event loop is asked how late it comes."""
    loop_debug: bool = False
    """Log what runs while the event loop is held for 50 ms and more."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may ask; may be repeated."""
