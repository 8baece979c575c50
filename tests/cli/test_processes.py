"""Child processes are watched until ready, end in order, and never outlive their parent."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.waiting import until, wait_until

from penstock.cli import child_logs, processes
from penstock.cli.child_logs import reason_in, relay_of
from penstock.cli.processes import BackOff, Child, ChildCommand, Event, ProcessDiedError, Supervisor, keep_child
from penstock.runtime.logging import ConsoleFormatter, LogSettings

READY = 'import json, time; print(json.dumps({"event": "ready", "pool": "p"}), flush=True)\n'
SLEEP = "time.sleep(300)\n"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"

PARENT = """
import asyncio, sys
from penstock.cli.processes import ChildCommand, Supervisor

CHILD = '''
import json, os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(json.dumps({"event": "ready", "pids": [os.getpid(), grandchild.pid]}), flush=True)
time.sleep(300)
'''

async def main():
    async with Supervisor(lambda name, line: None) as supervisor:
        child = await supervisor.start(ChildCommand("child", (sys.executable, "-c", CHILD), {}, grace_s=1))
        print(*(await child.ready())["pids"], flush=True)
        await supervisor.until_one_dies()

asyncio.run(main())
"""


def command(
    code: str, name: str = "child", grace_s: float = 5, on_progress: Callable[[Event], None] | None = None
) -> ChildCommand:
    return ChildCommand(name, (sys.executable, "-c", code), {}, grace_s, on_progress)


def quiet(_name: str, _lines: Sequence[str]) -> None:
    pass


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        # Gone, or gone between the file's being opened and being read.
        return False


def wait_until_dead(pids: list[int]) -> None:
    wait_until(lambda: not any(is_alive(pid) for pid in pids), what="still alive")


async def test_ready_event_is_returned_and_logs_go_to_the_sink() -> None:
    lines = list[tuple[str, str]]()
    async with Supervisor(lambda name, some: lines.extend((name, line) for line in some)) as supervisor:
        child = await supervisor.start(command("print('hello', flush=True)\n" + READY + SLEEP))
        assert (await child.ready(timeout_s=60))["pool"] == "p"
    assert ("child", "hello") in lines


async def test_progress_events_are_passed_on() -> None:
    seen: list[Event] = []
    code = """print('{"event": "progress", "stage": "weights", "fraction": 0.5}', flush=True)\n"""
    async with Supervisor(quiet) as supervisor:
        child = await supervisor.start(command(code + READY + SLEEP, on_progress=seen.append))
        await child.ready(timeout_s=60)
    assert [(event["stage"], event["fraction"]) for event in seen] == [("weights", 0.5)]


async def test_death_before_ready_reports_the_last_log_lines_of_the_child() -> None:
    async with Supervisor(quiet) as supervisor:
        child = await supervisor.start(command("import sys; print('no such model', file=sys.stderr); sys.exit(3)"))
        with pytest.raises(ProcessDiedError, match=r"status 3\n  no such model"):
            await child.ready()


async def test_child_that_is_not_ready_in_time_is_an_error() -> None:
    async with Supervisor(quiet) as supervisor:
        child = await supervisor.start(command("import time\n" + SLEEP))
        with pytest.raises(ProcessDiedError, match=r"not ready within 0\.1 s"):
            await child.ready(timeout_s=0.1)


async def test_death_of_a_child_raises_its_error() -> None:
    async with Supervisor(quiet) as supervisor:
        await supervisor.start(command(READY + SLEEP, name="lasting"))
        await supervisor.start(command("import sys; sys.exit(7)", name="failing"))
        with pytest.raises(ProcessDiedError, match="failing ended with status 7"):
            await supervisor.until_one_dies()


async def test_work_is_cancelled_when_a_child_dies() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with Supervisor(quiet) as supervisor:
        await supervisor.start(command("import sys; sys.exit(7)"))
        with pytest.raises(ProcessDiedError):
            await supervisor.unless_one_dies(work())
    assert cancelled.is_set()


async def test_work_that_finishes_gives_its_result() -> None:
    async def work() -> str:
        return "done"

    async with Supervisor(quiet) as supervisor:
        await supervisor.start(command(READY + SLEEP))
        assert await supervisor.unless_one_dies(work()) == "done"


async def test_children_end_in_reverse_order() -> None:
    order = list[tuple[str, str]]()
    tell = "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(0.1), print('bye'), sys.exit()))\n"
    async with Supervisor(lambda name, some: order.extend((name, line) for line in some)) as supervisor:
        for name in ("first", "second", "third"):
            child = await supervisor.start(command(tell + READY + SLEEP, name=name))
            await child.ready(timeout_s=60)
    assert order == [("third", "bye"), ("second", "bye"), ("first", "bye")]


async def test_stubborn_child_is_killed_after_its_grace_time() -> None:
    started = time.monotonic()
    async with Supervisor(quiet) as supervisor:
        child = await supervisor.start(command(STUBBORN + READY + SLEEP, grace_s=0.3))
        await child.ready(timeout_s=60)
        started = time.monotonic()
    assert 0.3 <= time.monotonic() - started < 60, "it would sleep for 300 s"


async def test_overlong_log_line_is_dropped_and_later_lines_are_read() -> None:
    async with Supervisor(quiet) as supervisor:
        child = await supervisor.start(command("print('x' * 3_000_000)\n" + READY + SLEEP))
        await child.ready(timeout_s=60)


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
async def test_lines_are_read_whole_however_they_arrive(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_logs, "GATHER_S", 0.0)
    monkeypatch.setattr(child_logs, "_MAX_LINE_BYTES", 10_000)
    written = ["", "one", "é" * 2000, "x" * 20_000, "", "after it", "\x1b[1mbold", "y" * 9_000, "no end of line"]
    text, (read, write) = "\n".join(written).encode(), os.pipe()
    os.set_blocking(read, False)

    def write_all() -> None:
        with open(write, "wb", buffering=0) as pipe:
            for at in range(0, len(text), size):
                pipe.write(text[at : at + size])

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write_all)
        lines = [line async for some in child_logs.lines_of(read) for line in some]
        writing.result()
    os.close(read)
    assert [line for line in lines if len(line) < 20_000] == [line for line in written if len(line) < 20_000]


async def test_line_that_resembles_an_event_is_a_log_line() -> None:
    lines = list[str]()
    async with Supervisor(lambda _, some: lines.extend(some)) as supervisor:
        child = await supervisor.start(command("""print('{"event": torn')\nprint('{"other": 1}')\n""" + READY + SLEEP))
        await child.ready(timeout_s=60)
    assert lines == ['{"event": torn', '{"other": 1}']


async def test_cancelled_context_still_ends_the_children() -> None:
    children: list[Child] = []

    async def hold() -> None:
        async with Supervisor(quiet) as supervisor:
            children.append(await supervisor.start(command(READY + SLEEP)))
            await children[0].ready()
            await supervisor.until_one_dies()

    task = asyncio.create_task(hold())
    await until(lambda: children)
    await children[0].ready(timeout_s=60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(children[0].pid)


FAILING = """
import os, pathlib, signal, sys, time
runs = pathlib.Path({path!r})
runs.write_text(runs.read_text() + "." if runs.exists() else ".")
print('{{"event": "ready", "pool": "p"}}', flush=True)
print('{{"level": "ERROR", "message": "the node stops", "reason": "no step for 120 s"}}', file=sys.stderr, flush=True)
if len(runs.read_text()) < 3:
    {dies}
