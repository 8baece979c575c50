"""`GET /v1/jobs/counts`: how many jobs of a tenant, tag, batch or bulk action are in which state, and when they end."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, Request

from penstock.contract.errors import RequestError
from penstock.gateway.errors import soon
from penstock.gateway.request.reading import caller_of
from penstock.producer.client.job_sets import JobSets, SetOptions

_PARAMETERS = ("tag", "batch", "bulk", "pool")


class SetRoutes:
    """The routes of sets of a caller's jobs; a key with the scope `admin` may name another tenant."""

    def __init__(self, sets: JobSets) -> None:
        self._sets = sets
        self.router = APIRouter()
        self.router.add_api_route("/v1/jobs/counts", self.counts)

    async def counts(self, request: Request) -> dict[str, Any]:
        """Count the caller's jobs by state and class, with their rate and expected end.

        `?tag=` and `?pool=`, or `?batch=` (also a flow), or `?bulk=` (an action). `?tenant=` needs the scope `admin`.
        """
        given, caller = dict(request.query_params), caller_of(request)
        tenant = given.pop("tenant", caller.tenant)
        if tenant != caller.tenant or "infer" not in caller.scopes:
            caller.require("admin")
        if unknown := [name for name in given if name not in _PARAMETERS]:
            name = unknown[0][:64]
            raise RequestError(f"{name}: counts take only tenant, {', '.join(_PARAMETERS)}", param=name)
        named = {name: given.get(name) for name in _PARAMETERS}
        async with soon():
            counts = await self._sets.counts(**cast(SetOptions, {**named, "tenant": tenant}))
        return counts.as_object()
