"""Which addresses webhooks reach: public ones, what a gateway's settings allow, and only those that were checked."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fakes.webhook_receiver import ALLOWED, Reply, WebhookReceiver

from penstock.contract.errors import RequestError
from penstock.contract.webhook import new_secret
from penstock.gateway.apis.webhooks.sender import (
    AddressGuard,
    ForbiddenUrlError,
    Sender,
    SendError,
    SentAnswer,
    retry_after_of,
)
from penstock.gateway.settings import GatewaySettings

SECRET = new_secret()
FORBIDDEN = (
    *("0.0.0.0", "10.1.2.3", "127.0.0.1", "127.9.9.9", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1"),
    *("169.254.169.254", "169.254.0.1", "168.63.129.16", "100.100.100.200", "192.0.0.192", "224.0.0.1", "198.18.0.1"),
    *("192.88.99.1", "2002:c058:6301::1"),
    *("255.255.255.255", "240.0.0.1", "::", "::1", "::127.0.0.1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1"),
    *("fd00:ec2::254", "ff02::1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "::ffff:169.254.169.254", "64:ff9b::10.0.0.1"),
    *("64:ff9b::169.254.169.254", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:0:0:0:0:5601:101", "2001:db8::1"),
    "host.example",
)
PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "172.32.0.1", "100.128.0.1", "64:ff9b::8.8.8.8")


@pytest.mark.parametrize("address", FORBIDDEN)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not AddressGuard().allows(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    assert AddressGuard().allows(address)


def test_allowed_networks_open_exactly_themselves() -> None:
    guard = AddressGuard(["10.1.0.0/16", "fd00:1::/32"])
    found = {text: guard.allows(text) for text in ("10.1.2.3", "::ffff:10.1.2.3", "10.2.0.1", "fd00:1::5", "fd00:2::5")}
    assert list(found.values()) == [True, True, False, True, False]


def test_wrong_network_is_refused_at_the_start() -> None:
    with pytest.raises(Exception, match="webhook_allowed_networks"):
        GatewaySettings.load(webhook_allowed_networks=("10.0.0.0/33",))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("17", 17),
        ("Wed, 21 Oct 2015 07:28:10 GMT", 10),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0),
        ("soon", 0),
        ("-3", 0),
        ("9" * 30, 0),
        ("", 0),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str, seconds: float) -> None:
    assert retry_after_of(text, 1445412480) == seconds


# Attempts


class Names:
    """Resolves names as a test says. Each answer is used once; the last one stays."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked.append(host)
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as receiver:
        yield receiver


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses to which connections were attempted."""
    found = list[str]()
    original = asyncio.BaseEventLoop.create_connection

    async def create_connection(self: Any, factory: Any, host: Any = None, *args: Any, **kwargs: Any) -> Any:
        found.append(str(host))
        return await original(self, factory, host, *args, **kwargs)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", create_connection)
    return found


async def attempt(url: str, **settings: Any) -> SentAnswer:
    sender = Sender(GatewaySettings.load(**{**ALLOWED, "webhook_timeout_s": 2.0, **settings}))
    try:
        return await sender.send(url, f"evt_{'0' * 32}", "job.failed", "job", 1, [SECRET])
    finally:
        await sender.close()


async def test_name_is_resolved_once_and_connected_where_it_was_checked(
    monkeypatch: pytest.MonkeyPatch, receiver: WebhookReceiver, connected: list[str]
) -> None:
    # A name server of an attacker: first an allowed address, then one inside.
    names = Names(["127.0.0.1"], ["169.254.169.254"])
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    assert (await attempt(f"http://rebinding.example:{receiver.port}/hook")).status == 204
    assert (names.asked, connected) == (["rebinding.example"], ["127.0.0.1"])
    assert receiver.received[0].headers["host"] == f"rebinding.example:{receiver.port}"
    with pytest.raises(SendError, match="no public address"):
        await attempt(f"http://rebinding.example:{receiver.port}/hook")
    assert connected == ["127.0.0.1"]


async def test_forbidden_addresses_among_those_of_a_name_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, receiver: WebhookReceiver, connected: list[str]
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Names(["10.0.0.1", "127.0.0.1"]).getaddrinfo)
    assert (await attempt(f"http://both.example:{receiver.port}/hook")).status == 204
    assert connected == ["127.0.0.1"]


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "localhost", "[::ffff:127.0.0.1]", "127.0.0.1"])
async def test_no_spelling_of_a_forbidden_address_is_connected(
    host: str, receiver: WebhookReceiver, connected: list[str]
) -> None:
    with pytest.raises((SendError, RequestError)):
        await attempt(f"http://{host}:{receiver.port}/hook", webhook_allowed_networks=())
    assert (connected, receiver.received) == ([], [])


async def test_many_first_attempts_read_the_certificates_once(
    monkeypatch: pytest.MonkeyPatch, receiver: WebhookReceiver
) -> None:
    create = Mock(wraps=ssl.create_default_context)
    monkeypatch.setattr(ssl, "create_default_context", create)
    sender = Sender(GatewaySettings.load(**ALLOWED))
    try:
        event = f"evt_{'0' * 32}", "job.failed", "job", 1, [SECRET]
        answers = await asyncio.gather(*(sender.send(receiver.url(), *event) for _ in range(10)))
    finally:
        await sender.close()
    assert [answer.status for answer in answers] == [204] * 10
    assert create.call_count == 1


async def test_redirects_are_not_followed(receiver: WebhookReceiver) -> None:
    receiver.reply = lambda _: Reply(307, {"location": receiver.url("/inside")})
    assert (await attempt(receiver.url())).status == 307
    assert [one.path for one in receiver.received] == ["/hook"]


async def test_plain_http_needs_a_setting(receiver: WebhookReceiver, connected: list[str]) -> None:
    with pytest.raises(ForbiddenUrlError, match="https"):
        await attempt(receiver.url(), webhook_allow_http=False)
    assert connected == []


async def test_proxies_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, receiver: WebhookReceiver
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert (await attempt(receiver.url())).status == 204


async def serving(answer: Any) -> asyncio.Server:
    return await asyncio.start_server(answer, "127.0.0.1", 0)


@pytest.mark.parametrize("kind", ["silent", "endless head", "endless information", "slow"])
async def test_answer_is_bounded_in_time_and_size(kind: str) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while kind != "silent":
                if kind == "endless head":
                    writer.write(b"HTTP/1.1 200 OK\r\nx: " + b"x" * (1 << 20))
                elif kind == "endless information":
                    writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
                else:
                    writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.01)
            await asyncio.sleep(10)
        except OSError:
            pass
        finally:
            writer.close()

    server = await serving(answer)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(5):
        with pytest.raises(SendError, match=r"no answer within 1 s|the connection failed"):
            await attempt(f"http://127.0.0.1:{port}/", webhook_timeout_s=1.0)
    server.close()


async def test_body_of_an_answer_is_not_read() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n" + b"x" * 1000)
        try:
            await asyncio.sleep(10)
        finally:
            writer.close()

    server = await serving(answer)
    assert (await attempt(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")).status == 200
    server.close()


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for hook.example, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    subject = ["-subj", "/CN=hook.example", "-addext", "subjectAltName=DNS:hook.example"]
    subprocess.run([*made, *subject, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


@pytest.mark.parametrize(("host", "is_accepted"), [("hook.example", True), ("other.example", False)])
async def test_certificate_is_checked_for_the_name_of_the_url(
    monkeypatch: pytest.MonkeyPatch, certificate: tuple[Path, Path], host: str, is_accepted: bool
) -> None:
    seen = list[str | None]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    # The suite remembers contexts (conftest.py), and this one is to trust another certificate.
    fresh = ssl.create_default_context.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(ssl, "create_default_context", fresh)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    context.sni_callback = lambda _, name, __: seen.append(name)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    monkeypatch.setattr(socket, "getaddrinfo", Names(["127.0.0.1"]).getaddrinfo)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    url = f"https://{host}:{server.sockets[0].getsockname()[1]}/"
    if is_accepted:
        assert (await attempt(url, webhook_allow_http=False)).status == 200
    else:
        with pytest.raises(SendError, match="the connection failed"):
            await attempt(url, webhook_allow_http=False)
    assert seen == [host]
    server.close()
    await server.wait_closed()
