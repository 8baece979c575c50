"""Formats of tool calls as data: nodes and gateways read the same record, and a new format is one entry of a table.

A *list* of calls may stand between `section` and `section_end`; each call begins with `call` and ends with `call_end`.
How a call says its name and arguments is its kind:

- `json`: an object with the name and the arguments under two keys.
- `named`: the name, then the arguments as a JSON object.
- `tagged`: the name, then each argument between tags of its own. The text of a value is typed by the function's schema.

The readers are in `contract/calls`, the grammars in the engine's `structured/call_grammar.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

KINDS = ("json", "named", "tagged")
"""The kinds that this release reads and writes. A record of another kind refuses tools."""
THINK = ("<think>", "</think>")
REASONING_MARKS = (
    THINK,
    ("[THINK]", "[/THINK]"),
    ("<mm:think>", "</mm:think>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("Here is my thought process:", "Here is my response:"),
)
"""The marks around reasoning by which templates tell it: of Qwen and most models, Mistral, MiniMax, Seed, Cohere, Gemma
4, harmony (gpt-oss) and Granite 3.2."""
TELLING_OF_REASONING = frozenset((*(mark for pair in REASONING_MARKS for mark in pair), "<|channel>")) - {"<|end|>"}
"""Marks of reasoning, and parts of them, that stay in the output text even if they are special tokens. Harmony's end of
a message also ends what is no reasoning."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls and reasoning. Members that a format does not use are empty."""

    name: str
    kind: str = "none"
    """One of KINDS, or `none`: this model takes no tools."""
    section: str = ""
    """The mark before the calls of an answer. Without it, each call has its own mark."""
    section_end: str = ""
    call: str = ""
    call_end: str = ""
    between: str = ""
    """What our writer and the grammars put between two calls."""
    padding: str = ""
    """What our writer and the grammars put behind an opening mark and before a closing one."""

    section_per_call: bool = False
    """Whether our writer and the grammars give each call a list of its own."""

    # Of kind json.
    is_bare: bool = False
    """Whether a call may begin a text without a mark. Only its position tells it from other JSON."""
    is_list: bool = False
    """Whether the objects stand in a JSON list."""
    name_key: str = "name"
    arguments_key: str = "arguments"

    # Of kinds named and tagged.
    name_prefix: str = ""
    """What stands before the function's name, if the model writes it."""
    name_end: str = ""
    """The mark behind the name. Empty: the name ends where the arguments or the end of the call begin."""
    id_mark: str = ""
    """The mark between the name and the id of a call, if the model writes ids."""
    id_end: str = ""
    """The mark between the id of a call and its name, if the model writes ids first."""
    counts_calls: bool = False
    """Whether the name ends with a colon and the number of the call."""

    # Of kind tagged.
    argument: str = ""
    """The mark before the name of an argument."""
    key_end: str = ""
    """The mark behind the name of an argument. White space may stand between it and `value`."""
    value: str = ""
    value_end: str = ""
    has_newlines: bool = False
    """Whether one newline stands before a value and one behind it."""
    tells_text: bool = False
    """Whether the mark before a value says `true` for text and `false` for JSON, before `value`."""
    untyped_is_text: bool = False
    """Whether a value without a schema is text; otherwise it is JSON if it can be read so."""

    # Of all kinds.
    reasoning: tuple[str, str] = THINK
    """The marks around the model's reasoning."""
    is_told: bool = False
    """Whether the node tells the model of the tools and of this format, because its template does not."""

    @property
    def takes_tools(self) -> bool:
        """Whether calls of this format can be read by this release."""
        return self.kind in KINDS

    @property
    def beginnings(self) -> tuple[str, ...]:
        """The marks at which a list of calls or a call begins in a text. A model may leave the first one out."""
        marks = (self.section, self.call) if self.call[:1] in ("<", "[") else (self.section or self.call,)
        return tuple(mark for mark in marks if mark)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of calls and reasoning. They stay in a text even if they are special tokens."""
        found = (getattr(self, one.name) for one in fields(self) if one.name in _OF_MARKS)
        return tuple({mark: None for mark in (*found, *self.reasoning) if mark.strip()})


_OF_MARKS = frozenset(
    (
        "section",
        "section_end",
        "call",
        "call_end",
        "name_end",
        "id_mark",
        "id_end",
        "argument",
        "key_end",
        "value",
        "value_end",
    )
)

NO_CALLS = ToolFormat("none")
_QWEN: dict[str, Any] = {"call": "<function=", "name_end": ">", "argument": "<parameter=", "key_end": ">"} | {
    "value_end": "</parameter>",
    "call_end": "</function>",
    "has_newlines": True,
    "section_per_call": True,
    "untyped_is_text": True,
    "padding": "\n",
    "between": "\n",
}
_INVOKE: dict[str, Any] = {"name_end": '">', "key_end": '">', "padding": "\n", "between": "\n"}
_DSML: dict[str, Any] = {
    **_INVOKE,
    "call": '<｜DSML｜invoke name="',
    "call_end": "</｜DSML｜invoke>",
    "argument": '<｜DSML｜parameter name="',
    "key_end": '" string="',
    "value": '">',
    "value_end": "</｜DSML｜parameter>",
    "tells_text": True,
}
_ARG_KEY: dict[str, Any] = {
    "argument": "<arg_key>",
    "key_end": "</arg_key>",
    "value": "<arg_value>",
    "value_end": "</arg_value>",
}
_DEEPSEEK: dict[str, Any] = {"section": "<｜tool▁calls▁begin｜>", "section_end": "<｜tool▁calls▁end｜>"} | {
    "call": "<｜tool▁call▁begin｜>",
    "name_end": "<｜tool▁sep｜>",
    "call_end": "<｜tool▁call▁end｜>",
}


def _table(*formats: ToolFormat) -> Mapping[str, ToolFormat]:
    return MappingProxyType({form.name: form for form in formats})


FORMATS = _table(
    ToolFormat("hermes", "json", call="<tool_call>", call_end="</tool_call>", padding="\n", between="\n"),
    ToolFormat("llama3_json", "json", call="<|python_tag|>", is_bare=True, arguments_key="parameters", between="; "),
    ToolFormat("mistral", "json", section="[TOOL_CALLS]", is_list=True, between=", "),
    ToolFormat(
        "mistral_args", "named", call="[TOOL_CALLS]", name_end="[ARGS]", id_mark="[CALL_ID]"
    ),  # Mistral's tokenizers from version 11 on.
    ToolFormat("qwen3_coder", "tagged", "<tool_call>", "</tool_call>", **_QWEN),
    ToolFormat("seed_oss", "tagged", "<seed:tool_call>", "</seed:tool_call>", **_QWEN),
    ToolFormat("glm45", "tagged", call="<tool_call>", call_end="</tool_call>", padding="\n", between="\n", **_ARG_KEY),
    ToolFormat(
        "hunyuan",
        "tagged",
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        "<tool_call:opensource>",
        "</tool_call:opensource>",
        name_end="<tool_sep:opensource>",
        padding="\n",
        between="\n",
        argument="<arg_key:opensource>",
        key_end="</arg_key:opensource>",
        value="<arg_value:opensource>",
        value_end="</arg_value:opensource>",
    ),
    ToolFormat(
        "minimax_m2",
        "tagged",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="',
        "</invoke>",
        argument='<parameter name="',
        value_end="</parameter>",
        **_INVOKE,
    ),
    ToolFormat("deepseek_v32", "tagged", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", **_DSML),
    ToolFormat("deepseek_v4", "tagged", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", **_DSML),
    ToolFormat("deepseek_v31", "named", **_DEEPSEEK),
    ToolFormat(
        "kimi_k2",
        "named",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        name_prefix="functions.",
        name_end="<|tool_call_argument_begin|>",
        counts_calls=True,
    ),
    ToolFormat(
        "solar",
        "named",
        "<|tool_calls|>",
        call="<|tool_call:begin|>",
        call_end="<|tool_call:end|>",
        name_end="<|tool_call:args|>",
        id_end="<|tool_call:name|>",
    ),
    ToolFormat("functionary_v31", "named", call="<function=", call_end="</function>", name_end=">"),
    ToolFormat("apertus", "named", "<|tools_prefix|>[", "]<|tools_suffix|>", '{"', "}", ", ", name_end='": '),
    ToolFormat("apriel", "json", "<tool_calls>", "</tool_calls>", is_list=True, between=", "),
    ToolFormat("minimax_m1", "json", "<tool_calls>", "</tool_calls>", padding="\n", between="\n"),
    ToolFormat("nemotron_v2", "json", "<TOOLCALL>", "</TOOLCALL>", is_list=True, between=", "),
    ToolFormat("granite", "json", "<|tool_call|>", is_list=True, between=", "),
    ToolFormat(
        "cohere",
        "json",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        is_list=True,
        between=", ",
        name_key="tool_name",
        arguments_key="parameters",
    ),
    ToolFormat("gigachat31", "json", call="<|function_call|>"),
)
"""The formats by name. A node tries them in this order."""
FALLBACK = ToolFormat(
    "json", "json", call="<tool_call>", call_end="</tool_call>", padding="\n", between="\n", is_told=True
)
"""The format for models without a known one. `telling.py` of the engine tells the model of it."""
BY_NAME = MappingProxyType({"none": NO_CALLS, **FORMATS, FALLBACK.name: FALLBACK})
"""The values of `tool_parser`."""
TELLING_MARKS = frozenset(mark for form in FORMATS.values() for mark in form.marks if len(mark) > 2)
"""Marks that stay in the output text even if the tokenizer has them as special tokens."""
