"""A Celery worker's metrics for Prometheus, on a port of their own.

Tasks run in child processes. Each process counts in files of one folder, and the worker adds them up at each scrape
(the multiprocess mode of prometheus_client). Without a port, nothing is counted and the package is not imported.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from celery import Celery, bootsteps, signals
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from penstock.contract.errors import ConfigError
from penstock.producer.batch.records import BatchProgress
from penstock.producer.batch.runner import OnProgress
from penstock.queue.files.batch import PartCounts

_LOG = logging.getLogger(__package__)

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""The variable by which prometheus_client knows the folder. It is read when the package is imported."""
READ_TIMEOUT_S = 2.0
"""Seconds that a reader waits for Redis."""
SCRAPE_WAIT_S = 0.15
"""Seconds that a scrape waits for the reader. Then it reports what was read last."""
MAX_AGE_S = 60.0
"""Seconds after which a number is too old to be reported."""
_STATES = {"SUCCESS": "succeeded", "FAILURE": "failed", "RETRY": "retried"}
_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 60, 300, 900, 3600, 14_400, 86_400)


class WorkerMetrics:
    """The counters of a worker. Its tasks call these methods, which do nothing before `open`."""

    def __init__(self) -> None:
        self._metrics: _Metrics | None = None

    def open(self) -> None:
        """Start counting, in this process and in those that it starts."""
        self._metrics = _Metrics()

    def submitted(self) -> None:
        """Count a job that the queue accepted."""
        if self._metrics is not None:
            self._metrics.submitted.inc()

    def refused(self) -> None:
        """Count a row that was not submitted, because the queue was full or away."""
        if self._metrics is not None:
            self._metrics.refusals.inc()

    def stored(self, counts: PartCounts) -> None:
        """Count rows of a stored batch whose answers or errors are stored now."""
        if self._metrics is not None:
            self._metrics.rows.labels("answered").inc(counts.completed)
            self._metrics.rows.labels("failed").inc(counts.failed)
            self._metrics.tokens.labels("prompt").inc(counts.input_tokens)
            self._metrics.tokens.labels("completion").inc(counts.output_tokens)

    @contextmanager
    def counting(self, report: OnProgress) -> Iterator[OnProgress]:
        """Yield a callback that counts a batch's progress since its last report and then calls `report`."""
        if self._metrics is None:
            yield report
            return
        counter = _RowCounter(self._metrics, report)
        try:
            yield counter.report
        finally:
            counter.note_left(0)


class _Metrics:
    """The metrics of one process."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        own = CollectorRegistry()  # Not the default one, whose metrics belong to the user's program.
        text = "Celery tasks that ended, by state: succeeded, failed or retried."
        self.tasks = Counter("penstock_batch_tasks", text, ("task", "state"), registry=own)
        text = "Seconds of a run of a Celery task."
        self.task_s = Histogram("penstock_batch_task_seconds", text, ("task",), buckets=_SECONDS, registry=own)
        text = "Celery tasks that run in this worker."
        self.running = Gauge("penstock_batch_tasks_running", text, ("task",), registry=own, multiprocess_mode="livesum")
        self.submitted = Counter("penstock_batch_jobs_submitted", "Jobs that the queue accepted.", registry=own)
        self.rows = Counter(
            "penstock_batch_rows", "Rows of batch files and of stored batches, by result.", ("result",), registry=own
        )
        text = "Rows without a result, of the files that run."
        self.rows_left = Gauge("penstock_batch_rows_left", text, registry=own, multiprocess_mode="livesum")
        text = "Times that a row was not submitted, because the queue was full or away."
        self.refusals = Counter("penstock_batch_refusals", text, registry=own)
        self.tokens = Counter("penstock_batch_tokens", "Tokens of rows with an answer.", ("kind",), registry=own)
        # Keyed by id: Celery's id of a task.
        self._started_s: dict[str, float] = {}
        signals.task_prerun.connect(self._note_start, weak=False)
        signals.task_postrun.connect(self._note_end, weak=False)

    def _note_start(self, task_id: str, task: Any, **_: Any) -> None:
        self._started_s[task_id] = time.monotonic()
        self.running.labels(task.name).inc()

    def _note_end(self, task_id: str, task: Any, state: str, **_: Any) -> None:
        started_s = self._started_s.pop(task_id, None)
        if started_s is not None:
            self.running.labels(task.name).dec()
            self.task_s.labels(task.name).observe(time.monotonic() - started_s)
            self.tasks.labels(task.name, _STATES.get(state, "other")).inc()


class _RowCounter:
    """Counts the progress of one batch. Its first report covers earlier runs, so it only sets the baseline."""

    def __init__(self, metrics: _Metrics, report: OnProgress) -> None:
        self._metrics = metrics
        self._report = report
        self._before: BatchProgress | None = None
        self._num_left = 0

    def report(self, progress: BatchProgress) -> None:
        """Count the progress since the last report, and pass it on."""
        metrics, before = self._metrics, self._before or progress
        self._before = progress
        metrics.rows.labels("answered").inc(progress.num_answered - before.num_answered)
        metrics.rows.labels("failed").inc(progress.num_failed - before.num_failed)
        metrics.tokens.labels("prompt").inc(progress.prompt_tokens - before.prompt_tokens)
        metrics.tokens.labels("completion").inc(progress.completion_tokens - before.completion_tokens)
        metrics.refusals.inc(bool(progress.waiting))
        self.note_left(progress.num_rows - progress.num_done)
        self._report(progress)

    def note_left(self, num_left: int) -> None:
        """Set the number of this batch's rows without a result."""
        self._metrics.rows_left.inc(num_left - self._num_left)
        self._num_left = num_left


