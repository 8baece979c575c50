"""Get an answer as a pydantic model: the model can write nothing but JSON of its schema."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock import Client, StructuredOutputs


class River(BaseModel):
    """What we want to know of a river, and no more."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=24)
    continent: Literal["Africa", "America", "Asia", "Europe"]
    length_km: int = Field(ge=1, le=9999)


with Client() as client:
    (result,) = client.generate(
        [{"role": "user", "content": "Describe the river Nile."}],
        structured_outputs=StructuredOutputs(json=River.model_json_schema()),
        max_tokens=200,
        temperature=0,
    )

print(repr(River.model_validate_json(result.text)))
