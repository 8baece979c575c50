"""One batch over stored files, run under its lease: check, answer, collect, end.

A window of its rows is in the queue. After the death of a holder, the next one finds the jobs of all rows that no part
has, and their results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial

from penstock.contract.errors import InvariantError, NotFoundError, RequestError, UnavailableError
from penstock.producer.batch.endpoints import ENDPOINTS
from penstock.producer.batch.finished import KINDS, OUTPUT, MessageRows, OpenAiRows, RowFormat
from penstock.producer.batch.lines import InputCheck, InputLimits, InputRow, check_input
from penstock.producer.batch.records import RowTerms
from penstock.producer.batch.run import RowRun
from penstock.producer.client import AsyncClient
from penstock.producer.client.pool_choice import NOT_ABLE, choose_pool
from penstock.producer.files.service import Files
from penstock.producer.flows.graph import FlowGraph
from penstock.producer.stored_batches.flow_rows import FlowRows
from penstock.producer.stored_batches.parts import BatchEnding, PartWriter, save_joined
from penstock.producer.stored_batches.row_client import (
    BatchPatience,
    BatchStoppedError,
    RowClient,
    RowCounter,
    require_lease,
)
from penstock.producer.stored_batches.stored_rows import BatchWindow, StoredRows
from penstock.queue.broker.producer import ServedPool
from penstock.queue.files.batch import CANCELLED_ROW, EXPIRED_ROW, BatchLease, BatchRecord, RowProblem, is_of_messages
from penstock.queue.files.batch_records import BatchRecords
from penstock.queue.files.file_records import BATCH_OUTPUT, MESSAGE_RESULTS, object_of
from penstock.runtime.event_loop import try_all

STOP_WAIT_S = 10.0
"""Seconds that canceled jobs of a batch may take to end. Rows whose jobs take longer count as not answered."""
_ENDINGS = {"": "completed", CANCELLED_ROW: "cancelled", EXPIRED_ROW: "expired"}
"""Code of the rows that were not answered → the state in which the batch ends."""
INPUT_LOST = RowProblem("input_lost", "the storage has lost the input file", param="input_file_id")


def format_of(batch: BatchRecord) -> RowFormat:
    """Return the format of a batch's rows."""
    if is_of_messages(batch.batch_id):
        return MessageRows(batch.batch_id, ignores_unknown=batch.spec.ignores_unknown)
    return OpenAiRows(batch.batch_id, shows_lines=True)


