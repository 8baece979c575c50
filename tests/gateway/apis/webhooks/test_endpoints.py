"""Webhook endpoints as OpenAI's client uses them, and the deliveries that jobs and responses cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fakes.scrapes import scraped
from fakes.waiting import Deadline, wait_until
from fakes.webhook_receiver import ALLOWED, Received, Reply, WebhookReceiver
from openai.types.webhooks import WebhookEndpointWithSecret
from standardwebhooks import Webhook

from penstock.contract.errors import RequestError
from penstock.contract.webhook import EVENT_TYPES
from penstock.gateway.apis.webhooks import deliverer
from penstock.producer.client import Client
from tests.gateway.conftest import MODEL, EchoEngine, Stack

Create = Callable[..., WebhookEndpointWithSecret]


@pytest.fixture(scope="module")
def url(stack: Stack, shared_engine: EchoEngine) -> Iterator[str]:
    """A gateway that may deliver to this machine, and looks often for what is due."""
    settings: dict[str, Any] = {**ALLOWED}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(deliverer, "LOOK_S", 0.05)
        patched.setattr(deliverer, "IDLE_LOOK_S", 0.05)
        yield stack.start_gateway(**settings, webhook_retry_s=0.05, webhook_timeout_s=1.0)


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as receiver:
        yield receiver


@pytest.fixture
def create(api: openai.OpenAI, receiver: WebhookReceiver) -> Iterator[Create]:
    """Create endpoints that are deleted after the test."""
    made = []

    def create(path: str = "/hook", events: Any = EVENT_TYPES) -> WebhookEndpointWithSecret:
        endpoint = api.webhooks.create(url=receiver.url(path), name="a test", event_types=list(events))
        made.append(endpoint.id)
        return endpoint

    yield create
    for endpoint_id in made:
        api.webhooks.delete(endpoint_id)


def check_signature(received: Received, secret: str) -> None:
    """Raise unless the libraries of Standard Webhooks, OpenAI and Anthropic accept the signature."""
    Webhook(secret).verify(received.body, dict(received.headers))
    anthropic.Anthropic(api_key="none").beta.webhooks.unwrap(
        received.body.decode(), headers=dict(received.headers), key=secret
    )
    openai.OpenAI(api_key="none").webhooks.verify_signature(received.body, dict(received.headers), secret=secret)


def submitted(http: httpx.Client, **body: Any) -> str:
    answer = http.post("/v1/jobs", json={"model": MODEL, "prompt": "hello", **body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def deliveries(http: httpx.Client, endpoint_id: str, status: str) -> list[dict[str, Any]]:
    answer = http.get(f"/v1/webhook_endpoints/{endpoint_id}/deliveries", params={"status": status, "limit": 100})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


def wait_for(http: httpx.Client, endpoint_id: str, status: str, count: int = 1) -> list[dict[str, Any]]:
    return wait_until(lambda: deliveries(http, endpoint_id, status), lambda found: len(found) >= count)


def test_openai_client_creates_lists_updates_and_deletes_endpoints(api: openai.OpenAI, create: Create) -> None:
    one, other = create("/one", ["response.completed"]), create("/other")
    assert one.signing_secret.startswith("whsec_")
    assert (one.name, one.event_types, one.object) == ("a test", ["response.completed"], "webhook_endpoint")
    assert [endpoint.id for endpoint in api.webhooks.list(limit=1)] == [one.id, other.id]
    shown = api.webhooks.retrieve(one.id)
    assert (shown.url, shown.signing_secret_hint) == (one.url, one.signing_secret_hint)
    assert one.signing_secret not in shown.to_json()
    changed = api.webhooks.update(one.id, name="another name", event_types=["batch.failed"])
    assert (changed.name, changed.event_types, changed.url) == ("another name", ["batch.failed"], one.url)
    assert api.webhooks.event_types.list().data == list(EVENT_TYPES)
    with pytest.raises(openai.NotFoundError, match="no webhook endpoint"):
        api.webhooks.retrieve("we_0000000000000000")


def test_end_of_a_job_reaches_the_endpoint_that_it_names(
    http: httpx.Client, create: Create, receiver: WebhookReceiver
) -> None:
    one, other = create("/one"), create("/other")
    secrets = {"/one": one.signing_secret, "/other": other.signing_secret}
    submitted(http)
    job_id = submitted(http, webhooks=[one.id, other.id])
    arrived = receiver.wait_for(2)
    assert {one.path for one in arrived} == {"/one", "/other"}
    for received in arrived:
        check_signature(received, secrets[received.path])
        with pytest.raises(Exception, match="No matching"):
            Webhook(secrets["/one" if received.path == "/other" else "/other"]).verify(
                received.body, dict(received.headers)
            )
        event = received.event
        assert (event["type"], event["object"], event["data"]) == ("job.succeeded", "event", {"id": job_id})
        assert event["id"] == received.headers["webhook-id"]
        assert abs(event["created_at"] - time.time()) < 60
        assert b"hello" not in received.body
    (delivered,) = wait_for(http, one.id, "delivered")
    assert (delivered["attempts"], delivered["answer"], delivered["data"]) == (1, "status 204", {"id": job_id})
    job = http.get(f"/v1/jobs/{job_id}").json()
    assert job["webhooks"] == [one.id, other.id]
    time.sleep(0.3)
    assert len(receiver.received) == 2


def test_each_end_of_a_job_is_its_own_event(http: httpx.Client, create: Create, receiver: WebhookReceiver) -> None:
    endpoint = create()
    job_id = submitted(http, webhooks=[endpoint.id], not_before_s=600)
    http.delete(f"/v1/jobs/{job_id}").raise_for_status()
    expired = submitted(http, webhooks=[endpoint.id], not_before_s=0.1, ttl_s=0.2, prompt="x" * 200)
    types = {one.event["data"]["id"]: one.event["type"] for one in receiver.wait_for(2)}
    assert types[job_id] == "job.cancelled"
    assert types[expired] in ("job.expired", "job.succeeded")
    retried = http.post(f"/v1/jobs/{job_id}/retry").json()["id"]
    assert http.get(f"/v1/jobs/{retried}").json()["webhooks"] == [endpoint.id]
    (again,) = [one for one in receiver.wait_for(3) if one.event["data"]["id"] == retried]
    assert again.event["type"] == "job.succeeded"


def test_unmodified_client_is_told_of_its_background_response(
    api: openai.OpenAI, create: Create, receiver: WebhookReceiver
) -> None:
    endpoint = create(events=["response.completed", "response.incomplete"])
    create("/else", events=["batch.completed"])
    whole = api.responses.create(model=MODEL, input="hello", background=True)
    cut = api.responses.create(model=MODEL, input="hello, hello", background=True, max_output_tokens=16)
    short = api.responses.create(model=MODEL, input="h" * 64, background=True, max_output_tokens=20)
    arrived = receiver.wait_for(3)
    types = {}
    for received in arrived:
        check_signature(received, endpoint.signing_secret)
        event = api.webhooks.unwrap(received.body, dict(received.headers), secret=endpoint.signing_secret)
        types[event.data.id] = event.type  # type: ignore[union-attr]
    assert types == {whole.id: "response.completed", cut.id: "response.completed", short.id: "response.incomplete"}
    assert {one.path for one in arrived} == {"/hook"}
    api.responses.create(model=MODEL, input="hello")
    api.responses.create(model=MODEL, input="hello", background=True, extra_body={"webhooks": []})
    time.sleep(0.3)
    assert len(receiver.received) == 3


def test_webhooks_of_a_response_need_a_stored_one(http: httpx.Client, create: Create) -> None:
    body = {"model": MODEL, "input": "hello", "store": False, "webhooks": [create().id]}
    answer = http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhooks")


@pytest.mark.parametrize(
    ("webhooks", "code"),
    [(["we_0000000000000000"], "webhook_endpoint_not_found"), (["hook"], "invalid_request"), (["x"] * 4, None)],
)
def test_unknown_and_wrong_endpoints_of_a_job_are_refused(http: httpx.Client, webhooks: list[str], code: str) -> None:
    answer = http.post("/v1/jobs", json={"model": MODEL, "prompt": "hello", "webhooks": webhooks})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"].partition("[")[0]) == (400, "webhooks"), error
    assert code in (None, error["code"])


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ("ftp://example.com/", "invalid_webhook_url"),
        ("http://user:pass@example.com/", "invalid_webhook_url"),
        ("https://example.com/#part", "invalid_webhook_url"),
        ("https:///path", "invalid_webhook_url"),
        ("https://10.0.0.1/", "forbidden_webhook_url"),
        ("https://169.254.169.254/latest", "forbidden_webhook_url"),
        ("https://[::ffff:10.0.0.1]/", "forbidden_webhook_url"),
        ("https://[fd00:ec2::254]/", "forbidden_webhook_url"),
    ],
)
def test_wrong_and_forbidden_urls_are_refused(http: httpx.Client, wrong: str, code: str) -> None:
    body = {"url": wrong, "name": "a test", "event_types": ["job.failed"]}
    answer = http.post("/v1/webhook_endpoints", json=body)
    assert (answer.status_code, answer.json()["error"]["param"], answer.json()["error"]["code"]) == (400, "url", code)


def test_failed_deliveries_are_repeated_with_the_same_id_until_one_is_accepted(
    http: httpx.Client, create: Create, receiver: WebhookReceiver
) -> None:
    replies = iter([Reply(500), Reply(302, {"location": receiver.url("/elsewhere")}), Reply(dies=True), Reply(200)])
    receiver.reply = lambda _: next(replies)
    endpoint = create()
    submitted(http, webhooks=[endpoint.id])
    arrived = receiver.wait_for(4)
    assert len({one.headers["webhook-id"] for one in arrived}) == 1
    assert {one.path for one in arrived} == {"/hook"}
    for received in arrived:
        check_signature(received, endpoint.signing_secret)
    (delivered,) = wait_for(http, endpoint.id, "delivered")
    assert (delivered["attempts"], delivered["answer"]) == (4, "status 200")


def test_retry_after_is_honored(http: httpx.Client, create: Create, receiver: WebhookReceiver) -> None:
    times = list[float]()

    def reply(_: Received) -> Reply:
        times.append(time.monotonic())
        return Reply(503, {"retry-after": "1"}) if len(times) == 1 else Reply()

    receiver.reply = reply
    submitted(http, webhooks=[create().id])
    receiver.wait_for(2)
    assert 0.95 < times[1] - times[0] < 5


def test_gone_receiver_disables_its_endpoint_and_dead_events_are_delivered_later(
    http: httpx.Client, create: Create, receiver: WebhookReceiver
) -> None:
    receiver.reply = lambda _: Reply(410)
    endpoint = create()
    submitted(http, webhooks=[endpoint.id])
    wait_for(http, endpoint.id, "dead")
    shown = http.get(f"/v1/webhook_endpoints/{endpoint.id}").json()
    assert (shown["status"], shown["disabled_reason"]) == ("disabled", "its receiver answered with status 410")
    submitted(http, webhooks=[endpoint.id])
    dead = wait_for(http, endpoint.id, "dead", 2)
    assert [one["answer"] for one in dead] == ["the endpoint is disabled", "status 410"]
    assert len(receiver.received) == 1

    receiver.reply = lambda _: Reply(200)
    path = f"/v1/webhook_endpoints/{endpoint.id}"
    shown = http.post(path, json={"status": "enabled"}).json()
    assert (shown["status"], shown["disabled_reason"]) == ("enabled", None)
    answer = http.post(f"{path}/deliveries/{dead[0]['event_id']}/redeliver")
    assert (answer.status_code, answer.json()["status"]) == (200, "pending")
    wait_for(http, endpoint.id, "delivered")
    assert http.post(f"{path}/deliveries/redeliver").json()["count"] == 1
    assert len(wait_for(http, endpoint.id, "delivered", 2)) == 2
    assert deliveries(http, endpoint.id, "dead") == []
    check_signature(receiver.wait_for(3)[-1], endpoint.signing_secret)


def test_a_url_that_the_gateway_forbids_ends_its_delivery_and_disables_its_endpoint(
    http: httpx.Client, stack: Stack
) -> None:
    # Another process registered it, such as a gateway with other settings.
    events: Any = ["job.succeeded"]
    with Client(stack.redis_url) as client:
        url, reason = "http://169.254.169.254/x", "the address 169.254.169.254 is not public"
        endpoint, _ = client.webhooks.create(url, name="x", event_types=events, allow_private=True)
        submitted(http, webhooks=[endpoint.id])
        (dead,) = wait_for(http, endpoint.id, "dead")
        assert reason in dead["answer"] and dead["attempts"] == 1
        shown = client.webhooks.get(endpoint.id)
        assert shown.status == "disabled" and reason in str(shown.disabled_reason)
        client.webhooks.delete(endpoint.id)


def test_the_client_refuses_the_addresses_that_the_route_refuses(http: httpx.Client, stack: Stack) -> None:
    events: Any = ["job.succeeded"]
    with Client(stack.redis_url) as client:
        kept, _ = client.webhooks.create("https://example.com/", name="x", event_types=events)
        for url in (
            "http://127.0.0.1:1/x",
            "https://127.0.0.1/",
            "https://169.254.169.254/",
            "https://[::1]/",
            "http://a/",
        ):
            for act in (
                lambda url=url: client.webhooks.create(url, name="x", event_types=events),
                lambda url=url: client.webhooks.update(kept.id, {"url": url}),
            ):
                with pytest.raises(RequestError, match="allow_private") as caught:
                    act()
                assert (caught.value.code, caught.value.param) == ("forbidden_webhook_url", "url")
            made, _ = client.webhooks.create(url, name="x", event_types=events, allow_private=True)
            client.webhooks.delete(made.id)
        client.webhooks.delete(kept.id)


def test_both_secrets_sign_while_the_old_one_is_valid(
    api: openai.OpenAI, create: Create, receiver: WebhookReceiver
) -> None:
    endpoint = create()
    rotated = api.webhooks.rotate_secret(endpoint.id, keep_old_secret_active_for_24_hours=True)
    assert rotated.signing_secret != endpoint.signing_secret
    assert api.webhooks.test(endpoint.id, event_type="batch.completed").status_code == 204
    check_signature(receiver.received[-1], endpoint.signing_secret)
    check_signature(receiver.received[-1], rotated.signing_secret)
    last = api.webhooks.rotate_secret(endpoint.id)
    api.webhooks.test(endpoint.id, event_type="batch.completed")
    check_signature(receiver.received[-1], last.signing_secret)
    for secret in (endpoint.signing_secret, rotated.signing_secret):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            check_signature_of_openai(api, receiver.received[-1], secret)


def check_signature_of_openai(api: openai.OpenAI, received: Received, secret: str) -> None:
    api.webhooks.verify_signature(received.body, dict(received.headers), secret=secret)


def test_a_test_tells_the_status_and_why_there_is_none(
    api: openai.OpenAI, create: Create, receiver: WebhookReceiver
) -> None:
    endpoint = create()
    receiver.reply = lambda _: Reply(418)
    tested = api.webhooks.test(endpoint.id, event_type="response.completed")
    assert (tested.status_code, tested.success, tested.event_type) == (418, False, "response.completed")
    receiver.reply = lambda _: Reply(hang_s=1.5)
    with pytest.raises(openai.BadRequestError, match="no answer within 1 s"):
        api.webhooks.test(endpoint.id, event_type="response.completed")


def test_deleted_endpoint_gets_nothing_more(http: httpx.Client, api: openai.OpenAI, receiver: WebhookReceiver) -> None:
    receiver.reply = lambda _: Reply(500)
    endpoint = api.webhooks.create(url=receiver.url(), name="short", event_types=["job.succeeded"])  # type: ignore[list-item]
    submitted(http, webhooks=[endpoint.id])
    receiver.wait_for(1)
    assert api.webhooks.delete(endpoint.id).deleted
    # The attempt that was under way may end yet. Others would follow each other all the time.
    deadline, number = Deadline(), -1
    while number != len(receiver.received):
        deadline.check("one attempt follows the other")
        number = len(receiver.received)
        time.sleep(0.5)
    assert 'penstock_webhooks_pending{tenant="default"}' not in scraped(http)


def test_metrics_count_deliveries(http: httpx.Client, create: Create, receiver: WebhookReceiver) -> None:
    receiver.reply = lambda _: Reply(503, {"retry-after": "60"})
    endpoint = create()
    submitted(http, webhooks=[endpoint.id])
    receiver.wait_for(1)
    (pending,) = wait_for(http, endpoint.id, "pending")
    assert pending["data"]
    text = scraped(http)
    assert 'penstock_webhooks_pending{tenant="default"} 1.0' in text
    for name in ("delivered", "retried", "dead"):
        assert f"penstock_webhooks_{name}_total " in text
