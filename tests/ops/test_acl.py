"""The users of ops/acl, loaded unchanged: what each role can do, cannot do, and what no rule prevents."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from runpy import run_path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis as sync_redis
from fakes import fake_node
from fakes.acl_users import ACL, ROLES, all_rules, confined, rules_of, serving, url_of
from fakes.queue.harness import CONFIG, POOL, FakeNode, P, Queue, new_job
from fakes.waiting import until
from redis.asyncio import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.retry import Retry

from penstock.contract.durability import FSYNC
from penstock.contract.errors import ConfigError, UnsupportedDurabilityError
from penstock.contract.job_actions import JobFilter
from penstock.contract.tenant import UNLIMITED
from penstock.contract.usage import UsageQuery
from penstock.producer.client import AsyncClient
from penstock.producer.client.webhooks import Webhooks
from penstock.producer.files.service import Files
from penstock.producer.files.storage import FilesSettings
from penstock.producer.stored_batches.holder import BatchHolder
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.connection import Patience, connect
from penstock.queue.broker.job_lists import JobLists
from penstock.queue.broker.pools import StatsBroker
from penstock.queue.broker.producer import ProducerBroker, Submission
from penstock.queue.broker.profiles import TRACE, ProfileBroker, ProfileSummary
from penstock.queue.broker.script_text import whole_source
from penstock.queue.broker.usage import UsageBroker
from penstock.queue.files.batch import BatchSpec, new_batch_id
from penstock.queue.tenants.key_store import KeyStore
from penstock.runtime.embedded_redis import find_redis_server
from penstock.runtime.event_loop import cancel_until_done
from tests.source_tree import ROOT

SCRIPTS = ROOT / "src/penstock/queue/scripts"
RUNS = {
    "gateway": (
        "submit",
        "attach",
        "detach",
        "cancel",
        "reader_heartbeat",
        "sweep",
        "shorten_result",
        "purge",
        "positions",
        "ack",
        "delete_response",
        "untold",
        "webhooks",
        "files",
    ),
    "node": ("join", "heartbeat", "take", "emit", "finish", "give_back", "leave", "sweep", "declare_dead"),
}
FOREIGN = "somebody:else"
EVAL = ("EVAL", "return redis.call(ARGV[1], unpack(ARGV, 2))", "0")


ALL_RULES = all_rules()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Redis with the unchanged users, and a node whose rules permit one pool."""
    narrow = confined("node", POOL, "narrow")
    with serving(tmp_path_factory.mktemp("acl", numbered=True), ALL_RULES + narrow) as socket:
        yield socket


@pytest.fixture
def server_with_read_only_keys(tmp_path: Path) -> Iterator[Path]:
    """A Redis with the users as README and compose make them for Redis 7."""
    said = subprocess.run([find_redis_server(), "--version"], capture_output=True, text=True, check=True).stdout
    if "v=6." in said:
        pytest.skip("this Redis knows no keys that may only be read")
    (edit,) = re.findall(r"sed -i '(.+)' \*\.acl", (ACL / "README.md").read_text())
    rules = subprocess.run(["sed", edit], input=ALL_RULES, capture_output=True, text=True, check=True).stdout
    made = run_path(str(ROOT / "ops/deploy/compose/make_secrets.py"))["users_of"](
        ACL, dict.fromkeys((*ROLES, "subscriber"), "x")
    )
    read_only = [re.findall(r"^user (\w+) |( %R~\S+)", text, re.MULTILINE) for text in (made, rules)]
    assert read_only[0] == read_only[1]
    with serving(tmp_path, rules) as socket:
        yield socket


def try_it(server: Path, role: str, *command: str | bytes | int) -> Any:
    with sync_redis.Redis.from_url(url_of(server, role), protocol=2) as client:
        return client.execute_command(*command)


REFUSALS = ("The user executing the script can't", "ACL failure in script", "DEBUG command not", "command `FUNCTION`")
"""Of what a script tried, which is an error of the script; of what Redis 7 refuses to all; of what it brought first."""


