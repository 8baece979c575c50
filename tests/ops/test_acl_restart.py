"""Redis with the users of ops/acl and an append-only file is killed and demoted under the load of every role."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fakes.acl_users import OBSERVER, all_rules, refusals_in, with_passwords
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import PythonProcess
from fakes.waiting import Deadline, until
from faults.tools.http_reader import HttpReading, http_client
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import RedisProcess
from faults.tools.work import Work, check_settled, new_work

from penstock.queue.broker.connection import connect
from tests.producer.batch.conftest import chat_row, num_lines, process, rows_in, write_rows

POOL = "kept"
NUM_STREAMS = 4
NUM_ROWS = 12
ROW_TOKENS = 40
PATIENCE_S = 60
CELERY = ("celery", "-A", "penstock.producer.batch.app", "worker", "--concurrency", "1", "--loglevel", "INFO")
PENSTOCK = (sys.executable, "-m", "penstock")
OF_OPERATORS = (("audit",), ("doctor",))


def redis_with_users(folder: Path) -> RedisProcess:
    """A server with an append-only file, whose only users are the roles and the tests' own."""
    folder.mkdir()
    (folder / "users.acl").write_text(with_passwords(all_rules()) + OBSERVER)
    return RedisProcess(folder, user="watcher", aclfile=folder / "users.acl")


class ParsedText(NamedTuple):
    """A command's exit status and output."""

    returncode: int
    stdout: str
    stderr: str


@dataclass
class Roles:
    """A process of each role on one Redis, and their logs."""

    server: RedisProcess
    folder: Path
    nodes: list[NodeProcess] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    num_keys: tuple[int, int] = (0, 0)
    """Keys before Redis was killed, and after it had loaded its file."""
    refused: list[Any] = field(default_factory=list)
    """What Redis refused its users, by its own account."""
    said_to_operators: dict[str, ParsedText] = field(default_factory=dict)

    def all_pids(self) -> list[int]:
        """Return the ids of every process that writes to Redis, in all its groups."""
        return [node.pid for node in self.nodes] + [self.gateway.pid]

    def start(self, stack: ExitStack) -> None:
        """Start two nodes, a gateway, a worker, and a command that sends the worker a batch and waits for it."""
        url, options = self.server.url_of("node"), {"pool": POOL, "step_s": 0.02, "max_num_seqs": 8}
        self.nodes = [NodeProcess(url, name=name, **options) for name in ("n1", "n2")]
        self.gateway = GatewayProcess(self.server.url_of("gateway"))
        env = {"PENSTOCK_REDIS_URL": self.server.url_of("worker")}
        log = self.folder / "worker.log"
        self.worker = stack.enter_context(process(sys.executable, "-m", *CELERY, log=log, **env))
        for served in (*self.nodes, self.gateway):
            stack.enter_context(served)
        rows = [chat_row(f"row-{i}", max_tokens=ROW_TOKENS) for i in range(NUM_ROWS)]
        self.output = self.folder / "out.jsonl"
        batch = ("batch", "run", "--via-celery", "--in-flight", "4")
        files = (str(write_rows(self.folder / "in.jsonl", rows)), str(self.output))
        self.batch = stack.enter_context(process(*PENSTOCK, *batch, *files, log=self.folder / "batch.log", **env))

    @contextmanager
    def everybody_paused(self) -> Iterator[None]:
        """Pause all writers, so that keys can be counted before and after."""
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for group in (self.worker, self.batch):
                os.killpg(group.pid, number)
            for pid in self.all_pids():
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(0.2)
                yield

    def kill_redis(self) -> None:
        """Kill Redis under load and start it on the same files. Assert that it loads what it had."""
        with self.everybody_paused():
            before = lasting_keys(self.server)
            self.server.kill()
            self.server.start()
            self.num_keys = before, lasting_keys(self.server)

    def flush_scripts(self) -> None:
        """Flush scripts as an operator does with his own user."""
        with self.server.client() as client:
            client.script_flush()

    def demote(self) -> None:
        """Make the server a replica for half a second, as in a fail-over that is aborted."""
        with self.server.client() as client:
            client.replicaof("127.0.0.1", "1")
            time.sleep(0.5)
            client.replicaof("NO", "ONE")

    def ask_as_operator(self) -> None:
        """Run every command of an operator, as the admin's user."""
        env = os.environ | {"PENSTOCK_REDIS_URL": self.server.url_of("admin")}
        asking = {words: PythonProcess("-m", "penstock", *words, env=env) for words in OF_OPERATORS}
        for words, command in asking.items():
            out, errors = command.communicate(timeout=PATIENCE_S)
            self.said_to_operators[" ".join(words)] = ParsedText(command.returncode, out, errors)

    def keep_logs(self) -> None:
        """Return the logs so far, by role."""
        self.logs = {
            "node": "".join(node.log for node in self.nodes),
            "gateway": self.gateway.log,
            "worker": (self.folder / "worker.log").read_text(),
            "batch": (self.folder / "batch.log").read_text(),
            "admin": "".join(said.stdout + said.stderr for said in self.said_to_operators.values()),
            "redis": (self.server.folder / "redis.log").read_text(),
        }


