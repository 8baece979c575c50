"""`python -m faults.gateway_kills`: gateways are killed at random moments while unmodified clients read their answers.

A keeper (`penstock gateway --keep-connections`) starts each gateway again. The answers are streams and whole ones of
all APIs, read by plain sockets, fast and byte by byte, by `curl`, and by the clients of OpenAI and Anthropic for Python
and for Node (where `node` and `npm` are installed). Each must
be complete and valid to the byte, and equal to that of an undisturbed gateway but for ids and times. Each request must
have made one job, and no descriptor may be left. The campaign prints what it measured and what was violated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
from clients.catalog import Client
from clients.environments import install
from faults.tools.answers import CASES, PATIENCE_S, TEXT, BrokenAnswerError, Case, Reader, comparable, same
from faults.tools.linked_releases import LinkedReleases
from faults.tools.redis_process import RedisProcess
from faults.tools.report import Measurement, record

from tests.gateway.conftest import MODEL, EchoEngine, Stack

STEP_S = 0.02
RELOAD_S = 4.0
"""Seconds after SIGHUP in which a gateway stops."""
KILLS = Client("kills", "openai and @anthropic-ai/sdk (Node)", "kills.mjs", "answers while gateways are killed")
STOPPED = "this gateway was stopped before the request was in the queue"
NOTHING = (52, 56)
"""curl's statuses for a connection that was closed, or reset because its request was unread."""


