"""API keys of a gateway: which tenant a caller belongs to, and what it may do.

A key is `pk-<id>-<secret>`. `penstock:keys` stores a record under the id, with an HMAC of the secret. So an attacker
who can read Redis can neither use nor guess a key. The HMAC's key is the installation's pepper, if any, plus the id.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from penstock.contract.errors import ForbiddenError, NotFoundError, RequestError, UnauthorizedError
from penstock.contract.job import NAME_PATTERN
from penstock.contract.priority import ClassName
from penstock.contract.terms import UNLIMITED, Terms

Scope = Literal["infer", "metrics", "admin"]
"""`infer` allows generation, and reading of the tenant's own jobs and of the key's own usage. `metrics` allows scraping
metrics, and nothing else. `admin` allows reading metrics, health, job lists and usage of all tenants."""
ANONYMOUS = "anonymous"
"""The tenant of callers without a key at a gateway that has keys and serves such callers. No key may have it."""
MAX_KEY_CHARS = 100
MAX_MODELS = 64
"""Names of models and adapters that a key may list."""
_ID_BYTES = 8
_SECRET_BYTES = 32
_KEY = re.compile(rf"pk-([0-9a-f]{{{2 * _ID_BYTES}}})-([A-Za-z0-9_-]{{1,64}})")


class ApiKey(BaseModel):
    """A key's stored record.

    A revoked key keeps its record. Otherwise a gateway would see no keys at all and serve without authentication.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    key_id: str
    digest: str
    tenant: Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
    scopes: frozenset[Scope] = frozenset(("infer",))
    terms: Terms = UNLIMITED
    highest_class: ClassName = "standard"
    """The most urgent priority class that the caller may request."""
    models: frozenset[Annotated[str, StringConstraints(min_length=1, max_length=256)]] = Field(
        default=frozenset(), max_length=MAX_MODELS
    )
    """Names of the models and adapters that the key may use. Empty: all."""
    label: str = Field(default="", max_length=200)
    created_s: int = 0
    is_revoked: bool = False

    def require(self, *scopes: Scope) -> None:
        """Raise ForbiddenError unless the key has one of `scopes`."""
        if self.scopes.isdisjoint(scopes):
            needed, present = " or ".join(scopes), ", ".join(sorted(self.scopes)) or "none"
            raise ForbiddenError(f"this request needs the scope {needed}; scopes of this API key: {present}")

    def sees(self, model: str) -> bool:
        """Return whether the key may use a model or an adapter by this name."""
        return not self.models or model in self.models

    def model_of(self, asked: str) -> str:
        """Return the name of the model to use for a request; empty if the request and the key name none.

        Raises NotFoundError for a name that the key does not list, as for a model that is not served. Raises
        RequestError if the request names none and the key lists several.
        """
        if not self.models or asked in self.models:
            return asked
        listed = ", ".join(sorted(self.models))
        if asked:
            message = f"model {asked[:256]!r} is not served; this API key may use: {listed}"
            raise NotFoundError(message, code="model_not_found", param="model")
        if len(self.models) > 1:
            raise RequestError(f"model must be named; this API key may use: {listed}", param="model")
        return listed

    @property
    def metered_terms(self) -> Terms:
        """The terms for a job submitted with this key, with its token usage counted to the key."""
        return self.terms.model_copy(update={"account": self.key_id})


def mint(pepper: str) -> tuple[str, str, str]:
    """Return a new key, its id, and the digest to store. The key itself is shown to the operator once, never stored."""
    key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    return f"pk-{key_id}-{secret}", key_id, _digest(pepper, key_id, secret)


def identify(key: str, known: Mapping[str, ApiKey], pepper: str) -> ApiKey:
    """Return the record of `key`.

    Raises UnauthorizedError, which does not reveal whether the id or the secret is wrong.
    """
    match = _KEY.fullmatch(key) if len(key) <= MAX_KEY_CHARS else None
    if match is None:
        raise UnauthorizedError("malformed API key")
    record = known.get(match[1])
    kept = record.digest if record is not None and not record.is_revoked else ""
    if not hmac.compare_digest(_digest(pepper, match[1], match[2]).encode(), kept.encode()) or record is None:
        raise UnauthorizedError("unknown API key")
    return record


def _digest(pepper: str, key_id: str, secret: str) -> str:
    return hmac.new(f"{pepper}:{key_id}".encode(), secret.encode(), hashlib.sha256).hexdigest()
