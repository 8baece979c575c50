"""Formats of tool calls as data: nodes and gateways read the same record, and a new format is one entry of a table.

A *list* of calls may stand between `section` and `section_end`; each call begins with `call` and ends with `call_end`.
How a call says its name and arguments is its kind:

- `json`: an object with the name and the arguments under two keys.
- `named`: the name, then the arguments as a JSON object.
- `tagged`: the name, then each argument between tags of its own. The text of a value is typed by the function's schema.
- `expressions`: the name and the arguments as in a call of a programming language. The values have types of their own.

An answer may consist of messages, each with a *header* that says whether it is reasoning, text or a call.

The readers are in `contract/calls`, the grammars in the engine's `structured/call_grammar.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

KINDS = ("json", "named", "tagged", "expressions")
"""The kinds that this release reads and writes. A record of another kind refuses tools."""
THINK = ("<think>", "</think>")
REASONING_MARKS = (
    THINK,
    ("[THINK]", "[/THINK]"),
    ("<mm:think>", "</mm:think>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    (" to=self<|message|>", "<|eom|>"),
    ("Here is my thought process:", "Here is my response:"),
)
"""The marks around reasoning by which templates tell it: of Qwen and most models, Mistral, MiniMax, Seed, Cohere, Gemma
4, harmony (gpt-oss), Kimi K3, muse and Granite 3.2."""


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
    """Whether the objects or expressions stand in a list."""
    is_fenced: bool = False
    """Whether the list stands in a fence of Markdown."""
    name_key: str = "name"
    arguments_key: str = "arguments"

    # Of kinds named, tagged and expressions.
    name_prefix: str = ""
    """What stands before the function's name, if the model writes it."""
    name_end: str = ""
    """The mark behind the name. Empty: the name ends where the arguments or the end of the call begin."""
    id_mark: str = ""
    """The mark between the name and the id of a call, if the model writes ids."""
    id_end: str = ""
    """The mark between the id of a call and its name, if the model writes ids first."""
    number_mark: str = ""
    """The mark between the name and the number of a call, if the model numbers calls."""

    # Of kind tagged.
    argument: str = ""
    """The mark before the name of an argument."""
    key_end: str = ""
    """The mark behind the name of an argument. White space may stand between it and `value`."""
    value: str = ""
    value_end: str = ""
    has_newlines: bool = False
    """Whether one newline stands before a value and one behind it."""
    ends_with_key: bool = False
    """Whether the argument's name and `key_end` stand behind `value_end`. Inner values are then such tags too."""
    has_cdata: bool = False
    """Whether a value may stand between `CDATA` and its end."""
    tells_text: bool = False
    """Whether the mark before a value says `true` for text and `false` for JSON, before `value`."""
    tells_type: bool = False
    """Whether the mark before a value names its JSON type, before `value`."""
    untyped_is_text: bool = False
    """Whether a value without a schema is text; otherwise it is JSON if it can be read so."""

    # Of kind expressions. The arguments begin behind `name_end`.
    arguments_end: str = ""
    assigns: str = ""
    """What stands between the name of an argument and its value."""
    comma: str = ""
    """What our writer puts between two arguments and between two values."""
    text_mark: str = ""
    """The mark before and behind a text, which has no escapes. Empty: texts are quoted as in Python."""

    # Of answers in messages.
    header: str = ""
    """The mark at which the header of a message begins. An answer begins inside the first header."""
    header_end: str = ""
    """The mark between a header and its message."""
    message_ends: tuple[str, ...] = ()
    """The marks at which a message ends; it also ends at the next header."""
    reasoning_header: str = ""
    """What the header of reasoning contains."""
    call_header: str = ""
    """What stands before the name of a function in a header of a call. Other messages are text, and may hold calls."""
    text_header: str = ""
    """The header of a text. With it, any other header that is no reasoning is the name of a function."""
    turn: str = ""
    """What a model writes before each message but the first, up to what tells its kind."""
    begun: str = ""
    """What the prompt has already written of the first mark."""
    recipient: tuple[str, str] = ("", "")
    """What the grammars put around any name of a receiver before the mark of a call."""

    # Of all kinds.
    is_single: bool = False
    """Whether an answer ends with its first call."""
    text_opening: str = ""
    """The mark before the text of an answer, which is no part of it."""
    text_end: str = ""
    dropped: tuple[str, ...] = ()
    """Marks in the text that are no part of it."""
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
        marks = (self.section, self.call) if self.call[:1] in ("", "<", "[", "]") else (self.section or self.call,)
        return tuple(mark for mark in marks if mark)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of calls and reasoning. They stay in a text even if they are special tokens."""
        found = (getattr(self, one.name) for one in fields(self) if one.name in _OF_MARKS)
        return tuple({mark: None for mark in (*found, *self.reasoning) if mark.strip()})

    @property
    def frame_marks(self) -> tuple[str, ...]:
        """All marks around the messages and texts of an answer."""
        found = (self.header, self.header_end, *self.message_ends, self.text_opening, self.text_end, *self.dropped)
        return tuple({mark: None for mark in found if mark.strip()})

    @property
    def has_frame(self) -> bool:
        """Whether marks stand around the text of an answer even without calls."""
        return bool(self.frame_marks)


_OF_MARKS = frozenset(
    (
        "section",
        "section_end",
        "call",
        "call_end",
        "name_end",
        "id_mark",
        "id_end",
        "number_mark",
        "argument",
        "key_end",
        "value",
        "value_end",
        "text_mark",
    )
)
CDATA = ("<![CDATA[", "]]>")
FENCE, FENCE_END = "```json", "```"
"""The fence of Markdown around a list of calls."""
ITEM = "item"
"""The name of the tags around the members of a list, where inner values are tags."""
_MINIMAX = "]<]minimax[>["
_TOKEN = re.compile(rf"{re.escape(_MINIMAX)}|<[^<>\s]+>|\[[A-Z_/]+\]")


def tokens_in(mark: str) -> list[str]:
    """Return the parts of a mark that may be special tokens of a tokenizer, and the texts between them."""
    parts, at = list[str](), 0
    for found in _TOKEN.finditer(mark):
        parts += [mark[at : found.start()], found[0]]
        at = found.end()
    return [part for part in (*parts, mark[at:]) if part]


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
_CALL: dict[str, Any] = {"name_end": "(", "arguments_end": ")", "assigns": "=", "comma": ", "}
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
        "deepseek_v3",
        "named",
        **_DEEPSEEK | {"name_end": "\n```json\n", "call_end": "\n```<｜tool▁call▁end｜>"},
        name_prefix="function<｜tool▁sep｜>",
        between="\n",
    ),
    ToolFormat(
        "kimi_k2",
        "named",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        name_prefix="functions.",
        name_end="<|tool_call_argument_begin|>",
        number_mark=":",
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
    ToolFormat(
        "harmony",
        "named",
        call="<|channel|>commentary to=functions.",
        name_end="<|message|>",
        header="<|start|>",
        header_end="<|message|>",
        message_ends=("<|end|>", "<|call|>", "<|return|>"),
        reasoning_header="<|channel|>analysis",
        call_header="to=functions.",
        turn="<|start|>assistant",
        is_single=True,
        text_opening="<|channel|>final<|message|>",
    ),  # `<|call|>` ends the answer, so it is no part of its text.
    ToolFormat(
        "functionary_v32",
        "named",
        call=">>>",
        name_end="\n",
        header=">>>",
        header_end="\n",
        text_header="all",
        begun=">>>",
        text_opening=">>>all\n",
    ),
    ToolFormat("apertus", "named", "<|tools_prefix|>[", "]<|tools_suffix|>", '{"', "}", ", ", name_end='": '),
    ToolFormat("apriel", "json", "<tool_calls>", "</tool_calls>", is_list=True, between=", "),
    ToolFormat("minimax_m1", "json", "<tool_calls>", "</tool_calls>", padding="\n", between="\n"),
    ToolFormat("functools", "json", "functools", is_list=True, between=", "),
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
    ToolFormat(
        "gigachat3",
        "json",
        call="<|message_sep|>\n\nfunction call<|role_sep|>",
        padding="\n",
        dropped=("<|message_sep|>",),
        is_single=True,
    ),
    ToolFormat(
        "command_r",
        "json",
        "Action:",
        is_list=True,
        is_fenced=True,
        between=", ",
        name_key="tool_name",
        arguments_key="parameters",
    ),
    ToolFormat(
        "kimi_k3",
        "tagged",
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        '<|open|>call tool="',
        "<|close|>call<|sep|>",
        name_end='"<|sep|>',
        number_mark='" index="',
        argument='<|open|>argument key="',
        key_end='" type="',
        value='"<|sep|>',
        value_end="<|close|>argument<|sep|>",
        tells_type=True,
        text_opening="<|open|>response<|sep|>",
        text_end="<|close|>response<|sep|>",
        dropped=("<|close|>message<|sep|>",),
    ),
    ToolFormat(
        "minimax_m3",
        "tagged",
        f"{_MINIMAX}<tool_call>",
        f"{_MINIMAX}</tool_call>",
        f'{_MINIMAX}<invoke name="',
        f"{_MINIMAX}</invoke>",
        "\n",
        "\n",
        name_end='">',
        argument=f"{_MINIMAX}<",
        key_end=">",
        value_end=f"{_MINIMAX}</",
        ends_with_key=True,
        dropped=("</mm:think>",),
    ),
    ToolFormat(
        "minicpm5",
        "tagged",
        call='<function name="',
        call_end="</function>",
        between="\n",
        name_end='">',
        argument='<param name="',
        key_end='">',
        value_end="</param>",
        has_cdata=True,
    ),
    ToolFormat(
        "muse",
        "tagged",
        "<atem:function_calls>",
        "</atem:function_calls>",
        '<atem:invoke name="',
        "</atem:invoke>",
        argument='<atem:parameter name="',
        value_end="</atem:parameter>",
        **_INVOKE,
        header="<|start|>",
        header_end="<|message|>",
        message_ends=("<|eom|>", "<|eot|>"),
        reasoning_header="to=self",
        turn="<|start|>assistant",
        recipient=(" to=", "<|message|>"),
        is_single=True,
        text_opening=" to=user<|message|>",
    ),
    ToolFormat(
        "gemma4",
        "expressions",
        call="<|tool_call>call:",
        call_end="<tool_call|>",
        name_end="{",
        arguments_end="}",
        assigns=":",
        comma=",",
        text_mark='<|"|>',
    ),
    ToolFormat("lfm2", "expressions", "<|tool_call_start|>", "<|tool_call_end|>", between=", ", is_list=True, **_CALL),
    ToolFormat("olmo3", "expressions", "<function_calls>", "</function_calls>", between="\n", **_CALL),
    ToolFormat(
        "pythonic",
        "expressions",
        "<|python_start|>",
        "<|python_end|>",
        is_bare=True,
        is_list=True,
        between=", ",
        **_CALL,
    ),  # Llama 3.2 and 4. The marks may be missing.
)
"""The formats by name. A node tries them in this order."""
FALLBACK = ToolFormat(
    "json", "json", call="<tool_call>", call_end="</tool_call>", padding="\n", between="\n", is_told=True
)
"""The format for models without a known one. `telling.py` of the engine tells the model of it."""
DERIVED = "derived"
"""The name of formats that a node derives from a template's renderings, because no record of the table fits."""
BY_NAME = MappingProxyType({"none": NO_CALLS, **FORMATS, FALLBACK.name: FALLBACK})
"""The values of `tool_parser`."""


def marks_as_tokens(marks: Iterable[str]) -> frozenset[str]:
    """Return the texts that may be special tokens of a tokenizer: the marks and their parts."""
    return frozenset(part for mark in marks for part in (mark, *tokens_in(mark)) if len(part) > 2)


_OF_FRAMES = marks_as_tokens(mark for form in FORMATS.values() for mark in form.frame_marks)
_OF_CALLS = marks_as_tokens(mark for form in FORMATS.values() for mark in form.marks) - _OF_FRAMES


def telling_marks(source: str, reasoning: Iterable[str]) -> frozenset[str]:
    """Return the marks that stay in the output text even if the tokenizer has them as special tokens.

    source: the chat template's. Marks around messages and texts count only if it has those of a whole format.
    reasoning: the marks of reasoning that templates use.
    """
    found = _OF_CALLS | (marks_as_tokens(reasoning) - _OF_FRAMES)
    for form in FORMATS.values():
        marks = (form.header, form.header_end, form.text_opening, *form.dropped)
        own = [part for mark in marks for part in tokens_in(mark) if _TOKEN.fullmatch(part)]
        if own and all(part in source for part in own):
            found |= marks_as_tokens((*form.frame_marks, *form.marks))
    return found