def may(server: Path, role: str, *command: str | bytes | int) -> bool:
    try:
        try_it(server, role, *command)
    except NoPermissionError:
        return False
    except sync_redis.ResponseError as error:
        return not any(said in str(error) for said in REFUSALS)
    return True


@asynccontextmanager
async def clients_of(server: Path) -> AsyncIterator[dict[str, Redis]]:
    """Return a connection for each role, with no keys in Redis, and one that reads their refusals."""
    made = {role: connect(url_of(server, role)) for role in (*ROLES, "watcher")}
    for key in [key async for key in made["admin"].scan_iter("penstock:*")]:
        await made["admin"].delete(key)
    await made["watcher"].acl_log_reset()
    yield made
    for client in made.values():
        await client.aclose()


@pytest.fixture
async def clients(server: Path) -> AsyncIterator[dict[str, Redis]]:
    async with clients_of(server) as made:
        yield made


async def test_a_job_runs_from_gateway_to_node_and_back(clients: dict[str, Redis]) -> None:
    await run_a_job(clients)


async def run_a_job(clients: dict[str, Redis]) -> None:
    producer, node = ProducerBroker(clients["gateway"]), FakeNode(clients["node"], "n1", "r1")
    await node.join()
    await node.heartbeat([])
    job_id = (await producer.submit(Submission(new_job(idempotency_key="k"), 10), inbox="me")).job_id
    returned = await producer.submit(Submission(new_job(prompt="other"), 10), inbox="me")
    first, second = (await node.take()).jobs
    assert await node.emit(first, 0, 2) == "OK"
    assert await node.give_back(second) == "OK"
    assert await node.finish(first, 2, 1) == "OK"
    await producer.attach(returned.job_id, "default", inbox="other")
    await producer.detach(returned.job_id, "me")
    assert (await producer.status(job_id, "default")).state == "succeeded"
    assert len(await producer.log(job_id, 0)) == 4
    assert await producer.cancel(returned.job_id, "default") == "cancelled"
    await producer.reader_heartbeat(POOL, "me")
    await producer.pressure(POOL)
    assert list(await producer.pools()) == [POOL]
    (stats,) = await StatsBroker(clients["gateway"]).all()
    assert stats.counts["ended_succeeded"] == 1
    assert (await StatsBroker(clients["gateway"]).redis_state()).used_bytes > 0
    assert len((await JobLists(clients["gateway"]).page(JobFilter("default"))).jobs) == 2
    assert await JobLists(clients["gateway"]).owner(job_id) == "default"
    assert len((await JobLists(clients["admin"]).page(JobFilter())).jobs) == 2
    assert await node.broker.requests([job_id]) == [None]
    await node.broker.sweep()
    await node.broker.leave()
    assert await clients["watcher"].acl_log() == []


@pytest.mark.parametrize("role", ["gateway", "worker", "admin"])
def test_a_role_that_submits_may_wait_for_disk_and_replica_and_for_no_key(server: Path, role: str) -> None:
    # Before Redis 7.2 there is no such command; before that the settings of the file say what its disk has.
    assert may(server, role, "WAITAOF", "1", "0", "1")
    assert may(server, role, "WAIT", "0", "1")
    assert may(server, role, "ROLE")
    if role == "gateway":
        for command in (("BLPOP", f"{P}:x", "1"), ("XREAD", "STREAMS", f"{P}:x", "0")):
            assert not may(server, role, *command)


@pytest.mark.parametrize("role", ["gateway", "worker"])
async def test_without_the_right_to_read_settings_an_older_redis_promises_no_disk(server: Path, role: str) -> None:
    client = connect(url_of(server, role))
    broker = ProducerBroker(client)
    said = r"set `appendonly yes`|appendonly no, appendfsync unknown; .*ACL rule \+config\|get"
    with pytest.raises(UnsupportedDurabilityError, match=said):
        await broker.submit(Submission(new_job(), 10, durability=FSYNC))
    await broker.close()
    await client.aclose()


