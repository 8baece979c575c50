"""Tasks that the tokenizer answers alone: tokenization, and the text of tokens."""

from __future__ import annotations

import json
from datetime import datetime

from penstock.contract.errors import InvariantError, RequestError, TooLargeError
from penstock.contract.tasks import MAX_OUTPUT_BYTES, MAX_TASK_TOKENS, Detokenize, Tokenize
from penstock.contract.tools import GENERATION_PROMPT
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.queue.results import encode_detokenized, encode_tokenized
from penstock.queue.wire import Request

IDS_PER_PART = 4096
"""Tokens whose spellings are in memory as texts at once."""


def run_task(tokenizer: Tokenizer, request: Request, tenant: str, max_model_len: int, now: datetime) -> bytes:
    """Return the packed output of a request's task. Raises RequestError if the request or its output is too large.

    `now`: the time that a chat template may print.
    """
    task = request.task
    if isinstance(task, Detokenize):
        output = encode_detokenized(tokenizer.text_of(request.prompt_token_ids or ()))
    elif isinstance(task, Tokenize):
        output = _tokenized(tokenizer, request, task, tenant, max_model_len, now)
    else:
        raise InvariantError("the request has no task for a tokenizer")
    if len(output) > MAX_OUTPUT_BYTES:
        message = f"the output has {len(output)} bytes; the limit is {MAX_OUTPUT_BYTES}"
        raise TooLargeError(message, code="output_too_large", param="prompt")
    return output


def _tokenized(
    tokenizer: Tokenizer, request: Request, task: Tokenize, tenant: str, max_model_len: int, now: datetime
) -> bytes:
    if request.messages is not None:
        token_ids = tokenizer.encode_chat(
            [message.model_dump(exclude_defaults=True) for message in request.messages],
            request.tools,
            _template_kwargs_of(request, task),
            framed=bool(task.add_special_tokens),
            now=now,
            owner=(tenant, None),
        )
    else:
        token_ids = tokenizer.encode(request.prompt or "", framed=task.add_special_tokens is not False)
    if len(token_ids) > MAX_TASK_TOKENS:
        message = f"prompt has {len(token_ids)} tokens; the limit of this task is {MAX_TASK_TOKENS}"
        raise RequestError(message, param="prompt")
    starts = range(0, len(token_ids), IDS_PER_PART)
    strs = (one for at in starts for one in tokenizer.names_of(token_ids[at : at + IDS_PER_PART]))
    return encode_tokenized(
        len(token_ids),
        max_model_len,
        token_ids if task.return_tokens else None,
        strs if task.return_token_strs else None,
    )


def _template_kwargs_of(request: Request, task: Tokenize) -> str | None:
    if task.add_generation_prompt:
        return request.chat_template_kwargs
    return json.dumps({**json.loads(request.chat_template_kwargs or "{}"), GENERATION_PROMPT: False})
