"""What the type checkers must refuse: each marked line has one error."""

from __future__ import annotations

from penstock import Client, Engine, SamplingParams, StructuredOutputs

SamplingParams(max_token=8)  # wrong
SamplingParams(max_tokens="many")  # wrong
StructuredOutputs(choices=["yes"])  # wrong


def read(client: Client) -> None:
    client.submit("Hello", max_token=8)  # wrong
    client.submit("Hello", temperature="hot")  # wrong
    print(client.submit("Hello").text)  # wrong
    client.generate(["Hello"], job_id="one")  # wrong
    client.generate(["Hello"], max_token=8)  # wrong
    client.map(5)  # wrong
    print(client.generate("Hello").text)  # wrong
    Engine("model.gguf").generate(["Hello"], 8)  # wrong