def started(*words: str, **how: Any) -> subprocess.Popen[str]:
    """Start an interpreter."""
    return subprocess.Popen([sys.executable, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)


class KeptGateway:
    """`penstock gateway --keep-connections` as a process, and its gateway, which is killed."""

    def __init__(self, redis_url: str, *, start: Callable[..., Any] = started, **variables: str) -> None:
        """`start` starts a process by words of a command."""
        own = {"PORT": "0", "PROGRESS": "json", "KEEP_CONNECTIONS": "true", **variables}
        env = {f"PENSTOCK_GATEWAY_{name}": value for name, value in own.items()} | {"PENSTOCK_REDIS_URL": redis_url}
        # Without a terminal, SIGHUP restarts the gateway.
        self.process = start("-m", "penstock", "gateway", env={**os.environ, **env}, stdin=subprocess.DEVNULL)
        self.log: list[str] = []
        self._serves_again = threading.Semaphore(0)
        assert self.process.stdout is not None
        self._listener = threading.Thread(target=self._read_log, daemon=True)
        self._listener.start()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("\n".join(self.log))
        self.url = json.loads(line)["url"]
        self.port = int(self.url.rpartition(":")[2])

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if "serves again" in line:
                self._serves_again.release()

    def pids(self) -> tuple[int, int]:
        """Return the process ids of the guard and of the gateway. The gateway on standby is younger."""
        children: dict[int, list[tuple[int, int]]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(") ")[2].split()
                children.setdefault(int(fields[1]), []).append((int(fields[19]), int(folder.name)))
        _, guard = min(children[self.process.pid])
        ((_, gateway),) = children[guard]
        return guard, gateway

    def kill(self, *, guard: bool = False) -> float:
        """Kill the gateway, or its guard, and return when that was."""
        killed_s = time.monotonic()
        os.kill(self.pids()[0 if guard else 1], signal.SIGKILL)
        return killed_s

    def reload(self) -> float:
        """Restart the gateway by SIGHUP, and return when that was."""
        asked_s = time.monotonic()
        self.process.send_signal(signal.SIGHUP)
        return asked_s

    def wait_until_it_serves_again(self) -> None:
        if not self._serves_again.acquire(timeout=PATIENCE_S):
            raise RuntimeError("\n".join(self.log[-20:]))

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)
        self._listener.join()
        for pipe in (self.process.stdout, self.process.stderr):
            pipe.close()


class Silence(NamedTuple):
    """A time in which a reader got no byte. Before the first byte of a whole answer, its job is computed as well."""

    began_s: float
    ended_s: float
    is_whole: bool


def pauses_of(silences: Iterable[Silence], ends_s: Sequence[float]) -> list[float]:
    """Return the seconds from the first of these ends of a gateway that falls into a silence to the silence's end."""
    found = [
        silence.ended_s - first_s
        for silence in silences
        if (first_s := min((end_s for end_s in ends_s if silence.began_s <= end_s <= silence.ended_s), default=None))
    ]
    return sorted(found)


def pauses_by_reloads(silences: Iterable[Silence], asked_s: Sequence[float]) -> list[float]:
    """Return the lengths of the silences that began after SIGHUP. The gateway serves on until all bodies are read."""
    return sorted(
        one.ended_s - one.began_s for one in silences if any(0 <= one.began_s - at_s < RELOAD_S for at_s in asked_s)
    )


def p50_and_p99(pauses: Sequence[float]) -> str:
    """Return these two quantiles of sorted seconds as a table shows them."""
    if not pauses:
        return "-"
    return f"{statistics.median(pauses):.2f}, {pauses[int(0.99 * (len(pauses) - 1))]:.2f}"


class Campaign:
    """Callers who ask without end, and what became of their answers."""

    def __init__(self, gateway: KeptGateway, expected: Mapping[str, bytes]) -> None:
        self.gateway = gateway
        self._expected = expected
        self.stops = threading.Event()
        self.counts = Counter[str]()
        self.num_jobs = self.num_closed = self.num_refused = 0
        self.violations: list[str] = []
        self.silences: list[Silence] = []
        self._lock = threading.Lock()

    def _note(self, case: Case, reader: str, body: bytes, gaps: list[tuple[float, float]]) -> None:
        with self._lock:
            self.counts[f"{case.name} / {reader}"] += 1
            self.num_jobs += case.num_jobs
            is_whole = not case.body.get("stream")
            self.silences += [Silence(at_s - length_s, at_s, is_whole) for at_s, length_s in gaps]
            try:
                is_same = same(case, body, self._expected[case.name])
            except (BrokenAnswerError, ValueError) as error:
                self.violations.append(f"{case.name} / {reader}: {error!r}")
                return
            if not is_same:
                expected = comparable(self._expected[case.name])
                self.violations.append(f"{case.name} / {reader}: {comparable(body)} instead of {expected}")

    def _fail(self, case: Case, reader: str, error: Exception, *, got_nothing: bool = False) -> None:
        """Note a failure. With `got_nothing`, the gateway died before the request had a record, and so a job."""
        with self._lock:
            if got_nothing:
                self.num_closed += 1
                return
            self.num_jobs += case.num_jobs
            self.violations.append(f"{case.name} / {reader}: {error!r}")

    def _is_refusal(self, body: bytes) -> bool:
        """Return whether an answer says that the gateway ended before the request was a job, and count it.

        If it has two jobs and one of them was in the queue, that one is canceled.
        """
        error = json.loads(body).get("error", {}) if body.startswith(b"{") else {}
        # Errors of /v1/messages have no code.
        is_one = error.get("code") == "gateway_stopped" or error.get("message", "").startswith(STOPPED)
        with self._lock:
            self.num_refused += is_one
        return is_one

    def read_raw(self, kind: str, **how: Any) -> None:
        """Ask by plain sockets, each for several answers in turn."""
        while not self.stops.is_set():
            reader = Reader(self.gateway.port, **how)
            for number in range(3):
                case, closes = random.choice(CASES), number == 2
                try:
                    answer = reader.ask(case, closes=closes)
                    if answer.head.startswith(b"HTTP/1.1 503") and self._is_refusal(answer.body):
                        break
                    if not answer.head.startswith(b"HTTP/1.1 200"):
                        raise BrokenAnswerError(f"{answer.head!r} {answer.body[:300]!r}")
                    self._note(case, kind, answer.body, answer.gaps)
                except (BrokenAnswerError, OSError, ValueError) as error:
                    self._fail(case, kind, error, got_nothing=not reader.answer.head and not reader.has_bytes)
                    break
                if self.stops.is_set():
                    break
            reader.close()

    def read_by_curl(self) -> None:
        """Ask by curl."""
        while not self.stops.is_set():
            case = random.choice(CASES)
            url = f"{self.gateway.url}{case.path}"
            content = ["-H", "Content-Type: application/json", "-d", json.dumps(case.body)]
            words = ["curl", "-sSN", "--fail-with-body", *content, url]
            ran = subprocess.run(
                [*words, *(["-H", f"Accept: {case.accept}"] if case.accept else [])], capture_output=True
            )
            if ran.returncode:
                if self._is_refusal(ran.stdout):
                    continue
                error = BrokenAnswerError(ran.stderr.decode())
                self._fail(case, "curl", error, got_nothing=ran.returncode in NOTHING and not ran.stdout)
            else:
                self._note(case, "curl", ran.stdout, [])

    def read_by_openai(self) -> None:
        """Ask by OpenAI's client, which knows nothing of event ids, and must see no reason to ask again."""
        with openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key="none", timeout=PATIENCE_S) as api:
            while not self.stops.is_set():
                case = CASES[random.choice((0, 2))]
                try:
                    if case.body.get("stream"):
                        chunks = [*api.chat.completions.create(**case.body)]
                        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                    else:
                        text = api.chat.completions.create(**case.body).choices[0].message.content or ""
                    self._note(case, "openai", self._expected[case.name] if text == TEXT else text.encode(), [])
                except Exception as error:
                    self._fail(case, "openai", error)

    def read_by_anthropic(self) -> None:
        """Ask by Anthropic's client."""
        with anthropic.Anthropic(base_url=self.gateway.url, api_key="none", timeout=PATIENCE_S) as api:
            while not self.stops.is_set():
                case = CASES[random.choice((6, 7))]
                try:
                    fields = {name: value for name, value in case.body.items() if name != "stream"}
                    if case.body.get("stream"):
                        with api.messages.stream(**fields) as stream:
                            text = "".join(stream.text_stream)
                    else:
                        text = api.messages.create(**fields).content[0].text  # type: ignore[union-attr]
                    self._note(case, "anthropic", self._expected[case.name] if text == TEXT else text.encode(), [])
                except Exception as error:
                    self._fail(case, "anthropic", error)

    def read_by_node(self, command: list[str], *, readers: int) -> None:
        """Ask by the clients of OpenAI and Anthropic for Node, in one process."""
        env = {
            **os.environ,
            "PENSTOCK_URL": self.gateway.url,
            "PENSTOCK_MODEL": MODEL,
            "PENSTOCK_TEXT": TEXT,
            "PENSTOCK_READERS": str(readers),
        }
        cases = {case.name: case for case in CASES}
        with subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            threading.Thread(target=lambda: (self.stops.wait(), process.stdin.close()), daemon=True).start()
            for line in process.stdout:
                told = json.loads(line)
                case = cases[told["case"]]
                if "error" in told:
                    self._fail(case, "Node", RuntimeError(told["error"]))
                else:
                    body = self._expected[case.name] if told["text"] == TEXT else told["text"].encode()
                    self._note(case, "Node", body, [(at_s, length_s) for at_s, length_s in told["gaps"]])

    def readers(self, *, each: int) -> Iterator[Callable[[], None]]:
        """Yield what runs in a thread each."""
        for _ in range(each):
            yield lambda: self.read_raw("fast", at_once=1 << 16)
            yield lambda: self.read_raw("by bytes", at_once=1)
            yield lambda: self.read_raw("slow", at_once=512, pause_s=0.02)
            yield self.read_by_openai
            yield self.read_by_anthropic
            if shutil.which("curl"):
                yield self.read_by_curl
        if shutil.which("npm"):
            yield partial(self.read_by_node, install(KILLS), readers=2 * each)


