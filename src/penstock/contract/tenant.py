"""Tenants: their API keys, priority classes and terms."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import from_json

from penstock.contract.errors import ForbiddenError, NotFoundError, RequestError, UnauthorizedError
from penstock.contract.fields import NAME_PATTERN
from penstock.contract.priority import ClassName

# A tenant's limits and scheduling weight. A trusted submitter, a gateway or a client, states them at each submit.

NO_LIMIT = 0
MAX_LIMIT = 10**12
"""The largest limit. Lua counts in floats, which are exact up to 2**53."""
ACCOUNT_PATTERN = r"^[A-Za-z0-9_-]{0,64}$"


class Terms(BaseModel):
    """A tenant's limits and weight in one pool.

    The submit script enforces them, so they hold across all processes that submit for the tenant. Rates allow a burst
    of `burst_s` seconds' worth at once. Tokens are charged by predicted cost. When a job ends, the charge is corrected
    to its actual prompt and output tokens. A job that might exceed the tokens of a minute waits, see docs/PROTOCOL.md.
    """

    # The docstrings are the help texts of `penstock keys`.
    model_config = ConfigDict(frozen=True, extra="forbid")

    max_open_jobs: int = Field(default=NO_LIMIT, ge=0, le=MAX_LIMIT)
    """Most jobs that wait or run, per pool and over all of the tenant's keys. 0: no limit."""
    max_queued_cost: int = Field(default=NO_LIMIT, ge=0, le=MAX_LIMIT)
    """Most predicted KV tokens of waiting jobs, per pool and over all of the tenant's keys. 0: no limit."""
    jobs_per_minute: int = Field(default=NO_LIMIT, ge=0, le=MAX_LIMIT)
    """Most jobs submitted per minute, per pool and over all of the tenant's keys. 0: no limit."""
    tokens_per_minute: int = Field(default=NO_LIMIT, ge=0, le=MAX_LIMIT)
    """Most prompt and output tokens per minute, per pool and over all of the tenant's keys. 0: no limit."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Share of a busy pool under the policy fair. A tenant of weight 2 gets twice as much as one of weight 1."""
    burst_s: int = Field(default=10, ge=1, le=3600)
    """Burst of a rate limit: this many seconds' worth may come at once."""
    memory_percent: int = Field(default=NO_LIMIT, ge=0, le=90)
    """Percent of Redis's memory that the tenant's jobs and results may take. 0: as set for the pool."""
    account: str = Field(default="", pattern=ACCOUNT_PATTERN)
    """Account within the tenant to which used tokens are counted: an API key's id, empty for direct Redis clients."""

    def without_limits(self) -> Terms:
        """Return terms for resubmitting a job that was accepted before and must not be refused now."""
        return Terms(weight=self.weight, account=self.account)


UNLIMITED = Terms()


# API keys of a gateway: which tenant a caller belongs to, and what it may do.
#
# A key is `pk-<id>-<secret>`. `penstock:keys` stores a record under the id, with an HMAC of the secret. So an attacker
# who can read Redis can neither use nor guess a key. The HMAC's key is the installation's pepper, if any, plus the id.

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

    def public_json(self) -> str:
        """Return the record as JSON without its digest, for processes that only need the terms."""
        return self.model_dump_json(exclude={"digest"})

    @classmethod
    def of_public_json(cls, data: bytes) -> ApiKey:
        """Return what `public_json` gave, with an empty digest."""
        return cls.model_validate({"digest": "", **from_json(data)})

    @property
    def metered_terms(self) -> Terms:
        """The terms for a job submitted with this key, with its token usage counted to the key."""
        return self.terms.model_copy(update={"account": self.key_id})


def mint(pepper: str) -> tuple[str, str, str]:
    """Return a new key, its id, and the digest to store. The key itself is shown to the operator once, never stored."""
    key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    return f"pk-{key_id}-{secret}", key_id, _digest(pepper, key_id, secret)


# Keys that an operator brings (`--api-key`) may have any form. Such a key has a record like others, under an id that is
# made from the key. So `penstock keys` shows it, limits it and revokes it. Only gateways that were started with it
# accept it.

MAX_GIVEN_CHARS = 256
MIN_SAFE_CHARS = 16
"""Characters below which a given key can be guessed."""
GIVEN_LABEL = "--api-key"
_GIVEN = re.compile(r"[!-+\--~]{1,256}")


def given_keys(text: str) -> tuple[str, ...]:
    """Return the keys that commas, spaces or line ends separate. Lines that begin with # are comments.

    Raises ValueError, which does not contain a key.
    """
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    keys = tuple(dict.fromkeys(key for line in lines for key in re.split(r"[,\s]+", line) if key))
    if not keys:
        raise ValueError("has no key")
    if any(_GIVEN.fullmatch(key) is None for key in keys):
        raise ValueError(f"has a key that is not 1 to {MAX_GIVEN_CHARS} printable ASCII characters")
    if any(_KEY.fullmatch(key) for key in keys):
        raise ValueError(
            "has a key of `penstock keys add`, which every gateway of its Redis accepts without this option"
        )
    return keys


def given_record(key: str, pepper: str) -> ApiKey:
    """Return the record of a key that an operator brings."""
    key_id = _digest(pepper, GIVEN_LABEL, key)[: 2 * _ID_BYTES]
    digest, scopes = _digest(pepper, key_id, key), frozenset[Scope](("infer", "metrics"))
    return ApiKey(key_id=key_id, digest=digest, tenant="default", scopes=scopes, label=GIVEN_LABEL)


def identify_given(key: str, given: Mapping[str, ApiKey], known: Mapping[str, ApiKey], pepper: str) -> ApiKey | None:
    """Return the record of `key` if it is one of the `given` ones, by id; None otherwise, or if it is revoked.

    What an operator set later, such as limits, is in `known`.
    """
    if not given or len(key) > MAX_GIVEN_CHARS:
        return None
    said = given_record(key, pepper)
    ours = given.get(said.key_id)
    if ours is None or not hmac.compare_digest(ours.digest.encode(), said.digest.encode()):
        return None
    record = known.get(said.key_id, ours)
    return None if record.is_revoked else record


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


def key_id_of(key: str) -> str:
    """Return the id that a key contains; empty if it is malformed."""
    match = _KEY.fullmatch(key) if len(key) <= MAX_KEY_CHARS else None
    return "" if match is None else match[1]


OPENED = "opened"
"""The id of the record of `penstock keys open`, which has the time of that. No key has this id."""


def keys_in_use(known: Mapping[str, ApiKey]) -> list[ApiKey]:
    """Return the keys that every gateway accepts: those that are neither revoked nor brought by an operator."""
    return [key for key in known.values() if not key.is_revoked and key.label != GIVEN_LABEL]


def opened_s(known: Mapping[str, ApiKey]) -> int:
    """Return since when callers without a key may be served again (Unix time in seconds); 0 if they may not."""
    record = known.get(OPENED)
    return 0 if record is None or keys_in_use(known) else record.created_s


def are_required(known: Mapping[str, ApiKey]) -> bool:
    """Return whether callers need a key: keys exist, be they revoked, and `penstock keys open` came before them."""
    return bool(known.keys() - {OPENED}) and not opened_s(known)


def _digest(pepper: str, key_id: str, secret: str) -> str:
    return hmac.new(f"{pepper}:{key_id}".encode(), secret.encode(), hashlib.sha256).hexdigest()
