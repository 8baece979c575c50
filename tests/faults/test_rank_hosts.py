"""A node whose second stage is on another host. Hosts are network namespaces, so the link between them can be cut."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.ties import num_departures
from fakes.waiting import until
from faults.tools.redis_process import RedisProcess
from fixtures.tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.producer.client import AsyncClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ADDRESSES = "10.77.1.1", "10.77.1.2"
OTHER_NETWORK = "10.78.1.1"
PORT = 7700
POOL, STALL_S = "hosts", 1.0
NUM_TOKENS = 400
PATIENCE_S = 120.0
LISTENING = "0A"
"""In /proc/net/tcp."""
PROMPTS = "the gate opens by pressure", "a turbine that never starves"


class Host:
    """A network namespace, with what runs in it."""

    def __init__(self, name: str, folder: Path) -> None:
        """Raises CalledProcessError where namespaces are not permitted."""
        self._name = name
        self._folder = folder
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def log(self) -> Path:
        """What its processes write."""
        return self._folder / f"{self._name}.log"

    def has_logged(self, message: str, times: int = 1) -> bool:
        """Whether a message was logged so often."""
        return self.log.read_text().count(f'"{message}"') >= times

    def connect(self, other: Host) -> None:
        """Lay a cable to another host; both get their addresses of ADDRESSES."""
        ip("link", "add", "eth0", "netns", self._name, "type", "veth", "peer", "name", "eth0", "netns", other._name)
        for host, address in zip((self, other), ADDRESSES, strict=True):
            host.use(address, "eth0")

    def use(self, address: str, interface: str) -> None:
        """Give an interface an address."""
        ip("-n", self._name, "address", "add", f"{address}/24", "dev", interface)
        self.set_link("up", interface)

    def add_network(self) -> None:
        """Add an interface to a network without other hosts."""
        ip("-n", self._name, "link", "add", "eth1", "type", "veth", "peer", "name", "eth2")
        self.use(OTHER_NETWORK, "eth1")

    def set_link(self, state: str, interface: str = "eth0") -> None:
        """Cut a link, or mend it. The other end loses its carrier, as when a cable is pulled."""
        ip("-n", self._name, "link", "set", interface, state)

    def start(self, *words: str) -> None:
        """Start a command of penstock."""
        penstock = Path(sys.executable).with_name("penstock")
        with self.log.open("ab") as log:
            command = ["ip", "netns", "exec", self._name, str(penstock), *words]
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def listening(self) -> set[str]:
        """The addresses at which something listens in it."""
        lines = [line.split() for line in self._sockets("tcp") + self._sockets("tcp6")]
        found = [words[1].partition(":")[0] for words in lines if words[3] == LISTENING]
        return {socket.inet_ntoa(struct.pack("<I", int(one, 16))) if len(one) == 8 else one for one in found}

    def _sockets(self, kind: str) -> list[str]:
        return Path(f"/proc/{self.processes[0].pid}/net/{kind}").read_text().splitlines()[1:]

    def pids(self) -> list[int]:
        """All processes in it."""
        return [int(pid) for pid in ip("netns", "pids", self._name).split()]

    def stop(self) -> None:
        """End its commands, and wait for them."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(PATIENCE_S)

    def delete(self) -> None:
        """Kill what is left, and delete the namespace."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        ip("netns", "delete", self._name)


def ip(*words: str) -> str:
    """Run `ip`. Raises CalledProcessError."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them, of which the first has another network too."""
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (Debian's package iproute2)")
    made: list[Host] = []
    try:
        try:
            made += [Host(f"penstock-{os.getpid()}-{name}", tmp_path) for name in "ab"]
            first, second = made
            first.connect(second)
            first.add_network()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield first, second
    finally:
        for host in made:
            host.delete()


async def test_a_cut_link_costs_streams_no_token_and_ranks_listen_at_the_named_address_alone(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    first, second = hosts
    model, secret = make_tiny_model(tmp_path / "tiny"), tmp_path / "secret"
    secret.write_bytes(os.urandom(32).hex().encode())
    with RedisProcess(tmp_path / "redis") as redis:
        told = ["--rank-secret-file", str(secret), "--num-threads", "1"]
        join = f"{ADDRESSES[0]}:{PORT}"
        second.start("rank", str(model), "--join", join, *told)
        shape = ["--runner", "torch", "--dtype", "float32", "--pipeline-parallel-size", "2", "--remote-ranks", "1"]
        first.start(
            *("node", str(model), "--redis-url", redis.url, "--pool", POOL, "--num-kv-blocks", "128", *shape, *told),
            *("--rank-address", join, "--rank-stall-s", str(STALL_S), "--lease-ms", "6000"),
        )
        async with AsyncClient(redis.url) as client:
            await until(
                lambda: client.pools(renewed=True),
                within_s=PATIENCE_S,
                what=first.log.read_text,
                meanwhile=lambda: first.processes[0].poll() is None,
            )
            found: dict[str, list[int]] = {prompt: [] for prompt in PROMPTS}

            async def read(prompt: str) -> None:
                wanted: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
                job = await client.submit(prompt, model=POOL, **wanted)
                async for chunk in job.chunks():
                    found[prompt] += chunk.token_ids

            async with asyncio.TaskGroup() as group:
                for prompt in PROMPTS:
                    group.create_task(read(prompt))
                await until(lambda: all(found.values()), within_s=PATIENCE_S)
                second.set_link("down")
                cut_s = time.monotonic()
                assert all(len(tokens) < NUM_TOKENS for tokens in found.values())
                assert (first.listening(), second.listening()) == ({ADDRESSES[0]}, {ADDRESSES[1]})
                await until(lambda: first.has_logged("the ranks are lost"), within_s=PATIENCE_S)
                # The exchange of the step has 2 s to fail, once the node has given the rank up.
                assert STALL_S - 0.5 < time.monotonic() - cut_s < STALL_S + 6
                second.set_link("up")
            assert first.has_logged("ranks are ready", 2)
        first.stop()
        second.stop()
        # A guard ends what `penstock rank` has started, once that has ended.
        await until(lambda: not first.pids() + second.pids(), within_s=PATIENCE_S)
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [(tokenizer.encode(prompt), tokens) for prompt, tokens in found.items()]
    assert all(len(tokens) == NUM_TOKENS for _, tokens in pairs)
    assert num_departures(AutoModelForCausalLM.from_pretrained(model), pairs) <= 1
