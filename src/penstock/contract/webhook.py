"""Webhooks: the endpoints that tenants register, their secrets, and the events that penstock delivers to them.

Names are those of OpenAI's webhook endpoints. Signatures follow the specification Standard Webhooks:
https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import to_json

from penstock.contract.errors import RequestError
from penstock.contract.fields import NAME_PATTERN

ENDPOINT_ID_PATTERN = r"^we_[0-9a-f]{16}$"
EVENT_ID_PATTERN = r"^evt_[0-9a-f]{32}$"
MAX_ENDPOINTS = 64
"""Endpoints of one tenant."""
MAX_WEBHOOKS = 3
"""Endpoints that one job may name. Their ids fit into a short field of its record."""
MAX_URL_CHARS = 2048
MAX_NAME_CHARS = 256
MAX_OBJECT_ID_CHARS = 256
OLD_SECRET_LIFE_S = 24 * 3600
"""Seconds for which a rotated secret stays valid if its owner wishes so."""
_SECRET_PREFIX = "whsec_"
_SECRET_BYTES = 32
_SECRET_PATTERN = r"^whsec_[A-Za-z0-9+/]{24,86}={0,2}$"
_SHOWN_CHARS = 4

EventType = Literal[
    "response.completed",
    "response.failed",
    "response.cancelled",
    "response.incomplete",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "job.succeeded",
    "job.failed",
    "job.cancelled",
    "job.expired",
    "job.dead",
]
EVENT_TYPES: tuple[EventType, ...] = EventType.__args__  # type: ignore[attr-defined]
"""The events that an endpoint may subscribe to."""

EndpointId = Annotated[str, StringConstraints(pattern=ENDPOINT_ID_PATTERN)]
DeliveryState = Literal["pending", "delivered", "dead"]


class WebhookEndpoint(BaseModel):
    """An endpoint as it is stored, without its secrets. Times are Unix seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: EndpointId
    tenant: Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS)]
    url: Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL_CHARS)]
    event_types: Annotated[tuple[EventType, ...], Field(min_length=1, max_length=len(EVENT_TYPES))]
    status: Literal["enabled", "disabled"] = "enabled"
    disabled_reason: str | None = None
    signing_secret_hint: str = ""
    created_at: int = 0
    updated_at: int = 0


class WebhookSecrets(BaseModel):
    """The secrets of an endpoint. A message is signed with both while the old one is valid."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    secret: str = Field(repr=False, pattern=_SECRET_PATTERN)
    old_secret: str = Field(default="", repr=False, pattern=f"^$|{_SECRET_PATTERN}")
    old_until_s: float = Field(default=0.0, allow_inf_nan=False)

    def valid_at(self, now_s: float) -> list[str]:
        """Return the secrets that are valid at this Unix time, the new one first."""
        return [self.secret, *([self.old_secret] if self.old_secret and now_s < self.old_until_s else ())]


def new_endpoint_id() -> str:
    """Return a random id."""
    return f"we_{secrets.token_hex(8)}"


def new_secret() -> str:
    """Return a random secret."""
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def hint_of(secret: str) -> str:
    """Return a secret as it may be shown: its last characters."""
    return f"{_SECRET_PREFIX}…{secret.rstrip('=')[-_SHOWN_CHARS:]}"


def checked_url(url: str, *, allows_http: bool = True) -> SplitResult:
    """Return the parts of an endpoint's URL. Raises RequestError for a URL to which nothing may be delivered."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _wrong_url("is not a URL") from None
    if parts.scheme == "http" and not allows_http:
        raise _wrong_url("must begin with https:// (the operator may allow http:// by webhook_allow_http)")
    if parts.scheme not in ("https", "http"):
        raise _wrong_url("must begin with https://" + (" or http://" if allows_http else ""))
    if len(url) > MAX_URL_CHARS:
        raise _wrong_url(f"has {len(url)} characters; the limit is {MAX_URL_CHARS}")
    if not host or port == 0:
        raise _wrong_url("must name a host, and a port above 0 if it names one")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise _wrong_url("must consist of printable ASCII characters; encode others")
    if "@" in parts.netloc or parts.fragment:
        raise _wrong_url("must have no user name, no password and no fragment")
    return parts


def _wrong_url(problem: str) -> RequestError:
    return RequestError(f"url {problem}", code="invalid_webhook_url", param="url")


def event_id_of(event_type: str, object_id: str) -> str:
    """Return the id of an event, which is its `webhook-id`. A repeated event has the same one."""
    text = f"{event_type}\0{object_id}".encode()
    return f"evt_{hashlib.blake2b(text, digest_size=16).hexdigest()}"


def payload_of(event_id: str, event_type: str, object_id: str, created_s: int) -> bytes:
    """Return the body of a delivery: the id of what has ended, and nothing of its content."""
    data = {"id": object_id}
    return to_json({"id": event_id, "object": "event", "type": event_type, "created_at": created_s, "data": data})


def signed_headers(event_id: str, body: bytes, secrets_: Sequence[str], now_s: int) -> Mapping[str, str]:
    """Return the headers with which a receiver checks a body: one signature for each valid secret."""
    signed = f"{event_id}.{now_s}.".encode() + body
    signatures = " ".join(f"v1,{_signature_of(signed, secret)}" for secret in secrets_)
    return {"webhook-id": event_id, "webhook-timestamp": str(now_s), "webhook-signature": signatures}


def _signature_of(signed: bytes, secret: str) -> str:
    key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
    return base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def endpoint_object(endpoint: WebhookEndpoint) -> dict[str, Any]:
    """Return an endpoint as a plain JSON object, with OpenAI's names. `status` is penstock's own."""
    shown = endpoint.model_dump(mode="json", exclude={"tenant"})
    return {"object": "webhook_endpoint", **shown}
