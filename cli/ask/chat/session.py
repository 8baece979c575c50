"""One chat: its messages, its commands, and the job of each answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from penstock.cli.ask.chat.terminal import BLOCK, Terminal
from penstock.cli.ask.speed import SpeedMeter
from penstock.contract.errors import PenstockError, PromptTooLongError
from penstock.contract.tenant import ClassName, Priority
from penstock.producer.client import Client
from penstock.producer.client.request import choose_pool


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options with which the jobs of a chat are submitted."""

    model: str | None
    priority: ClassName
    sampling: Mapping[str, Any]


class ChatSession:
    """Read messages, and print an answer to each, until the input ends."""

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
        served = choose_pool(self._client.pools().values(), self._options.model)
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
            problem = f"penstock: {error.message}{too_long}"
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
