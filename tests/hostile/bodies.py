"""Bodies for the fuzzer: a number determines a request."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import dataclass, field
from typing import Any

from hostile.fields import LIMITS
from hostile.grammars import TEXTS, random_grammar, random_regex, random_schema, random_value, real_schemas

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
INPUT_TOKENS, COMPACT = "/v1/responses/input_tokens", "/v1/responses/compact"
TOKENIZE, DETOKENIZE, JOBS = "/tokenize", "/detokenize", "/v1/jobs"


@dataclass(frozen=True)
class Case:
    """One request, and the properties of its answer that are known in advance."""

    number: int
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    must_refuse: bool = False
    """One above a limit: nothing but a 4xx will do."""
    hangs_up: bool = False
    """The caller leaves when the answer has begun."""


def case_of(seed: int, number: int, model: str) -> Case:
    """Return the request of that number."""
    rng = random.Random(f"{seed}:{number}")
    kind = rng.random()
    if kind < 0.10:
        return _at_a_limit(rng, number, model)
    if kind < 0.18:
        return _no_body(rng, number, model)
    if kind < 0.25:
        return _task(rng, number, model)
    if kind < 0.32:
        return _job(rng, number, model)
    if kind < 0.37:
        return _conversation(rng, number, model)
    return _of_fields(rng, number, model)


def _of_fields(rng: random.Random, number: int, model: str) -> Case:
    is_chat = rng.random() < 0.4
    body: dict[str, Any] = {"model": model, "max_tokens": rng.choice((1, 2, 3, 8, 24))}
    if is_chat:
        body["messages"] = _messages(rng)
    else:
        body["prompt"] = _prompt(rng)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        body.update(_field(rng, is_chat))
    if rng.random() < 0.45:
        body.update(_grammar(rng, is_chat))
    if rng.random() < 0.4:
        body["stream"] = True
    if rng.random() < 0.06:
        body[rng.choice(list(body))] = random_value(rng)
    headers = _headers(rng) if rng.random() < 0.08 else {}
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    return Case(number, CHAT if is_chat else COMPLETIONS, raw, headers, hangs_up=rng.random() < 0.05)


def _task(rng: random.Random, number: int, model: str) -> Case:
    """Return a request for the tokens of a text or a chat, or for the text of tokens."""
    body: dict[str, Any] = {"model": model}
    path = TOKENIZE if rng.random() < 0.7 else DETOKENIZE
    if path == DETOKENIZE:
        body["tokens"] = [rng.choice((0, 1, 5, 200, 49_151, 49_152, 1 << 20)) for _ in range(rng.randrange(2000))]
    elif rng.random() < 0.4:
        body["messages"] = _messages(rng)
        body.update({"tools": _tools(rng)} if rng.random() < 0.3 else {})
    else:
        body["prompt"] = rng.choice(
            (*TEXTS, "a" * 20_000, " " * 9000, "\u0301" * 5000, "\U0001f469\u200d" * 900, "say " * 9000)
        )
    for name in ("add_special_tokens", "add_generation_prompt", "return_token_strs", "cache_salt"):
        if rng.random() < 0.3:
            body[name] = rng.choice((True, False, None, "x"))
    return Case(number, path, json.dumps(body).encode(errors="surrogatepass"), hangs_up=rng.random() < 0.05)


def _conversation(rng: random.Random, number: int, model: str) -> Case:
    """Return a response, a count, or a compaction, which no genuine summary is part of and which is refused."""
    path = rng.choice((RESPONSES, INPUT_TOKENS, COMPACT))
    items = [_item(rng) for _ in range(rng.randrange(1, 6))]
    if path == COMPACT:
        items.append({"type": "compaction", "encrypted_content": _summary(rng)})
    body: dict[str, Any] = {"model": model, "input": items}
    if path == RESPONSES:
        body["max_output_tokens"] = rng.choice((1, 2, 8))
    for name in ("instructions", "previous_response_id", "tools", "tool_choice", "conversation", "stream"):
        if rng.random() < 0.1:
            body[name] = rng.choice((*TEXTS, random_value(rng), "none", True))
    raw = json.dumps(body).encode(errors="surrogatepass")
    return Case(number, path, raw, must_refuse=path == COMPACT, hangs_up=rng.random() < 0.05)


def _item(rng: random.Random) -> Any:
    kinds = ("message", "function_call", "function_call_output", "compaction", "compaction_summary", "reasoning")
    item: dict[str, Any] = {"type": rng.choice((*kinds, "item_reference", "compaction_trigger", *TEXTS))}
    item["role"] = rng.choice(("user", "assistant", "system", "developer", "nobody"))
    item["content"] = rng.choice(("hi", [{"type": "input_text", "text": "hi"}], [{"type": "input_image"}], *TEXTS))
    item |= {"call_id": rng.choice(("c", *TEXTS)), "name": "f", "arguments": "{}", "output": rng.choice(TEXTS)}
    item |= {"encrypted_content": _summary(rng), "id": rng.choice(("msg_0_x", *TEXTS))}
    if rng.random() < 0.1:
        item[rng.choice(list(item))] = random_value(rng)
    return item


def _summary(rng: random.Random) -> str:
    """Return the form of a sealed summary, with a text that may be broken and a seal that no gateway made."""
    text = rng.choice((b"", b"a summary", b"\xff", rng.choice(TEXTS).encode(errors="replace") * 900))
    raw = rng.choice((b"\x01", b"\x00")) + rng.randbytes(32) + text
    return rng.choice((base64.urlsafe_b64encode(raw).decode(), base64.b64encode(raw).decode()[:-1], raw.hex(), ""))


def _job(rng: random.Random, number: int, model: str) -> Case:
    """Return a job without a reader, or a list of them. It ends within seconds, because the run waits for it."""
    body: Any = _one_job(rng, model)
    if rng.random() < 0.25:
        body = [_one_job(rng, model) for _ in range(rng.choice((0, 1, 2, 5)))]
        body += [random_value(rng)] if rng.random() < 0.3 else []
        body = {"jobs": body} if rng.random() < 0.3 else body
    return Case(number, JOBS, json.dumps(body).encode(errors="surrogatepass"))


def _one_job(rng: random.Random, model: str) -> dict[str, Any]:
    """Return the body of a job, often a delayed one, and sometimes with the body of another endpoint."""
    params: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 8)), "n": rng.choice((1, 1, 2, 8, 16, 17))}
    body: dict[str, Any] = {"model": model, "params": params}
    if rng.random() < 0.3:
        body["messages"] = _messages(rng)
    else:
        body["prompt"] = rng.choice(("Say", "x" * rng.randrange(1, 900), "".join(rng.choices(TEXTS, k=9))))
    if rng.random() < 0.6:
        body["not_before_s"] = rng.choice(_DELAYS)
    if rng.random() < 0.2:
        body[rng.choice(("deadline_s", "ttl_s", "background", "priority", "idempotency_key"))] = rng.choice(_NUMBERS)
    if rng.random() < 0.2:
        params[rng.choice(_NUMBER_FIELDS)] = rng.choice(_NUMBERS)
    if rng.random() < 0.2:
        body[rng.choice(_NUMBER_FIELDS)] = rng.choice(_NUMBERS)
    if rng.random() < 0.25:
        prompt = {"messages": body.pop("messages")} if "messages" in body else {"prompt": body.pop("prompt")}
        of_endpoint = {**prompt, **body.pop("params")}
        url = rng.choice((CHAT, COMPLETIONS, "/v1/embeddings", RESPONSES, *TEXTS))
        body |= {"url": url, "body": of_endpoint, "custom_id": rng.choice(("row", *TEXTS))}
    return body


def _prompt(rng: random.Random) -> Any:
    texts = ("Say", "x" * rng.randrange(1, 900), "".join(rng.choices(TEXTS, k=9)), "\U0010ffff", " ", "")
    if rng.random() < 0.02:
        return "\ud83d"
    ids = [rng.choice((0, 1, 5, 200, 49_151, 49_152, 1 << 20)) for _ in range(rng.randrange(1, 40))]
    return rng.choice((*texts, ids, [ids, ids], [texts[0], texts[2]], [texts[0]] * rng.choice((2, 5, 20))))


def _messages(rng: random.Random) -> list[Any]:
    def turn() -> dict[str, Any]:
        said: dict[str, Any] = {"role": rng.choice(("user", "assistant", "system", "tool", "user", "nobody"))}
        said["content"] = rng.choice(("hi", [{"type": "text", "text": "hi"}], [{"type": "image_url"}], None, *TEXTS))
        if rng.random() < 0.1:
            function = {"name": rng.choice(TEXTS), "arguments": json.dumps(random_value(rng))}
            said["tool_calls"] = [{"id": rng.choice(TEXTS), "type": "function", "function": function}]
        if rng.random() < 0.1:
            said["tool_call_id"] = rng.choice(TEXTS)
        return said

    usual = [{"role": "user", "content": "hi"}]
    return [turn() for _ in range(rng.randrange(5))] if rng.random() < 0.4 else usual


_NUMBERS = (0, 1, -1, 2, 0.5, 1.0, 16, 17, 20, 21, 100, 1 << 20, (1 << 20) + 1, 1 << 63, 10**30, 1e308, "1", None, True)
_DELAYS = (0, 0.05, 0.2, 1, -1, 1e308, 10**30, "1", None)
"""Values of `not_before_s`."""
_NUMBER_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "top_logprobs", "max_completion_tokens"),
    *("best_of", "ignore_eos", "include_stop_str_in_output", "echo", "stream", "store", "parallel_tool_calls"),
)


def _field(rng: random.Random, is_chat: bool) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.5:
        return {rng.choice(_NUMBER_FIELDS): rng.choice(_NUMBERS)}
    if kind < 0.6:
        return {rng.choice(("user", "metadata", "response_format", "suffix", "nonsense", *TEXTS)): random_value(rng)}
    if kind < 0.63:
        return {"n": rng.choice((2, 8, 16)), "max_tokens": 3}
    if kind < 0.66:
        return {"not_before_s": rng.choice(_DELAYS)}
    if kind < 0.76 and is_chat:
        return {"chat_template_kwargs": _template_variables(rng)}
    if kind < 0.84 and is_chat:
        return {
            "tools": _tools(rng),
            "tool_choice": rng.choice(("auto", "required", "none", "x", None, {"type": "function"})),
        }
    return rng.choice(
        (
            {"stop": [rng.choice(TEXTS) for _ in range(rng.randrange(4))]},
            {"stop": rng.choice(TEXTS)},
            {"stop_token_ids": [rng.randrange(-1, 50_000) for _ in range(rng.randrange(4))]},
            {"bad_words": [rng.choice(TEXTS) for _ in range(rng.randrange(4))]},
            {
                "logit_bias": {
                    str(rng.randrange(-1, 50_000)): rng.choice((1, -100, 100, 101, 0.5, None)) for _ in range(3)
                }
            },
            {"stream": True, "stream_options": rng.choice(({"include_usage": True}, {}, None, {"x": 1}, 5))},
            {"priority": rng.choice(("interactive", "standard", "batch", "urgent", 0, None))},
            {"logprobs": True, "top_logprobs": 3} if is_chat else {"logprobs": 3, "echo": True},
        )
    )


def _template_variables(rng: random.Random) -> Any:
    deep: Any = "x"
    for _ in range(rng.choice((5, 60, 900))):
        deep = {"a": deep}
    return rng.choice(
        (
            {"enable_thinking": rng.choice((True, False, None, "x"))},
            {rng.choice(("messages", "tools", "bos_token", "add_generation_prompt", "loop", "__class__")): "x"},
            {rng.choice(TEXTS): random_value(rng) for _ in range(rng.randrange(4))},
            {"text": "{% for i in range(10**9) %}{% endfor %}" * 20},
            {"text": "x" * 4000},
            {"deep": deep},
            random_value(rng),
        )
    )


def _tools(rng: random.Random) -> Any:
    def tool() -> Any:
        function = {"name": rng.choice(("f", *TEXTS)), "parameters": random_schema(rng), "strict": rng.random() < 0.5}
        return {"type": "function", "function": function} if rng.random() < 0.9 else random_value(rng)

    return [tool() for _ in range(rng.randrange(4))]


def _grammar(rng: random.Random, is_chat: bool) -> dict[str, Any]:
    def schema() -> Any:
        known = real_schemas()
        return rng.choice(known) if known and rng.random() < 0.5 else random_schema(rng)

    kind = rng.random()
    if kind < 0.3:
        return {"structured_outputs": {"json": schema()}}
    if kind < 0.5:
        named = {"name": "a", "schema": schema(), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    if kind < 0.7:
        return {"structured_outputs": {"regex": random_regex(rng, 6)}}
    if kind < 0.85:
        return {"structured_outputs": {"grammar": random_grammar(rng)}}
    if kind < 0.95:
        return {"structured_outputs": {"choice": [rng.choice(TEXTS) + str(i) for i in range(rng.choice((1, 3, 200)))]}}
    return {
        "structured_outputs": rng.choice(({"json_object": True}, {}, {"json": "{"}, {"regex": "a", "choice": ["b"]}))
    }


def _headers(rng: random.Random) -> dict[str, str]:
    job_id = "hostile.01890000-0000-7000-8000-000000000000"
    return rng.choice(
        (
            {"idempotency-key": f"k{rng.randrange(50)}"},
            {"idempotency-key": ""},
            {"last-event-id": f"{job_id}:{rng.choice((0, 5, 10**9))}:{rng.choice((0, 5, 10**12))}"},
            {"last-event-id": "nonsense"},
            {"content-type": "text/plain"},
            {"content-encoding": "gzip"},
            {"x-own": "y" * 3000},
            {"authorization": "Bearer pk-0123456789abcdef-x"},
            {"accept": "text/event-stream"},
        )
    )


def _no_body(rng: random.Random, number: int, model: str) -> Case:
    """Return a body that is not a JSON object, or almost none."""
    valid = json.dumps({"model": model, "prompt": "Say", "max_tokens": 2}).encode()
    at = rng.randrange(len(valid))
    deep = rng.choice((10, 1000, 50_000))
    raw = rng.choice(
        (
            valid[:at],
            valid[:at] + bytes([rng.randrange(256)]) + valid[at + 1 :],
            b"",
            b"null",
            b"[]",
            b"\xef\xbb\xbf" + valid,
            b"\xff\xfe{",
            valid * 2,
            b"[" * deep,
            b'{"a":' * deep,
            valid[:-1] + b', "n": NaN}',
            valid[:-1] + b', "n": 1, "n": 2}',
            valid[:-1] + b', "metadata": ' + b"[" * deep + b"]" * deep + b"}",
            valid[:-1] + b', "seed": ' + b"9" * rng.choice((19, 20, 4301, 100_000)) + b"}",
            valid[:-1] + b', "user": "\\ud800"}',
            valid.decode().encode("utf-16"),
        )
    )
    return Case(number, rng.choice((COMPLETIONS, CHAT, TOKENIZE, JOBS)), raw)


_RARE = ("body", "arguments of a call", "messages")
"""They are large."""


def _at_a_limit(rng: random.Random, number: int, model: str) -> Case:
    name = rng.choice(list(LIMITS))
    if name in _RARE and rng.random() < 0.8:
        name = "n"
    limit, fields = LIMITS[name]
    value = limit + rng.choice((-1, 0, 1))
    body = {"model": model, **fields(value)}
    path = CHAT if "messages" in body else RESPONSES if "input" in body else COMPLETIONS
    if path != RESPONSES:
        body.setdefault("max_tokens", 2)
    if path == COMPLETIONS:
        body.setdefault("prompt", f"{number}")
    headers: dict[str, str] = {}
    raw = json.dumps(body).encode()
    if name == "body":
        raw = raw.ljust(value)
    elif name == "head":
        # What else the head holds has some hundred bytes.
        headers = {"x-long": "h" * (value if value > limit else limit - 2000)}
    elif name == "idempotency key":
        headers = {"idempotency-key": f"{number}".ljust(value, "k")}
    return Case(number, path, raw, headers, must_refuse=value > limit)
