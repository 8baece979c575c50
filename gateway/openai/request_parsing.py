"""From a request's bytes to a checked record, and from that to an order."""

from __future__ import annotations

from fastapi import Request

from penstock.contract.api_keys import ApiKey
from penstock.contract.errors import RequestError
from penstock.contract.job import is_job_id
from penstock.contract.rights import allowed_class
from penstock.gateway.authentication import caller_of
from penstock.gateway.body import num_bytes_to_hold, read_json_body
from penstock.gateway.body_parser import Parser
from penstock.gateway.openai.parsed_body import ParsedBody
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.shared_budget import SharedBudget
from penstock.gateway.stream.generation_request import GenerationRequest, StreamPosition

KEY_HEADER = "idempotency-key"
MAX_KEY_CHARS = 200
"""Shorter than a job's key may be: the prompt's number is added where there are several."""
AFTER = "after"
PLACE_HEADER = "last-event-id"
"""What browsers call it. Either comes with the body as it was sent before; the stream goes on behind that event."""
MAX_NUMBER_DIGITS = 9


async def read_body(request: Request, form: str) -> ParsedBody:
    """What the request's body asks for, checked; `form` is one of `asked.BODIES`."""
    state, owner = request.app.state, caller_of(request).tenant
    settings: GatewaySettings = state.settings
    budget: SharedBudget = state.body_budget
    parser: Parser = state.parser
    async with budget.taken(owner, num_bytes_to_hold(request, settings.max_body_bytes)):
        raw = await read_json_body(request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
        return await parser.parse(form, raw, owner)


def idempotency_key_of(request: Request) -> str | None:
    """The key under which the caller may ask again."""
    key = request.headers.get(KEY_HEADER)
    if key is not None and not 1 <= len(key) <= MAX_KEY_CHARS:
        raise RequestError(f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters", param=KEY_HEADER)
    return key


def place_of(request: Request, asked: ParsedBody) -> StreamPosition | None:
    """Where the caller's stream was cut: the id of the last event that arrived, None for a new request."""
    said = request.query_params.get(AFTER) or request.headers.get(PLACE_HEADER)
    if not said:
        return None
    job_id, *numbers = said.rsplit(":", 2)
    if not is_job_id(job_id) or len(numbers) != 2 or not all(map(_is_number, numbers)):
        raise RequestError("not the id of an event of ours, which is <job>:<chunk>:<tokens>", param=AFTER)
    if not asked.stream or len(asked.prompts) != 1:
        raise RequestError("only a stream of one prompt goes on where it was cut", param=AFTER)
    return StreamPosition(job_id, *map(int, numbers))


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_NUMBER_DIGITS


def _limit_of(caller: ApiKey) -> str:
    return "this API key" if caller.key_id else "this gateway while it has no API keys (open_highest_class)"


def order_of(request: Request, asked: ParsedBody) -> GenerationRequest:
    """What the caller asks of the queue."""
    caller = caller_of(request)
    return GenerationRequest(
        asked.model,
        asked.prompts,
        asked.params,
        allowed_class(asked.priority, caller.highest_class, _limit_of(caller)),
        tenant=caller.tenant,
        terms=caller.metered_terms,
        idempotency_key=idempotency_key_of(request),
        cut_at=place_of(request, asked),
        names=asked.names,
        tool_use=asked.tool_use,
        echoes=asked.echoes,
    )