async def test_a_client_subscribes_and_a_node_rings(server: Path, clients: dict[str, Redis]) -> None:
    node = FakeNode(clients["node"], "n1", "r1")
    await node.join()
    await node.heartbeat([])
    for role in ("gateway", "worker"):
        async with AsyncClient(url_of(server, role)) as client:
            job = await client.submit("hello", max_tokens=2)
            taken = await node.take_one()
            await node.emit(taken, 0, 1)
            await node.finish(taken, 1, 0)
            assert [chunk.index async for chunk in job.stream()] == [0, 1]
    assert await clients["watcher"].acl_log() == []


async def test_the_operator_audits_and_changes_keys_that_a_gateway_reads(clients: dict[str, Redis]) -> None:
    await Queue(clients["admin"]).node()
    assert await audit(AdminBroker(clients["admin"]), POOL, repair=True) == []
    _, key = await KeyStore(clients["admin"]).add("acme", ["infer"], UNLIMITED)
    await KeyStore(clients["admin"]).change(key.key_id, {"label": "changed"}, {"weight": 2})
    assert [known.label for known in (await KeyStore(clients["gateway"]).all()).values()] == ["changed"]
    for role in ("gateway", "admin"):
        assert await UsageBroker(clients[role]).per_owner(UsageQuery()) == {}
        assert await UsageBroker(clients[role]).per_owner(UsageQuery("hour", tenant="acme", account="k")) == {}
    assert await clients["watcher"].acl_log() == []
    for role in ("node", "worker"):
        with pytest.raises(ConfigError, match="refuses this user"):
            await KeyStore(clients[role]).all()


async def test_operator_lists_retries_and_purges_dead_letters(server: Path, clients: dict[str, Redis]) -> None:
    queue = Queue(clients["admin"])
    await queue.node("watcher")
    jobs = [new_job(), new_job()]
    for job, names in zip(jobs, ("abc", "def"), strict=True):
        await queue.submit(job)
        for name in names:
            node = await queue.node(name)
            await node.take_one()
            await queue.kill(node)
    await (await queue.node("living")).heartbeat([])
    async with AsyncClient(url_of(server, "admin")) as client:
        assert {letter.job_id for letter in await client.dead.newest(POOL)} == {job.id for job in jobs}
        assert (await client.dead.request(jobs[0].id)).prompt == jobs[0].prompt
        await client.dead.retry(jobs[0].id)
        assert await client.dead.purge([jobs[1].id]) == 1
    assert await clients["watcher"].acl_log() == []


@pytest.mark.parametrize("role", RUNS)
def test_a_role_may_run_each_command_of_its_scripts(role: str) -> None:
    allowed = {word[1:].upper() for word in rules_of(role).split() if word.startswith("+")}
    scripts = map(whole_source, RUNS[role])
    needed = {command for script in scripts for command in re.findall(r"redis\.call\('([A-Z]+)'", script)}
    assert needed <= allowed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_protocol_works_for_its_roles_and_nothing_is_refused() -> None:
    queue_tests = ROOT / "tests/queue"
    of_brokers = ("audit", "pool_stats", "queue_state", "dead_letters", "forget", "pools")
    more = [f"broker/test_{name}.py" for name in of_brokers]
    tests = sorted((queue_tests / "scripts").glob("test_*.py")) + [queue_tests / name for name in more]
    assert len(tests) > 15
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "ops.acting_roles", "-p", "no:cacheprovider"]
    # Each role's connections take memory, which these tests count.
    counting = (
        "test_batch_is_refused_at_80_percent_and_all_at_90",
        "test_only_a_tenant_that_keeps_too_many_bytes_is_refused",
    )
    sources = "".join(path.read_text() for path in tests)
    assert [name for name in counting if f"def {name}(" not in sources] == []
    command += ["-W", "ignore", "-m", "not slow", "-k", f"not ({' or '.join(counting)})"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    ran = subprocess.run([*command, *tests], cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:]


DANGEROUS = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("CONFIG", "SET", "dir", "/"),
    ("SHUTDOWN", "NOSAVE"),
    ("DEBUG", "SLEEP", "0"),
    ("MONITOR",),
    ("REPLICAOF", "NO", "ONE"),
    ("ACL", "SETUSER", "node", "+@all"),
    ("ACL", "LIST"),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "pubsub"),
    ("SAVE",),
    ("BGREWRITEAOF",),
    ("SLOWLOG", "GET"),
    ("MODULE", "LIST"),
    ("MIGRATE", "h", "1", "k", "0", "1"),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "FLUSH"),
    ("FUNCTION", "LOAD", "#!lua name=x"),
]


