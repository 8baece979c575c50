"""The process that parses large bodies, and large messages of WebSockets.

Its command is `python -m penstock.gateway.request.parser_process UNKNOWN_FIELDS SCHEMA...`. The first argument is the
gateway's setting `unknown_fields`; the others are `BodySchemas.arguments`, so that this process knows no API.

Parsing holds Python's global interpreter lock, so a thread would still block the gateway's event loop. This process
reads bodies one by one from a socket, its stdin, and ends with the gateway. Its memory is limited: a body that needs
more kills it, and the gateway starts another one.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Self, Unpack, cast

from penstock.contract.errors import InvariantError, PenstockError, RequestError, TooLargeError
from penstock.gateway.request.encoding import (
    BodiesOfPaths,
    SocketMessage,
    encode_list,
    encode_parsed_body,
    encode_refusal,
    encode_socket_message,
    parse_list,
    parse_socket_message,
)
from penstock.gateway.request.generation import ParseRules, parse, with_packed_prompts
from penstock.gateway.request.structure import check_structure
from penstock.producer.parsed_body import RequestBody
from penstock.queue.wire import MAX_BYTES
from penstock.runtime.process_memory import keep_large_blocks_apart, limit_growth

HEAD = struct.Struct(">BI")
"""Header of what is sent over the socket. Body: the index of its schema in `BodySchemas.bodies`, with IS_LIST for a
list of such bodies, or IS_MESSAGE; then its length in bytes. Answer: 0, then its length in bytes."""
IS_LIST = 128
"""Added to the index: what follows is a list of bodies."""
IS_MESSAGE = 127
"""In place of the index: what follows is a message of a WebSocket."""
MAX_GROWTH_BYTES = 192 << 20
"""Bytes of data memory that this process may allocate after its start. A body that needs more kills the process."""


_HELD = "held:"


@dataclass(frozen=True, slots=True)
class BodySchemas:
    """The schemas of all bodies that a gateway parses."""

    bodies: Sequence[type[RequestBody]]
    of_paths: BodiesOfPaths
    """Those of the paths that a message of a WebSocket may name."""
    held: Mapping[str, type[RequestBody]]
    """Those of the bodies that a job may hold, by their `url`."""

    @property
    def arguments(self) -> list[str]:
        """The schemas as `MODULE:CLASS`: those of messages behind `PATH=`, those of held bodies behind `held:PATH=`."""
        of_paths = [f"{path}={_name_of(schema)}" for path, schema in self.of_paths.items()]
        held = [f"{_HELD}{path}={_name_of(schema)}" for path, schema in self.held.items()]
        return [*map(_name_of, self.bodies), *of_paths, *held]

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Self:
        """Import the schemas."""
        bodies = [_schema_of(argument) for argument in arguments if "=" not in argument]
        named = dict(argument.split("=") for argument in arguments if "=" in argument)
        of_paths = {path: _schema_of(name) for path, name in named.items() if not path.startswith(_HELD)}
        held = {path.removeprefix(_HELD): _schema_of(name) for path, name in named.items() if path.startswith(_HELD)}
        return cls(bodies, of_paths, held)

    def rules(self, unknown_fields: str) -> ParseRules:
        """Return how to read all bodies. `unknown_fields` is the gateway's setting."""
        return {"ignores_unknown": unknown_fields == "ignore", "held_bodies": self.held}


def _name_of(schema: type[RequestBody]) -> str:
    return f"{schema.__module__}:{schema.__qualname__}"


def _schema_of(name: str) -> type[RequestBody]:
    module, _, class_name = name.partition(":")
    return cast("type[RequestBody]", getattr(import_module(module), class_name))


def main() -> None:
    """Answer bodies until the gateway closes the socket."""
    schemas = BodySchemas.of(sys.argv[2:])
    rules = schemas.rules(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the gateway, which ends this process.
    os.nice(10)  # Large bodies must not take the cores from token streams.
    gc.disable()  # A parsed body is a tree without cycles, so a collection would scan millions of values for nothing.
    gc.freeze()
    keep_large_blocks_apart()
    limit_growth(MAX_GROWTH_BYTES)
    with socket.socket(fileno=sys.stdin.fileno()) as line:
        while (head := _receive(line, HEAD.size)) is not None:
            index, num_bytes = HEAD.unpack(head)
            raw = _receive(line, num_bytes)
            if raw is None:
                return
            if index == IS_MESSAGE:
                answer = answer_to_message(bytes(raw), schemas.of_paths, **rules)
            elif index & IS_LIST:
                answer = answer_to_list(bytes(raw), schemas.bodies[index ^ IS_LIST], **rules)
            else:
                answer = answer_to_body(bytes(raw), schemas.bodies[index], **rules)
            line.sendall(HEAD.pack(0, len(answer)) + answer)
            del raw, answer
            gc.collect()


def answer_to_body(raw: bytes, schema: type[RequestBody], **rules: Unpack[ParseRules]) -> bytes:
    """Parse a body. Return it encoded, or the encoded refusal."""

    def encoded() -> bytes:
        return encode_parsed_body(with_packed_prompts(parse(schema, raw, **rules)))

    return _answer(raw, encoded, encode_refusal)


def answer_to_list(raw: bytes, schema: type[RequestBody], **rules: Unpack[ParseRules]) -> bytes:
    """Parse a list of bodies. Return it encoded, or the encoded refusal of the list."""

    def encoded() -> bytes:
        return encode_list(parse_list(schema, raw, **rules))

    return _answer(raw, encoded, encode_refusal)


def answer_to_message(raw: bytes, bodies: BodiesOfPaths, **rules: Unpack[ParseRules]) -> bytes:
    """Parse a message of a WebSocket. Return it encoded, or the encoded refusal."""

    def encoded() -> bytes:
        return encode_socket_message(parse_socket_message(raw, bodies, packs=True, **rules))

    return _answer(raw, encoded, lambda error: encode_socket_message(SocketMessage(error=error)))


def _answer(raw: bytes, encode: Callable[[], bytes], refusal_of: Callable[[PenstockError], bytes]) -> bytes:
    try:
        check_structure(raw)
        encoded = encode()
        if len(encoded) > MAX_BYTES:
            # A body whose input is also stored, as a response's is, takes up to twice its bytes.
            raise TooLargeError(f"the checked body has more than {MAX_BYTES} bytes", code="body_too_large")
        return encoded
    except PenstockError as error:
        return refusal_of(error)
    except (MemoryError, RecursionError):
        return refusal_of(RequestError("the body is too complex to parse", code="body_too_complex"))
    except Exception as error:
        # A bug refuses one body. If it ended this process, the bodies of all other tenants would wait for a new one.
        # The error's text is left out, because it may quote the body.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} in {frame.name}, {os.path.basename(frame.filename)}:{frame.lineno}"
        return refusal_of(InvariantError(f"a body was not parsed: {place}"))


def _receive(line: socket.socket, num_bytes: int) -> bytearray | None:
    """Receive exactly `num_bytes` bytes, or return None if the gateway closed the socket."""
    data = bytearray(num_bytes)
    view, at = memoryview(data), 0
    while at < num_bytes:
        num_received = line.recv_into(view[at:])
        if not num_received:
            return None
        at += num_received
    return data


if __name__ == "__main__":
    main()
