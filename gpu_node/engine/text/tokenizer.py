"""The model's tokenizer, read without transformers: it encodes texts and chats, and knows the bytes of each token."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from penstock.contract.chat_shapes import ChatShape
from penstock.contract.errors import ConfigError, PromptTooLongError, RequestError, TooCostlyError, UnavailableError
from penstock.contract.tasks import MAX_OUTPUT_BYTES
from penstock.contract.tool_formats import (
    DERIVED,
    NO_CALLS,
    REASONING_MARKS,
    THINK,
    ToolFormat,
    marks_as_tokens,
    telling_marks,
    tokens_in,
)
from penstock.contract.tools import ReasoningParserName, reasoning_parser_for
from penstock.gpu_node.engine.text.chat import ChatTemplate, ends_of_turn, reasoning_marks_of, template_messages
from penstock.gpu_node.engine.text.encoder import (
    MAX_CACHED_PROMPT_TOKENS,
    MIN_CACHED_CHARS,
    NO_OWNER,
    ChatEncoder,
    LongTextEncoder,
    Owner,
    TokenCache,
    batch_token_ids_of,
    of_tokenizer,
    separator_of,
)
from penstock.gpu_node.engine.text.longest_token import longest_token
from penstock.gpu_node.engine.text.output import Detokenizer
from penstock.gpu_node.engine.text.prompts import NO_PROMPTS
from penstock.gpu_node.engine.text.reasoning import ReasoningRule
from penstock.gpu_node.engine.text.reasoning_format import (
    EarlierReasoning,
    earlier_reasoning_of,
    reasoning_parser_of,
    takes_effort,
    thinking_switches_of,
)
from penstock.gpu_node.engine.text.recognition import ToolUseOfTemplate, recognized
from penstock.gpu_node.engine.text.repairs import (
    NO_REFUSALS,
    Refusals,
    described_tools,
    moved_messages,
    refusals_of,
    repaired_calls,
)
from penstock.gpu_node.engine.text.telling import with_tools_written
from penstock.gpu_node.engine.text.token_bytes import byte_fallback, byte_level, tokens_by_id
from penstock.gpu_node.engine.text.tokenizer_files import OF_TOOLS, read_tokenizer_files
from penstock.gpu_node.model.protocol import WrittenTokenizer
from penstock.runtime.reading import reading


class Tokenizer:
    """The tokenizer of a model folder. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int = 0,
        written: WrittenTokenizer | None = None,
        chat_template: str | None = None,
        tool_parser: str | None = None,
        reasoning_parser: ReasoningParserName | None = None,
        generates: bool = True,
    ) -> None:
        """`vocab_size`: the model's, which may be padded beyond the tokenizer's; the additional ids have no text.

        `written`: the tokenizer in memory, if this process has just written it to the folder. `chat_template` replaces
        that of the folder. `tool_parser`: the format of calls, by name; None: the one that the template shows.
        `reasoning_parser`: the same for the reasoning. `generates`: whether the model's tokens become text one after
        another.

        Raises ConfigError for a folder without a usable tokenizer, or with an unsupported kind.
        """
        # Imported late: a folder without a complete tokenizer.json imports transformers.
        from penstock.gpu_node.model.checkpoint.tokenizer_export import plain_tokenizer

        with reading(folder / "tokenizer.json"):
            files = read_tokenizer_files(plain_tokenizer(folder), None if written is None else written.backend)
            self._backend: Any = files.backend
            separator = separator_of(files.backend)
            self._long_texts = LongTextEncoder(files.backend, separator)
        self.embedding_prompts = NO_PROMPTS
        """What stands before texts that the model embeds."""
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._chats = ChatEncoder(files.backend, separator, self._long_texts)
        self._prompts = TokenCache(MAX_CACHED_PROMPT_TOKENS)
        self._special_tokens = files.special_tokens
        templates = files.chat_templates if chat_template is None else {"default": chat_template}
        source = templates.get("default") or templates.get(OF_TOOLS)
        self._template = None if source is None else ChatTemplate(source, files.special_tokens)
        of_tools = templates.get(OF_TOOLS)
        is_same = of_tools is None or of_tools == source
        self._tool_template = self._template if is_same else ChatTemplate(of_tools or "", files.special_tokens)
        """The template of chats with tools."""
        with reading(folder / "tokenizer.json"):
            self._decoder_steps = _decoder_steps(self._backend, checked=generates)
            tokens = tokens_by_id(self._backend) if written is None else written.tokens
            self.token_bytes = self._token_table(tokens, vocab_size)
            """The bytes of each token; empty for special tokens and for ids without a token."""
        own = folder / "chat_template.jinja"
        with reading(own if own.is_file() or chat_template is not None else folder / "tokenizer_config.json"):
            # The template compiles meanwhile. One that does not is an error of the model's folder.
            _ = self.takes_tools
        self._show_derived_marks()

    @property
    def backend(self) -> Any:
        """The library's tokenizer, for texts that come in pairs or need the places of their tokens."""
        return self._backend

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        """Encode a text; `framed`: with the special tokens that the model expects around it."""
        return self._long_texts.encode(text, framed=framed)

    def encode_prompt(self, text: str, owner: Owner) -> list[int]:
        """Encode a plain prompt, with the special tokens around it. A long one is looked up: its owner may repeat it.

        Several prompts in one call of the library take as long as one after another (30 to 50 µs for 80 characters).
        """
        if len(text) < MIN_CACHED_CHARS:
            return self._long_texts.encode(text, framed=True)
        return list(self._prompts.ids_of(owner, text, partial(self._long_texts.encode, framed=True)))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts in one call of the library, each with the special tokens that the model expects around it."""
        return batch_token_ids_of(self._backend, texts, framed=True)

    def encode_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token sequences of words, of each at the start of a text or after a space, and inside a word."""
        texts = [text for word in words for text in (f" {word.lstrip()}", word)]
        encoded = batch_token_ids_of(self._backend, texts, framed=False) if texts else []
        return list(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: str | None = None,
        template_kwargs: str | None = None,
        *,
        framed: bool = False,
        now: datetime | None = None,
        owner: Owner = NO_OWNER,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Encode a chat up to where the assistant's answer begins. `developer` counts as `system`.

        `tools` and `template_kwargs`, the template's further variables, are JSON texts. `framed` adds the special
        tokens of a text, although templates usually contain them. `now` is the time that the template may print; None:
        the clock's. Only texts of the same `owner` share cached pieces.

        Blocks while the template renders. Raises RequestError if the model has no chat template, or if its template
        refuses the chat or takes too much; PromptTooLongError if the text certainly has more than `max_tokens` tokens.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; send a prompt instead", param="messages")
        reasoning_key = self._earlier_reasoning.key if any(one.get("reasoning") for one in messages) else None
        rendered = moved_messages(template_messages(messages, reasoning_key), self.refusals)
        offered: Sequence[Mapping[str, Any]] | None = None if tools is None else json.loads(tools)
        more: dict[str, Any] = {}
        if offered is not None or any("tool_calls" in one or one["role"] == "tool" for one in rendered):
            rendered, offered, more = self._with_tools(rendered, offered)
        variables = more if template_kwargs is None else more | json.loads(template_kwargs)
        template = self._tool_template if offered is not None and self._tool_template else self._template
        try:
            text = template.render(rendered, offered, variables, now)
        except RequestError as error:
            if reasoning_key is None or isinstance(error, TooCostlyError):
                raise
            # That of gpt-oss refuses some messages that have reasoning. A conversation goes on without it.
            plain = [{name: value for name, value in one.items() if name != reasoning_key} for one in rendered]
            text = template.render(plain, offered, variables, now)
        if max_tokens is not None:
            self._require_fit(text, max_tokens)
        return self._long_texts.encode(text, framed=True) if framed else self._chats.encode(text, owner)

    def _with_tools(
        self, messages: list[dict[str, Any]], offered: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None, dict[str, Any]]:
        """Return messages with calls and results as the template takes them, and the tools and variables it gets."""
        use, refusals = self.tool_use, self.refusals
        if use is None:
            if offered is None:
                return messages, None, {}
            message = "this model takes no tools (--tool-parser none); send the request without tools"
            raise RequestError(message, param="tools")
        if offered is None and refusals.calls_without_tools:
            use = replace(use, shows_calls=False, shows_results=False)
        written = with_tools_written(messages, offered, use)
        written = repaired_calls(written, refusals)
        if offered is None or not use.offers_tools:
            return written, None, {}
        return use.offer(written, described_tools(offered) if refusals.missing_description else offered)

    def _require_fit(self, text: str, max_tokens: int) -> None:
        """Refuse a text that is too long at the most bytes per token. To encode it could take hundreds of MiB."""
        if len(text) <= max_tokens or not self.max_token_bytes:
            return
        min_tokens = math.ceil(len(text.encode(errors="surrogatepass")) / self.max_token_bytes)
        if min_tokens > max_tokens:
            raise PromptTooLongError(
                f"This model's maximum context length is {max_tokens} tokens; the prompt has at least {min_tokens}",
                param="prompt",
            )

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, without its changes for chats."""
        return self._template

    @property
    def has_chat_template(self) -> bool:
        """Whether the model's files have a chat template."""
        return self._template is not None

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template accepts tools."""
        return self._tool_template is not None and self._tool_template.takes_tools

    @cached_property
    def tool_use(self) -> ToolUseOfTemplate | None:
        """How the model is offered tools; None without a chat template. Renders some chats at the first use."""
        if self._tool_template is None or self._tool_parser == "none":
            return None
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        return recognized(self._tool_template, added, self._tool_parser, self.refusals)

    @cached_property
    def refusals(self) -> Refusals:
        """What the chat template refuses. Renders some chats at the first use."""
        return NO_REFUSALS if self._tool_template is None else refusals_of(self._tool_template)

    @property
    def tool_format(self) -> ToolFormat:
        """The format of the model's tool calls and of its reasoning."""
        form = NO_CALLS if self.tool_use is None else self.tool_use.form
        return form if self._template is None else replace(form, reasoning=reasoning_marks_of(self._template))

    @property
    def reasoning_parser(self) -> ReasoningParserName:
        """The parser of the model's reasoning: the one that was given, or the one that its chat template shows."""
        return self._reasoning_parser or self._shown_reasoning_parser

    @cached_property
    def _shown_reasoning_parser(self) -> ReasoningParserName:
        return "none" if self._template is None else reasoning_parser_of(self._template)

    @cached_property
    def thinking_switches(self) -> tuple[str, ...]:
        """The settings of the chat template's variables that turn the reasoning on or off.

        They say how the parser that the template shows differs with variables, and nothing of another one.
        """
        if self._template is None or self.reasoning_parser != self._shown_reasoning_parser:
            return ()
        return thinking_switches_of(self._template)

    @property
    def takes_effort(self) -> bool:
        """Whether the chat template has the variable of a reasoning effort."""
        return self._template is not None and takes_effort(self._template)

    @cached_property
    def _earlier_reasoning(self) -> EarlierReasoning:
        if self._template is None:
            return EarlierReasoning(None, "")
        return earlier_reasoning_of(self._template, reasoning_marks_of(self._template))

    def reasoning_rule(self, template_kwargs: str | None) -> ReasoningRule | None:
        """Return how an answer reasons whose request sets these variables; None if the model does not reason.

        The first call renders some chats.
        """
        parser = reasoning_parser_for(self.reasoning_parser, self.thinking_switches, template_kwargs)
        if parser == "none" or self._template is None:
            return None
        rule = self._reasoning_rule
        return replace(rule, opening=b"", opening_id=None) if parser == "think_open" else rule

    @cached_property
    def _reasoning_rule(self) -> ReasoningRule:
        opening, closing = THINK if self._template is None else reasoning_marks_of(self._template)
        # In an answer of messages, a header follows.
        closing_ids = self.encode(self._earlier_reasoning.closing + self.tool_format.turn, framed=False)
        return ReasoningRule(
            closing.encode(),
            tuple(closing_ids),
            self.token_bytes,
            opening.encode(),
            self.id_of(opening),
            self._strips_first_space,
        )

    @property
    def moved_shapes(self) -> tuple[ChatShape, ...]:
        """The shapes of chats whose messages are merged or moved, because the chat template refuses them."""
        return self.refusals.moved_shapes

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens."""
        detokenizer = self.new_detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text, special tokens included. Raises RequestError for an unknown id or too long a text."""
        known, size = self.token_bytes, 0
        for token_id in token_ids:
            if token_id >= len(known):
                message = f"token id {token_id} is not in the model's vocabulary of {len(known)} tokens"
                raise RequestError(message, param="prompt")
            size += len(known[token_id])
        if size > MAX_OUTPUT_BYTES:
            raise RequestError(f"the text of these tokens has more than {MAX_OUTPUT_BYTES} bytes", param="prompt")
        with of_tokenizer("decode these tokens"):
            # The library releases the GIL only for batches.
            (text,) = self._backend.decode_batch([list(token_ids)], skip_special_tokens=False)
        return str(text)

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def name_of(self, token_id: int) -> bytes | str:
        """Return a token's bytes; for a token without text its name, as a str."""
        token = self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""
        return token or self._backend.id_to_token(token_id) or ""

    def id_of(self, token: str) -> int | None:
        """Return the id of the token with exactly this name, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def to_json(self, vocab_size: int | None = None) -> str:
        """Return the tokenizer in the format of tokenizer.json, without tokens for which the model has no logit.

        vocab_size: the number of logits; None for all tokens.
        """
        text: str = self._backend.to_str()
        if vocab_size is None or len(self.token_bytes) <= vocab_size:
            return text
        return _without_ids(text, vocab_size)

    def new_detokenizer(self, *, begins_text: bool = True) -> Detokenizer:
        """Return a detokenizer at the start of a text, or after the text of a prompt.

        Some tokenizers put a space before each text. It is dropped, but not from a text that continues a prompt.
        """
        return Detokenizer(self.token_bytes, strip_first_space=begins_text and self._strips_first_space)

    @cached_property
    def max_token_bytes(self) -> int:
        """Maximum bytes of text that one token can stand for; 0 if there is no bound."""
        tokens = tokens_by_id(self._backend)
        return longest_token(self._backend, tokens, self.token_bytes, is_byte_level=self._is_byte_level)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids of the end-of-sequence token that the tokenizer names, and of those that end a turn of a chat."""
        eos = self._special_tokens.get("eos_token")
        texts = set() if eos is None else {eos}
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        for template in {self._template, self._tool_template}:
            if template is not None:
                texts |= ends_of_turn(template, added) - self._opening_tokens
        token_ids = (self._backend.token_to_id(text) for text in texts)
        return frozenset(token_id for token_id in token_ids if token_id is not None)

    @property
    def _opening_tokens(self) -> frozenset[str]:
        """The tokens with which a call begins. Some templates also put them behind an answer."""
        with suppress(TooCostlyError, UnavailableError):
            form = self.tool_format
            return frozenset() if form.is_told else frozenset(tokens_in(form.section or form.call))
        return frozenset()

    def _token_table(self, tokens: Sequence[str], vocab_size: int) -> list[bytes]:
        added_tokens = self._backend.get_added_tokens_decoder()
        sources = "".join(one.source for one in (self._template, self._tool_template) if one is not None)
        telling = telling_marks(sources, chain.from_iterable(REASONING_MARKS))
        table = byte_level(tokens) if self._is_byte_level else byte_fallback(tokens)
        table += [b""] * (max(vocab_size, max(added_tokens, default=-1) + 1) - len(table))
        for token_id, added in added_tokens.items():
            is_silent = added.special and added.content not in telling
            table[token_id] = b"" if is_silent else added.content.encode()
        return table

    def _show_derived_marks(self) -> None:
        """Keep special tokens in the output text that are marks of a format which no table knows."""
        source = "" if self._tool_template is None else self._tool_template.source
        added_tokens = self._backend.get_added_tokens_decoder()
        silent = {
            i: one.content for i, one in added_tokens.items() if not self.token_bytes[i] and one.content in source
        }
        if not silent or "tool_calls" not in source:
            return
        with suppress(TooCostlyError, UnavailableError):
            form = self.tool_format
            if form.name == DERIVED:
                marks = marks_as_tokens(form.marks)
                for token_id, text in silent.items():
                    self.token_bytes[token_id] = text.encode() if text in marks else b""

    @property
    def _is_byte_level(self) -> bool:
        return any(step["type"] == "ByteLevel" for step in self._decoder_steps)

    @property
    def _strips_first_space(self) -> bool:
        return any(step["type"] == "Strip" and step["start"] > 0 for step in self._decoder_steps)


def _without_ids(text: str, num_ids: int) -> str:
    """Return a tokenizer.json without the tokens from an id on."""
    spec: dict[str, Any] = json.loads(text)
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < num_ids]
    model = spec["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = vocab[:num_ids]
    else:
        model["vocab"] = kept = {token: token_id for token, token_id in vocab.items() if token_id < num_ids}
        if len(kept) < len(vocab) and "merges" in model:
            pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= kept.keys()]
    return json.dumps(spec, ensure_ascii=False)


def _decoder_steps(backend: Any, *, checked: bool) -> list[dict[str, Any]]:
    """Return the decoder's steps from tokens to text. If `checked`, raises ConfigError for unsupported steps."""
    spec: dict[str, Any] = (
        json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    )
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = {step["type"] for step in steps}
    if checked and "ByteLevel" not in kinds and not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        raise ConfigError(f"tokenizer decoder {sorted(kinds)} is not supported; supported: ByteLevel or ByteFallback")
    return steps
