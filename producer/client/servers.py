"""The Redis servers of a client: the directory, and the servers that pools have of their own (PENSTOCK_POOLS).

The directory has what belongs to no pool: API keys, stored files, batches and webhooks. It also has the pools that no
setting names. Each other server has its pools with all that belongs to them: jobs, results, limits, usage and
completions. No call writes to two servers. A job's id begins with its pool, so it tells its server.

While a server is away, calls of its pools wait as they do without other servers, and calls of other pools go on.

A fail-over, a restart or a restore may lose what a server had acknowledged. `Renewal` gives it that again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from redis.asyncio import Redis

from penstock.contract.durability import Durability
from penstock.contract.errors import ConfigError, PenstockError, UnavailableError
from penstock.contract.job import MEMORY, JobKey, pool_of
from penstock.contract.job_actions import JobFilter
from penstock.contract.pool import PoolActivity, PoolStats
from penstock.contract.tenant import ApiKey
from penstock.contract.usage import UsagePage, UsageQuery
from penstock.producer.client.confirmed_reads import ConfirmedReads, ReadDurabilities
from penstock.producer.client.inbox import ClientInbox
from penstock.producer.client.kept import KeptSubmissions, RecentSubmissions
from penstock.producer.client.mailbox import QueueWatch
from penstock.producer.client.pools import KEYS_TTL_S, POOLS_TTL_S, Admissions, CachedState
from penstock.producer.client.settings import ClientSettings, ClientStats
from penstock.queue.broker.completions import CompletionBroker
from penstock.queue.broker.connection import Patience, connect, not_reached, refused_at, translated
from penstock.queue.broker.history import HistoryWatch, RecentCalls
from penstock.queue.broker.job_lists import DeadLetters, JobLists, JobPage
from penstock.queue.broker.job_lists import merged as merged_jobs
from penstock.queue.broker.jobs import KnownJobs, QueuePositions, ResponseBroker
from penstock.queue.broker.pools import ActivityBroker, StatsBroker
from penstock.queue.broker.producer import ProducerBroker, ServedPool, Submission
from penstock.queue.broker.redis_clock import RedisClock
from penstock.queue.broker.shared_connection import SharedRedis, clock_of
from penstock.queue.broker.steering import Steering
from penstock.queue.broker.usage import UsageBroker
from penstock.queue.broker.usage import merged as merged_usage
from penstock.queue.tenants.key_store import SeenKeys
from penstock.runtime.event_loop import cancel_until_done
from penstock.runtime.settings import without_password

_LOG = logging.getLogger(__package__)

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 2.0
"""A server that has not answered within this time is away. One whose connection closes is away at once."""
KEYS_PATIENCE_S = 0.25
"""How long a client of several servers waits for the API keys before it uses those that it knows."""
KEYS_OUTAGE_S = 600.0
"""How old they may be while the directory is away. No key can be revoked there meanwhile."""
POOLS_PATIENCE_S = 0.25
"""How long a list of all pools waits for one of several servers; after that it has the pools that are known of it."""
_JOBS_AT_ONCE = 64
"""Lost jobs that are submitted together."""

Served = dict[str, ServedPool]
Fetch = Callable[[CachedState[Served]], Awaitable[Served]]


class Renewal:
    """Notices that Redis has a new history, and gives it what it lacks and this client still has."""

    def __init__(
        self,
        redis: Redis,
        broker: ProducerBroker,
        known_jobs: KnownJobs,
        inbox: ClientInbox,
        kept: Callable[[], list[Submission]],
        calls: RecentCalls,
        settings: ClientSettings,
    ) -> None:
        """`kept` returns the requests of handles on open jobs. `calls`: what is repeated after the jobs."""
        self._broker = broker
        self._known_jobs = known_jobs
        self._inbox = inbox
        self._kept = kept
        self._calls = calls
        self.recent = RecentSubmissions(keep_s=settings.failover_keep_s, max_bytes=settings.failover_keep_mib << 20)
        self._watch = HistoryWatch(redis, self._compare, name=inbox.name)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look at the history of Redis."""
        self._task = asyncio.create_task(self._watch.run(), name=f"penstock history {self._inbox.name}")

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            await cancel_until_done((self._task,))

    async def _compare(self) -> None:
        """Submit lost jobs again, repeat what else is recent, and let all readers compare. Raises UnavailableError."""
        self._inbox.stats.histories += 1
        self._inbox.note_history()
        feeds = self._inbox
        kept = [one for one in self._kept() if not ((feed := feeds.known(one.job.id)) and feed.ended)]
        submissions = {one.job.id: one for one in (*kept, *self.recent.open())}
        unknown = await self._known_jobs.unknown(list(submissions))
        for start in range(0, len(unknown), _JOBS_AT_ONCE):
            await self._submit_again([submissions[job_id] for job_id in unknown[start : start + _JOBS_AT_ONCE]])
        num_repeated = await self._calls.repeat()
        self._inbox.nudge_all()
        if unknown or num_repeated:
            facts = {"num_jobs": len(unknown), "num_calls": num_repeated}
            _LOG.warning("redis had lost jobs or calls of this process; they are repeated", extra=facts)

    async def _submit_again(self, submissions: Sequence[Submission]) -> None:
        answers = await asyncio.gather(*map(self._submit, submissions), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, UnavailableError) or not isinstance(answer, (PenstockError, type(None))):
                raise answer

    async def _submit(self, submission: Submission) -> None:
        """Submit one job under its old id. If its idempotency key names another job by now, that one stands."""
        feed = self._inbox.known(submission.job.id)
        inbox = self._inbox.name if feed is not None and feed.boxes else ""
        self._inbox.stats.resubmits += 1
        try:
            await self._broker.submit(submission.repeated(), inbox)
        except UnavailableError:
            raise
        except PenstockError as error:
            facts = {"job_id": submission.job.id, "reason": error.reason}
            _LOG.warning("a lost job cannot be submitted again", extra=facts)
            raise