def undisturbed(gateway: KeptGateway) -> dict[str, bytes]:
    """Return the answer to each case."""
    found = {}
    for case in CASES:
        reader = Reader(gateway.port, at_once=1 << 16)
        answer = reader.ask(case, closes=True)
        if not answer.head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{case.name}: {answer.head!r} {answer.body!r}")
        found[case.name] = answer.body
        reader.close()
    return found


def states_of_jobs(url: str) -> Counter[str]:
    """Return how many jobs the queue has in each state, ended ones too."""
    found, after = dict[str, str](), ""
    while True:
        page = httpx.get(f"{url}/v1/jobs?limit=100{after}", timeout=60).json()
        found |= {job["id"]: job["state"] for job in page["data"]}
        if not page["has_more"]:
            return Counter(found.values())
        after = f"&after={page['next']}"


def num_jobs_of(url: str) -> int:
    """Return how many jobs the queue has, with their ends."""
    return states_of_jobs(url).total()


class Ends:
    """How the gateways of a campaign end, one after the other."""

    def __init__(self, gateway: KeptGateway, *, reloads: bool, releases: LinkedReleases | None = None) -> None:
        """`reloads`: all by SIGHUP, else each tenth one. `releases`: each reload switches to the other release."""
        self._gateway, self._reloads, self._releases = gateway, reloads, releases
        self.versions = list[str]()
        """Releases to which it has switched."""
        self.killed_s, self.reloaded_s = list[float](), list[float]()

    @property
    def number(self) -> int:
        """How many have ended."""
        return len(self.killed_s) + len(self.reloaded_s)

    def next(self) -> None:
        """End the gateway, and wait for the next one."""
        number = self.number
        if self._releases is not None:
            self.versions.append(self._releases.switch())
        if self._reloads or number % 10 == 9:
            self.reloaded_s.append(self._gateway.reload())
        else:
            self.killed_s.append(self._gateway.kill(guard=number % 5 == 4))
        self._gateway.wait_until_it_serves_again()


def versions_in(log: Iterable[str]) -> list[str]:
    """Return the releases of the keepers that say that they serve again."""
    return re.findall(r'serves again, with its keeper", "release": "([^"]+)"', "\n".join(log))


