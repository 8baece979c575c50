"""One gateway, two pools, two Redis: `one` is in the directory, `two` has a Redis of its own (PENSTOCK_POOLS)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fakes.command import run_command
from fakes.scrapes import scraped
from fakes.waiting import until, wait_until
from faults.tools.redis_process import RedisProcess

from penstock.cli.output import EXIT_TRY_AGAIN
from penstock.contract.errors import ConfigError, NotFoundError
from penstock.producer.batch.records import Batch
from penstock.producer.batch.runner import run_batch
from penstock.producer.client import AsyncClient, Client
from penstock.queue import keys
from penstock.runtime.settings import pool_urls, redis_url_of
from tests.gateway.conftest import EchoEngine, Stack

ONE, TWO = "acme/one", "acme/two"
POOLS = {ONE: "one", TWO: "two"}


@dataclass
class Split:
    """Two Redis with a node each, and a gateway of both."""

    directory: RedisProcess
    other: RedisProcess
    stack: Stack
    url: str

    @property
    def pools(self) -> dict[str, str]:
        return {"two": self.other.url}

    def of(self, model: str) -> RedisProcess:
        return self.directory if model == ONE else self.other

    def has(self, model: str, key: str) -> bool:
        with self.of(model).client() as client:
            return bool(client.exists(key))

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)


def split_in(folder: Path) -> Iterator[Split]:
    with (
        RedisProcess(folder / "directory") as directory,
        RedisProcess(folder / "other") as other,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("PENSTOCK_POOLS", f"two={other.url}")
        patched.setenv("PENSTOCK_FILES_URL", str(folder / "files"))
        stack = Stack(directory.url)
        try:
            for model, server in ((ONE, directory), (TWO, other)):
                stack.start_node(EchoEngine(), model=model, pool=POOLS[model], redis_url=server.url)
            yield Split(
                directory,
                other,
                stack,
                stack.start_gateway(webhook_allow_http=True, webhook_allowed_networks=["127.0.0.0/8"]),
            )
        finally:
            stack.close()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    yield from split_in(tmp_path_factory.mktemp("split"))


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Split]:
    """A stack of its own, of which a test kills a Redis."""
    yield from split_in(tmp_path)


@pytest.fixture
def http(split: Split) -> Iterator[httpx.Client]:
    with split.http() as client:
        yield client


def submit(http: httpx.Client, model: str, prompt: str = "abc", **body: Any) -> str:
    answer = http.post("/v1/jobs", json={"model": model, "prompt": prompt, **body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def ended(http: httpx.Client, job_id: str) -> dict[str, Any]:
    return wait_until(
        lambda: http.get(f"/v1/jobs/{job_id}").json(), lambda one: one["state"] not in ("queued", "running")
    )


def complete(http: httpx.Client, model: str) -> httpx.Response:
    return http.post("/v1/completions", json={"model": model, "prompt": "abc", "max_tokens": 3})


# Jobs.


@pytest.mark.parametrize("model", POOLS)
def test_a_job_is_in_the_redis_of_its_pool_and_its_id_finds_it(split: Split, http: httpx.Client, model: str) -> None:
    job_id = submit(http, model)
    assert job_id.startswith(f"{POOLS[model]}.")
    other = TWO if model == ONE else ONE
    assert split.has(model, keys.job(job_id)) and not split.has(other, keys.job(job_id))
    assert ended(http, job_id)["state"] == "succeeded"
    assert '"state":"succeeded"' in http.get(f"/v1/jobs/{job_id}/stream").text
    assert http.post(f"/v1/jobs/{job_id}/ack").json()["freed"] is True
    waiting = submit(http, model, not_before_s=3600)
    assert http.patch(f"/v1/jobs/{waiting}", json={"priority": "batch"}).status_code in (200, 202)
    assert http.delete(f"/v1/jobs/{waiting}").json()["state"] == "cancelled"
    retried = http.post(f"/v1/jobs/{waiting}/retry")
    assert retried.status_code == 202 and retried.json()["id"].startswith(f"{POOLS[model]}.")


@pytest.mark.parametrize("model", POOLS)
def test_chats_stream_and_responses_are_stored_and_deleted(split: Split, http: httpx.Client, model: str) -> None:
    chat = {"model": model, "messages": [{"role": "user", "content": "né"}], "stream": True}
    assert http.post("/v1/chat/completions", json=chat).text.endswith("data: [DONE]\n\n")
    assert complete(http, model).json()["choices"][0]["text"] == "abc"
    made = http.post("/v1/responses", json={"model": model, "input": "abc", "background": True}).json()["id"]
    job_id = made.removeprefix("resp_")
    assert split.has(model, keys.response(job_id))
    wait_until(lambda: http.get(f"/v1/responses/{made}").json()["status"] == "completed")
    chained = {"model": model, "input": "d", "previous_response_id": made}
    assert http.post("/v1/responses", json=chained).json()["status"] == "completed"
    assert http.delete(f"/v1/responses/{made}").json()["deleted"]
    assert not split.has(model, keys.response(job_id))


def test_models_and_nodes_of_both_are_listed(http: httpx.Client) -> None:
    assert {one["id"] for one in http.get("/v1/models").json()["data"]} >= set(POOLS)
    assert set(http.get("/health/nodes").json()) == {"one", "two"}
    state = http.get("/dashboard").json()
    assert {pool["pool"] for pool in state["pools"]} == {"one", "two"} and "away" not in state
    assert http.get("/health").json() == {"status": "ok", "directory": "ok", "pools": {"two": "ok"}}
    assert http.get("/ready").json() == {"status": "ready", "pools": {"one": "ready", "two": "ready"}}
    text = scraped(http)
    assert 'penstock_pool_redis_up{pool="two"} 1.0' in text
    assert 'penstock_nodes{pool="one"} 1.0' in text and 'penstock_nodes{pool="two"} 1.0' in text


def test_the_list_of_jobs_is_one_in_the_order_of_time(http: httpx.Client) -> None:
    made = [submit(http, model, tags=["listed"]) for model in (ONE, TWO, TWO, TWO, ONE, TWO, ONE)]
    found, after = list[str](), None
    while True:
        query = {"tag": "listed", "limit": "2", **({"after": after} if after else {})}
        page = http.get("/v1/jobs", params=query).json()
        found += [job["id"] for job in page["data"]]
        if (after := page["next"]) is None:
            break
    assert found == made[::-1]
    only = http.get("/v1/jobs", params={"tag": "listed", "pool": "two"}).json()["data"]
    assert [job["id"] for job in only] == [job_id for job_id in made[::-1] if job_id.startswith("two.")]


def test_an_idempotency_key_counts_in_each_pool_by_itself(http: httpx.Client) -> None:
    """The decision of docs/POOLS.md: a key belongs to its pool, so no call asks two Redis."""
    made = {model: submit(http, model, idempotency_key="same") for model in POOLS}
    assert {model: submit(http, model, idempotency_key="same") for model in POOLS} == made
    conflict = http.post("/v1/jobs", json={"model": TWO, "prompt": "other", "idempotency_key": "same"})
    assert conflict.json()["error"]["code"] == "idempotency_conflict"


def test_the_feed_has_the_ends_of_both(http: httpx.Client) -> None:
    with http.stream("GET", "/v1/jobs/events?tag=fed") as answer:
        lines = answer.iter_lines()
        while not next(lines).startswith("data: "):
            pass
        made = {submit(http, model, tags=["fed"]) for model in (ONE, TWO, ONE, TWO)}
        seen = set[str]()
        for line in lines:
            if line.startswith("data: ") and '"job.completion"' in line.replace(" ", ""):
                seen.add(json.loads(line.removeprefix("data: "))["id"])
            if made <= seen:
                break


def test_an_action_on_many_jobs_and_pauses_reach_both(http: httpx.Client) -> None:
    made = [submit(http, model, tags=["many"], not_before_s=3600) for model in (ONE, TWO, TWO)]
    begun = http.post("/v1/jobs/bulk", json={"action": "cancel", "filter": {"tag": "many"}})
    assert begun.status_code in (200, 202), begun.text
    path = f"/v1/jobs/bulk/{begun.json()['id']}"
    wait_until(lambda: http.get(path).json()["state"] != "running")
    assert http.get(path).json()["changed"] == 3
    assert {ended(http, job_id)["state"] for job_id in made} == {"cancelled"}


# What is global, and what is not.


def test_keys_are_global_and_their_limits_and_usage_belong_to_each_pool(mortal: Split) -> None:
    made = run_command("keys", "add", "acme", "--jobs-per-minute", "1", "--redis-url", mortal.directory.url)
    ops = run_command("keys", "add", "ops", "--scope", "admin", "--redis-url", mortal.directory.url)
    with mortal.http(headers={"Authorization": f"Bearer {made.stdout.strip()}"}) as http:
        wait_until(lambda: http.get("/v1/key").json().get("tenant") == "acme")
        for model in POOLS:
            ended(http, submit(http, model))
            refused = http.post("/v1/jobs", json={"model": model, "prompt": "x", "background": False})
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        rows = http.get("/v1/usage").json()["data"]
        assert [(row["pool"], row["jobs"]) for row in rows] == [("one", 1), ("two", 1)]
        first = http.get("/v1/usage", params={"limit": 1}).json()
        second = http.get("/v1/usage", params={"limit": 1, "after": first["next"]}).json()
        assert [page["data"][0]["pool"] for page in (first, second)] == ["one", "two"]
        assert http.get("/v1/usage", params={"pool": "two"}).json()["data"][0]["pool"] == "two"
    assert not mortal.has(TWO, keys.API_KEYS)
    with mortal.http(headers={"Authorization": f"Bearer {ops.stdout.strip()}"}) as admin:
        assert len(admin.get("/v1/jobs", params={"tenant": "acme"}).json()["data"]) == 2
    env = {"PENSTOCK_POOLS": f"two={mortal.other.url}", "PENSTOCK_REDIS_URL": mortal.directory.url}
    listed = json.loads(run_command("keys", "list", "--json", **env).stdout)
    assert {key["tenant"]: key["usage"]["jobs"] for key in listed} == {"acme": 2, "ops": 0}
    used = json.loads(run_command("keys", "usage", "acme", "--json", **env).stdout)
    assert [(row["pool"], row["jobs"]) for row in used] == [("one", 1), ("two", 1)]
    deleted = run_command("tenants", "delete", "acme", "--yes", "--json", **env)
    assert json.loads(deleted.stdout)["num_deleted_jobs"] == 2, deleted.stderr
    assert not mortal.has(TWO, keys.stored("two")) or not mortal.other.client().hgetall(keys.stored("two"))


def test_a_batch_has_rows_of_both(split: Split) -> None:
    api = openai.OpenAI(base_url=f"{split.url}/v1", api_key="none")
    rows = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": f"row {i}"},
        }
        for i, model in enumerate((ONE, TWO, ONE, TWO))
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    file_id = api.files.create(file=("rows.jsonl", lines.encode()), purpose="batch").id
    made = api.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: api.batches.retrieve(made.id).status not in ("validating", "in_progress", "finalizing"))
    batch = api.batches.retrieve(made.id)
    assert (batch.status, batch.request_counts and batch.request_counts.completed) == ("completed", 4), batch


def test_a_webhook_tells_of_ends_in_both(split: Split, http: httpx.Client) -> None:
    from fakes.webhook_receiver import WebhookReceiver

    with WebhookReceiver() as receiver:
        body = {"url": receiver.url(), "name": "ends", "event_types": ["job.succeeded"]}
        made_endpoint = http.post("/v1/webhook_endpoints", json=body)
        assert made_endpoint.is_success, made_endpoint.text
        endpoint = made_endpoint.json()["id"]
        made = {submit(http, model, webhooks=[endpoint]) for model in POOLS}
        wait_until(lambda: made <= {json.loads(one.body)["data"]["id"] for one in receiver.received})
        http.delete(f"/v1/webhook_endpoints/{endpoint}")


# Other entry points.


def test_the_python_clients_route_by_model(split: Split) -> None:
    with Client(split.directory.url, pools=split.pools) as client:
        jobs = [client.submit("abc", model=model, max_tokens=2) for model in (ONE, TWO)]
        assert [job.pool for job in jobs] == ["one", "two"]
        assert {result.text for result in client.as_completed(jobs, timeout=60)} == {"ab"}
        assert client.attach(jobs[1].id).result().text == "ab"
        assert client.ack(*(job.id for job in jobs)) == 2
        assert [result.text for result in client.generate(["ab", "cd"], model=TWO)] == ["ab", "cd"]
        with pytest.raises(NotFoundError, match="is not served"):
            client.submit("abc", model="acme/three")
    with Client(split.directory.url, pools={}) as alone, pytest.raises(NotFoundError):
        alone.submit("abc", model=TWO)


def test_commands_route_by_model(split: Split) -> None:
    env = {"PENSTOCK_POOLS": f"two={split.other.url}", "PENSTOCK_REDIS_URL": split.directory.url}
    for model in POOLS:
        done = run_command("submit", "abc", "--raw", "--max-tokens", "2", "--model", model, "--tag", "typed", **env)
        assert (done.returncode, done.stdout) == (0, "ab\n"), done.stderr
    listed = run_command("jobs", "list", "--tag", "typed", "--json", **env)
    assert {job["id"].partition(".")[0] for job in json.loads(listed.stdout)} == {"one", "two"}
    job_id = next(job["id"] for job in json.loads(listed.stdout) if job["id"].startswith("two."))
    assert json.loads(run_command("jobs", "show", job_id, "--json", **env).stdout)["id"] == job_id
    shown = run_command("pools", "list", "--json", **env).stdout
    assert {pool["pool"] for pool in json.loads(shown)} == {"one", "two"}
    assert run_command("audit", "--pool", "two", **env).stdout == "two: all keys match the jobs\n"


def test_commands_about_all_pools_read_each_redis(split: Split) -> None:
    env = {"PENSTOCK_POOLS": f"two={split.other.url}", "PENSTOCK_REDIS_URL": split.directory.url}
    audited = run_command("audit", **env)
    assert audited.returncode == 0, audited.stderr
    assert {"one: all keys match the jobs", "two: all keys match the jobs"} <= set(audited.stdout.splitlines())
    frame = json.loads(run_command("top", "--json", **env).stdout)
    assert ({pool["pool"] for pool in frame["pools"]}, frame["away"]) == ({"one", "two"}, [])
    alone = json.loads(run_command("top", "--json", "--redis-url", split.other.url, **env).stdout)
    assert [pool["pool"] for pool in alone["pools"]] == ["two"]


def test_doctor_checks_each_redis_and_finds_a_pool_in_the_wrong_one(split: Split) -> None:
    env = {"PENSTOCK_POOLS": f"two={split.other.url}", "PENSTOCK_REDIS_URL": split.directory.url}
    checks = json.loads(run_command("doctor", "--json", **env).stdout)
    at = {check["redis"]: check["finding"] for check in checks if check["finding"].startswith("at ")}
    assert at == {"directory": f"at {split.directory.url}", "two": f"at {split.other.url}"}
    assert [check["redis"] for check in checks if check["subject"] == "node"] == ["directory", "two"]
    assert {check["redis"] for check in checks if check["subject"] in ("GPU", "extra")} == {""}
    env["PENSTOCK_POOLS"] += f" one={split.other.url}"
    warned = [
        check for check in json.loads(run_command("doctor", "--json", **env).stdout) if check["subject"] == "pool"
    ]
    assert [(check["level"], check["redis"]) for check in warned] == [("warn", "directory"), ("warn", "two, one")]
    assert warned[0]["finding"] == "one: 1 live nodes here, but callers look for the pool in another Redis (two, one)"
    assert warned[1]["finding"] == "one: no node has joined it here"


def test_profile_finds_the_node_in_its_redis(split: Split, tmp_path: Path) -> None:
    env = {"PENSTOCK_POOLS": f"two={split.other.url}", "PENSTOCK_REDIS_URL": split.directory.url}
    several = run_command("profile", **env)
    ids = several.stderr.strip().partition("these: ")[2].split(", ")
    assert len(ids) == 2, several.stderr
    command = ("profile", ids[1], "--seconds", "0.1", "--json", "--output", str(tmp_path))
    done = run_command(*command, **env)
    assert done.returncode == 0, done.stderr
    assert f"of pool two in {split.other.url}" in done.stderr
    found = json.loads(done.stdout)
    assert (found["node_id"], found["pool"], found["redis"]) == (ids[1], "two", split.other.url)


async def test_a_batch_file_has_rows_of_both(split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POOLS", f"two={split.other.url}")
    rows = [
        {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": "abc"}}
        for model in POOLS
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    await run_batch(split.directory.url, Batch(str(source), str(output)))
    written = [json.loads(line) for line in output.read_text().splitlines()]
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in written}
    assert texts == dict.fromkeys(POOLS, "abc")


# A Redis dies.


def test_while_the_redis_of_a_pool_is_away_other_pools_go_on(mortal: Split) -> None:
    with mortal.http() as http:
        lost = submit(http, TWO)
        mortal.other.kill()
        for _ in range(20):
            asked_s = time.monotonic()
            assert complete(http, ONE).status_code == 200
            assert time.monotonic() - asked_s < 20.0  # a call of the other one waits for 30 s
        assert http.get("/health").json()["pools"] == {"two": "redis_away"}
        assert http.get("/ready").json()["pools"] == {"one": "ready", "two": "redis_away"}
        assert http.get("/dashboard").json()["away"] == ["two"]
        shown = ('penstock_pool_redis_up{pool="two"} 0.0', 'penstock_nodes{pool="one"} 1.0')
        wait_until(lambda: http.get("/metrics").text, lambda text: all(line in text for line in shown))
        assert set(http.get("/health/nodes").json()) == {"one"}
        for path in ("/v1/jobs", "/v1/usage"):
            error = http.get(path).json()["error"]
            assert error["code"] == "redis_away" and "two" in error["message"], error
            assert http.get(path, params={"pool": "one"}).status_code == 200
        assert http.get(f"/v1/jobs/{lost}").json()["error"]["code"] == "redis_away"
        env = {"PENSTOCK_POOLS": f"two={mortal.other.url}", "PENSTOCK_REDIS_URL": mortal.directory.url}
        done = run_command("submit", "abc", "--model", TWO, **env)
        assert (done.returncode, done.stderr) == (EXIT_TRY_AGAIN, "penstock: the Redis of pool two is unreachable\n")
        frame = json.loads(run_command("top", "--json", **env).stdout)
        assert [pool["pool"] for pool in frame["pools"]] == ["one"] and str(mortal.other.folder) in frame["away"][0]
        audited = run_command("audit", **env)
        assert (audited.returncode, "one: all keys match" in audited.stdout) == (EXIT_TRY_AGAIN, True)
        assert str(mortal.other.folder) in audited.stderr
        checked = run_command("doctor", **env)
        assert (checked.returncode, "two: Redis is unreachable" in checked.stdout) == (1, True), checked.stdout
        assert f"(at {mortal.other.url})" in checked.stdout
        assert f"directory: at {mortal.directory.url}" in checked.stdout
        recorded = run_command(
            "profile", "--seconds", "0.1", "--output", str(mortal.directory.folder / "traces"), **env
        )
        assert (recorded.returncode, "not asked: two, at unix://" in recorded.stderr) == (0, True), recorded.stderr
        absent = run_command("profile", "nobody", **env)
        assert (absent.returncode, "not asked: two, at unix://" in absent.stderr) == (EXIT_TRY_AGAIN, True)
        job_id = submit(http, ONE)
        assert ended(http, job_id)["state"] == "succeeded"
        mortal.other.start()
        wait_until(lambda: http.get("/ready").json()["pools"] == {"one": "ready", "two": "ready"})
        assert complete(http, TWO).status_code == 200
        assert ended(http, lost)["state"] == "succeeded"


def test_a_key_is_revoked_for_all_pools_while_the_redis_of_one_is_away(mortal: Split) -> None:
    env = {"PENSTOCK_POOLS": f"two={mortal.other.url}", "PENSTOCK_REDIS_URL": mortal.directory.url}
    mortal.other.kill()
    made = run_command("keys", "add", "acme", **env).stdout.strip()
    listed = run_command("keys", "list", **env)
    assert (listed.returncode, "that of two" in listed.stderr) == (EXIT_TRY_AGAIN, True), listed.stderr
    assert run_command("keys", "set", "acme", "--label", "shop", **env).returncode == 0
    with mortal.http(headers={"Authorization": f"Bearer {made}"}) as http:
        wait_until(lambda: http.get("/v1/key").json().get("tenant") == "acme")
        assert complete(http, ONE).status_code == 200
        for _ in range(2):
            revoked = run_command("keys", "revoke", "shop", **env)
            assert (revoked.returncode, revoked.stderr[:20]) == (0, "no API key is in use")
        wait_until(lambda: complete(http, ONE).status_code == 401)
        assert complete(http, TWO).status_code == 401
        mortal.other.start()
        wait_until(
            lambda: httpx.get(f"{mortal.url}/ready", timeout=60).json()["pools"] == {"one": "ready", "two": "ready"}
        )
        assert complete(http, TWO).status_code == 401


def test_while_the_directory_is_away_known_keys_are_served_in_other_pools(mortal: Split) -> None:
    made = run_command("keys", "add", "acme", "--redis-url", mortal.directory.url).stdout.strip()
    with mortal.http(headers={"Authorization": f"Bearer {made}"}) as http:
        wait_until(lambda: http.get("/v1/key").json().get("tenant") == "acme")
        assert complete(http, TWO).status_code == 200
        mortal.directory.kill()
        for _ in range(20):
            asked_s = time.monotonic()
            assert complete(http, TWO).status_code == 200
            assert time.monotonic() - asked_s < 20.0  # a call of the other one waits for 30 s
        assert ended(http, submit(http, TWO))["state"] == "succeeded"
        assert http.get("/health").json() == {"status": "ok", "directory": "redis_away", "pools": {"two": "ok"}}
        assert http.get("/ready").json()["pools"] == {"one": "redis_away", "two": "ready"}
        assert (
            httpx.post(f"{mortal.url}/v1/completions", json={"model": TWO, "prompt": "a"}, timeout=60).status_code
            == 401
        )
        revoke = ("keys", "revoke", "acme", "--redis-url", mortal.directory.url)
        assert run_command(*revoke).returncode == EXIT_TRY_AGAIN
        mortal.directory.start()
        wait_until(lambda: http.get("/ready").json()["pools"]["one"] == "ready")
        assert complete(http, ONE).status_code == 200
        assert run_command(*revoke).returncode == 0
        wait_until(lambda: complete(http, TWO).status_code == 401)


async def test_a_client_opens_without_a_pools_redis_and_uses_it_once_it_is_there(mortal: Split) -> None:
    mortal.other.kill()
    async with AsyncClient(mortal.directory.url, pools=mortal.pools) as client:
        assert (await client.submit("abc", model=ONE, max_tokens=1)).pool == "one"
        with pytest.raises(Exception, match="the Redis of pool two is unreachable"):
            await client.submit("abc", model=TWO)
        mortal.other.start()
        await until(client.pools, lambda _: not client.servers.named["two"].is_away)
        assert (await (await client.submit("abc", model=TWO, max_tokens=1)).result()).text == "a"


# Settings.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("two", "'two' is not POOL=URL"),
        ("two=", "'two=' is not POOL=URL"),
        ("redis://user:secret@host", r"'redis://user:\*\*\*@host' is not POOL=URL"),
        ("a/b=redis://host", "'a/b' is not the name of a pool"),
        ("two=redis://a two=redis://b", "pool two is named twice"),
    ],
)
def test_a_wrong_entry_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        pool_urls(text)
    assert caught.value.param == "pools"


def test_a_wrong_url_or_password_of_a_pool_is_told_at_the_start(split: Split) -> None:
    with pytest.raises(ConfigError, match=r"pools: two: .*(invalid|scheme)"):
        AsyncClient(split.directory.url, pools={"two": "http://host"})
    with pytest.raises(ConfigError, match="rejected the credentials"):
        Client(split.directory.url, pools={"two": split.other.url_of("stranger")})


def test_a_file_may_name_the_pools_and_a_node_finds_its_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_POOLS", raising=False)
    secret = tmp_path / "pools"
    secret.write_text("two=redis://b\nthree=redis://c?db=1\n")
    monkeypatch.setenv("PENSTOCK_POOLS_FILE", str(secret))
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://a")
    assert pool_urls() == {"two": "redis://b", "three": "redis://c?db=1"}
    assert [redis_url_of(pool=pool) for pool in ("two", "three", "one")] == ["redis://b", "redis://c?db=1", "redis://a"]
    assert redis_url_of("redis://given", pool="two") == "redis://given"
