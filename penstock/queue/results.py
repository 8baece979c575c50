"""Results as msgpack, in and out; see `wire.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.contract.job import Choice, Outcome, Result, Usage
from penstock.contract.logprobs import TokenLogprobs
from penstock.queue import packed_logprobs
from penstock.queue.msgpack_codec import WireError, pack
from penstock.queue.wire import VERSION, unpack_map


def encode_result(
    choices: tuple[Choice, ...],
    usage: Usage,
    cuts: list[tuple[int, int, int]],
    prompt_logprobs: Sequence[TokenLogprobs] = (),
) -> bytes:
    """The part of a result that the node knows; the rest stands in the job's hash."""
    fields: dict[str, Any] = {
        "v": VERSION,
        "choices": [_choice_fields(choice) for choice in choices],
        "u": [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens],
        "cuts": cuts,
    }
    if prompt_logprobs:
        fields["q"] = packed_logprobs.to_wire(prompt_logprobs)
    return pack(fields)


def decode_result(data: bytes, job_id: str, outcome: Outcome, times_ms: tuple[int, int, int, int]) -> Result:
    """A result from the node's bytes and the job's record; `times_ms`: submitted, taken, first, finished."""
    m = unpack_map(data)
    try:
        choices = tuple(_choice_of(fields) for fields in m["choices"])
        cuts = tuple((int(c), int(t), int(s)) for c, t, s in m["cuts"])
        prompt = packed_logprobs.from_wire(m.get("q", []))
        return Result(job_id, outcome, choices, Usage(*m["u"]), *times_ms, cuts=cuts, prompt_logprobs=prompt)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"not a result: {error!r}") from error


def _choice_fields(choice: Choice) -> dict[str, Any]:
    fields: dict[str, Any] = {"c": choice.index, "s": choice.text, "t": choice.token_ids, "f": choice.finish_reason}
    return fields | {"l": packed_logprobs.to_wire(choice.logprobs)} if choice.logprobs else fields


def _choice_of(fields: dict[str, Any]) -> Choice:
    c, s, t, f = (fields[key] for key in "cstf")
    return Choice(c, s, tuple(t), f, packed_logprobs.from_wire(fields.get("l", []), t))
