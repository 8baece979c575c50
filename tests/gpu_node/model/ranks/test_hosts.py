"""Ranks of other hosts: which may join, what is refused by name, and that nothing listens at all interfaces."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fakes.engine_runs import TORCH, check_idle
from fakes.waiting import wait_until
from faults.tools.redis_process import free_port
from torch import distributed

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, StepOutput
from penstock.gpu_node.engine.records import StepLostError
from penstock.gpu_node.model.loading import rank_host
from penstock.gpu_node.model.ranks import connection as connections
from penstock.gpu_node.model.ranks.connection import ConnectionLostError, FrameKind, RankConnection, ask, read_secret
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.hosts import CopiedMemory, RankListener, RemoteRank, own_address, parse_address
from penstock.gpu_node.model.ranks.messages import Kind, read_adapter, write_adapter
from penstock.gpu_node.model.torch_common.ranked_runner import RankedRunner
from penstock.gpu_node.model.torch_common.ranks import Joining, join_gpus, leave_gpus, open_store

SECRET, OTHER = b"a secret of sixteen bytes or more", b"another secret of that length"
HERE, THERE = "127.0.0.2", "127.0.0.3"
STALL_S = 1.0
PROMPTS: list[Any] = ["the gate opens by pressure", "a turbine", [5, 6, 7] * 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def listener() -> Iterator[RankListener]:
    """Rank 0's socket, at an address that stands for one of two hosts."""
    listener = RankListener(HERE, 0, SECRET)
    yield listener
    listener.close()


def _connect(listener: RankListener) -> RankConnection:
    return RankConnection(socket.create_connection((listener.address, listener.port), 5, (THERE, 0)))


@contextmanager
def _asking(listener: RankListener, secret: bytes, found: list[Any]) -> Iterator[RankConnection]:
    """Let a rank join on a thread, which puts what it is told, or its error, into `found`."""
    connection = _connect(listener)

    def run() -> None:
        try:
            found.append(ask(connection, secret))
        except (ConfigError, ConnectionLostError) as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield connection
    finally:
        connection.close()
        thread.join()


def test_messages_and_signs_of_life_reach_a_rank_that_has_joined(listener: RankListener) -> None:
    found: list[Any] = []
    memory, ended = GroupMemory.create(), threading.Event()
    with _asking(listener, SECRET, found) as theirs:
        (ours,) = listener.accept([3], 5)
        assert (ours.other_address, theirs.own_address) == (THERE, THERE)
        rank = RemoteRank(ours, 3, memory, {"rank": 3})
        wait_until(lambda: bool(found))
        assert found == [{"rank": 3}]
        copied = CopiedMemory(theirs, 3, ended.set)
        copied.start()
        copied.report({"ready": {}})
        assert os.read(rank.fileno(), 100) == b'{"ready": {}}\n'
        for number, name in ((1, "a"), (2, "b")):
            write_adapter(memory.messages, number, AdapterRef(name=name))
            memory.note_message(Kind.ADAPTER)
            rank.send_message(number)
            assert copied.exchange.next_message(number - 1, 5) == number
            assert copied.memory.map_message() is Kind.ADAPTER
            assert read_adapter(copied.memory.messages) == (number, AdapterRef(name=name))
            copied.exchange.note_done(number)
        memory.show_life()
        wait_until(lambda: copied.memory.life == 1)
        wait_until(lambda: int(memory.done[3]) == 2)
        rank.kill()
        assert ended.wait(5)
        assert copied.exchange.is_aborted
        rank.close()


def test_a_rank_with_another_secret_is_refused_and_others_may_still_join(listener: RankListener) -> None:
    refused, joined = list[Any](), list[Any]()
    with _asking(listener, OTHER, refused), _asking(listener, SECRET, joined):
        (connection,) = listener.accept([1], 5)
        connection.send(FrameKind.CONFIG, b"{}")
        wait_until(lambda: bool(joined))
        connection.close()
    assert joined == [{}]
    assert "rank 0 has another secret" in str(refused[0])


def test_a_caller_without_the_secret_learns_nothing_and_is_refused(
    listener: RankListener, caplog: pytest.LogCaptureFixture
) -> None:
    """It sends a wrong digest in the right form."""
    told: list[bytes] = []

    def call() -> None:
        stranger = _connect(listener)
        stranger.send(FrameKind.HELLO, bytes(32))
        stranger.receive()
        stranger.send(FrameKind.ANSWER, bytes(32) + b"1")
        told.append(stranger.receive()[1])
        stranger.close()

    thread = threading.Thread(target=call)
    thread.start()
    with pytest.raises(ConfigError, match=r"rank 1, 2 has not joined at 127\.0\.0\.2:\d+ within 0\.5 s"):
        listener.accept([1, 2], 0.5)
    thread.join()
    assert told == [b"it has another secret (rank_secret_file)"]
    assert "a rank was refused" in caplog.messages


