"""A command names the Redis that refuses it, what is wrong with the URL, and the remedy."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.command import run_command

from penstock.contract.errors import ConfigError
from penstock.producer.client import AsyncClient
from penstock.queue.broker.connection import connect
from penstock.runtime.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="module")
def guarded_redis() -> Iterator[str]:
    """The URL, without its password `sesame`, of a Redis that requires one."""
    with EmbeddedRedis() as server:

        async def set_password() -> None:
            async with connect(server.url) as redis:
                await redis.config_set("requirepass", "sesame")

        asyncio.run(set_password())
        yield server.url


def _refusal(url: str) -> tuple[int, str]:
    done = run_command("jobs", "list", "--redis-url", url)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.returncode, done.stderr


def test_a_missing_password_is_named(guarded_redis: str) -> None:
    status, line = _refusal(guarded_redis)
    assert line == (
        f"penstock: Redis at {guarded_redis} requires a password, and its URL has none "
        "(redis://USER:PASSWORD@HOST, or redis://:PASSWORD@HOST)\n"
    )
    assert status == 2


def test_a_wrong_password_is_named_and_not_shown(guarded_redis: str) -> None:
    _, line = _refusal(f"{guarded_redis}?password=opened")
    assert line.startswith(f"penstock: Redis at {guarded_redis}?password=*** rejected the credentials")
    assert "opened" not in line


def test_a_missing_database_is_named(guarded_redis: str) -> None:
    _, line = _refusal(f"{guarded_redis}?password=sesame&db=77")
    assert line.startswith(f"penstock: Redis at {guarded_redis}?password=***&db=77 has no database")


def test_a_password_with_special_characters_is_not_shown() -> None:
    _, line = _refusal("redis://:open#sesame@127.0.0.1:6379")
    assert "--redis-url: the port is no number" in line
    assert "%23" in line
    assert "open" not in line


def test_a_client_names_the_redis_that_refuses_it(guarded_redis: str) -> None:
    async def open_client() -> None:
        async with AsyncClient(f"{guarded_redis}?password=opened"):
            pass

    with pytest.raises(ConfigError, match=r"Redis at unix:\S*\*\*\* rejected the credentials"):
        asyncio.run(open_client())


class _TlsServer:
    """Accepts connections, and ends each one after its TLS handshake."""

    def __init__(self, folder: Path) -> None:
        certificate, key = folder / "certificate.pem", folder / "key.pem"
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                self._context.wrap_socket(connection, server_side=True).close()
            except OSError:
                connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(scope="module")
def tls_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    server = _TlsServer(tmp_path_factory.mktemp("tls"))
    yield server.address
    server.close()


def test_an_unknown_certificate_is_named_with_the_remedy(tls_address: str) -> None:
    status, line = _refusal(f"rediss://{tls_address}")
    assert f"no connection to Redis at rediss://{tls_address}: its TLS certificate is not accepted (self" in line
    assert "?ssl_ca_certs=FILE" in line
    assert status == 75


def test_a_url_without_tls_to_a_server_with_tls(tls_address: str) -> None:
    _, line = _refusal(f"redis://{tls_address}")
    assert "its URL begins with rediss://" in line


def test_a_url_with_tls_to_a_redis_without_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _, line = _refusal(f"rediss://127.0.0.1:{silent.getsockname()[1]}")
    assert "if this Redis has no TLS, its URL begins with redis://" in line
