"""The official, unmodified OpenAI client: answers agree with its requests."""

from __future__ import annotations

import asyncio
import inspect
import uuid

import openai
import pytest
from fakes.waiting import wait_until
from pydantic import BaseModel

from penstock.contract.job import SamplingParams

MODEL = "acme/echo"
NASTY = 'line one\nline two\r\n\r\ndata: [DONE]\n\n"quoted" \\ \u2028 \x85 \x00 żółć 漢字 🐢👩‍👩‍👧 end'


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chat_answers_with_text_usage_and_finish_reason(api):
    answer = api.chat.completions.create(model=MODEL, messages=user("hello there"))
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello there", "stop")
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-echo.")
    assert answer.model == MODEL
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (11, 11, 22)


def test_chat_streams_pieces_that_make_up_the_text(api):
    with api.chat.completions.create(model=MODEL, messages=user("hello"), stream=True) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content for c in chunks) == "hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_any_text_arrives_unchanged(api, stream):
    if stream:
        chunks = api.completions.create(model=MODEL, prompt=NASTY, max_tokens=200, stream=True)
        text = "".join(c.choices[0].text for c in chunks)
    else:
        text = api.completions.create(model=MODEL, prompt=NASTY, max_tokens=200).choices[0].text
    assert text == NASTY


def test_incomplete_character_sends_no_empty_event(api):
    chunks = list(api.chat.completions.create(model=MODEL, messages=user("🐢!"), stream=True))
    assert "".join(c.choices[0].delta.content for c in chunks) == "🐢!"
    assert all(c.choices[0].delta.content for c in chunks)


def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for(api):
    stream = api.chat.completions.create(
        model=MODEL, messages=user("abc"), stream=True, stream_options={"include_usage": True}
    )
    *pieces, last = list(stream)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 3)
    assert all(piece.usage is None and piece.choices for piece in pieces)


def test_completions_have_16_tokens_by_default(api):
    answer = api.completions.create(model=MODEL, prompt="x" * 40)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("x" * 16, "length")
    assert answer.id.startswith("cmpl-echo.")
    assert len(api.completions.create(model=MODEL, prompt="x" * 40, max_tokens=20).choices[0].text) == 20


def test_chat_without_a_limit_continues_to_its_end(api):
    answer = api.chat.completions.create(model=MODEL, messages=user("y" * 100))
    assert len(answer.choices[0].message.content) == 100


def test_both_names_of_the_chat_limit_count(api):
    old = api.chat.completions.create(model=MODEL, messages=user("abcdef"), max_tokens=2)
    new = api.chat.completions.create(model=MODEL, messages=user("abcdef"), max_completion_tokens=2)
    assert old.choices[0].message.content == new.choices[0].message.content == "ab"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("plain", ["plain"]), ([104, 105], ["hi"]), (["one", "two"], ["one", "two"]), ([[104, 105], [106]], ["hi", "j"])],
)
def test_prompts_may_be_text_or_token_ids_or_lists_of_them(api, prompt, texts):
    answer = api.completions.create(model=MODEL, prompt=prompt)
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate(texts))
    streamed = dict.fromkeys(range(len(texts)), "")
    for chunk in api.completions.create(model=MODEL, prompt=prompt, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts


def test_choices_are_numbered_over_all_prompts_and_usage_is_summed(api):
    answer = api.completions.create(model=MODEL, prompt=["ab", "cde"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "ab"), (1, "ab"), (2, "cde"), (3, "cde")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 10)
    *pieces, last = api.completions.create(
        model=MODEL, prompt=["ab", "cde"], n=2, stream=True, stream_options={"include_usage": True}
    )
    assert sorted({piece.choices[0].index for piece in pieces}) == [0, 1, 2, 3]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 10)


def test_n_chat_choices_each_begin_with_their_role(api):
    chunks = list(api.chat.completions.create(model=MODEL, messages=user("ab"), n=2, stream=True))
    roles = [c.choices[0].index for c in chunks if c.choices[0].delta.role == "assistant"]
    assert sorted(roles) == [0, 1]


def test_stop_and_extensions_reach_the_engine(api):
    answer = api.chat.completions.create(
        model=MODEL,
        messages=user("abcdef"),
        stop="d",
        seed=7,
        extra_body={"top_k": 5, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [1]},
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_every_sampling_option_reaches_the_engine(api, engine, stream):
    options = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": -1.5, "frequency_penalty": 0.25, "seed": 3}
    options |= {"logit_bias": {"20": -100, "3": 1.5}}
    extensions = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "bad_words": ["no", "never"]}
    extensions["include_stop_str_in_output"] = True
    said = api.completions.create(
        model=MODEL, prompt="a", max_tokens=9, stream=stream, **options, extra_body=extensions
    )
    assert "".join(part.choices[0].text for part in (said if stream else [said])) == "a"
    assert engine.last_params == SamplingParams(max_tokens=9, **options, **extensions)


def test_a_response_format_reaches_the_engine(api, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"name": "thing", "schema": schema, "strict": True}
    for form, wanted in (
        ({"type": "json_schema", "json_schema": named}, {"json": schema | {"additionalProperties": False}}),
        ({"type": "json_schema", "json_schema": named | {"strict": False}}, {"json": schema}),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "text"}, None),
    ):
        api.chat.completions.create(model=MODEL, messages=user("a"), response_format=form)
        assert engine.last_params == SamplingParams(structured_outputs=wanted)
    for wanted in ({"choice": ["a", "b"]}, {"json": schema}):
        api.completions.create(model=MODEL, prompt="a", max_tokens=9, extra_body={"structured_outputs": wanted})
        assert engine.last_params == SamplingParams(max_tokens=9, structured_outputs=wanted)


