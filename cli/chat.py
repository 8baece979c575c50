"""`penstock chat`: a chat in the terminal. Each answer is a job in the queue."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, TextIO

import typer

from penstock.cli.help_page import queue_option
from penstock.cli.options import REDIS_URL_HELP, given_flags, sampling_flags, takes
from penstock.cli.output import write_text
from penstock.contract.errors import PenstockError, PromptTooLongError
from penstock.contract.priority import ClassName, Priority
from penstock.contract.tasks import GENERATE
from penstock.producer.client import Client
from penstock.producer.client.pool_choice import choose_pool
from penstock.runtime.settings import redis_url_of
from penstock.runtime.terminal import without_controls


@dataclass(frozen=True, slots=True)
class Speed:
    """The measurements of one answer."""

    ttft_s: float
    """Seconds to the first token."""
    total_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first token."""
        after_first_s = self.total_s - self.ttft_s
        return (self.num_tokens - 1) / after_first_s if after_first_s > 0 and self.num_tokens > 1 else 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_tokens} tokens: the first after {self.ttft_s * 1000:.0f} ms, "
            f"the rest at {self.tokens_per_s:.1f} tokens/s"
        )


class SpeedMeter:
    """Measures an answer while it comes."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._first_s = self._last_s = self._started_s
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Note that this number of tokens has just come."""
        if not num_tokens:
            return
        self._last_s = time.perf_counter()
        if not self._num_tokens:
            self._first_s = self._last_s
        self._num_tokens += num_tokens

    @property
    def speed(self) -> Speed:
        """The measurements so far."""
        return Speed(self._first_s - self._started_s, self._last_s - self._started_s, self._num_tokens)


BLOCK = '"""'
"""Begins and ends a message of several lines."""
PROMPT, PROMPT_IN_BLOCK = ">>> ", "... "


class Terminal:
    """stdin and stdout of a chat: a terminal, pipes or files."""

    def __init__(self, stdin: TextIO, stdout: TextIO) -> None:
        self._stdin, self._stdout = stdin, stdout
        self.is_interactive = stdin.isatty()
        if self.is_interactive:
            _load_line_editor()

    def read_message(self) -> tuple[str, bool]:
        """Return the next message, and whether it was written as a block. Raises EOFError at the end of the input."""
        line = self._read_line(PROMPT).strip()
        if not line.startswith(BLOCK):
            return line, False
        block = line.removeprefix(BLOCK)
        with suppress(EOFError):  # the end of the input also ends the block
            while not block.rstrip().endswith(BLOCK):
                block += "\n" + self._read_line(PROMPT_IN_BLOCK)
        return block.rstrip().removesuffix(BLOCK).strip("\n"), True

    def write(self, text: str) -> None:
        """Print a part of an answer."""
        write_text(text, self._stdout)

    def end_line(self) -> None:
        """End the line of an answer."""
        self.write("\n")

    def note(self, line: str) -> None:
        """Print a line that is not part of an answer on stderr, dimmed on a terminal."""
        typer.secho(without_controls(line), dim=True, err=True)

    def _read_line(self, prompt: str) -> str:
        if self.is_interactive:
            return input(prompt)
        line = self._stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


