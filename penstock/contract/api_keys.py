"""API keys: who may ask a gateway for what, on whose behalf and how much.

A key is `pk-<id>-<secret>`. `penstock:keys` holds, under the id, a record with an HMAC of the secret: whoever reads
Redis can neither use nor guess a key. The HMAC's own key is the pepper, if the installation has one, and the id.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from penstock.contract.errors import ForbiddenError, UnauthorizedError
from penstock.contract.job import NAME_PATTERN
from penstock.contract.priority import ClassName
from penstock.contract.terms import UNLIMITED, Terms

Scope = Literal["infer", "admin"]
"""`infer`: models and generation. `admin`: figures about everybody."""
MAX_KEY_CHARS = 100
_ID_BYTES = 8
_SECRET_BYTES = 32
_KEY = re.compile(rf"pk-([0-9a-f]{{{2 * _ID_BYTES}}})-([A-Za-z0-9_-]{{1,64}})")


class ApiKey(BaseModel):
    """A key's record. A revoked one is kept, so that a gateway with no valid key left stays closed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    key_id: str
    digest: str
    tenant: Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
    scopes: frozenset[Scope] = frozenset(("infer",))
    terms: Terms = UNLIMITED
    highest_class: ClassName = "standard"
    """The most urgent class that its holder may ask for."""
    label: str = Field(default="", max_length=200)
    created_s: int = 0
    is_revoked: bool = False

    def require(self, scope: Scope) -> None:
        """Raises ForbiddenError when the key is not good for this."""
        if scope not in self.scopes:
            raise ForbiddenError(f"this API key lacks the scope {scope!r}")

    @property
    def metered_terms(self) -> Terms:
        """The terms of a job that its holder submits: its tokens are counted to this key."""
        return self.terms.model_copy(update={"account": self.key_id})


def mint(pepper: str) -> tuple[str, str, str]:
    """A new key as it is told once, its id, and the digest that is kept."""
    key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    return f"pk-{key_id}-{secret}", key_id, _digest(pepper, key_id, secret)


def identify(key: str, known: Mapping[str, ApiKey], pepper: str) -> ApiKey:
    """The record of a key. Raises UnauthorizedError, which does not say whether the id or the secret is wrong."""
    match = _KEY.fullmatch(key) if len(key) <= MAX_KEY_CHARS else None
    if match is None:
        raise UnauthorizedError("this is no API key")
    record = known.get(match[1])
    kept = record.digest if record is not None and not record.is_revoked else ""
    if not hmac.compare_digest(_digest(pepper, match[1], match[2]).encode(), kept.encode()) or record is None:
        raise UnauthorizedError("unknown API key")
    return record


def _digest(pepper: str, key_id: str, secret: str) -> str:
    return hmac.new(f"{pepper}:{key_id}".encode(), secret.encode(), hashlib.sha256).hexdigest()