def test_a_rank_of_another_version_is_refused_by_both(
    listener: RankListener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[Any] = []
    own = version("penstock-llm")
    # The rank asks for it first.
    versions = iter(("0.0.1", own, own, own))
    monkeypatch.setattr(connections, "version", lambda _: next(versions, own))
    with _asking(listener, SECRET, found), pytest.raises(ConfigError, match="has not joined"):
        listener.accept([1], 0.5)
    assert str(found[0]) == f"rank 0 refuses this rank: it has version 0.0.1 of penstock, and rank 0 has {own}"


def test_a_frame_that_is_too_long_or_unknown_ends_the_connection(listener: RankListener) -> None:
    for header in (b"\x01\0\0\0\xff\xff\xff\x7f" + bytes(8), b"\x63" + bytes(15)):
        with socket.create_connection((listener.address, listener.port), 5) as stranger:
            stranger.sendall(header)
            with pytest.raises(ConfigError, match="has not joined"):
                listener.accept([1], 0.2)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""


def test_a_port_in_use_is_named(listener: RankListener) -> None:
    with pytest.raises(ConfigError, match=rf"rank_address 127\.0\.0\.2:{listener.port}: the port is in use"):
        RankListener(HERE, listener.port, SECRET)
    with pytest.raises(ConfigError, match="no interface of this host has the address"):
        RankListener("192.0.2.1", 7700, SECRET)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("10.0.0.1", "must be HOST:PORT"),
        (":7700", "must be HOST:PORT"),
        ("h:0", "a port from 1 to 65535"),
        ("h:99999", "a port from 1 to 65535"),
    ],
)
def test_addresses_that_are_none_are_refused_by_name(given: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"rank_address '{given}'.*{problem}"):
        parse_address(given, "rank_address")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
def test_all_interfaces_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="would listen at all interfaces"):
        own_address(host, "rank_address")


def test_nccl_gets_the_interface_of_the_address_and_the_gpu_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """By gloo in NCCL's place: there is no GPU."""
    asked: dict[str, Any] = {}
    begin = distributed.init_process_group

    def by_gloo(backend: str, **given: Any) -> None:
        asked.update(given, backend=backend, interface=os.environ["NCCL_SOCKET_IFNAME"])
        begin("gloo", **given | {"device_id": None})

    monkeypatch.setattr(distributed, "init_process_group", by_gloo)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    here = "127.0.0.1"
    store, port = open_store(here, 1)
    joining = Joining(0, 1, 1, 1, here, here, port, "a group")
    try:
        links = join_gpus(joining, nullcontext(), torch.device("cuda", 3), store)
        assert (asked["backend"], asked["interface"], str(asked["device_id"])) == ("nccl", "=lo", "cuda:3")
        numbers = torch.arange(6.0).view(2, 3)
        for exchange in (links.tensor.sum, links.tensor.from_first, links.tensor.all_gather):
            assert exchange(numbers.clone()).equal(numbers)
    finally:
        leave_gpus(is_lost=False)
    leave_gpus(is_lost=False)
    assert not distributed.is_initialized()
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with pytest.raises(
        ConfigError, match=r"no interface has 192\.0\.2\.1 as its address of IPv4; name it in NCCL_SOCKET_IFN"
    ):
        join_gpus(joining._replace(address="192.0.2.1"), nullcontext(), torch.device("cuda", 3), store)


