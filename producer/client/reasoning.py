"""How long a job's answer may reason: the budget that applies to it, from its caller, its effort or the nodes."""

from __future__ import annotations

import json
from collections.abc import Collection
from types import MappingProxyType

from penstock.contract.job import JobDef
from penstock.contract.pool import PoolRecord

BUDGETS_OF_EFFORTS = MappingProxyType({"minimal": 512, "low": 1024, "medium": 4096, "high": 16384})
"""Tokens of reasoning that an effort stands for where the chat template has no variable for it. Any other effort has no
limit."""


def with_budget(job: JobDef, given: Collection[str], record: PoolRecord) -> JobDef:
    """Return the job with the budget that applies. `given`: the sampling options that its caller set.

    The caller's budget goes before that of its effort, and that before the nodes' default. Where nothing reasons,
    nothing has a budget.
    """
    budget = job.params.reasoning_budget
    if not may_reason(job, record):
        budget = None
    elif not (record.takes_effort or job.params.use_beam_search or "reasoning_budget" in given):
        budget = _budget_of_effort(job.chat_template_kwargs) or budget
    if budget == job.params.reasoning_budget:
        return job
    return job.model_copy(update={"params": job.params.model_copy(update={"reasoning_budget": budget})})


def may_reason(job: JobDef, record: PoolRecord) -> bool:
    """Return whether the job is a chat whose answer may have reasoning that is told from the rest."""
    packed = job.packed_prompt
    is_chat = job.messages is not None or (packed is not None and packed.form == "messages")
    return is_chat and record.reasoning_parser != "none"


def _budget_of_effort(template_kwargs: str | None) -> int | None:
    effort = None if template_kwargs is None else json.loads(template_kwargs).get("reasoning_effort")
    return BUDGETS_OF_EFFORTS.get(effort) if isinstance(effort, str) else None
