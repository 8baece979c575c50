"""Jobs whose ends are told to receivers that fail, hang, redirect and die, while gateways are killed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from fakes.fake_node import MODEL, FakeNode
from fakes.waiting import Deadline
from fakes.webhook_receiver import Received, Reply, WebhookReceiver
from faults.tools.processes import GatewayProcess
from faults.tools.rebinding import INSIDE, NAME, OUTSIDE
from standardwebhooks import Webhook, WebhookVerificationError

from penstock.contract.errors import NotFoundError
from penstock.contract.webhook import event_id_of
from penstock.producer.client import AsyncClient

SETTINGS: dict[str, Any] = {
    "webhook_allow_http": True,
    "webhook_allowed_networks": f'["{OUTSIDE}/32"]',
    "webhook_timeout_s": 1.0,
    "webhook_retry_s": 0.2,
}
NUM_ENDPOINTS = 4
REBOUND_SHARE = 20
"""Of so many jobs, one names the endpoint whose name resolves by turns to an address inside."""
SUBMITTED_AT_ONCE = 64
MOST_QUIET_S = 60.0
"""Seconds within which deliveries that were accepted must be known as delivered."""


class RebindingGateway(GatewayProcess):
    """A gateway whose name server changes its mind."""

    wrapper = (str(Path(__file__).parent / "rebinding.py"),)


@dataclass
class Behavior:
    """Answers of a receiver: each event may fail a few times, at random."""

    seed: int
    redirect: str
    most_failures: int = 3
    failures: Counter[str] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def __call__(self, received: Received) -> Reply:
        """Choose the answer to a request."""
        name = received.path + received.headers["webhook-id"]
        with self._lock:
            may_fail = self.failures[name] < self.most_failures
            kind = self._random.choices(
                ("works", "fails", "waits", "hangs", "redirects", "dies"), (60, 14, 4, 2, 10, 10)
            )[0]
            if kind == "works" or not may_fail:
                return Reply(204)
            self.failures[name] += 1
        return {
            "fails": Reply(500),
            "waits": Reply(503, {"retry-after": "1"}),
            "hangs": Reply(hang_s=2.0, dies=True),
            "redirects": Reply(307, {"location": self.redirect}),
            "dies": Reply(dies=True),
        }[kind]


@dataclass
class WebhookReport:
    """What arrived, and what was violated."""

    num_events: int
    num_requests: int
    num_repeated: int
    """Events that a receiver accepted more than once."""
    num_kills: int
    violations: list[str]


async def run_with_kills(redis_url: str, *, num_jobs: int, num_kills: int, seed: int = 0) -> WebhookReport:
    """Run jobs that name endpoints, kill gateways meanwhile, and return what the receivers saw."""
    chosen = random.Random(seed)
    with ExitStack() as stack:
        receiver = stack.enter_context(WebhookReceiver(host=OUTSIDE))
        inside = stack.enter_context(WebhookReceiver(host=INSIDE, port=receiver.port))
        receiver.reply = Behavior(seed, f"http://{INSIDE}:{receiver.port}/redirected")
        gateways = [stack.enter_context(RebindingGateway(redis_url, **SETTINGS)) for _ in range(2)]
        async with AsyncClient(redis_url) as client, FakeNode(redis_url, max_open_jobs=10**6):
            secrets = await _endpoints(client, receiver.port)
            ids = list(secrets)
            paths = {path: endpoint_id for endpoint_id, (path, _) in secrets.items()}
            kills = asyncio.create_task(_kill(gateways, stack, redis_url, receiver, num_jobs, num_kills, chosen))
            wanted = await _submit(client, num_jobs, ids)
            num_killed = await kills
            untold = await _until_told(receiver, wanted, num_jobs)
            violations = [await _fate(client, paths, *one) for one in untold]
            num_left = await _until_quiet(client)
            forbidden = (await client.webhooks.deliveries(ids[-1], "dead", limit=100)).deliveries
    violations += _violations(receiver, inside, dict(secrets.values()))
    # Those that wait when the endpoint has failed too often end because it is disabled.
    reasons = {"is not public" in one.answer or one.answer == "the endpoint is disabled" for one in forbidden}
    if reasons != {True} or not any("is not public" in one.answer for one in forbidden):
        violations.append(f"a delivery to a forbidden address is not refused: {forbidden}")
    if num_left:
        violations.append(f"{num_left} deliveries are pending at the end")
    accepted = Counter(_key_of(one) for one in receiver.accepted)
    repeated = sum(count > 1 for count in accepted.values())
    return WebhookReport(len(wanted), len(receiver.received), repeated, num_killed, violations)


async def _endpoints(client: AsyncClient, port: int) -> dict[str, tuple[str, str]]:
    """Return path and secret of each endpoint by id: reachable ones, one whose name is rebound, one inside."""
    hosts = [*[OUTSIDE] * NUM_ENDPOINTS, NAME, INSIDE]
    found = {}
    for number, host in enumerate(hosts):
        url = f"http://{host}:{port}/{number}"
        endpoint, secret = await client.webhooks.create(
            url, name="a test", event_types=["job.succeeded"], allow_private=True
        )
        found[endpoint.id] = (f"/{number}", secret)
    return found


async def _submit(client: AsyncClient, num_jobs: int, ids: Sequence[str]) -> set[tuple[str, str]]:
    """Submit jobs. Return path and id of what is to be told; the end of one more is told inside, and never arrives."""
    numbers, wanted = iter(range(num_jobs)), set[tuple[str, str]]()
    *reachable, rebound, forbidden = range(len(ids))

    async def some() -> None:
        for number in numbers:
            at = rebound if number % REBOUND_SHARE == 0 else reachable[number % len(reachable)]
            job = await client.submit_unread(f"job {number}", model=MODEL, max_tokens=1, webhooks=[ids[at]])
            wanted.add((f"/{at}", job.job_id))

    await client.submit_unread("inside", model=MODEL, max_tokens=1, webhooks=[ids[forbidden]])
    await asyncio.gather(*(some() for _ in range(SUBMITTED_AT_ONCE)))
    return wanted


async def _kill(
    gateways: list[RebindingGateway],
    stack: ExitStack,
    redis_url: str,
    receiver: WebhookReceiver,
    num_jobs: int,
    num_kills: int,
    chosen: random.Random,
) -> int:
    """Kill gateways over the whole of the deliveries, and let the receiver die now and then."""
    for number in range(num_kills):
        while len(receiver.accepted) < num_jobs * (number + 1) // (num_kills + 2):
            await asyncio.sleep(0.01)
        at = chosen.randrange(len(gateways))
        gateways[at].kill()
        gateways[at] = await asyncio.to_thread(stack.enter_context, RebindingGateway(redis_url, **SETTINGS))
        if number % 2:
            await asyncio.to_thread(receiver.die_for, 0.5)
    return num_kills


async def _until_told(receiver: WebhookReceiver, wanted: set[tuple[str, str]], num_jobs: int) -> list[tuple[str, str]]:
    """Wait until each event was accepted once, or long enough. Return those that were not."""
    deadline = Deadline(60 + num_jobs / 10)
    while (untold := wanted - {_key_of(one) for one in list(receiver.accepted)}) and deadline.left_s():
        await asyncio.sleep(0.1 + num_jobs / 50_000)
    return sorted(untold)


async def _fate(client: AsyncClient, endpoints: dict[str, str], path: str, job_id: str) -> str:
    """Say what is known of a job whose end was not told in time, and of its delivery."""
    job = await client.status(job_id)
    event_id = event_id_of("job.succeeded", job_id)
    try:
        delivery: Any = await client.webhooks.queue.get(endpoints[path], event_id)
    except NotFoundError as error:
        delivery = error
    return f"the end of {job_id} was not told at {path}: {job}; {delivery}"


async def _until_quiet(client: AsyncClient) -> int:
    """Wait until no delivery is pending, or long enough. Return how many are.

    One that was accepted is pending as long as its gateway was killed before it could say so: until its lease ends,
    and until a further attempt is accepted. The pauses between attempts double, up to about 10 s here.
    """
    deadline = Deadline(MOST_QUIET_S)
    while (left := sum((await client.webhooks.queue.stats()).pending.values())) and deadline.left_s():
        await asyncio.sleep(0.1)
    return left


def _key_of(received: Received) -> tuple[str, str]:
    return received.path, received.event["data"]["id"]


def _violations(receiver: WebhookReceiver, inside: WebhookReceiver, secrets: dict[str, str]) -> list[str]:
    found = list[str]()
    if inside.num_connections:
        found.append(f"{inside.num_connections} connections to a forbidden address")
    for received in receiver.received:
        try:
            Webhook(secrets[received.path]).verify(received.body, dict(received.headers))
        except (WebhookVerificationError, KeyError) as error:
            found.append(f"{received.path}: a wrong signature or path: {error}")
    names = defaultdict[tuple[str, str], set[str]](set)
    for one in receiver.received:
        names[_key_of(one)].add(one.headers["webhook-id"])
    return found + [f"{key} was told with {len(ids)} ids" for key, ids in names.items() if len(ids) > 1]
