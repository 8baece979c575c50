"""A model's chat template: the Jinja program that turns messages into the text format that the model was trained
on, and what it shows of its model.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import MappingProxyType
from typing import Any

from penstock.contract.errors import ConfigError, RequestError, TooCostlyError, UnavailableError
from penstock.contract.tool_formats import REASONING_MARKS, THINK, tokens_in
from penstock.contract.tools import CONTINUES, GENERATION_PROMPT
from penstock.gpu_node.engine.text.template_frames import CHAT, COSTLY, RENDERED, WORKER, receive, send
from penstock.runtime.socket_process import end_process, start_process

log = logging.getLogger(__package__)


def reasoning_marks_of(template: ChatTemplate) -> tuple[str, str]:
    """Return the marks around the model's reasoning; those of most models if the template has none."""
    return found_marks(template) or THINK


def found_marks(template: ChatTemplate) -> tuple[str, str] | None:
    """Return the marks around reasoning that a template has, or None."""
    by_source = next((marks for marks in REASONING_MARKS if marks[0].rstrip() in template.source), None)
    return by_source or _written_marks_of(template)


def _written_marks_of(template: ChatTemplate) -> tuple[str, str] | None:
    """Return the marks of which one stands at the end of a prompt, for templates that build marks of parts."""
    parts = [marks for marks in REASONING_MARKS if all(one in template.source for one in tokens_in(marks[0])[::2])]
    if not parts:
        return None
    with suppress(RequestError, UnavailableError):
        text = template.render([{"role": "user", "content": "x"}])
        return next((marks for marks in parts if text.endswith(marks)), None)
    return None


_TURN_ENDS = (
    frozenset(
        ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|return|>", "<|end_of_turn|>")
    )
    | {"<|call|>", "<|end_of_msg|>", "[e~["}
    | {"<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<EOT>", "[EOT]"}
)


def ends_of_turn(template: ChatTemplate, added: Collection[str]) -> frozenset[str]:
    """Return those of a tokenizer's added tokens that end an answer by a template, whatever other files say.

    That is the token which the template puts after an answer, and well-known ones that it contains. `added`: the texts
    of the added tokens.
    """
    mark = secrets.token_hex(16)
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
    after = ""
    with suppress(RequestError, UnavailableError):  # The template may not accept this chat.
        after = template.render(chat, None, {GENERATION_PROMPT: False}).rpartition(mark)[2].lstrip()
    first = max((token for token in added if token and after.startswith(token)), key=len, default=None)
    known = {token for token in _TURN_ENDS if token in added and token in template.source}
    found = known if first is None else known | {first}
    return frozenset(found - set(reasoning_marks_of(template)))  # The end of reasoning is none of the answer.


def template_messages(messages: Sequence[Mapping[str, Any]], reasoning_key: str | None = None) -> list[dict[str, Any]]:
    """Return messages in the format of chat templates: OpenAI's, with call arguments as objects.

    A tool result also gets the name of its function, which some templates need. `reasoning_key`: the member in which
    the template takes earlier reasoning; None: it takes none.
    """
    names = {call["id"]: call["name"] for message in messages for call in message.get("tool_calls", ())}
    return [_template_message(one, names.get(one.get("tool_call_id")), reasoning_key) for one in messages]


def _template_message(message: Mapping[str, Any], name: str | None, reasoning_key: str | None) -> dict[str, Any]:
    rendered = {**message, "role": "system" if message["role"] == "developer" else message["role"]}
    if "tool_calls" in rendered:
        rendered["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.loads(call["arguments"])},
            }
            for call in rendered["tool_calls"]
        ]
    reasoning = rendered.pop("reasoning", "")
    if reasoning and reasoning_key is not None:
        rendered[reasoning_key] = reasoning
    return rendered if name is None else rendered | {"name": name}


MAX_RENDERED_CHARS = 1 << 25
"""Limit of a rendered chat with its tools. A request has at most 16 MiB, but a template may repeat the tools."""
MAX_RENDER_CPU_S = 5.0
"""Limit of the CPU time that rendering a chat may take."""
MAX_RENDER_S = 15.0
"""Limit of the wall time that rendering a chat may take. A paused or crowded machine gets more than the CPU time."""
MAX_RENDERS_AT_ONCE = 4
"""Workers of a template. Further renders wait for one of them."""
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_MODULE = "penstock.gpu_node.engine.text.template_worker"
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")
"""The environment of the processes. Passwords that the node has there are none of their business."""
_ANSWER_SLACK_S = 5.0
_MAX_TRIES = 3


