"""The server process of a gateway: its start, its drain, and the hand-over of its answers to a successor."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable
from typing import cast

import uvicorn

from penstock.gateway.http.middleware.drain import cut_off_after
from penstock.gateway.http.protocol import BoundedHead
from penstock.gateway.http.takeover import AnswerTakeover
from penstock.gateway.kept.connection import Keep
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.settings import PROGRESS_VARIABLE
from penstock.runtime.service_manager import ServiceManager

logger = logging.getLogger("penstock.gateway")

ARRIVING_S = 2.0
"""Seconds that a gateway waits, before it leaves its answers to a successor, for bodies that arrive."""
CUT_OFF_S = 1.0
"""Seconds after that for the answers that no successor can go on with: they end with an error."""
READ_S = 0.1
"""Seconds for reading what has arrived on connections that were just accepted."""
_POLL_S = 0.02


class GatewayServer(uvicorn.Server):
    """A uvicorn server that can print its URL to stdout and cuts off open answers at the end of the drain.

    With port 0 the operating system chooses the port, so a supervisor can only learn it from that line.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        drain_s: float,
        note_stop: Callable[[], None],
        metrics: GatewayMetrics,
        keep: Keep | None = None,
    ) -> None:
        """`note_stop` ends endless streams. `keep`: what holds the connections beside this process."""
        super().__init__(config)
        self._drain_s = drain_s
        self._note_stop = note_stop
        self._metrics = metrics
        self._keep = keep
        self._manager = ServiceManager.of_environment()
        self._background: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, tell the URL, and take over what a predecessor left."""
        takeover: AnswerTakeover | None = None
        if self._keep is not None:
            takeover = AnswerTakeover(self._keep, self._new_protocol, self.config.loaded_app, self._metrics)
            # Before the first connection is accepted: its answer needs a slot that is free.
            await takeover.learn()
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if os.environ.get(PROGRESS_VARIABLE) == "json":
            print(json.dumps({"event": "ready", "url": url}), flush=True)  # noqa: T201
        self._manager.ready(f"listens on {url}")
        self._background.add(asyncio.create_task(self._manager.feed(), name="penstock watchdog"))
        if (keep := self._keep) is not None and takeover is not None:
            keep.on_leave = self._start_to_leave
            keep.watch_holder()
            self._background.add(asyncio.create_task(takeover.run(), name="penstock takeover"))

    def _new_protocol(self) -> BoundedHead:
        """Return the protocol of a connection that this server did not accept itself."""
        made = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return cast(BoundedHead, made)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain: let open answers end, and cut off those that are open after `drain_s`."""
        self._manager.stopping()
        self._note_stop()
        # uvicorn's own graceful-shutdown timeout would log a traceback for each open answer.
        end = asyncio.create_task(cut_off_after(self._drain_s, self.server_state.tasks))
        try:
            await super().shutdown(sockets)
        finally:
            for task in (end, *self._background):
                task.cancel()

    def _start_to_leave(self) -> None:
        self._background.add(asyncio.create_task(self._leave(), name="penstock leaves"))

    async def _leave(self) -> None:
        """End this process, and leave the answers that are kept to a successor. All others end before.

        No task is canceled whose answer goes on: that would cancel its jobs.
        """
        for server in self.servers:
            server.close()
        self._note_stop()
        # What has arrived, and was not read yet, must not pass for an idle connection: closing would reset it.
        await asyncio.sleep(READ_S)
        for connection in [*self.server_state.connections]:
            if not isinstance(connection, BoundedHead):
                connection.shutdown()  # A WebSocket tells its client to come back.
            elif connection.is_idle:
                connection.transport.close()
        await self._until_only_kept(ARRIVING_S)
        for connection in [*self.server_state.connections]:
            if isinstance(connection, BoundedHead) and not connection.is_kept:
                connection.cut_off()
        await self._until_only_kept(CUT_OFF_S)
        left = sum(isinstance(one, BoundedHead) and one.is_kept for one in self.server_state.connections)
        logger.info("leaves its connections to the next gateway", extra={"num_connections": left})
        # No clean-up: it would end what goes on. The system closes the descriptors, as after a kill.
        logging.shutdown()
        os._exit(0)

    async def _until_only_kept(self, patience_s: float) -> None:
        for _ in range(round(patience_s / _POLL_S)):
            if all(isinstance(one, BoundedHead) and one.is_kept for one in self.server_state.connections):
                return
            await asyncio.sleep(_POLL_S)