def test_a_short_or_missing_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("four\n")
    with pytest.raises(ConfigError, match="has 4 bytes, and a secret needs at least 16"):
        read_secret(tmp_path / "short")
    with pytest.raises(ConfigError, match="rank_secret_file: cannot read"):
        read_secret(tmp_path / "none")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"remote_ranks": 1, "tensor_parallel_size": 1}, "remote_ranks 1 needs runner torch or gpu, and tensor_par"),
        ({"remote_ranks": 1, "runner": "native", "dtype": "bfloat16"}, "remote_ranks 1 needs runner torch or gpu"),
        ({"remote_ranks": 2}, "remote_ranks 2 leaves no rank for this host: .* is 2 x 1"),
        ({"remote_ranks": 1}, "remote_ranks 1 needs rank_address"),
        ({"remote_ranks": 1, "rank_address": "127.0.0.2:7700"}, "remote_ranks 1 needs rank_secret_file"),
        ({"num_threads": 1}, "2 ranks of this host need a thread each, and they have 1 together"),
        ({"tensor_parallel_size": 3, "num_threads": 3}, "tensor_parallel_size 3: num_heads 4 is not a multiple of it"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    make_engine: Callable[..., Engine], settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_engine(**TORCH | {"tensor_parallel_size": 2, "num_threads": 2} | settings)


class RankCommand:
    """`penstock rank` in a process of its own."""

    def __init__(self, *words: str) -> None:
        command = [str(Path(sys.executable).with_name("penstock")), "rank", *words]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def child(self) -> psutil.Process:
        """The process that computes."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        return next(one for one in children if not any("process_guard" in word for word in one.cmdline()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> str:
        """End it. Return what it wrote."""
        self._process.terminate()
        return self._process.communicate(timeout=60)[1]

    def wait(self) -> tuple[int, str]:
        """Wait until it has ended. Return its status, and what it wrote."""
        return (self._process.wait(60), self._process.communicate()[1])


@pytest.fixture
def hosts(make_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a node whose second stage is on another host."""
    (tmp_path / "secret").write_bytes(SECRET)
    settings: dict[str, Any] = {**TORCH, "pipeline_parallel_size": 2, "num_threads": 1, "num_kv_blocks": 64}
    monkeypatch.setattr(rank_host, "START_PATIENCE_S", 90.0)
    settings |= {"remote_ranks": 1, "rank_address": f"{HERE}:{free_port()}", "rank_secret_file": tmp_path / "secret"}
    settings["rank_stall_s"] = STALL_S
    return settings


def test_two_hosts_answer_as_one_and_a_rank_that_is_killed_joins_again(
    make_engine: Callable[..., Engine], hosts: dict[str, Any], tiny_model: Path
) -> None:
    want = make_engine(**TORCH).generate(PROMPTS, GREEDY)
    join = "--join", hosts["rank_address"], "--rank-secret-file", str(hosts["rank_secret_file"])
    command = RankCommand(str(tiny_model), *join, "--num-threads", "1")
    try:
        engine = make_engine(**hosts)
        got = engine.generate(PROMPTS, GREEDY)
        assert [one.choices[0].token_ids for one in got] == [one.choices[0].token_ids for one in want]
        _assert_only_loopback(psutil.Process(), command.child())
        command.child().kill()
        again = _again(engine)
        assert [one.choices[0].token_ids for one in again] == [one.choices[0].token_ids for one in want]
        assert engine.stats().ranks.num_starts == 2
        check_idle(engine)
        assert isinstance(engine._runner, RankedRunner)
        engine._runner.close()
    finally:
        said = command.end()
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert sum(line["message"] == "the ranks have ended; this one joins again" for line in lines) == 1
    assert [line["rank"] for line in lines if line["message"] == "the connection to rank 0 has ended"] == [1]
    assert not [one for one in psutil.Process().children() if one.pid != command.pid and "penstock" in one.name()]


def _again(engine: Engine) -> Any:
    """Run the prompts once more. The loss is noticed before, or in the first step."""
    with suppress(StepLostError):
        engine.step()
    return engine.generate(PROMPTS, GREEDY)


@pytest.mark.slow
def test_a_rank_of_another_host_that_is_stopped_is_ended_there_and_joins_again(
    make_engine: Callable[..., Engine], hosts: dict[str, Any], tiny_model: Path
) -> None:
    join = "--join", hosts["rank_address"], "--rank-secret-file", str(hosts["rank_secret_file"])
    command = RankCommand(str(tiny_model), *join, "--num-threads", "1")
    try:
        engine = make_engine(**hosts)
        want = engine.generate(PROMPTS[:1], GREEDY)[0].choices[0].token_ids
        stopped = command.child()
        found: tuple[int, ...] = ()
        engine.add_request(PROMPTS[0], GREEDY)
        stopped.suspend()
        began_s = time.monotonic()
        with pytest.raises(StepLostError):
            while engine.has_work():
                found += _tokens(engine.step())
        # The exchange with it has 2 s to fail, once the node has given it up.
        assert STALL_S < time.monotonic() - began_s < STALL_S + 4
        while engine.has_work():
            found += _tokens(engine.step())
        assert found == want
        # Its own host ended it, once the node had closed its connection.
        assert not stopped.is_running()
        assert engine.stats().ranks.num_starts == 2
        check_idle(engine)
        assert isinstance(engine._runner, RankedRunner)
        engine._runner.close()
    finally:
        command.end()


def _tokens(outputs: list[StepOutput]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


def _assert_only_loopback(*processes: psutil.Process) -> None:
    listening = {one.laddr.ip for process in processes for one in process.net_connections() if one.status == "LISTEN"}
    assert listening
    assert listening <= {HERE, "127.0.0.1"}


def test_a_rank_with_another_model_ends_with_its_reason_and_the_node_names_it(
    make_engine: Callable[..., Engine], hosts: dict[str, Any], model_copy: Path
) -> None:
    config = model_copy / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    join = "--join", hosts["rank_address"], "--rank-secret-file", str(hosts["rank_secret_file"])
    command = RankCommand(str(model_copy), *join)
    with pytest.raises(ConfigError, match="rank 1: it has another model"):
        make_engine(**hosts)
    status, said = command.wait()
    assert status == 2
    assert '"reason": "it has another model: ' in said
