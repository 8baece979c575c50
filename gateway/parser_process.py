"""The process that parses large bodies: `python -m penstock.gateway.parser_process FD`.

Python's lock is held for the whole of a parse, so a thread would stop the gateway's event loop for as long. This
process reads one body after another from a socket that it inherits, and ends with the gateway. Its memory is limited:
a body that needs more ends it, and the gateway starts another one.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterator

from penstock.contract.errors import PenstockError, RequestError, TooLargeError
from penstock.gateway.openai.parsed_body import BODIES, encode_asked, encode_refusal, parse, with_packed_prompts

HEAD = struct.Struct(">BI")
"""Of a body: which form, and how many bytes follow. Of an answer: 0, and how many bytes follow."""
FORMS = tuple(BODIES)
MAX_PARSED_BYTES = 128 << 20
"""Memory that the values of a body may take once they are parsed, by the estimates below."""
BYTES_PER_VALUE = 72
BYTES_PER_TEXT = 160
BYTES_PER_CONTAINER = 400
"""Of an object or a list."""
MAX_GROWTH_BYTES = 192 << 20
"""Memory that this process may come to hold beside its code. It ends where a body needs more."""
_WINDOW_BYTES = 256 << 10


def main() -> None:
    """Answer bodies until the gateway is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the gateway, which ends this process.
    gc.disable()  # A body's records are trees: collections would look at millions of values in vain.
    gc.freeze()
    _limit_memory()
    with socket.socket(fileno=int(sys.argv[1])) as line:
        while (head := _receive(line, HEAD.size)) is not None:
            form, num_bytes = HEAD.unpack(head)
            raw = _receive(line, num_bytes)
            if raw is None:
                return
            answer = answer_to(FORMS[form], bytes(raw))
            line.sendall(HEAD.pack(0, len(answer)) + answer)
            del raw, answer
            gc.collect()


def answer_to(form: str, raw: bytes) -> bytes:
    """What the gateway is told of a body."""
    try:
        check_structure(raw)
        return encode_asked(with_packed_prompts(parse(form, raw)))
    except PenstockError as error:
        return encode_refusal(error)
    except (MemoryError, RecursionError):
        return encode_refusal(RequestError("the body is too complex to be parsed", code="body_too_complex"))


def check_structure(raw: bytes) -> None:
    """Refuse a body whose values would take too much memory; what stands in texts does not count as a value."""
    if parsed_bytes(raw) > MAX_PARSED_BYTES and sum(map(parsed_bytes, _without_texts(raw))) > MAX_PARSED_BYTES:
        said = f"the values of the body take more than {MAX_PARSED_BYTES >> 20} MiB once they are parsed"
        raise TooLargeError(said, code="body_too_complex")


def parsed_bytes(text: bytes) -> int:
    """Memory of the values that begin in a part of a body, at most."""
    containers = text.count(b"{") + text.count(b"[")
    return (
        text.count(b",") * BYTES_PER_VALUE + text.count(b'"') // 2 * BYTES_PER_TEXT + containers * BYTES_PER_CONTAINER
    )


def _without_texts(raw: bytes) -> Iterator[bytes]:
    """A body without what stands between its quotes."""
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    is_inside = False
    for at in range(0, len(plain), _WINDOW_BYTES):
        parts = plain[at : at + _WINDOW_BYTES].split(b'"')
        yield b'""'.join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _limit_memory() -> None:
    """Let this process grow by a bounded amount of memory."""
    with open("/proc/self/statm") as statm:
        num_pages = int(statm.read().split()[5])
    limit = num_pages * os.sysconf("SC_PAGESIZE") + MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _receive(line: socket.socket, num_bytes: int) -> bytearray | None:
    """Exactly so many bytes; None where the other side has gone."""
    data = bytearray(num_bytes)
    view, at = memoryview(data), 0
    while at < num_bytes:
        got = line.recv_into(view[at:])
        if not got:
            return None
        at += got
    return data


if __name__ == "__main__":
    main()
