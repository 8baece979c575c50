"""msgpack encoding and decoding of results; see `wire.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.contract.logprobs import TokenLogprobs
from penstock.contract.output import Choice, Outcome, Result, Usage
from penstock.queue import packed_logprobs
from penstock.queue.msgpack_codec import WireError, array_header, checked_map, pack, with_members
from penstock.queue.packed_logprobs import Rows, rows_of
from penstock.queue.protocol_version import PROTOCOL_VERSION
from penstock.queue.task_output import PackedOutput
from penstock.queue.wire import unpack_map


def encode_result(
    choices: tuple[Choice, ...],
    usage: Usage,
    cuts: list[tuple[int, int, int]],
    prompt_logprobs: Sequence[TokenLogprobs] | Rows = (),
    logprobs: Sequence[Rows] = (),
    *,
    output: bytes = b"",
) -> bytes:
    """Encode the part of a result that the node produces. The job's hash holds the rest: outcome and times.

    `logprobs` are the choices' log-probabilities, if they are packed already; else those in `choices` are packed.
    `output` is the packed output of the job's task, if it has one.
    """
    rows = logprobs or [rows_of(choice.logprobs) for choice in choices]
    prompt_rows = prompt_logprobs if isinstance(prompt_logprobs, Rows) else rows_of(prompt_logprobs)
    members: list[tuple[str, Iterable[bytes]]] = [
        ("choices", (array_header(len(choices)), *map(_packed_choice, choices, rows))),
        ("u", (pack([usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]),)),
        ("cuts", (pack(cuts),)),
    ]
    if prompt_rows.num_rows:
        members.append(("q", prompt_rows.array_parts))
    if output:
        members.append(("o", (output,)))
    return with_members(pack({"v": PROTOCOL_VERSION}), members)


def decode_result(data: bytes, job_id: str, outcome: Outcome, times_ms: tuple[int, int, int, int]) -> Result:
    """Decode a result from the node's bytes, with `outcome` and `times_ms` from the job's record.

    `times_ms` is (submitted, taken, first token, finished). Raises WireError.
    """
    m = unpack_map(data)
    try:
        choices = tuple(_choice_of(fields) for fields in m["choices"])
        cuts = tuple((int(c), int(t), int(s)) for c, t, s in m["cuts"])
        prompt = packed_logprobs.from_wire(m.get("q", []))
        output = PackedOutput(checked_map(m["o"])).whole() if "o" in m else None
        usage = Usage(*m["u"])
        return Result(job_id, outcome, choices, usage, *times_ms, cuts=cuts, prompt_logprobs=prompt, output=output)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"not a result: {error!r}") from error


def _packed_choice(choice: Choice, rows: Rows) -> bytes:
    data = pack({"c": choice.index, "s": choice.text, "t": choice.token_ids, "f": choice.finish_reason})
    return with_members(data, [("l", rows.array_parts)]) if rows.num_rows else data


def _choice_of(fields: dict[str, Any]) -> Choice:
    c, s, t, f = (fields[key] for key in "cstf")
    return Choice(c, s, tuple(t), f, packed_logprobs.from_wire(fields.get("l", []), t))
