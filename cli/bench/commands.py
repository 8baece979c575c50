"""`penstock bench serve`: put load on a server with OpenAI's API, and print what its answers took."""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock import __version__
from penstock.cli.bench.connection import Address, Connections
from penstock.cli.bench.load import (
    LimitOptions,
    Load,
    Measured,
    OutputOptions,
    ServerOptions,
    Workload,
    WorkloadOptions,
)
from penstock.cli.bench.plot import check_matplotlib, write_plot
from penstock.cli.bench.prompts import PlannedRequest
from penstock.cli.bench.summary import arrays_of, notes_of, print_result, summary_of
from penstock.cli.bench.target import Target, first_model, path_of, probed
from penstock.cli.command_line import App
from penstock.cli.console import Console
from penstock.cli.options import options_of, takes
from penstock.cli.output import EXIT_FAILED, write_line
from penstock.contract.errors import EXIT_INTERRUPTED, ConfigError, RequestError
from penstock.contract.problems import request_error

WARMUP_CONCURRENCY = 16
TO_STDOUT = "-"
EXIT_DONE = 0


@dataclass(frozen=True)
class Session:
    """One run of the load generator, from the first probe to the last file."""

    server: ServerOptions
    workload: WorkloadOptions
    limits: LimitOptions
    output: OutputOptions

    async def run(self) -> int:
        """Probe the server, send the load, show the result, and return the exit status."""
        self._check_files()
        # Every open request has a connection, so permit as many as the system allows.
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        connections = Connections(Address.of(self.server.base_url))
        try:
            target = await self._target(connections)
            target, ratio, notes = await probed(target, connections)
            workload = Workload(self.workload, ratio)
            # Made before the load: neither reading files nor random numbers may delay a request.
            plan, warmups = workload.plan(), workload.warmups(self.limits.num_warmups)
            load = Load(target, connections, self.limits)
            await self._warm_up(load, warmups)
            with self._progress(len(plan)) as progress:
                measured = await load.run(plan, lambda _: progress.advance(progress.task_ids[0]))
        finally:
            connections.close()
        self._show(target, measured, notes)
        if measured.num_unfinished:
            return EXIT_INTERRUPTED
        return EXIT_DONE if any(not record.error for record in measured.records) else EXIT_FAILED

    def _check_files(self) -> None:
        """Raise RequestError if a file cannot be written, before the load runs."""
        for name, path in (("output_json", self.output.output_json), ("plot", self.output.plot)):
            if path not in (None, TO_STDOUT) and not os.access(Path(str(path)).absolute().parent, os.W_OK):
                raise RequestError(f"{name}: cannot write to the folder of {path}", param=name)
        if self.output.plot is not None:
            check_matplotlib()

    async def _target(self, connections: Connections) -> Target:
        path = path_of(self.server.endpoint)
        names_and_values = (header.partition("=") for header in self.server.header)
        headers = {name.strip(): value.strip() for name, _, value in names_and_values}
        if self.server.api_key:
            headers = {"Authorization": f"Bearer {self.server.api_key}", **headers}
        model = self.server.model or await first_model(connections, headers)
        return Target(connections.address, path, model, headers, self.server.body)

    async def _warm_up(self, load: Load, warmups: list[PlannedRequest]) -> None:
        if warmups:
            most = min(WARMUP_CONCURRENCY, self.limits.max_concurrency or WARMUP_CONCURRENCY)
            bounded = replace(
                load, limits=LimitOptions(max_concurrency=most, request_timeout=load.limits.request_timeout)
            )
            if (await bounded.run(warmups, lambda _: None)).num_unfinished:
                raise asyncio.CancelledError

    def _progress(self, num_requests: int) -> Progress:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Two updates a second: drawing takes time that the load generator needs.
        progress = Progress(
            *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
        )
        progress.add_task("Requests answered", total=num_requests)
        return progress

    def _show(self, target: Target, measured: Measured, notes: list[str]) -> None:
        records, output = measured.records, self.output
        summary = summary_of(measured, output.limits_ms, output.percentiles)
        notes = [*notes, *notes_of(measured, summary)]
        load = f"{self.server.base_url} · {len(records)} requests, {self.workload.arrivals}"
        load += f", at most {limit} open" if (limit := self.limits.max_concurrency) else ""
        if output.output_json != TO_STDOUT:
            print_result(Console(), target.model, load, summary, output.percentiles, notes, output.limits_ms)
        if output.output_json is not None:
            text = json.dumps(self._document(target, measured, summary, notes), indent=1, allow_nan=False)
            _write(output.output_json, text)
        if output.plot is not None:
            write_plot(output.plot, f"{target.model} at {load}", records)

    def _document(
        self, target: Target, measured: Measured, summary: dict[str, Any], notes: list[str]
    ) -> dict[str, Any]:
        rate, limits = self.workload.request_rate, self.limits
        return {
            "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
            "penstock_version": __version__,
            "backend": "openai-chat" if target.is_chat else "openai",
            "base_url": self.server.base_url,
            "endpoint": target.path,
            "model_id": target.model,
            "num_prompts": len(measured.records),
            # JSON has no infinity; vLLM writes the same word.
            "request_rate": rate if math.isfinite(rate) else "inf",
            "burstiness": self.workload.burstiness,
            "max_concurrency": limits.max_concurrency,
            "seed": self.workload.seed,
            "goodput": self.output.limits_ms,
            "notes": notes,
            **summary,
            **arrays_of(measured.records),
        }


