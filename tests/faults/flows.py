"""`python -m faults.flows`: random flows run to their ends while everything that runs them is killed.

Each row must end once, as a model says that knows only the rows, and with the text that its parents' texts give. Some
flows are paused for a while, and some are cancelled: their rows end once too. Engines fail at tokens, and the rows are
tried again. It prints what was violated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from fakes.processes.reference_engine import reference_tokens, text_of
from faults.tools.backlog_view import audited
from faults.tools.batch_kills import Api
from faults.tools.redis_process import RedisProcess
from faults.tools.soak_kills import Fleet

from penstock.contract.job import SamplingParams
from penstock.queue.broker.connection import connect
from penstock.queue.files.batch import FLOW_ENDPOINT
from penstock.queue.files.records_audit import audit_files

POOL = "flows"
URL = "/v1/completions"
MAX_TOKENS = 8
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
ENDED = frozenset(("completed", "failed", "cancelled", "expired"))
ATTEMPTS = {"max_attempts": 8, "retry_backoff_s": 0.05}
"""Of each row. A row whose engine fails goes on after its last token, so it is practically never out of attempts."""
_BETWEEN = "\n\n"
_SHOWN = 3
_DAY_MS = 86_400_000


@dataclass(slots=True)
class RandomFlow:
    """The rows of a flow, and what is done to it: nothing, `pause` or `cancel`."""

    rows: list[dict[str, Any]]
    action: str
    id: str = ""

    def ends(self) -> dict[str, tuple[str, str]]:
        """Return how each row ends, and its text."""
        found: dict[str, tuple[str, str]] = {}
        for row in self.rows:
            name, parents = row["custom_id"], [found[parent] for parent in row["after"]]
            ends, rule = {end for end, _ in parents}, row["on_failure"]
            if rule != "continue" and "failed" in ends:
                found[name] = ("failed" if rule == "fail" else "skipped", "")
            elif rule != "continue" and "skipped" in ends:
                found[name] = ("skipped", "")
            elif row["body"]["temperature"] < 0:
                found[name] = ("failed", "")
            else:
                texts = _BETWEEN.join(text for end, text in parents if end == "succeeded")
                prompt = row["body"]["prompt"].replace("{{*.text}}", texts).encode()
                found[name] = ("succeeded", text_of(reference_tokens("", PARAMS, list(prompt))))
        return found

    def problems(self, status: str, lines: list[dict[str, Any]]) -> list[str]:
        """Return what contradicts the model."""
        wanted, counts = self.ends(), Counter(line["custom_id"] for line in lines)
        lists = {
            "missing": [name for name in wanted if name not in counts],
            "repeated": [name for name, number in counts.items() if number > 1],
            "wrong": [line["custom_id"] for line in lines if not self._is_right(line, wanted.get(line["custom_id"]))],
        }
        found = [
            f"{len(names)} rows of {self.id} are {what}: {names[:_SHOWN]}" for what, names in lists.items() if names
        ]
        allowed = {"completed", "cancelled"} if self.action == "cancel" else {"completed"}
        return found + ([f"{self.id} is {status}"] if status not in allowed else [])

    def _is_right(self, line: dict[str, Any], wanted: tuple[str, str] | None) -> bool:
        if line["error"] is None:
            return wanted == ("succeeded", line["response"]["body"]["choices"][0]["text"])
        if line["error"]["code"] == "batch_cancelled":
            return self.action == "cancel"
        return wanted is not None and wanted[0] == ("skipped" if line["error"]["code"] == "row_skipped" else "failed")


def random_flow(rng: random.Random, max_rows: int) -> RandomFlow:
    """Return a flow of up to `max_rows` rows: long chains, wide fans and all between."""
    rows, reach = list[dict[str, Any]](), rng.choice((1, 3, 20, max_rows))
    for number in range(rng.randint(1, max_rows)):
        near = rows[-reach:]
        after = [row["custom_id"] for row in rng.sample(near, min(len(near), rng.choice((0, 1, 1, 2, 5))))]
        # A text of the reference engine depends on the last letter of its prompt.
        prompt = f"row {number}" + (" {{*.text}}" if after else "")
        body = {"model": POOL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0}
        if rng.random() < 0.02:
            body["temperature"] = -1
        fields = {"after": after, "on_failure": rng.choice(("fail", "skip", "continue"))}
        rows.append({"custom_id": f"row-{number}", "method": "POST", "url": URL, "body": body, **fields})
    return RandomFlow(rows, rng.choice(("", "", "", "pause", "cancel")))


async def submit(api: Api, flow: RandomFlow, name: str) -> None:
    """Store the rows, and make the flow."""
    # The input's order is no hint: parents may follow their children.
    content = "".join(json.dumps(row) + "\n" for row in reversed(flow.rows)).encode()
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("flow.jsonl", content)}}
    file = await api("POST", "/v1/files", headers={"Idempotency-Key": f"file {name}"}, **form)
    body = {"input_file_id": file.json()["id"], "endpoint": FLOW_ENDPOINT, "completion_window": "24h", **ATTEMPTS}
    flow.id = (await api("POST", "/v1/batches", json=body, headers={"Idempotency-Key": name})).json()["id"]


async def act(api: Api, flow: RandomFlow, rng: random.Random) -> None:
    """Pause and resume the flow, or cancel it, unless it has ended before."""
    await asyncio.sleep(rng.uniform(0.5, 5))
    for action, pause_s in {"pause": [("pause", 3.0), ("resume", 0.0)], "cancel": [("cancel", 0.0)]}.get(
        flow.action, []
    ):
        batch = (await api("GET", f"/v1/batches/{flow.id}")).json()
        if batch["status"] in ENDED | {"finalizing"}:
            return
        try:
            async with asyncio.timeout(30):
                await api("POST", f"/v1/batches/{flow.id}/{action}")
        except TimeoutError:
            return
        await asyncio.sleep(pause_s)


async def ended(api: Api, flow: RandomFlow, until_s: float) -> list[str]:
    """Wait for the end of the flow, and return what is wrong with it."""
    while (batch := (await api("GET", f"/v1/batches/{flow.id}")).json())["status"] not in ENDED:
        if time.monotonic() > until_s:
            return [f"{flow.id} has not ended: {batch['status']}, {batch['request_counts']}, {batch['waiting']}"]
        await asyncio.sleep(0.5)
    lines = list[dict[str, Any]]()
    for name in ("output_file_id", "error_file_id"):
        if batch[name] is not None:
            content = (await api("GET", f"/v1/files/{batch[name]}/content")).text
            lines += map(json.loads, content.splitlines())
    if flow.action == "cancel" and batch["status"] == "cancelled" and not batch["request_counts"]["total"]:
        # It was canceled before its input was checked, so it has no rows.
        return [f"{flow.id} has {len(lines)} lines and no rows"] if lines else []
    return flow.problems(batch["status"], lines)


async def kill(fleet: Fleet, rng: random.Random, number: int, every_s: float) -> Counter[str]:
    """Kill one process after another."""
    killed = Counter[str]()
    for _ in range(number):
        await asyncio.sleep(rng.uniform(0.3, 1.7) * every_s)
        kind = rng.choice(("gateway", "gateway", "node", "redis"))
        await getattr(fleet, f"kill_{kind}")(rng)
        killed[kind] += 1
    return killed


async def run(args: argparse.Namespace) -> list[str]:
    """Run all flows, some at once. Return what is wrong."""
    rng = random.Random(args.seed)
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="flows-") as name:
        folder = Path(name)
        with (
            mock.patch.dict(os.environ, {"PENSTOCK_FILES_URL": str(folder / "files")}),
            RedisProcess(folder / "redis") as server,
        ):
            shape = {"log_jobs": False, "max_num_seqs": 32, "step_s": args.step_s, "result_ttl_ms": _DAY_MS}
            shape |= {"idem_ttl_ms": _DAY_MS, "error_share": args.error_share, "avoid_ms": 0}
            fleet = Fleet(server, POOL, num_nodes=2, num_gateways=2, keeps_ports=True, **shape)
            try:
                await fleet.start()
                found = await _run_flows(args, fleet, rng)
                async with connect(server.url) as redis:
                    found += await audited(redis, POOL)
                    found += [f"audit of files: {finding}" for finding in await audit_files(redis) or []]
            finally:
                fleet.close()
    print("\n".join(f"  VIOLATION {problem}" for problem in found) or "  nothing violated", flush=True)
    return found


async def _run_flows(args: argparse.Namespace, fleet: Fleet, rng: random.Random) -> list[str]:
    found, num_rows, killed = list[str](), 0, Counter[str]()
    async with httpx.AsyncClient(timeout=120) as http:
        api = Api(fleet, http)
        for first in range(0, args.flows, args.at_once):
            flows = [random_flow(rng, args.rows) for _ in range(min(args.at_once, args.flows - first))]
            num_rows += sum(len(flow.rows) for flow in flows)
            await asyncio.gather(*(submit(api, flow, f"{first}-{at}") for at, flow in enumerate(flows)))
            kills = asyncio.create_task(kill(fleet, rng, args.kills, args.every))
            await asyncio.gather(*(act(api, flow, rng) for flow in flows))
            until_s = time.monotonic() + args.patience_s
            for problems in await asyncio.gather(*(ended(api, flow, until_s) for flow in flows)):
                found += problems
            killed += await kills
            print(
                f"{time.strftime('%H:%M:%S')} {first + len(flows)} flows, {num_rows} rows, {dict(killed)}", flush=True
            )
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    one = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one.add_argument("--flows", type=int, default=100)
    one.add_argument("--at-once", type=int, default=10)
    one.add_argument("--rows", type=int, default=500)
    one.add_argument("--kills", type=int, default=6, help="during each of the groups of flows that run at once")
    one.add_argument("--every", type=float, default=4.0, help="seconds between two kills, on average")
    one.add_argument("--patience-s", type=float, default=600.0)
    one.add_argument("--step-s", type=float, default=0.01)
    one.add_argument("--error-share", type=float, default=0.02, help="of the tokens at which an engine fails")
    one.add_argument("--seed", type=int, default=secrets.randbits(32))
    return one


def main() -> None:
    """Run the campaign. The exit status tells whether anything was violated."""
    found = asyncio.run(run(parser().parse_args()))
    sys.exit(f"{len(found)} violations" if found else 0)


if __name__ == "__main__":
    main()
