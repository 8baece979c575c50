"""Settings of a gateway process, and the check that it can listen on its address.

A flag overrides `PENSTOCK_GATEWAY_*`, which overrides these defaults. `penstock serve` imports this module, so it needs
no web framework.
"""

from __future__ import annotations

import asyncio
import errno
import time
from ipaddress import ip_network
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from penstock.contract.durability import Durability
from penstock.contract.errors import ConfigError
from penstock.contract.priority import ClassName
from penstock.contract.tenant import ApiKey, given_keys, given_record
from penstock.runtime.settings import Settings

UnknownFields = Literal["refuse", "ignore"]
MaxTokensBeyondContext = Literal["lower", "refuse"]


PROGRESS_VARIABLE = "PENSTOCK_GATEWAY_PROGRESS"
"""Environment variable. With the value `json`, the gateway prints its URL to stdout as JSON for a supervisor."""


class GatewaySettings(Settings):
    """Settings of one gateway process, frozen for its lifetime. Field docstrings are the flags' help texts."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_GATEWAY_")

    unchecked_env: ClassVar[frozenset[str]] = Settings.unchecked_env | {"API_KEY_FILE", "KEEPER", "HANDED", "CHECK"}
    secrets: ClassVar[frozenset[str]] = frozenset({"api_key"})

    redis_url: str | None = None
    """URL of the pools' Redis. Default: $PENSTOCK_REDIS_URL, or the Redis of this user's penstock serve."""
    host: str = "127.0.0.1"
    """Address to listen on. The default accepts local connections only."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0 lets the system choose a free port."""
    max_body_bytes: int = Field(default=8 << 20, ge=1 << 10)
    """Largest request body in bytes. A larger body is refused."""
    max_logprobs: int = Field(default=1 << 18, ge=0)
    """Most log-probabilities that one request may ask for, over all its prompts and choices."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds within which a request's body must arrive."""
    first_chunk_wait_s: float = Field(default=10.0, ge=0)
    """Seconds that a stream waits for its first token or a refusal before it sends HTTP status 200."""
    keep_alive_s: float = Field(default=10.0, gt=0)
    """Seconds of silence on a stream after which the gateway sends a keep-alive comment."""
    idle_connection_s: int = Field(default=75, ge=1, le=24 * 3600)
    """Seconds that a connection may stay open between two requests. A proxy before the gateway must close its idle
    connections earlier: nginx does after 60 s, AWS's load balancers after 60 s, Google's after 600 s."""
    response_retention_s: float = Field(default=86_400.0, ge=1, le=30 * 86_400)
    """Seconds for which a stored response of `/v1/responses`, with its output, is kept after its end."""
    send_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a client that reads nothing is disconnected."""
    max_connections: int | None = Field(default=None, ge=1)
    """Most connections that this gateway keeps open, WebSockets included. A further one is answered 503 and closed.
    Default: 87 percent of the limit of open files (`ulimit -n`)."""
    max_sockets: int = Field(default=5000, ge=0)
    """Most WebSockets that this gateway keeps open."""
    max_key_sockets: int = Field(default=500, ge=1)
    """Most WebSockets that one API key may have open at this gateway."""
    max_socket_streams: int = Field(default=64, ge=1)
    """Most streams that one WebSocket may have open."""
    drain_s: float = Field(default=30.0, ge=0.0, allow_inf_nan=False)
    """Seconds that open answers may continue after SIGTERM."""
    keep_connections: bool = False
    """Run the gateway under a keeper, a small process that holds its connections. If the gateway ends, the keeper
    starts it again, and open answers go on. `penstock serve` does so by itself. Linux only."""
    api_key: str | None = Field(default=None, repr=False)
    """Keys of any form, one of which each request must have, separated by commas. A command line is visible to all
    users of a machine: PENSTOCK_GATEWAY_API_KEY or a file named by PENSTOCK_GATEWAY_API_KEY_FILE is not. Default: the
    keys of `penstock keys`."""
    require_keys: bool = False
    """Require an API key for every request, even while no keys exist. On an address that other machines reach, the
    gateway does that by itself."""
    allow_anonymous: bool = False
    """Serve callers without an API key, on any address. They may only ask for answers; where keys exist, they are a
    tenant of their own, `anonymous`."""
    first_key_file: Path | None = None
    """File into which a first API key, with all scopes, is written at the start if there is no key. Default: none."""
    keys_seen_file: Path | None = None
    """File that notes that API keys exist. If the keys are missing later, the gateway stays closed. Default: none; with
    `penstock serve` a file in the state folder."""
    allowed_hosts: tuple[str, ...] = ()
    """A host name that callers without a key may use, beside IP addresses and local names. Repeat the flag
    for several; `*` allows all. Default: none on a loopback address, all on others."""
    open_highest_class: ClassName = "standard"
    """The most urgent priority class that callers may use while no API keys exist."""
    token_durability: Durability | None = None
    """What answers wait for before they show a token, unless the request says it: `memory`, Redis; `fsync`, its disk;
    or `replicated`, a replica. Default: $PENSTOCK_CLIENT_TOKEN_DURABILITY, or memory."""
    unknown_fields: UnknownFields = "refuse"
    """What to do with a body's unknown fields: refuse the request, or ignore and list them in a response header."""
    max_tokens_beyond_context: MaxTokensBeyondContext = "lower"
    """What to do if prompt and `max_tokens` exceed the model's context together: lower `max_tokens` to what is left and
    say so in a response header, or refuse the request."""
    loop_watch_ms: float = Field(default=50.0, ge=1, le=1000)
    """Milliseconds between two measurements of the event loop's delay."""
    loop_stall_s: float = Field(default=30.0, ge=0)
    """Seconds that the event loop may stand still before the process ends with a stack dump. 0: forever."""
    log_starts: bool = False
    """Log each request when it begins, too. Otherwise a request has one line, at its end."""
    loop_debug: bool = False
    """Log which code runs when it blocks the event loop for 50 ms or more."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP) that gets the spans of requests. Default: the standard OTEL_*
    variables; without them traces are off."""
    webhook_allow_http: bool = False
    """Deliver webhooks to http:// URLs, too. Their content can be read and changed on the way."""
    webhook_allowed_networks: tuple[str, ...] = ()
    """A network, such as 10.1.0.0/16, to which webhooks may be delivered although its addresses are not public. Repeat
    the flag for several. Default: none."""
    webhook_timeout_s: float = Field(default=15.0, gt=0, le=60)
    """Seconds within which a webhook's receiver must answer."""
    webhook_in_flight: int = Field(default=8, ge=1, le=64)
    """Most webhooks that are delivered to one endpoint at the same time, over all gateways."""
    webhook_retry_s: float = Field(default=5.0, gt=0, le=3600)
    """Mean seconds until a webhook is delivered again after its first failure. They double with each further one, up to
    an hour."""
    webhook_give_up_s: float = Field(default=72 * 3600.0, gt=0, le=7 * 86_400)
    """Seconds for which a webhook is tried. After that it is dead, and its owner may have it delivered again."""
    cors_origins: tuple[str, ...] = ()
    """An origin whose pages may call this gateway (CORS), such as https://app.example. Repeat the flag for several. `*`
    and `null` allow any page; they need API keys, and the gateway requires one from its start then. Default: none."""

    @field_validator("api_key")
    @classmethod
    def _are_keys(cls, value: str | None) -> str | None:
        if value is not None:
            given_keys(value)
        return value

    @field_validator("webhook_allowed_networks")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            ip_network(text, strict=False)
        return value


def given_records(settings: GatewaySettings, pepper: str) -> dict[str, ApiKey]:
    """Return the records of the keys that the setting `api_key` gives, by id."""
    records = (given_record(key, pepper) for key in (given_keys(settings.api_key) if settings.api_key else ()))
    return {record.key_id: record for record in records}


_POLL_S = 0.1


async def check_address(host: str, port: int, *, wait_s: float = 0.0) -> None:
    """Raise ConfigError, with the remedy, unless a server can listen on the address.

    `wait_s`: seconds to wait for another process that ends and frees the port.
    """
    deadline_s = time.monotonic() + wait_s
    while (error := await _refusal_of(host, port)) is not None:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host}: {error.strerror}", param="port") from error
        if time.monotonic() >= deadline_s:
            remedy = "choose another with --port, or let --port 0 choose a free one"
            raise ConfigError(f"port {port} on {host} is in use; {remedy}", param="port") from error
        await asyncio.sleep(_POLL_S)


async def _refusal_of(host: str, port: int) -> OSError | None:
    """Listen for a moment. Return the error of a failure."""
    try:
        listener = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    except OSError as error:
        return error
    listener.close()
    return None