def _write(name: str, text: str) -> None:
    if name == TO_STDOUT:
        write_line(text)
        return
    try:
        Path(name).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"output_json: cannot write {name}: {error.strerror}", param="output_json") from error


Options = TypeVar("Options", bound=BaseModel)
_PANELS: dict[type[BaseModel], str] = {
    ServerOptions: "Server",
    WorkloadOptions: "Arrivals, prompts and answers",
    LimitOptions: "Limits of the load",
    OutputOptions: "Results and files",
}
_FLAGS = {"ignore_eos": ("--ignore-eos",)}


def _with_panel(options: list[Parameter], panel: str) -> list[Parameter]:
    for option in options:
        option.annotation.__metadata__[0].rich_help_panel = panel
    return options


_ALL = [option for model, panel in _PANELS.items() for option in _with_panel(options_of(model, flags=_FLAGS), panel)]

app = App()


@app.callback()
def bench() -> None:
    """Measure a server under load."""


@app.command()
@takes(*_ALL)
def serve(
    limits: Annotated[
        list[str] | None, typer.Argument(help="Further limits of --goodput: `--goodput ttft:200 tpot:50`.")
    ] = None,
    **given: Any,
) -> None:
    """Put load on any server with OpenAI's API, and print the latencies and rates of its streams.

    A request is sent when it is due, even if earlier ones are not answered yet. Its times count from its sending.
    Prompts are random words. Two short requests before the load show how many tokens a word has.
    Ctrl-C ends the load early and shows the result so far.

    Examples:
        penstock bench serve --request-rate 4 --num-prompts 200
        penstock bench serve --base-url http://gpu-1:8000 --goodput ttft:200 tpot:50
        penstock bench serve --trace trace.jsonl --plot load.svg
    """
    # As in vLLM, `--goodput` may have several words after it.
    given["goodput"] = [*(given["goodput"] or ()), *(limits or ())]
    given["api_key"] = given["api_key"] or os.environ.get("OPENAI_API_KEY")
    server, workload = _made(ServerOptions, given), _made(WorkloadOptions, given)
    bounds, output = _made(LimitOptions, given), _made(OutputOptions, given)
    try:
        import httptools  # noqa: F401  tests that it is installed
        import uvloop
    except ImportError as error:
        raise ConfigError("bench serve needs the gateway's packages: pip install 'penstock-llm[gateway]'") from error

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(Session(server, workload, bounds, output).run())
    raise typer.Exit(status)


def _made(model: type[Options], given: dict[str, Any]) -> Options:
    """Return the options of one model among those given. Raises RequestError."""
    try:
        return model(**{name: given[name] for name in model.model_fields if given[name] is not None})
    except ValidationError as error:
        raise request_error(error) from error