@pytest.mark.parametrize("command", DANGEROUS, ids=" ".join)
@pytest.mark.parametrize("role", ROLES)
def test_no_role_may_end_reconfigure_or_monitor_redis(server: Path, role: str, command: tuple[str, ...]) -> None:
    assert not may(server, role, *command)


@pytest.mark.parametrize("command", [("SCAN", "0"), ("RANDOMKEY",), ("DBSIZE",)], ids=" ".join)
@pytest.mark.parametrize("role", RUNS)
def test_gateways_and_nodes_cannot_look_around(server: Path, role: str, command: tuple[str, ...]) -> None:
    assert not may(server, role, *command)


@pytest.mark.parametrize("role", ROLES)
def test_other_keys_are_out_of_reach_also_from_inside_scripts(server: Path, role: str) -> None:
    for command in (("GET", FOREIGN), ("SET", FOREIGN, "x"), ("DEL", FOREIGN), ("HSET", FOREIGN, "a", "b")):
        assert not may(server, role, *command)
        assert not may(server, role, *EVAL, *command)
    assert may(server, role, *EVAL, "SET", f"{P}:x", "y")


@pytest.mark.parametrize("role", ROLES)
def test_other_channels_are_out_of_reach(server: Path, role: str) -> None:
    assert not may(server, role, "PUBLISH", FOREIGN, "x")
    assert not may(server, role, *EVAL, "PUBLISH", FOREIGN, "x")
    assert not may(server, role, "SUBSCRIBE", FOREIGN)
    for channel in (keys.inbox_channel(POOL, "me"), keys.doorbell(POOL, "n1")):
        assert may(server, role, "PUBLISH", channel, b"")


STRANGE = (("GET", f"{P}:config"), ("INFO",), ("PUBLISH", "x", "y"), ("ACL", "LIST"), (*EVAL, "GET", f"{P}:config"))


@pytest.mark.parametrize("password", [None, "default", ""])
def test_client_without_credentials_is_refused(server: Path, password: str | None) -> None:
    once = Retry(NoBackoff(), 0)
    with sync_redis.Redis(unix_socket_path=str(server), protocol=2, password=password, retry=once) as client:
        for command in (("PING",), *STRANGE):
            with pytest.raises(AuthenticationError):
                client.execute_command(*command)


def test_a_health_check_may_ping_and_nothing_else(server: Path) -> None:
    with sync_redis.Redis(unix_socket_path=str(server), protocol=2, username="health", password="any") as client:
        assert client.ping()
        for command in STRANGE:
            with pytest.raises(NoPermissionError):
                client.execute_command(*command)


def test_api_keys_are_the_gateways_and_the_operators(server: Path) -> None:
    assert {role for role in ROLES if may(server, role, "HGETALL", keys.API_KEYS)} == {"gateway", "admin"}
    assert {role for role in ROLES if may(server, role, *EVAL, "HGETALL", keys.API_KEYS)} == {"gateway", "admin"}


