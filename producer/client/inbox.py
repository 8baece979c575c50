"""The one subscription of a client: chunks of all its jobs arrive here and go to their readers' mailboxes.

Periodic messages to itself (echoes) prove that the subscription is alive. If an echo is missing, the inbox subscribes
again, and every reader compares its state with the broker's, because messages may be lost. A reader that has waited for
long does the same. Pools with open streams get heartbeats. A job without a reader in this process is detached.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from weakref import WeakValueDictionary

from redis.asyncio import Redis

from penstock.contract.errors import UnavailableError
from penstock.contract.job import pool_of
from penstock.producer.client.mailbox import Feed, HeldMailbox, Mailbox, MessageOrigin, QueuedBytes
from penstock.producer.client.settings import ClientSettings, ClientStats
from penstock.queue import keys
from penstock.queue.broker.connection import Patience, ignoring_retried_errors, pauses, retried, translated
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.broker.shared_connection import SharedConnection, run_id_of
from penstock.queue.wire import WireError, decode_message
from penstock.runtime import crash_points
from penstock.runtime.event_loop import in_rounds

# Echoes: messages that a process publishes to its own inbox. No I/O here; `ClientInbox` sends and receives them.

_MARK = b"\xc0"
"""msgpack's nil, with which no chunk begins. The echo's number follows it."""
_INTERVALS_MISSED = 1.5


class Echoes:
    """Tracks which echoes were sent and which returned.

    A missing echo means that the subscription is dead. A returned echo proves that everything published before it has
    arrived.
    """

    def __init__(self, interval_s: float) -> None:
        self._overdue_after_s = _INTERVALS_MISSED * interval_s
        self._num_sent = self._last_heard = 0
        self._unheard_since_s: float | None = None
        self._bell = asyncio.Event()

    def next(self, now_s: float) -> bytes:
        """Return the echo to publish now."""
        self._num_sent += 1
        if self._unheard_since_s is None:
            self._unheard_since_s = now_s
        return _MARK + str(self._num_sent).encode()

    def note_returned(self, message: bytes) -> None:
        """Record an echo that returned. Raises ValueError for a number that was never sent."""
        number = int(message[len(_MARK) :])
        if not 0 < number <= self._num_sent:
            raise ValueError(f"echo {number} was never sent: the last one is {self._num_sent}")
        self._last_heard = max(self._last_heard, number)
        self._unheard_since_s = None
        self._bell.set()

    def restart(self) -> None:
        """Forget the echoes of the old subscription: they will not return to the new one."""
        self._unheard_since_s = None

    def is_overdue(self, now_s: float) -> bool:
        """Whether an echo has been missing for 1.5 intervals."""
        return self._unheard_since_s is not None and now_s - self._unheard_since_s > self._overdue_after_s

    async def until_all_returned(self) -> None:
        """Wait until every echo sent before the call has returned."""
        last_sent = self._num_sent
        while self._last_heard < last_sent:
            self._bell.clear()
            await self._bell.wait()


_LOG = logging.getLogger(__package__)
_RECEIVE_PUBLISHED_S = 1.0
_LAST_LOOK_S = 0.1
_SUBSCRIBE_TIMEOUT_S = 5.0
_DETACH_AT_CLOSE_S = 2.0
_WATCHES_PER_SILENCE = 5


class ClientInbox:
    """A client's subscription, open as long as the client."""

    def __init__(
        self, redis: Redis, broker: ProducerBroker, patience: Patience, settings: ClientSettings, stats: ClientStats
    ) -> None:
        self.patience = patience
        self._redis = redis
        self._broker = broker
        self._settings = settings
        self.stats = stats
        self.name = f"{settings.name}-{secrets.token_hex(8)}"
        self._channel = keys.echo_channel(self.name)
        # Keyed by id: pool.
        self._pools: dict[bytes, str] = {}
        """Inbox channels, each with its pool, from the moment at which this process asks for their messages."""
        self._heard = set[bytes]()
        """Inbox channels for which Redis has confirmed the subscription."""
        # Keyed by id: job id.
        self._feeds: WeakValueDictionary[str, Feed] = WeakValueDictionary()
        self._queued = QueuedBytes()
        self._unread: set[str] = set()
        self._unread_bell = asyncio.Event()
        # Keyed by id: job id.
        self._detaching: dict[str, asyncio.Event] = {}
        # Keyed by id: job id.
        self._last_heartbeat_s: dict[str, float] = {}
        self._echoes = Echoes(settings.echo_interval_s)
        self._tasks: asyncio.Task[None] | None = None
        self._sender = ("", 0)
        """Of the newest message: the server's run id, and the number of the subscription."""
        self._num_subscriptions = self._num_histories = 0
        self.is_stopping = False
        """Whether the process stops, so that its callers go on at another one."""

    @property
    def is_running(self) -> bool:
        """Whether the subscription is maintained. It is not once its tasks have ended, by `close` or by a bug."""
        return self._tasks is not None

    @property
    def is_connected(self) -> bool:
        """Whether the connection of the subscription is open. A killed Redis closes it at once."""
        return self._tasks is not None and not self._connection.lost.done()

    @property
    def mark(self) -> MessageOrigin:
        """What the newest message came from, or if none has come, the subscription."""
        return MessageOrigin(*self._sender, self._num_histories)

    def note_history(self) -> None:
        """Note that the server has a new history. It may lack what arrived here before."""
        self._num_histories += 1

    # For readers ------------------------------------------------------------------------------------

    def feed(self, job_id: str) -> Feed:
        """Return the feed of a job. The inbox holds it weakly, so the caller must keep a reference."""
        feed = self._feeds.get(job_id)
        if feed is None:
            feed = self._feeds[job_id] = Feed(job_id)
        return feed

    def known(self, job_id: str) -> Feed | None:
        """Return the feed of a job if anything here holds it."""
        return self._feeds.get(job_id)

    def open_box(self, feed: Feed, max_chunks: int | None = None, *, is_held: bool = False) -> Mailbox:
        """Open a mailbox for one reader of the job. Raises UnavailableError if the inbox is closed.

        `is_held`: the reader waits until chunks are confirmed, so it must know what they came from.
        """
        self._require_open()
        most = max_chunks or self._settings.max_queued_chunks
        box = HeldMailbox(most, self._queued, lambda: self.mark) if is_held else Mailbox(most, self._queued)
        feed.boxes += (box,)
        return box

    def close_box(self, feed: Feed, box: Mailbox) -> None:
        """Close a reader's mailbox. With the last mailbox of a job, the job is detached from this process."""
        feed.boxes = tuple(one for one in feed.boxes if one is not box)
        if not feed.boxes and not feed.ended and self._tasks is not None:
            self._detach_soon(feed.job_id)

    async def wait_for_detach(self, job_id: str) -> None:
        """Wait until no detach of the job is running, because it must not overtake an attach.

        Raises UnavailableError if the inbox is closed.
        """
        self._require_open()
        while (under_way := self._detaching.get(job_id)) is not None:
            await under_way.wait()

    async def detach(self, job_id: str) -> None:
        """Record in Redis that this process does not read the job any more."""
        await self.wait_for_detach(job_id)
        done = self._detaching[job_id] = asyncio.Event()
        try:
            await self._broker.detach(job_id, self.name, stops=self.is_stopping)
        finally:
            del self._detaching[job_id]
            done.set()

    def listens_to(self, pool: str) -> bool:
        """Return whether chunks of this pool's jobs arrive here."""
        return keys.inbox_channel(pool, self.name).encode() in self._heard

    @retried
    async def listen_to(self, pool: str) -> None:
        """Subscribe to this process's channel of a pool. Raises UnavailableError without a connection."""
        await self._listen_to(pool)

    async def _listen_to(self, pool: str) -> None:
        channel = keys.inbox_channel(pool, self.name).encode()
        if channel in self._heard:
            return
        self._require_open()
        # Noted first: messages may follow the confirmation at once, and a new connection subscribes to all of them.
        self._pools[channel] = pool
        with translated():
            await self._connection.call("SUBSCRIBE", channel)
        self._heard.add(channel)

    async def ensure_heartbeat(self, pool: str) -> None:
        """Listen to a pool, and send it a heartbeat, unless one was sent within the interval."""
        if not self.listens_to(pool) or self._is_heartbeat_due(pool):
            await self._ensure_heartbeat(pool)
        else:
            self._require_open()

    def _is_heartbeat_due(self, pool: str) -> bool:
        last_s = self._last_heartbeat_s.get(pool, -math.inf)
        return asyncio.get_running_loop().time() - last_s >= self._settings.reader_heartbeat_interval_s

    @retried
    async def _ensure_heartbeat(self, pool: str) -> None:
        await self._listen_to(pool)
        if self._is_heartbeat_due(pool):
            self._last_heartbeat_s[pool] = asyncio.get_running_loop().time()
            try:
                await self._broker.reader_heartbeat(pool, self.name)
            except BaseException:
                self._last_heartbeat_s.pop(pool, None)
                raise

    async def receive_published(self) -> None:
        """Wait up to _RECEIVE_PUBLISHED_S until everything published to this inbox before the call is dispatched."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_RECEIVE_PUBLISHED_S):
                await self._echo()
                await self._echoes.until_all_returned()

    # Life -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Subscribe, and start the tasks of the inbox. Raises UnavailableError if Redis is unreachable."""
        self._connection = await self._subscribe()
        self._tasks = asyncio.create_task(self._run(), name=f"penstock inbox {self.name}")

    async def close(self) -> None:
        """Detach all jobs that are still read, unsubscribe, and end every task. Readers get UnavailableError."""
        tasks = self._tasks
        if tasks is None:
            return
        self._unread.update(feed.job_id for feed in self._feeds.values() if feed.boxes and not feed.ended)
        with suppress(TimeoutError):
            async with asyncio.timeout(_DETACH_AT_CLOSE_S):
                await self._detach_unread(closing=True)
        tasks.cancel()
        await asyncio.wait([tasks])
        # The tasks close it too, if they had started.
        self._connection.close()

    async def _run(self) -> None:
        settings = self._settings
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen())
                group.create_task(self._detach_forever())
                group.create_task(self._every(settings.echo_interval_s, self._echo))
                group.create_task(self._every(settings.reader_heartbeat_interval_s, self._send_heartbeats))
                group.create_task(self._every(settings.silent_after_s / _WATCHES_PER_SILENCE, self._watch))
        except Exception:
            _LOG.exception("inbox ended", extra={"inbox": self.name})
        finally:
            self._tasks = None
            self.nudge_all()

    def _require_open(self) -> None:
        if self._tasks is None:
            # With the event loop of the client its tasks have ended, which has another remedy.
            self.patience.require_open()
            raise UnavailableError("the client's inbox is closed", code="client_closed")

    async def _every(self, interval_s: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            with ignoring_retried_errors(_LOG):
                await action()

    # Listening --------------------------------------------------------------------------------------

    async def _subscribe(self) -> SharedConnection:
        connection, sender = None, ("", self._num_subscriptions)
        self._num_subscriptions += 1

        def dispatch(channel: bytes, message: bytes) -> None:
            self._sender = sender
            self.dispatch(channel, message)

        try:
            with translated():
                connection = await SharedConnection.open(self._redis, dispatch)
                async with asyncio.timeout(_SUBSCRIBE_TIMEOUT_S):
                    self._sender = sender = (await run_id_of(connection), sender[1])
                    # Redis sends one answer for each channel.
                    await asyncio.gather(*(connection.call("SUBSCRIBE", c) for c in (self._channel, *self._pools)))
        except BaseException:
            # This includes a cancellation that redis-py swallowed while it connected, and that appears only now.
            if connection is not None:
                connection.close()
            raise
        return connection

    async def _listen(self) -> None:
        while True:
            try:
                await self._until_lost(self._connection)
            finally:
                self._connection.close()
            _LOG.warning("redis is unreachable", extra={"inbox": self.name, "reason": "the subscription is lost"})
            self._connection = await self._subscribe_again()
            _LOG.info("subscribed again", extra={"inbox": self.name})
            self.stats.resubscribes += 1
            self.nudge_all()

    async def _until_lost(self, connection: SharedConnection) -> None:
        """Wait until the connection is lost, or an echo is overdue."""
        interval_s = self._settings.echo_interval_s
        clock = asyncio.get_running_loop().time
        self._echoes.restart()
        while not connection.lost.done():
            await asyncio.wait((connection.lost,), timeout=interval_s)
            if self._echoes.is_overdue(clock()):
                # If this process was held up, the echo may already be in the buffer.
                await asyncio.sleep(_LAST_LOOK_S)
                if self._echoes.is_overdue(clock()):
                    return

    async def _subscribe_again(self) -> SharedConnection:
        patience = pauses()
        while True:
            await asyncio.sleep(next(patience))
            with ignoring_retried_errors(_LOG):
                return await self._subscribe()

    def dispatch(self, channel: bytes, message: bytes) -> None:
        """Put one message's chunks into their readers' mailboxes. A pool's channel brings chunks of its jobs only."""
        pool = self._pools.get(channel)
        try:
            if pool is None:
                self._echoes.note_returned(message)
                return
            chunks, progress = decode_message(message)
            prefix = f"{pool}."
            for job_id in [chunk.job_id for chunk in chunks] + [report.job_id for report in progress]:
                if not job_id.startswith(prefix):
                    raise WireError(f"pool {pool} sent a message for job {job_id[:100]!r}")
        except (WireError, ValueError) as error:
            # Any process with access to Redis can publish here.
            self.stats.bad_messages += 1
            _LOG.warning("bad inbox message", extra={"inbox": self.name, "error": str(error)})
            return
        self.stats.messages += 1
        self.stats.chunks += len(chunks)
        crash_points.point("before", "dispatch")
        feeds = self._feeds
        for report in progress:
            if (feed := feeds.get(report.job_id)) is not None:
                feed.note_prefill(report.progress)
        for chunk in chunks:
            feed = feeds.get(chunk.job_id)
            if feed is not None and feed.boxes:
                feed.put(chunk)
            elif chunk.outcome is None:
                self._detach_soon(chunk.job_id)

    # Clocks -----------------------------------------------------------------------------------------

    async def _echo(self) -> None:
        echo = self._echoes.next(asyncio.get_running_loop().time())
        with translated():
            await self._redis.publish(self._channel, echo)

    async def _send_heartbeats(self) -> None:
        now_s = asyncio.get_running_loop().time()
        feeds = in_rounds(self._feeds.values())
        open_pools = {pool_of(feed.job_id) async for feed in feeds if feed.boxes and not feed.ended}
        for pool in open_pools:
            await self._broker.reader_heartbeat(pool, self.name)
            self._last_heartbeat_s[pool] = now_s

    async def _watch(self) -> None:
        """Nudge readers that have waited for `silent_after_s`.

        Mailboxes keep no time themselves, because a reader waits at every token.
        """
        now_s = asyncio.get_running_loop().time()
        async for feed in in_rounds(self._feeds.values()):
            for box in (one for one in feed.boxes if one.is_waited_for):
                if box.seen_waiting_s is None:
                    box.seen_waiting_s = now_s
                elif now_s - box.seen_waiting_s >= self._settings.silent_after_s:
                    box.nudge()

    def nudge_all(self) -> None:
        """Let every reader compare its state with Redis."""
        for feed in list(self._feeds.values()):
            for box in feed.boxes:
                box.nudge()

    # Detaching --------------------------------------------------------------------------------------

    def _detach_soon(self, job_id: str) -> None:
        self._unread.add(job_id)
        self._unread_bell.set()

    async def _detach_forever(self) -> None:
        while True:
            await self._unread_bell.wait()
            self._unread_bell.clear()
            await self._detach_unread()

    async def _detach_unread(self, *, closing: bool = False) -> None:
        while self._unread:
            job_id = self._unread.pop()
            feed = self._feeds.get(job_id)
            if feed is not None and feed.boxes and not closing:
                continue
            # A failed detach is repeated: the next chunk without a reader queues the job here again.
            with ignoring_retried_errors(_LOG):
                await self.detach(job_id)