time.sleep(300)
"""


@pytest.mark.parametrize(
    ("dies", "told"),
    [
        ("sys.exit(1)", "status 1: the node stops: no step for 120 s"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "status 137 (SIGKILL, as the system does when memory runs out): the node",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "status 139 (SIGSEGV): the node stops: no step for 120 s"),
    ],
)
async def test_part_that_ends_is_restarted_after_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str, told: str
) -> None:
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.05)
    path, said = tmp_path / "runs", list[str]()
    part = command(FAILING.format(path=str(path), dies=dies), name="node")
    async with Supervisor(quiet) as supervisor:
        child = await supervisor.start(part)
        await child.ready()
        keeper = asyncio.create_task(keep_child(supervisor, child, part, said.append))
        await until(lambda: said.count("node serves again") >= 2 and path.read_text() == "...")
        (kept,) = supervisor.children
        assert is_alive(kept.pid)
        keeper.cancel()
    told = f"node ended with {told}"
    ends = [line for line in said if line.startswith(told)]
    assert [line.rpartition("; ")[2] for line in ends] == ["it starts again in 0.05 s", "it starts again in 0.1 s"], (
        said
    )


async def test_a_part_starts_again_when_the_machine_can_fork_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)
    said: list[str] = []
    part = command(FAILING.format(path=str(tmp_path / "runs"), dies="sys.exit(3)"), name="node")
    async with Supervisor(quiet) as supervisor:
        start, failures = supervisor.start, [OSError(12, "Cannot allocate memory")]

        async def started(command: ChildCommand) -> Child:
            if failures:
                raise failures.pop()
            return await start(command)

        child = await supervisor.start(part)
        await child.ready()
        monkeypatch.setattr(supervisor, "start", started)
        keeper = asyncio.create_task(keep_child(supervisor, child, part, said.append))
        await until(lambda: "node serves again" in said, meanwhile=lambda: not keeper.done())
        keeper.cancel()
    assert "node does not start: [Errno 12] Cannot allocate memory" in said


TALKING = """
import pathlib, signal, sys, time
runs = pathlib.Path({path!r})
def drain(*_):
    runs.write_text(runs.read_text() + "drained")
    sys.exit()