def metrics_step(metrics: WorkerMetrics, port: int, host: str, queue: str) -> type[bootsteps.StartStopStep]:
    """Return a Celery boot step that serves the metrics of a worker while it runs."""

    class MetricsServer(bootsteps.StartStopStep):  # type: ignore[misc]  # celery ships no types
        """Opens the metrics before the worker starts its child processes."""

        def __init__(self, worker: Any, **_: Any) -> None:
            super().__init__(worker)
            self._stack = ExitStack()
            self._stack.enter_context(_folder())
            metrics.open()

        def start(self, worker: Any) -> None:
            """Serve the metrics."""
            self._stack.enter_context(_served(worker.app, port, host, queue))

        def stop(self, _: Any) -> None:
            """Stop serving, and delete the files of the processes."""
            self._stack.close()

        terminate = stop

    return MetricsServer


@contextmanager
def _folder() -> Iterator[None]:
    """Make the folder in which the processes count, unless the environment names one."""
    if FOLDER_VARIABLE in os.environ:
        yield
        return
    if "prometheus_client" in sys.modules:
        _LOG.warning("tasks in child processes are not counted", extra={"reason": f"set {FOLDER_VARIABLE} to a folder"})
    with tempfile.TemporaryDirectory(prefix="penstock-metrics-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER_VARIABLE]


@contextmanager
def _served(app: Celery, port: int, host: str, queue: str) -> Iterator[None]:
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_WorkerCollector(app, os.environ[FOLDER_VARIABLE], queue))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"metrics_port {port} on {host}: {error.strerror}", param="metrics_port") from error
    _LOG.info("serves metrics", extra={"host": host, "port": server.server_port})
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class LatestNumber:
    """A number that a thread reads, at each look. A look waits for it only for `SCRAPE_WAIT_S`."""

    def __init__(self, read: Callable[[], int | None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`read` returns None if there is no answer, and may take long."""
        self._read = read
        self._clock = clock
        self._turn = threading.Lock()
        self._reader: threading.Thread | None = None
        self._known: tuple[int, float] | None = None

    def look(self) -> tuple[int, float] | None:
        """Return the newest number and its age in seconds; None if there was none in the last `MAX_AGE_S`."""
        with self._turn:
            if self._reader is None or not self._reader.is_alive():
                self._reader = threading.Thread(target=self._run, name="penstock waiting tasks", daemon=True)
                self._reader.start()
            reader = self._reader
        reader.join(SCRAPE_WAIT_S)
        if (known := self._known) is None or (age_s := self._clock() - known[1]) > MAX_AGE_S:
            return None
        return known[0], age_s

    def _run(self) -> None:
        asked_s = self._clock()
        if (number := self._read()) is not None:
            self._known = number, asked_s


class _WorkerCollector:
    """A Prometheus collector of what all processes of a worker counted, and of the tasks that wait."""

    def __init__(self, app: Celery, folder: str, queue: str) -> None:
        self._app = app
        self._folder = folder
        self._queue = queue
        self._waiting = LatestNumber(self._num_waiting)

    def describe(self) -> list[Any]:
        """Return nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield all metric families."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.core import GaugeMetricFamily
        from prometheus_client.multiprocess import MultiProcessCollector

        _forget_dead(Path(self._folder))
        of_processes: Any = MultiProcessCollector(CollectorRegistry(), self._folder)  # type: ignore[no-untyped-call]
        yield from of_processes.collect()
        if (waiting := self._waiting.look()) is not None:
            number, age_s = waiting
            text = "Celery tasks that no worker has taken."
            yield GaugeMetricFamily("penstock_batch_tasks_waiting", text, value=number)
            text = "Seconds since the waiting tasks were read from Redis."
            yield GaugeMetricFamily("penstock_batch_tasks_waiting_age_seconds", text, value=age_s)

    def _num_waiting(self) -> int | None:
        """Return the number of queued tasks, or None while Redis does not answer."""
        connection = self._app.connection_for_read()
        options = {**connection.transport_options, "socket_timeout": READ_TIMEOUT_S}
        try:
            with connection.clone(transport_options=options) as own:
                # A passive declaration finds no queue: kombu looks for it without the prefix of the keys.
                return int(own.default_channel.queue_declare(self._queue).message_count)
        except (OperationalError, RedisError, OSError):
            return None


def _forget_dead(folder: Path) -> None:
    """Remove the gauges of processes that have ended; a killed one cannot do it."""
    from prometheus_client.multiprocess import mark_process_dead

    for pid in {path.stem.rpartition("_")[2] for path in folder.glob("gauge_live*_*.db")}:
        if not Path(f"/proc/{pid}").exists():
            mark_process_dead(int(pid), str(folder))  # type: ignore[no-untyped-call]