def run(
    kills: int,
    each: int,
    seed: int,
    *,
    fast: bool = False,
    reloads: bool = False,
    upgrades: bool = False,
    minutes: float = 60.0,
) -> dict[str, Any]:
    """Run the campaign, and return what was measured and violated. `each`: readers of each kind.

    `reloads`: restart the gateways by SIGHUP instead of killing them. `upgrades`: and switch to another release and
    back. `minutes`: the time after which no further gateway ends.
    """
    random.seed(seed)
    folder = Path(tempfile.mkdtemp(prefix="penstock-kills-"))
    with RedisProcess(folder) as server:
        stack, engine = Stack(server.url), EchoEngine()
        stack.start_node(engine, model=MODEL, pool="echo")
        releases = LinkedReleases(folder / "releases") if upgrades else None
        gateway = KeptGateway(server.url, start=started if releases is None else releases.start)
        ends = Ends(gateway, reloads=reloads or upgrades, releases=releases)
        try:
            campaign = Campaign(gateway, undisturbed(gateway))
            jobs_before = num_jobs_of(gateway.url)
            engine.step_s = STEP_S
            threads = [threading.Thread(target=one) for one in campaign.readers(each=each)]
            for thread in threads:
                thread.start()
            until_s = time.monotonic() + 60 * minutes
            while ends.number < kills and time.monotonic() < until_s:
                time.sleep(random.uniform(0.5, 1.5 if fast else 4.0))
                ends.next()
            campaign.stops.set()
            for thread in threads:
                thread.join()
            time.sleep(1)
            states = states_of_jobs(gateway.url)
            jobs = states.total() - states["cancelled"] - jobs_before
            metrics = httpx.get(f"{gateway.url}/metrics", timeout=60).text
            time.sleep(1)
            descriptors = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (gateway.process.pid, gateway.pids()[1])]
        finally:
            gateway.close()
            stack.close()
    shutil.rmtree(folder, ignore_errors=True)
    streams = [one for one in campaign.silences if not one.is_whole]
    whole = [one for one in campaign.silences if one.is_whole]
    pauses = pauses_of(streams, ends.killed_s)
    unkept = re.findall(r'penstock_http_unkept_answers_total\{reason="(\w+)"\} (\S+)', metrics)
    return {
        "ends": ends.number,
        "kills": len(ends.killed_s),
        "switched_to": ends.versions,
        "served_again": versions_in(gateway.log),
        "answers": sum(campaign.counts.values()),
        "counts": dict(sorted(campaign.counts.items())),
        "jobs": jobs,
        "requests_jobs": campaign.num_jobs,
        "closed_without_a_byte_and_a_job": campaign.num_closed,
        "refused": campaign.num_refused,
        "jobs_cancelled": states["cancelled"],
        "violations": campaign.violations,
        "pauses": len(pauses),
        "pause_s": p50_and_p99(pauses),
        "pause_of_whole_answers_s": p50_and_p99(pauses_of(whole, ends.killed_s)),
        "pause_by_sighup_s": p50_and_p99(pauses_by_reloads(streams, ends.reloaded_s)),
        "descriptors_of_keeper_and_gateway": descriptors,
        "unkept": unkept,
        "log": gateway.log,
    }


def note(row: str, found: Mapping[str, Any]) -> None:
    """Record what a campaign found."""
    measured: dict[str, Measurement] = {
        "ends of a gateway, kills among them": f"{found['ends']}, {found['kills']}",
        "answers, each complete and equal": found["answers"],
        "jobs, and those that the answers needed": f"{found['jobs']}, {found['requests_jobs']}",
        "closed without a byte and a job": found["closed_without_a_byte_and_a_job"],
        "refused": found["refused"],
        "streams: from a kill to the next byte, p50, p99 (s)": found["pause_s"],
        "whole answers: to the first byte": found["pause_of_whole_answers_s"],
        "streams, by SIGHUP": found["pause_by_sighup_s"],
    }
    record("Gateways with a keeper", row, measured)


def main() -> None:
    """Run the campaign as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--readers", type=int, default=4, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fast", action="store_true", help="kill soon after each start")
    parser.add_argument("--reloads", action="store_true", help="restart by SIGHUP instead of killing")
    parser.add_argument("--upgrades", action="store_true", help="restart by SIGHUP with another release, and back")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further gateway ends")
    parser.add_argument("--log", type=Path, help="file for the gateways' log")
    parser.add_argument("--record", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    how = {"fast": given.fast, "reloads": given.reloads, "upgrades": given.upgrades, "minutes": given.minutes}
    found = run(given.kills, given.readers, given.seed, **how)
    log = found.pop("log")
    if given.log:
        given.log.write_text("\n".join(log))
    print(json.dumps(found, indent=2))
    is_switched = not given.upgrades or found["switched_to"] == found["served_again"]
    if found["jobs_cancelled"] > found["refused"]:
        found["violations"].append("more jobs were canceled than requests refused")
    if found["violations"] or found["jobs"] != found["requests_jobs"] or not is_switched:
        sys.exit("violated")
    if given.record:
        row = "upgraded, and back" if given.upgrades else "restarted by SIGHUP" if given.reloads else "killed"
        note(f"{row}; {given.readers} readers of each kind", found)


if __name__ == "__main__":
    main()