signal.signal(signal.SIGTERM, drain)
runs.write_text(runs.read_text() + "." if runs.exists() else ".")
for _ in range(3):
    print("a line of the log", file=sys.stderr, flush=True)
    print('{{"event": "progress", "stage": "load"}}', flush=True)
print('{{"event": "ready", "pool": "p"}}', flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a bug")])
async def test_child_whose_log_cannot_be_written_keeps_running_and_drains_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)
    path, said = tmp_path / "runs", list[str]()
    part = command(TALKING.format(path=str(path)), name="node", on_progress=refuse)
    async with Supervisor(refuse) as supervisor:
        child = await supervisor.start(part)
        keeper = asyncio.create_task(keep_child(supervisor, child, part, said.append))
        await child.ready(timeout_s=60)
        await asyncio.sleep(0.1)
        assert supervisor.children == (child,)
        keeper.cancel()
    assert (path.read_text(), said) == (".drained", [])


def test_restart_pause_grows_and_is_reset_after_a_steady_run() -> None:
    back_off = BackOff()
    pauses = [back_off.pause_s(1) for _ in range(9)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert [back_off.pause_s(ran_s) for ran_s in (60, 1)] == [0.5, 1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_children_end_when_their_parent_is_killed(number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_alive, pids))

    os.killpg(parent.pid, number)
    parent.communicate()

    wait_until_dead(pids)


STOPPED = f"""
import sys
from penstock.cli.processes import ChildCommand, Supervisor, run_until_stopped

async def main():
    async with Supervisor(lambda name, line: None) as supervisor:
        children = []
        for number in range(2):
            code = "import os, time; print(os.getpid(), flush=True)\\n" + {STUBBORN + READY + SLEEP!r}
            command = ChildCommand("child", (sys.executable, "-c", code), {{}}, grace_s=60)
            children.append(await supervisor.start(command))
        for child in children:
            await child.ready()
        print(*(line for child in children for line in child._tail), flush=True)
        await supervisor.until_one_dies()

run_until_stopped(main())
"""


def test_second_interrupt_does_not_wait_for_the_children() -> None:
    parent = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    parent.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        parent.wait(1)
    assert all(map(is_alive, pids))

    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=60)

    assert (parent.returncode, errors) == (130, b"")
    assert not any(map(is_alive, pids))


def test_only_a_warning_or_an_error_is_the_reason_for_an_end() -> None:
    assert reason_in(['{"level": "INFO", "message": "job.ended"}']) == ""
    assert reason_in(['{"level": "ERROR", "message": "the node stops", "reason": "a bug"}']) == "the node stops: a bug"
    assert reason_in(["penstock: model 'x' is not served", " "]) == "model 'x' is not served"
    assert reason_in(["[1]"]) == "[1]"


@pytest.mark.parametrize("has_color", [False, True])
def test_a_log_for_people_gives_the_same_reasons(has_color: bool) -> None:
    lines = ConsoleFormatter(has_color=has_color)

    def reason_of(level: int, message: str, **fields: object) -> str:
        record = logging.makeLogRecord({"name": "penstock.x", "levelno": level, "msg": message, **fields})
        record.levelname = logging.getLevelName(level)
        return reason_in([lines.format(record)])

    assert reason_of(logging.INFO, "node serves", node_id="n1") == ""
    assert reason_of(logging.WARNING, "swap is full") == "swap is full"
    assert reason_of(logging.ERROR, "the node stops", reason="a bug") == 'the node stops reason="a bug"'


def test_a_json_line_that_tells_the_end_is_the_reason_and_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    end = '{"time": "t", "level": "ERROR", "logger": "penstock", "message": "the process ends", "reason": "no model"}'
    crash = (
        '{"time": "t", "level": "CRITICAL", "message": "the process ends", "exc_info": "Traceback", "reason": "E: x"}'
    )
    assert (reason_in([end]), reason_in([crash])) == ("no model", "E: x")
    relay = relay_of(LogSettings.load(log_format="json"))
    relay("node-1", [end, crash])
    (said,) = capsys.readouterr().err.splitlines()
    assert "Traceback" in said and '"part": "node-1"' in said
