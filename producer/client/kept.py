"""The requests of open jobs, and of those that Redis has just accepted: a job that it has lost is submitted again."""

from __future__ import annotations

import asyncio
import math
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from penstock.producer.client.mailbox import Feed, SeenEnd
from penstock.queue.broker.producer import Submission, Submitted

_TOKEN_BYTES = 36
_MESSAGE_BYTES = 1000
TENANTS_PER_LIMIT = 4
_MOST_WITH_ENDED = 256


class KeptSubmission:
    """The submission of one open job, until it is dropped."""

    __slots__ = ("__weakref__", "_kept", "num_bytes", "submission")

    def __init__(self, submission: Submission, kept: KeptSubmissions) -> None:
        self._kept = kept
        self.submission: Submission | None = submission
        self.num_bytes = num_bytes_of(submission)
        kept.add(self, submission.job.tenant)

    def __del__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Give back the memory of the prompt. The job is not submitted again after that."""
        if self.submission is not None:
            self._kept.remove(self, self.submission.job.tenant)
            self.submission = None


class KeptSubmissions:
    """All kept submissions of a client. Beyond a limit of bytes, the oldest ones are dropped.

    Redis loses the newest writes, so the oldest requests are the least needed. The tenant whose request exceeds its
    share drops its own ones. Beyond the limit of all tenants, that is the tenant with the most bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: 0 for no limit."""
        self._max_bytes = max_bytes or math.inf
        self._num_bytes = 0
        self._bytes_of_tenant = Counter[str]()
        # Keyed by tenant, then a number; never looked up by a text.
        self._of_tenant: dict[str, dict[int, weakref.ref[KeptSubmission]]] = {}

    def add(self, kept: KeptSubmission, tenant: str) -> None:
        """Count a submission, and drop the oldest ones beyond the limit."""
        self._num_bytes += kept.num_bytes
        self._bytes_of_tenant[tenant] += kept.num_bytes
        self._of_tenant.setdefault(tenant, {})[id(kept)] = weakref.ref(kept)
        while self._bytes_of_tenant[tenant] > self._max_bytes / TENANTS_PER_LIMIT and self._drops_oldest(tenant):
            pass
        while self._num_bytes > self._max_bytes and self._drops_oldest(self._bytes_of_tenant.most_common(1)[0][0]):
            pass

    def remove(self, kept: KeptSubmission, tenant: str) -> None:
        """Count a submission no more."""
        self._num_bytes -= kept.num_bytes
        self._bytes_of_tenant[tenant] -= kept.num_bytes
        del self._of_tenant[tenant][id(kept)]
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant], self._bytes_of_tenant[tenant]

    def open(self, has_pool: Callable[[str], bool] | None = None) -> list[Submission]:
        """Return the kept submissions to some pools; None: to all."""
        found = [ref() for of_tenant in self._of_tenant.values() for ref in of_tenant.values()]
        kept = [one.submission for one in found if one is not None and one.submission is not None]
        return [one for one in kept if has_pool is None or has_pool(one.job.pool)]

    def _drops_oldest(self, tenant: str) -> bool:
        """Drop a tenant's oldest submission. Return False if there is none."""
        oldest = next((one for ref in self._of_tenant.get(tenant, {}).values() if (one := ref()) is not None), None)
        if oldest is not None:
            oldest.drop()
        return oldest is not None


def num_bytes_of(submission: Submission) -> int:
    """Return about how much memory a submission takes, without the fields that are always small."""
    job = submission.job
    if job.packed_prompt is not None:
        num_bytes = len(job.packed_prompt.data)
    elif job.prompt is not None:
        num_bytes = sys.getsizeof(job.prompt)
    elif job.prompt_token_ids is not None:
        num_bytes = _TOKEN_BYTES * len(job.prompt_token_ids)
    else:
        num_bytes = sum(
            _MESSAGE_BYTES + sys.getsizeof(message.content) + len(message.reasoning) for message in job.messages or ()
        )
    return num_bytes + len(job.tools or "") + len(job.chat_template_kwargs or "") + len(submission.response.data)


class _Recent(NamedTuple):
    at_s: float
    num_bytes: int
    submission: Submission
    end: SeenEnd | None
    """Whether a reader of this process has the end; None if it does not read the job."""

    @property
    def has_ended(self) -> bool:
        return self.end is not None and self.end.is_seen


class RecentSubmissions:
    """The submissions that Redis accepted in the last `keep_s` seconds, at most `max_bytes` of them."""

    def __init__(self, *, keep_s: float, max_bytes: int) -> None:
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._recent: deque[_Recent] = deque()
        self._most_with_ended = _MOST_WITH_ENDED
        """Entries, those of ended jobs included, at which the latter are removed."""

    def accepted(
        self, submission: Submission, answer: Submitted, feed_of: Callable[[str], Feed] | None = None
    ) -> Submitted:
        """Keep a submission, and return its answer. `feed_of`: what a reader of this process gets of a job."""
        now_s = asyncio.get_running_loop().time()
        if answer.job_id != submission.job.id:
            submission = replace(submission, job=submission.job.model_copy(update={"id": answer.job_id}))
        end = None if feed_of is None else feed_of(answer.job_id).end
        one = _Recent(now_s, num_bytes_of(submission), submission, end)
        self._recent.append(one)
        self._num_bytes += one.num_bytes
        self._drop_old(now_s)
        return answer

    def open(self) -> list[Submission]:
        """Return those whose end no reader of this process has."""
        self._drop_old(asyncio.get_running_loop().time())
        return [one.submission for one in self._recent if not one.has_ended]

    def _drop_old(self, now_s: float) -> None:
        while self._recent and (
            self._recent[0].has_ended
            or self._num_bytes > self._max_bytes
            or now_s - self._recent[0].at_s > self._keep_s
        ):
            self._num_bytes -= self._recent.popleft().num_bytes
        if len(self._recent) >= self._most_with_ended:
            self._recent = deque(one for one in self._recent if not one.has_ended)
            self._num_bytes = sum(one.num_bytes for one in self._recent)
            self._most_with_ended = max(_MOST_WITH_ENDED, 2 * len(self._recent))
