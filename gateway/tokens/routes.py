"""`POST /tokenize` and `POST /detokenize`, with vLLM's answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

from pydantic_core import to_json
from starlette.routing import Route

from penstock.contract.errors import InvariantError
from penstock.contract.output import Usage
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.route_doc import NUMBER, TEXT, RouteDoc, list_of, object_of
from penstock.gateway.stream.answer import Generate
from penstock.gateway.stream.dialect import AnswerHead, TaskDialect, WholeEncoder
from penstock.gateway.tokens.schemas import DetokenizeRequest, TokenizeRequest
from penstock.producer.openai.json_parts import Text, json_parts
from penstock.queue.results import PackedOutput, PackedResult

# vLLM's answers of `/tokenize` and `/detokenize`, rendered in parts.

VALUES_PER_PART = 512
"""Tokens that are rendered at once, which takes less than 0.1 ms."""


class _TaskEncoder(WholeEncoder):
    """Encodes the output of a request's only job."""

    def __init__(self, head: AnswerHead) -> None:
        pass

    def head(self) -> bytes:
        """Return nothing: the output is the whole answer."""
        return b""

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the parts of the answer."""
        if result.output is None:
            raise InvariantError(f"the result of job {result.job_id} has no output")
        return self._parts(result.output)

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return nothing."""
        return b""

    @abstractmethod
    def _parts(self, output: PackedOutput) -> Iterator[bytes]:
        """Yield the parts of the answer."""


class TokenizeEncoder(_TaskEncoder):
    """The answer of `/tokenize`."""

    def _parts(self, output: PackedOutput) -> Iterator[bytes]:
        yield b'{"count":%d,"max_model_len":%d,"tokens":' % (output.num_tokens, output.max_model_len)
        yield from _list_parts(output.token_ids())
        yield b',"token_strs":'
        if output.has_strs:
            yield from _list_parts(output.token_strs())
        else:
            yield b"null"
        yield b"}"


class DetokenizeEncoder(_TaskEncoder):
    """The answer of `/detokenize`."""

    def _parts(self, output: PackedOutput) -> Iterator[bytes]:
        return json_parts({"prompt": Text(output.text_parts)})


def _list_parts(values: Iterator[int] | Iterator[str]) -> Iterator[bytes]:
    """Yield a JSON array in parts."""
    yield b"["
    is_first = True
    while batch := list(islice(values, VALUES_PER_PART)):
        yield (b"" if is_first else b",") + to_json(batch)[1:-1]
        is_first = False
    yield b"]"


# `POST /tokenize` and `POST /detokenize`.

_TOKENIZED = object_of(
    count=NUMBER, max_model_len=NUMBER, tokens=list_of(NUMBER), token_strs={"anyOf": [list_of(TEXT), {"type": "null"}]}
)
_TOKENIZE = RouteDoc("Return the tokens of a text or a chat.", _TOKENIZED)
_DETOKENIZE = RouteDoc("Return the text of tokens, special tokens included.", object_of(prompt=TEXT))


def _routes(services: Services) -> list[Route]:
    reader, answers = services.reader, services.answers
    tokenize = Generate(TokenizeRequest, TaskDialect(TokenizeEncoder), reader, answers, _TOKENIZE)
    detokenize = Generate(DetokenizeRequest, TaskDialect(DetokenizeEncoder), reader, answers, _DETOKENIZE)
    return [Route("/tokenize", tokenize, methods=["POST"]), Route("/detokenize", detokenize, methods=["POST"])]


TOKENS = HttpDialect(_routes, bodies=(TokenizeRequest, DetokenizeRequest))