def test_an_answer_can_be_sent_back_as_it_came(api):
    first = api.chat.completions.create(model=MODEL, messages=user("hello"))
    turns = [*user("hello"), first.choices[0].message.model_dump(), *user("again")]
    assert api.chat.completions.create(model=MODEL, messages=turns).choices[0].message.content == "again"


def test_text_parts_are_joined(api):
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    answer = api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "abcd"


def test_models_are_listed_under_all_their_names(api):
    assert {model.id for model in api.models.list()} == {MODEL, "echo-alias", "echo-tuned"}
    model = api.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "penstock")
    assert api.completions.create(model="echo-alias", prompt="a").choices[0].text == "a"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("nobody/nothing")


def test_wrong_options_raise_bad_request_naming_the_field(api):
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model=MODEL, messages=user("a"), max_tokens=-1)
    assert caught.value.param == "max_tokens"
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_not_found(api):
    with pytest.raises(openai.NotFoundError) as caught:
        api.chat.completions.create(model="nobody/nothing", messages=user("a"))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_models_limit_is_a_real_400(api, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model=MODEL, messages=user("a" * 300), stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("stream", [False, True])
def test_one_refused_prompt_refuses_the_whole_list(api, engine, stream):
    engine.step_s = 0.05
    with pytest.raises(openai.BadRequestError):
        api.completions.create(model=MODEL, prompt=["a" * 300, "fine"], stream=stream)


def test_a_body_over_the_limit_is_413(api):
    with pytest.raises(openai.APIStatusError) as caught:
        api.chat.completions.create(model=MODEL, messages=user("a" * (9 << 20)))
    assert caught.value.status_code == 413
    assert caught.value.code == "body_too_large"


async def test_the_async_client_works_alike(url, engine):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:

        async def streamed(text: str) -> str:
            stream = await api.chat.completions.create(model=MODEL, messages=user(text), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = [f"request number {i}" for i in range(20)]
        assert await asyncio.gather(*map(streamed, texts)) == texts
        with pytest.raises(openai.BadRequestError):
            await api.completions.create(model=MODEL, prompt="a", top_p=2)


def test_the_clients_own_stream_helper_puts_a_stream_together(api):
    with api.chat.completions.stream(model=MODEL, messages=user("hello")) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "hello"


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_own_parsing_gets_an_answer_of_the_model_that_it_asked_for(api, stream):
    class River(BaseModel):
        name: str
        length_km: int

    asked = {"model": MODEL, "messages": user('{"name": "Oder", "length_km": 840}'), "response_format": River}
    if stream:
        with api.chat.completions.stream(**asked) as events:
            answer = events.get_final_completion()
    else:
        answer = api.chat.completions.parse(**asked)
    assert answer.choices[0].message.parsed == River(name="Oder", length_km=840)


def test_answers_streams_and_refusals_have_the_request_id_of_the_log(api, caplog):
    with caplog.at_level("INFO", "penstock.gateway.access"):
        answer = api.chat.completions.create(model=MODEL, messages=user("a"))
        raw = api.completions.with_raw_response.create(model=MODEL, prompt="a", stream=True)
        assert len(list(raw.parse())) == 1
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model=MODEL, prompt="a", top_p=2)
        ids = [answer._request_id, raw.headers["x-request-id"], caught.value.request_id]
        assert len(set(ids)) == 3
        # A line is written behind the answer that it tells of, so that an earlier test's last one may come here too.
        wait_until(
            lambda: (
                [record.request_id for record in caplog.records if getattr(record, "request_id", None) in ids] == ids
            ),
            what=lambda: caplog.text,
        )


def test_raw_response_names_the_job(api):
    raw = api.chat.completions.with_raw_response.create(model=MODEL, messages=user("a"))
    assert f"chatcmpl-{raw.headers['x-penstock-job']}" == raw.parse().id


@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_every_option_of_openais_may_be_null(api, dialect):
    create, said = api.completions.create, {"model": MODEL, "prompt": "a"}
    if dialect == "chat":
        create, said = api.chat.completions.create, {"model": MODEL, "messages": user("a")}
    of_the_call = {"extra_headers", "extra_query", "extra_body", "timeout"}
    options = inspect.signature(create).parameters.keys() - said.keys() - of_the_call
    assert {"seed", "stop", "temperature", "stream"} < options
    assert create(**said, **dict.fromkeys(options)).choices[0].finish_reason == "stop"


def test_client_does_not_retry_a_conflict(api, http):
    def num_conflicts() -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if "refusals_total" in line and "conflict" in line)

    before, key = num_conflicts(), {"Idempotency-Key": uuid.uuid4().hex}
    persistent = api.with_options(max_retries=2)
    persistent.completions.create(model=MODEL, prompt="a", extra_headers=key)
    with pytest.raises(openai.ConflictError):
        persistent.completions.create(model=MODEL, prompt="b", extra_headers=key)
    assert num_conflicts() == before + 1