def lasting_keys(server: RedisProcess) -> int:
    """Return the keys that do not expire within moments."""
    with server.client() as client:
        return sum(not 0 <= client.pttl(key) < 120_000 for key in client.scan_iter(count=1000))


def refused_by(server: RedisProcess) -> list[Any]:
    """Return Redis's list of refusals since its start. Celery's connections name their library on connecting."""
    with server.client() as client:
        return [entry for entry in client.acl_log() if entry["object"] not in ("client", "client|setinfo")]


async def stream(http: Any, gateway: GatewayProcess, reading: HttpReading, work: Work, key: str) -> None:
    """Read to the end. After each disconnect, resume after the last event."""
    deadline = Deadline()
    while not reading.is_whole:
        deadline.check(reading.error)
        await reading.read(http, gateway.url, work, key=key)


async def disturb(roles: Roles) -> None:
    """Run streams and a batch, during which Redis is killed, loses its scripts and is a replica for a moment."""
    works = [new_work(POOL, 200, temperature=1.0) for _ in range(NUM_STREAMS)]
    readings = [HttpReading() for _ in works]
    async with http_client() as http, asyncio.TaskGroup() as streams:
        for i, (reading, work) in enumerate(zip(readings, works, strict=True)):
            streams.create_task(stream(http, roles.gateway, reading, work, f"key-{i}"))
        await until(lambda: all(r.num_events > 5 for r in readings) and rows_written(roles) > 0)
        for fault in (roles.kill_redis, roles.flush_scripts, roles.demote):
            roles.refused += refused_by(roles.server)
            await asyncio.to_thread(fault)
            await asyncio.sleep(0.5)
    for reading, work in zip(readings, works, strict=True):
        reading.check(work)
    assert await asyncio.to_thread(roles.batch.wait, PATIENCE_S) == 0, (roles.folder / "batch.log").read_text()
    direct = connect(roles.server.url)
    await check_settled(direct, POOL)
    await direct.aclose()


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    """The roles after `disturb`."""
    folder = tmp_path_factory.mktemp("roles")
    with ExitStack() as stack:
        roles = Roles(stack.enter_context(redis_with_users(folder / "redis")), folder)
        roles.start(stack)
        asyncio.run(disturb(roles))
        roles.ask_as_operator()
        roles.refused += refused_by(roles.server)
        roles.keep_logs()
        yield roles


def rows_written(roles: Roles) -> int:
    return num_lines(Path(f"{roles.output}.partial"))


def test_redis_loads_every_key_that_it_had(roles: Roles) -> None:
    before, after = roles.num_keys
    assert before > 50
    assert after == before


def test_redis_refused_no_role_anything(roles: Roles) -> None:
    assert roles.refused == []


def test_batch_of_the_worker_is_complete(roles: Roles) -> None:
    assert {row["custom_id"] for row in rows_in(roles.output)} == {f"row-{i}" for i in range(NUM_ROWS)}
    assert all(row["response"]["body"]["usage"]["completion_tokens"] == ROW_TOKENS for row in rows_in(roles.output))


@pytest.mark.parametrize("role", ["gateway", "node", "worker", "batch", "admin", "redis"])
def test_no_log_of_a_role_tells_of_a_permission(roles: Roles, role: str) -> None:
    assert roles.logs[role]
    assert refusals_in(roles.logs[role]) == []


@pytest.mark.parametrize("command", [" ".join(words) for words in OF_OPERATORS])
def test_an_operator_is_served_afterwards(roles: Roles, command: str) -> None:
    said = roles.said_to_operators[command]
    assert (said.returncode, "Traceback" in said.stderr) == (0, False), said.stdout + said.stderr


@pytest.mark.parametrize(
    "said",
    [
        "-NOPERM this user has no permissions to run the 'script|exists' command",
        "redis.exceptions.NoPermissionError: User worker has no permissions to run the 'script|exists' command",
        "ERR The user executing the script can't run this command or subcommand script: 0a1b",
        "ACL failure in script: User gateway has no permissions to run the 'keys' command",
        "penstock: Redis refuses this user: this user has no permissions to access one of the keys used as arguments",
    ],
)
def test_every_spelling_of_a_refusal_is_found(said: str) -> None:
    assert refusals_in(f"all is well\n{said}\n") == [said]