async def test_secrets_of_webhooks_are_the_gateways_and_the_operators(server: Path, clients: dict[str, Redis]) -> None:
    made = Webhooks(clients["gateway"], Patience(5.0), "acme")
    made._endpoints.patience = made.queue.patience = None
    endpoint, _ = await made.create("https://hook.example/", name="a test", event_types=["batch.completed"])
    told = Webhooks(clients["worker"], Patience(5.0), "acme")
    told._endpoints.patience = told.queue.patience = None
    await told.notify("batch.completed", "batch_1")
    assert await made.queue.collect([POOL]) == 0
    (taken,) = await made.queue.take(8, 8, 1000)
    assert (taken.endpoint, taken.object_id) == (endpoint, "batch_1")
    assert await made.queue.end_attempt(taken, "dead", "status 500")
    assert await made.redeliver(endpoint.id) == 1
    assert (await made.deliveries(endpoint.id, "pending")).deliveries[0].attempts == 0
    assert await made.queue.has_endpoints()
    assert (await made.queue.stats()).pending == {"acme": 1}
    await made.delete(endpoint.id)
    assert await made.queue.take(8, 8, 1000) == []
    assert await clients["watcher"].acl_log() == []
    assert {role for role in ROLES if may(server, role, "HGETALL", keys.WEBHOOK_SECRETS)} == {"gateway", "admin"}
    assert {role for role in ROLES if may(server, role, *EVAL, "HGETALL", keys.WEBHOOK_SECRETS)} == {"gateway", "admin"}


async def test_a_worker_runs_a_batch_on_the_terms_of_a_key_that_it_cannot_read(
    server: Path, clients: dict[str, Redis], tmp_path: Path
) -> None:
    _, key = await KeyStore(clients["admin"]).add("acme", ["infer"], UNLIMITED)
    settings = FilesSettings(url=str(tmp_path), batch_lease_s=1)
    row = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "hello", "max_tokens": 2}}
    content = json.dumps(row).encode()
    async with (
        fake_node.FakeNode(url_of(server, "node")),
        AsyncClient(url_of(server, "gateway")) as gateway,
        AsyncClient(url_of(server, "worker")) as worker,
    ):
        files = Files(settings, gateway.files)
        async with await files.begin("acme", len(content)) as upload:
            await upload.write(content)
            file_id = await upload.save("rows.jsonl", "batch", 86_400_000)
        spec = BatchSpec(file_id, "/v1/completions", "24h", key_id=key.key_id)
        batch_id = await gateway.batches.create(
            new_batch_id(), "acme", spec, window_ms=86_400_000, max_open=0, terms=key
        )
        of_worker = Files(settings, worker.files)
        holder = asyncio.create_task(BatchHolder(worker, of_worker, worker.batches).run())
        batch = await until(lambda: gateway.batches.find(batch_id), lambda batch: not batch.is_open)
        await cancel_until_done([holder])
        assert (batch.status, batch.num_completed) == ("completed", 1)
        found = await worker.batches.key(key.key_id)
        assert found is not None and (found.tenant, found.digest) == ("acme", "")
        files.close()
        of_worker.close()
    usage = await UsageBroker(clients["admin"]).per_owner(UsageQuery())
    assert [owner[1] for owner in usage] == [key.key_id], usage
    assert await clients["watcher"].acl_log() == []


async def test_only_the_operator_asks_for_a_profile_and_the_node_answers(clients: dict[str, Redis]) -> None:
    request = await ProfileBroker(clients["admin"]).ask(POOL, "n1", 1.0)
    assert await ProfileBroker(clients["node"]).request("n1") == request
    await ProfileBroker(clients["node"]).send(POOL, request, ProfileSummary("n1", files={TRACE: 3}), [b"abc"])
    _, files = await ProfileBroker(clients["admin"]).answer(POOL, request)
    assert files == {TRACE: b"abc"}
    assert await clients["watcher"].acl_log() == []
    for role in ("gateway", "worker"):
        with pytest.raises(ConfigError, match="refuses this user"):
            await ProfileBroker(clients[role]).ask(POOL, "n1", 1.0)


async def test_a_script_that_a_role_may_not_run_is_refused_as_a_call_is(clients: dict[str, Redis]) -> None:
    with pytest.raises(ConfigError, match=r"Redis refuses this user: .*no permissions.*; each role has a user"):
        await FakeNode(clients["gateway"], "n1", "r1").join(**CONFIG)


