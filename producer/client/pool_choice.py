"""Which pool serves a request: by its model, its adapter, and the kind of its jobs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from contextlib import suppress

from penstock.contract.errors import NotFoundError, ProtocolVersionError, RequestError, UnavailableError
from penstock.contract.job import JobKey, pool_of
from penstock.contract.pool import PoolRecord
from penstock.contract.tasks import GENERATE
from penstock.producer.client.pools import CachedState
from penstock.producer.client.servers import QueueServers
from penstock.queue.broker.producer import ServedPool
from penstock.queue.protocol_version import PROTOCOL_VERSION, other_version

NOT_ABLE = "unsupported_value"
"""The code of the error for a model that cannot run jobs of a kind."""
NOT_DOING = " cannot "
"""What stands between the model and the kind in the message of that error."""
_OF_TOKENIZER = frozenset(("tokenize", "detokenize"))
"""Kinds of jobs that every node answers with its tokenizer."""
_DOING: Mapping[str, str] = {
    GENERATE: "generate text",
    "embed": "embed texts",
    "score": "score texts",
    "classify": "classify texts",
}
"""What a model does for jobs of a kind, in words for an error."""
_USES: Mapping[str, tuple[str, ...]] = {GENERATE: ("chat", "completion")}
"""The uses among `PoolRecord.capabilities` that a kind of jobs serves, where they are not the kind itself."""


def choose_pool(
    pools: Iterable[ServedPool],
    model: str | None,
    job_id: str | None = None,
    *,
    adapter: str | None = None,
    key: JobKey | None = None,
    kind: str | None = None,
    hides_models: bool = False,
) -> ServedPool:
    """Return a pool that serves `model`, or an adapter of that name; without a model, the only served one.

    Without a model, a pool that was made for the kind goes before one that can run it all the same: any model that
    generates text can embed. Of several pools for one model, `job_id` names one. Otherwise the one of the highest rank
    for `key` is chosen, so that simultaneous submissions with one key meet; without a key, one is drawn at random. A
    pool without a live node is returned only if no other fits: its nodes may return soon, and the model is known. With
    `hides_models`, errors do not list what is served.

    Raises what `fitting_pools` raises, and RequestError if `model` is necessary and missing. Raises
    ProtocolVersionError if the model's only pools have another protocol version.
    """
    known = list(pools)
    if len(known) == 1 and job_id is None and adapter is None and _fits(known[0], model, kind):
        return known[0]  # Most systems have one pool, and this runs for each job.
    fitting = fitting_pools(known, model, job_id, adapter=adapter, kind=kind, hides_models=hides_models)
    served = _live_or_all(fitting)
    if model is None and len({pool.model for pool in served}) > 1:
        served = [pool for pool in served if kind is not None and is_made_for(pool, kind)] or served
    if model is None and len({pool.model for pool in served}) > 1:
        listed = "" if hides_models else _served_names(served)
        raise RequestError(f"model must be named{listed}", param="model")
    chosen = random.choice(served) if key is None else max(served, key=lambda pool: key.rank_of(pool.pool))
    if chosen.protocol_version != PROTOCOL_VERSION:
        raise other_version(chosen.pool, chosen.protocol_version)
    return chosen


def _fits(pool: ServedPool, model: str | None, kind: str | None) -> bool:
    """Return whether a pool's model has this name, and its nodes run such jobs by this version of the protocol."""
    is_named = model is None or model == pool.model
    return is_named and (kind is None or kind in pool.kinds) and pool.protocol_version == PROTOCOL_VERSION