def _load_line_editor() -> None:
    """Let `input` edit lines and recall earlier messages of this chat. Nothing is stored."""
    try:
        import readline  # noqa: F401
    except ImportError:  # a Python that was built without it reads plain lines
        return


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options with which the jobs of a chat are submitted."""

    model: str | None
    priority: ClassName
    sampling: Mapping[str, Any]


class ChatSession:
    """Reads messages, and prints an answer to each, until the input ends."""

    def __init__(
        self, client: Client, terminal: Terminal, options: ChatOptions, *, system: str = "", verbose: bool = False
    ) -> None:
        self._client = client
        self._terminal = terminal
        self._options = options
        self._system = system
        self._verbose = verbose
        self._messages: list[dict[str, str]] = []
        """The conversation so far, without the system message."""
        self._has_left = False
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/clear": (self._clear, "forget the conversation; the system message stays"),
            "/system": (self._set_system, "TEXT sets the system message; without TEXT, show it"),
            "/retry": (self._retry, "replace the last answer by a new one"),
            "/help": (self._help, "show this list"),
            "/exit": (self._leave, "leave, as Ctrl-D does"),
        }

    def run(self) -> None:
        """Chat until the input ends. Without a terminal, the first error ends the chat and is raised."""
        served = choose_pool(self._client.pools().values(), self._options.model, kind=GENERATE)
        if self._terminal.is_interactive:
            self._terminal.note(f"Chat with {served.model}. /help lists the commands, Ctrl-D leaves.")
        while not self._has_left:
            try:
                message = self._terminal.read_message()
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._terminal.is_interactive:
                    raise
                break
            self._handle(*message)
        if self._terminal.is_interactive and not self._has_left:
            self._terminal.end_line()

    def _handle(self, text: str, is_block: bool) -> None:
        """Run a command, or answer a message. A block is never a command."""
        if text.startswith("/") and not is_block:
            self._run_command(*text.partition(" ")[::2])
        elif text:
            self._messages.append({"role": "user", "content": text})
            if not self._answer():
                self._messages.pop()

    def _run_command(self, name: str, argument: str) -> None:
        if name in self._commands:
            self._commands[name][0](argument.strip())
            return
        nearest = get_close_matches(name, self._commands, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "; /help lists the commands"
        self._terminal.note(f"no command {name}{hint}")

    def _answer(self) -> bool:
        """Print and keep an answer to the conversation, whole or stopped. Return False if nothing of it came."""
        parts: list[str] = []
        meter, problem = SpeedMeter(), ""
        try:
            self._stream(parts, meter)
        except KeyboardInterrupt:
            if not self._terminal.is_interactive:
                raise
            problem = "stopped"
        except PenstockError as error:
            if not self._terminal.is_interactive:
                raise
            too_long = "; /clear begins a new conversation" if isinstance(error, PromptTooLongError) else ""
            problem = f"penstock: {error.reason}{too_long}"
        finally:
            if parts or self._terminal.is_interactive:
                self._terminal.end_line()
        if problem:
            self._terminal.note(problem)
        if self._verbose and parts:
            self._terminal.note(str(meter.speed))
        if parts:
            self._messages.append({"role": "assistant", "content": "".join(parts)})
        return bool(parts)

    def _stream(self, parts: list[str], meter: SpeedMeter) -> None:
        """Print the answer while it comes, and add its texts to `parts`. An interruption cancels the job."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        job = self._client.submit(
            [*system, *self._messages],
            model=self._options.model,
            priority=Priority.of(self._options.priority),
            background=False,
            **self._options.sampling,
        )
        try:
            for chunk in job.stream():
                meter.count(len(chunk.token_ids))
                if chunk.text:
                    parts.append(chunk.text)
                    self._terminal.write(chunk.text)
        except KeyboardInterrupt:
            job.cancel()
            raise

    def _clear(self, _: str) -> None:
        self._messages.clear()

    def _set_system(self, text: str) -> None:
        self._system = text or self._system
        self._terminal.note(f"system: {self._system or '(none)'}")

    def _retry(self, _: str) -> None:
        if not self._messages:
            self._terminal.note("nothing to answer again")
            return
        last = self._messages.pop()
        if not self._answer():
            self._messages.append(last)

    def _help(self, _: str) -> None:
        for name, (_command, meaning) in self._commands.items():
            self._terminal.note(f"{name:8} {meaning}")
        self._terminal.note(f"{BLOCK:8} begins and ends a message of several lines, which may begin with /")
        self._terminal.note("Ctrl-C   stops an answer, which cancels its job; at the prompt it leaves")

    def _leave(self, _: str) -> None:
        self._has_left = True


@takes(*sampling_flags(), before="priority")
def chat(
    model: Annotated[
        str | None, typer.Option(help="Name or alias of the model, or of an adapter. Optional if one model is served.")
    ] = None,
    system: Annotated[str, typer.Option(help="System message: how the model shall answer. Default: none.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the speed of each answer on stderr.")] = False,
    priority: Annotated[ClassName, queue_option(help="Priority class of the jobs.")] = "interactive",
    tenant: Annotated[str, queue_option(help="Tenant for which the jobs run.")] = "default",
    redis_url: Annotated[str | None, queue_option(help=REDIS_URL_HELP)] = None,
    **sampling: Any,
) -> None:
    """Chat with a model. Each answer is a job, and the node applies the model's chat template.

    Ctrl-C stops an answer and cancels its job. Ctrl-C or Ctrl-D at the prompt leaves. /help lists the commands, and
    says how to write a message of several lines. Earlier messages can be recalled and edited; they are not stored.

    If stdin is a pipe or a file, each line is a message, and stdout has only the answers.

    Examples:
        penstock chat --system "Answer in one sentence."
        penstock chat --temperature 0 < questions.txt
    """
    options = ChatOptions(model, priority, given_flags(sampling))
    with Client(redis_url_of(redis_url), tenant=tenant) as client:
        ChatSession(client, Terminal(sys.stdin, sys.stdout), options, system=system, verbose=verbose).run()
