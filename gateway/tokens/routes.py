"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from starlette.routing import Route

from penstock.gateway.generate import Generate
from penstock.gateway.route_doc import NUMBER, TEXT, RouteDoc, list_of, object_of
from penstock.gateway.tokens.encoders import DetokenizeEncoder, TokenizeEncoder
from penstock.gateway.tokens.task_dialect import TaskDialect

_TOKENIZED = object_of(
    count=NUMBER, max_model_len=NUMBER, tokens=list_of(NUMBER), token_strs={"anyOf": [list_of(TEXT), {"type": "null"}]}
)
_TOKENIZE = RouteDoc("Return the tokens of a text or a chat.", _TOKENIZED)
_DETOKENIZE = RouteDoc("Return the text of tokens, special tokens included.", object_of(prompt=TEXT))

ROUTES = (
    Route("/tokenize", Generate("tokenize", TaskDialect(TokenizeEncoder), _TOKENIZE), methods=["POST"]),
    Route("/detokenize", Generate("detokenize", TaskDialect(DetokenizeEncoder), _DETOKENIZE), methods=["POST"]),
)