def fitting_pools(
    known: list[ServedPool],
    model: str | None,
    job_id: str | None = None,
    *,
    adapter: str | None = None,
    kind: str | None = None,
    hides_models: bool = False,
) -> list[ServedPool]:
    """Return all pools for these names, with and without a live node. `hides_models` as in `choose_pool`.

    Raises UnavailableError if no model is served, and NotFoundError for unknown names.
    """
    fitting = known
    if not known:
        raise UnavailableError("no model is served: `penstock serve` or `penstock node` starts one", code="no_node")
    if job_id is not None:
        fitting = [p for p in known if p.pool == pool_of(job_id)]
        if not fitting:
            raise NotFoundError(f"job_id {job_id!r} names no served pool", code="model_not_found", param="job_id")
    if model is not None:
        fitting = [p for p in fitting if model in names_of(p)] or [p for p in fitting if model in p.adapters]
    if not fitting:
        listed = "" if hides_models else _served_names(known)
        raise NotFoundError(f"model {model!r} is not served{listed}", code="model_not_found", param="model")
    fitting = _able_of(fitting, known, model, kind, hides_models=hides_models)
    if adapter is None:
        return fitting
    with_adapter = [pool for pool in fitting if adapter in pool.adapters]
    if not with_adapter:
        listed = "" if hides_models else _served_names(fitting, models=False)
        raise NotFoundError(f"adapter {adapter!r} is not served{listed}", code="model_not_found", param="adapter")
    return with_adapter


def _able_of(
    fitting: list[ServedPool], known: list[ServedPool], model: str | None, kind: str | None, *, hides_models: bool
) -> list[ServedPool]:
    """Return the pools that can run jobs of a kind; None: all. Raises RequestError that names models which can.

    A pool of an earlier release that does not know a kind yet stays: its nodes are to be upgraded.
    """
    if kind is None or kind in _OF_TOKENIZER:
        return fitting
    able = [pool for pool in fitting if kind in pool.kinds]
    if able or (kind == "embed" and any(GENERATE in pool.kinds for pool in fitting)):
        return able or fitting
    others = sorted({pool.model for pool in known if kind in pool.kinds and pool.is_alive})
    named = f"; models that can: {', '.join(others) or 'none'}" if not hides_models else ""
    asked = "the served models" if model is None else f"model {model!r}"
    raise RequestError(f"{asked}{NOT_DOING}{_DOING.get(kind, kind)}{named}", code=NOT_ABLE, param="model")


def is_made_for(pool: PoolRecord, kind: str) -> bool:
    """Return whether a pool's nodes run jobs of a kind, and its model's files claim such a use."""
    claimed = pool.capabilities
    return kind in pool.kinds and (not claimed or any(use in claimed for use in _USES.get(kind, (kind,))))


def _served_names(pools: list[ServedPool], *, models: bool = True) -> str:
    """Return the end of an error: the adapters of these pools, and their models."""
    shown = _live_or_all(pools)
    names = {name for pool in shown for name in pool.adapters} | {pool.model for pool in shown if models}
    return f"; served: {', '.join(sorted(names)) or 'none'}"


def _live_or_all(pools: list[ServedPool]) -> list[ServedPool]:
    """Return the pools with a live node, or all pools if none has one."""
    return [pool for pool in pools if pool.is_alive] or pools


def names_of(pool: PoolRecord) -> tuple[str, ...]:
    """Return the names under which a caller may ask for a pool's model."""
    return pool.pool, pool.model, *pool.aliases


async def chosen_pool(
    servers: QueueServers,
    model: str | None,
    job_id: str | None,
    *,
    adapter: str | None = None,
    key: JobKey | None = None,
    kind: str | None = None,
    hides_models: bool = False,
) -> ServedPool:
    """Return the pool that `choose_pool` chooses of those that servers know. Raises what `choose_pool` raises.

    If another fitting pool already has a job of this key, that pool is returned, also if it has no live node now.
    """
    known, chosen = list((await servers.pools(CachedState.recent)).values()), None
    with suppress(RequestError, UnavailableError, ProtocolVersionError):
        chosen = choose_pool(known, model, job_id, adapter=adapter, key=key, kind=kind)
    if chosen is None:
        # The model's first node may have joined since.
        known = list((await servers.pools(CachedState.renewed)).values())
        try:
            chosen = choose_pool(known, model, job_id, adapter=adapter, key=key, kind=kind, hides_models=hides_models)
        except NotFoundError:
            servers.require_known_pools()
            raise
    if key is None:
        return chosen
    # Pools may have joined or died since a job of this key was submitted, so the ranks may choose another pool now.
    fitting = fitting_pools(known, model, job_id, adapter=adapter, kind=kind, hides_models=hides_models)
    pools = {pool.pool: pool for pool in (chosen, *fitting) if pool.protocol_version == PROTOCOL_VERSION}
    return chosen if len(pools) == 1 else pools.get(await servers.pool_of(key, pools), chosen)