class ChatTemplate:
    """One compiled template. Thread-safe; `render` blocks, so an event loop calls it on a thread.

    The dialect is that of transformers, so a checkpoint's template renders the same text here. The template is the code
    of a model file and its variables come from callers. So it runs in processes of its own, which the kernel ends at a
    limit.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Start to compile it. `variables`: the special tokens by name (`bos_token`, …)."""
        self.source = source
        self._variables = dict(variables)
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_RENDERS_AT_ONCE)
        self._takes_tools: bool | None = None
        self._started = _Processes(source, self._variables)

    @property
    def takes_tools(self) -> bool:
        """Whether the template uses tools. Raises ConfigError if it does not compile."""
        with self._lock:
            return self._compiled()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
        now: datetime | None = None,
    ) -> str:
        """Return the chat as text, up to where the assistant's answer begins.

        `variables` are those of `template_kwargs.py`. `now` is the time that the template may print; None: the clock's.
        Raises RequestError if the template refuses the chat, TooCostlyError if the text becomes too long or takes too
        much time or memory, UnavailableError if its processes do not run.
        """
        now = now or datetime.now()
        if not variables.get(CONTINUES):
            return self._render(messages, tools, {GENERATION_PROMPT: True, **variables}, now)
        # The text is cut after the last message's content, where the template would close the message.
        *earlier, last = messages
        if last.get("tool_calls"):
            message = "the last message has tool calls, which no answer can continue; send their results after it"
            raise RequestError(message, param="messages")
        mark = secrets.token_hex(16)
        marked = [*earlier, {**last, "content": last["content"] + mark}]
        text = self._render(marked, tools, {**variables, GENERATION_PROMPT: False}, now)
        at = text.rfind(mark)
        if at < 0:
            raise _refusal("the template does not show the last message's content, so it cannot be continued")
        return text[:at]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        now: datetime,
    ) -> str:
        limits = {"max_chars": MAX_RENDERED_CHARS, "cpu_s": MAX_RENDER_CPU_S, "wall_s": MAX_RENDER_S}
        chat = {"messages": list(messages), "tools": tools, "variables": dict(variables), "now": now.isoformat()}
        body = json.dumps(chat | limits).encode()
        with self._slots:
            for _ in range(_MAX_TRIES):
                if (answer := self._asked(body)) is not None:
                    break
            else:
                raise UnavailableError("the processes of the chat template have ended", code="internal_error")
        data, _, kind = answer
        text = data.decode(errors="surrogatepass")
        if kind == RENDERED:
            return text
        if kind == COSTLY:
            raise _too_costly(text)
        raise _refusal(text)

    def _asked(self, body: bytes) -> tuple[bytes, list[int], str] | None:
        """Return a worker's answer; None if the worker ended before its limits. Raises TooCostlyError at these."""
        began_s = time.monotonic()
        try:
            with self._lock:
                processes, worker = self._worker()
        except OSError as error:
            log.warning("a process of the chat template was not started", extra={"reason": repr(error)})
            return None
        answer = None
        try:
            worker.settimeout(MAX_RENDER_S + _ANSWER_SLACK_S)
            send(worker, CHAT, body)
            answer = receive(worker)
        except OSError:
            pass
        if answer is not None:
            with self._lock:
                processes.idle.append(worker)
            return answer
        processes.forget(worker)
        if (took_s := time.monotonic() - began_s) >= min(MAX_RENDER_CPU_S, MAX_RENDER_S):
            log.warning("the chat template took too long", extra={"took_s": round(took_s, 1)})
            raise _too_costly(f"{MAX_RENDER_CPU_S:g} s of CPU time or {MAX_RENDER_S:g} s")
        with self._lock:
            self._close_idle(processes)  # Another process ended it, and maybe these too. The chat did not.
        return None

    def _worker(self) -> tuple[_Processes, socket.socket]:
        if self._started.idle:
            return self._started, self._started.idle.pop()
        self._compiled()
        try:
            return self._started, self._started.fork()
        except OSError:
            self._restart()
            self._compiled()
            return self._started, self._started.fork()

    @staticmethod
    def _close_idle(processes: _Processes) -> None:
        while processes.idle:
            processes.forget(processes.idle.pop())

    def _compiled(self) -> bool:
        if self._takes_tools is None:
            try:
                self._takes_tools = self._started.takes_tools()
            except OSError:
                self._restart()
                self._takes_tools = self._started.takes_tools()
        return self._takes_tools

    def _restart(self) -> None:
        log.warning("the processes of the chat template are started again")
        self._started.close()
        self._takes_tools = None
        self._started = _Processes(self.source, self._variables)


class _Processes:
    """The process that compiled the template, and forks workers within a millisecond."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._socket, child_end = socket.socketpair()
        with child_end:
            kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
            process = start_process(_MODULE, child_end, kept)
        self.idle: list[socket.socket] = []
        """Sockets of workers that have nothing to render."""
        self._sockets = {self._socket}
        self.close = weakref.finalize(self, _end, self._sockets, process)
        """Ends the processes. It is also called at the end of this object or of this process."""
        wanted = {"source": source, "variables": dict(variables), "cpu_s": MAX_RENDER_CPU_S, "wall_s": 0}
        self._socket.settimeout(MAX_RENDER_S * 4)
        with suppress(OSError):  # `takes_tools` notices a process that has ended.
            send(self._socket, CHAT, json.dumps(wanted).encode())

    def takes_tools(self) -> bool:
        """Wait until the template is compiled. Raises ConfigError if it does not compile."""
        began_s = time.monotonic()
        answer = receive(self._socket)
        if answer is None and time.monotonic() - began_s >= MAX_RENDER_CPU_S * 0.9:
            raise ConfigError(f"the model's chat template does not compile within {MAX_RENDER_CPU_S:g} s of CPU time")
        if answer is None:
            raise ConnectionResetError("the process that compiles the chat template ended without an answer")
        text, _, kind = answer
        if kind != RENDERED:
            raise ConfigError(f"the model's chat template does not compile: {text.decode()}")
        return bool(text)

    def fork(self) -> socket.socket:
        """Return the socket of a new worker. Raises OSError."""
        own_end, child_end = socket.socketpair()
        with child_end:
            try:
                send(self._socket, WORKER, b"", (child_end.fileno(),))
            except OSError:
                own_end.close()
                raise
        self._sockets.add(own_end)
        return own_end

    def forget(self, worker: socket.socket) -> None:
        """Close a worker's socket. The worker ends after what it renders."""
        self._sockets.discard(worker)
        worker.close()


def _end(sockets: set[socket.socket], process: subprocess.Popen[bytes]) -> None:
    for one in sockets:
        one.close()
    end_process(process)


def _too_costly(limit: str) -> TooCostlyError:
    return TooCostlyError(f"messages: the rendered chat takes more than {limit}", param="messages")


def _refusal(reason: str) -> RequestError:
    return RequestError(f"the model's chat template refuses these messages: {reason}", param="messages")
