"""`channel`: each API that queues a job publishes it on Redis, where any client reads it as the page says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from celery.signals import worker_shutdown
from fakes.acl_users import OBSERVER, rules_of, with_passwords
from fakes.processes.python_process import run_python
from fakes.served_model import served
from faults.tools.redis_process import RedisProcess, free_port
from redis.exceptions import NoPermissionError

from penstock import Client
from penstock.contract.errors import ConflictError, RequestError
from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.tasks import GENERATE
from penstock.producer.client.job_objects import outcome_object
from penstock.queue import keys
from tests.source_tree import ROOT

pytestmark = pytest.mark.model

PROGRAMS = ROOT / "examples/channels"
CHAT = {"messages": [{"role": "user", "content": "Name three rivers."}]}
SHORT = {"max_tokens": 4, "temperature": 0}
NAMED = {"name": "all.of_us-1", "format": "json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    folder = tmp_path_factory.mktemp("channels")
    (folder / "users.acl").write_text(with_passwords(OBSERVER + rules_of("subscriber")))
    with RedisProcess(folder / "redis", port=free_port(), user="watcher", aclfile=str(folder / "users.acl")) as server:
        yield server


@pytest.fixture(scope="module")
def http(tiny: Path, server: RedisProcess) -> Iterator[httpx.Client]:
    with served(tiny, dtype="bfloat16", redis_url=server.url) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def pool(http: httpx.Client, server: RedisProcess) -> str:
    with Client(server.url) as client:
        return next(iter(client.pools()))


class Heard:
    """What a subscriber hears of the channel with the shared name."""

    def __init__(self, server: RedisProcess, pool: str, name: str = NAMED["name"]) -> None:
        self.channel = f"penstock:{{{pool}}}:channel:default:{name}"
        self._pubsub = redis.Redis.from_url(server.url_of("subscriber")).pubsub()  # type: ignore[no-untyped-call]
        self._pubsub.subscribe(self.channel)
        assert self._pubsub.get_message(timeout=60) is not None

    def job(self) -> tuple[str, str, dict[str, str]]:
        """Return the id, the text and the outcome of the next job that ends."""
        texts = dict[str, str]()
        while True:
            message = self._pubsub.get_message(ignore_subscribe_messages=True, timeout=60)
            assert message is not None
            event = json.loads(message["data"])
            texts[event["id"]] = texts.get(event["id"], "") + event.get("text", "")
            if "outcome" in event:
                return event["id"], texts[event["id"]], event["outcome"]


@pytest.fixture
def heard(server: RedisProcess, pool: str) -> Heard:
    return Heard(server, pool)


DOORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/jobs", {**CHAT, "params": SHORT}),
    ("/v1/jobs", {"url": "/v1/chat/completions", "body": CHAT | SHORT}),
    ("/v1/jobs", {"url": "/v1/completions", "body": {"prompt": "Rivers:", **SHORT, "channel": NAMED}}),
    ("/v1/chat/completions", CHAT | SHORT),
    ("/v1/chat/completions", CHAT | SHORT | {"stream": True}),
    ("/v1/completions", {"prompt": "Rivers:", **SHORT}),
    ("/v1/responses", {"input": "Rivers:", "max_output_tokens": 4, "background": True}),
    ("/v1/responses", {"input": "Rivers:", "max_output_tokens": 4, "store": False}),
    ("/v1/messages", {**CHAT, "max_tokens": 4}),
]


@pytest.mark.parametrize(("path", "body"), DOORS, ids=[f"{path} {[*body][-1]}" for path, body in DOORS])
def test_each_door_publishes_its_job(http: httpx.Client, pool: str, heard: Heard, path: str, body: Any) -> None:
    answer = http.post(path, json={"model": pool, "channel": NAMED} | body)
    assert answer.status_code in (200, 202), answer.text
    job_id, text, outcome = heard.job()
    record = http.get(f"/v1/jobs/{job_id}").json()
    assert (outcome["state"], text) == ("succeeded", record["result"]["choices"][0]["text"])
    assert record["channel"] == heard.channel
    if path == "/v1/jobs":
        assert answer.json()["channel"] == heard.channel


WRONG: list[tuple[Any, str]] = [
    ("xml", "channel"),
    (1, "channel"),
    (["json"], "channel"),
    ({}, "channel.name"),
    ({"name": ""}, "channel.name"),
    ({"name": "n" * 41}, "channel.name"),
    ({"name": "a b"}, "channel.name"),
    ({"name": "a\n"}, "channel.name"),
    ({"name": "a:b"}, "channel.name"),
    ({"name": "a", "format": "xml"}, "channel.format"),
    ({"name": "a", "tenant": "x"}, "channel.tenant"),
]


@pytest.mark.parametrize(("wrong", "param"), WRONG, ids=str)
def test_wrong_channel_is_refused_by_name(http: httpx.Client, pool: str, wrong: Any, param: str) -> None:
    for path, body in (DOORS[0], DOORS[3], DOORS[5], DOORS[7], DOORS[8]):
        answer = http.post(path, json={"model": pool, **body, "channel": wrong})
        said = answer.json()["error"]
        assert (answer.status_code, "channel" in said["message"]) == (400, True), answer.text
        assert said.get("param", param) == param


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages/count_tokens", "/v1/responses/compact"])
def test_doors_without_tokens_have_no_channel(http: httpx.Client, pool: str, path: str) -> None:
    body = {"model": pool, **(CHAT if "messages" in path else {"input": "a"}), "channel": "json"}
    answer = http.post(path, json=body)
    assert (answer.status_code, "channel" in answer.text) == (400, True), answer.text


@pytest.mark.parametrize("off", [False, None])
def test_no_channel_is_one_too(http: httpx.Client, pool: str, off: Any) -> None:
    answer = http.post("/v1/jobs", json={"model": pool, **DOORS[0][1], "channel": off}).json()
    assert "channel" not in answer and "channel" not in http.get(answer["links"]["self"]).json()


def test_jobs_of_a_list_and_of_a_row_publish_too(http: httpx.Client, pool: str, heard: Heard, tmp_path: Path) -> None:
    body = {"model": pool, **CHAT, "params": SHORT}
    outcomes = http.post("/v1/jobs", json=[{**body, "channel": NAMED}, body]).json()["data"]
    assert [one.get("channel") for one in outcomes] == [heard.channel, None]
    assert heard.job()[0] == outcomes[0]["id"]
    row = {"custom_id": "a", "url": "/v1/chat/completions", "body": {**CHAT, **SHORT, "model": pool, "channel": NAMED}}
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", json.dumps(row))}).json()["id"]
    made = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    assert http.post("/v1/batches", json=made).status_code == 200
    assert heard.job()[2]["state"] == "succeeded"


@pytest.mark.parametrize(
    "words", [["--channel", "json:all.of_us-1", "--max-tokens", "4"], ["--jsonl", "rows"]], ids=str
)
def test_the_command_publishes_too(server: RedisProcess, heard: Heard, tmp_path: Path, words: list[str]) -> None:
    rows = tmp_path / "rows"
    row = {"prompt": "Rivers:", "max_tokens": 4, "channel": NAMED}
    line = {"custom_id": "b", "url": "/v1/completions", "body": row}
    rows.write_text(json.dumps(row) + "\n" + json.dumps(line))
    words = [str(rows) if word == "rows" else word for word in words]
    env = os.environ | {"PENSTOCK_REDIS_URL": server.url}
    given = () if "--jsonl" in words else ("Name three rivers.",)
    said = run_python("-m", "penstock", "submit", *given, *words, env=env).stdout
    printed = [json.loads(one) for one in said.splitlines()] if "--jsonl" in words else []
    assert {one["channel"] for one in printed} <= {heard.channel}
    for _ in printed or (1,):
        assert heard.job()[2]["state"] == "succeeded"


def test_wrong_channel_of_the_command_is_refused(server: RedisProcess, pool: str) -> None:
    env = os.environ | {"PENSTOCK_REDIS_URL": server.url}
    run = run_python("-m", "penstock", "submit", "Hi", "--channel", "json:a b", env=env)
    assert run.returncode != 0 and "channel.name" in run.stderr


def test_a_task_of_celery_publishes_too(server: RedisProcess, heard: Heard, pool: str) -> None:
    app = make_app(CelerySettings(broker_url=server.url), server.url)
    task, fields = app.tasks[GENERATE], {**CHAT, **SHORT, "channel": NAMED}
    task.push_request(id="one", args=[], kwargs=fields, called_directly=False, delivery_info={}, headers={})
    answer = task.run(**fields)
    assert heard.job()[1] == answer["choices"][0]["message"]["content"]
    with pytest.raises(RequestError) as caught:
        task.run(**{**fields, "channel": "xml"})
    assert caught.value.param == "channel"
    # A worker's end closes the client that its tasks share.
    worker_shutdown.send(sender=app)
    app.close()


def test_the_python_client_publishes_and_attaches(server: RedisProcess, http: httpx.Client, pool: str) -> None:
    with Client(server.url) as client:
        job = client.submit("Rivers:", channel="json", not_before_s=600)
        assert job.channel == client.status(job.id).channel == f"penstock:{{{pool}}}:channel:default:{job.id}"
        plain = client.submit("Rivers:", not_before_s=600)
        assert plain.channel is None
        heard = Heard(server, pool, plain.id)
        assert client.attach(plain.id, channel="json").channel == heard.channel
        with pytest.raises(ConflictError):
            client.attach(plain.id, channel=True)
        with pytest.raises(RequestError) as caught:
            client.attach(plain.id, channel={"name": "/"})
        assert caught.value.param == "channel.name"
        plain.cancel()
        outcome = client.status(plain.id).outcome
        assert outcome is not None
        assert heard.job() == (plain.id, "", outcome_object(outcome))
        job.cancel()


def test_the_subscriber_hears_its_own_tenant_and_reads_no_key(server: RedisProcess) -> None:
    def may(*command: str) -> bool:
        with redis.Redis.from_url(server.url_of("subscriber"), protocol=2) as client:
            try:
                client.execute_command(*command)
            except NoPermissionError:
                return False
        return True

    job_id = "m.00000000-0000-7000-8000-000000000000"
    mine = [keys.own_channel(job_id, "default"), keys.own_channel("other" + job_id, "default", "orders")]
    pattern = "penstock:{*}:channel:default:*"
    assert [may("SUBSCRIBE", mine[0]), may("SUBSCRIBE", mine[1]), may("PSUBSCRIBE", pattern)] == [True] * 3
    foreign = [keys.own_channel(job_id, tenant, name) for tenant in ("default2", "x") for name in ("", "default")]
    foreign += [keys.inbox_channel("m", "me"), keys.doorbell("m", "n1"), "somebody:else", "*"]
    assert [one for one in foreign for word in ("SUBSCRIBE", "PSUBSCRIBE") if may(word, one)] == []
    refused = [["PUBLISH", mine[0], "x"], ["LRANGE", keys.log(job_id), "0", "-1"], ["GET", keys.record("m")]]
    refused += [["PUBSUB", "CHANNELS"], ["INFO"], ["CONFIG", "GET", "*"], ["EVAL", "return 1", "0"]]
    assert [command for command in refused if may(*command)] == []


# The programs of the page.


@pytest.fixture(scope="module")
def node_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    folder = tmp_path_factory.mktemp("node")
    install = ("npm", "install", "--no-audit", "--no-fund", "--silent", "ioredis@5")
    if subprocess.run(install, cwd=folder, capture_output=True, timeout=200).returncode:
        pytest.skip("npm finds no registry")
    return Path(shutil.copy(PROGRAMS / "read_job.mjs", folder))


@pytest.fixture(scope="module")
def go_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program in Go, built with the redigo of Debian or of Go's module proxy."""
    if shutil.which("go") is None:
        pytest.skip("needs go")
    folder = tmp_path_factory.mktemp("go")
    source = Path(shutil.copy(PROGRAMS / "read_job.go", folder))
    assert subprocess.run(("gofmt", "-l", source), capture_output=True, text=True, timeout=60).stdout == ""
    env = os.environ | {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode"}
    if not Path("/usr/share/gocode/src/github.com/gomodule/redigo").exists():
        env = dict(os.environ)
        for command in (("go", "mod", "init", "read_job"), ("go", "mod", "tidy")):
            if subprocess.run(command, cwd=folder, capture_output=True, timeout=120).returncode:
                pytest.skip("go finds no module proxy")
    for make in (("go", "vet", "read_job.go"), ("go", "build", "-o", "read_job", "read_job.go")):
        subprocess.run(make, cwd=folder, env=env, check=True, timeout=300)
    return folder / "read_job"


@pytest.mark.parametrize("language", ["python", "node", "go"])
@pytest.mark.parametrize("channel", ["json", NAMED], ids=["own", "shared"])
def test_program_of_the_page_prints_the_whole_job(
    server: RedisProcess, http: httpx.Client, pool: str, language: str, channel: Any, request: pytest.FixtureRequest
) -> None:
    if language == "node":
        words = ["node", str(request.getfixturevalue("node_program"))]
    elif language == "go":
        words = [str(request.getfixturevalue("go_program"))]
    else:
        words = [sys.executable, str(PROGRAMS / "read_job.py")]
    body = {"model": pool, **CHAT, "params": {"max_tokens": 30, "temperature": 0}, "channel": channel}
    job = http.post("/v1/jobs", json=body).json()
    http.post("/v1/jobs", json=body)
    env = os.environ | {"REDIS_URL": server.url_of("subscriber"), "PENSTOCK_URL": str(http.base_url).rstrip("/")}
    run = subprocess.run([*words, job["id"], job["channel"]], env=env, capture_output=True, text=True, timeout=100)
    text = http.get(job["links"]["self"]).json()["result"]["choices"][0]["text"]
    assert (run.stdout, run.stderr) == (f"{text}\nsucceeded\n", "")