def test_the_script_makes_the_users_of_compose_and_an_operator(tmp_path: Path) -> None:
    said = subprocess.run([find_redis_server(), "--version"], capture_output=True, text=True, check=True).stdout
    if "v=6." in said:
        pytest.skip("this Redis knows no keys that may only be read")
    command = [str(ACL / "make_users.sh"), str(tmp_path), "redis.example:6379"]
    rules = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    urls = {path.name.removesuffix("_url"): path for path in tmp_path.glob("*_url")}
    assert urls.keys() == {*ROLES, "subscriber", "operator"}
    assert {path.stat().st_mode & 0o777 for path in urls.values()} == {0o600}
    passwords = {user: urlsplit(path.read_text().strip()).password or "" for user, path in urls.items()}
    assert len(set(passwords.values())) == len(urls)
    made = run_path(str(ROOT / "ops/deploy/compose/make_secrets.py"))["users_of"](ACL, passwords)
    assert {*rules.splitlines()} - {*made.splitlines()} == {f"user operator on >{passwords['operator']} ~* &* +@all"}
    with serving(tmp_path, rules) as socket:
        for user, password in passwords.items():
            with sync_redis.Redis.from_url(f"unix://{user}:{password}@{socket}") as redis:
                assert redis.ping()
                if user == "operator":
                    assert redis.acl_whoami() == user
    again = subprocess.run(command, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.endswith("gateway_url exists\n")


async def test_roles_may_still_do_what_no_acl_rule_can_prevent(server: Path, clients: dict[str, Redis]) -> None:
    """Rules see commands, keys and channels, not which script runs: processes with a role trust each other."""
    await FakeNode(clients["node"], "n1", "r1").join(**CONFIG)
    job_id = (await ProducerBroker(clients["gateway"]).submit(Submission(new_job(tenant="acme"), 1))).job_id
    # A node may write over any job of its pools, or make one up; so may a gateway.
    for role in RUNS:
        assert may(server, role, *EVAL, "HSET", keys.job(job_id), "tenant", "rival")
        # It may read every tenant's requests and answers.
        assert may(server, role, "GET" if role == "gateway" else "MGET", keys.request(job_id))
        # It may listen to other processes' inboxes, and speak to them as if it were a node.
        assert may(server, role, "SUBSCRIBE", keys.inbox_channel(POOL, "another-gateway"))
        # It may keep Redis from answering for as long as a script may run.
        assert may(server, role, "EVAL", "for i = 1, 1000 do end return 1", "0")
    # Redis 6.2 knows no keys that may only be read: a gateway could make API keys.
    assert may(server, "gateway", "HSET", keys.API_KEYS, "x", "{}")


async def test_from_redis_7_on_gateways_and_workers_only_read_pools_and_api_keys(
    server_with_read_only_keys: Path,
) -> None:
    server = server_with_read_only_keys
    async with clients_of(server) as clients:
        await run_a_job(clients)
    for key in (keys.POOLS, keys.API_KEYS):
        for role in ("gateway", "worker"):
            assert may(server, role, "HGETALL", key) == (key == keys.POOLS or role == "gateway")
            assert not may(server, role, "HSET", key, "x", "{}")
            assert not may(server, role, *EVAL, "HSET", key, "x", "{}")
    assert may(server, "node", "HSET", keys.POOLS, "x", "{}")


def test_rules_narrowed_to_one_pool_keep_a_node_off_the_others(server: Path) -> None:
    other = P.replace(POOL, "other")
    assert may(server, "narrow", "HSET", f"{P}:x", "a", "b")
    assert may(server, "narrow", "PUBLISH", keys.doorbell(POOL, "n1"), b"")
    for command in (("HSET", f"{other}:x", "a", "b"), ("PUBLISH", keys.doorbell("other", "n1"), b"")):
        assert not may(server, "narrow", *command)
        assert not may(server, "narrow", *EVAL, *command)
