"""JSON schemas over HTTP, with a real model: enforced, or refused by the name of the field."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from bench import schemas
from fakes.cover import each_value
from fakes.processes.node_process import NodeProcess
from fakes.served_model import served
from faults.tools.processes import GatewayProcess
from fixtures.tiny_model import make_tiny_model
from hostile.grammars import SCHEMAS_FOLDER, real_schemas
from pydantic import BaseModel, ConfigDict, Field, HttpUrl

from penstock.cli.demo_model import demo_model
from penstock.contract.sampling import MAX_SCHEMA_CHARS

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(300)]
MAX_SHARE_REFUSED = 0.1


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["dog"]
    is_loud: bool


class Owner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pet: Cat | Dog = Field(discriminator="kind")
    color: Color
    home: HttpUrl | None = Field(default=None, json_schema_extra={"format": "web-page"})
    counts: dict[Literal["a", "b"], bool] = Field(max_length=2)


@pytest.fixture(scope="module")
def url(redis_url_of_file: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    node = NodeProcess(redis_url_of_file, model=model, dtype="bfloat16")
    with node, GatewayProcess(redis_url_of_file) as gateway:
        yield gateway.url


def ask(url: str, **options: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "the gate", "max_tokens": 200, "temperature": 1, "seed": 3} | options
    return httpx.post(f"{url}/v1/completions", json=body, timeout=200)


def wants(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def test_a_model_of_pydantic_is_answered(url: str) -> None:
    schema = Owner.model_json_schema()
    assert {"oneOf", "propertyNames"} <= {word.strip('"') for word in json.dumps(schema).replace(":", " ").split()}
    choices = ask(url, n=8, **wants(schema)).json()["choices"]
    whole = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    for text in whole:
        answer = json.loads(text)
        assert answer["counts"].keys() <= {"a", "b"} and answer["color"] in ("red", "blue")
        (Cat if answer["pet"]["kind"] == "cat" else Dog).model_validate(answer["pet"])


@pytest.mark.parametrize("stream", [False, True])
def test_an_object_of_500_optional_properties_is_answered(url: str, stream: bool) -> None:
    schema = {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(500)}}
    answer = ask(url, stream=stream, **wants(schema))
    assert answer.status_code == 200 and "error" not in answer.text


@pytest.mark.parametrize(
    ("stream", "refusal"),
    each_value(
        [False, True],
        [
            (wants({"type": "array", "uniqueItems": True}), "response_format.json_schema", "uniqueItems at #"),
            (wants({"type": "object", "x-guidance": {"lenient": True}}), "response_format.json_schema", "x-guidance"),
            (
                wants({"type": "object", "properties": {f"key{i}": True for i in range(9000)}}),
                "response_format.json_schema",
                "too costly",
            ),
            ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
            ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "line 1, column 8"),
        ],
    ),
)
def test_what_cannot_be_enforced_is_refused_with_its_reason(
    url: str, stream: bool, refusal: tuple[dict[str, Any], str, str]
) -> None:
    options, param, reason = refusal
    answer = ask(url, stream=stream, **options)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert reason in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(("num_chars", "status"), [(MAX_SCHEMA_CHARS, 200), (MAX_SCHEMA_CHARS + 1, 400)])
def test_a_schema_may_have_as_many_characters_as_documented(url: str, num_chars: int, status: int) -> None:
    text = '{"type": "boolean", "description": ""}'
    schema = json.loads(text) | {"description": "d" * (num_chars - len(text))}
    assert len(json.dumps(schema)) == num_chars
    answer = ask(url, **wants(schema))
    assert answer.status_code == status
    assert (str(MAX_SCHEMA_CHARS) in answer.text) == (status == 400)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_three_hundred_public_schemas_get_valid_answers_and_few_are_refused() -> None:
    pytest.importorskip("jsonschema")
    folder = os.environ.get(SCHEMAS_FOLDER)
    if folder is not None:
        asked = schemas.schemas_of(Path(folder))
    else:
        # The references of a schema that was cut out of a larger one lead nowhere.
        whole = [(str(i), one) for i, one in enumerate(real_schemas()) if '"$ref"' not in json.dumps(one)]
        if len(whole) < schemas.COUNT:
            pytest.skip("the package check-jsonschema is not installed")
        asked = random.Random(schemas.SEED).sample(whole, schemas.COUNT)
    with served(demo_model()) as url:
        found = schemas.measure(url, asked)
    assert found.failures == [], found.report()
    assert found.num_valid > 0
    assert found.num_refused <= MAX_SHARE_REFUSED * found.num_schemas, found.report()
