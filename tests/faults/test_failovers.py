"""Sentinel promotes a replica that lacks the last writes: every stream equals the reference.

`make failovers` does the same with three sentinels, 100 streams and a backlog.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from faults.tools.road import POOL, QUICK, all_ended, new_works, served, under_way
from faults.tools.sentinel import Replicated
from faults.tools.tls_front import TlsFront, new_certificate
from faults.tools.work import check_settled

from penstock.contract.errors import UnavailableError
from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.installation import QUEUE
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.client import AsyncClient
from penstock.queue.broker.connection import connect

LAG_S = 0.3


@pytest.mark.parametrize("lives", [False, True], ids=["killed", "still answering"])
async def test_streams_go_on_at_the_server_that_sentinel_promotes(tmp_path: Path, lives: bool) -> None:
    with Replicated(tmp_path, stays_primary=lives) as servers:
        works = new_works(200)
        async with served(servers.url), AsyncClient(servers.url, settings=QUICK) as client:
            reading = await under_way(client, works, works[0])
            servers.link.stop()
            await asyncio.sleep(LAG_S)
            if lives:
                servers.fail_over()
            else:
                servers.master.kill()
            await asyncio.to_thread(servers.wait_for_promotion)
            promoted = connect(servers.replica.url)
            await asyncio.gather(*reading)
            await all_ended(promoted, works)
        await check_settled(promoted, POOL)
        await promoted.aclose()
        if lives:
            with servers.master.client() as old:
                assert old.role()[0] == b"master"


def sent_by_celery(url: str) -> str:
    """Send a task through the Redis behind Sentinel, and store its result there; return what was stored."""
    app = make_app(CelerySettings(), url)
    with app.connection() as connection:
        connection.ensure_connection(max_retries=1)
        app.send_task("any", task_id="one", connection=connection)
    app.backend.store_result("one", "stored", "SUCCESS")
    return str(app.AsyncResult("one").get(timeout=60))


@pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")  # by Celery
async def test_sentinels_without_the_name_are_an_error_of_the_url_and_celery_finds_the_primary(tmp_path: Path) -> None:
    with Replicated(tmp_path) as servers:
        assert await asyncio.to_thread(sent_by_celery, servers.url) == "stored"
        with servers.master.client() as direct:
            assert direct.exists("penstock:celery:celery-task-meta-one", f"penstock:celery:{QUEUE}") == 2
        client = AsyncClient(servers.url.replace("master_name=m", "master_name=other"))
        with pytest.raises(Exception, match="know no primary 'other'; they know m"):
            await client.connect()
        await client.close()
        servers.sentinels[0].kill()
        client = AsyncClient(servers.url)
        with pytest.raises(UnavailableError, match="as Sentinel says"):
            await client.connect()
        await client.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_tls_to_sentinel_and_to_the_servers_that_it_names(tmp_path: Path) -> None:
    certificate, key = new_certificate(tmp_path)
    async with AsyncExitStack() as stack:
        primary, replica, asked = [await stack.enter_async_context(TlsFront(certificate, key)) for _ in range(3)]
        servers = Replicated(tmp_path / "redis", announced=(primary.port, replica.port))
        primary.target, replica.target = servers.master.port, servers.replica.port
        asked.target = servers.sentinel_port
        stack.push_async_callback(asyncio.to_thread, servers.__exit__, None, None, None)
        await asyncio.to_thread(servers.__enter__)
        url = f"rediss+sentinel://127.0.0.1:{asked.port}/0?master_name=m"
        with pytest.raises(UnavailableError, match="as Sentinel says"):
            await AsyncClient(url).connect()
        works = new_works(100)
        trusting = f"{url}&ssl_ca_certs={certificate}"
        await stack.enter_async_context(served(trusting))
        client = await stack.enter_async_context(AsyncClient(trusting, settings=QUICK))
        reading = await under_way(client, works, works[0])
        assert primary.num_tls > 0 and asked.num_tls > 0
        servers.master.kill()
        await asyncio.to_thread(servers.wait_for_promotion)
        await asyncio.gather(*reading)
        for work in works:
            work.check()
        assert replica.num_tls > 0
