"""`penstock bench serve`: put load on a server with OpenAI's API, and print what its answers took."""

from __future__ import annotations

import asyncio
import os
from inspect import Parameter
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from penstock.cli.bench.options import LimitOptions, OutputOptions, ServerOptions, WorkloadOptions
from penstock.cli.command_line.commands import App
from penstock.cli.options import options_of, takes
from penstock.contract.errors import ConfigError
from penstock.contract.named import request_error

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
        raise ConfigError("bench serve needs the gateway's packages: pip install 'penstock[gateway]'") from error
    from penstock.cli.bench.session import Session

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(Session(server, workload, bounds, output).run())
    raise typer.Exit(status)


def _made(model: type[Options], given: dict[str, Any]) -> Options:
    """Return the options of one model among those given. Raises RequestError."""
    try:
        return model(**{name: given[name] for name in model.model_fields if given[name] is not None})
    except ValidationError as error:
        raise request_error(error) from error