class QueueServer:
    """One Redis as a client uses it: the connections, and what reads and writes the pools there."""

    def __init__(
        self,
        url: str,
        settings: ClientSettings,
        stats: ClientStats,
        kept: KeptSubmissions,
        *,
        has_pool: Callable[[str], bool] | None = None,
    ) -> None:
        """`kept`: the requests of open jobs. `has_pool`: which of the pools listed there are used; None: all."""
        self.shown_url = without_password(url)
        self.redis = redis = connect(url)
        if isinstance(redis, SharedRedis):
            redis.has_pool = has_pool
        self.patience = patience = Patience(settings.outage_s)
        calls = RecentCalls(settings.failover_keep_s)
        self.broker = ProducerBroker(redis, patience, recent=calls)
        self.known_jobs = KnownJobs(redis, patience)
        self.lists = JobLists(redis, patience)
        self.usage = UsageBroker(redis, patience)
        self.stats = StatsBroker(redis, patience)
        self.looks = StatsBroker(redis)
        """The same without patience, for a process that looks again by itself."""
        self.activity = ActivityBroker(redis, patience)
        self.steering = Steering(redis, patience)
        self.dead_letters = DeadLetters(redis, patience)
        self.completions = CompletionBroker(redis, patience)
        self.responses = ResponseBroker(redis, patience, settings.durability, recent=calls)
        self.pools = CachedState(self.broker.pools, POOLS_TTL_S)
        self.admissions = Admissions(self.broker.pressure)
        self.inbox = ClientInbox(redis, self.broker, patience, settings, stats)
        self._token_durability = settings.token_durability
        self._token_durabilities = ReadDurabilities(redis, patience, self.inbox, settings.outage_s)
        mine = partial(kept.open, has_pool)
        self.renewal = Renewal(redis, self.broker, self.known_jobs, self.inbox, mine, calls, settings)
        self.queue_watch = QueueWatch(patience, QueuePositions(redis, patience), self.admissions)
        self._answers = True
        self._probes: asyncio.Task[None] | None = None
        self.first_probe = asyncio.Event()
        """Set once the first probe has ended."""
        self.refusal: ConfigError | None = None
        """Why the server refused the last probe."""

    def reads(self, durability: Durability | None) -> ConfirmedReads | None:
        """Return what readers wait for; None for `memory`, which waits for nothing. `durability`: None for the setting.

        Raises RequestError for an unknown one.
        """
        level = durability or self._token_durability
        return None if level == MEMORY else self._token_durabilities.of(level)

    @property
    def is_away(self) -> bool:
        """Whether the connection is lost, or the last probe was not answered in time."""
        return not (self._answers and self.inbox.is_connected)

    async def open(self) -> None:
        """Subscribe. Raises UnavailableError and ConfigError, which name the URL."""
        try:
            await self.inbox.open()
        except UnavailableError as error:
            raise not_reached(error, self.shown_url) from None
        except ConfigError as error:
            raise refused_at(error, self.shown_url) from None
        self.patience.is_open = True
        self.renewal.start()

    def start_probes(self) -> None:
        """Begin to find out again and again whether the server answers, and open it once it does."""
        self._probes = asyncio.create_task(self._probe_forever(), name="penstock probes of a Redis")

    async def close(self) -> None:
        """End every stream, task and connection."""
        if self._probes is not None:
            await cancel_until_done((self._probes,))
        self.patience.is_open = False
        await self.renewal.close()
        await self.pools.close()
        await self.queue_watch.close()
        await self.admissions.close()
        await self.inbox.close()
        await self._token_durabilities.close()
        await self.broker.close()
        await self.redis.aclose()

    async def known_pools(self, fetch: Fetch) -> Served:
        """Return the pools, of a server that does not answer soon as they were before, without a live node."""
        if not self.is_away:
            try:
                async with asyncio.timeout(POOLS_PATIENCE_S):
                    return await fetch(self.pools)
            except (TimeoutError, UnavailableError):
                pass
        return {name: replace(pool, is_alive=False) for name, pool in (self.pools.last or {}).items()}

    async def _probe_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    if not self.patience.is_open:
                        await self.open()
                    with translated():
                        await self.redis.ping()
                self._answers, self.refusal = True, None
            except (TimeoutError, PenstockError) as error:
                self._answers, self.refusal = False, error if isinstance(error, ConfigError) else None
            self.first_probe.set()
            await asyncio.sleep(PROBE_INTERVAL_S)


