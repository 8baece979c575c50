"""The command `penstock chat` with its options."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli.command_line.panels import queue_option, sampling_option
from penstock.cli.options import REDIS_URL_HELP
from penstock.contract.tenant import ClassName
from penstock.runtime.settings import redis_url_of


def chat(
    model: Annotated[
        str | None, typer.Option(help="Name or alias of the model, or of an adapter. Optional if one model is served.")
    ] = None,
    system: Annotated[str, typer.Option(help="System message: how the model shall answer. Default: none.")] = "",
    temperature: Annotated[
        float | None,
        sampling_option(min=0.0, help="Sampling temperature. 0 picks the most likely token. Default: the model's."),
    ] = None,
    top_p: Annotated[
        float | None,
        sampling_option(help="Sample from the most likely tokens that together reach this probability. Default: 1."),
    ] = None,
    max_tokens: Annotated[
        int | None, sampling_option(min=1, help="Most tokens of an answer. Default: up to the model's context length.")
    ] = None,
    seed: Annotated[
        int | None, sampling_option(help="Random seed. The same chat then gets the same answers. Default: random.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the speed of each answer on stderr.")] = False,
    priority: Annotated[ClassName, queue_option(help="Priority class of the jobs.")] = "interactive",
    tenant: Annotated[str, queue_option(help="Tenant for which the jobs run.")] = "default",
    redis_url: Annotated[str | None, queue_option(help=REDIS_URL_HELP)] = None,
) -> None:
    """Chat with a model. Each answer is a job, and the node applies the model's chat template.

    Ctrl-C stops an answer and cancels its job. Ctrl-C or Ctrl-D at the prompt leaves. /help lists the commands, and
    says how to write a message of several lines. Earlier messages can be recalled and edited; they are not stored.

    If stdin is a pipe or a file, each line is a message, and stdout has only the answers.

    Examples:
        penstock chat --system "Answer in one sentence."
        penstock chat --temperature 0 < questions.txt
    """
    from penstock.cli.ask.chat.session import ChatOptions, ChatSession
    from penstock.cli.ask.chat.terminal import Terminal
    from penstock.producer.client import Client

    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    options = ChatOptions(model, priority, {name: value for name, value in sampling.items() if value is not None})
    with Client(redis_url_of(redis_url), tenant=tenant) as client:
        ChatSession(client, Terminal(sys.stdin, sys.stdout), options, system=system, verbose=verbose).run()
