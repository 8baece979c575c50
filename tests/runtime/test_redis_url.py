"""URLs of Redis behind Sentinel: what is read, what is refused by name, and what Celery gets."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from redis import exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from penstock.contract.errors import ConfigError
from penstock.producer.batch.celery_app import celery_places, make_app
from penstock.producer.batch.settings import CelerySettings
from penstock.runtime.redis_url import AllSentinels, SentinelUrl, sentinel_url_of
from penstock.runtime.settings import without_password

URL = "redis+sentinel://me:p%40ss@one:26380,[::1],three/2?master_name=main&sentinel_password=s%26cret&socket_timeout=7"


def parsed(url: str) -> SentinelUrl:
    found = sentinel_url_of(url)
    assert found is not None
    return found


def test_a_url_names_sentinels_database_and_both_logins() -> None:
    found = parsed(URL)
    assert (found.master_name, found.has_tls) == ("main", False)
    assert found.sentinels == (("one", 26380), ("::1", 26379), ("three", 26379))
    assert found.server == {"username": "me", "password": "p@ss", "db": 2, "socket_timeout": 7.0}
    assert found.sentinel == {"password": "s&cret"}


def test_tls_is_that_of_both_unless_the_sentinels_have_none() -> None:
    url = "rediss+sentinel://one/0?master_name=m&ssl_ca_certs=/ca.pem"
    assert parsed(url).sentinel == {"ssl": True, "ssl_ca_certs": "/ca.pem"}
    bare = parsed(f"{url}&sentinel_ssl=no")
    assert bare.has_tls and bare.sentinel == {} and bare.server["ssl_ca_certs"] == "/ca.pem"


@pytest.mark.parametrize("url", ["redis://one", "rediss://one", "unix:///tmp/redis.sock"])
def test_other_urls_are_no_sentinel_urls(url: str) -> None:
    assert sentinel_url_of(url) is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://one:26379/0", "master_name=NAME"),
        ("redis+sentinel:///0?master_name=m", "HOST:PORT"),
        ("redis+sentinel://one:port/0?master_name=m", "port"),
        ("redis+sentinel://one/0?master_name=m&sentinel_ssl=yes", "rediss+sentinel"),
        ("redis+cluster://one:6379", "Redis Cluster is not supported"),
        ("rediss+cluster://one:6379", "Redis Cluster is not supported"),
    ],
)
def test_wrong_urls_are_refused_by_name(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        sentinel_url_of(url)
    assert refused.value.param == "redis_url"


def test_no_password_is_shown() -> None:
    assert "ss" not in without_password(URL).replace("password", "").replace("master", "")
    assert "p@ss" not in repr(parsed(URL)) and "s&cret" not in repr(parsed(URL))


def test_celery_gets_the_sentinels_the_name_of_the_primary_and_tls() -> None:
    url, transport, app = celery_places("rediss+sentinel://:pw@one:1,two:2/3?master_name=m&ssl_ca_certs=/ca.pem")
    assert url == "sentinel://:pw@one:1/3;sentinel://:pw@two:2/3"
    assert transport == {"master_name": "m", "sentinel_kwargs": {"ssl": True, "ssl_ca_certs": "/ca.pem"}}
    assert (
        app["broker_use_ssl"]
        == app["redis_backend_use_ssl"]
        == {"ssl_ca_certs": "/ca.pem", "ssl_cert_reqs": "required"}
    )
    conf = make_app(CelerySettings(), "redis+sentinel://one:1/0?master_name=m").conf
    assert conf.broker_transport_options["master_name"] == conf.result_backend_transport_options["master_name"] == "m"
    assert conf.broker_url == conf.result_backend == "sentinel://one:1/0"


class Asked:
    """A Sentinel with an answer that the test gives."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def sentinel_masters(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def primary(ip: str, epoch: int, *, is_down: bool = False) -> dict[str, Any]:
    state = {"ip": ip, "port": 6379, "config-epoch": epoch, "num-other-sentinels": 2}
    return {"m": state | {"is_master": True, "is_sdown": is_down, "is_odown": False}}


def sentinels(*answers: Any) -> AllSentinels:
    manager = cast(Any, AllSentinels)([])
    manager.sentinels = [Asked(answer) for answer in answers]
    return cast(AllSentinels, manager)


async def test_the_sentinel_with_the_newest_configuration_is_believed() -> None:
    gone = exceptions.ConnectionError("no answer")
    assert await sentinels(gone, primary("old", 1), primary("new", 2)).discover_master("m") == ("new", 6379)
    assert await sentinels(primary("a", 1, is_down=True), primary("a", 1)).discover_master("m") == ("a", 6379)
    with pytest.raises(MasterNotFoundError):
        await sentinels(primary("old", 1), primary("new", 2, is_down=True)).discover_master("m")
    with pytest.raises(MasterNotFoundError, match="ConnectionError"):
        await sentinels(gone, gone).discover_master("m")


async def test_an_unknown_name_and_refused_credentials_are_errors_of_the_url() -> None:
    with pytest.raises(ConfigError, match="'other'; they know m"):
        await sentinels(primary("a", 1)).discover_master("other")
    refused = exceptions.AuthenticationError("WRONGPASS")
    with pytest.raises(ConfigError, match="sentinel_password"):
        await sentinels(refused, refused).discover_master("m")
