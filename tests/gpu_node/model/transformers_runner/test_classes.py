"""Each class of transformers that generates text computes its greedy tokens here, or is refused for a reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from fixtures.small_transformers import classes, outcome_of

PAGE = Path(__file__).parents[4] / "docs" / "MODELS.md"
SAMPLE = (
    "AfmoeForCausalLM",  # windows
    "DeepseekV3ForCausalLM",  # latent keys, values of another size, experts
    "DiffLlamaForCausalLM",  # two attentions with the same keys in a layer
    "Gemma4ForCausalLM",  # layers that share keys and values, two sizes of heads
    "GPT2LMHeadModel",
    "GptOssForCausalLM",  # sinks
    "Llama4ForCausalLM",  # chunks
    "OPTForCausalLM",  # a mask of ones for earlier tokens
    "BloomForCausalLM",  # an attention of its own
    "BambaForCausalLM",  # recurrent layers
    "JambaForCausalLM",  # states that are continued by single tokens only
    "MambaForCausalLM",  # no attention
    "XLMWithLMHeadModel",  # no cache
    "DeepseekV32ForCausalLM",  # sparse attention
)
"""Those that each run of the tests computes."""


@cache
def documented() -> Mapping[str, str]:
    """Return what docs/MODELS.md says of each class: a reason, or "" for one that is computed."""
    _, _, section = PAGE.read_text().partition("<!-- classes -->")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|$", section.partition("<!-- end of classes -->")[0], re.M)
    return {architecture: "" if outcome == "computes it" else outcome for architecture, outcome in rows}


def test_the_page_lists_each_class() -> None:
    assert set(documented()) == set(classes())


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in classes()]
)
def test_a_class_gives_the_tokens_of_transformers_or_is_refused_for_the_listed_reason(
    architecture: str, tmp_path: Path
) -> None:
    assert outcome_of(architecture, tmp_path) == documented()[architecture]