class QueueServers:
    """All servers of a client. Most clients have one, the directory."""

    def __init__(
        self, url: str, urls: Mapping[str, str], settings: ClientSettings, stats: ClientStats, kept: KeptSubmissions
    ) -> None:
        """`urls`: the URL of each pool that is not in the directory at `url`. `kept`: the requests of open jobs.

        Raises ConfigError.
        """
        own = {pool: of_pool for pool, of_pool in urls.items() if of_pool != url}
        has_pool = (lambda pool: pool not in own) if own else None
        self.directory = QueueServer(url, settings, stats, kept, has_pool=has_pool)
        by_url: dict[str, QueueServer] = {}
        for pool, of_pool in own.items():
            if of_pool in by_url:
                continue
            names = frozenset(name for name, other in own.items() if other == of_pool)
            try:
                by_url[of_pool] = QueueServer(of_pool, settings, stats, kept, has_pool=names.__contains__)
            except ConfigError as error:
                message = f"pools: {pool}: {error.message.removeprefix('redis_url: ')}"
                raise ConfigError(message, param="pools") from None
        self._of = {pool: by_url[of_pool] for pool, of_pool in own.items()}
        self.all = (self.directory, *by_url.values())
        # Of several servers, keys are fetched before they are too old, so that no call waits for the directory.
        ttl_s = KEYS_TTL_S / len(self.all[:2])
        seen = SeenKeys(self.directory.redis, self.directory.patience)
        self._keys = CachedState(seen.all, ttl_s, KEYS_TTL_S - ttl_s)

    @property
    def clock(self) -> RedisClock:
        """The directory's clock, as this process knows it."""
        return clock_of(self.directory.redis)

    @property
    def is_split(self) -> bool:
        """Whether there is more than one server."""
        return len(self.all) > 1

    @property
    def has_no_directory(self) -> bool:
        """Whether the directory is away, and the pools of other servers may be served all the same."""
        return self.is_split and self.directory.is_away

    @property
    def reachable(self) -> list[QueueServer]:
        """The servers that are not away; the only one of a client, in any case."""
        return [one for one in self.all if not one.is_away] if self.is_split else [self.directory]

    @property
    def named(self) -> Mapping[str, QueueServer]:
        """The pools that the setting names, each with its server."""
        return self._of

    def note_stop(self) -> None:
        """Note that this process stops, and that its callers have not left: their jobs wait for them at another one."""
        for server in self.all:
            server.inbox.is_stopping = True

    async def open(self) -> None:
        """Connect to the directory, and to the other servers as soon as they answer.

        Raises UnavailableError if the directory is away, and ConfigError if a server refuses its URL.
        """
        await self.directory.open()
        if self.is_split:
            for one in self.all:
                one.start_probes()
            # A probe ends after its time-out at the latest, so a server that is away does not hold up the others.
            await asyncio.gather(*(one.first_probe.wait() for one in self.all))
            if refusals := [one.refusal for one in self.all if one.refusal is not None]:
                await self.close()
                raise refusals[0]

    async def api_keys(self, patience_s: float | None) -> dict[str, ApiKey]:
        """Return every API key by id, at most two seconds old.

        With `patience_s`, return the last known keys if the directory does not answer within that time. Of several
        servers, they are returned while the directory is away, for KEYS_OUTAGE_S: calls of other pools go on.
        """
        if self.is_split:
            wait_s = 0.0 if self.has_no_directory else KEYS_PATIENCE_S
            return await self._keys.recent_or_last(wait_s, KEYS_OUTAGE_S)
        return await (self._keys.get() if patience_s is None else self._keys.get_or_last(patience_s))

    async def close(self) -> None:
        """Close all of them."""
        await self._keys.close()
        for one in self.all:
            await one.close()

    def of(self, pool: str) -> QueueServer:
        """Return the server of a pool. Raises UnavailableError if it has been away since the client was opened."""
        server = self.of_named(pool)
        if not server.patience.is_open and self.directory.patience.is_open:
            raise UnavailableError(f"the Redis of pool {pool} is unreachable", code="redis_away")
        return server

    def of_named(self, pool: str) -> QueueServer:
        """Return the server of a pool, whether or not it was opened."""
        return self._of.get(pool, self.directory)

    def of_job(self, job_id: str) -> QueueServer:
        """Return the server of a job."""
        return self.of(pool_of(job_id))

    def grouped(self, pools: Iterable[str]) -> list[tuple[QueueServer, list[str]]]:
        """Return the servers of these pools, each with its pools, in the order of the first ones."""
        found: dict[QueueServer, list[str]] = {}
        for pool in pools:
            found.setdefault(self.of_named(pool), []).append(pool)
        return list(found.items())

    # Calls that may span several servers.

    async def pools(self, fetch: Fetch) -> Served:
        """Return all pools by name, those with a live node first. `fetch` reads them from a server's copy.

        Raises UnavailableError if no pool is known and a server is away.
        """
        if not self.is_split:
            return await fetch(self.directory.pools)
        found: Served = {}
        for one in self.all:
            found |= await one.known_pools(fetch)
        if not found and len(self.reachable) < len(self.all):
            raise UnavailableError("Redis is unreachable", code="redis_away")
        return dict(sorted(found.items(), key=lambda item: not item[1].is_alive))

    async def pool_of(self, key: JobKey, pools: Iterable[str]) -> str:
        """Return which of the pools has a job of this key, an empty text if none has one."""
        for server, some in self.grouped(pools):
            if found := await server.known_jobs.pool_of(key, some):
                return found
        return ""

    async def jobs(self, wanted: JobFilter, after: str | None, limit: int) -> JobPage:
        """Return a page of jobs, newest first. Raises UnavailableError if a server is away that may have some."""
        if wanted.pool is not None or not self.is_split:
            return await self.of(wanted.pool or "").lists.page(wanted, after=after, limit=limit)
        servers = self.require_all()
        pages = await asyncio.gather(*(one.lists.page(wanted, after=after, limit=limit) for one in servers))
        return merged_jobs(pages, wanted, limit)

    async def usage(self, query: UsageQuery, after: str | None, limit: int) -> UsagePage:
        """Return a page of a report. Raises UnavailableError if a server is away that may have a part of it."""
        if not self.is_split:
            return await self.directory.usage.page(query, after=after, limit=limit)
        if query.pools is None:
            asked = [(one, query) for one in self.require_all()]
        else:
            asked = [(one, replace(query, pools=frozenset(some))) for one, some in self.grouped(query.pools)]
        pages = await asyncio.gather(*(one.usage.page(part, after=after, limit=limit) for one, part in asked))
        return merged_usage(pages, limit)

    async def ack(self, job_ids: Iterable[str], tenant: str) -> int:
        """Free the results of ended jobs. Return how many this call has freed."""
        of_server: dict[QueueServer, list[str]] = {}
        for job_id in job_ids:
            of_server.setdefault(self.of_job(job_id), []).append(job_id)
        return sum(await asyncio.gather(*(one.broker.ack(some, tenant) for one, some in of_server.items())))

    async def stats(self, patience_s: float) -> list[PoolStats]:
        """Return the statistics of all pools in servers that answer in time. Raises UnavailableError if none does."""

        async def soon(server: QueueServer) -> list[PoolStats] | None:
            try:
                async with asyncio.timeout(patience_s):
                    return await server.stats.all()
            except (TimeoutError, UnavailableError):
                return None

        found = [some for some in await asyncio.gather(*map(soon, self.reachable)) if some is not None]
        if not found:
            raise UnavailableError("Redis is unreachable", code="redis_away")
        return [stats for some in found for stats in some]

    async def activity(self, pools: Iterable[str]) -> list[PoolActivity]:
        """Return what happens in pools, without those of servers that are away."""
        reachable = self.reachable
        asked = [(one, some) for one, some in self.grouped(pools) if one in reachable]
        return [found for one, some in asked for found in await one.activity.of(some)]

    def require_known_pools(self) -> None:
        """Raise UnavailableError if a server has been away all the time, so that nothing is known of its pools."""
        if unknown := [pool for pool, one in self._of.items() if one.is_away and one.pools.last is None]:
            raise UnavailableError(f"the Redis of pool {', '.join(unknown)} is unreachable", code="redis_away")

    def require_all(self) -> tuple[QueueServer, ...]:
        """Return all servers, for an answer that needs each. Raises UnavailableError that names the pools it lacks."""
        if away := [one for one in self.all if one.is_away]:
            lacking = sorted(pool for pool, one in self._of.items() if one in away)
            missing = f"that of {', '.join(lacking)}" if lacking else "the directory"
            message = f"a Redis is unreachable ({missing}); name a pool to ask the others"
            raise UnavailableError(message, code="redis_away")
        return self.all