class StoredBatchRun:
    """The run of one batch by the holder of its lease."""

    def __init__(
        self,
        client: AsyncClient,
        files: Files,
        batches: BatchRecords,
        lease: BatchLease,
        batch: BatchRecord,
        share: Callable[[], int],
        counter: RowCounter,
    ) -> None:
        """`share` returns among how many batches this process divides the window."""
        self._files = files
        self._batches = batches
        self._lease = lease
        self._batch = batch
        self._client = client
        self._rows = RowClient(client, batches, batch, lease)
        self._patiently = BatchPatience(lease)
        self._window = BatchWindow(client, lease, batch, self._rows, share)
        self._format = format_of(batch)
        self._source: StoredRows | FlowRows
        if batch.is_flow and isinstance(self._format, OpenAiRows):
            self._source = FlowRows(client, files, batches, batch, self._window, self._format)
        else:
            self._source = StoredRows(files, batches, batch, self._patiently, self._window, self._format)
        self._parts = PartWriter(files, batches, lease, counter, self._patiently, self._source)
        # The ends of rows are no news to readers of the tenant's completions.
        terms = RowTerms(in_feed=False)
        self._row_run = RowRun(self._rows, self._source, self._parts, self._format, terms, counter.submitted)

    async def run(self) -> None:
        """Run the batch to its end. Raises BatchTakenError if another process has it."""
        try:
            await self._run()
        except NotFoundError as error:
            if error.code != "no_object" or await self._patiently(self._has_input):
                raise
            # Which rows were not answered is lost with the input. Those that were are kept.
            await self._patiently(lambda: self._finish("failed", [INPUT_LOST]))
        finally:
            await self._source.close()

    async def _has_input(self) -> bool:
        storage = await self._files.storage()
        return await self._files.on_thread(storage.exists, object_of(self._batch.spec.input_file_id))

    async def _run(self) -> None:
        if self._lease.status == "validating":
            with suppress(BatchStoppedError):
                if not await self._start():
                    return
        self._batch = await self._batches.find(self._batch.batch_id)
        ending = self._batch.ending
        if self._lease.status != "finalizing":
            ending = await self._answered()
            await self._patiently(lambda: self._batches.finalize(self._lease, ending))
        await self._patiently(lambda: self._finish(ending))
        await self._files.delete_garbage(f"parts/{self._batch.batch_id}/")
        if is_of_messages(self._batch.batch_id):
            await self._files.delete_garbage(object_of(self._batch.spec.input_file_id))

    async def _answered(self) -> str:
        """Let every row have a part, with its answer or its error. Return the state in which the batch ends."""
        if "in_progress" not in self._batch.times:
            # It ends before its input was checked.
            self._window.must_stop()
            return _ENDINGS[self._window.stopped or CANCELLED_ROW]
        try:
            await self._patiently(lambda: self._source.open(self._batch))
            await self._row_run.answer_all()
            if self._window.stopped:
                await self._stop()
        finally:
            await self._row_run.close()
        rows = await self._patiently(lambda: self._batches.committed_rows(self._batch.batch_id))
        if (num_rows := sum(byte.bit_count() for byte in rows)) != self._source.num_rows:
            raise InvariantError(f"{num_rows} of {self._source.num_rows} rows of {self._batch.batch_id} are committed")
        return _ENDINGS[self._window.stopped]

    async def _finish(self, ending: str, problems: Sequence[RowProblem] = ()) -> None:
        retention_ms, life_s = self._files.settings.retention_ms, self._batch.spec.output_life_s
        if is_of_messages(self._batch.batch_id):
            # They live from the creation of the batch on. A retention of any length leaves the record as long.
            age_ms = int(self._batches.now_s() * 1000) - self._batch.times["created"]
            life_ms = max(1, 1000 * (life_s or 0) - age_ms)
            saved = (MESSAGE_RESULTS, {OUTPUT: "results"}, life_ms, max(life_ms, retention_ms))
        else:
            life_ms = retention_ms if life_s is None else 1000 * life_s
            saved = (BATCH_OUTPUT, {kind: kind for kind in KINDS}, life_ms, retention_ms)
        end = BatchEnding(self._batch.tenant, ending, *saved, problems)
        await save_joined(self._files, self._batches, self._lease, end)

    # The check of the input.

    async def _start(self) -> bool:
        """Check the input and start the batch. Return whether it has rows to answer."""
        endpoint, settings, must_stop = self._batch.spec.endpoint, self._files.settings, self._window.must_stop

        def new_limits() -> InputLimits:
            endpoints, flow = (ENDPOINTS, FlowGraph()) if self._batch.is_flow else ([endpoint], None)
            texts_fields = {url: ENDPOINTS[url].texts_field for url in endpoints}
            return InputLimits(texts_fields, settings.max_batch_rows, settings.max_batch_inputs, flow)

        found, flow = await self._patiently(lambda: self._checked(new_limits()), must_stop)
        if flow is not None and not found.problems:
            found.problems += await self._patiently(lambda: self._unknown_jobs(flow), must_stop)
        unknown = await self._patiently(lambda: self._unknown_models(found), must_stop)
        # A row with an unknown model fails alone, like one with a wrong body.
        if len(unknown) == len(found.models):
            found.problems += unknown
        if found.problems and self._lease.status == "validating":
            await self._patiently(lambda: self._batches.fail(self._lease, found.problems, settings.retention_ms))
            return False
        start = partial(self._batches.start, self._lease, found.num_rows, settings.max_tenant_rows)
        self._lease.status = await self._patiently(start, must_stop)
        if isinstance(self._source, FlowRows):
            self._source.checked = flow
        return True

    async def _checked(self, limits: InputLimits) -> tuple[InputCheck, FlowGraph | None]:
        storage = await self._files.storage()

        def check() -> InputCheck:
            with closing(storage.lines(object_of(self._batch.spec.input_file_id))) as source:
                return check_input(
                    source, limits, is_over=lambda: self._lease.is_lost or self._lease.status == "cancelling"
                )

        return await self._files.on_thread(check), limits.flow

    async def _unknown_jobs(self, flow: FlowGraph) -> list[RowProblem]:
        """Return the rows of a flow that wait for jobs which its tenant does not have."""
        problems = list[RowProblem]()
        for job_id, line in flow.lines_of_jobs().items():
            try:
                await self._client.status(job_id, tenant=self._batch.tenant)
            except NotFoundError:
                problems.append(RowProblem("unknown_parent", f"after: there is no job {job_id}", line, "after"))
        return problems

    async def _unknown_models(self, found: InputCheck) -> list[RowProblem]:
        key = await self._rows.key()
        pools = (await self._client.pools(renewed=True)).values()
        problems = []
        for name, line in found.models.items():
            try:
                model = name if key is None else key.model_of(name)
                self._require_pool(pools, model or None, hides_models=key is not None and bool(key.models))
            except RequestError as error:
                problems.append(RowProblem(error.code, error.message, line, "model"))
            except UnavailableError:
                # The model is known, and its nodes may return.
                continue
        return problems

    def _require_pool(self, pools: Iterable[ServedPool], model: str | None, *, hides_models: bool) -> None:
        """Raise what `choose_pool` raises if no pool can answer the rows of a model. Rows of a flow differ in kind."""
        kinds: Sequence[str | None] = (None,) if self._batch.is_flow else ENDPOINTS[self._batch.spec.endpoint].kinds
        for kind in kinds:
            try:
                choose_pool(pools, model, kind=kind, hides_models=hides_models)
                return
            except RequestError as error:
                if error.code != NOT_ABLE or kind == kinds[-1]:
                    raise

    # The end before all rows are answered.

    async def _stop(self) -> None:
        """Cancel the jobs in the queue, keep what is answered by then, and give every other row its error."""
        run = self._row_run
        # Rows that wait for the queue must not enter it any more.
        await run.cancel(submitted=False)
        left = await self._patiently(self._source.left_rows)
        of_others = await self._jobs_of_earlier_holders(left)
        job_ids = {job.id for jobs in run.open_jobs.values() for job in jobs} | {*of_others.values()}
        await try_all([partial(self._client.cancel, job_id, tenant=self._batch.tenant) for job_id in job_ids])
        for row in await self._patiently(lambda: self._source.left_rows(with_bodies=of_others)):
            if row.fields and self._source.take(row.number):
                run.begin(row)
        deadline_s = asyncio.get_running_loop().time() + STOP_WAIT_S
        while run.is_busy and asyncio.get_running_loop().time() < deadline_s:
            require_lease(self._lease)
            await run.collect()
        await run.cancel()
        await run.store_all()
        for row in await self._patiently(self._source.left_rows):
            self._parts.add(self._format.stopped(row, self._window.stopped))
            if self._parts.due_in_s == 0:
                await self._parts.store()
        await self._parts.store()

    async def _jobs_of_earlier_holders(self, left: list[InputRow]) -> dict[str, str]:
        pools = [*await self._client.pools()]
        found: dict[str, str] = {}
        for at in range(0, len(left), 500):
            keys = [self._format.key_of(row) for row in left[at : at + 500]]
            found |= await self._batches.job_ids(pools, self._batch.tenant, keys)
        return found
